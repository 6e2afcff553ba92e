"""Logits whose columns are split over ranks.  Each function is a check, on every rank."""

from __future__ import annotations

import numpy as np

from cupykern import parallel
from cupykern.reference import parallel as of_ranks

from .common import DTYPES, numbers, raises, verify, with_delays


def _parts(comm, x):
    """Columns of other numbers on each rank."""
    ends = [3 + 11 * i for i in range(comm.size - 1)]
    return [np.ascontiguousarray(part) for part in np.split(x, ends, axis=1)]


def _logits(comm, dtype, columns=101):
    """Rows of rising spread; one rank's part of a row -inf; the largest on another rank each."""
    x = numbers(1, 6, columns, dtype=np.float32) * np.float32([[0], [1], [3], [8], [2], [1]])
    x = x.astype(dtype)
    x[4, 3:] = -np.inf
    x[5, :3] = -np.inf
    return _parts(comm, x)


def probabilities_are_those_of_all_columns(comm):
    for dtype, scale in zip(DTYPES, (None, 0.7, 1.3), strict=True):
        parts = _logits(comm, dtype)
        columns = [0, *np.cumsum([x.shape[1] for x in parts])]
        mine = slice(columns[comm.rank], columns[comm.rank + 1])
        for name in ("vocabulary_parallel_softmax", "vocabulary_parallel_log_softmax"):
            function = getattr(parallel, name)
            for out in (None, "float32"):
                options = {"scale": scale, "dtype": out}
                found = with_delays(comm, function, comm, parts[comm.rank], **options)
                exact = getattr(of_ranks, name)(parts, **options)
                (bound,) = getattr(of_ranks, f"{name}_bound")(parts, **options, reference=exact)
                bound = bound._replace(
                    elementwise=bound.elementwise[:, mine], rms=bound.rms[:, mine]
                )
                verify(found, (exact[0][:, mine],), (bound,))


def losses_are_those_of_all_columns(comm):
    targets = np.array([0, 100, 57, 3, 1, 20])
    for dtype, scale in zip(DTYPES, (None, 0.7, 1.3), strict=True):
        parts = _logits(comm, dtype)
        function = parallel.vocabulary_parallel_cross_entropy
        found = with_delays(comm, function, comm, parts[comm.rank], targets, scale=scale)
        exact = of_ranks.vocabulary_parallel_cross_entropy(parts, targets, scale=scale)
        bounds = of_ranks.vocabulary_parallel_cross_entropy_bound(
            parts, targets, scale=scale, reference=exact
        )
        verify(found, exact, bounds)
    outside = np.array([-1, 101, 0, 0, 50, 1])
    found = parallel.vocabulary_parallel_cross_entropy(comm, parts[comm.rank], outside)
    assert np.isinf(found).tolist() == [True, True, False, False, True, True], found


def nan_and_inf_reach_their_rows_alone(comm):
    x = numbers(1, 4, 101)
    x[1, 2], x[2, 50], x[3] = np.nan, np.inf, -np.inf
    mine = _parts(comm, x)[comm.rank]
    y = parallel.vocabulary_parallel_softmax(comm, mine)
    assert np.isnan(y).all(axis=1).tolist() == [False, True, True, True]
    assert not np.isnan(y[0]).any()
    loss = parallel.vocabulary_parallel_cross_entropy(comm, mine, np.zeros(4, np.int32))
    assert np.isnan(loss).tolist() == [False, True, True, True], loss


def the_largest_is_numpys(comm):
    x = np.round(numbers(1, 40, 101) * 2)  # many are equal
    x[0], x[1, 77], x[2, 3], x[2, 90] = -np.inf, np.nan, np.nan, np.nan
    found = parallel.vocabulary_parallel_argmax(comm, _parts(comm, x)[comm.rank])
    np.testing.assert_array_equal(found, x.argmax(axis=1))


def draws_find_their_columns(comm):
    """The exact sums before and after the column enclose the draw, give or take the bound."""
    rows = 400
    x = numbers(1, 1, 101, dtype=np.float32).repeat(rows, axis=0)
    x[:, 2] = -np.inf
    draws = 1 - np.random.default_rng(2).random(rows)
    draws[0] = 1.0
    parts = _parts(comm, x)
    function = parallel.vocabulary_parallel_sample
    found = with_delays(comm, function, comm, parts[comm.rank], draws, temperature=0.8)
    exact = of_ranks.vocabulary_parallel_softmax(parts, scale=1 / 0.8)[0]
    bound = of_ranks.vocabulary_parallel_sample_bound(parts, scale=1 / 0.8)
    assert bound.max() < 1e-3
    sums = np.concatenate((np.zeros((rows, 1)), exact.cumsum(axis=1)), axis=1)
    at = np.arange(rows)
    assert (sums[at, found] - bound <= draws).all() and (draws <= sums[at, found + 1] + bound).all()
    assert not (found == 2).any() and len(set(found.tolist())) > 20


def temperatures_are_any_numbers(comm):
    x, draws = numbers(1, 40, 8, dtype=np.float32), 1 - np.random.default_rng(2).random(40)
    sample = parallel.vocabulary_parallel_sample
    found = sample(comm, x, draws, temperature=0.125)
    assert (found != sample(comm, x, draws)).any()
    for same in (np.float32(0.125), np.array(0.125), np.float16(0.125)):
        np.testing.assert_array_equal(sample(comm, x, draws, temperature=same), found)


def wrong_arguments_raise_on_all_ranks(comm):
    x = numbers(1, 3, 5)
    empty = x[:, :0] if comm.rank == 1 else x
    message = raises(ValueError, lambda: parallel.vocabulary_parallel_argmax(comm, empty))
    assert "rank 1: x must have at least 1 column" in message, message
    draws = np.ones(3)
    for wrong in (0.0, -1.0):
        raises(
            ValueError,
            lambda wrong=wrong: parallel.vocabulary_parallel_sample(
                comm, x, draws, temperature=wrong
            ),
        )
