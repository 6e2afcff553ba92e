"""The tables of README and docs/results.md, written from the committed results/*.json.

A table is between `<!-- table: softmax -->` and `<!-- end -->`.  The site's build replaces
`<!-- table of the site: softmax -->` by a table that is not committed.  A table's name is an op's,
or one of _OTHERS.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..precisions import SPLITS
from ..tuning.protocol import FALLEN
from . import headline, model_rows, records, sensitivity, startup, stored
from .suite import summary
from .tables import number

HOST_TIME = "host time"  # of a call of each op
SUMMARY = "summary"  # a line per op and dtype
HEADLINE = "headline"  # a line per op
PROFILES = "profiles"  # hardware counters
SENSITIVITY = "sensitivity"  # the errors that `check` finds
FORMATS = "sensitivity by format"
SUITE = "suite"  # the share of a suite's shapes that are ahead
MODEL = "model"  # the steps of whole models
STARTUP = "startup"  # the first call of each op
_OTHERS = {HOST_TIME, SUMMARY, HEADLINE, PROFILES, SENSITIVITY, FORMATS, SUITE, MODEL, STARTUP}
# Dense tensor throughput in TFLOP/s by the operands' bits (NVIDIA's data sheet of the H200, SXM,
# without sparsity).
PEAK_TFLOPS = {"NVIDIA H200": {8: 1979.0, 16: 989.5, 32: 66.9}}
_TABLE = re.compile(r"(<!-- table: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_SITE_TABLE = re.compile(r"<!-- table of the site: ([^>]*?) -->\n")
_VERSIONS = (
    ("CuPy", "cupy"),
    ("NVRTC", "nvrtc"),
    ("torch", "torch"),
    ("QuACK", "quack-kernels"),
    ("Liger", "liger-kernel"),
    ("FlashAttention", "flash-attn-4"),
)
_PROFILED = {  # profile.py's label: column of the table
    "time": "µs",
    "tensor cores busy": "tensor cores, %",
    "L1 and shared memory throughput": "shared memory, %",
    "L2 throughput": "L2, %",
    "DRAM throughput": "DRAM, %",
    "issue slots used": "issue slots, %",
}
_FELL = "†"
_NOT_MEASURED = "Not measured yet.\n"


def load(folder: Path, kind: str = "bench", host: bool = False) -> list[dict[str, Any]]:
    """Load documents of `kind` from folder/*.json, oldest first.  Raises ValueError.

    host: also load those of the host target.
    """
    documents = []
    for path in sorted(folder.glob("*.json")):
        document = stored.read(path)
        wanted = isinstance(document, dict) and document.get("kind") == kind
        if wanted and (host or document["target"] != "host"):
            documents.append(document)
    return sorted(documents, key=lambda document: document["date"])


def are_in(folder: Path) -> bool:
    """Whether a file of the folder was written by one of the tools.  Raises ValueError."""
    documents = map(stored.read, sorted(folder.glob("*.json")))
    return any(isinstance(x, dict) and x.get("kind") in records.KINDS for x in documents)


def latest(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[Any, Any]]]:
    """Return (document, row) of each row's latest result, by table name, device and row key."""
    found: dict[str, dict[str, dict[Any, Any]]] = {}
    for document in documents:
        device = document["machine"]["device"]
        for row in document["rows"]:
            key = tuple(row["shape"]), row["dtype"]
            found.setdefault(row["op"], {}).setdefault(device, {})[key] = document, row
        for op, times in document["host_time_us"].items():
            found.setdefault(HOST_TIME, {}).setdefault(device, {})[op] = document, times
    return found


def tables(documents: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return Markdown by table name."""
    found = latest(documents)
    written = {
        name: "\n".join(
            _caption(device, rows.values())
            + (_host_time_table(rows) if name == HOST_TIME else _op_table(device, rows.values()))
            for device, rows in devices.items()
        )
        for name, devices in found.items()
    }
    found.pop(HOST_TIME, None)
    devices = dict.fromkeys(device for of_op in found.values() for device in of_op)
    if devices:
        written[SUMMARY] = "\n".join(_summary(device, found) for device in devices)
        written[HEADLINE] = "\n".join(
            _device_caption(device, found) + markdown(headline.table(_with_all_ops(lines)), left=4)
            for device, lines in headlines(found).items()
        )
    return written


def headlines(found: dict[str, dict[str, dict[Any, Any]]]) -> dict[str, list[headline.Line]]:
    """Return headline lines by device, one or two per op.  found: from `latest`."""
    lines: dict[str, list[headline.Line]] = {}
    for op in sorted((op for op in found if op != HOST_TIME), key=place_of_op()):
        for device, rows in found[op].items():
            of_op = headline.lines(op, [row for _, row in rows.values()])
            lines.setdefault(device, []).extend(of_op)
    return lines


def _with_all_ops(lines: Sequence[headline.Line]) -> list[headline.Line]:
    """Add lines for ops without results."""
    from .. import OPS

    measured = {one.op for one in lines}
    place = place_of_op()
    more = [headline.not_measured(op.name, op.dtypes) for op in OPS if op.name not in measured]
    return sorted((*lines, *more), key=lambda one: place(one.op))


def pictures(folder: Path) -> dict[str, str]:
    """Return README's images by file name, for the first measured device."""
    for device, lines in headlines(latest(load(folder))).items():
        return {
            f"speedup-{theme}.svg": headline.svg(lines, device, theme)
            for theme in ("light", "dark")
        }
    return {}


def _device_caption(device: str, found: dict[str, dict[str, dict[Any, Any]]]) -> str:
    rows = [row for of_op in found.values() for row in of_op.get(device, {}).values()]
    return _caption(device, rows)


def floor_us(device: str, row: dict[str, Any]) -> float:
    """Return the minimum time of a row in us: a plain copy (or read) of its bytes in the same run.

    If the device's dense peak is known and takes longer for the row's operations, that time.
    """
    peaks = PEAK_TFLOPS.get(device)
    if not (peaks and row["flops"]):
        return row["plain_us"]
    name, _, options = row["dtype"].partition(":")
    pair, flops = name.split("*"), row["flops"]
    bits = 8 if all(name.startswith(("float8", "int8")) for name in pair) else 16
    if name == "float32":
        if "fma" in options:
            bits = 32
        else:  # products of 16-bit parts
            flops *= next((SPLITS[x].products for x in options.split("+") if x in SPLITS), 3)
    return max(row["plain_us"], flops / peaks[bits] * 1e-6)


def _summary(device: str, found: dict[str, dict[str, dict[Any, Any]]]) -> str:
    """Return a line per op and dtype: its rows' times against floors and the best peer."""
    from .. import OPS

    lines = [("op", "dtype", "libraries", "rows", "% of floor", "fastest library's time over ours")]
    documents, all_right = [], True
    for op in (op.name for op in OPS if op.name in found):
        groups: dict[str, list[dict[str, Any]]] = {}
        for document, row in found[op].get(device, {}).values():
            documents.append(document)
            if row["results"] and row["results"][0]["median_us"]:
                kind = "*".join(headline.operands(row["dtype"]))
                groups.setdefault(kind, []).append(row)
        for dtype, rows in groups.items():
            peers = _peers_right(rows)
            all_right = all_right and all(peers.values())
            names = ", ".join(name if right else f"{name}*" for name, right in peers.items())
            lines.append((f"`{op}`", dtype, names or "-", *_spreads(device, rows)))
    note = "" if all_right else "\n\\* misses our error bound in some rows.\n"
    caption = _caption(device, [(document, None) for document in documents])
    return caption + markdown(lines, left=3) + note


def _peers_right(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """Return, per timed peer, whether all its results are within our bound."""
    right: dict[str, bool] = {}
    for row in rows:
        for peer in row["results"][1:]:
            if peer["median_us"]:
                right[peer["name"]] = right.get(peer["name"], True) and peer["verified"]
    return right


def _spreads(device: str, rows: Sequence[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the number of rows, the share of their floors, and the peers' times over ours."""
    near, ratios = [], []
    for row in rows:
        ours = row["results"][0]["median_us"]
        near.append(100 * floor_us(device, row) / ours)
        if timed := stored.peer_times(row):
            ratios.append(min(timed)[0] / ours)
    wrong = sum(not row["results"][0]["verified"] for row in rows)
    count = f"{len(rows)}, {wrong} wrong" if wrong else str(len(rows))
    spread = f"{min(near):.0f} to {max(near):.0f}" if len(near) > 1 else f"{near[0]:.0f}"
    beside = "-"
    if ratios:
        beside = f"{min(ratios):.2f} / {statistics.median(ratios):.2f} / {max(ratios):.2f}"
    return count, spread, beside


def _caption(device: str, rows: Iterable[tuple[dict[str, Any], Any]]) -> str:
    documents = [document for document, _ in rows]
    dates = sorted({document["date"][:10] for document in documents})
    versions = documents[-1]["machine"]
    words = [
        device,
        *(f"{label} {versions[name]}" for label, name in _VERSIONS if versions.get(name)),
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
    ]
    return ", ".join(words) + ".\n\n"


def _op_table(device: str, rows: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    ordered = _in_order([row for _, row in rows])
    peers = list(
        dict.fromkeys(
            result["name"]
            for row in ordered
            for result in row["results"][1:]
            if result["median_us"] is not None
        )
    )
    speed = "TFLOP/s" if any(row["flops"] for row in ordered) else "GB/s"
    lines = [("shape", "dtype", "µs", speed, "% of floor", *(f"{p}, µs" for p in peers))]
    for row in ordered:
        ours = row["results"][0]
        by_name = {result["name"]: result for result in row["results"][1:]}
        lines.append(
            (
                " x ".join(map(str, row["shape"])),
                row["dtype"],
                (number(ours["median_us"]) if ours["verified"] else "wrong") + _mark(row),
                number(ours["tflops" if row["flops"] else "gbps"], 4),
                "-"
                if not ours["median_us"]
                else number(100 * floor_us(device, row) / ours["median_us"]),
                *(_peer_cell(by_name.get(peer), ours) for peer in peers),
            )
        )
    notes = ["Medians; in brackets the time over ours."] if peers else []
    if any(map(_mark, ordered)):
        notes.append(f"{_FELL} the clocks fell below {FALLEN:.0%} while it was measured.")
    return "\n".join((markdown(lines, left=2), *(f"{note}\n" for note in notes)))


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows like the op's bench shapes; other shapes come last."""
    from .. import OPS

    shapes = [op.bench_shapes("cuda") for op in OPS if op.name == rows[0]["op"]]
    places = {shape: i for i, shape in enumerate(itertools.chain(*shapes))}
    return sorted(rows, key=lambda row: places.get(tuple(row["shape"]), len(places)))


def _mark(row: dict[str, Any]) -> str:
    clocks = row.get("clocks")
    return f" {_FELL}" if clocks and clocks["fell"] else ""


def _peer_cell(result: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if result is None or result["median_us"] is None:
        return "-"
    cell = number(result["median_us"])
    if ours["median_us"]:
        cell += f" ({result['median_us'] / ours['median_us']:.2f}x)"
    if not result["verified"]:
        ratio = result["error_over_bound"]
        cell += f", error {number(None if ratio is None else float(ratio))} x bound"
    return cell


_HOST_TIMES = {
    "call": "call, µs",
    "RawKernel launch": "RawKernel launch, µs",
    "cupy.empty": "cupy.empty, µs",
    "call less launch and empty": "call less both, µs",
    "kernels": "its kernels",
    "own launches": "their launches, µs",
}


def _host_time_table(rows: dict[str, tuple[dict[str, Any], dict[str, float]]]) -> str:
    names = [name for name in _HOST_TIMES if any(name in times for _, times in rows.values())]
    lines = [("op", *(_HOST_TIMES[name] for name in names))]
    for op in sorted(rows, key=place_of_op()):
        cells = (rows[op][1].get(name) for name in names)
        lines.append((op, *(str(x) if isinstance(x, int) else number(x) for x in cells)))
    return markdown(lines, left=1)


def place_of_op() -> Callable[[str], int]:
    """Return a sort key for op names: the order of `cupykern.OPS`, ops of old releases last."""
    from .. import OPS

    places = {op.name: i for i, op in enumerate(OPS)}
    return lambda name: places.get(name, len(places))


def profiles(
    documents: Iterable[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (document, profile) of each call in the files written by `profile --json`."""
    for document in documents:
        for profile in document["profiles"]:
            yield document, profile


def _profile_table(documents: Iterable[dict[str, Any]]) -> str:
    """Return a line per call, with its latest profile.  documents: oldest first."""
    latest_of: dict[Any, dict[str, Any]] = {}
    for _, profile in profiles(documents):
        if profile["launches"]:
            latest_of[profile["op"], tuple(profile["shape"]), profile["dtype"]] = profile
    lines = [("op", "shape", "dtype", "waits most for", *_PROFILED.values())]
    for (op, shape, dtype), profile in sorted(latest_of.items(), key=lambda item: item[0][0]):
        launch = profile["launches"][0]
        values = {label: number(value) for label, value, _ in launch["figures"]}
        waits = [f"{reason} ({share:.0%})" for reason, share in launch["stalls"][:2]]
        figures = [values.get(label, "-") for label in _PROFILED]
        lines.append((op, " x ".join(map(str, shape)), dtype, ", ".join(waits), *figures))
    return markdown(lines, left=4)


def _sensitivity_table(documents: Iterable[dict[str, Any]], by_format: bool = False) -> str:
    """Return the latest tables of the host target and of each device.  documents: oldest first."""

    def table(rows: Sequence[dict[str, Any]]) -> str:
        if by_format:
            return markdown([sensitivity.FORMATS_HEAD, *sensitivity.by_format(rows)], left=1)
        return markdown([sensitivity.HEAD, *map(sensitivity.cells, rows)], left=4)

    latest_of: dict[str, dict[str, Any]] = {}
    for document in documents:
        device = document["machine"]["device"]
        latest_of["Host target" if document["target"] == "host" else device] = document
    return "\n".join(
        f"{device}, {document['date'][:10]}.\n\n" + table(document["rows"])
        for device, document in sorted(latest_of.items(), key=lambda x: x[1]["target"] == "host")
    )


def _startup_table(document: dict[str, Any]) -> str:
    rows = [startup.FirstCall(**row) for row in document["rows"]]
    imported = number(statistics.median(row.import_ms for row in rows))
    device, day = document["machine"]["device"], document["date"][:10]
    head = f"{device}, {document['machine']['cpu']}, {day}. `import cupykern`: {imported} ms.\n\n"
    return head + markdown([startup.HEAD, *map(startup.cells, rows)], left=3)


def _suite_table(documents: Iterable[dict[str, Any]]) -> str:
    """Return a line per op and dtype, from the latest run of each suite and seed on each device.

    documents: oldest first.
    """
    latest_of = {
        (
            document["machine"]["device"],
            document["suite"]["name"],
            document["suite"]["seed"],
        ): document
        for document in documents
    }
    return "\n".join(
        f"Suite `{name}`, seed {seed}. "
        + _caption(device, [(document, None)])
        + markdown([_SUITE_HEAD, *map(_suite_cells, _beside_peers(document))], left=2)
        for (device, name, seed), document in latest_of.items()
    )


_SUITE_HEAD = (
    *("op", "dtype", "shapes", "ahead or level"),
    *(f"behind by {by:.0%}" for by in summary.BEHIND[1:]),
    "fastest library's time over ours",
)


def _beside_peers(document: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the lines of a suite's summary that have peers; documents without rows have it too."""
    lines = [line for line in document["summary"] if line["ratios"]]
    place = place_of_op()
    return sorted(lines, key=lambda line: (place(line["op"]), line["dtype"]))


def _suite_cells(line: dict[str, Any]) -> tuple[str, ...]:
    level, *behind = line["behind"]
    shares = (f"{share:.0%}" for share in (1 - level, *behind))
    return f"`{line['op']}`", line["dtype"], str(line["rows"]), *shares, number(line["speedup"])


def _model_table(documents: Iterable[dict[str, Any]]) -> str:
    """Return a line per step, from the latest run of each model and format on each device.

    A format is that of weights and cache.  documents: oldest first.
    """
    what = "{layers} layers of `{name}`, weights {weights}, cache {cache}. "
    latest_of = {}
    for document in documents:
        of_model = what.format(**{"cache": "16bit"} | document["model"])
        latest_of[document["machine"]["device"], of_model] = document
    return "\n".join(
        of_model
        + _caption(device, [(document, None)])
        + markdown(model_rows.lines(document["rows"], _peer_cell), left=1)
        for (device, of_model), document in latest_of.items()
    )


def markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Format a Markdown table.  lines: header first.  left: number of text columns."""
    rule = ["---"] * left + ["---:"] * (len(lines[0]) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def update(texts: Sequence[str], written: dict[str, str]) -> list[str]:
    """Return `texts` with their tables replaced.

    Raises ValueError for a table name that is neither an op nor one of _OTHERS, for a
    marker without its end, and for an op with results that no text has a table for.
    """
    from .. import OPS

    text = "".join(texts)
    known = {*_OTHERS, *(op.name for op in OPS)}
    places = {match[2] for match in _TABLE.finditer(text)}
    places |= {match[1] for match in _SITE_TABLE.finditer(text)}
    if text.count("<!-- table:") != len(_TABLE.findall(text)):
        raise ValueError("a '<!-- table: ... -->' lacks its '<!-- end -->'")
    if unknown := places - known:
        raise ValueError(f"no op for the table {sorted(unknown)[0]!r}")
    if homeless := written.keys() - places - _OTHERS:
        raise ValueError(f"no '<!-- table: {sorted(homeless)[0]} -->' for its results")

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{written.get(match[2], _NOT_MEASURED)}\n{match[4]}"

    return [_TABLE.sub(table, each) for each in texts]


def report(pages: Sequence[Path], results: Path) -> tuple[list[str], list[str]]:
    """Return (current texts of the pages, updated texts).  Raises OSError and ValueError."""
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return texts, update(texts, all_tables(results))


def on_site(text: str, results: Path) -> str:
    """Fill in a page's tables of the site, which are not committed."""
    written = all_tables(results)

    def table(match: re.Match[str]) -> str:
        made = written.get(match[1], _NOT_MEASURED)
        return re.sub(r"(?<=\d) x (?=\d)", "\u00a0x\u00a0", made)  # a shape stays on one line

    return _SITE_TABLE.sub(table, text)


def all_tables(results: Path) -> dict[str, str]:
    """Return Markdown by table name.  Raises ValueError."""
    written = tables(load(results))
    if profiled := load(results, "profile"):
        written[PROFILES] = _profile_table(profiled)
    if found := load(results, "sensitivity", host=True):
        written[SENSITIVITY] = _sensitivity_table(found)
        written[FORMATS] = _sensitivity_table(found, by_format=True)
    if suites := load(results, "suite"):
        written[SUITE] = _suite_table(suites)
    if models := load(results, "model"):
        written[MODEL] = _model_table(models)
    if started := load(results, "startup"):
        written[STARTUP] = _startup_table(started[-1])
    return written
