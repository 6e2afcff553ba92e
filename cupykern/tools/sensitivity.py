"""The smallest errors of an op's results that `check` finds: check --sensitivity.

Errors are added to all elements of one result before it is compared: relative errors of 2^-s, with
random signs, then with one sign (results too large), rounded to the result's format like a kernel's
result.  For FP8 and integer results they are one unit in the last place (ulp).  The figure is the
largest s that the comparison finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check import compare_numbers, in_parts
from ..error_statistics import statistics
from ..numerics import as_float64, gap, to_numpy
from ..op import Bound, Op, as_tuple
from ..targets import Target
from ..typing import Array
from .tables import number

MOST = 32  # the largest s that is tried
_ROWS, _PRODUCTS = (64, 1024), (64, 128, 1024)
SHAPES = {
    **dict.fromkeys(("matmul", "complex_matmul", "scaled_mm", "dual_gemm_silu"), _PRODUCTS),
    "dequant_softmax": (64, 1000, 256),
    **dict.fromkeys(("softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm"), _ROWS),
    **dict.fromkeys(("quantize", "quantize_nvfp4", "nonfinite_report"), _ROWS),
}
"""Shapes per op; other ops use the host's first bench shape."""
OPTIONS = {
    "layer_norm": ("float32:stats", "float32:shifted", "float32:compensated"),
    "rms_norm": ("float32:stats", "float16:e4m3", "float16:e5m2", "float16:int8"),
    "quantize": ("float16:e4m3", "float16:e5m2", "float16:int8"),
    "matmul": ("float32",),
}
"""Dtypes with options, in addition to the op's own."""


@dataclass(frozen=True)
class Row:
    """One result of one call.

    result: its index if the call has several, and its dtype.  rms: the root mean square of its
    errors over the expected one.  unit: "relative" or "ulp".  random, one_sign: the largest s that
    is found, 0 for ulps; None: not even that.  single: the share of elements in which one error of
    an ulp, away from zero or towards it, is found alone.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    result: str
    rms: float
    unit: str
    random: int | None
    one_sign: int | None
    single: float


def rows(ops: Sequence[Op], target: Target, seed: int) -> Iterator[Row]:
    """Yield rows for each op's dtypes.  Raises what the ops raise."""
    for op in ops:
        shape = SHAPES.get(op.name) or op.bench_shapes("host")[0]
        for dtype in dict.fromkeys((*op.dtypes, *OPTIONS.get(op.name, ()))):
            yield from rows_of(op, shape, dtype, target, seed)


def rows_of(op: Op, shape: tuple[int, ...], dtype: str, target: Target, seed: int) -> Iterator[Row]:
    """Yield a row for each result of a bench problem, except exact ones."""
    problem = op.bench_problem(shape, dtype)
    call, known = op.inputs(problem, seed, target.xp), op.inputs(problem, seed, np)
    references = op.reference(*known.args, **known.kwargs)
    bounds = op.bound(*known.args, **known.kwargs, reference=references)
    outputs = [to_numpy(output) for output in as_tuple(op.run(*call.args, **call.kwargs))]
    for i, (output, reference, bound) in enumerate(zip(outputs, references, bounds, strict=True)):
        output, reference = map(np.asarray, in_parts(output, reference))
        inexact = np.broadcast_to(bound.elementwise > 0, reference.shape)
        if inexact.any():
            result = f"{i}: {output.dtype}" if len(outputs) > 1 else str(output.dtype)
            yield Row(op.name, shape, dtype, result, *_figures(output, reference, bound, seed))


def _figures(output: np.ndarray, reference: np.ndarray, bound: Bound, seed: int) -> tuple[Any, ...]:
    """Return Row's fields from `rms` on."""
    dtype, y = output.dtype, np.asarray(as_float64(output))
    inexact = np.broadcast_to(bound.elementwise > 0, reference.shape)
    ulp = np.where(inexact, np.asarray(gap(y, dtype)), 0.0)
    in_ulps = dtype.itemsize == 1
    random = np.random.default_rng(seed).choice((-1.0, 1.0), reference.shape)

    def is_found(s: int, signs: Array) -> bool:
        if in_ulps:
            planted = y + ulp * signs
        else:
            planted = as_float64(np.asarray(y * (1 + 2.0**-s * signs)).astype(dtype))
        return not compare_numbers(np.where(inexact, planted, y), dtype, reference, bound).ok

    planted = [
        most_found(is_found, signs, 0 if in_ulps else MOST) for signs in (random, np.sign(y))
    ]
    found = [np.abs(y + sign * ulp - reference) > bound.elementwise for sign in (-1, 1)]
    return (
        statistics(y - reference, reference, bound, dtype).rms,
        "ulp" if in_ulps else "relative",
        *planted,
        float(np.mean(found)),
    )


def most_found(is_found: Any, signs: Array, most: int) -> int | None:
    """Return the largest s up to `most` that is found, by bisection; None: not even 0."""
    low, high = -1, most + 1  # found, not found
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_found(middle, signs) else (low, middle)
    return low if low >= 0 else None


HEAD = ("op", "dtype", "shape", "result", "rms/expected", "random sign", "one sign", "one element")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a table line's cells.  row: a Row as in JSON."""
    words = {None: "none", 0: "1 ulp"} if row["unit"] == "ulp" else {None: "none"}
    planted = (words.get(row[name], f"2^-{row[name]}") for name in ("random", "one_sign"))
    shape = " x ".join(map(str, row["shape"]))
    return (
        *(row["op"], row["dtype"], shape, row["result"]),
        *(number(row["rms"]), *planted, f"{row['single']:.1%}"),
    )


FORMATS_HEAD = ("format of the result", "results", "random sign", "one sign")


def by_format(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return table lines, one per format: the finest and the coarsest error found."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["result"].rpartition(" ")[2], []).append(row)
    found = []
    for name, of in groups.items():
        spreads = []
        for sign in ("random", "one_sign"):
            ordered = sorted(of, key=lambda row: -1 if row[sign] is None else row[sign])
            column = HEAD.index("random sign" if sign == "random" else "one sign")
            ends = dict.fromkeys(cells(row)[column] for row in (ordered[-1], ordered[0]))
            spreads.append(" to ".join(ends))
        found.append((name, str(len(of)), *spreads))
    return found
