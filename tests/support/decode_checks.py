"""Checks of decode_attention that its tests and planted faults share."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np

import cupykern
from cupykern import check, dtypes, inputs, reference
from cupykern.attention import decode_plan
from cupykern.attention.decode_config import DecodeConfig, DecodeTask
from cupykern.ops.checks.score_options import CAUSAL
from cupykern.ops.problems.decode_attention import codes, stored
from cupykern.runtime import workspace
from cupykern.targets import host, of_array

FP16 = dtypes.float16


SMALL_CHUNKS = DecodeConfig(16, 64, 3, chunk=64, min_chunk=64)  # of head dim 128


def make(shape, seed=0, dtype=FP16):
    return inputs.values("normal", shape, dtype, seed)


def same_bits(a, b) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def caches(lens, keys, kv_heads=2, dim=128, seed=1):
    """K and V of sequences, NaN behind their ends."""
    both = [make((len(lens), kv_heads, keys, dim), seed + i) for i in range(2)]
    for x in both:
        for b, length in enumerate(lens):
            x[b, :, length:] = np.nan
    return both


def to_target(target, *arrays):
    return tuple(target.xp.asarray(x) for x in arrays)


def on_host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def check_any_batch(target):
    """Alone, among others, at another place, beside longer ones, in a larger cache."""
    lens, keys = (300, 1, 0, 257, 300), 300
    q, (k, v) = make((5, 6, 2, 128)), caches(lens, keys)
    k[4], v[4], q[4] = k[0], v[0], q[0]
    index_arrays = np.array(lens, np.int32)

    def run(batch, size):
        arrays = [np.full((len(batch), *x.shape[1:2], size, 128), np.nan, FP16) for x in (k, v)]
        for large, x in zip(arrays, (k, v), strict=True):
            large[:, :, : min(size, keys)] = x[batch][:, :, :size]
        args = to_target(target, q[batch], *arrays)
        (lens_there,) = to_target(target, index_arrays[batch])
        outputs = cupykern.decode_attention(*args, seq_lens=lens_there, return_lse=True)
        return [on_host(y) for y in outputs]

    whole = run([0, 1, 2, 3, 4], keys)
    for batch, size in (([0], 300), ([3, 0], 300), ([1, 1, 4], 300), ([2, 3], 301), ([0, 4], 1200)):
        for part, all_of_them in zip(run(batch, size), whole, strict=True):
            assert same_bits(part, all_of_them[batch]), (batch, size)
    assert same_bits(whole[0][0], whole[0][4])


def check_who_computes(target, chunks_per_block, rows):
    """Neither how many chunks a block takes on, nor its buffers, nor the schedule."""
    q, (k, v) = make((2, 34, 1, 128)), caches((650, 130), 650)
    args = to_target(target, q, k, v, np.array((650, 130), np.int32))

    def run(config):
        y = cupykern.decode_attention(*args[:3], seq_lens=args[3], return_lse=True, config=config)
        return b"".join(on_host(x).tobytes() for x in y)

    single = replace(SMALL_CHUNKS, tile_m=rows, stages=2)
    config = replace(single, chunks_per_block=chunks_per_block)
    expected = run(single)
    assert run(config) == expected
    assert run(replace(config, stages=3 if rows == 16 else 1)) == expected
    if target.name == "host":
        for schedule in ("lifo", "sticky:1"):
            with host.use(warp_size=target.warp_size, schedule=schedule):
                assert run(config) == expected


def check_clusters(target, heads):
    """Sequences of two groups, of one, and of none; in one pass over the rows, and in several."""
    lens = np.array((1000, 300, 0, 513), np.int32)
    q, (k, v) = make((4, heads, 1, 128)), caches(lens, 1000)
    args = to_target(target, q, k, v, lens)
    config = replace(SMALL_CHUNKS, stages=2, chunks_per_block=8)

    def run(config):
        y = cupykern.decode_attention(*args[:3], seq_lens=args[3], return_lse=True, config=config)
        return b"".join(on_host(x).tobytes() for x in y)

    assert run(replace(config, cluster=2)) == run(config)


def check_behind_the_end(target):
    """NaN, infinities and numbers give the same."""
    lens = np.array((0, 5, 64, 65, 130), np.int32)
    q = make((5, 2, 1, 128))
    expected = None
    for behind in (np.nan, np.inf, 3.0):
        k, v = caches(lens, 140)
        k, v = (np.where(np.isnan(x), np.asarray(behind, FP16), x) for x in (k, v))
        y = on_host(cupykern.decode_attention(*to_target(target, q, k, v), seq_lens=lens))
        assert expected is None or same_bits(y, expected)
        expected = y
    assert np.isfinite(expected).all() and (expected[0] == 0).all()


def check_keys_behind(target, queries):
    """Caches that end with a tile, with scores of the last keys so large that one wins if seen."""
    for keys in (keys for keys in (16, 64, 128, 256, 512) if keys >= queries):
        q = np.ones((1, 2, queries, 64), FP16)
        k, v = np.zeros((2, 1, 1, keys, 64), FP16)
        last = np.arange(1, queries + 1)
        k[..., -queries:, :] = 4 * last[:, None]
        v[..., -queries:, :] = last[:, None]
        y = on_host(cupykern.decode_attention(*to_target(target, q, k, v)))
        np.testing.assert_array_equal(y, np.broadcast_to(last[:, None], y.shape))


def check_strides_of_tables(target, rows):
    """Rows of a wider table, with pages that exist between them."""
    q, *pages = to_target(target, make((3, 4, 1, 64)), *(make((12, 2, 24, 64), i) for i in (1, 2)))
    (wide,) = to_target(target, np.random.default_rng(3).integers(0, 12, (6, 9)).astype(np.int32))
    table = {
        "apart": wide[:3, 2:6],
        "every other": wide[::2, :4],
        "reversed": wide[2::-1, :4],
        "shared": target.xp.broadcast_to(wide[0, :4], (3, 4)),
    }[rows]
    y, expected = (
        on_host(cupykern.decode_attention(q, *pages, block_table=x)) for x in (table, table.copy())
    )
    assert same_bits(y, expected)


def check_infinite_value(target):
    """However many chunks a block goes on with after it."""
    q, (k, v) = make((1, 2, 1, 128)), caches((300,), 300)
    v[0, 0, 7, 5] = np.inf
    for chunks in (1, 8):
        config = replace(SMALL_CHUNKS, chunks_per_block=chunks)
        y = on_host(cupykern.decode_attention(*to_target(target, q, k, v), config=config))
        assert np.isposinf(y[0, 0, 0, 5]) and np.isfinite(np.delete(y.ravel(), 5)).all()


def check_clamped(target):
    """As the kernel meets them, unchecked."""
    q, (k, v) = make((3, 2, 1, 128)), caches((100, 0, 40), 100)
    pages = [x.swapaxes(1, 2).reshape(-1, 20, 2, 128).swapaxes(1, 2).copy() for x in (k, v)]
    table = np.arange(15, dtype=np.int32).reshape(3, 5)
    wrong_table = table.copy()
    wrong_table[0, 0], wrong_table[2, 4] = -(2**31), 2**31 - 1
    lens, wrong = np.array((100, 0, 100), np.int32), np.array((2**31 - 1, -7, 101), np.int32)
    for x in pages:
        x[np.isnan(x)] = 1.0  # the last page is now read
    here = of_array(to_target(target, q)[0])

    def run(q, k, v, lens, table):
        args = to_target(target, q, k, v, lens, table)
        y = target.xp.full((3, 2, 1, 128), np.nan, FP16)
        decode_plan.run(here, args, y, None, 100, 0.1, None, (CAUSAL, None, None))
        return on_host(y)

    assert same_bits(run(q, *pages, wrong, wrong_table), run(q, *pages, lens, table))


def check_sinks_of_chunks():
    """A sink counts once, whether a block has one chunk or all."""
    q, (k, v) = make((1, 4, 1, 64)), caches((700,), 700, dim=64)
    options = {"sinks": np.array([3.0, 0.0, -2.0, 5.0], np.float32), "window": (650, 0)}
    results = [
        cupykern.decode_attention(q, k, v, config=DecodeConfig(16, 64, 2, 128, n), **options)
        for n in (1, 8)
    ]
    assert same_bits(*results)


def check_large_caches():
    """Keys and pages far apart, in memory that is not all there."""
    stride, flags = 2**27, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 40 * stride, flags=flags), FP16)
    far = np.lib.stride_tricks.as_strided(memory, (1, 1, 40, 64), (0, 0, stride, 2))
    near = make((1, 1, 40, 64), 1)
    far[...] = near
    q, table = make((1, 2, 1, 64)), np.arange(40, dtype=np.int32)[None]
    expected = cupykern.decode_attention(q, near, near)
    assert same_bits(cupykern.decode_attention(q, far, far), expected)
    pages = far.reshape(40, 1, 1, 64)
    assert pages.base is not None and pages.strides[0] == stride
    assert same_bits(cupykern.decode_attention(q, pages, pages, block_table=table), expected)


def check_small_weights(target):
    """All other keys of a warp 13 below the largest: their weights would be subnormal in FP16,
    unless shifted."""
    q, k = np.zeros((1, 1, 1, 64), FP16), np.zeros((1, 1, 16, 64), FP16)
    q[..., 0], k[:, :, 1:, 0] = 1, -13
    v = np.full((1, 1, 16, 64), 100, FP16)
    v[:, :, 0] = 0
    y = on_host(cupykern.decode_attention(*to_target(target, q, k, v), scale=1.0))
    expected = reference.decode_attention(q, k, v, scale=1.0)[0]
    # A weight is rounded, then the result; 2^-16 for all that is done in FP32.
    relative = 2 * cupykern.finfo(FP16).unit_roundoff + 2.0**-16
    assert (abs(y.astype(np.float64) - expected) <= relative * expected).all()


def check_range_of_queries(target, cache_dtype):
    """BF16 queries over 8-bit caches: rows of any size, and elements that are small beside others
    of their row, but not beside those that meet keys."""
    rng, sizes = np.random.default_rng(4), np.array((0, 60, -90, 100))  # exponents, of KV heads
    k, v = (codes("uniform", (2, 4, 40, 128), cache_dtype, seed) for seed in (5, 6))
    q = rng.uniform(1, 2, (2, 4, 2, 1, 128)) * rng.choice((1, -1), (2, 4, 2, 1, 128))
    q[0] = np.ldexp(q[0], sizes[:, None, None, None])
    k[1, ..., :64] = 0
    for group, size in enumerate((20, 36)):  # the second's are rounded
        q[1, :, group, :, :64] = np.ldexp(q[1, :, group, :, :64], size)
    scales = np.full((2, 4, 40), 0.02 if cache_dtype == dtypes.int8 else 0.1, np.float32)
    scales[0] = np.ldexp(scales[0], -sizes[:, None])
    args = q.reshape(2, 8, 1, 128).astype(dtypes.bfloat16), k, v
    call = {"scale": 0.2, "return_lse": True}
    references = reference.decode_attention(*args, k_scale=scales, **call)
    bounds = reference.decode_attention_bound(*args, k_scale=scales, **call, reference=references)
    (k_scale,) = to_target(target, scales)
    there = (stored(x, "C", target.xp) for x in args)
    outputs = cupykern.decode_attention(*there, k_scale=k_scale, **call)
    assert check.compare(tuple(map(on_host, outputs)), references, bounds).ok


def check_chunks_that_grow(target, keys):
    """Some groups, the largest number of chunks, and one key more than twice that."""
    q, (k, v) = make((1, 2, 1, 8)), caches((keys,), keys, kv_heads=1, dim=8)
    args, config = to_target(target, q, k, v), DecodeConfig(16, 64, 3, chunk=64, min_chunk=64)
    outputs = (cupykern.decode_attention(*args, config=config),)
    whole_groups = cupykern.decode_attention(*args, config=replace(config, chunks_per_block=8))
    assert same_bits(on_host(outputs[0]), on_host(whole_groups))
    references = reference.decode_attention(*args)
    bounds = reference.decode_attention_bound(*args, reference=references)
    assert check.compare(outputs, references, bounds).ok
    assert DecodeTask(FP16, 1, 1, 2, 8, 8, keys).max_chunks(config) == min(keys // 64, 256)


def check_counters(monkeypatch):
    """Whoever uses them next, on the same stream, relies on that."""
    taken = []

    def take(*args):
        taken.append(before(*args))
        return taken[-1]

    before = workspace.take
    monkeypatch.setattr(workspace, "take", take)
    q, (k, v) = make((2, 4, 1, 128)), caches((650, 130), 650)
    for chunks in (1, 8):
        config = replace(SMALL_CHUNKS, chunks_per_block=chunks)
        cupykern.decode_attention(q, k, v, seq_lens=np.array((650, 130), np.int32), config=config)
    assert [counters.size for _, counters in taken] == [2 * 2 * 3, 2 * 2]
    assert not any(counters.any() for _, counters in taken)
