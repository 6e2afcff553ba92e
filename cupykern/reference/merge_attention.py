"""merge_attention in FP64, and the bound of the kernel's errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ..op import Bound
from ..typing import Array
from .elementary import EXP2_RMS, EXP2_ULPS, LOG_ULPS
from .rounding import ROUNDING, inexact_rms, rounding_rms, stored

_TINY = 2.0**-126


def merge_attention(
    out1: Array, lse1: Array, out2: Array, lse2: Array, *, layout: str = "bhsd", **_: Any
) -> tuple[Any, ...]:
    """Return (out, lse) over both sets of keys in FP64.

    out1 and out2 are weighted by their shares of exp(lse1) + exp(lse2).

    >>> one, five = (np.full((1, 1, 1, 8), x, np.float32) for x in (1, 5))
    >>> lse = np.zeros((1, 1, 1), np.float32)
    >>> out, both = reference.merge_attention(one, lse, five, lse + np.log(3.0))  # shares 1 : 3
    >>> out[0, 0, 0, 0].round(6).item(), np.exp(both).round(6).item()
    (4.0, 4.0)

    A partial result without keys (lse -inf) counts as zero, whatever its values.
    """
    with np.errstate(all="ignore"):
        m = _Merge.of(out1, lse1, out2, lse2, layout)
        lse = m.top + m.xp.log(m.weights[0] + m.weights[1])
        return m.parts[0] + m.parts[1], m.restore(lse)


def merge_attention_bound(
    out1: Array,
    lse1: Array,
    out2: Array,
    lse2: Array,
    *,
    layout: str = "bhsd",
    reference: tuple[Any, ...],
    **_: Any,
) -> tuple[Bound, ...]:
    """Return the Bounds of out and lse.

    A weight exp(d), d = lse_i - max, has the relative error e_i: 2.25 u32 |d| (the roundings of d,
    of its product with log2(e), and of that constant) plus the error of the exponential.  The sum
    of weights has the error e_s = p_1 e_1 + p_2 e_2 + u32.  A share p_i has the error e_i + e_s
    plus the roundings of the reciprocal and of a product.  The output adds the roundings of a
    product and of a sum.  Shares of finite log-sum-exps are at least 2^-126.

    >>> one, five = (np.full((1, 1, 1, 8), x, np.float32) for x in (1, 5))
    >>> parts = one, np.zeros((1, 1, 1), np.float32), five, np.ones((1, 1, 1), np.float32)
    >>> exact = reference.merge_attention(*parts)
    >>> bounds = reference.merge_attention_bound(*parts, reference=exact)
    >>> for y, x, bound in zip(cupykern.merge_attention(*parts), exact, bounds):
    ...     print((abs(y - x) <= bound.elementwise).all())
    True
    True
    """
    u = UNIT_ROUNDOFF_32
    with np.errstate(all="ignore"):
        m = _Merge.of(out1, lse1, out2, lse2, layout)
        xp, (y, lse) = m.xp, reference
        total = m.weights[0] + m.weights[1]
        of_weights = [2.25 * u * xp.minimum(-d, 128.0) + 2 * EXP2_ULPS * u for d in m.distances]
        of_sum = sum(p * e for p, e in zip(m.shares, of_weights, strict=True)) + u
        worst = u * abs(y)
        for part, e in zip(m.parts, of_weights, strict=True):
            worst = worst + abs(part) * (e + of_sum + 3 * u)[..., None]
        sizes = sum(
            xp.where(xp.isfinite(x) & keep[..., None], abs(x), 0.0)
            for x, keep in zip(m.outs, m.kept, strict=True)
        )
        # The larger weight is exactly 1; the error of the smaller one changes both shares.
        smaller = xp.minimum(*m.shares)
        d = xp.minimum(abs(m.distances[0] - m.distances[1]), 128.0)
        roundings = xp.where(d == 0, 0.0, inexact_rms(d) ** 2 + (ROUNDING * d) ** 2)
        exponential = xp.where(d == 0, 0.0, EXP2_RMS * u)
        of_smaller = xp.sqrt(roundings + exponential**2 + (0.23 * u * d) ** 2)
        shift = (smaller * xp.maximum(*m.shares) * of_smaller)[..., None]
        step = abs(m.outs[0] - m.outs[1])
        of_total = (inexact_rms(total) / total) ** 2 + (inexact_rms(1 / total) * total) ** 2
        shared = xp.sqrt((shift * step) ** 2 + of_total[..., None] * y**2)
        products = [
            xp.where(p[..., None] == 1.0, 0.0, rounding_rms(part) ** 2 * (1 + (p < 1))[..., None])
            for p, part in zip(m.shares, m.parts, strict=True)
        ]
        own = xp.sqrt(products[0] + products[1])
        if out1.dtype != np.float32:
            own = xp.sqrt(own**2 + rounding_rms(y) ** 2)
        finite = [xp.where(xp.isfinite(x), x, 0.0) for x in (shared, own)]
        of_out = stored(
            y,
            out1.dtype,
            1.001 * worst,
            xp.sqrt(finite[0] ** 2 + finite[1] ** 2),
            floor=_TINY * (2 * sizes + 4),
            shared=finite[0],
            bias=np.inf,
        )
        log = abs(xp.log(total))
        of_lse = stored(
            lse,
            np.float32,
            m.restore(1.001 * (of_sum + 2 * LOG_ULPS * u * log)),
            m.restore(
                xp.sqrt(
                    (smaller * of_smaller) ** 2
                    + (inexact_rms(total) / total) ** 2
                    + (ROUNDING * log) ** 2
                )
            ),
            floor=2 * _TINY,
            bias=np.inf,
        )
    return of_out, of_lse


class _Merge(NamedTuple):
    """Intermediate values in out's row order.

    top: the larger of lse1 and lse2.  distances: lse1 and lse2 minus top.  weights: exponentials of
    the distances.  shares: weights over their sum.  parts: shares times outs.
    """

    xp: Any
    outs: list[Any]
    kept: list[Any]
    top: Any
    distances: list[Any]
    weights: list[Any]
    shares: list[Any]
    parts: list[Any]
    swaps: bool

    @classmethod
    def of(cls, out1: Array, lse1: Array, out2: Array, lse2: Array, layout: str) -> _Merge:
        xp, swaps = namespace(out1), out1.ndim == 3 or layout == "bshd"
        outs = [as_float64(x) for x in (out1, out2)]
        lses = [as_float64(x) for x in (lse1, lse2)]
        if swaps:
            lses = [x.swapaxes(-1, -2) for x in lses]
        kept = [x != -np.inf for x in lses]
        top = xp.maximum(*lses)
        origin = xp.where(top == -np.inf, 0.0, top)
        distances = [x - origin for x in lses]
        weights = [
            xp.where(keep, xp.where(d < -700.0, 2.0**-1022, xp.exp(d)), 0.0)
            for keep, d in zip(kept, distances, strict=True)
        ]
        total = weights[0] + weights[1]
        shares = [xp.where(keep, w / total, 0.0) for keep, w in zip(kept, weights, strict=True)]
        parts = [
            xp.where(keep[..., None], p[..., None] * x, 0.0)
            for keep, p, x in zip(kept, shares, outs, strict=True)
        ]
        return cls(xp, outs, kept, top, distances, weights, shares, parts, swaps)

    def restore(self, lse: Any) -> Any:
        """Return a row statistic in the layout of lse."""
        return lse.swapaxes(-1, -2) if self.swaps else lse
