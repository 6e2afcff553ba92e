"""README's tables, written from the committed results/*.json.

A table stands between `<!-- table: softmax -->` and `<!-- end -->`; its name is an op's, or
"host time" for the host time per call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .tables import number

HOST_TIME = "host time"
_TABLE = re.compile(r"(<!-- table: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_VERSIONS = (
    ("CuPy", "cupy"),
    ("NVRTC", "nvrtc"),
    ("torch", "torch"),
    ("QuACK", "quack-kernels"),
    ("Liger", "liger-kernel"),
)
_NOT_MEASURED = "Not measured yet.\n"


def load(folder: Path) -> list[dict[str, Any]]:
    """The benchmarks on GPUs among folder/*.json, the oldest first.  Raises ValueError."""
    documents = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        is_bench = isinstance(document, dict) and document.get("kind") == "bench"
        if is_bench and document["target"] != "host":
            documents.append(document)
    return sorted(documents, key=lambda document: document["date"])


def latest(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[Any, Any]]]:
    """(document, row) by table name, device and the row's key, of the latest result of each row."""
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
    """Markdown by table name."""
    return {
        name: "\n".join(
            _caption(device, rows.values())
            + (_host_time_table(rows) if name == HOST_TIME else _op_table(rows.values()))
            for device, rows in devices.items()
        )
        for name, devices in latest(documents).items()
    }


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


def _op_table(rows: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    rows = [row for _, row in rows]
    peers = list(
        dict.fromkeys(
            result["name"]
            for row in rows
            for result in row["results"][1:]
            if result["median_us"] is not None
        )
    )
    plain = " or ".join(dict.fromkeys(row["plain"] for row in rows))
    speed = "TFLOP/s" if any(row["flops"] for row in rows) else "GB/s"
    lines = [("shape", "dtype", "µs", speed, f"% of plain {plain}", *(f"{p}, µs" for p in peers))]
    for row in rows:
        ours = row["results"][0]
        by_name = {result["name"]: result for result in row["results"][1:]}
        lines.append(
            (
                " x ".join(map(str, row["shape"])),
                row["dtype"],
                number(ours["median_us"]) if ours["verified"] else "wrong",
                number(ours["tflops" if row["flops"] else "gbps"], 4),
                number(ours["speed_percent"]),
                *(_peer_cell(by_name.get(peer), ours) for peer in peers),
            )
        )
    table = markdown(lines, left=2)
    return f"{table}\nMedians; in brackets the time over ours.\n" if peers else table


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


def _host_time_table(rows: dict[str, tuple[dict[str, Any], dict[str, float]]]) -> str:
    names = list(dict.fromkeys(name for _, times in rows.values() for name in times))
    lines = [("op", *(f"{name}, µs" for name in names))]
    for op, (_, times) in rows.items():
        lines.append((op, *(number(times.get(name)) for name in names)))
    return markdown(lines, left=1)


def markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """lines: the first one the head.  left: how many columns are words."""
    rule = ["---"] * left + ["---:"] * (len(lines[0]) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def update(text: str, written: dict[str, str]) -> str:
    """`text` with its tables replaced.

    Raises ValueError for a table name that is neither an op nor "host time", for a marker without
    its end, and for an op with results but without a place.
    """
    from .. import OPS

    known = {HOST_TIME, *(op.name for op in OPS)}
    places = {match[2] for match in _TABLE.finditer(text)}
    if text.count("<!-- table:") != len(_TABLE.findall(text)):
        raise ValueError("a '<!-- table: ... -->' lacks its '<!-- end -->'")
    if unknown := places - known:
        raise ValueError(f"no op for the table {sorted(unknown)[0]!r}")
    if homeless := written.keys() - places - {HOST_TIME}:
        raise ValueError(f"no '<!-- table: {sorted(homeless)[0]} -->' for its results")
    return _TABLE.sub(
        lambda match: f"{match[1]}\n{written.get(match[2], _NOT_MEASURED)}\n{match[4]}", text
    )


def report(readme: Path, results: Path) -> tuple[str, str]:
    """(README as it is, as it should be).  Raises OSError and ValueError."""
    text = readme.read_text(encoding="utf-8")
    return text, update(text, tables(load(results)))
