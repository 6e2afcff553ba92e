"""Matplotlib figures of results; an SVG takes its colours from the page around it."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..tuning.contender import OURS
from .shape_names import spelt
from .tables import number

# Matplotlib draws with these colours; to_svg makes them CSS variables, for light and dark pages.
INK, FAINT, GROUND = "#010203", "#040506", "#070809"
_VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GROUND: "var(--ground)"}
# Mid-tones with contrast to white and black; the markers differ too, to read without colour.
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
_MAX_LABEL = 28  # characters of an axis label, above which the font is smaller
_MAX_ULPS = 1e6  # more ulps, of results that cancel or are zero, mean nothing
SIZE = (4.3, 3.4)  # inches: a phone's width, so that the figure's text is as large as the page's


def new_figure(size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    """Return (figure, axis) in our style.  Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(_STYLE):
        return pyplot.subplots(figsize=size, layout="constrained")


def to_svg(figure: Any, name: str, label: str) -> str:
    """Return the figure as an <svg> element for HTML, without external addresses; close the figure.

    name: prefix of its ids, so that ids of several figures differ.  label: for screen readers.
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
    """Return an implementation's colour and marker; ours are always the same."""
    if name == OURS:
        return {"color": _OUR_COLOR, "marker": "o", "zorder": 3}
    others = [other for other in names if other != OURS]
    i = others.index(name)
    again = i // len(_COLORS)  # reused colours get other markers
    return {"color": _COLORS[i % len(_COLORS)], "marker": _MARKERS[(i + again) % len(_MARKERS)]}


def speed(row: dict[str, Any], result: dict[str, Any]) -> float | None:
    """Return the speed in TFLOP/s for rows with flops, otherwise in GB/s."""
    return result["tflops"] if row["flops"] else result["gbps"]


def _styled(draw: Callable[..., None]) -> Callable[..., None]:
    """Wrap `draw` in our style, which matplotlib reads when it creates objects."""

    @functools.wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> None:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            draw(*args, **kwargs)

    return styled


def _legend(axis: Any, columns: int = 3) -> None:
    """Put the legend below the axis, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    bars = [
        i for i, handle in enumerate(handles) if hasattr(handle, "patches")
    ]  # bars before lines
    order = (*bars, *(i for i in range(len(handles)) if i not in bars))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    axis.figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        handlelength=1.4,
        columnspacing=1,
    )


_BAR, _LABEL = 0.085, 0.19  # inches: height of a bar, and of the text line above a shape's bars
_SPARE = 1.0  # inches for title, axis and legend


def throughput_size(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the size of draw_throughput's figure for these rows."""
    bars = sum(len(row["results"]) for row in rows)
    return SIZE[0], _SPARE + bars * _BAR + len(rows) * (_LABEL + _BAR)


@_styled
def draw_throughput(
    axis: Any, rows: Sequence[dict[str, Any]], title: str, floors: Sequence[float] | None
) -> None:
    """Draw a group of bars per shape, one bar per implementation; a wrong peer's bar is hollow.

    floors: the minimum time of each row in us.  Bars are then shares of that roof, which is drawn.
        None: bars are speeds.
    """
    names = list(dict.fromkeys(result["name"] for row in rows for result in row["results"]))
    computes = any(row["flops"] for row in rows)
    unit = "TFLOP/s" if computes else "GB/s"
    roof = "roof" if computes else f"plain {rows[0]['plain']}"
    seen: set[str] = set()
    y = 0.0
    for i, row in enumerate(rows):
        ours = speed(row, row["results"][0])
        said = "" if ours is None else f"{number(ours)} {unit}"
        for x, words, side in ((0, spelt(row["op"], row["shape"]), "left"), (1, said, "right")):
            axis.text(x, y + 0.75 * _LABEL, words, fontsize=8, ha=side,
                      transform=axis.get_yaxis_transform())  # fmt: skip
        y += _LABEL
        begin = y
        for result in row["results"]:
            value = speed(row, result)
            if floors is not None and result["median_us"]:
                value = 100 * floors[i] / result["median_us"]
            if value is not None:
                color = look(result["name"], names)["color"]
                label = "_" if result["name"] in seen else result["name"]
                fill = color if result["verified"] else "none"
                axis.barh(y + _BAR / 2, value, 0.8 * _BAR, label=label, facecolor=fill,
                          edgecolor=color, linewidth=0.6)  # fmt: skip
                seen.add(result["name"])
            y += _BAR
        if floors is not None:  # not through the text line above
            axis.plot([100, 100], [begin, y], color=INK, linestyle=":", linewidth=1.2,
                      label="_" if i else roof)  # fmt: skip
        y += _BAR
    axis.set_ylim(y, 0)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.set_xlim(0, axis.get_xlim()[1] if floors is None else max(105, axis.get_xlim()[1]))
    axis.set_xlabel(unit if floors is None else f"speed, % of the {roof}")
    axis.set_title(title)
    _legend(axis)


@_styled
def draw_memory_roof(axis: Any, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Draw the share of a plain copy's speed against bytes moved.

    rows: (op, row) of memory-bound ops.
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
def draw_roofline(
    axis: Any, rows: Sequence[tuple[str, dict[str, Any]]], copy_gbps: float, peaks: dict[str, float]
) -> None:
    """Draw a roofline.

    rows: (op, row) of ops with flops.  copy_gbps: of the fastest plain copy, the roof's slope.
    peaks: the flat roofs in TFLOP/s by name.  If empty, the fastest measured product, ours or a
        peer's, is the roof.
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
    if not peaks and top:
        peaks = {"plain copy, fastest product": top}
    for (name, peak), dashes in zip(peaks.items() if xs else (), (":", "--", "-."), strict=False):
        ridge = 1e3 * peak / copy_gbps
        ends = min(*xs, ridge) / 2, max(*xs, ridge) * 2
        axis.plot([ends[0], ridge, ends[1]], [ends[0] * copy_gbps / 1e3, peak, peak], color=INK,
                  linestyle=dashes, linewidth=1.2, label=name)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("flops per byte read and written")
    axis.set_ylabel("TFLOP/s")
    axis.set_title("Roofline")
    _legend(axis, 2)


@_styled
def draw_errors(axis: Any, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Draw each dtype's worst error over the bound, ours and the peers'.  rows: (op, row)."""
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
    """Draw rows of precision.py: bars from the 50% to the 99% quantile, dots the worst, ticks the
    bounds."""
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
    """Draw verdicts of baseline.py, as records: changes in %.

    The length of a bar is the change beyond the margin that a test would find significant.
    """
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
    """Draw a heat map.

    grid: time of the best config over that of each config (row), per problem (column), 0 to 1.
    configs: labels, for example numbers.
    """
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
