"""Norms of rows on ranks and of sums over ranks.  Each function is a check, on every rank."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import parallel, reference
from cupykern.reference import parallel as of_ranks

from .common import DTYPES, numbers, shards, verify, with_delays


def norms_of_rows_are_those_of_all_rows(comm):
    x, residual, weight = numbers(1, 11, 70), numbers(2, 11, 70), numbers(3, 70, dtype=np.float32)
    bias = numbers(4, 70)
    own, added = shards(comm, x, 0)[comm.rank], shards(comm, residual, 0)[comm.rank]
    whole, s = cupykern.rms_norm(x, weight, eps=1e-6, residual=residual)
    found, mine = parallel.sequence_parallel_rms_norm(
        comm, own, weight, eps=1e-6, residual=added, output="replicated"
    )
    exact = reference.rms_norm(x, weight, eps=1e-6, residual=residual)
    bounds = reference.rms_norm_bound(x, weight, eps=1e-6, residual=residual, reference=exact)
    verify(found, exact[:1], bounds[:1])
    np.testing.assert_array_equal(mine, shards(comm, s, 0)[comm.rank])
    found = parallel.sequence_parallel_layer_norm(comm, own, weight, bias)
    assert found.shape == own.shape
    gathered = parallel.sequence_parallel_layer_norm(comm, own, weight, bias, output="replicated")
    np.testing.assert_array_equal(found, shards(comm, gathered, 0)[comm.rank])
    exact = reference.layer_norm(x, weight, bias)
    verify(gathered, exact, reference.layer_norm_bound(x, weight, bias, reference=exact))


def sums_are_normalised_unrounded(comm):
    for dtype, rows in zip(DTYPES, (7, 1, 4), strict=True):
        parts = [numbers(10 + rank, rows, 96, dtype=np.float32) for rank in range(comm.size)]
        residual, weight, bias = numbers(2, rows, 96, dtype=dtype), numbers(3, 96), numbers(4, 96)
        for centered, function, given in (
            (False, parallel.all_reduce_rms_norm, (weight,)),
            (True, parallel.all_reduce_layer_norm, (weight, bias)),
        ):
            found = with_delays(
                comm, function, comm, parts[comm.rank], *given, eps=1e-5, residual=residual
            )
            options = {"eps": 1e-5, "residual": residual, "centered": centered}
            exact = of_ranks.all_reduce_norm(parts, *given, **options)
            bounds = of_ranks.all_reduce_norm_bound(parts, *given, **options, reference=exact)
            verify(found, exact, bounds)
            added = shards(comm, residual, 0)[comm.rank]
            mine = function(comm, parts[comm.rank], *given, eps=1e-5, residual=added, output="rows")
            for x, y in zip(mine, found, strict=True):
                np.testing.assert_array_equal(x, shards(comm, y, 0)[comm.rank])


def sums_of_16_bits_without_a_residual(comm):
    parts = [numbers(10 + rank, 5, 33) for rank in range(comm.size)]
    found = parallel.all_reduce_rms_norm(comm, parts[comm.rank])
    options = {"eps": cupykern.finfo("float16").eps, "centered": False}
    exact = of_ranks.all_reduce_norm(parts, **options)
    verify(found, exact, of_ranks.all_reduce_norm_bound(parts, **options, reference=exact))
