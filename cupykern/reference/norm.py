"""layer_norm and rms_norm in FP64, and how far the kernel may be from them.

The bounds sum first-order terms as normalize.cu makes them, u = 2^-24 the FP32 roundoff (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., sections 1.9 and 4.2; Chan, Golub, LeVeque,
The American Statistician 37 (1983) for the merged moments).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace, row_max
from ..op import Bound
from .quantize import codes_bound, divide, scale_bound, scale_of

_U = UNIT_ROUNDOFF_32
_FLUSHED = 2.0**-126


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: Any = None,
    residual: Any = None,
    return_stats: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """((s - mean) / sqrt(var + eps) * weight + bias[, s][, mean, rstd]) in FP64, s = x + residual."""
    with np.errstate(all="ignore"):
        row = _row(x, residual, True, 1e-5 if eps is None else float(eps))
        y = _affine((row.s - row.mean) * row.rstd, weight, bias)
    return _outputs(y, None, row, residual, return_stats, True)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    eps: Any = None,
    residual: Any = None,
    quantize: str | None = None,
    return_stats: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """(s / sqrt(mean(s^2) + eps) * weight[, row_scale][, s][, rstd]) in FP64, s = x + residual.

    Quantised values are y / row_scale, not rounded.
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        row = _row(x, residual, False, finfo(x.dtype).eps if eps is None else float(eps))
        y, scale = _affine(row.s * row.rstd, weight, None), None
        if quantize is not None:
            largest = row_max(xp.abs(y))
            scale = scale_of(largest, dtypes.QUANTIZED[quantize])
            y = divide(y, scale, dtypes.QUANTIZED[quantize])
    return _outputs(y, scale, row, residual, return_stats, False)


class _Row(NamedTuple):
    """s, and the statistics of its rows (a last dim of 1)."""

    s: Any
    mean: Any  # 0 for rms_norm
    variance: Any  # about `mean`
    rstd: Any
    eps: float


def _row(x: Any, residual: Any, centered: bool, eps: float) -> _Row:
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
    return _Row(s, mean, variance, 1 / xp.sqrt(variance + eps), eps)


def _affine(y: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        y = y * weight.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def _outputs(
    y: Any, scale: Any, row: _Row, residual: Any, return_stats: bool, centered: bool
) -> tuple[Any, ...]:
    stats = (row.mean[..., 0],) * centered + (row.rstd[..., 0],)
    return (
        y,
        *(() if scale is None else (scale,)),
        *(() if residual is None else (row.s,)),
        *(stats if return_stats else ()),
    )


class _Errors(NamedTuple):
    """Absolute errors of s, of the mean and of s - mean, relative ones of rstd; (worst, rms)."""

    s: Any
    mean: tuple[Any, Any]
    rstd: tuple[Any, Any]


def _errors(row: _Row, residual: Any, centered: bool, compensated: bool) -> _Errors:
    """What FP32 makes of the statistics.

    A thread adds up to 32 elements one after another, or merges the means of 8 vectors whose 8
    elements it has added (3 roundings each); then 6 levels of lanes and 4 of warps.  Squares about
    the mean of a vector, which is off by up to 9 u rms(s), are moved to the row's.  A warp merges the moments of up to 256 warps: 4 by each
    lane, then 32 lanes (as distances from one of them) in 5 levels and at most 10 more roundings; a
    row's chunks are merged one after another before.
    """
    xp = namespace(row.s)
    n = row.s.shape[-1]
    depth = min(n, 48) + 2 if n > 1 else 0  # one element is its own mean
    merges = 2 * 16 + 10 * (n // 4096)
    spread = xp.sqrt(row.variance)
    largest = row_max(xp.abs(row.s - row.mean))
    size = xp.sqrt(row.variance + row.mean**2)  # root mean square
    s = _U * xp.abs(row.s) if residual is not None else xp.zeros_like(row.s)
    of_s = _U * size if residual is not None else 0.0

    mean = mean_rms = xp.zeros_like(size)
    warp_mean = 0.0  # the error of a warp's mean, which its squares are about
    if centered:
        warp_mean = depth * _U * size
        # The second part of the mean is dropped, and mean * rstd rounded.
        lost = warp_mean + 2 * _U * xp.abs(row.mean)
        if compensated:
            lost = (depth + 2) * _U * (spread + warp_mean)
        mean = of_s + lost + merges * _U * largest + 4 * _FLUSHED
        mean_rms = _U * (4 * spread if compensated else 2 * size) + of_s / 4

    # Squares about a mean that is off by d are off by 2 d |s - mean| and d^2 (Cauchy-Schwarz).
    vector_mean = min(n, 9) * _U * size if centered and n > 1 else 0.0
    moved = warp_mean + vector_mean + of_s
    variance = (
        (depth + 4 + merges) * _U * row.variance
        + 2 * moved * spread
        + moved**2
        + (4 + merges) * _FLUSHED
    )
    ratio = variance / (row.variance + row.eps)
    # Whatever the variance is taken for, rstd is between 0 and 1 / sqrt(eps).
    most = xp.maximum(1.0, xp.sqrt((row.variance + row.eps) / row.eps)) if row.eps else np.inf
    rstd = xp.where(ratio < 0.5, xp.minimum(0.5 * ratio / (1 - ratio), most), most) + 4 * _U
    rstd = xp.where(xp.isfinite(row.variance), rstd, 0.0)  # an infinity's row: exactly 0, or NaN
    share = row.variance / (row.variance + row.eps)
    rstd_rms = _U * math.sqrt(6 + math.log2(max(n, 1)))
    rstd_rms = rstd_rms + xp.where(spread > 0, share * mean_rms / spread, 0.0)
    rstd_rms = xp.where(xp.isfinite(row.variance), rstd_rms, 0.0)
    return _Errors(s, (mean, mean_rms), (rstd, rstd_rms))


def layer_norm_bound(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    eps: Any = None,
    residual: Any = None,
    compensated: bool = False,
    return_stats: bool = False,
    dtype: Any = None,
    out: Any = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Elementwise: rstd |weight| times the errors of s, the mean and their difference, the relative
    errors of rstd and the products, one rounding to the output.

    Without `compensated` the mean is off by up to 52 u rms(s), with it by 52 u times the spread.
    """
    with np.errstate(all="ignore"):
        row = _row(x, residual, True, 1e-5 if eps is None else float(eps))
        errors = _errors(row, residual, True, compensated)
        worst, rms = _y_error(row, errors, weight, bias)
        y = _rounded(worst, rms, reference[0], finfo(dtype if dtype is not None else x.dtype))
        return _bounds(y, None, row, errors, x, residual, return_stats, True)


def rms_norm_bound(
    x: Any,
    weight: Any = None,
    *,
    eps: Any = None,
    residual: Any = None,
    quantize: str | None = None,
    return_stats: bool = False,
    dtype: Any = None,
    out: Any = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Elementwise: as layer_norm_bound with a mean of exactly 0.

    A row's scale has the largest relative error of its largest magnitudes; a quantised value those
    of y and the scale, and the format's rounding.
    """
    xp = namespace(x)
    with np.errstate(all="ignore"):
        row = _row(x, residual, False, finfo(x.dtype).eps if eps is None else float(eps))
        errors = _errors(row, residual, False, False)
        worst, rms = _y_error(row, errors, weight, None)
        scale = None
        if quantize is None:
            y = _rounded(worst, rms, reference[0], finfo(dtype if dtype is not None else x.dtype))
        else:
            q, row_scale = reference[:2]
            format_ = dtypes.QUANTIZED[quantize]
            size, largest_worst, largest_rms = (
                row_max(part) for part in (xp.abs(q * row_scale), worst, rms)
            )
            scale = scale_bound(row_scale, size, largest_worst, largest_rms, format_)
            y = codes_bound(q, row_scale, scale, worst, rms, format_)
        return _bounds(y, scale, row, errors, x, residual, return_stats, False)


def _y_error(row: _Row, errors: _Errors, weight: Any, bias: Any) -> tuple[Any, Any]:
    """(worst, rms) of y before it is rounded."""
    xp = namespace(row.s)
    distance = xp.abs(row.s - row.mean)
    z = distance * row.rstd
    worst = row.rstd * (errors.s + errors.mean[0] + 2 * _U * distance) * (1 + errors.rstd[0])
    worst = worst + z * (errors.rstd[0] + _U) + 2 * _FLUSHED
    rms = xp.sqrt(
        (row.rstd * errors.s / 2) ** 2
        + (row.rstd * errors.mean[1]) ** 2
        + (z * errors.rstd[1]) ** 2
        + (z * _U) ** 2
    )
    if weight is not None:
        w = xp.abs(weight.astype(np.float64))
        worst, rms, z = w * (worst + _U * z) + _FLUSHED, w * (rms + _U * z / 2), z * w
    if bias is not None:
        b = xp.abs(bias.astype(np.float64))
        worst, rms = worst + _U * (z + b), rms + _U * (z + b) / 2
    return worst, rms


def _rounded(worst: Any, rms: Any, y: Any, info: Any) -> Bound:
    xp = namespace(y)
    size = xp.abs(y)
    u, floor = info.unit_roundoff, info.underflow_error
    return Bound(
        worst + u * (size + worst) + floor,
        xp.sqrt(rms**2 + (u * size) ** 2 / 3) + floor / math.sqrt(3),
    )


def _bounds(
    y: Bound,
    scale: Bound | None,
    row: _Row,
    errors: _Errors,
    x: Any,
    residual: Any,
    return_stats: bool,
    centered: bool,
) -> tuple[Bound, ...]:
    bounds = [y] if scale is None else [y, scale]
    if residual is not None:
        bounds.append(_rounded(errors.s, errors.s / 2, row.s, finfo(x.dtype)))
    if return_stats:
        info = finfo(np.float32)
        if centered:
            mean, mean_rms = errors.mean
            bounds.append(_rounded(mean[..., 0], mean_rms[..., 0], row.mean[..., 0], info))
        rstd, (worst, rms) = row.rstd[..., 0], errors.rstd
        bounds.append(_rounded(rstd * worst[..., 0], rstd * rms[..., 0], rstd, info))
    return tuple(bounds)
