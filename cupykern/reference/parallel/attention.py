"""Attention over the keys of all ranks in FP64, and bounds of ring attention's errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...numerics import namespace
from ...op import Bound
from ...typing import Array
from ..attention import attention
from ..attention_bound import attention_bound
from ..partial_attention import Partial
from ..rounding import stored


def ring_attention(
    q: Sequence[Array],
    k: Sequence[Array],
    v: Sequence[Array],
    rank: int,
    *,
    causal: bool = False,
    layout: str = "bhsd",
    queries: np.ndarray | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Return (out, lse) of the queries of `rank` over the keys of all ranks, in FP64.

    >>> q = k = [np.zeros((1, 1, 2, 8), np.float16)] * 2  # two ranks with two tokens each
    >>> v = [np.float16(x).reshape(1, 1, 2, 1) for x in ([1, 7], [3, 5])]  # tokens 0, 3 and 1, 2
    >>> out, lse = reference.parallel.ring_attention(q, k, v, 1, causal=True)
    >>> out.ravel().tolist()  # means of 1, 3 and of 1, 3, 5
    [2.0, 3.0]

    causal: rank r holds the tokens of pieces r and 2 size - 1 - r of 2 size pieces of the sequence.
    queries: ascending indices of some of the rank's queries; None: all of them.
    """
    xp, axis = namespace(q[0]), _axis(layout)
    keys, values = xp.concatenate(k, axis=axis), xp.concatenate(v, axis=axis)
    rows, mask = _rows(q[rank], axis, queries), None
    if causal:
        places = _places(sum(x.shape[axis] for x in q), len(q))
        mask = xp.asarray(places[rank][rows][:, None] >= np.concatenate(places)[None, :])
    out, lse = attention(
        *(_take(q[rank], axis, rows), keys, values),
        mask=mask, layout=layout, return_lse=True, **options,
    )  # fmt: skip
    return out, lse


def _rows(q: Any, axis: int, queries: np.ndarray | None) -> np.ndarray:
    return np.arange(q.shape[axis]) if queries is None else queries


def _take(x: Any, axis: int, rows: np.ndarray) -> Any:
    return x[(slice(None),) * axis + (namespace(x).asarray(rows),)]


def _places(total: int, size: int) -> list[np.ndarray]:
    """Return each rank's token indices in the sequence."""
    ends = [total * i // (2 * size) for i in range(2 * size + 1)]
    pieces = [np.arange(a, b) for a, b in pairwise(ends)]
    return [np.concatenate((pieces[r], pieces[-1 - r])) for r in range(size)]


def ring_attention_bound(
    q: Sequence[Array],
    k: Sequence[Array],
    v: Sequence[Array],
    rank: int,
    *,
    causal: bool = False,
    layout: str = "bhsd",
    queries: np.ndarray | None = None,
    reference: tuple[Any, Any],
    **options: Any,
) -> tuple[Bound, Bound]:
    """Return the Bounds of out and lse.

    The errors of each step (`attention_bound`) are carried through the merges in order;
    `reference.cascade_attention_bound` derives one merge.  Out is rounded once.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 32, 64)).astype(np.float16)
    >>> exact = reference.parallel.ring_attention([q], [k], [v], 0)
    >>> of_out, _ = reference.parallel.ring_attention_bound([q], [k], [v], 0, reference=exact)
    >>> out = parallel.ring_attention(parallel.SelfCommunicator(), q, k, v)
    >>> bool((abs(out - exact[0]) <= of_out.elementwise).all())
    True
    """
    xp, axis, size = namespace(q[0]), _axis(layout), len(q)
    options = {"layout": layout, "return_lse": True, **options}
    asked = _rows(q[rank], axis, queries)
    mine = _take(q[rank], axis, asked)
    state: Partial | None = None
    with np.errstate(all="ignore"):
        for step in range(size):
            source = (rank - step) % size
            first, keys, sees = _block(q, rank, source, causal, axis)
            rows = slice(int(np.searchsorted(asked, first)), None)
            part = _part(mine, axis, rows), *(_part(x[source], axis, keys) for x in (k, v))
            mask = asked[:, None] >= np.arange(k[rank].shape[axis]) if sees else None
            more = {"mask": mask if mask is None else xp.asarray(mask), **options}
            exact = attention(*part, **more)
            bounds = attention_bound(*part, **more, reference=exact)
            found = Partial.of(exact, bounds)
            if state is None:
                state = found
            else:
                seeing = _of_rows(state, axis, rows)
                seeing.take(seeing.merged(found, layout))
        assert state is not None
        out = stored(reference[0], q[rank].dtype, state.out_error, state.out_rms, bias=np.inf)
        return out, Bound(state.lse_error, state.lse_rms)


def _axis(layout: str) -> int:
    return 2 if layout == "bhsd" else 1


def _part(x: Any, axis: int, part: slice) -> Any:
    return x[(slice(None),) * axis + (part,)]


def _of_rows(state: Partial, axis: int, rows: slice) -> Partial:
    """Return views of some rows."""
    return state.map(lambda x: _part(x, axis, rows), lambda x: x[..., rows])


def _block(
    q: Sequence[Array], rank: int, source: int, causal: bool, axis: int
) -> tuple[int, slice, bool]:
    """Return (first query, keys, causal) of one step."""
    if not causal or source == rank:
        return 0, slice(None), causal
    total, count = sum(x.shape[axis] for x in q), 2 * len(q)
    piece = min(rank, source)
    first = total * (piece + 1) // count - total * piece // count
    if source < rank:
        return 0, slice(0, first), False
    return first, slice(None), False
