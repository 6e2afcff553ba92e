"""docs/results.html: the committed results as one self-contained page."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..tuning.trials import by_problem, ranking, short_names
from . import figures, report, stored
from .profile import MAX_STALLS
from .tables import number
from .trace import read

_MAX_CONFIGS = 10  # rows of a heat map
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="results" content="{digest}">
<title>cupykern: results</title>
<style>
:root {{ --ink: #1f2430; --faint: #cfd4dc; --ground: #ffffff; --card: #f6f7f9; --link: #1f5fbf; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e8ec; --faint: #3b424e; --ground: #14171c; --card: #1c2027; --link: #86b4f5; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 84rem;
  background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 1.7rem; margin: .5rem 0; }}
h2 {{ font-size: 1.25rem; margin: 2rem 0 .5rem; }}
a {{ color: var(--link); }}
nav a {{ margin-right: 1rem; white-space: nowrap; }}
.cards {{ display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }}
figcaption {{ font-size: .85rem; opacity: .85; }}
svg {{ display: block; width: 100%; height: auto; font-family: inherit; }}
details {{ margin: .75rem 0; }}
summary {{ cursor: pointer; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid var(--faint);
  text-align: right; white-space: nowrap; }}
.text {{ text-align: left; white-space: normal; min-width: 9rem; }}
ol {{ margin: .5rem 0 0; padding-left: 1.6rem; }}
</style>
</head>
<body>
"""


def digest(folder: Path) -> str:
    """Return a digest of the results and of the sources that draw them."""
    found = hashlib.sha256()
    for source in (__file__, figures.__file__, report.__file__):
        found.update(Path(source).read_bytes())
    for path in sorted(folder.glob("*.json")):
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def is_current(page: Path, folder: Path) -> bool:
    """Return whether `page` was made from these results; matplotlib versions are not compared."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError:
        return False
    return f'<meta name="results" content="{digest(folder)}">' in text


def make(folder: Path) -> str:
    """Make the page of folder/*.json.

    Raises ValueError for broken files, ImportError without matplotlib.
    """
    return _assemble(sections(folder), digest(folder))


def sections(folder: Path, with_tables: bool = True) -> list[tuple[str, str, str]]:
    """Return (id, heading, HTML) of each section.

    with_tables: also the tables behind the figures.  Raises like `make`.
    """
    documents = report.load(folder)
    rows = report.latest(documents)
    tables = report.tables(documents) if with_tables else {}
    found: list[tuple[str, str, str]] = []
    place = report.place_of_op()
    for device in dict.fromkeys(device for devices in rows.values() for device in devices):
        ops = {
            op: [row for _, row in devices[device].values()]
            for op, devices in sorted(rows.items(), key=lambda item: place(item[0]))
            if op != report.HOST_TIME and device in devices
        }
        found += _device_sections(device, ops, tables)
    found += _sweep_sections(folder)
    if with_tables:
        found += _tune_sections(folder)
        found += _comparison_sections(folder)
        found += _profile_sections(folder)
    found += _check_sections(folder)
    if report.HOST_TIME in tables:
        found.append(
            ("host-time", "Host time of a warm call", _html_table(tables[report.HOST_TIME]))
        )
    return found


def _assemble(sections: Sequence[tuple[str, str, str]], results: str) -> str:
    links = "".join(f'<a href="#{name}">{html.escape(title)}</a> ' for name, title, _ in sections)
    parts = [
        _HEAD.format(digest=results),
        "<h1>cupykern: results</h1>\n",
        "<p>Device times, medians of event-timed runs with a cold L2 cache; ours, the plain copy "
        "and the peers took turns in one run, and every result was verified against FP64 within "
        "its derived bound before and after. A hollow bar or marker is a peer whose result missed "
        "that bound. Written by <code>cupykern report</code> from <code>results/*.json</code>."
        "</p>\n",
        f"<nav>{links}</nav>\n" if sections else "<p>Not measured yet.</p>\n",
    ]
    for name, title, body in sections:
        parts.append(f'<h2 id="{name}">{html.escape(title)}</h2>\n{body}\n')
    return "".join(parts) + "</body>\n</html>\n"


def _figure(figure: Any, name: str, caption: str, more: str = "") -> str:
    """more: HTML below the caption."""
    name = re.sub(r"\W+", "-", name)
    svg = figures.to_svg(figure, name, html.escape(caption, quote=True))
    return f"<figure>{svg}<figcaption>{html.escape(caption)}{more}</figcaption></figure>\n"


def _cards(parts: Iterable[str]) -> str:
    return f'<div class="cards">\n{"".join(parts)}</div>\n'


def _device_sections(
    device: str, ops: dict[str, list[dict[str, Any]]], tables: dict[str, str]
) -> list[tuple[str, str, str]]:
    """Return the sections of one device: roofs, throughput of each op and dtype, errors."""
    name = re.sub(r"\W+", "-", device)
    pairs = [(op, row) for op, rows in ops.items() for row in rows]
    timed = [(op, row) for op, row in pairs if row["results"] and row["results"][0]["median_us"]]
    memory = [pair for pair in timed if not pair[1]["flops"]]
    compute = [pair for pair in timed if pair[1]["flops"]]
    roofs = []
    if memory:
        figure, axis = figures.new_figure()
        figures.draw_memory_roof(axis, memory)
        caption = f"{device}: what moves memory, beside a plain copy of as many bytes"
        roofs.append(_figure(figure, f"{name}-memory", caption))
    copies = [
        (row["bytes_read"] + row["bytes_written"]) / row["plain_us"] / 1e3
        for _, row in timed
        if row["plain_us"]
    ]
    if compute and copies:
        figure, axis = figures.new_figure()
        peaks = report.PEAK_TFLOPS.get(device, {})
        flat = {f"peak, {bits} bits": peaks[bits] for bits in (16, 8) if bits in peaks}
        figures.draw_roofline(axis, compute, max(copies), flat)
        roof = "the tensor cores' dense peaks" if flat else "the fastest product that was measured"
        caption = f"{device}: what computes, under the fastest plain copy and {roof}"
        roofs.append(_figure(figure, f"{name}-roofline", caption))
    sections = [(f"{name}-roofs", f"{device}: roofs", _cards(roofs))] if roofs else []
    for op, rows in ops.items():
        cards = []
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            panel = [row for row in rows if row["dtype"] == dtype and row["results"]]
            floors = _floors(device, panel)
            figure, axis = figures.new_figure(figures.throughput_size(panel))
            figures.draw_throughput(axis, panel, f"{op}, {dtype}", floors)
            caption = f"{device}, {op} of {dtype}: {_roof(panel, floors)}; at the right our speed"
            cards.append(_figure(figure, f"{name}-{op}-{dtype}", caption))
        body = _cards(cards)
        if op in tables:
            table = _html_table(tables[op])
            body += f"<details><summary>All figures of {op}</summary>{table}</details>"
        sections.append((f"{name}-{op}", op, body))
    errors = [pair for pair in pairs if pair[1]["results"]]
    if errors:
        count = len({(op, row["dtype"]) for op, row in errors})
        figure, axis = figures.new_figure((figures.SIZE[0], 1.6 + 0.17 * count))
        figures.draw_errors(axis, errors)
        caption = f"{device}: the worst error over the derived bound; right of 1 it is wrong"
        cards = [_figure(figure, f"{name}-errors", caption)]
        sections.append((f"{name}-errors", f"{device}: errors against the bound", _cards(cards)))
    return sections


def _floors(device: str, rows: Sequence[dict[str, Any]]) -> list[float] | None:
    """Return the minimum time of each row, or None if it is unknown."""
    if any(row["flops"] for row in rows) and device not in report.PEAK_TFLOPS:
        return None
    return (
        [report.floor_us(device, row) for row in rows] if all(r["plain_us"] for r in rows) else None
    )


def _roof(rows: Sequence[dict[str, Any]], floors: Sequence[float] | None) -> str:
    """Describe the bars of draw_throughput."""
    if floors is None:
        return "speed of each shape"
    plain = f"a plain {rows[0]['plain']} of as many bytes"
    if any(row["flops"] for row in rows):
        return f"share of the tensor cores' dense peak, or of {plain} where that takes longer"
    return f"share of the speed of {plain}"


def _documents(folder: Path, kind: str) -> Iterable[tuple[Path, dict[str, Any]]]:
    """Return documents of a kind, those of GPUs first, then the host target's."""
    read = [(path, stored.read(path)) for path in sorted(folder.glob("*.json"))]
    found = [(path, x) for path, x in read if isinstance(x, dict) and x.get("kind") == kind]
    return sorted(found, key=lambda item: item[1].get("target") == "host")


def _sweep_sections(folder: Path) -> list[tuple[str, str, str]]:
    """Return a heat map per sweep: configs by problems, as shares of the best config's speed."""
    cards = []
    for path, _ in _documents(folder, "sweep"):
        header, trials = read(path)
        problems, shares = [], []
        best: dict[str, float] = {}
        # op is used after the loop.
        for (op, shape, dtype), group in by_problem(trials):  # noqa: B007
            ranked = [trial for trial in ranking(group) if trial.median_us and trial.verified]
            if not ranked:
                continue
            times = {trial.config: trial.median_us for trial in ranked if trial.median_us}
            top = min(times.values())
            share = {config: top / us for config, us in times.items()}
            problems.append(f"{shape} {dtype}")
            shares.append(share)
            for config, value in share.items():
                best[config] = max(best.get(config, 0.0), value)
        if not problems:
            continue
        configs = sorted(best, key=lambda config: -best[config])[:_MAX_CONFIGS]
        names = short_names(configs)
        figure, axis = figures.new_figure((figures.SIZE[0], 1.5 + 0.25 * len(configs)))
        grid = [[share.get(config) for share in shares] for config in configs]
        numbers = [str(i) for i in range(1, len(configs) + 1)]
        figures.draw_heat(axis, grid, problems, numbers, f"sweep of {op}")
        items = "".join(f"<li>{html.escape(names[config])}</li>" for config in configs)
        failed = sum(trial.reason is not None for trial in trials)
        caption = (
            f"{_where(header)}: % of the best config of each problem of {op}; - was not measured. "
            f"{len({trial.name for trial in trials})} configs were tried, {failed} failed"
        )
        cards.append(_figure(figure, f"sweep-{path.stem}", caption, f"<ol>{items}</ol>"))
    return [("sweeps", "Sweeps of configs", _cards(cards))] if cards else []


def _where(document: dict[str, Any]) -> str:
    """Return the machine of a record; for the host target, what its times mean."""
    device = document["machine"]["device"]
    if document["target"] == "host":
        return f"Host emulation on {device}, whose times are not GPU times"
    return device


def _table_section(
    name: str, title: str, found: Sequence[tuple[str, Sequence[Sequence[str]]]]
) -> list[tuple[str, str, str]]:
    """found: (caption, lines of cells, header first)."""
    parts = []
    for caption, lines in found:
        parts.append(f"<p>{html.escape(caption)}</p>\n")
        if len(lines) > 1:
            parts.append(_html_table(report.markdown(lines, left=1)))
    return [(name, title, "".join(parts))] if parts else []


def _tune_sections(folder: Path) -> list[tuple[str, str, str]]:
    found = []
    for _, document in _documents(folder, "tune"):
        tried = len({(*trial["shape"], trial["config"]) for trial in document["trials"]})
        lines = [("call", "config that is kept", "µs", "default / this")]
        for key, row in document["kept"].items():
            gain = row["default_us"] / row["median_us"] if row["default_us"] else None
            lines.append((key, row["config"], number(row["median_us"], 4), number(gain)))
        found.append((f"{_where(document)}, {document['date'][:10]}: {tried} configs tried", lines))
    return _table_section("tuned", "Tuned calls", found)


def _comparison_sections(folder: Path) -> list[tuple[str, str, str]]:
    found, cards = [], []
    for path, document in _documents(folder, "comparison"):
        verdicts = document["verdicts"] or []
        words = [verdict["word"] for verdict in verdicts]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        limits = document["limits"]
        caption = (
            f"{document.get('title', path.stem)}. {_where(document)}, {document['date'][:10]}: "
            f"{counts}. Margin {100 * limits['margin']:g}%; at most "
            f"{100 * limits['false_alarms'] / 2:g}% of such benchmarks reject a row of unchanged "
            "code"
        )
        labels = [
            f"{row['op']} {' x '.join(map(str, row['shape']))} {row['dtype']}"
            for row in document["rows"]
        ]
        if words:
            figure, axis = figures.new_figure((figures.SIZE[0], 1.6 + 0.17 * len(labels)))
            figures.draw_changes(axis, labels, verdicts, limits["margin"])
            cards.append(_figure(figure, f"comparison-{path.stem}", caption))
        lines = [("row", "verdict", "now / before", "spread of a run", "p", "rejects from", "runs")]
        for label, verdict in zip(labels, verdicts, strict=False):
            change, spread, seen = (verdict[name] for name in ("change", "spread", "seen"))
            lines.append(
                (
                    label,
                    verdict["word"] + ("" if verdict["decided"] else " (undecided)"),
                    "-" if change is None else f"{1 + change:.4f}",
                    "-" if spread is None else f"{100 * spread:.2f}%",
                    number(verdict["p"]),
                    "-" if seen is None else f"+{100 * seen:.1f}%",
                    " / ".join(map(str, verdict["runs"] or ("-",))),
                )
            )
        found.append((caption, lines))
    if not found:
        return []
    tables = _table_section("comparisons", "", found)[0][2]
    details = f"<details><summary>All figures of the comparisons</summary>{tables}</details>"
    return [("comparisons", "Comparisons with a baseline", _cards(cards) + details)]


def _profile_sections(folder: Path) -> list[tuple[str, str, str]]:
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for document, profile in report.profiles(report.load(folder, "profile")):
        what = f"{profile['op']} {' x '.join(map(str, profile['shape']))} {profile['dtype']}"
        caption = f"{what} on {document['machine']['device']}, {profile['date'][:10]}"
        if not profile["launches"]:
            found.append((f"{caption}: {profile['unavailable']}", []))
        for launch in profile["launches"]:
            lines = [("counter", "value")]
            lines += [
                (label, f"{number(x)} {unit}".strip()) for label, x, unit in launch["figures"]
            ]
            lines += [
                (f"waiting for {reason}", f"{number(100 * share)} %")
                for reason, share in launch["stalls"][:MAX_STALLS]
            ]
            found.append((f"{caption}: {launch['kernel']}", lines))
    return _table_section("profiles", "Profiles", found)


def _check_sections(folder: Path) -> list[tuple[str, str, str]]:
    """Return error distributions, from `check --report --json`."""
    cards = []
    for path, document in _documents(folder, "check"):
        ops = dict.fromkeys(row["op"] for row in document.get("precision", ()))
        for op in ops:
            rows = [row for row in document["precision"] if row["op"] == op]
            figure, axis = figures.new_figure((4.3, 1.1 + 0.24 * len(rows)))
            figures.draw_precision(axis, rows, op)
            where = document["target"]
            caption = (
                f"{op} on {where}: errors of random cases in units of the output's last place; "
                "bars from 50% to 99% of them, dots the worst, ticks the derived bound's median, "
                "up to a million"
            )
            cards.append(_figure(figure, f"check-{path.stem}-{op}", caption))
    return [("precision", "Precision", _cards(cards))] if cards else []


def _is_word(cell: str) -> bool:
    return cell[:1].isalpha() and "µs" not in cell


def _html_table(markdown: str) -> str:
    """Convert our own Markdown tables, and the lines around them, to HTML."""
    parts: list[str] = []
    inside = False
    for line in markdown.strip().splitlines():
        is_row = line.startswith("|")
        if is_row and re.fullmatch(r"[|\s:-]+", line):
            continue
        if is_row != inside:
            parts.append('<div class="table"><table>\n' if is_row else "</table></div>\n")
        if is_row:
            tag = "td" if inside else "th"
            cells = [html.escape(cell.strip()) for cell in line.strip("|").split("|")]
            kinds = [
                ' class="text"' if i == 0 or _is_word(cell) else "" for i, cell in enumerate(cells)
            ]
            pairs = zip(kinds, cells, strict=True)
            parts.append(
                "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in pairs) + "</tr>\n"
            )
        elif line.strip():
            parts.append(f"<p>{html.escape(line)}</p>\n")
        inside = is_row
    return "".join(parts) + ("</table></div>\n" if inside else "")
