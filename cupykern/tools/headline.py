"""README's headline: a table line for each op, and the same as an image for light and dark pages.

The speedup of a row is the time of its fastest library over ours.  An op's speedup is the geometric
mean over its rows.  FP32 products have a separate line: libraries compute them without tensor
cores, so their speedups are not comparable with those of 16 and 8 bits.  Rows of a named precision
("float32:tf32") count in no line, since libraries compute them with other errors.  The SVG is
written by hand, so that it has the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..precisions import PRECISIONS
from . import stored
from .tables import number

_NAMES = {
    "float16": "FP16", "bfloat16": "BF16", "float32": "FP32", "int8": "INT8",
    "float8_e4m3fn": "FP8", "float8_e5m2": "FP8", "float4_e2m1fn": "NVFP4",
}  # fmt: skip
_OPS = {"complex_matmul": "matmul"}  # ops whose function has another name
_LIBRARIES = {"quack": "QuACK", "liger": "Liger", "cupy": "CuPy", "flash_attn": "FlashAttention"}


@dataclass(frozen=True)
class Line:
    """An op's rows on one device.

    speedups: one per row with peers.  copy: median percentage of a plain copy's bandwidth, for ops
        without products.  tflops: the largest, for ops with products.  libraries: the peers of the
        speedups.  kind: "FP32" for such products if the op has others too.
    """

    op: str
    dtypes: tuple[str, ...]
    speedups: tuple[float, ...]
    copy: float | None
    tflops: float | None
    error_over_bound: float
    libraries: tuple[str, ...] = ()
    kind: str = ""

    @property
    def label(self) -> str:
        return f"{_OPS.get(self.op, self.op)} {self.kind}".strip()

    @property
    def speedup(self) -> float | None:
        logs = [math.log(speedup) for speedup in self.speedups]
        return math.exp(sum(logs) / len(logs)) if logs else None

    @property
    def ahead(self) -> int:
        """Rows that are less than 2% behind."""
        return sum(speedup > 0.98 for speedup in self.speedups)


def lines(op: str, rows: Sequence[dict[str, Any]]) -> list[Line]:
    """Return one line, or two for an op with products both in FP32 and in fewer bits."""
    named = {*PRECISIONS}
    rows = [row for row in rows if named.isdisjoint(row["dtype"].partition(":")[2].split("+"))]
    full = [row for row in rows if row["flops"] and row["dtype"].partition(":")[0] == "float32"]
    rest = [row for row in rows if row not in full]
    kinds = ((rest, ""), (full, "FP32" if rest else ""))
    return [one for of, kind in kinds if (one := line(op, of, kind))]


def line(op: str, rows: Sequence[dict[str, Any]], kind: str = "") -> Line | None:
    """Return the line of these rows, or None if no row was timed."""
    rows = [row for row in rows if row["results"] and row["results"][0]["median_us"]]
    if not rows:
        return None
    speedups, copies, tflops, errors = [], [], [], []
    libraries: dict[str, None] = {}
    for row in rows:
        ours = row["results"][0]
        if timed := stored.peer_times(row):
            speedups.append(min(timed)[0] / ours["median_us"])
            libraries |= dict.fromkeys(name for _, name in timed)
        copies.append(100 * row["plain_us"] / ours["median_us"] if row["plain_us"] else 0.0)
        tflops.append(ours["tflops"] or 0.0)
        errors.append(float(ours["error_over_bound"] or 0.0))
    names = [name for row in rows for name in operands(row["dtype"])]
    computes = any(row["flops"] for row in rows)
    return Line(
        op=op,
        dtypes=_dtypes(names),
        speedups=tuple(speedups),
        copy=None if computes else sorted(copies)[len(copies) // 2],
        tflops=max(tflops) if computes else None,
        error_over_bound=max(errors),
        libraries=tuple(_LIBRARIES.get(name, name) for name in libraries),
        kind=kind,
    )


def operands(dtype: str) -> list[str]:
    """Return the dtypes of a row's operands; "float16*int8" and, with a cache, "bfloat16:int8" have
    two."""
    first, _, option = dtype.partition(":")
    return [*first.split("*"), *([option] if option in _NAMES else [])]


def not_measured(op: str, dtypes: Sequence[str]) -> Line:
    """Return the line of an op without results."""
    return Line(op, _dtypes(dtypes), (), None, None, 0.0)


def _dtypes(names: Iterable[str]) -> tuple[str, ...]:
    plain = (name.partition(":")[0] for name in names)
    return tuple(dict.fromkeys(_NAMES.get(name, name) for name in plain))


def table(lines: Iterable[Line]) -> list[tuple[str, ...]]:
    """Return the table's cells, header first."""
    found: list[tuple[str, ...]] = [
        ("op", "dtypes", "libraries", "speed", "speedup over the fastest", "ahead or level")
    ]
    for x in lines:
        speed = f"{x.copy:.0f}% of copy bandwidth" if x.copy is not None else "not benchmarked"
        if x.tflops is not None:
            speed = f"up to {number(x.tflops, 3)} TFLOP/s"
        speedup = "-" if x.speedup is None else f"{x.speedup:.2f}"
        rows = "-" if x.speedup is None else f"{x.ahead} of {len(x.speedups)}"
        names = f"`{_OPS.get(x.op, x.op)}`", ", ".join(x.dtypes), ", ".join(x.libraries) or "-"
        found.append((*names, speed, speedup, rows))
    return found


_THEMES = {"light": ("#1f2328", "#656d76", "#d0d7de"), "dark": ("#e6edf3", "#8d96a0", "#30363d")}
_BAR, _BOUND = "#e4572e", "#3f86d4"
# Narrow, so that a phone shows the whole width with text about as large as the page's.
_ROW, _TOP, _NAME, _LEFT, _GAP, _RIGHT, _WIDTH = 24, 46, 146, 170, 52, 84, 460
_MOST = 16.0  # end of the speedup axis


def svg(lines: Sequence[Line], device: str, theme: str) -> str:
    """Draw two panels: speedups and worst errors over the derived bound.

    Bars of speedups are on a logarithmic axis, with the range over rows.  theme: "light" or "dark".
    Lines without results are left out.
    """
    lines = [one for one in lines if one.copy is not None or one.tflops is not None]
    ink, faint, rule = _THEMES[theme]
    height = _TOP + _ROW * len(lines) + 26
    right = _NAME + _LEFT + _GAP

    def x_of(speedup: float) -> float:
        low, high = math.log2(0.5), math.log2(_MOST)
        at = (math.log2(min(max(speedup, 0.5), _MOST)) - low) / (high - low)
        return round(_NAME + at * _LEFT, 1)

    def text(x: float, y: float, words: str, color: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="12" '
        f'role="img" aria-label="Speedup over the fastest library and error over bound, {device}">',
        text(_NAME, 14, "speedup over the", ink),
        text(_NAME, 29, f"fastest library, {device.removeprefix('NVIDIA ')}", ink),
        text(right, 14, "worst error", ink),
        text(right, 29, "over its bound", ink),
    ]
    bottom = _TOP + _ROW * len(lines)
    for tick in (0.5, 1, 2, 4, 8, 16):
        x = x_of(tick)
        width = 1.5 if tick == 1 else 0.7
        parts.append(
            f'<path d="M{x} {_TOP - 8}V{bottom}" stroke="{faint if tick == 1 else rule}" '
            f'stroke-width="{width}"/>'
        )
        parts.append(text(x, bottom + 16, f"{tick}x", faint, "middle"))
    for share in (0, 0.5, 1):
        x = right + share * _RIGHT
        parts.append(
            f'<path d="M{x} {_TOP - 8}V{bottom}" stroke="{faint if share == 1 else rule}" '
            f'stroke-width="{1.5 if share == 1 else 0.7}"/>'
        )
        parts.append(text(x, bottom + 16, f"{share:g}", faint, "middle"))
    for i, one in enumerate(lines):
        y = _TOP + _ROW * i
        parts.append(text(_NAME - 8, y + 9, one.label, ink, "end"))
        if one.speedup is not None:
            start, end = sorted((x_of(1), x_of(one.speedup)))
            least, most = x_of(min(one.speedups)), x_of(max(one.speedups))
            parts.append(
                f'<rect x="{start}" y="{y}" width="{max(end - start, 1.5):.1f}" height="10" '
                f'fill="{_BAR}"/><path d="M{least} {y + 14}H{most}" stroke="{faint}"/>'
            )
            parts.append(text(_NAME + _LEFT + 12, y + 10, f"{one.speedup:.2f}", ink))
        else:
            parts.append(text(x_of(1) + 6, y + 10, "not compared", faint))
        share = min(one.error_over_bound, 1.05) * _RIGHT
        parts.append(
            f'<rect x="{right}" y="{y}" width="{max(share, 1):.1f}" height="10" fill="{_BOUND}"/>'
        )
    return "\n".join((*parts, "</svg>")) + "\n"
