"""Figures of results, drawn by matplotlib; an SVG takes its colours from the page around it."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..tuning.contender import OURS

# Matplotlib draws with these; to_svg makes them CSS variables, for light and dark pages.
INK, FAINT, GROUND = "#010203", "#040506", "#070809"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GROUND: "var(--ground)"}
# Mid-tones, which stand out from white and from black; apart also without colour, by their markers.
_COLORS = ("#3f86d4", "#9a6bd3", "#2a9d8f", "#c59b1d", "#8a8f98", "#d0609f", "#5c9e4f", "#b0724a")
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
_OUR_COLOR = "#e4572e"
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text: sharp, selectable, in the page's font
    "svg.hashsalt": "cupykern",  # the same file for the same results
}
_MAX_SLANTED = 8  # labels below an axis, of a phone's width
_MAX_LABEL = 28  # characters beside an axis, before they get smaller
_MAX_ULPS = 1e6  # beyond, next to results that cancel or are zero, a number of ulps says nothing
SIZE = (4.3, 3.4)  # inches: a phone's width, so that text there is as large as the page's


def new_figure(size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    """(figure, axis) in our style.  Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        return pyplot.subplots(figsize=size, layout="constrained")


def to_svg(figure: Any, name: str, label: str) -> str:
    """The figure as an <svg> element for HTML, without any address in it; closes the figure.

    name: what its ids begin with, so that those of several figures differ.  label: for who cannot
        see.
    """
    import matplotlib
    from matplotlib import pyplot

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r'(<svg) (?:height|width)="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def look(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Colour and marker of one of several implementations, ours always alike."""
    if name == OURS:
        return {"color": _OUR_COLOR, "marker": "o", "zorder": 3}
    others = [other for other in names if other != OURS]
    i = others.index(name)
    again = i // len(_COLORS)  # the colours' second turn: with other markers
    return {"color": _COLORS[i % len(_COLORS)], "marker": _MARKERS[(i + again) % len(_MARKERS)]}


def short_shape(shape: Sequence[int]) -> str:
    """4096 x 1000 as "4k x 1000"."""
    return " x ".join(f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in shape)


def speed(row: dict[str, Any], result: dict[str, Any]) -> float | None:
    """In TFLOP/s for what computes, else in GB/s."""
    return result["tflops"] if row["flops"] else result["gbps"]


def _styled(draw: Callable[..., None]) -> Callable[..., None]:
    """`draw` with our style, which matplotlib asks for when a thing is made."""

    @functools.wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> None:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            draw(*args, **kwargs)

    return styled


def _legend(axis: Any, columns: int = 3) -> None:
    """Below the axis, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    axis.figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        handlelength=1.4,
        columnspacing=1,
    )


@_styled
def draw_throughput(axis: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Speed against shape, a line per implementation; a peer that is wrong is drawn hollow."""
    names = list(dict.fromkeys(result["name"] for row in rows for result in row["results"]))
    places = range(len(rows))
    for name in names:
        points = [
            (place, value, result["verified"])
            for place, row in zip(places, rows, strict=True)
            for result in row["results"]
            if result["name"] == name and (value := speed(row, result)) is not None
        ]
        if not points:
            continue
        style = look(name, names)
        xs, ys, _ = zip(*points, strict=True)
        axis.plot(xs, ys, label=name, linewidth=1.2, markersize=4.5, **style)
        wrong = [(x, y) for x, y, good in points if not good]
        if wrong:
            hollow = {**style, "zorder": 4, "markerfacecolor": GROUND}
            axis.plot(*zip(*wrong, strict=True), linestyle="", markersize=4.5, **hollow)
    if not any(row["flops"] for row in rows) and all(row["plain_us"] for row in rows):
        plain = [(row["bytes_read"] + row["bytes_written"]) / row["plain_us"] / 1e3 for row in rows]
        axis.plot(places, plain, linestyle=":", color=INK, label=f"plain {rows[0]['plain']}")
    labels = [short_shape(row["shape"]) for row in rows]
    if len(labels) <= _MAX_SLANTED:
        axis.set_xticks(places, labels, rotation=30, ha="right", rotation_mode="anchor")
    else:
        axis.set_xticks(places, labels, rotation=90, fontsize=7.5)
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.set_ylabel("TFLOP/s" if any(row["flops"] for row in rows) else "GB/s")
    axis.set_title(title)
    _legend(axis)


@_styled
def draw_memory_roof(axis: Any, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """rows: (op, row) of what memory bounds.

    The share of a plain copy's speed against bytes moved.
    """
    names = list(dict.fromkeys(op for op, _ in rows))
    for name in names:
        points = [
            ((row["bytes_read"] + row["bytes_written"]) / 1e6, row["results"][0]["speed_percent"])
            for op, row in rows
            if op == name and row["results"][0]["speed_percent"] is not None
        ]
        if points:
            axis.plot(*zip(*points, strict=True), linestyle="", markersize=4.5, label=name,
                      **look(name, names))  # fmt: skip
    axis.axhline(100, color=INK, linestyle=":", label="plain copy")
    axis.set_xscale("log")
    axis.set_xlabel("MB read and written")
    axis.set_ylabel("% of a plain copy")
    axis.set_title("Under the memory's roof")
    _legend(axis)


@_styled
def draw_roofline(axis: Any, rows: Sequence[tuple[str, dict[str, Any]]], copy_gbps: float) -> None:
    """rows: (op, row) of what computes.  copy_gbps: of the fastest plain copy, the roof's slope.

    The flat roof is the fastest product that was measured, ours or a peer's.
    """
    names = list(dict.fromkeys(op for op, _ in rows))
    xs = []
    for name in names:
        points = [
            (row["flops"] / (row["bytes_read"] + row["bytes_written"]), row["results"][0]["tflops"])
            for op, row in rows
            if op == name and row["results"][0]["tflops"] is not None
        ]
        xs += [x for x, _ in points]
        if points:
            axis.plot(*zip(*points, strict=True), linestyle="", markersize=4.5, label=name,
                      **look(name, names))  # fmt: skip
    top = max((r["tflops"] for _, row in rows for r in row["results"] if r["tflops"]), default=None)
    if xs and top:
        ridge = 1e3 * top / copy_gbps
        ends = min(*xs, ridge) / 2, max(*xs, ridge) * 2
        axis.plot([ends[0], ridge, ends[1]], [ends[0] * copy_gbps / 1e3, top, top], color=INK,
                  linestyle=":", label="plain copy, fastest product")  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("flops per byte read and written")
    axis.set_ylabel("TFLOP/s")
    axis.set_title("Roofline")
    _legend(axis, 2)


@_styled
def draw_errors(axis: Any, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """rows: (op, row).  The worst error over the bound of each dtype, ours and the peers'."""
    results = [(f"{op}, {row['dtype']}", r) for op, row in rows for r in row["results"]]
    places = list(dict.fromkeys(label for label, _ in results))[::-1]
    names = list(dict.fromkeys(result["name"] for _, result in results))
    for name in names:
        worst: dict[str, float] = {}
        for label, result in results:
            ratio = result["error_over_bound"]
            if result["name"] == name and ratio is not None and math.isfinite(float(ratio)):
                worst[label] = max(worst.get(label, 0.0), float(ratio))
        style = look(name, names)
        ys = [places.index(label) for label in worst]
        axis.plot(worst.values(), ys, linestyle="", markersize=4.5, label=name, **style)
    axis.axvline(1, color=INK, linestyle=":")
    axis.set_xscale("log")
    axis.set_yticks(range(len(places)), places, fontsize=7)
    axis.set_ylim(-0.7, len(places) - 0.3)
    axis.set_xlabel("worst error over its bound")
    _legend(axis)


@_styled
def draw_precision(axis: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Rows of precision.py: errors from 50% to 99% as bars, the worst as dots, bounds as ticks."""
    labels = []
    for row in rows:
        policy = row["policy"].removeprefix("policy=").replace("=True", "")
        labels.append(", ".join(filter(None, (row["dtype"], policy, f"to {row['output']}"))))
    floor = 1e-3
    for place, row in enumerate(rows):
        median, _, most, _ = (max(float(q), floor) for q in row["quantiles"])
        axis.plot([median, most], [place, place], color=_OUR_COLOR, linewidth=5, alpha=0.5,
                  solid_capstyle="butt")  # fmt: skip
        axis.plot(
            max(float(row["worst"]), floor), place, marker="o", color=_OUR_COLOR, markersize=4.5
        )
        axis.plot(max(float(row["bound"]), floor), place, marker="|", color=INK, markersize=10)
    axis.axvline(0.5, color=INK, linestyle=":", linewidth=0.8)
    axis.set_xscale("log")
    small = {"fontsize": 7.5} if max(map(len, labels)) > _MAX_LABEL else {}
    axis.set_yticks(range(len(rows)), labels, **small)
    axis.invert_yaxis()
    axis.set_xlim(right=min(axis.get_xlim()[1], _MAX_ULPS))
    axis.set_xlabel("ulps")
    axis.set_title(title)


@_styled
def draw_changes(
    axis: Any, labels: Sequence[str], verdicts: Sequence[dict[str, Any]], margin: float
) -> None:
    """Verdicts of baseline.py, as records: changes in %, with bars as long as a change must be past
    the margin to be sure."""
    places = [i for i, verdict in enumerate(verdicts) if verdict["change"] is not None]
    for word, color in (("reject", _OUR_COLOR), ("keep", _COLORS[2]), ("noise", _COLORS[4])):
        ours = [i for i in places if verdicts[i]["word"] == word]
        if ours:
            axis.errorbar(
                [100 * verdicts[i]["change"] for i in ours], ours, label=word, color=color,
                xerr=[100 * (verdicts[i]["seen"] - margin) for i in ours],
                linestyle="", marker=_MARKERS[0] if word == "reject" else "o", markersize=4.5,
            )  # fmt: skip
    for edge in (-100 * margin, 100 * margin):
        axis.axvline(edge, color=INK, linestyle=":")
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("change of the time, %")
    _legend(axis)


@_styled
def draw_heat(axis: Any, grid: Sequence[Sequence[float | None]], problems: Sequence[str],
              configs: Sequence[str], title: str) -> None:  # fmt: skip
    """grid: the share of the best of each config (row) and problem (column), from 0 to 1.  configs:
    their numbers, say."""
    import numpy as np

    values = np.array([[np.nan if v is None else v for v in row] for row in grid], float)
    axis.grid(False)
    edges = (np.arange(n + 1) - 0.5 for n in reversed(values.shape))
    axis.pcolormesh(*edges, values, cmap="viridis", vmin=0.3, vmax=1)  # vectors, unlike imshow
    axis.invert_yaxis()
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "-" if math.isnan(value) else f"{100 * value:.0f}"
            color = INK if math.isnan(value) else "black" if value > 0.75 else "white"
            axis.text(x, y, text, ha="center", va="center", color=color, fontsize=8)
    axis.set_xticks(range(len(problems)), problems, rotation=30, ha="right", fontsize=7.5,
                    rotation_mode="anchor")  # fmt: skip
    axis.set_yticks(range(len(configs)), configs)
    axis.set_title(title)
