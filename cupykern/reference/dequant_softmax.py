"""dequant_softmax in FP64, and bounds of the kernels' errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from ..typing import Array, Factor, Namespace
from .approximate import Approximate
from .elementary import EXP2_BIAS, EXP2_RMS, EXP2_ULPS, RECIPROCAL_BIAS, RECIPROCAL_RMS
from .matmul import scaled_product
from .rounding import ROUNDING, rounding_rms, stored
from .softmax import errors, softmax


def dequant_softmax(
    a: Array, w: Array, scale_w: Factor | None, *, bias: Array | None = None, **_: Any
) -> tuple[Any]:
    """Return softmax(a @ (scale_w * w) + bias) along the last axis in FP64.

    >>> w = np.array([[1, 2, 3], [1, 0, -1]], np.int8)  # every logit is 2
    >>> (y,) = reference.dequant_softmax(np.ones((1, 2), np.float16), w, 1.0)
    >>> bool((y == 1 / 3).all())
    True
    """
    with np.errstate(all="ignore"):
        return softmax(_logits(a, w, scale_w, bias).exact)


def _logits(a: Array, w: Array, scale_w: Factor | None, bias: Array | None) -> Approximate:
    """Return the logits with the errors of FP32."""
    value = scaled_product(a, w, None, scale_w)
    return value if bias is None else value.plus(bias)


def _log_sum(xp: Namespace, x: Array) -> Array:
    """Return log(sum(exp(x))) along the last axis."""
    top = xp.maximum(xp.max(x, axis=-1, keepdims=True), -1e300)  # not -inf - -inf
    return top + xp.log(xp.sum(xp.exp(x - top), axis=-1, keepdims=True))


def dequant_softmax_bound(
    a: Array,
    w: Array,
    scale_w: Factor | None,
    *,
    bias: Array | None = None,
    dtype: Any = None,
    out: Array | None = None,
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound of the result.

    The relative error adds up: the logit's error, the mean of all logits' errors weighted by their
    shares of the sum, and softmax's own errors (softmax_bound, whose sums are at least as deep).
    Errors r that are not small count as exp(r) - 1.  An FP32 result has one rounding.  A 16-bit
    result has two: of the exponential, relative to the largest of its columns, and of the result.
    Both can underflow, as the last factor is at most 1.

    >>> a = np.array([[1.0, 0.5]], np.float16)
    >>> w = np.array([[1, 2, 3], [1, 0, -1]], np.int8)
    >>> exact = reference.dequant_softmax(a, w, 0.25)
    >>> (bound,) = reference.dequant_softmax_bound(a, w, 0.25, reference=exact)
    >>> y = cupykern.dequant_softmax(a, w, 0.25)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True

    Expected: both roundings, the first as if all columns had the largest number of the row.
    """
    xp, u = namespace(a), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    dtype = dtype if dtype is not None else a.dtype
    info = finfo(dtype)
    if y.size == 0:
        return (Bound(y, y),)
    with np.errstate(all="ignore"):
        logits = _logits(a, w, scale_w, bias)
        worst, rms = logits.worst + logits.floor, xp.sqrt(logits.square)
        e = errors(logits.exact, -1, None, None)
        narrow = info.unit_roundoff > u

        def of_sum(terms: Any) -> Any:
            return xp.sum(xp.where(y > 0, terms, 0.0), axis=-1, keepdims=True)

        # A logit of -inf gives 0 without an error; another y may be 0 only in FP64's range.
        seen = logits.exact > -np.inf
        log_y = xp.where(seen, logits.exact - _log_sum(xp, logits.exact), -np.inf)
        growth = _log_sum(xp, xp.where(seen, log_y + worst, -np.inf))  # of the sum
        # Errors of both exponentials and of the last factor; of the sum by its shares.
        own = 4 * EXP2_ULPS * u + 4 * u + narrow * info.unit_roundoff
        relative = (e.exponent + e.total + own) * (1 + 2.0**-10)
        relative = relative + worst + xp.maximum(of_sum(y * worst), growth)
        largest = xp.where(y > 0, y * xp.expm1(relative), xp.exp(log_y + relative))
        floor = 2 * 2.0**-126
        # Both results are at most 1, but for the sum's own errors.
        worst = xp.where(seen, xp.minimum(largest, 1.0 + 2.0**-6), 0.0)
        rms = xp.where(y > 0, rms, 0.0)
        shared = xp.sqrt(e.total_rms**2 + of_sum((y * rms) ** 2) + (RECIPROCAL_RMS * u) ** 2)
        own = e.exponent_rms**2 + rms**2 + shared**2 + (EXP2_RMS * u) ** 2 + ROUNDING**2
        own = own + e.rescaling**2
        expected, drift = y * xp.sqrt(own), e.constant * xp.abs(e.distance - e.mean_distance)
        if narrow:
            worst = worst + info.underflow_error
            row_sum = xp.exp(e.log_sum)
            expected = xp.sqrt(expected**2 + (rounding_rms(y * row_sum, dtype) / row_sum) ** 2)
        own_bias = xp.where(y > 0, logits.bias + xp.sqrt(xp.asarray(logits.shared)), 0.0)
        bias = own_bias + of_sum(y * own_bias) + drift + RECIPROCAL_BIAS * u
        bias = bias + xp.maximum(EXP2_BIAS * u, e.rescaling)
        return (stored(reference[0], dtype, worst, expected, floor=floor,
                       shared=y * shared, bias=y * bias),)  # fmt: skip
