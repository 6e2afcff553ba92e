"""softmax and log_softmax in FP64, and how far the kernels may be from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from .elementary import EXP2_ULPS, LOG_ULPS


def softmax(x: Any, axis: int = -1, *, mask: Any = None, scale: Any = None, **_: Any) -> tuple[Any]:
    """exp(s - max s) / sum(exp(s - max s)), s = scale * x, in FP64 along `axis`."""
    xp = namespace(x)
    with np.errstate(all="ignore"):
        score, keep, sums, empty = _parts(x, axis, mask, scale)
        return (xp.where(empty, 0.0, xp.where(keep, xp.exp(score), 0.0) / sums),)


def log_softmax(
    x: Any, axis: int = -1, *, mask: Any = None, scale: Any = None, **_: Any
) -> tuple[Any]:
    """s - max s - log(sum(exp(s - max s))), s = scale * x, in FP64 along `axis`."""
    xp = namespace(x)
    with np.errstate(all="ignore"):
        score, keep, sums, empty = _parts(x, axis, mask, scale)
        return (xp.where(empty, -np.inf, xp.where(keep, score, -np.inf) - xp.log(sums)),)


def _parts(x: Any, axis: int, mask: Any, scale: Any) -> tuple[Any, Any, Any, Any]:
    """s - max s, what is kept, the sum of exp(s - max s) over it, and where nothing is (sum 1)."""
    xp = namespace(x)
    score = x.astype(np.float64) * (1.0 if scale is None else float(scale))
    keep = xp.broadcast_to(xp.asarray(True if mask is None else mask), x.shape)
    empty = ~xp.any(keep, axis=axis, keepdims=True)
    if x.size == 0:
        return score, keep, xp.ones_like(empty, dtype=np.float64), empty
    top = xp.max(xp.where(keep, score, -np.inf), axis=axis, keepdims=True)
    score = score - xp.where(empty, 0.0, top)
    sums = xp.sum(xp.where(keep, xp.exp(score), 0.0), axis=axis, keepdims=True)
    return score, keep, xp.where(empty, 1.0, sums), empty


def _depth(num_cols: int) -> tuple[int, int]:
    """(additions, rescalings) that a term of a row's sum passes through, at most.

    softmax.cu: a thread adds up to 64 elements of a batch, then merges 4 batches; trees merge up to 64
    lanes, 16 warps and 16 blocks (6 + 4 + 4 levels), and for split rows once more chunks, one after
    another when there are more of them than lanes.  Each merge may rescale.
    """
    merges = min(num_cols, 4 + 2 * (6 + 4) + 4 + num_cols // 8192)
    return min(num_cols, 64) + merges, merges


def _errors(
    x: Any, axis: int, mask: Any, scale: Any
) -> tuple[Any, Any, Any, tuple[float, Any], tuple[float, Any]]:
    """(|s - max s|, keep, log of the sum, exponent errors, sum errors); errors (worst, rms).

    An exponent (x - x_max) * (scale * log2 e) takes a rounding each in the subtraction, log2 e and
    their product, two more with a scale, and what flushed subnormals lose; of two exponents that are
    added up, the distances are too.
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    score, keep, sums, _ = _parts(x, axis, mask, scale)
    distance = xp.abs(xp.where(keep & xp.isfinite(score), score, 0.0))
    roundings = 3 if scale is None else 5
    flushed = 6 * 2.0**-126 * (1.0 if scale is None else abs(float(scale)))
    exponent = roundings * u * distance + flushed
    exponent_rms = math.sqrt(roundings / 3) * u * distance + flushed

    additions, merges = _depth(x.shape[axis])
    weights = xp.where(keep & xp.isfinite(score), xp.exp(score), 0.0) / sums
    exp2_error = 2 * EXP2_ULPS * u
    total = (
        xp.sum(weights * exponent, axis=axis, keepdims=True)
        + exp2_error
        + (additions + merges) * u
        + merges * (exp2_error + u)
    )
    total_rms = xp.sum(weights * exponent_rms, axis=axis, keepdims=True) + u * math.sqrt(
        4 + math.log2(max(x.shape[axis], 1))
    )
    return distance, keep, xp.log(sums), (exponent, exponent_rms), (total, total_rms)


def softmax_bound(
    x: Any,
    axis: int = -1,
    *,
    mask: Any = None,
    scale: Any = None,
    dtype: Any = None,
    out: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise: relative errors of exp (where a row stays in registers as the product of two: over
    the largest number of a part, and of that over the row's), of the sum, of its reciprocal (1 ulp) and
    the products with it, one rounding; underflow.

    First-order terms summed, then r / (1 - r) for the higher orders (Higham, Accuracy and Stability
    of Numerical Algorithms, 2nd ed., lemma 3.1; Blanchard, Higham, Higham, IMA J. Numer. Anal. 41
    (2021), for softmax).
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    info = finfo(dtype if dtype is not None else x.dtype)
    with np.errstate(all="ignore"):
        _, _, _, exponent, total = _errors(x, axis, mask, scale)
        relative = exponent[0] + 4 * EXP2_ULPS * u + total[0] + 4 * u + info.unit_roundoff
        floor = 2 * 2.0**-126 + info.underflow_error
        # Beyond the series: both are shares of 1.
        worst = xp.where(relative < 1, y * relative / (1 - relative), 1.0) + floor
        relative_rms = xp.sqrt(
            exponent[1] ** 2 + total[1] ** 2 + (4 * u) ** 2 / 2 + info.unit_roundoff**2 / 3
        )
    return (Bound(worst, y * relative_rms + floor / math.sqrt(3)),)


def log_softmax_bound(
    x: Any,
    axis: int = -1,
    *,
    mask: Any = None,
    scale: Any = None,
    dtype: Any = None,
    out: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Elementwise, absolute: s - max s and the logarithm rounded, the sum's relative error, one
    rounding to the output."""
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    info = finfo(dtype if dtype is not None else x.dtype)
    with np.errstate(all="ignore"):
        distance, _, log_sum, exponent, total = _errors(x, axis, mask, scale)
        log_error = 2 * LOG_ULPS * u * xp.abs(log_sum)
        of_sum = xp.where(total[0] < 1, total[0] / (1 - total[0]), np.inf)
        worst = exponent[0] + of_sum + log_error + u * y
        worst = worst + info.unit_roundoff * (y + worst) + info.underflow_error
        rms = xp.sqrt(
            exponent[1] ** 2
            + total[1] ** 2
            + (log_error / 2) ** 2
            + (u * y) ** 2
            + (info.unit_roundoff * y) ** 2 / 3
        )
    return (Bound(worst, rms + info.underflow_error / math.sqrt(3)),)
