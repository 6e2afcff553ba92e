"""Argument checks of matrix products."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ... import arguments, dtypes
from ...gemm import product
from ...gemm.product import ACTIVATIONS
from ...gemm.split_float32 import flushes_parts
from ...numerics import namespace
from ...precisions import PRECISIONS, SPLITS, canonical
from ...targets import Target
from ...typing import Array, DTypeLike

INPUTS = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
    dtypes.int8,
)
FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
OF_DOUBLE = "numpy.matmul or cupy.matmul"
"""Functions to use for double precision, named in error messages."""


class Shaped(Protocol):
    """An array, or an operand that was read."""

    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


_MAX_K = 2**31
_MAX_INT8_K = (2**31 - 1) // 128**2


def check_accumulate(accumulate: Any, a: np.dtype, b: np.dtype, target: Target) -> bool:
    """Whether accumulators are FP16.  Raises ValueError and NotImplementedError."""
    arguments.check_choice("accumulate", accumulate, ("float32", "float16"))
    if accumulate == "float32":
        return False
    if not a == b == dtypes.float16:
        raise NotImplementedError(
            f"accumulate='float16' is for products of float16 alone; got {a} and {b}"
        )
    if target.name == "hip":
        raise NotImplementedError("accumulate='float16': AMD's matrix cores do not sum in FP16")
    return True


def check_precision(precision: Any, a: np.dtype, b: np.dtype, target: Target) -> str:
    """The canonical name of the precision.  Raises ValueError and NotImplementedError."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        names = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"precision must be one of {names}; got {precision!r}")
    if precision == "float32":
        return precision
    if dtypes.float32 not in (a, b):
        raise ValueError(f"precision={precision!r} is of float32 operands; got {a} and {b}")
    name = canonical(precision)
    if name in SPLITS and flushes_parts(SPLITS[name], target.arch):
        raise NotImplementedError(
            f"precision={precision!r}: {target.arch} flushes FP16 parts that are subnormal; BF16 "
            f'parts ("bf16x3", "bf16x6", "bf16x9") and "fma" are possible'
        )
    return name


def result_dtype(
    a: np.dtype,
    b: np.dtype,
    out_dtype: DTypeLike | None,
    plain: bool,
    of_formula: tuple[np.dtype, ...] = (),
) -> np.dtype:
    """Return the result's dtype.

    plain: the product has no scales, alpha, epilogue or formula; int8 products may then be int32.
    of_formula: the dtypes that only a formula allows (ReadFormula.result_dtypes).

    Raises TypeError, also for a pair of dtypes that cannot be multiplied.
    """
    for name, dtype in (("a", a), ("b", b)):
        dtypes.resolve(dtype, f"{name}'s dtype", (*INPUTS, product.FP4), OF_DOUBLE)
    product.compute_dtype(a, b)
    if out_dtype is None:
        return dtypes.of_product(a, b, plain)
    whole = a == b == dtypes.int8 and plain
    allowed = *FLOATS, *((dtypes.int32,) if whole else ())
    return resolve_result(out_dtype, allowed, of_formula, "acc")


def resolve_result(
    out_dtype: DTypeLike | None,
    allowed: tuple[np.dtype, ...],
    of_formula: tuple[np.dtype, ...],
    formula: str,
) -> np.dtype:
    """out_dtype as one of `allowed` or `of_formula`.  formula: the epilogue formula of the op
    itself, for the error message.  Raises TypeError."""
    try:
        return dtypes.resolve(out_dtype, "out_dtype", (*allowed, *of_formula))
    except TypeError as refusal:
        try:
            narrow = dtypes.resolve(out_dtype, "out_dtype", product.NARROW)
        except TypeError:
            raise refusal from None
        raise TypeError(
            f"out_dtype may be {narrow} where there is a formula: pass epilogue={formula!r}"
        ) from None


def check_depth(k: int) -> None:
    """Raise ValueError for K >= 2^31: Hopper's kernels count K in 32 bits."""
    if k >= _MAX_K:
        raise ValueError(f"K must be less than 2^31; got {k}")


def check_shapes(a: Shaped, b: Shaped) -> tuple[tuple[int, ...], int, int]:
    """(batch, M, N).  Raises ValueError."""
    for name, x in (("a", a), ("b", b)):
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dims; got shape {x.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a's columns must be b's rows; got shapes {a.shape} and {b.shape}")
    check_depth(a.shape[-1])
    if a.dtype == dtypes.int8 and a.shape[-1] > _MAX_INT8_K:
        raise ValueError(
            f"int32 accumulators are exact up to K = {_MAX_INT8_K}; got K = {a.shape[-1]}"
        )
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"the batches of shapes {a.shape} and {b.shape} do not broadcast"
        ) from None
    return batch, a.shape[-2], b.shape[-1]


def check_addend(name: str, x: Array | None, a: Array, shape: tuple[int, ...]) -> Array | None:
    """`x` broadcast to `shape`, or None.  Raises TypeError and ValueError."""
    if x is None:
        return None
    arguments.same_place(name, x, a, "a")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16 or float32; got {x.dtype}")
    try:
        return namespace(a).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {shape}; got shape {x.shape}") from None


def check_activation(activation: Any) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be a string or None; got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be one of {names}; got {activation!r}")
