"""Properties of the number formats that kernels read and write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import ml_dtypes
import numpy as np

from . import dtypes
from .targets import is_cupy
from .typing import Array, DTypeLike, Namespace

UNIT_ROUNDOFF_32 = 2.0**-24


@dataclass(frozen=True)
class FloatInfo:
    """Properties of a number format.

    eps: the gap between 1 and the next number.  unit_roundoff: half of it, the largest relative
    error of rounding to nearest.  min_normal, min_subnormal: the smallest positive numbers of
    either kind.
    max: the largest finite number.  underflow_error: the largest absolute error of storing a number
    below min_normal; FP32 kernels flush subnormals, so fp32 and bf16 lose all of it.
    """

    dtype: np.dtype
    eps: float
    unit_roundoff: float
    min_normal: float
    min_subnormal: float
    max: float
    underflow_error: float


@cache
def _finfo(dtype: np.dtype) -> FloatInfo:
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # it has no annotations
    eps, tiny = float(info.eps), float(info.smallest_normal)
    subnormal = float(info.smallest_subnormal)
    flushed = dtype in (dtypes.float32, dtypes.bfloat16)
    return FloatInfo(
        dtype=dtype,
        eps=eps,
        unit_roundoff=eps / 2,
        min_normal=tiny,
        min_subnormal=subnormal,
        max=float(info.max),
        underflow_error=tiny if flushed else subnormal / 2,
    )


_FLOATS = (
    dtypes.float16,
    dtypes.bfloat16,
    dtypes.float32,
    dtypes.float8_e4m3fn,
    dtypes.float8_e5m2,
    dtypes.float4_e2m1fn,
    np.dtype(np.float64),
)


def finfo(dtype: DTypeLike) -> FloatInfo:
    """FloatInfo of a format by dtype or name: float16, bfloat16, float32, float8_e4m3fn,
    float8_e5m2, float4_e2m1fn or float64 (of statistics).  Raises TypeError for others.

    >>> cupykern.finfo("float8_e4m3fn").max
    448.0
    >>> cupykern.finfo("bfloat16").eps
    0.0078125
    """
    return _finfo(dtypes.resolve(dtype, "dtype", _FLOATS))


def namespace(array: object) -> Namespace:
    """The namespace of `array`: cupy or numpy."""
    if is_cupy(array):
        import cupy

        return cupy
    return np


def to_numpy(x: Array) -> np.ndarray:
    """Copy a cupy array to the host; return a numpy array unchanged."""
    if isinstance(x, np.ndarray):
        return x
    if x.dtype.itemsize == 1:
        return cast(Any, x.view(np.uint8)).get().view(x.dtype)
    return cast(Any, x).get()


_WIDEN = """
const unsigned int bits = (unsigned int)code << (32 - 8 * sizeof(code));
const unsigned int magnitude = bits & 0x7fffffffu;
const double unit = __longlong_as_double(0x36a0000000000000ll);  // 2^-149
const double value = magnitude < 0x00800000u ? magnitude * unit : __uint_as_float(magnitude);
y = bits >> 31 ? -value : value;
"""


@cache
def _widen() -> Any:
    """A kernel that converts bfloat16 or float32 codes to FP64; CuPy's flushes subnormals."""
    import cupy

    return cupy.ElementwiseKernel("T code", "float64 y", _WIDEN, "cupykern_widen")


def as_float64(x: Array) -> Array:
    """Convert x exactly to FP64, in its namespace; also FP8 arrays, which CuPy cannot convert."""
    xp = namespace(x)
    if xp is not np and x.dtype in (dtypes.bfloat16, dtypes.float32):
        return _widen()(x.view(f"u{x.itemsize}"))
    if xp is not np and x.dtype in (dtypes.float8_e4m3fn, dtypes.float8_e5m2):
        codes = xp.asarray(np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float64))
        return codes[x.view(np.uint8)]
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x.astype(np.float64)


def as_real(x: Array) -> Array:
    """A complex array as reals, with real and imaginary parts interleaved along its last dim."""
    dtype = np.dtype(f"f{x.itemsize // 2}")
    found: Array = namespace(x).ascontiguousarray(x).view(dtype)
    return found


def power_of_two(x: Array) -> Array:
    """The largest power of two up to |x|, x in FP64.

    0 for zeros and subnormals, inf for inf and NaN.
    """
    return (namespace(x).abs(x).view(np.int64) & (0x7FF << 52)).view(np.float64)


def gap(x: Array, dtype: DTypeLike) -> Array:
    """The distance between neighbouring numbers of `dtype` at |x|, x in FP64; 1 for integers."""
    xp = namespace(x)
    if np.dtype(dtype).kind in "iub":
        return xp.ones_like(x)
    info = finfo(dtype)
    return xp.maximum(info.eps * power_of_two(x), info.eps * info.min_normal)


def row_max(magnitudes: Array) -> Array:
    """The maximum along the last axis, which is kept with size 1; 0 if the axis is empty."""
    xp = namespace(magnitudes)
    if magnitudes.shape[-1] == 0:
        return xp.zeros((*magnitudes.shape[:-1], 1), magnitudes.dtype)
    return xp.max(magnitudes, axis=-1, keepdims=True)
