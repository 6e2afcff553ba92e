"""Column- and row-parallel products, gathers and sums.  Each function is a check, on every rank."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import parallel, reference
from cupykern.reference import parallel as of_ranks

from .common import DTYPES, numbers, shards, verify, with_delays


def sums_are_rounded_once(comm):
    for dtype in DTYPES:
        parts = [numbers(rank, 7, 3, dtype=dtype) for rank in range(comm.size)]
        found = with_delays(comm, parallel.all_reduce, comm, parts[comm.rank])
        exact = of_ranks.all_reduce(parts)
        verify(found, exact, of_ranks.all_reduce_bound(parts, reference=exact))
        rows = parallel.shares(7, comm.size)[comm.rank]
        found = parallel.reduce_scatter(comm, parts[comm.rank])
        (bound,) = of_ranks.reduce_scatter_bound(parts, reference=exact)
        bound = bound._replace(elementwise=bound.elementwise[rows], rms=bound.rms[rows])
        verify(found, (exact[0][rows],), (bound._replace(bias=np.inf),))


def sums_are_in_the_order_of_ranks(comm):
    """1 + 2^-24 + 2^-24: another order would not round to 1."""
    addend = 1.0 if comm.rank == 0 else 2.0**-24
    found = parallel.all_reduce(comm, np.full((2, 1), addend, np.float32))
    assert (found == 1.0).all(), found


def rows_of_different_numbers_are_gathered(comm):
    parts = [numbers(rank, 2 * rank + (rank == 0), 3, 2) for rank in range(comm.size)]
    found = parallel.all_gather(comm, parts[comm.rank])
    np.testing.assert_array_equal(found, np.concatenate(parts))
    assert parallel.all_gather(comm, np.zeros((0, 4), np.float16)).shape == (0, 4)


def columns_are_those_of_matmul(comm):
    for dtype, (m, k, n) in zip(DTYPES, ((5, 48, 37), (129, 64, 30), (1, 33, 8)), strict=True):
        a, b = numbers(1, m, k, dtype=dtype), numbers(2, k, n, dtype=dtype)
        bias, residual = numbers(3, n, dtype=dtype), numbers(4, m, n, dtype=dtype)
        options = {"activation": "gelu", "alpha": 0.5}
        own = {"b": b, "bias": bias, "residual": residual}
        own = {name: shards(comm, x, -1)[comm.rank] for name, x in own.items()}
        exact = reference.matmul(a, b, bias=bias, residual=residual, **options)
        bound = reference.matmul_bound(
            a, b, bias=bias, residual=residual, **options, reference=exact
        )
        rows = shards(comm, a, 0)[comm.rank]
        for given, input in ((a, "replicated"), (rows, "rows")):
            found = with_delays(
                *(comm, parallel.column_parallel_matmul, comm, given), **own, **options,
                input=input, output="replicated",
            )  # fmt: skip
            verify(found, exact, bound)
            mine = parallel.column_parallel_matmul(comm, given, **own, **options, input=input)
            np.testing.assert_array_equal(mine, shards(comm, found, 1)[comm.rank])


def addends_broadcast(comm):
    """To all ranks' rows, also where these are gathered."""
    a, b = numbers(1, 5 + comm.size, 32), numbers(2, 32, 6)
    rows = shards(comm, a, 0)[comm.rank]
    for shape in ((), (1,), (6,), (1, 6), (len(a), 1)):
        x = numbers(3, *shape) if shape else np.array(1.5, np.float16)
        for name in ("bias", "residual"):
            if name == "bias" and shape == (len(a), 1):
                continue
            whole = cupykern.matmul(a, b, **{name: x})
            for given, input in ((a, "replicated"), (rows, "rows")):
                found = parallel.column_parallel_matmul(comm, given, b, **{name: x}, input=input)
                np.testing.assert_array_equal(found, whole)


def k_is_summed_over_ranks(comm):
    """Odd sizes; fewer rows than ranks; rows enough for products that overlap with messages, and
    numbers enough to be added by one rank each."""
    cases = ((5, 49, 37), (1, 64, 30), (1024 * comm.size + 3, 31, 136))
    for dtype, (m, k, n) in zip(DTYPES, cases, strict=True):
        a, b = numbers(1, m, k, dtype=dtype), numbers(2, k, n, dtype=dtype)
        bias, residual = numbers(3, n, dtype=dtype), numbers(4, m, n, dtype=dtype)
        a_parts, b_parts = shards(comm, a, 1), shards(comm, b, 0)
        given = {"bias": bias, "activation": "silu", "residual": residual, "alpha": -0.3}
        exact = of_ranks.row_parallel_matmul(a_parts, b_parts, **given)
        bound = of_ranks.row_parallel_matmul_bound(a_parts, b_parts, **given, reference=exact)
        own = a_parts[comm.rank], b_parts[comm.rank]
        found = with_delays(comm, parallel.row_parallel_matmul, comm, *own, **given)
        verify(found, exact, bound)
        rows = parallel.shares(m, comm.size)[comm.rank]
        given["residual"] = residual[rows]
        mine = parallel.row_parallel_matmul(comm, *own, **given, output="rows")
        np.testing.assert_array_equal(mine, found[rows])


def shares_may_be_empty(comm):
    """Ranks without a part of k, rows without a rank, no rows at all."""
    for m, k, n in ((1, 1, 3), (0, 8, 3), (2, 9, 1)):
        a, b = numbers(1, m, k, dtype=np.float32), numbers(2, k, n, dtype=np.float32)
        parts = shards(comm, a, 1), shards(comm, b, 0)
        own = [x[comm.rank] for x in parts]
        exact = of_ranks.row_parallel_matmul(*parts)
        found = parallel.row_parallel_matmul(comm, *own)
        assert found.shape == (m, n)
        if m:
            bound = of_ranks.row_parallel_matmul_bound(*parts, reference=exact)
            verify(found, exact, bound)
        rows = shards(comm, a, 0)[comm.rank]
        columns = shards(comm, b, 1)[comm.rank]
        found = parallel.column_parallel_matmul(
            comm, rows, columns, input="rows", output="replicated"
        )
        assert found.shape == (m, n)
        if m:
            exact = reference.matmul(a, b)
            verify(found, exact, reference.matmul_bound(a, b, reference=exact))


def random_products_are_within_their_bounds(comm):
    rng = np.random.default_rng(comm.size)
    for seed in range(6):
        m, k, n = (int(rng.integers(1, high)) for high in (40, 200, 60))
        dtype, other = (DTYPES[i] for i in rng.integers(0, 3, 2))
        a, b = numbers(seed, m, k, dtype=dtype), numbers(seed + 9, k, n, dtype=dtype)
        given = {
            "bias": numbers(3, n, dtype=other) if rng.random() < 0.5 else None,
            "residual": numbers(4, m, n, dtype=other) if rng.random() < 0.5 else None,
            "activation": (None, "gelu", "silu")[int(rng.integers(0, 3))],
            "alpha": float(rng.standard_normal()),
        }
        parts = shards(comm, a, 1), shards(comm, b, 0)
        exact = of_ranks.row_parallel_matmul(*parts, **given)
        bound = of_ranks.row_parallel_matmul_bound(*parts, **given, reference=exact)
        own = [x[comm.rank] for x in parts]
        verify(parallel.row_parallel_matmul(comm, *own, **given), exact, bound)


def integers_are_exact(comm):
    """Also with the bias added once."""
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-8, 9, shape).astype(np.float16) for shape in ((9, 52), (52, 11)))
    bias = rng.integers(-8, 9, 11).astype(np.float32)
    own = shards(comm, a, 1)[comm.rank], shards(comm, b, 0)[comm.rank]
    found = parallel.row_parallel_matmul(comm, *own, bias=bias, out_dtype="float32")
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64) + bias)
    own = (x.astype(np.int8) for x in own)
    found = parallel.row_parallel_matmul(comm, *own, bias=bias)
    np.testing.assert_array_equal(found, a.astype(np.float64) @ b.astype(np.float64) + bias)


def scaled_products_have_scales_of_their_own(comm):
    m, n, k = 7, 19, 128 * comm.size + 40
    a, b = numbers(1, m, k, dtype=np.float32), numbers(2, k, n, dtype=np.float32)
    residual = numbers(4, m, n)
    a_parts, b_parts = shards_of_blocks(comm, a, 1), shards_of_blocks(comm, b, 0)
    for by_a, by_b in (({"granularity": "row"}, {"granularity": "column"}), (_BY_ROW, _BY_BLOCK)):
        left = [cupykern.quantize(x, "e4m3", **by_a) for x in a_parts]
        right = [cupykern.quantize(x, "e4m3", **by_b) for x in b_parts]
        given = *zip(*left, strict=True), *zip(*right, strict=True)
        given = given[0], given[2], given[1], given[3]
        options = {"activation": "relu", "residual": residual, "out_dtype": "float32"}
        exact = of_ranks.row_parallel_scaled_mm(*given, **options)
        bound = of_ranks.row_parallel_scaled_mm_bound(*given, **options, reference=exact)
        own = [x[comm.rank] for x in given]
        found = parallel.row_parallel_scaled_mm(comm, *own, **options)
        verify(found, exact, bound, only_worst=True)


_BY_ROW = {"granularity": "block", "block": (1, 128)}
_BY_BLOCK = {"granularity": "block", "block": (128, 128)}


def shards_of_blocks(comm, x, axis):
    """Of whole blocks of 128, but the last."""
    ends = [128 * i for i in range(1, comm.size)]
    return [np.ascontiguousarray(part) for part in np.split(x, ends, axis)]


def scaled_columns_are_those_of_scaled_mm(comm):
    m, k, n = 6, 160, 24
    a, scale_a = cupykern.quantize(numbers(1, m, k, dtype=np.float32), "int8", granularity="row")
    b, scale_b = cupykern.quantize(numbers(2, k, n, dtype=np.float32), "int8", granularity="column")
    bias = numbers(3, n, dtype=np.float32)
    whole = cupykern.scaled_mm(a, b, scale_a, scale_b, bias=bias)
    own = [shards(comm, x, 1)[comm.rank] for x in (b, scale_b)]
    options = {"bias": shards(comm, bias, 0)[comm.rank], "output": "replicated"}
    found = parallel.column_parallel_scaled_mm(comm, a, own[0], scale_a, own[1], **options)
    np.testing.assert_array_equal(found, whole)  # integers, and the same roundings
    rows = [shards(comm, x, 0)[comm.rank] for x in (a, scale_a)]
    found = parallel.column_parallel_scaled_mm(
        comm, rows[0], own[0], rows[1], own[1], **options, input="rows"
    )
    np.testing.assert_array_equal(found, whole)


def gated_products_are_those_of_dual_gemm_silu(comm):
    a, b1, b2 = numbers(1, 6, 44), numbers(2, 44, 21), numbers(3, 44, 21)
    b1, b2 = b1 / np.float16(8), b2 / np.float16(8)
    exact = reference.dual_gemm_silu(a, b1, b2)
    bound = reference.dual_gemm_silu_bound(a, b1, b2, reference=exact)
    own = [shards(comm, x, 1)[comm.rank] for x in (b1, b2)]
    for given, input in ((a, "replicated"), (shards(comm, a, 0)[comm.rank], "rows")):
        found = parallel.column_parallel_dual_gemm_silu(
            comm, given, *own, input=input, output="replicated"
        )
        verify(found, exact, bound)
    parts = shards(comm, a, 1), shards(comm, b1, 0), shards(comm, b2, 0)
    exact = of_ranks.row_parallel_dual_gemm_silu(*parts)
    bound = of_ranks.row_parallel_dual_gemm_silu_bound(*parts, reference=exact)
    own = [x[comm.rank] for x in parts]
    found = with_delays(comm, parallel.row_parallel_dual_gemm_silu, comm, *own)
    verify(found, exact, bound)


def a_gated_network_by_columns_and_rows_is_that_of_one_rank(comm):
    """No message between its two products."""
    x, gate, up, down = (numbers(i, *s) for i, s in enumerate(((9, 32), *[(32, 42)] * 2, (42, 32))))
    weights = [shards(comm, w / np.float16(8), 1)[comm.rank] for w in (gate, up)]
    down = down / np.float16(8)
    inner = parallel.column_parallel_dual_gemm_silu(comm, x, *weights)
    found = parallel.row_parallel_matmul(comm, inner, shards(comm, down, 0)[comm.rank], residual=x)
    whole = parallel.column_parallel_dual_gemm_silu(comm, x, *weights, output="replicated")
    parts = shards(comm, whole, 1), shards(comm, down, 0)
    exact = of_ranks.row_parallel_matmul(*parts, residual=x)
    verify(found, exact, of_ranks.row_parallel_matmul_bound(*parts, residual=x, reference=exact))


def split_communicators_are_apart(comm):
    half = comm.split(comm.rank % 2, -comm.rank)
    assert half.size == len(range(comm.rank % 2, comm.size, 2))
    found = parallel.all_gather(half, np.full((1, 1), comm.rank, np.float32))
    assert found[:, 0].tolist() == list(range(comm.rank % 2, comm.size, 2))[::-1]
