"""Ring attention.  Each function is a check, on every rank."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import parallel
from cupykern.reference import parallel as of_ranks

from .common import DTYPES, numbers, raises, verify, with_delays


def _split(comm, x, axis, causal):
    """Each rank's tokens: by zigzag, or of odd numbers."""
    total = x.shape[axis]
    if causal:
        rows = [np.r_[a, b] for a, b in parallel.zigzag(total, comm.size)]
    else:
        rows = np.split(np.arange(total), [3 + 5 * i for i in range(comm.size - 1)])
    return [np.ascontiguousarray(x.take(part, axis)) for part in rows]


def results_are_those_of_the_whole_sequence(comm):
    """Grouped queries, odd numbers of tokens, both layouts, causal or not, capped or not."""
    for causal, layout, total, dtype, options in (
        (True, "bhsd", 45, DTYPES[0], {}),
        (True, "bshd", 8 * comm.size, DTYPES[1], {"softcap": 4.0}),
        (False, "bhsd", 37, DTYPES[1], {"scale": 0.3}),
        (True, "bhsd", comm.size, DTYPES[0], {}),  # less than a token a piece
    ):
        axis = 2 if layout == "bhsd" else 1
        shapes = [(2, heads, total, size) for heads, size in ((4, 32), (2, 32), (2, 24))]
        if layout == "bshd":
            shapes = [(b, s, h, d) for b, h, s, d in shapes]
        arrays = [numbers(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
        parts = [_split(comm, x, axis, causal) for x in arrays]
        given = {"causal": causal, "layout": layout, **options}
        own = [of[comm.rank] for of in parts]
        found = with_delays(comm, parallel.ring_attention, comm, *own, **given, return_lse=True)
        exact = of_ranks.ring_attention(*parts, comm.rank, **given)
        bounds = of_ranks.ring_attention_bound(*parts, comm.rank, **given, reference=exact)
        verify(found, exact, bounds)
        some = np.arange(own[0].shape[axis])[::3]
        few = of_ranks.ring_attention(*parts, comm.rank, **given, queries=some)
        of_few = of_ranks.ring_attention_bound(
            *parts, comm.rank, **given, queries=some, reference=few
        )
        verify((found[0].take(some, axis), found[1][..., some]), few, of_few)
        bound = bounds[0].elementwise.take(some, axis)
        np.testing.assert_allclose(of_few[0].elementwise, bound, rtol=1e-9)
        alone = parallel.ring_attention(comm, *own, **given)
        np.testing.assert_array_equal(alone, found[0])
        # The reference is the op's own, of the whole sequence.
        rows = np.concatenate(_split(comm, np.arange(total)[None, None], 2, causal), 2)[0, 0]
        whole = cupykern.attention(*arrays, **given).take(rows, axis)
        every = np.concatenate(
            [of_ranks.ring_attention(*parts, r, **given)[0] for r in range(comm.size)], axis
        )
        assert np.abs(whole.astype(np.float64) - every).max() < 0.02


def other_numbers_of_tokens_than_zigzag_are_refused(comm):
    q = numbers(1, 1, 2, 4 + 2 * (comm.rank == 0), 16)
    message = raises(ValueError, lambda: parallel.ring_attention(comm, q, q, q, causal=True))
    assert "q must have the tokens of zigzag(" in message, message
    assert parallel.ring_attention(comm, q, q, q).shape == q.shape
