"""dequant_softmax in FP64, and how far the kernels may be from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, as_float64, finfo, namespace
from ..op import Bound
from .elementary import EXP2_ULPS
from .matmul import sum_error
from .softmax import _errors, softmax

_ROUNDINGS = 2  # of a sum: its scale, and one that is a number


def dequant_softmax(a: Any, w: Any, scale_w: Any, *, bias: Any = None, **_: Any) -> tuple[Any]:
    """softmax(a @ (scale_w * w) + bias) along the last axis in FP64."""
    with np.errstate(all="ignore"):
        return softmax(_logits(a, w, scale_w, bias)[0])


def _logits(a: Any, w: Any, scale_w: Any, bias: Any) -> tuple[Any, tuple[Any, Any]]:
    """(the logits, their (worst, rms) errors in FP32)"""
    xp, u = namespace(a), UNIT_ROUNDOFF_32
    scale = as_float64(scale_w) if hasattr(scale_w, "dtype") else float(scale_w)
    total, (worst, rms) = sum_error(xp, as_float64(a), as_float64(w), False)
    size = abs(scale)
    total, worst, rms = total * scale, worst * size, rms * size
    own = _ROUNDINGS * u * xp.abs(total)
    worst, squares = worst + own, rms**2 + own**2 / 3
    if bias is not None:
        total = total + as_float64(bias)
        worst = worst + u * (xp.abs(total) + worst)
        squares = squares + (u * total) ** 2 / 3
    return total, (worst, xp.sqrt(squares))


def dequant_softmax_bound(
    a: Any,
    w: Any,
    scale_w: Any,
    *,
    bias: Any = None,
    dtype: Any = None,
    out: Any = None,
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise, relative: a logit's error, and those of all weighted by their shares of the sum, are
    relative errors of the result; beside them those of softmax itself (softmax_bound), whose sums are
    at least as deep; one rounding, or two of 16 bits: of the exponential over the largest of its
    columns, which loses least where it counts most, and of the result; underflow of both, because the
    last factor is at most 1.  exp(r) - 1 for errors r that are not small.
    """
    xp, u = namespace(a), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    info = finfo(dtype if dtype is not None else a.dtype)
    if y.size == 0:
        return (Bound(y, y),)
    with np.errstate(all="ignore"):
        logits, (worst, rms) = _logits(a, w, scale_w, bias)
        _, _, _, exponent, total = _errors(logits, -1, None, None)

        def of_sum(errors: Any) -> Any:
            return xp.sum(xp.where(y > 0, y * errors, 0.0), axis=-1, keepdims=True)

        rounded = 2 if info.unit_roundoff > u else 1
        # Of the exponentials of both kinds, and the last factor.
        own = 4 * EXP2_ULPS * u + 4 * u + rounded * info.unit_roundoff
        relative = exponent[0] + total[0] + own
        relative = xp.expm1(relative * (1 + 2.0**-10) + worst + of_sum(worst))
        floor = 2 * 2.0**-126 + rounded * info.underflow_error
        squares = exponent[1] ** 2 + total[1] ** 2 + (4 * u) ** 2
        squares = squares + rounded * info.unit_roundoff**2 / 3
        relative_rms = xp.sqrt(squares + rms**2 + of_sum(rms) ** 2)
        # A logit of -inf is a zero, whatever its error.
        worst, rms = (xp.where(y > 0, y * part, 0.0) for part in (relative, relative_rms))
        return (Bound(worst + floor, rms + floor / math.sqrt(3)),)
