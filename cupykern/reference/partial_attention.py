"""Results of attention over some of the keys, with their errors, and what merging makes of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics import namespace
from ..op import Bound
from .merge_attention import merge_attention, merge_attention_bound


class Partial(NamedTuple):
    """A result and its log-sum-exp in FP64, and the errors of both: at most, and expected."""

    out: Any
    lse: Any
    out_error: Any
    lse_error: Any
    out_rms: Any
    lse_rms: Any

    @classmethod
    def of(cls, exact: tuple[Any, ...], bounds: tuple[Bound, ...]) -> Partial:
        """exact: (out, lse) in FP64, of which `bounds` are."""
        (out, lse), (of_out, of_lse) = exact, bounds
        return cls(out, lse, of_out.elementwise, of_lse.elementwise, of_out.rms, of_lse.rms)

    def map(self, of_out: Callable[[Any], Any], of_lse: Callable[[Any], Any]) -> Partial:
        """Views of both, and of their errors alike."""
        return Partial(*(of_lse(x) if i % 2 else of_out(x) for i, x in enumerate(self)))

    def take(self, other: Partial) -> None:
        for mine, new in zip(self, other, strict=True):
            mine[...] = new

    def merged(self, other: Partial, layout: str) -> Partial:
        """Over the keys of both.

        `merge_attention_bound`, in FP32, and what both errors become (`cascade_attention_bound`).
        The result is not rounded to its format yet.
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
            """The errors i and i + 1 of both, in the merged result."""
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
