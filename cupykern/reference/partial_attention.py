"""Partial attention results over some of the keys, their errors, and the merge of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics import namespace
from ..op import Bound
from .merge_attention import merge_attention, merge_attention_bound


class Partial(NamedTuple):
    """A result and its log-sum-exp in FP64, with their largest and expected errors."""

    out: Any
    lse: Any
    out_error: Any
    lse_error: Any
    out_rms: Any
    lse_rms: Any

    @classmethod
    def of(cls, exact: tuple[Any, ...], bounds: tuple[Bound, ...]) -> Partial:
        """Return the Partial of exact, (out, lse) in FP64, with their `bounds`."""
        (out, lse), (of_out, of_lse) = exact, bounds
        return cls(out, lse, of_out.elementwise, of_lse.elementwise, of_out.rms, of_lse.rms)

    def map(self, of_out: Callable[[Any], Any], of_lse: Callable[[Any], Any]) -> Partial:
        """Apply of_out to out and its errors, and of_lse to lse and its errors."""
        return Partial(*(of_lse(x) if i % 2 else of_out(x) for i, x in enumerate(self)))

    def take(self, other: Partial) -> None:
        for mine, new in zip(self, other, strict=True):
            mine[...] = new

    def merged(self, other: Partial, layout: str) -> Partial:
        """Return the result over the keys of both, not yet rounded to its dtype.

        The errors are those of an FP32 merge (`merge_attention_bound`) and both partial errors
        carried through it (`cascade_attention_bound`).
        """
        xp = namespace(self.out)
        pair = self.out, self.lse, other.out, other.lse
        out, lse = exact = merge_attention(*pair, layout=layout)
        own = merge_attention_bound(
            *(x.astype(np.float32) for x in pair), layout=layout, reference=exact
        )
        top = xp.where(lse == -np.inf, 0.0, lse)
        p, q = (xp.where(x == -np.inf, 0.0, xp.exp(x - top)) for x in (self.lse, other.lse))

        def of_row(x: Any) -> Any:
            return (x.swapaxes(1, 2) if layout == "bshd" else x)[..., None]

        def carried(a: Partial, b: Partial, i: int, add: Any) -> tuple[Any, Any]:
            """Return errors i (out) and i + 1 (lse) of both, carried into the merged result."""
            first, second = (xp.where(share == 0, 0.0, x[i + 1]) for share, x in ((p, a), (q, b)))
            moved = of_row(p * q * add(first, second)) * abs(a.out - b.out)
            of_out = add(add(of_row(p) * a[i], of_row(q) * b[i]), moved)
            return of_out, add(p * first, q * second)

        worst, worst_lse = carried(self, other, 2, xp.add)
        rms, rms_lse = carried(self, other, 4, xp.hypot)
        return Partial(
            *(out, lse),
            *(1.01 * worst + own[0].elementwise, 1.01 * worst_lse + own[1].elementwise),
            *(xp.hypot(rms, own[0].rms), xp.hypot(rms_lse, own[1].rms)),
        )
