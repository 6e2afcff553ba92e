"""matmul in FP64, and how far the kernels may be from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from ..gemm.nvfp4 import NvFp4
from ..numerics import UNIT_ROUNDOFF_32, as_float64, finfo, namespace
from ..op import Bound
from .elementary import (
    GELU_ERROR,
    GELU_OF_TWICE,
    GELU_TANH_ULPS,
    GELU_TANH_ULPS_PER_UNIT,
    SIGMOID_ULPS,
    SIGMOID_ULPS_PER_UNIT,
)

_FLOOR = 2.0**-126  # what FP32 loses below its smallest normal number
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)

MMA_DEPTH = 16
MMA_ERROR = 21 * UNIT_ROUNDOFF_32
"""The error of adding 16 products of FP16 or BF16 numbers to an FP32 sum, relative to sum |a b|.

Tensor cores align the 16 exact products and the sum to the largest of them, cut what is below 2^-24 of
it, and cut the sum to FP32 again: 17 * 2^-24 + 2^-23 (Fasi, Higham, Mikaitis, Pranesh, PeerJ Computer
Science 7 (2021); later chips keep more bits, arXiv 2511.10909).  That covers 16 additions rounded one
after another too, as the host does them.  The other 2 * 2^-24 are for sums merged across warps, splits
and promotions, each over at least 16 of k.
"""


MMA_FP8_ERROR = 34 * 2.0**-13
"""The error of adding 32 products of FP8 numbers in a tensor core, relative to sum |a b|: Hopper's keep
13 fractional bits (arXiv 2511.10909).  After 128 of k the sum is promoted to FP32."""

FP8_UNIT = 2.0**-13
"""What is expected of it: a unit of the sum.  Each of the 33 numbers loses half a unit at most on average,
but products have 8 bits, so that only those below 1/64 of the largest number lose any."""


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    **_: Any,
) -> tuple[Any]:
    """activation(alpha * (a @ b) + bias) + residual in FP64."""
    xp = namespace(a)
    with np.errstate(all="ignore"):
        y = float(alpha) * product(as_float64(a), as_float64(b))
        if bias is not None:
            y = y + as_float64(bias)
        y = activate(xp, y, activation)
        if residual is not None:
            y = y + as_float64(residual)
    return (y,)


def matmul_bound(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    out: Any = None,
    accumulate: str = "float32",
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise: the error of the sum, carried through the epilogue, and one rounding at the end."""
    xp = namespace(a)
    exact = a.dtype == b.dtype == dtypes.int8
    fp8 = is_fp8(a.dtype, b.dtype)
    plain = bias is None and residual is None and activation is None and float(alpha) == 1.0
    if out_dtype is None:
        out_dtype = dtypes.of_product(a.dtype, b.dtype, plain)
    out_dtype = dtypes.NAMES.get(out_dtype, out_dtype)
    a, b, scale = as_float64(a), as_float64(b), float(alpha)
    with np.errstate(all="ignore"):
        total, error = sum_error(xp, a, b, exact, fp8, accumulate == "float16")
        roundings = (scale != 1.0) + exact
        return epilogue_bound(
            xp, scale * total, abs(scale) * error[0], abs(scale) * error[1], roundings, bias,
            activation, residual, out_dtype, reference[0],
        )  # fmt: skip


def scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    **_: Any,
) -> tuple[Any]:
    """activation((scale_a * a) @ (scale_b * b) + bias) in FP64."""
    xp = operand_namespace(a)
    with np.errstate(all="ignore"):
        y = product(*scaled(a, b, scale_a, scale_b))
        if bias is not None:
            y = y + as_float64(bias)
        return (activate(xp, y, activation),)


def scaled_mm_bound(
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    out: Any = None,
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise: the error of the scaled sum, carried through the epilogue, and one rounding."""
    xp = operand_namespace(a)
    dtype_a, dtype_b = operand_dtype(a), operand_dtype(b)
    fp8 = is_fp8(dtype_a, dtype_b)
    exact = dtype_a == dtype_b == dtypes.int8
    plain = all(x is None for x in (scale_a, scale_b, bias, activation))
    if out_dtype is None:
        out_dtype = dtypes.of_product(dtype_a, dtype_b, plain)
    out_dtype = dtypes.NAMES.get(out_dtype, out_dtype)
    with np.errstate(all="ignore"):
        stored = (as_float64(a), as_float64(b)) if fp8 else ()
        a, b = scaled(a, b, scale_a, scale_b)
        total, (worst, rms) = sum_error(xp, a, b, exact and plain, fp8)
        if fp8 and getattr(scale_a, "size", 1) > 1 and getattr(scale_b, "size", 1) > 1:
            # The factor of a block, scale_a * scale_b, may count as zero.
            worst = worst + _FLOOR * product(
                *(xp.nan_to_num(xp.abs(x), posinf=0.0) for x in stored)
            )
        # int8 sums are exact, but those of blocks are scaled and added.
        roundings = 0 if plain else 4
        return epilogue_bound(
            xp, total, worst, rms, roundings, bias, activation, None, out_dtype, reference[0]
        )


def operand_namespace(x: Any) -> Any:
    return namespace(x.data if isinstance(x, NvFp4) else x)


def operand_dtype(x: Any) -> np.dtype:
    return dtypes.float4_e2m1fn if isinstance(x, NvFp4) else x.dtype


def is_fp8(a: np.dtype, b: np.dtype) -> bool:
    """Whether tensor cores multiply FP8 numbers."""
    return all(x in (dtypes.float8_e4m3fn, dtypes.float8_e5m2) for x in (a, b))


def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any) -> tuple[Any, Any]:
    """a and b, each times its scales, in FP64."""
    xp = operand_namespace(a)
    a = a.dequantize() if isinstance(a, NvFp4) else as_float64(a)
    b = b.dequantize().swapaxes(-1, -2) if isinstance(b, NvFp4) else as_float64(b)
    k, n = a.shape[-1], b.shape[-1]

    def expand(scale: Any, axis: int, size: int) -> Any:
        """Blocks of 128 repeated to `size`, or as they are."""
        if scale.ndim < 2 or scale.shape[axis] in (1, size):
            return scale
        whole = [slice(None)] * scale.ndim
        whole[axis] = slice(size)
        return xp.repeat(scale, 128, axis)[tuple(whole)]

    if scale_a is not None:
        a = a * expand(xp.asarray(scale_a, np.float64), -1, k)
    if scale_b is not None:
        b = b * expand(expand(xp.asarray(scale_b, np.float64), -2, k), -1, n)
    return a, b


def product(a: Any, b: Any) -> Any:
    """a @ b of FP64 arrays; without cuBLAS, by numpy."""
    xp = namespace(a)
    if a.shape[-1] == 0:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return xp.zeros((*batch, a.shape[-2], b.shape[-1]))
    try:
        return xp.matmul(a, b)
    except ImportError:
        return xp.asarray(np.matmul(a.get(), b.get()))


def sum_error(
    xp: Any, a: Any, b: Any, exact: bool, fp8: bool = False, half_sums: bool = False
) -> tuple[Any, tuple[Any, Any]]:
    """(a @ b, (worst, rms) error of its FP32 sum) of FP64 arrays; exact: int8.  fp8: both are FP8.
    half_sums: the sum is in FP16.

    Blanchard, Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42 (2020), theorem 3.2: an error of
    every block of k, relative to the sum of the absolute values so far.  Rms: cutting is biased, so
    that the errors of blocks add up, but each is of the size of the partial sum, which is that of the
    result or, with random signs, of the square root of the sum of squares.
    """
    total = product(a, b)
    if exact:
        return total, (xp.zeros_like(total), xp.zeros_like(total))
    blocks = -(-a.shape[-1] // MMA_DEPTH)
    gamma = MMA_ERROR * blocks
    steps = min(blocks / 2, 4) if fp8 else 0
    gamma = gamma + steps * MMA_FP8_ERROR
    finite_a, finite_b = (xp.where(xp.isfinite(x), xp.abs(x), 0.0) for x in (a, b))
    magnitude = product(finite_a, finite_b)
    size = xp.sqrt(
        magnitude_squared(finite_a, finite_b) + xp.where(xp.isfinite(total), total, 0) ** 2
    )
    # Subnormal operands, products and partial sums may each count as zero.
    floor = _FLOOR * (
        2 * a.shape[-1]
        + xp.sum(finite_a, axis=-1, keepdims=True)
        + xp.sum(finite_b, axis=-2, keepdims=True)
    )
    worst = magnitude * (gamma / (1 - gamma)) + floor
    if half_sums:
        # A further rounding of each block's sum, to FP16, perhaps by cutting: 2^-10 of it.
        roundoff = finfo(dtypes.float16).unit_roundoff
        grown = np.expm1(blocks * np.log1p(gamma / max(blocks, 1) + 2 * roundoff))
        lost = blocks * 2 * finfo(dtypes.float16).underflow_error
        rms = (roundoff + UNIT_ROUNDOFF_32) * blocks * size
        return total, (magnitude * grown + lost + floor, rms + lost + floor)
    return total, (worst, (UNIT_ROUNDOFF_32 * blocks + steps * FP8_UNIT) * size + floor)


def magnitude_squared(a: Any, b: Any) -> Any:
    """sum (a b)^2"""
    return product(a * a, b * b)


# --- the epilogue --------------------------------------------------------------------------------


def activate(xp: Any, x: Any, activation: str | None) -> Any:
    """The activation in FP64, by the kernel's formulas."""
    if activation is None:
        return x
    if activation == "relu":
        return xp.where(x < 0, 0.0, x)
    if activation == "gelu":
        return 0.5 * x * (1 + erf(xp, x / math.sqrt(2)))
    if activation == "gelu_tanh":
        return x / (1 + xp.exp(-_twice_t(x)))  # x / 2 (1 + tanh(t))
    return x / (1 + xp.exp(-x))


def _twice_t(x: Any) -> Any:
    """gelu_tanh's."""
    return 2 * _SQRT_2_OVER_PI * (x + 0.044715 * x**3)


def erf(xp: Any, x: Any) -> Any:
    if xp is not np:
        from cupyx.scipy import special

        return special.erf(x)
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


_LIPSCHITZ = {None: 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""The largest derivative, rounded up."""


def activation_error(xp: Any, x: Any, activation: str | None, narrow: bool = False) -> Any:
    """The error of the FP32 activation at x; narrow: for results of 16 bits, which have a shorter
    gelu."""
    u = UNIT_ROUNDOFF_32
    if activation in (None, "relu"):
        return xp.zeros_like(x)
    size = xp.abs(x)
    if activation == "gelu":
        error = GELU_ERROR * u * size + _FLOOR * (1 + size)
        # Half of x, or of a bias, may be flushed to zero.
        short = GELU_OF_TWICE * xp.abs(activate(xp, x, "gelu")) + 2 * _FLOOR if narrow else 0.0
        return error + short
    if activation == "silu":
        ulps = SIGMOID_ULPS + SIGMOID_ULPS_PER_UNIT * xp.maximum(-x, 0)
    else:
        ulps = GELU_TANH_ULPS + GELU_TANH_ULPS_PER_UNIT * xp.maximum(-_twice_t(x), 0)
    # A sigmoid below 2^-126 is zero.
    return xp.abs(activate(xp, x, activation)) * (2 * ulps + 1) * u + 2 * _FLOOR * (size + 1)


def epilogue_bound(
    xp: Any,
    scaled: Any,
    worst: Any,
    rms: Any,
    roundings: int,
    bias: Any,
    activation: str | None,
    residual: Any,
    out_dtype: np.dtype,
    reference: Any,
) -> tuple[Bound]:
    """The Bound of the output, for a scaled sum and its errors.

    roundings: of the sum on its way to `scaled`.
    """
    u = UNIT_ROUNDOFF_32
    own = roundings * u * xp.abs(scaled)
    worst, squares = worst + own, rms**2 + own**2 / 3
    before = scaled
    if bias is not None:
        before = scaled + as_float64(bias)
        worst = worst + u * (xp.abs(before) + worst)
        squares = squares + (u * before) ** 2 / 3
    narrow = out_dtype in (dtypes.float16, dtypes.bfloat16)
    slope, own = _LIPSCHITZ[activation], activation_error(xp, before, activation, narrow)
    # The activation's own error is that at the rounded argument.
    worst = slope * worst * (1 + 2.0**-10) + own * (1 + 2.0**-10)
    squares = slope**2 * squares + own**2 / 3
    if residual is not None:
        worst = worst + u * (xp.abs(reference) + worst)
        squares = squares + (u * reference) ** 2 / 3
    # An infinite sum, which relu makes 0, has no error.
    infinite = xp.isinf(before)
    worst, squares = xp.where(infinite, 0.0, worst), xp.where(infinite, 0.0, squares)
    y = xp.abs(reference)
    if out_dtype == dtypes.int32:  # no rounding at all
        return (Bound(worst, xp.sqrt(squares)),)
    info = finfo(out_dtype)
    floor = info.underflow_error + 4 * _FLOOR
    worst = worst + info.unit_roundoff * (y + worst) + floor
    squares = squares + (info.unit_roundoff * y) ** 2 / 3
    return (Bound(worst, xp.sqrt(squares) + floor / math.sqrt(3)),)
