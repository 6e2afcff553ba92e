"""Norms of sums over ranks in FP64, and bounds of the errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...numerics import as_float64, namespace
from ...op import Bound
from ...typing import Array
from ..approximate import Approximate
from ..norm import layer_norm, layer_norm_bound, rms_norm, rms_norm_bound
from .products import of_numbers, sum_in_order


def all_reduce_norm(
    x: Sequence[Array],
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    residual: Array | None = None,
    centered: bool,
) -> tuple[Any, ...]:
    """Return (norm of s[, s]) in FP64, with s the sum of all ranks' x and the residual.

    >>> ranks = [np.float32([[1, -1]]), np.float32([[2, 4]])]  # the sum is 3, 3
    >>> reference.parallel.all_reduce_norm(ranks, eps=0, centered=False)[0].tolist()
    [[1.0, 1.0]]

    centered: True for layer_norm, False for rms_norm.
    """
    s: Any = sum(as_float64(part) for part in x)
    if residual is not None:
        s = s + as_float64(residual)
    (y,) = layer_norm(s, weight, bias, eps=eps) if centered else rms_norm(s, weight, eps=eps)
    return (y,) if residual is None else (y, s)


def all_reduce_norm_bound(
    x: Sequence[Array],
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float,
    residual: Array | None = None,
    centered: bool,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds: the norm's own errors, plus the effect of the error e of the sum s
    (`sum_in_order`).

    >>> x, call = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32), {"eps": 1e-6, "centered": False}
    >>> exact = reference.parallel.all_reduce_norm([x], **call)
    >>> (bound,) = reference.parallel.all_reduce_norm_bound([x], **call, reference=exact)
    >>> y = parallel.all_reduce_rms_norm(parallel.SelfCommunicator(), x, eps=1e-6)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True

    An error e of s changes y by |w| (rstd e + |s - mean| |change of rstd|), and rstd, to first
    order, by rstd^3 mean(|s - mean| e).  With a mean, e becomes e + mean(e).
    """
    xp = namespace(x[0])
    with np.errstate(all="ignore"):
        total = sum_in_order(of_numbers(as_float64(part)) for part in x)
        dtype = x[0].dtype if residual is None else residual.dtype
        summed, added = total.exact.astype(np.float32), None
        whole = total
        if residual is not None:
            added, whole = residual.astype(np.float32), total.plus(residual)
        options: dict[str, Any] = {
            "eps": eps,
            "residual": added,
            "dtype": dtype,
            "reference": reference,
        }
        if centered:
            bounds = layer_norm_bound(summed, weight, bias, **options)
        else:
            bounds = rms_norm_bound(summed, weight, **options)
        moved, expected = _moved(xp, total, whole.exact, weight, eps, centered)
        y = bounds[0]._replace(
            elementwise=bounds[0].elementwise + moved,
            rms=xp.sqrt(bounds[0].rms ** 2 + expected**2),
            bias=np.inf,
        )
        if residual is None:
            return (y,)
        return y, whole.stored(reference[1], dtype)._replace(bias=np.inf)


def _moved(
    xp: Any, total: Approximate, s: Any, weight: Array | None, eps: float, centered: bool
) -> tuple[Any, Any]:
    """Return the (largest, expected) change of y by the error of the sum."""
    mean = xp.mean(s, axis=-1, keepdims=True) if centered else 0.0
    distance = abs(s - mean)
    rstd = 1 / xp.sqrt(xp.mean(distance**2, axis=-1, keepdims=True) + eps)
    w = 1.0 if weight is None else abs(as_float64(weight))

    def carried(e: Any) -> Any:
        if centered:
            e = e + xp.mean(e, axis=-1, keepdims=True)
        return w * rstd * (e + distance * rstd**2 * xp.mean(distance * e, axis=-1, keepdims=True))

    return 1.01 * carried(total.worst + total.floor), carried(xp.sqrt(total.square))
