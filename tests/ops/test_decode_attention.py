"""decode_attention: same bits in any batch, schedule and layout; lengths, tables, wrong calls."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from decode_checks import (
    FP16,
    caches,
    check_any_batch,
    check_behind_the_end,
    check_chunks_that_grow,
    check_clamped,
    check_clusters,
    check_counters,
    check_infinite_value,
    check_keys_behind,
    check_large_caches,
    check_range_of_queries,
    check_sinks_of_chunks,
    check_small_weights,
    check_strides_of_tables,
    check_who_computes,
    make,
    on_host,
    same_bits,
    to_target,
)

import cupykern
from cupykern import check, dtypes, reference
from cupykern.attention import decode_config, decode_plan
from cupykern.attention.decode_config import LAYOUTS, DecodeConfig, DecodeTask
from cupykern.attention.decode_estimate import estimate_us
from cupykern.ops.decode_attention import OP
from cupykern.ops.problems.attention import FORMULAS, ScoreChoice
from cupykern.ops.problems.decode_attention import VIEWS, DecodeProblem

Q, K, V = make((2, 4, 1, 64)), make((2, 2, 32, 64)), make((2, 2, 32, 72))
LENS, TABLE = np.array((3, 32), np.int32), np.array(((0, 1), (1, 0)), np.int32)


# --- independence --------------------------------------------------------------------------------


def test_a_sequence_has_the_same_bits_in_any_batch(target):
    check_any_batch(target)


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("chunks_per_block", [1, 2, 4, 8, 16, 104])
def test_who_computes_changes_no_bit(target, chunks_per_block, rows):
    check_who_computes(target, chunks_per_block, rows)


@needs.clusters(2)
@pytest.mark.parametrize("heads", [8, 32])
def test_clusters_change_no_bit(target, heads):
    check_clusters(target, heads)


def test_blocks_of_256_threads_are_within_the_bound(target):
    q, (k, v) = make((1, 4, 2, 256)), caches((300,), 300, dim=256)
    args, config = (
        to_target(target, q, k, v),
        DecodeConfig(16, 32, 1, chunk=64, min_chunk=64, threads=256),
    )
    outputs = (cupykern.decode_attention(*args, config=config),)
    references = reference.decode_attention(*args)
    bounds = reference.decode_attention_bound(*args, reference=references)
    assert check.compare(outputs, references, bounds).ok


def test_repeated_calls_give_the_same_bits(target):
    q, (k, v) = make((1, 8, 3, 64)), caches((700,), 700, dim=64)
    args = to_target(target, q, k, v)
    first, *others = (on_host(cupykern.decode_attention(*args)) for _ in range(3))
    assert all(same_bits(first, y) for y in others)


@pytest.mark.parametrize("page", [1, 16, 24, 64, 300])
def test_paged_caches_give_the_bits_of_contiguous_ones(target, page):
    problem = DecodeProblem(*(2, 4, 2, 3, 300, 128), lens=(300, 70), return_lse=True, page=page)
    paged = OP.inputs(problem, 5, target.xp)
    plain = OP.inputs(replace(problem, page=None), 5, target.xp)
    outputs = [cupykern.decode_attention(*call.args, **call.kwargs) for call in (paged, plain)]
    assert all(same_bits(on_host(x), on_host(y)) for x, y in zip(*outputs, strict=True))


@pytest.mark.parametrize("page", [None, 1, 24])
@pytest.mark.parametrize("view", VIEWS)
def test_layouts_give_the_same_bits(target, view, page):
    """Contiguous, and in pages of one key and of several."""
    problem = DecodeProblem(*(2, 6, 2, 2, 150, 128), lens=(150, 70), view=view, page=page)
    calls = [OP.inputs(replace(problem, layout=layout), 5, target.xp) for layout in LAYOUTS]
    assert calls[0].args[1].shape == calls[1].args[1].swapaxes(1, 2).shape
    hnd, nhd = (on_host(OP.run(*call.args, **call.kwargs)) for call in calls)
    assert same_bits(hnd, nhd)


@pytest.mark.parametrize("page", [None, 24])
def test_nhd_caches_are_not_copied(target, page, monkeypatch):
    problem = DecodeProblem(*(2, 6, 2, 2, 150, 128), lens=(150, 70), layout="nhd", page=page)
    call = OP.inputs(problem, 5, target.xp)
    monkeypatch.setattr(decode_plan, "packed", None)
    OP.run(*call.args, **call.kwargs)


@pytest.mark.parametrize("table", [None, TABLE])
def test_wrong_layout_is_named_where_heads_do_not_fit(table):
    nhd = [x.swapaxes(1, 2) for x in (K, V)]
    dims = ("B", "Sk") if table is None else ("num_pages", "page")
    taken = rf"k_cache \(2, 32, 2, 64\) is \({dims[0]}, Hkv, {dims[1]}, D\) with layout='hnd'"
    other = rf"\({dims[0]}, {dims[1]}, Hkv, D\) with layout='nhd'"
    with pytest.raises(ValueError, match=f"got 4 and 32: {taken}, or {other}"):
        cupykern.decode_attention(Q, *nhd, block_table=table)


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_same_bits(target, view):
    problem = DecodeProblem(*(2, 4, 2, 2, 150, 128), lens=(150, 70), view=view)
    plain = OP.inputs(replace(problem, view="C"), 5, target.xp)
    call = OP.inputs(problem, 5, target.xp)
    expected = cupykern.decode_attention(*plain.args, **plain.kwargs)
    out = target.xp.full((2, 2, 4, 256), 7, FP16).swapaxes(
        1, 2
    )  # every second number of (B, S, H, D)
    for y in (
        cupykern.decode_attention(*call.args, **call.kwargs),
        cupykern.decode_attention(*call.args, **call.kwargs, out=out[..., ::2]),
    ):
        assert same_bits(on_host(y).copy(), on_host(expected))
    assert (on_host(out[..., 1::2]) == 7).all()


# --- lengths -------------------------------------------------------------------------------------


def test_what_lies_behind_the_end_is_not_read(target):
    check_behind_the_end(target)


EMPTY = {  # caches that start 2 bytes off alignment, and the block table
    "no keys": lambda xp: (xp.zeros((2, 2, 4, 24), FP16)[:, :, :0, 1:17], None),
    "no pages": lambda xp: (xp.zeros((0, 2, 4, 24), FP16)[..., 1:17], xp.zeros((2, 0), np.int32)),
    "pages of no keys": lambda xp: (
        xp.zeros((3, 2, 4, 24), FP16)[:, :, :0, 1:17],
        xp.zeros((2, 3), np.int32),
    ),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("heads", [2, 64])
def test_empty_caches_are_not_read(target, name, heads):
    """A copy of 0 bytes needs an aligned address too: nothing is issued."""
    cache, table = EMPTY[name](target.xp)
    (q,) = to_target(target, make((2, heads, 1, 16)))
    y, lse = cupykern.decode_attention(q, cache, cache, block_table=table, return_lse=True)
    assert not on_host(y).any() and np.isneginf(on_host(lse)).all()
    nhd = cache.swapaxes(1, 2)
    again = cupykern.decode_attention(q, nhd, nhd, block_table=table, layout="nhd")
    assert same_bits(on_host(again), on_host(y))


def test_queries_that_see_no_key_give_zeros(target):
    q, (k, v) = make((3, 2, 4, 64)), caches((0, 2, 9), 9, dim=64)
    lens = np.array((0, 2, 9), np.int32)
    y, lse = cupykern.decode_attention(*to_target(target, q, k, v), seq_lens=lens, return_lse=True)
    y, lse = on_host(y), on_host(lse)
    empty = np.zeros((3, 2, 4), bool)
    empty[0], empty[1, :, :2] = True, True
    assert (np.isneginf(lse) == empty).all() and (~y.any(-1) == empty).all()
    one = cupykern.decode_attention(*to_target(target, q, k[:, :, :0], v[:, :, :0]))
    assert not on_host(one).any()


def test_nan_of_a_key_reaches_those_who_see_it_alone(target):
    q, (k, v) = make((1, 4, 3, 128)), caches((300,), 300)
    k[0, 1, 298] = np.nan  # not seen by the first query
    y = on_host(cupykern.decode_attention(*to_target(target, q, k, v)))
    expected = np.zeros(y.shape, bool)
    expected[0, 2:, 1:] = True
    assert (np.isnan(y) == expected).all()


@pytest.mark.parametrize("queries", [2, 3, 64])
def test_no_query_sees_the_keys_of_those_behind_it(target, queries):
    check_keys_behind(target, queries)


@pytest.mark.parametrize("rows", ["apart", "every other", "reversed", "shared"])
def test_block_tables_may_have_any_stride_between_rows(target, rows):
    check_strides_of_tables(target, rows)


def test_an_infinite_value_is_one_in_the_result(target):
    check_infinite_value(target)


def test_lengths_and_tables_of_the_device_are_clamped(target):
    check_clamped(target)


def test_a_sink_counts_once():
    check_sinks_of_chunks()


def test_caches_may_have_more_than_2_to_the_32_bytes():
    check_large_caches()


def test_lse_merges_results_of_parts_of_the_keys(target):
    """Two halves of the keys and their lse give the whole: what lse is for."""
    q, (k, v) = make((1, 2, 1, 128)), caches((400,), 400)
    q, k, v = to_target(target, q, k, v)
    parts = [
        cupykern.decode_attention(q, k[:, :, part], v[:, :, part], causal=False, return_lse=True)
        for part in (slice(0, 120), slice(120, 400))
    ]
    lse = np.stack([on_host(lse) for _, lse in parts]).astype(np.float64)
    total = np.logaddexp(*lse)
    merged = sum(
        np.exp(e - total)[..., None] * on_host(y).astype(np.float64)
        for (y, _), e in zip(parts, lse, strict=True)
    )
    references = reference.decode_attention(q, k, v)
    bounds = reference.decode_attention_bound(q, k, v, reference=references)
    assert (abs(merged - on_host(references[0])) <= 2 * on_host(bounds[0].elementwise)).all()


def test_small_weights_are_not_lost(target):
    check_small_weights(target)


# --- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [64 * 10, 64 * 256, 2 * 64 * 256 + 63])
def test_chunks_grow_with_the_length(target, keys):
    check_chunks_that_grow(target, keys)


def test_the_counters_are_zero_again(monkeypatch):
    check_counters(monkeypatch)


def test_blocks_fill_the_device_and_runs_share_long_work():
    def runs(batch, kv_heads, keys):
        task = DecodeTask(FP16, batch, kv_heads, 4, 128, 128, keys)
        config = decode_config.choose_config(task, "sm_90a", 132)
        return task.num_work_tiles(config), config.chunks_per_block

    assert runs(1, 8, 8192) == (128, 1)
    blocks, chunks = runs(64, 8, 4096)
    assert chunks > 1 and blocks >= 264
    # Whole groups where these fill most of the device.
    assert runs(4, 8, 8192)[1] == 1 and runs(16, 8, 8192) == (256, 8)
    for arch in ("sm_80", "sm_86", "sm_90a", "gfx90a", "gfx1100", "host"):
        for dim in (8, 64, 72, 128, 256):
            for rows in (1, 16, 17, 100):
                task = DecodeTask(FP16, 2, 3, rows, dim, dim, 1000)
                for config in decode_config.configs(task, arch):
                    assert decode_config.refusal(config, task, arch) is None


def test_an_estimate_counts_rows_bytes_and_widths():
    """DRAM bounds a large batch; a single sequence is bounded by its longest block."""
    config = DecodeConfig(64, 64, 2, chunk=512, chunks_per_block=8)
    task = DecodeTask(FP16, 64, 8, 64, 128, 128, 8192)

    def us(**changes):
        return estimate_us(task._replace(**changes).blocks(config, 132))

    assert us(rows=1) == us() and us() < us(rows=65) < 1.5 * us()  # which finds the keys in L2
    assert us(rows=512) > 2 * us()
    assert 0.5 < us(cache_dtype=dtypes.int8) / us() < 0.6
    assert 0.5 < us(batch=1, dim=64, dim_v=64) / us(batch=1) < 0.75


def test_more_row_tiles_have_smaller_chunks_on_hopper():
    task = DecodeTask(FP16, 4, 8, 64, 128, 128, 8192)
    chunks = [
        decode_config.choose_config(task._replace(rows=rows), "sm_90a", 132).chunk
        for rows in (64, 65)
    ]
    assert chunks == [512, 128]


@pytest.mark.parametrize("sizes", [(0, 8, 4), (4, 0, 4), (4, 8, 0), (10**6, 128, 8192)])
@pytest.mark.parametrize("keys", [0, 1, 2**30])
def test_configs_of_tasks_of_any_size(sizes, keys):
    task = DecodeTask(FP16, *sizes, 128, 128, keys)
    for arch in ("sm_90a", "host"):
        for sms in (None, 1):
            for config in decode_config.configs(task, arch, sms):
                assert decode_config.refusal(config, task, arch) is None


@pytest.mark.parametrize(
    ("rows", "arch", "says"),
    [
        (4, "sm_80", "sm_80 has no clusters"),
        (17, "sm_90a", "a single row tile of 16 rows"),
        (4, "sm_90a", None),
    ],
)
def test_clusters_that_do_not_fit_are_refused(rows, arch, says):
    task = DecodeTask(FP16, 1, 1, rows, 64, 64, 4096)
    config = DecodeConfig(16, 64, 2, chunks_per_block=8, cluster=2)
    reason = decode_config.refusal(config, task, arch)
    assert says in reason if says else reason is None


@pytest.mark.parametrize(
    ("batch", "kv_heads", "keys", "dim", "rows", "chunks"),
    [
        (24, 4, 1000, 128, 7, 8),  # 96 blocks of whole sequences: 22.0 us; single chunks 27.9
        (14, 8, 1200, 128, 5, 8),  # 24.0, 29.4
        (5, 8, 3000, 128, 5, 1),  # 36.1, 24.1
        (1, 2, 131072, 128, 8, 1),  # 51.2, 48.1
        (48, 20, 448, 64, 1, 8),  # 36.1, 64.7
        (1, 8, 2048, 64, 8, 1),  # 18.0, 9.5
    ],
)
def test_chunks_of_a_block_are_the_faster_ones(batch, kv_heads, keys, dim, rows, chunks):
    """Measured on an H200."""
    task = DecodeTask(FP16, batch, kv_heads, rows, dim, dim, keys)
    assert decode_config.choose_config(task, "sm_90a", 132).chunks_per_block == chunks


def test_row_tiles_find_their_keys_in_l2():
    one, four = (DecodeTask(FP16, 16, 8, rows, 64, 64, 8192) for rows in (16, 64))
    config = DecodeConfig(16, 64, 2, chunks_per_block=8)
    assert estimate_us(four.blocks(config, 132)) < 2.5 * estimate_us(one.blocks(config, 132))


def test_two_blocks_of_each_config_fit_on_hopper():
    for dim in (64, 128, 256):
        for batch, rows in ((1, 4), (1, 64), (16, 4), (64, 4)):  # alone, and where others wait
            task = DecodeTask(FP16, batch, 8, rows, dim, dim, 8192)
            config = decode_config.choose_config(task, "sm_90a", 132)
            assert 2 * (config.shared_bytes(dim) + 1024) <= 228 * 1024
            assert (config.cluster == 2) == (dim == 128 and batch > 1)  # two groups a sequence


# --- wrong calls ---------------------------------------------------------------------------------

WRONG = [
    (TypeError, "q must be", {"q": [1.0]}),
    (TypeError, "q's dtype", {"q": Q.astype(np.int8)}),
    (NotImplementedError, "q is float32: tensor cores", {"q": Q.astype(np.float32)}),
    (NotImplementedError, "k_cache is float32: tensor", {"k_cache": K.astype(np.float32)}),
    (TypeError, "k_cache's dtype must be one of", {"k_cache": K.astype(dtypes.bfloat16)}),
    (TypeError, "v_cache must be", {"v_cache": None}),
    (ValueError, "q must have 4 dims", {"q": Q[0]}),
    (ValueError, "k_cache must have 4 dims", {"k_cache": K[..., None]}),
    (ValueError, "q's last dim must be 1 to 256; got 0", {"q": Q[..., :0]}),
    (TypeError, "window must be", {"window": 5}),
    (ValueError, "softcap must be positive", {"softcap": -1.0}),
    (
        ValueError,
        "alibi_slopes must have shape .4,. or .2, 4.",
        {"alibi_slopes": np.ones((2, 3), np.float32)},
    ),
    (TypeError, "sinks must be float32", {"sinks": np.ones(4)}),
    (
        ValueError,
        "tile_m must be 8 or 16, and cluster 1",
        {"window": (5, 0), "config": DecodeConfig(64, 64, 3)},
    ),
    (ValueError, "v_cache's last dim must be", {"v_cache": make((2, 2, 32, 264))}),
    (ValueError, "at most 64 queries", {"q": make((2, 4, 65, 64))}),
    (ValueError, "k_cache and v_cache differ", {"v_cache": V[:, :, :31]}),
    (ValueError, "k_cache's last dim must be q's", {"q": Q[..., :56]}),
    (ValueError, "heads must be a multiple", {"q": Q[:, :3]}),
    (ValueError, "layout must be 'hnd' or 'nhd'; got 'bhsd'", {"layout": "bhsd"}),
    (ValueError, "is .B, Sk, Hkv, D. with layout='nhd', or", {"layout": "nhd"}),
    (ValueError, "differ in the batch", {"q": Q[:1]}),
    (TypeError, "seq_lens must be", {"seq_lens": [3, 32]}),
    (TypeError, "seq_lens must have dtype int32", {"seq_lens": LENS.astype(np.float32)}),
    (TypeError, "seq_lens must have dtype int32", {"seq_lens": LENS.astype(np.int8)}),
    (ValueError, "seq_lens must have shape", {"seq_lens": LENS[:1]}),
    (ValueError, "seq_lens must be from 0 to the caches' 32", {"seq_lens": LENS + 1}),
    (ValueError, "seq_lens must be from 0", {"seq_lens": LENS - 4}),
    (TypeError, "block_table must have dtype int32", {"block_table": TABLE.astype(bool)}),
    (ValueError, "block_table must have shape", {"block_table": TABLE[:1]}),
    (ValueError, "block_table must have shape", {"block_table": TABLE[0]}),
    (ValueError, "block_table must hold pages from 0 to 1", {"block_table": TABLE + 1}),
    (ValueError, "block_table must hold pages", {"block_table": TABLE - 1, "seq_lens": LENS}),
    (TypeError, "causal must be a bool", {"causal": 1}),
    (TypeError, "return_lse must be a bool", {"return_lse": None}),
    (TypeError, "scale must be", {"scale": "1"}),
    (ValueError, "scale must be finite", {"scale": np.nan}),
    (ValueError, "scale . log2", {"scale": 3e38}),
    (TypeError, "out must have dtype", {"out": np.zeros((2, 4, 1, 72), np.float32)}),
    (ValueError, "out must have shape", {"out": np.zeros((2, 4, 1, 64), FP16)}),
    (ValueError, "out must not overlap q", {"v_cache": K, "out": Q}),
    (TypeError, "config must be a DecodeConfig", {"config": (16, 64, 3)}),
    (ValueError, "tile_m must be", {"config": DecodeConfig(24, 64, 3)}),
    (ValueError, "tile_n must be", {"config": DecodeConfig(16, 48, 3)}),
    (ValueError, "a power of two", {"config": DecodeConfig(16, 64, 3, chunk=96)}),
    (ValueError, "at most 1073741824", {"config": DecodeConfig(16, 64, 3, chunk=2**31 - 128)}),
    (ValueError, "4 or a multiple of 8", {"config": DecodeConfig(16, 64, 3, chunks_per_block=3)}),
    (ValueError, "positive", {"config": DecodeConfig(16, 64, 3, chunks_per_block=0)}),
    (ValueError, "a power of two", {"config": DecodeConfig(16, 64, 3, chunk=384)}),
    (ValueError, "a power of two", {"config": DecodeConfig(16, 64, 3, chunk=64)}),
    (ValueError, "a power of two", {"config": DecodeConfig(16, 128, 3, min_chunk=64)}),
    (ValueError, "shared memory", {"config": DecodeConfig(16, 128, 9)}),
    (ValueError, "cluster must be", {"config": DecodeConfig(16, 64, 2, cluster=3)}),
    (ValueError, "two groups", {"config": DecodeConfig(16, 64, 2, chunks_per_block=8, cluster=2)}),
]


@pytest.mark.parametrize(("error", "match", "wrong"), WRONG)
def test_illegal_arguments_are_refused(error, match, wrong):
    arguments = {"q": Q, "k_cache": K, "v_cache": V, **wrong}
    with pytest.raises(error, match=match):
        cupykern.decode_attention(**arguments)


def test_tables_are_checked_where_they_are_used():
    table = np.array(((0, -5), (1, 0)), np.int64)
    cupykern.decode_attention(Q, K, V, block_table=table, seq_lens=np.array((32, 64)))
    with pytest.raises(ValueError, match="block_table must hold pages"):
        cupykern.decode_attention(Q, K, V, block_table=table, seq_lens=np.array((33, 64)))
    with pytest.raises(ValueError, match="block_table must hold pages"):
        cupykern.decode_attention(Q, K, V, block_table=table)


def test_numpy_lengths_may_come_with_gpu_arrays(gpu):
    args = to_target(gpu, Q, K, V)
    expected = cupykern.decode_attention(Q, K, V, seq_lens=LENS)
    for lens in (LENS, LENS.astype(np.int64), gpu.xp.asarray(LENS)):
        y = on_host(cupykern.decode_attention(*args, seq_lens=lens)).astype(np.float64)
        references = reference.decode_attention(Q, K, V, seq_lens=LENS)
        bounds = reference.decode_attention_bound(Q, K, V, seq_lens=LENS, reference=references)
        assert (abs(y - references[0]) <= bounds[0].elementwise).all() and expected.shape == y.shape
    with pytest.raises(TypeError, match="seq_lens must have dtype int32"):
        cupykern.decode_attention(*args, seq_lens=gpu.xp.asarray(LENS, np.int64))


def test_a_warm_call_is_checked_and_gives_the_same(gpu):
    args = to_target(gpu, Q, K, V)
    lens = gpu.xp.asarray(LENS)
    cold, warm = (
        cupykern.decode_attention(*args, seq_lens=lens, return_lse=True) for _ in range(2)
    )
    for a, b in zip(cold, warm, strict=True):
        assert same_bits(on_host(a), on_host(b))
    for wrong in ({"return_lse": 1}, {"causal": 1}, {"scale": True}, {"seq_lens": lens[:1]}):
        with pytest.raises((TypeError, ValueError)):
            cupykern.decode_attention(*args, **{"seq_lens": lens, "return_lse": True, **wrong})
    nhd = [x.swapaxes(1, 2) for x in args[1:]]
    for _ in range(2):
        y = cupykern.decode_attention(args[0], *nhd, layout="nhd", seq_lens=lens, return_lse=True)
        assert all(same_bits(on_host(a), on_host(b)) for a, b in zip(y, cold, strict=True))
    for options in ({"causal": False}, {"scale": 0.5}, {"return_lse": False}):
        y = cupykern.decode_attention(*args, **{"return_lse": True, "seq_lens": lens, **options})
        expected = cupykern.decode_attention(
            Q, K, V, **{"return_lse": True, "seq_lens": LENS, **options}
        )
        for a, b in zip(check.as_tuple(y), check.as_tuple(expected), strict=True):
            np.testing.assert_allclose(on_host(a).astype(float), b.astype(float), atol=0.02)


# --- 8-bit caches --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_dtype", decode_config.CACHE_DTYPES)
def test_queries_over_8bit_caches_may_be_of_any_size(target, cache_dtype):
    check_range_of_queries(target, cache_dtype)


@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("scales", ["number", "heads", "tokens"])
def test_8bit_pages_in_any_layout_give_the_bits_of_contiguous_caches(target, cache_dtype, scales):
    problem = DecodeProblem(
        *(2, 4, 2, 2, 150, 64), lens=(150, 70), cache_dtype=cache_dtype, scales=scales
    )
    plain, *others = (
        OP.inputs(replace(problem, page=page, layout=layout), 5, target.xp)
        for page, layout in ((None, "hnd"), (24, "nhd"), (None, "nhd"))
    )
    expected = on_host(OP.run(*plain.args, **plain.kwargs))
    assert np.isfinite(expected).all()
    for call in others:
        assert same_bits(on_host(OP.run(*call.args, **call.kwargs)), expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("scales", [None, "heads", "tokens"])
@pytest.mark.parametrize("formula", ["score", "mask", "both"])
def test_formulas_over_8bit_caches(target, cache_dtype, scales, formula):
    """A formula's s is the score of the scaled keys; later calls give the bits of the first."""
    choice = ScoreChoice(
        score=None if formula == "mask" else FORMULAS[0][0],
        mask=None if formula == "score" else FORMULAS[0][1],
    )
    problem = DecodeProblem(
        *(2, 4, 2, 3, 150, 64), lens=(150, 70), page=24, options=choice, cache_dtype=cache_dtype,
        scales=scales,
    )  # fmt: skip
    call = OP.inputs(problem, 7, target.xp)
    y = OP.run(*call.args, **call.kwargs)
    reference = OP.reference(*call.args, **call.kwargs)
    bound = OP.bound(*call.args, **call.kwargs, reference=reference)
    comparison = check.compare(check.as_tuple(y), reference, bound)
    assert comparison.ok, comparison
    assert same_bits(on_host(OP.run(*call.args, **call.kwargs)), on_host(y))


def test_scales_are_of_8bit_caches():
    with pytest.raises(ValueError, match="k_scale is for caches of 8 bits"):
        cupykern.decode_attention(Q, K, K, k_scale=2.0)
    codes = K.astype(np.int8)
    with pytest.raises(ValueError, match=r"v_scale must have shape \(\), \(2,\) or, of tokens"):
        cupykern.decode_attention(Q, codes, codes, v_scale=np.ones(3, np.float32))
