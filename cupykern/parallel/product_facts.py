"""Arguments of products split over ranks: their checks, and the facts that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cupykern import arguments, dtypes
from cupykern.ops.checks import gates
from cupykern.ops.checks.products import (
    check_activation,
    check_addend,
    check_precision,
    check_shapes,
    result_dtype,
)
from cupykern.ops.checks.scales import (
    check_quantized,
    check_scales,
    product_of_scales,
    read_operand,
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
    plain: bool = True,
) -> None:
    """Check operands and options.  plain: neither scales nor addends are given.

    Raises TypeError, ValueError and NotImplementedError.
    """
    target = arguments.target_of("a", a)
    arguments.same_place(name, b, a, "a")
    for of, x in (("a", a), (name, b)):
        comm.check_array(of, x)
        if x.ndim != 2:
            raise ValueError(f"{of} must have 2 dims; got shape {x.shape}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a's columns must be {name}'s rows; got shapes {a.shape} and {b.shape}")
    check_shapes(a, b)
    factor = arguments.finite_float("alpha", alpha, 1.0)
    check_activation(activation)
    plain = plain and activation is None and factor == 1.0
    result_dtype(a.dtype, b.dtype, out_dtype, plain)
    check_precision(precision, a.dtype, b.dtype, target)


def check_scaled(a: Any, scale_a: Any, factors: Mapping[str, tuple[Any, Any]]) -> None:
    """Check scales as `scaled_mm` and `dual_gemm_silu` do.  factors: name -> (b, its scale).

    Raises TypeError and ValueError.
    """
    x = read_operand("a", a, scale_a, a)
    others = [read_operand(name, b, scale, a) for name, (b, scale) in factors.items()]
    for y in others:
        product_of_scales(x, y)
    check_scales((x, *others), (), a.shape[0], others[0].shape[1])


def check_gated(b1: Any, b2: Any) -> None:
    """Raise TypeError and ValueError unless b1 and b2 have one shape and dtype."""
    if b1.shape != b2.shape:
        raise ValueError(f"b2 must have b1's shape {b1.shape}; got {b2.shape}")
    if b1.dtype != b2.dtype:
        raise TypeError(f"b1 and b2 must be of one dtype; got {b1.dtype} and {b2.dtype}")


def check_policy(policy: Any, a: Any, b: Any, out_dtype: Any, scales: Mapping[str, Any]) -> None:
    """Check the options of `dual_gemm_silu`.  Raises TypeError and ValueError."""
    arguments.check_choice("policy", policy, gates.POLICIES)
    gates.result_dtype(a.dtype, b.dtype, out_dtype)
    if dtypes.float32 in (a.dtype, b.dtype):
        gates.check_float32(policy, **scales)


def rows_of(addend: Any) -> int:
    """The rows of an addend of two dims; 1 for those of fewer, and for what is no array."""
    return int(addend.shape[-2]) if getattr(addend, "ndim", 0) > 1 else 1


def is_number(scale: Any) -> bool:
    """Whether a scale is None, a number or an array of fewer than 2 dims: equal for all rows.
    True also for arguments that are no scales, which `check_scaled` refuses."""
    return getattr(scale, "ndim", 0) < 2


def check_ways(input: Any, output: Any) -> None:
    """Check the options of column-parallel products.  Raises ValueError."""
    arguments.check_choice("input", input, ("replicated", "rows"))
    arguments.check_choice("output", output, ("columns", "replicated"))


def column_facts(
    a: Array,
    b: Array,
    options: tuple[Any, ...],
    input: Literal["replicated", "rows"],
    output: Literal["columns", "replicated"],
    addends: Mapping[str, Any],
    scales: Mapping[str, Any] | None = None,
) -> Facts:
    """The facts of a column-parallel product whose arguments are checked, `check_ways` included."""
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
    arguments.check_choice("output", output, ("replicated", "rows"))
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
    if scales:
        check_quantized(factors["b"].dtype)
        check_scaled(a, scales["scale_a"], {"b": (factors["b"], scales["scale_b"])})
    same |= {"bias": described(addends.get("bias"))}
    same |= {"residual": described(residual, *([0] if output == "rows" else []))}
    same |= {name: described_scale(x, 1 if name == "scale_a" else 0) for name, x in scales.items()}
    same["options"] = repr((*options.values(), out_dtype, output))
    return Facts(same)


def described_scale(x: Array, *free: int) -> str:
    """A checked scale's description; the values of numbers and arrays may differ between ranks."""
    if is_number(x):
        return "None" if x is None else "a number"
    return described(x, *free)


def result_of(a: Array, out_dtype: DTypeLike | None) -> np.dtype:
    if out_dtype is not None:
        return dtypes.resolve(out_dtype, "out_dtype", FLOATS)
    return dtypes.of_product(a.dtype, a.dtype, False)
