"""Experts on ranks.  Each function is a check, on every rank."""

from __future__ import annotations

import numpy as np

from cupykern import parallel
from cupykern.reference import parallel as of_ranks

from .common import DTYPES, numbers, raises, shards, verify, with_delays


def _problem(comm, dtype, tokens, k, seed=0):
    """(x, experts, gates) of each rank, and the weights of all experts, 2 * size + 1 of them."""
    count, n, inner = 2 * comm.size + 1, 24, 40
    rng = np.random.default_rng(seed)
    given = [
        (
            numbers(20 + r, rows, n, dtype=dtype),
            rng.integers(0, count, (rows, k)).astype((np.int32, np.int64)[seed % 2]),
            rng.random((rows, k), np.float32),
        )
        for r, rows in enumerate(tokens)
    ]
    shapes = (count, n, inner), (count, n, inner), (count, inner, n)
    weights = [numbers(i, *s, dtype=np.float32) / np.sqrt(s[1]) for i, s in enumerate(shapes)]
    return given, [w.astype(dtype) for w in weights]


def results_are_those_of_all_experts(comm):
    for seed, (dtype, k) in enumerate(((DTYPES[0], 2), (DTYPES[1], 3), (DTYPES[0], 1))):
        tokens = [(5, 0, 9, 2)[(r + seed) % 4] for r in range(comm.size)]
        given, weights = _problem(comm, dtype, tokens, k, seed)
        own = [shards(comm, w, 0)[comm.rank] for w in weights]
        found = with_delays(comm, parallel.expert_parallel_moe, comm, *given[comm.rank], *own)
        x, experts, gates = given[comm.rank]
        exact = of_ranks.expert_parallel_moe(x, experts, gates, *weights)
        bound = of_ranks.expert_parallel_moe_bound(x, experts, gates, *weights, reference=exact)
        assert found.shape == x.shape and found.dtype == x.dtype
        verify(found, exact, bound)


def all_tokens_may_go_to_one_expert(comm):
    given, weights = _problem(comm, DTYPES[0], [4] * comm.size, 2)
    x, experts, gates = given[comm.rank]
    experts = np.full_like(experts, 2 * comm.size)  # twice to the last one
    own = [shards(comm, w, 0)[comm.rank] for w in weights]
    found = parallel.expert_parallel_moe(comm, x, experts, gates, *own)
    exact = of_ranks.expert_parallel_moe(x, experts, gates, *weights)
    bound = of_ranks.expert_parallel_moe_bound(x, experts, gates, *weights, reference=exact)
    verify(found, exact, bound)


def an_expert_that_is_not_there_raises_on_all_ranks(comm):
    given, weights = _problem(comm, DTYPES[0], [4] * comm.size, 2)
    x, experts, gates = given[comm.rank]
    own = [shards(comm, w, 0)[comm.rank] for w in weights]
    wrong = experts.copy()
    wrong[1, 1] = 99 if comm.rank == 1 else wrong[1, 1]
    message = raises(ValueError, lambda: parallel.expert_parallel_moe(comm, x, wrong, gates, *own))
    assert message == (
        f"expert_parallel_moe: rank 1: experts must be in [0, {2 * comm.size + 1}); got 99"
    ), message
    assert parallel.expert_parallel_moe(comm, x, experts, gates, *own).shape == x.shape
