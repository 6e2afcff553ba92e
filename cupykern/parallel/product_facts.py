"""Arguments of products split over ranks: their checks, and the facts that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from cupykern import arguments, dtypes
from cupykern.ops.checks.products import (
    check_activation,
    check_addend,
    check_precision,
    result_dtype,
)

from ..typing import Array, DTypeLike, Factor
from .agreement import Facts, described
from .collectives import FLOATS, length, shares
from .communicator import Communicator


def check_operands(
    comm: Communicator,
    a: Array,
    b: Array,
    name: str = "b",
    *,
    out_dtype: DTypeLike | None = None,
    activation: Any = None,
    precision: Any = "float32",
    alpha: Factor | None = 1.0,
) -> None:
    """Check operands and options.  Raises TypeError, ValueError and NotImplementedError."""
    target = arguments.target_of("a", a)
    arguments.same_place(name, b, a, "a")
    for of, x in (("a", a), (name, b)):
        comm.check_array(of, x)
        if x.ndim != 2:
            raise ValueError(f"{of} must have 2 dims; got shape {x.shape}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a's columns must be {name}'s rows; got shapes {a.shape} and {b.shape}")
    result_dtype(a.dtype, b.dtype, out_dtype, plain=True)
    check_activation(activation)
    check_precision(precision, a.dtype, b.dtype, target)
    arguments.finite_float("alpha", alpha, 1.0)


def is_number(scale: Any) -> bool:
    """Whether a scale is None, a number or an array of fewer than 2 dims: equal for all rows."""
    return getattr(scale, "ndim", 0) < 2


def check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def column_facts(
    a: Array,
    b: Array,
    options: tuple[Any, ...],
    input: Literal["replicated", "rows"],
    output: Literal["columns", "replicated"],
    addends: Mapping[str, Any],
    scales: Mapping[str, Any] | None = None,
) -> Facts:
    check_option("input", input, ("replicated", "rows"))
    check_option("output", output, ("columns", "replicated"))
    by_rows = input == "rows"
    same = {"a": described(a, *([0] if by_rows else [])), "b": described(b, 1)}
    for name, x in addends.items():
        same[name] = described(x, -1)
    scale_a = (scales or {}).get("scale_a")
    if (
        by_rows
        and scale_a is not None
        and not is_number(scale_a)
        and scale_a.shape[0] != a.shape[0]
    ):
        raise ValueError(f"scale_a must have a's {a.shape[0]} rows; got shape {scale_a.shape}")
    for name, x in (scales or {}).items():
        axis = 0 if name == "scale_a" else 1
        same[name] = described_scale(x, *([axis] if by_rows or axis else []))
    same["options"] = repr((*options, input, output))
    return Facts(same, (a.shape[0], b.shape[1]))


def row_facts(
    comm: Communicator,
    a: Array,
    factors: Mapping[str, Any],
    addends: Mapping[str, Any],
    scales: Mapping[str, Any],
    out_dtype: DTypeLike | None,
    output: Literal["replicated", "rows"],
    **options: Any,
) -> Facts:
    check_option("output", output, ("replicated", "rows"))
    for name, b in factors.items():
        check_operands(comm, a, b, name, **options)
    result_of(a, out_dtype)
    same = {"a": described(a, 1), **{name: described(b, 0) for name, b in factors.items()}}
    m, n = a.shape[0], next(iter(factors.values())).shape[1]
    rows = length(shares(m, comm.size)[comm.rank]) if output == "rows" else m
    check_addend("bias", addends.get("bias"), a, (1, n))
    residual = addends.get("residual")
    if residual is not None:
        check_addend("residual", residual, a, (rows, n))
        if residual.shape != (rows, n):
            raise ValueError(f"residual must have shape {(rows, n)}; got {residual.shape}")
    same |= {"bias": described(addends.get("bias"))}
    same |= {"residual": described(residual, *([0] if output == "rows" else []))}
    same |= {name: described_scale(x, 1 if name == "scale_a" else 0) for name, x in scales.items()}
    same["options"] = repr((*options.values(), out_dtype, output))
    return Facts(same)


def described_scale(x: Array, *free: int) -> str:
    """A scale's description; the values of numbers and arrays may differ between ranks."""
    if is_number(x):
        return "None" if x is None else "a number"
    return described(x, *free)


def result_of(a: Array, out_dtype: DTypeLike | None) -> np.dtype:
    if out_dtype is not None:
        return dtypes.resolve(out_dtype, "out_dtype", FLOATS)
    return dtypes.of_product(a.dtype, a.dtype, False)
