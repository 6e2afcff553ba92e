"""Argument checks of products of complex64 matrices."""

from __future__ import annotations

from typing import Any

from ... import arguments, dtypes
from ...numerics import namespace
from ...typing import Array
from .products import OF_DOUBLE, check_depth, check_shapes


def check_complex(
    a: Array, b: Array, bias: Array | None, residual: Array | None, **options: Any
) -> tuple[dict[str, Array | None], tuple[int, ...]]:
    """({"bias", "residual"} broadcast to the result's shape, that shape).

    options: other arguments of matmul; those for real products only must have their defaults.

    Raises TypeError and ValueError.
    """
    for name, x in (("a", a), ("b", b)):
        if x.dtype in dtypes.DOUBLE:
            dtypes.resolve(x.dtype, f"{name}'s dtype", (dtypes.complex64,), OF_DOUBLE)
    if not a.dtype == b.dtype == dtypes.complex64:
        raise TypeError(f"a and b must both be complex64, or neither; got {a.dtype} and {b.dtype}")
    out_dtype = options.pop("out_dtype")
    if out_dtype is not None:
        dtypes.resolve(out_dtype, "out_dtype", (dtypes.complex64,))
    if options.pop("accumulate") != "float32":
        raise ValueError("accumulate must be 'float32' for complex64 operands")
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} must be None for complex64 operands; got {value!r}")
    batch, m, n = check_shapes(a, b)
    check_depth(2 * a.shape[-1])
    shape = (*batch, m, n)
    return {
        name: _check_addend(name, x, a, shape)
        for name, x in (("bias", bias), ("residual", residual))
    }, shape


def _check_addend(name: str, x: Array | None, a: Array, shape: tuple[int, ...]) -> Array | None:
    if x is None:
        return None
    arguments.same_place(name, x, a, "a")
    if x.dtype != dtypes.complex64:
        raise TypeError(f"{name} must be complex64, as a and b; got {x.dtype}")
    try:
        return namespace(a).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {shape}; got shape {x.shape}") from None
