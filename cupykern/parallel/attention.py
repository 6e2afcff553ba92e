"""Ring attention: the sequence is split over ranks; keys and values pass around a ring."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

import cupykern
from cupykern import arguments, arrays
from cupykern.numerics import namespace
from cupykern.ops.checks.attention import check_operands, check_scale, check_shapes
from cupykern.ops.checks.score_options import check_softcap

from ..typing import Array, Factor, Results
from .agreement import Facts, agreed, by_rank, described
from .collectives import check_split, contiguous, length
from .communicator import Communicator

_AXIS = {"bhsd": 2, "bshd": 1}


def zigzag(total: int, size: int) -> tuple[tuple[slice, slice], ...]:
    """The two slices of a causal sequence that each rank holds, for `ring_attention`.

    >>> parallel.zigzag(8, 2)
    ((slice(0, 2, None), slice(6, 8, None)), (slice(2, 4, None), slice(4, 6, None)))

    `total` tokens are cut into 2 * size pieces; rank r holds pieces r and 2 * size - 1 - r.  This
    balances the work: queries near the end see many keys, queries near the beginning few.  Pieces
    have total // (2 * size) tokens or one more.  Raises TypeError and ValueError.
    """
    check_split(total, size)
    count = 2 * size
    pieces = [slice(total * i // count, total * (i + 1) // count) for i in range(count)]
    return tuple((pieces[r], pieces[-1 - r]) for r in range(size))


def ring_attention(
    comm: Communicator,
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: Factor | None = None,
    softcap: Factor | None = None,
    layout: Literal["bhsd", "bshd"] = "bhsd",
    return_lse: bool = False,
) -> Results:
    """`attention` of this rank's queries against the keys of all ranks (context parallelism).

    >>> q = np.ones((1, 8, 128, 64), np.float16)
    >>> k = v = np.ones((1, 2, 128, 64), np.float16)
    >>> parallel.ring_attention(parallel.SelfCommunicator(), q, k, v, causal=True).shape
    (1, 8, 128, 64)

    q, k, v: as for `attention`, this rank's tokens of the sequence.  Their number may differ
        between ranks; with `causal` they must be the rank's two pieces of `zigzag`, concatenated.
    causal: a query sees the keys up to its own position in the whole sequence.
    scale, softcap, layout, return_lse: as for `attention`.

    In step i a rank processes the keys and values of rank - i while those of the next step are
    transferred.  Each step's results are merged in FP32 with the earlier ones (`merge_attention`).
    The order depends only on the rank, so that bits do not depend on the order of arrival.  The
    merged result is rounded once at the end.  Sends k and v of (size - 1) / size of the sequence.

    Returns out, or (out, lse), of this rank's queries.  Raises TypeError and ValueError, the same
    on all ranks, and CommunicationError.  Source: Liu, Zaharia, Abbeel, Ring Attention
    (arXiv 2310.01889).  Error bound: `reference.parallel.ring_attention_bound`.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "layout": layout}

    def facts() -> Facts:
        arguments.check_flags(causal=causal, return_lse=return_lse)
        arguments.check_choice("layout", layout, tuple(_AXIS))
        check_operands(q, k, v, 4)
        for name, x in (("q", q), ("k", k), ("v", v)):
            comm.check_array(name, x)
        axis = _AXIS[layout]
        dim = check_shapes(*(x if axis == 2 else x.swapaxes(1, 2) for x in (q, k, v)))[3]
        check_softcap(softcap, check_scale(scale, dim))
        same = {name: described(x, axis) for name, x in (("q", q), ("k", k), ("v", v))}
        same["options"] = repr((causal, scale, softcap, layout))
        return Facts(same, (q.shape[axis], k.shape[axis]))

    with agreed(comm, "ring_attention", facts) as own:
        if causal:
            _check_zigzag(own)
        if comm.size == 1:
            return cupykern.attention(q, k, v, causal=causal, return_lse=return_lse, **options)
        out, lse = _around_the_ring(comm, q, (k, v), own, causal, options)
        return (out, lse) if return_lse else out


def _check_zigzag(own: np.ndarray) -> None:
    """Raise ValueError, the same on all ranks, unless token counts are those of `zigzag`."""
    total, size = int(own[:, 0].sum()), len(own)
    wanted = [length(first) + length(last) for first, last in zigzag(total, size)]
    for name, counts in (("q", own[:, 0].tolist()), ("k", own[:, 1].tolist())):
        if counts != wanted:
            raise ValueError(
                f"{name} must have the tokens of zigzag({total}, {size}), {wanted}; got "
                f"{by_rank(counts)}"
            )


def _around_the_ring(
    comm: Communicator,
    q: Array,
    own_kv: tuple[Any, Any],
    own: np.ndarray,
    causal: bool,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    rank, size, axis = comm.rank, comm.size, _AXIS[options["layout"]]
    xp, kv = namespace(q), tuple(map(contiguous, own_kv))
    state: _Merged | None = None
    for step in range(size):
        pending, following = None, kv
        if step + 1 < size:
            count = int(own[(rank - step - 1) % size, 1])
            following = tuple(
                arrays.empty_of(xp, (*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)
                for x in kv
            )
            pending = comm.exchange(
                [((rank + 1) % size, x) for x in kv], [((rank - 1) % size, x) for x in following]
            )
        block = _Block.of(rank, (rank - step) % size, own, causal)
        part = (_along(axis, q, block.queries), *(_along(axis, x, block.keys) for x in kv))
        found = cupykern.attention(*part, causal=block.causal, return_lse=True, **options)
        if state is None:
            state = _Merged(found, axis, options["layout"])
        else:
            state.add(found, block.queries)
        if pending is not None:
            pending.wait()
        kv = following
    assert state is not None
    return state.out.astype(q.dtype), state.lse


class _Block(NamedTuple):
    """The queries of a rank that see keys of another rank, and these keys.  causal: masked causally
    (the rank's own keys)."""

    queries: slice
    keys: slice
    causal: bool

    @classmethod
    def of(cls, rank: int, source: int, own: np.ndarray, causal: bool) -> _Block:
        every = slice(None)
        if not causal or source == rank:
            return cls(every, every, causal)
        first, _ = zigzag(int(own[:, 0].sum()), len(own))[min(rank, source)]
        if source < rank:  # source's second piece comes after all queries
            return cls(every, slice(0, length(first)), False)
        return cls(slice(length(first), None), every, False)


def _along(axis: int, x: Array, part: slice) -> Array:
    return x if part == slice(None) else x[(slice(None),) * axis + (part,)]


class _Merged:
    """Accumulated attention over the keys so far, in FP32."""

    def __init__(self, found: tuple[Any, Any], axis: int, layout: Literal["bhsd", "bshd"]):
        self.out, self.lse = found[0].astype(np.float32), found[1]
        self._axis, self._layout = axis, layout

    def add(self, found: tuple[Any, Any], queries: slice) -> None:
        """Merge the results of these queries over further keys."""
        out, lse = found
        so_far, so_far_lse = _along(self._axis, self.out, queries), self.lse[..., queries]
        _, merged = cupykern.merge_attention(
            so_far, so_far_lse, out.astype(np.float32), lse, layout=self._layout, out=so_far
        )
        so_far_lse[...] = merged
