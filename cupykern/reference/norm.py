"""layer_norm and rms_norm in FP64, and bounds of the kernel's errors.

The bounds add up the first-order errors of the operations in kernels_cu/rows/norm_*.cuh, with the
FP32 unit roundoff u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
sections 1.9 and 4.2; Chan, Golub, LeVeque, The American Statistician 37 (1983) for the merged
moments).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..error_statistics import DEVIATIONS, pairs
from ..numerics import UNIT_ROUNDOFF_32, finfo, gap, namespace, row_max
from ..op import Bound
from ..typing import Array, Factor
from .elementary import (
    RSQRT_BIAS,
    RSQRT_RMS,
    RSQRT_SEGMENTS,
    RSQRT_TABLE_MAX,
    RSQRT_TABLE_RMS,
)
from .quantize import codes_bound, divide, scale_bound, scale_of
from .rounding import (
    RELATIVE_RMS,
    ROUNDING,
    SQUARES_BIAS,
    inexact_rms,
    rounding_rms,
    stored,
    sum_variance,
)

_U = UNIT_ROUNDOFF_32
QUANTIZED_BLOCK = 128  # columns that share a scale
_FLUSHED = 2.0**-126


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Any = None,
    residual: Array | None = None,
    return_stats: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """Return ((s - mean) / sqrt(var + eps) * weight + bias[, s][, mean, rstd]) in FP64, with
    s = x + residual.

    >>> y, mean, rstd = reference.layer_norm(
    ...     np.array([[1.0, 2.0, 3.0, 6.0]], np.float32), eps=0.5, return_stats=True
    ... )
    >>> mean.item(), rstd.item()  # the variance is 3.5
    (3.0, 0.5)
    >>> y.tolist()
    [[-1.0, -0.5, 0.0, 1.5]]
    """
    with np.errstate(all="ignore"):
        row = _row(x, residual, True, 1e-5 if eps is None else float(eps))
        y = _affine((row.s - row.mean) * row.rstd, weight, bias)
    return _outputs(y, None, row, residual, return_stats, True)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: Any = None,
    residual: Array | None = None,
    quantize: str | None = None,
    granularity: str = "row",
    return_stats: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """Return (s / sqrt(mean(s^2) + eps) * weight[, scale][, s][, rstd]) in FP64, with
    s = x + residual.

    >>> y, s = reference.rms_norm(np.float32([[1, -1]]), residual=np.float32([[2, 4]]), eps=0)
    >>> s.tolist(), y.tolist()  # s = x + residual has a root mean square of 3
    ([[3.0, 3.0]], [[1.0, 1.0]])

    Quantised values are y / scale, unrounded.
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        row = _row(x, residual, False, finfo(x.dtype).eps if eps is None else float(eps))
        y, scale = _affine(row.s * row.rstd, weight, None), None
        if quantize is not None:
            format_ = dtypes.QUANTIZED[quantize]
            scale = scale_of(_of_groups(xp.abs(y), granularity), format_)
            y = divide(y, _seen(scale, y.shape), format_)
    return _outputs(y, scale, row, residual, return_stats, False)


def _of_groups(sizes: Array, granularity: str) -> Any:
    """Return the largest value of each group with one scale: a row, or blocks of a row."""
    if granularity == "row":
        return row_max(sizes)
    *outer, columns = sizes.shape
    blocks = -(-columns // QUANTIZED_BLOCK)
    padded = namespace(sizes).zeros((*outer, blocks * QUANTIZED_BLOCK))
    padded[..., :columns] = sizes
    return padded.reshape(*outer, blocks, QUANTIZED_BLOCK).max(-1)


def _seen(groups: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast values of groups to the elements of an array of this shape."""
    if groups.shape[-1] == 1:
        return groups
    return namespace(groups).repeat(groups, QUANTIZED_BLOCK, axis=-1)[..., : shape[-1]]


class Row(NamedTuple):
    """s and the statistics of its rows (last axis of size 1)."""

    s: Array
    mean: Array  # 0 for rms_norm
    variance: Array  # about `mean`
    rstd: Array
    eps: float


def _row(x: Array, residual: Array | None, centered: bool, eps: float) -> Row:
    xp = namespace(x)
    s = x.astype(np.float64)
    if residual is not None:
        s = s + residual.astype(np.float64)
    n = np.float64(x.shape[-1])
    mean = xp.zeros((*x.shape[:-1], 1))
    if centered:
        mean = xp.sum(s, axis=-1, keepdims=True) / n
        mean = xp.where(xp.isfinite(mean), mean, np.nan)
    variance = xp.sum((s - mean) ** 2, axis=-1, keepdims=True) / n
    return Row(s, mean, variance, 1 / xp.sqrt(variance + eps), eps)


def _affine(y: Array, weight: Array | None, bias: Array | None) -> Any:
    if weight is not None:
        y = y * weight.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def _outputs(
    y: Array,
    scale: Factor | None,
    row: Row,
    residual: Array | None,
    return_stats: bool,
    centered: bool,
) -> tuple[Any, ...]:
    stats = (row.mean[..., 0],) * centered + (row.rstd[..., 0],)
    return (
        y,
        *(() if scale is None else (scale,)),
        *(() if residual is None else (row.s,)),
        *(stats if return_stats else ()),
    )


class _Errors(NamedTuple):
    """Absolute errors of s and of the mean, and relative errors of rstd.

    Fields without a suffix are the largest errors, without flushed subnormals of s; rms fields are
    the expected errors.  sum_rms and variance_rms exclude the last operations.
    """

    flushed: float  # of s: the error of flushing subnormals to zero
    s: Array
    s_rms: Any
    mean: Array
    mean_rms: Any
    sum_rms: Any  # of the mean: before its last rounding
    constant: float  # the relative error of 1 / n
    rstd: Array
    rstd_rms: Any
    variance_rms: Any  # of rstd: without the errors of the square root and the quotient
    rstd_bias: Any
    rstd_common: float  # of rstd: the part common to all rows


def _errors(
    row: Row, x: Array, residual: Array | None, centered: bool, compensated: bool
) -> _Errors:
    """Return the FP32 errors of the statistics.

    A thread adds up to 32 elements in sequence, or sums 8 vectors of 8 elements (3 roundings each)
    and merges their means.  Then 6 tree levels merge lanes and 4 merge warps.  Squares about the
    mean of a vector, which is off by up to 9 u rms(s), are moved to the row's mean.  One warp
    merges the moments of up to 256 warps: 4 per lane, then 32 lanes (as distances from one of them)
    in 5 levels and at most 10 more roundings.  Before that, chunks of a row are merged in sequence.

    Expected: the roundings of the sums (rounding.sum_variance), of the product with 1 / n and of
    the sum with eps (errors_of_eps); half of them appear in rstd.  Partial sums of distances from
    the mean grow with the square root of the number of terms.  An error d of the mean increases the
    variance by d^2; it has no first-order effect.
    """
    xp = namespace(row.s)
    n = row.s.shape[-1]
    depth = min(n, 48) + 2 if n > 1 else 0  # one element is its own mean
    merges = 2 * 16 + 10 * (n // 4096)
    spread = xp.sqrt(row.variance)
    largest = row_max(xp.abs(row.s - row.mean))
    size = xp.sqrt(row.variance + row.mean**2)  # root mean square
    flushed = _flushed(x) + (0.0 if residual is None else _flushed(residual) + _flushed(x))
    s = s_rms = xp.zeros_like(row.s)
    if residual is not None:
        # Known: sums of two FP32 numbers of one binade are ties or exact: half a gap or no error.
        s_rms = xp.where(
            row.s == row.s.astype(np.float32), 0.0, abs(row.s.astype(np.float32) - row.s)
        )
        s = math.sqrt(3) * inexact_rms(row.s)  # half a gap
    of_s = (_U * size if residual is not None else 0.0) + flushed
    # The roundings of x + residual, averaged over n elements.
    of_squares = xp.sum(s_rms**2, axis=-1, keepdims=True) / max(n, 1) ** 2
    constant = abs(float(np.float32(1) / np.float32(n)) * n - 1) if n else 0.0

    mean = sum_rms = mean_rms = xp.zeros_like(size)
    warp_mean = 0.0  # the error of a warp's mean, the centre of its squares
    if centered:
        warp_mean = depth * _U * size
        # The mean's second part is dropped, and mean * rstd is rounded.
        lost = warp_mean + 2 * _U * xp.abs(row.mean)
        if compensated:
            lost = (depth + 2) * _U * (spread + warp_mean)
        mean = of_s + lost + merges * _U * largest + 4 * _FLUSHED
        squares = row.variance * ROUNDING**2 * sum_variance(1.0, n) / max(n, 1) + of_squares
        squares = squares + row.variance * _of_origin(n) * (4 * ROUNDING**2 + constant**2)
        if compensated:
            # Distances from a mean that is not a 16-bit number have equal errors in a binade.
            squares = squares + ROUNDING**2 * row.variance
        else:
            of_sum = ROUNDING**2 * sum_variance(1 / max(n, 1), n) + constant**2
            squares = squares + row.mean**2 * of_sum
        sum_rms = mean_rms = xp.sqrt(squares)
        if not compensated:
            mean_rms = xp.sqrt(squares + rounding_rms(row.mean) ** 2)

    # An error d of the mean changes squares by 2 d |s - mean| and d^2 (Cauchy-Schwarz).
    vector_mean = min(n, 9) * _U * size if centered and n > 1 else 0.0
    moved = warp_mean + vector_mean + of_s
    variance = (
        (depth + 4 + merges) * _U * row.variance
        + 2 * moved * spread
        + moved**2
        + (4 + merges) * _FLUSHED
    )
    whole = row.variance + row.eps
    ratio = variance / whole
    # For any computed variance, rstd is between 0 and 1 / sqrt(eps).
    most = xp.maximum(1.0, xp.sqrt(whole / row.eps)) if row.eps else np.inf
    rstd = xp.where(ratio < 0.5, xp.minimum(0.5 * ratio / (1 - ratio), most), most) + 4 * _U
    rstd = xp.where(xp.isfinite(row.variance), rstd, 0.0)  # row of an infinity: exactly 0, or NaN

    share = row.variance / whole
    terms = (row.s - row.mean) ** 2 / xp.where(row.variance > 0, n * row.variance, 1.0)
    concentration = xp.sum(terms**2, axis=-1, keepdims=True)
    # Errors that are not random: of 16-bit squares, the mean, 1 / n and flushed subnormals, also
    # among squares and their sums.
    biased = 0.0 if centered or x.dtype == dtypes.float32 else SQUARES_BIAS * row.variance
    off = biased + constant * row.variance + flushed * (2 * spread + flushed)
    off = off + (4 + merges) * _FLUSHED
    off, off_by_mean = off / whole, mean_rms**2 / whole
    equal = _equal_squares(row, n) if centered else 0.0
    of_variance = sum_variance(concentration, n, equal=equal) + 1
    of_eps, off_by_eps = (x / whole for x in errors_of_eps(row, ROUNDING * xp.sqrt(of_variance)))
    roundings = share**2 * of_variance + xp.maximum(1.0, (of_eps / ROUNDING) ** 2)
    if centered and not compensated:
        # The means of parts of a row, the centres of their squares, are rounded too.
        of_squares = of_squares + 3 * rounding_rms(row.mean) ** 2 / max(n, 1)
    of_sums = 4 * share * of_squares / whole
    variance_rms = xp.sqrt(ROUNDING**2 * roundings + of_sums + off**2 + 3 * off_by_mean**2) / 2
    rstd_rms = xp.sqrt(variance_rms**2 + (RSQRT_RMS * _U) ** 2)
    rstd_bias = RSQRT_BIAS * _U + (off + off_by_mean + off_by_eps) / 2
    variance_rms, rstd_rms, rstd_bias = (
        xp.where(xp.isfinite(row.variance), part, 0.0)
        for part in (variance_rms, rstd_rms, rstd_bias)
    )
    return _Errors(
        *(flushed, s, s_rms, mean, mean_rms, sum_rms, constant),
        *(rstd, rstd_rms, variance_rms, rstd_bias),
        _U * min(RSQRT_TABLE_RMS * math.sqrt(alike_in_rsqrt(whole)), RSQRT_TABLE_MAX / DEVIATIONS),
    )


def _of_origin(n: int) -> float:
    """Return the mean squared distance of the first warp's mean from the row's, over the variance.

    Warps' means are merged as distances from the first warp's mean.  Relative to it three things
    are rounded: the distances (equally where the other means lie on one grid), their sums (twice
    the rounding of the total, over the levels of a tree) and the quotient.  Warps that share a row
    have at least 256 elements each.  Short FP32 rows have 128, which makes the error of the mean at
    most 1.2 times as large.
    """
    return max(1 / 256 - 1 / max(n, 1), 0.0)


def _equal_squares(row: Row, n: int) -> Any:
    """Return the share of a row's squares about the mean that FP32 sums cannot distinguish from the
    square of the mean.

    Their elements are so much smaller than a few others of the row that they count as zeros.  The
    share is 0 where the mean's square is at most half a gap of the sum.
    """
    xp = namespace(row.s)
    spacing = gap(n * row.variance, np.float32)
    alike = 2 * xp.abs(row.s * row.mean) + row.s**2 <= spacing / 2
    share = xp.sum(alike, axis=-1, keepdims=True) / max(n, 1)
    return share * (row.mean**2 > spacing / 2)


def errors_of_eps(row: Row, relative: Any) -> tuple[Any, Any]:
    """Return (size, |mean|) of the error of variance + eps, including eps in FP32.

    The error is not random where the FP32 variance lies on a grid as wide as the sum's.  Then all
    variances of a binade have the same error, that of rounding eps to the grid; an error of half a
    gap has either sign.  On a grid of width h 2^-i the error takes 2^i values; their mean is
    h / 2 - e, with e the remainder of eps on that grid.  For a variance much smaller than eps, the
    position of the sum between its neighbours is known, and so is the error.  The variance's own
    error, `relative` to it, smears that position (error_statistics._of_rounding).
    """
    xp = namespace(row.s)
    if not row.eps:
        return xp.zeros_like(row.variance), xp.zeros_like(row.variance)
    eps, whole = float(np.float32(row.eps)), row.variance + row.eps
    spacing = gap(whole, np.float32)
    grid = xp.minimum(gap(row.variance, np.float32), spacing)
    rest = eps - xp.floor(eps / grid) * grid
    fine = xp.where(rest > 0, grid / 2 - rest, 0.0)
    size = xp.where(grid < spacing, fine, xp.rint(eps / grid) * grid - eps)
    mean = xp.where((grid == spacing) & (rest == grid / 2), 0.0, size)
    places = whole / spacing
    smeared = xp.exp(-2 * math.pi**2 * (relative * row.variance / spacing) ** 2)
    known = xp.abs(places - xp.rint(places)) * spacing * smeared * (grid < spacing)
    size, mean = (xp.maximum(xp.abs(x + eps - row.eps), known) for x in (size, mean))
    return size, mean


def alike_in_rsqrt(arguments: Any) -> float:
    """Return the share of row pairs whose rsqrt has the same error, apart from roundings.

    Their arguments lie in one segment of the table or, beyond chance, at the same position in their
    segments (RSQRT_SEGMENTS).
    """
    xp, places = namespace(arguments), 16
    arguments = arguments[xp.isfinite(arguments) & (arguments > 0)]
    mantissas, exponents = xp.frexp(arguments)
    position = (2 * mantissas - 1) * RSQRT_SEGMENTS
    segments = xp.floor(position)
    found = pairs(xp.floor((position - segments) * places))
    at_place = max(found - 1 / places, 0.0) / (1 - 1 / places)
    return min(pairs(segments + RSQRT_SEGMENTS * (exponents % 2)) + at_place, 1.0)


def _flushed(x: Array) -> float:
    """Return the largest change of an element of x by flushing FP32 subnormals."""
    return 0.0 if x is None or x.dtype == dtypes.float16 else _FLUSHED


def layer_norm_bound(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Any = None,
    residual: Array | None = None,
    compensated: bool = False,
    return_stats: bool = False,
    dtype: Any = None,
    out: Array | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the outputs.

    The error of y is rstd |weight| times the errors of s, the mean and their difference, plus the
    relative errors of rstd and of the products, plus one rounding to the output.

    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    >>> exact = reference.layer_norm(x)
    >>> (bound,) = reference.layer_norm_bound(x, reference=exact)
    >>> bool((abs(cupykern.layer_norm(x) - exact[0]) <= bound.elementwise).all())
    True

    Without `compensated` the error of the mean is up to 52 u rms(s), with it 52 u times the spread.
    Expected: the errors of the mean, of -mean * rstd and of rstd are shared by a row.
    """
    with np.errstate(all="ignore"):
        row = _row(x, residual, True, 1e-5 if eps is None else float(eps))
        errors = _errors(row, x, residual, True, compensated)
        y = _y_errors(row, errors, weight, bias, compensated)
        stored_y = y.stored(reference[0], dtype if dtype is not None else x.dtype)
        return _bounds(stored_y, y.unsure, None, row, errors, x, residual, return_stats, True)


def rms_norm_bound(
    x: Array,
    weight: Array | None = None,
    *,
    eps: Any = None,
    residual: Array | None = None,
    quantize: str | None = None,
    granularity: str = "row",
    return_stats: bool = False,
    dtype: Any = None,
    out: Array | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the outputs: those of layer_norm_bound with a mean of exactly 0.

    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)
    >>> exact = reference.rms_norm(x, residual=x)
    >>> of_y, of_s = reference.rms_norm_bound(x, residual=x, reference=exact)
    >>> y, s = cupykern.rms_norm(x, residual=x)
    >>> bool((abs(y - exact[0]) <= of_y.elementwise).all())
    True
    >>> bool((abs(s - exact[1]) <= of_s.elementwise).all())
    True

    The error of a scale comes from the largest error of y in its group.  A quantised value has the
    errors of y and of the scale, and the rounding of the format.
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        row = _row(x, residual, False, finfo(x.dtype).eps if eps is None else float(eps))
        errors = _errors(row, x, residual, False, False)
        y = _y_errors(row, errors, weight, None, False)
        scale = None
        if quantize is None:
            bound = y.stored(reference[0], dtype if dtype is not None else x.dtype)
        else:
            q, scales = reference[:2]
            format_, seen = dtypes.QUANTIZED[quantize], _seen(scales, q.shape)
            worst, rms, floor, common = (
                _of_groups(xp.broadcast_to(part, q.shape), granularity)
                for part in (y.worst, y.rms, y.floor, y.common)
            )
            largest = _of_groups(xp.abs(q * seen), granularity)
            scale = scale_bound(scales, largest, worst, rms, floor, format_, common)
            of_seen = Bound(*(_seen(part, q.shape) for part in scale[:2]))
            bound = codes_bound(q, seen, of_seen, y.worst, y.rms, y.floor, format_)
        return _bounds(bound, y.unsure, scale, row, errors, x, residual, return_stats, False)


def rms_norm_errors(x: Array, weight: Array, eps: float) -> tuple[Array, YErrors]:
    """Return (rms_norm in FP64, its errors), for FP32 operations that follow."""
    with np.errstate(all="ignore"):
        row = _row(x, None, False, eps)
        y = _y_errors(row, _errors(row, x, None, False, False), weight, None, False)
        return _affine(row.s * row.rstd, weight, None), y


class YErrors(NamedTuple):
    """Errors of y before its last rounding.

    unsure: where an infinite weight multiplies a number whose sign is unknown.
    """

    worst: Any
    rms: Any
    floor: Any
    shared: Any
    bias: Array
    common: Any
    unsure: Any = False

    def stored(self, y: Array, dtype: Any) -> Bound:
        return stored(y, dtype, self.worst, self.rms, floor=self.floor, shared=self.shared,
                      bias=self.bias, common=self.common)  # fmt: skip


def _y_errors(
    row: Row, errors: _Errors, weight: Array | None, bias: Array | None, compensated: bool
) -> YErrors:
    """Return the errors of y.

    Kernels subtract the mean (compensated) or add -mean * rstd to s * rstd.  The rounding of the
    last operation is left to the result.
    """
    xp = namespace(row.s)
    distance = xp.abs(row.s - row.mean)
    z = distance * row.rstd
    worst = row.rstd * (errors.s + errors.mean + 2 * _U * distance) * (1 + errors.rstd)
    worst = worst + z * (errors.rstd + _U)
    floor = row.rstd * errors.flushed * (1 + errors.rstd) + 2 * _FLUSHED
    shift = 0.0 if compensated else rounding_rms(row.mean * row.rstd) * (row.mean != 0)
    shared = xp.sqrt((row.rstd * errors.mean_rms) ** 2 + (z * errors.rstd_rms) ** 2 + shift**2)
    other = distance if compensated else xp.where(row.mean != 0, row.s, 0.0)
    squares = (row.rstd * errors.s_rms) ** 2 + (rounding_rms(other * row.rstd) * (other != 0)) ** 2
    mean_bias = row.rstd * errors.constant * xp.abs(row.mean)
    mean_error = z * errors.rstd_bias + (0.0 if compensated else mean_bias)
    unsure: Any = False
    if weight is not None:
        w = xp.abs(weight.astype(np.float64))
        unsure = xp.isinf(w) & (z <= worst + floor)
        squares = w**2 * (squares + rounding_rms(z) ** 2)
        worst, floor = w * (worst + _U * z), w * floor + z * _flushed(weight) + _FLUSHED
        shared, mean_error, z = w * shared, w * mean_error, z * w
    common = z * errors.rstd_common
    if bias is not None:
        b = xp.abs(bias.astype(np.float64))
        squares = squares + rounding_rms(z) ** 2
        worst, floor = worst + _U * (z + b), floor + _flushed(bias)
    return YErrors(worst, xp.sqrt(squares + shared**2), floor, shared, mean_error, common, unsure)


def _bounds(
    y: Bound,
    unsure: Any,
    scale: Bound | None,
    row: Row,
    errors: _Errors,
    x: Array,
    residual: Array | None,
    return_stats: bool,
    centered: bool,
) -> tuple[Bound, ...]:
    # With eps = 0 an FP32 variance may be 0 where the FP64 one is not: 0 * inf.
    free = namespace(row.s).isinf(errors.rstd) & (row.variance > 0)
    bounds = [y._replace(free=free | unsure)]
    if scale is not None:
        bounds.append(scale._replace(free=free))
    if residual is not None:
        # A 16-bit s has a second rounding, after the FP32 sum.
        twice = float(x.dtype != dtypes.float32)
        bounds.append(
            stored(row.s, x.dtype, twice * errors.s, twice * errors.s_rms, floor=errors.flushed)
        )
    if return_stats:
        if centered:
            mean, worst, rms = (part[..., 0] for part in (row.mean, errors.mean, errors.sum_rms))
            bias = errors.constant * abs(mean)
            bounds.append(stored(mean, np.float32, worst, rms, bias=bias))
        rstd, worst, rms, bias = (
            part[..., 0] for part in (row.rstd, errors.rstd, errors.variance_rms, errors.rstd_bias)
        )
        own = (RSQRT_RMS**2 - RELATIVE_RMS**2) * _U**2
        rms = namespace(rstd).sqrt(rms**2 + own)
        common = rstd * errors.rstd_common
        bounds.append(
            stored(rstd, np.float32, rstd * worst, rstd * rms, bias=rstd * bias, common=common)
        )
    return tuple(bounds)
