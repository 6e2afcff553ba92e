"""softmax and log_softmax in FP64, and bounds of the kernels' errors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from ..typing import Array, Factor
from .elementary import (
    EXP2_BIAS,
    EXP2_RMS,
    EXP2_ULPS,
    LOG_ULPS,
    RECIPROCAL_BIAS,
    RECIPROCAL_RMS,
)
from .rounding import ROUNDING, inexact_rms, rounding_rms, stored, sum_variance, unless_flushed


def softmax(
    x: Array, axis: int = -1, *, mask: Array | None = None, scale: Factor | None = None, **_: Any
) -> tuple[Any]:
    """Return exp(s - max s) / sum(exp(s - max s)), s = scale * x, in FP64 along `axis`.

    >>> (y,) = reference.softmax(np.log(np.array([[1.0, 1.0, 2.0]], np.float32)))
    >>> y.dtype, y.round(6).tolist()
    (dtype('float64'), [[0.25, 0.25, 0.5]])
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        score, keep, sums, empty = _parts(x, axis, mask, scale)
        return (xp.where(empty, 0.0, xp.where(keep, xp.exp(score), 0.0) / sums),)


def log_softmax(
    x: Array, axis: int = -1, *, mask: Array | None = None, scale: Factor | None = None, **_: Any
) -> tuple[Any]:
    """Return s - max s - log(sum(exp(s - max s))), s = scale * x, in FP64 along `axis`.

    >>> (y,) = reference.log_softmax(np.zeros((1, 4), np.float32))
    >>> bool((y == -np.log(4.0)).all())
    True
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        score, keep, sums, empty = _parts(x, axis, mask, scale)
        return (xp.where(empty, -np.inf, xp.where(keep, score, -np.inf) - xp.log(sums)),)


def _parts(
    x: Array, axis: int, mask: Array | None, scale: Factor | None
) -> tuple[Any, Any, Any, Any]:
    """Return s - max s, the mask of kept elements, the sum of exp(s - max s) over them, and a mask
    of empty rows (their sum is 1)."""
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
    """Return the largest numbers of (additions, rescalings) of a term in a row's sum.

    In the softmax kernels a thread adds up to 64 elements of a batch, then merges 4 batches.  Trees
    merge up to 64 lanes, 16 warps and 16 blocks (6 + 4 + 4 levels).  Split rows also merge chunks,
    in sequence if there are more chunks than lanes.  Each merge may rescale.
    """
    merges = min(num_cols, 4 + 2 * (6 + 4) + 4 + num_cols // 8192)
    return min(num_cols, 64) + merges, merges


class Errors(NamedTuple):
    """Relative FP32 errors of a row's exponentials and of their sum."""

    distance: Any  # |s - max s|; 0 for masked elements
    log_sum: Any
    exponent: Any  # largest error of an exponential from its exponent
    total: Array  # largest error of the sum
    exponent_rms: Any
    total_rms: Any
    mean_distance: Any  # weighted by the terms' shares of the sum
    constant: float  # relative error of scale * log2 e, common to all exponents
    flushed: float  # largest error of an exponent by flushed subnormals; included in `exponent`
    rescaling: Any  # mean error of the sum from the exponentials that rescale its parts


_PART = 16  # least number of elements per thread, where several rows share a warp


def _rescaling(distance: Any, weights: Any, axis: int) -> Any:
    """Return by how much a row's sum is too small on average, relatively, because of rescaling.

    Kernels sum parts of a row relative to each part's largest element and merge parts pairwise.
    The part whose largest element is smaller by d is multiplied by exp(-d) and has the mean error
    of that exponential.  The other part is multiplied by exactly 1.  A row of n elements passes
    log2(n / 16) such levels.  The mean error of the exponential is EXP2_BIAS for arguments above 1
    and falls to a tenth of that towards 0; it is modelled as linear in between.

    distance: infinite for masked elements.  weights: shares of the sum.
    """
    xp, lost = namespace(distance), 0.0
    nearest = _of_parts(xp.min, xp.moveaxis(distance, axis, -1), _PART, np.inf)
    shares = _of_parts(xp.sum, xp.moveaxis(weights, axis, -1), _PART, 0.0)
    while (count := nearest.shape[-1]) > 1:
        merged = _of_parts(xp.min, nearest, 2, np.inf)
        behind = nearest - xp.repeat(merged, 2, axis=-1)[..., :count]
        argument = xp.where(xp.isfinite(behind), behind, 0.0) / math.log(2)
        lost = lost + xp.sum(shares * xp.minimum(argument, 1.0), axis=-1)
        nearest, shares = merged, _of_parts(xp.sum, shares, 2, 0.0)
    return EXP2_BIAS * UNIT_ROUNDOFF_32 * xp.expand_dims(lost + xp.zeros_like(shares[..., 0]), axis)


def _of_parts(reduce: Any, x: Any, size: int, fill: float) -> Any:
    """Return reduce() of every `size` neighbours along the last axis, padded with `fill`."""
    xp, missing = namespace(x), -x.shape[-1] % size
    if missing:
        x = xp.concatenate([x, xp.full((*x.shape[:-1], missing), fill)], axis=-1)
    return reduce(x.reshape(*x.shape[:-1], -1, size), axis=-1)


def errors(x: Array, axis: int, mask: Array | None, scale: Factor | None) -> Errors:
    """Return the FP32 errors of a row's exponentials and of their sum.

    An exponent (x - x_max) * (scale * log2 e) has the roundings of the subtraction, of log2 e and
    of their product, two more with a scale, and the loss by flushed subnormals.  Where two
    exponents add up, so do their distances.

    Expected: the roundings of the subtraction (if the difference is not an FP32 number), of the
    product and of the exponential; the errors of constants are known.  The sum has these errors
    weighted by the terms' shares, and those of its additions (rounding.sum_variance).
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    score, keep, sums, _ = _parts(x, axis, mask, scale)
    live = keep & xp.isfinite(score)
    distance = xp.abs(xp.where(live, score, 0.0))
    size = 1.0 if scale is None else abs(float(scale))
    flushed = 6 * 2.0**-126 * size
    exponent = (3 if scale is None else 5) * u * distance + flushed

    num_cols = x.shape[axis]
    additions, merges = _depth(num_cols)
    weights = xp.where(live, xp.exp(score), 0.0) / sums
    exp2_error = 2 * EXP2_ULPS * u
    total = (
        xp.sum(weights * exponent, axis=axis, keepdims=True)
        + exp2_error
        + (additions + merges) * u
        + merges * (exp2_error + u)
    )

    difference = inexact_rms(distance / size) * size if size else 0.0
    product = math.log(2) * rounding_rms(distance / math.log(2))
    own = difference**2 + product**2 + (EXP2_RMS * u) ** 2
    own = xp.where(distance > 0, own, 0.0)
    variance = ROUNDING**2 * sum_variance(
        xp.sum(weights**2, axis=axis, keepdims=True), num_cols
    ) + xp.sum(weights**2 * own, axis=axis, keepdims=True)
    mean_distance = xp.sum(weights * distance, axis=axis, keepdims=True)
    return Errors(
        distance,
        xp.log(sums),
        exponent,
        total,
        xp.sqrt(own),
        xp.sqrt(variance),
        mean_distance,
        _constant_error(scale),
        flushed,
        _rescaling(xp.where(live, distance, np.inf), weights, axis) if x.size else 0.0,
    )


def _constant_error(scale: Factor | None) -> float:
    """Return the relative error of scale * log2 e in FP32."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(1.0 if scale is None else scale) * np.float32(math.log2(math.e)))
    exact = (1.0 if scale is None else float(scale)) * math.log2(math.e)
    return abs(rounded / exact - 1) if exact else 0.0


def softmax_bound(
    x: Array,
    axis: int = -1,
    *,
    mask: Array | None = None,
    scale: Factor | None = None,
    dtype: Any = None,
    out: Array | None = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound of the result.

    The relative error adds up those of exp, of the sum, of its reciprocal (1 ulp) and of the
    products with it.  One rounding and underflow follow.  In register-resident rows exp is a
    product of two exponentials: relative to a part's largest element, and of that element relative
    to the row's.

    >>> x = np.array([[1.0, 2.0, 3.0]], np.float32)
    >>> exact = reference.softmax(x)
    >>> (bound,) = reference.softmax_bound(x, reference=exact)
    >>> bool((abs(cupykern.softmax(x) - exact[0]) <= bound.elementwise).all())
    True

    First-order terms are summed to r; r / (1 - r) covers the higher orders (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd ed., lemma 3.1; Blanchard, Higham, Higham, IMA J. Numer.
    Anal. 41 (2021), for softmax).

    Expected: the errors of both exponentials and of their product.  The errors of the row's sum and
    reciprocal are shared.  EXP2_BIAS cancels if all exponentials have it.  But exponentials of
    arguments near 0 have less, and those that rescale parts change only the sum.  So results may be
    too small or too large on average.
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    dtype = dtype if dtype is not None else x.dtype
    with np.errstate(all="ignore"):
        e = errors(x, axis, mask, scale)
        relative = e.exponent + 4 * EXP2_ULPS * u + e.total + 4 * u
        # Where the series fails: both results are at most 1, and an exponential is at most that of
        # the largest exponent; the sum has a term of 1.
        rounded = relative + finfo(dtype).unit_roundoff
        most = xp.minimum(2 * xp.exp(e.exponent - e.distance), 1.0)
        worst = xp.where(rounded < 1, y * relative / (1 - rounded), most)
        shared = xp.sqrt(e.total_rms**2 + (RECIPROCAL_RMS * u) ** 2)
        of_part = xp.where(e.distance > 0, (EXP2_RMS * u) ** 2 + ROUNDING**2, 0.0)
        drift = e.constant * xp.abs(e.distance - e.mean_distance)
        rms = xp.sqrt(e.exponent_rms**2 + drift**2 + shared**2 + of_part + e.rescaling**2)
        bias = drift + xp.maximum(EXP2_BIAS * u, e.rescaling) + RECIPROCAL_BIAS * u
        bound = stored(
            reference[0], dtype, worst, y * rms,
            floor=2 * 2.0**-126, shared=y * shared, bias=y * bias, axis=axis,
        )  # fmt: skip
        return (unless_flushed(bound, 2 * e.flushed * y),)


def log_softmax_bound(
    x: Array,
    axis: int = -1,
    *,
    mask: Array | None = None,
    scale: Factor | None = None,
    dtype: Any = None,
    out: Array | None = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound of the result.

    The absolute error adds up the roundings of s - max s and the logarithm, the relative error of
    the sum, and one rounding to the output.

    >>> x = np.array([[1.0, 2.0, 3.0]], np.float32)
    >>> exact = reference.log_softmax(x)
    >>> (bound,) = reference.log_softmax_bound(x, reference=exact)
    >>> bool((abs(cupykern.log_softmax(x) - exact[0]) <= bound.elementwise).all())
    True

    Expected: the roundings of x - max x and, with a scale, of the product.  The errors of the
    logarithm and of the sum are shared.  The mean error of the sum is EXP2_BIAS plus that of its
    rescaled parts.
    """
    xp, u = namespace(x), UNIT_ROUNDOFF_32
    y = xp.abs(reference[0])
    dtype = dtype if dtype is not None else x.dtype
    with np.errstate(all="ignore"):
        e = errors(x, axis, mask, scale)
        log_error = 2 * LOG_ULPS * u * xp.abs(e.log_sum)
        of_sum = xp.where(e.total < 1, e.total / (1 - e.total), np.inf)
        worst = e.exponent + of_sum + log_error + u * y

        size = 1.0 if scale is None else abs(float(scale))
        own = inexact_rms(e.distance / size) * size if size else 0.0
        drift = 0.0
        if scale is not None:
            own = xp.sqrt(own**2 + inexact_rms(e.distance) ** 2)
            drift = abs(float(np.float32(scale)) / float(scale) - 1) * e.distance if size else 0.0
        of_log = xp.where(e.log_sum > 0, rounding_rms(e.log_sum), 0.0)
        shared = xp.sqrt(of_log**2 + e.total_rms**2)
        bias = drift + e.constant * e.mean_distance + EXP2_BIAS * u + e.rescaling
        rms = xp.sqrt(own**2 + shared**2 + bias**2)
        bound = stored(reference[0], dtype, worst, rms, shared=shared, bias=bias, axis=axis)
        return (unless_flushed(bound, 2 * e.flushed),)
