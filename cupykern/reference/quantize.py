"""quantize and quantize_nvfp4 in FP64, and bounds of the kernels' errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from ..typing import Array
from .rounding import ROUNDING, rounding_rms, stored

LARGEST = {dtypes.float8_e4m3fn: 448.0, dtypes.float8_e5m2: 57344.0, dtypes.int8: 127.0}
LEAST_SCALE = 2.0**-126


def scale_of(largest: Any, dtype: np.dtype) -> Any:
    """Return the decoding scale of groups with the largest magnitudes `largest`.

    The scale is 1 where the quotient is below the normal FP32 numbers (for zeros), and NaN where
    `largest` is not finite.
    """
    xp = namespace(largest)
    scale = largest / LARGEST[dtype]
    scale = xp.where(scale >= LEAST_SCALE, scale, 1.0)
    return xp.where(xp.isfinite(largest), scale, np.nan)


def divide(y: Array, scale: Array, dtype: np.dtype) -> Any:
    """Return y / scale, the unrounded codes.  int8 has no NaN: it becomes 0."""
    q = y / scale
    return namespace(y).where(namespace(y).isnan(q), 0.0, q) if dtype == dtypes.int8 else q


def scale_bound(
    scale: Array,
    largest: Any,
    worst: Any,
    rms: Any,
    floor: Any,
    dtype: np.dtype,
    common: Any = 0.0,
) -> Bound:
    """Return the Bound of a scale from the errors of its group's largest magnitude.

    floor: the change by flushed subnormals.  common: the part of `rms` common to all groups.
    The bound is infinite where rounding decides whether the scale is 1.
    """
    xp = namespace(scale)
    limit = LARGEST[dtype]
    worst = worst + floor
    unsure = xp.abs(largest - limit * LEAST_SCALE) <= worst + 2**-22 * limit * LEAST_SCALE
    bound = worst / limit + 2 * UNIT_ROUNDOFF_32 * scale
    expected = xp.sqrt((rms / limit) ** 2 + rounding_rms(scale) ** 2)
    # A scale of 1 has no error.
    expected = xp.where((scale == 1) | (floor / limit > expected), 0.0, expected)
    bound, expected = (xp.where(unsure, np.inf, part) for part in (bound, expected))
    return Bound(bound, expected, bias=expected, common=common / limit)


def codes_bound(
    q: Array, scale: Array, bound: Bound, worst: Any, rms: Any, floor: Any, dtype: np.dtype
) -> Bound:
    """Return the Bound of codes: the errors of y and the scale, and the format's rounding."""
    xp = namespace(q)
    u = UNIT_ROUNDOFF_32
    relative = bound.elementwise / scale + 2 * u  # a reciprocal and a product
    squares = (bound.rms / scale) ** 2 + 2 * ROUNDING**2
    floor = floor / scale + LEAST_SCALE
    moved = (worst / scale + xp.abs(q) * relative) / (1 - relative)
    moved_rms = xp.sqrt((rms / scale) ** 2 + q**2 * squares)
    if dtype == dtypes.int8:
        nan, size = xp.isnan(scale), xp.abs(q)
        worst_code = xp.where(nan, 0.0, 0.5 + moved + floor)
        expected = xp.sqrt(1 / 12 + moved_rms**2)
        # A code below half a unit becomes zero: its rounding is not random.
        random = ~nan & (size > 0.5) & (floor < expected)
        found = Bound(worst_code, xp.where(random, expected, 0.0), bias=moved_rms)
    else:
        found = stored(q, dtype, moved, moved_rms, floor=floor, bias=moved_rms)
    unsure = xp.isinf(bound.elementwise)
    elementwise, expected = (xp.where(unsure, np.inf, part) for part in found[:2])
    return Bound(elementwise, expected, bias=found.bias)


def _format(dtype: Any) -> np.dtype:
    return dtypes.QUANTIZED[dtype] if dtype in dtypes.QUANTIZED else np.dtype(dtype)


def _groups(x: Array, granularity: str, block: tuple[int, int]) -> tuple[Any, Any]:
    """Return the groups' largest magnitudes in the scale's shape, and broadcast to x's."""
    xp = namespace(x)
    size = xp.abs(x.astype(np.float64))
    if granularity != "block":
        axis = {"tensor": None, "row": -1, "column": -2}[granularity]
        largest = xp.max(size, axis=axis, keepdims=axis is not None)
        return largest, xp.broadcast_to(largest, x.shape)
    *outer, num_rows, num_cols = x.shape
    rows, cols = block
    row_tiles, col_tiles = -(-num_rows // rows), -(-num_cols // cols)
    padded = xp.zeros((*outer, row_tiles * rows, col_tiles * cols))
    padded[..., :num_rows, :num_cols] = size
    largest = xp.max(padded.reshape(*outer, row_tiles, rows, col_tiles, cols), axis=(-3, -1))
    seen = xp.repeat(xp.repeat(largest, rows, axis=-2), cols, axis=-1)
    return largest, seen[..., :num_rows, :num_cols]


def quantize(
    x: Array, dtype: Any, *, granularity: str = "tensor", block: tuple[int, int] = (1, 128)
) -> tuple[Any, Any]:
    """Return (x / scale, unrounded, and the scale) in FP64.

    >>> codes, scale = reference.quantize(np.float32([[1, -2, 4]]), "int8", granularity="row")
    >>> scale.item() * 127, codes.tolist()
    (4.0, [[31.75, -63.5, 127.0]])
    """
    xp, code = namespace(x), _format(dtype)
    if x.size == 0:
        shape = _groups_shape(x.shape, granularity, block)
        return xp.zeros(x.shape), xp.ones(shape)
    with np.errstate(all="ignore"):
        largest, seen = _groups(x, granularity, block)
        y = divide(x.astype(np.float64), scale_of(seen, code), code)
        return y, scale_of(largest, code)


def _groups_shape(
    shape: tuple[int, ...], granularity: str, block: tuple[int, int]
) -> tuple[int, ...]:
    *outer, num_rows, num_cols = (1, *shape)[-max(len(shape), 2) :]
    return {
        "tensor": (),
        "row": (*shape[:-1], 1),
        "column": (*outer, 1, num_cols),
        "block": (*outer, -(-num_rows // block[0]), -(-num_cols // block[1])),
    }[granularity]


def quantize_bound(
    x: Array,
    dtype: Any,
    *,
    granularity: str = "tensor",
    block: tuple[int, int] = (1, 128),
    reference: tuple[Any, Any],
) -> tuple[Bound, Bound]:
    """Return the Bounds of the codes and the scale.

    The scale has one rounding.  Codes have the scale's error, the roundings of a reciprocal and a
    product, and the rounding of the format.  Subnormal elements of x may count as zeros.

    >>> x = np.array([[1.0, -2.0, 4.0], [0.5, 0.25, 0.0]], np.float32)
    >>> exact = reference.quantize(x, "int8", granularity="row")
    >>> of_codes, of_scale = reference.quantize_bound(x, "int8", granularity="row", reference=exact)
    >>> codes, scale = cupykern.quantize(x, "int8", granularity="row")
    >>> bool((abs(codes - exact[0]) <= of_codes.elementwise).all())  # half a code, and a little
    True
    >>> bool((abs(scale - exact[1]) <= of_scale.elementwise).all())
    True
    """
    xp, code = namespace(x), _format(dtype)
    q, scale = reference
    if x.size == 0:
        return Bound(xp.zeros_like(q), xp.zeros_like(q)), Bound(0 * scale, 0 * scale)
    with np.errstate(all="ignore"):
        largest, seen = _groups(x, granularity, block)
        of_scale = scale_bound(scale, largest, 0.0, 0.0, 0.0, code)
        seen_scale = scale_of(seen, code)
        of_seen = scale_bound(seen_scale, seen, 0.0, 0.0, 0.0, code)
        floor = 0.0 if x.dtype == dtypes.float16 else LEAST_SCALE
        return codes_bound(q, seen_scale, of_seen, 0.0, 0.0, floor, code), of_scale


# --- NVFP4 ---------------------------------------------------------------------------------------

_E4M3, _E2M1 = finfo(dtypes.float8_e4m3fn), finfo(dtypes.float4_e2m1fn)


def quantize_nvfp4(x: Array, **_: Any) -> tuple[Any, Any, Any]:
    """Return (x, unrounded scales, global scale) in FP64.

    x is NaN in groups of 16 with a non-finite element, and so is their scale.

    >>> x = np.linspace(-6, 6, 16, dtype=np.float32)[None]
    >>> values, scales, global_scale = reference.quantize_nvfp4(x)
    >>> bool((values == x).all()), scales.round(3).item(), round(global_scale.item() * 2688, 3)
    (True, 448.0, 6.0)
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        y = x.astype(np.float64)
        finite = xp.isfinite(y)
        size = xp.where(finite, xp.abs(y), 0.0)
        largest = xp.max(size) / (_E2M1.max * _E4M3.max) if x.size else xp.asarray(0.0)
        global_scale = xp.where(largest >= LEAST_SCALE, largest, 1.0)
        groups = (*x.shape[:-1], x.shape[-1] // 16, 16)
        whole = xp.all(finite.reshape(groups), axis=-1)
        top = xp.max(size.reshape(groups), axis=-1) if x.size else xp.zeros(groups[:-1])
        scale = xp.where(whole, top / _E2M1.max / global_scale, np.nan)
        y = xp.where(xp.repeat(whole, 16, -1), y, np.nan)
        return y, scale, xp.asarray(global_scale).reshape(())


def quantize_nvfp4_bound(
    x: Array, *, layout: str = "plain", config: Any = None, reference: tuple[Any, Any, Any]
) -> tuple[Bound, Bound, Bound]:
    """Return the Bounds of the values, the scales and the global scale.

    The error of a value is half the e2m1 gap at x over the scale, which is rounded to e4m3.  With a
    scale rounded down the largest number saturates.  The bound is infinite where rounding decides
    whether global_scale is 1.

    >>> x = np.linspace(-6, 6, 16, dtype=np.float32)[None]
    >>> exact = reference.quantize_nvfp4(x)
    >>> of_values, of_scales, _ = reference.quantize_nvfp4_bound(x, reference=exact)
    >>> p = cupykern.quantize_nvfp4(x)
    >>> bool((abs(p.dequantize() - exact[0]) <= of_values.elementwise).all())
    True
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    y, scale, global_scale = reference
    with np.errstate(all="ignore"):
        unsure = (xp.abs(global_scale - LEAST_SCALE) <= 2**-20 * LEAST_SCALE) & (x.size > 0)
        of_global = xp.where(unsure, np.inf, 2 * u * global_scale)
        # Three FP32 operations precede the rounding of the scale; subnormals are flushed.
        moved, floor = 4 * u * scale, 2.0**-126 / global_scale
        scales = stored(scale, dtypes.float8_e4m3fn, moved, ROUNDING * scale, floor=floor)
        of_scale = xp.where(unsure, np.inf, scales.elementwise)
        seen, error = (xp.repeat(part, 16, -1) * global_scale for part in (scale, of_scale))
        low, high = xp.maximum(seen - error, 0), seen + error
        code = xp.abs(y) / low * (1 + 4 * u)
        half_gap = xp.where(code <= 2, 0.25, xp.where(code <= 4, 0.5, 1.0))
        # Above 6 the code is 6, with a scale that may be rounded down.
        beyond = xp.where(code >= _E2M1.max, xp.maximum(xp.abs(y) - _E2M1.max * low, 0), 0.0)
        worst = half_gap * high + beyond + 6 * u * (xp.abs(y) + high) + 4 * 2.0**-126
        # A scale of zero loses the whole value.
        worst = xp.where(low == 0, xp.maximum(xp.abs(y), worst), worst)

        # Expected: a rounding to e2m1 with the unrounded scale.  Values below half the smallest
        # code become zero, like all values with a scale of zero.
        size = xp.abs(y / seen)
        own = (xp.where(size <= 2, 0.5, xp.where(size <= 4, 1.0, 2.0)) * seen) ** 2 / 12
        random = (size > 0.25) & (low > 0) & (seen < np.inf) & ~unsure
        rms = xp.where(random, xp.sqrt(own), 0.0)
        numbers = Bound(worst, rms, bias=own / xp.abs(y))
        global_rms = xp.where(unsure | (global_scale == 1), 0.0, rounding_rms(global_scale))
    return numbers, scales._replace(elementwise=of_scale), Bound(of_global, global_rms)
