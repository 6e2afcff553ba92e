"""rope_and_cache: formulas, layouts, what is written where, frequencies, wrong calls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import fake_gpu
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cupykern
from cupykern import check, dtypes
from cupykern.attention.rope_config import (
    TABLE_FLOATS,
    RopeConfig,
    RopeTask,
    configs,
    takes_vectors,
)
from cupykern.numerics import as_float64, to_numpy
from cupykern.op import RandomDraw
from cupykern.ops.problems.rope import RopeProblem
from cupykern.ops.rope_and_cache import OP
from cupykern.targets import host, limits

E4M3 = dtypes.float8_e4m3fn


def arrays(dtype=np.float16, batch=2, seq_len=3, heads=4, kv_heads=2, dim=64, seed=0):
    """q, k and v of one product."""
    rng = np.random.default_rng(seed)
    shape = batch, seq_len, heads + 2 * kv_heads, dim
    qkv = rng.standard_normal(shape, np.float32).astype(dtype)
    return qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]


Q, K, V = arrays()
POSITIONS = np.array([[0, 1, 2], [7, 8, 9]], np.int32)
INV_FREQ = cupykern.rope_inv_freq(64, 10_000.0, target="host")[0]
TABLE = np.zeros((4, 64), np.float32)


def caches(dtype=np.float16, slots=12, batch=2, heads=2, dim=64):
    return [np.zeros((batch, heads, slots, dim), dtype) for _ in range(2)]


# --- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_turn_by_their_angles(interleaved):
    """As complex numbers, which neither the kernel nor the reference knows."""
    x = arrays(np.float32)
    q, k = cupykern.rope_and_cache(*x, POSITIONS, inv_freq=INV_FREQ, interleaved=interleaved)
    turn = np.exp(1j * POSITIONS[..., None, None] * INV_FREQ.astype(np.float64))
    for y, given_ in ((q, x[0]), (k, x[1])):
        numbers, results = (z.astype(np.float64) for z in (given_, y))
        if interleaved:
            a, b = (z[..., ::2] + 1j * z[..., 1::2] for z in (numbers, results))
        else:
            a, b = (z[..., :32] + 1j * z[..., 32:] for z in (numbers, results))
        np.testing.assert_allclose(b, a * turn, rtol=0, atol=2e-6)


@pytest.mark.parametrize("position", [131_072, 2**20, 2**31 - 1])
def test_large_positions_are_as_exact_as_fp32(position, target):
    """The errors of unit vectors are those of cosines and sines."""
    x = np.zeros((1, 1, 1, 128), np.float32)
    x[..., :64] = 1
    inv_freq, _ = cupykern.rope_inv_freq(128, 500_000.0, target="host")
    places = [target.xp.asarray(y) for y in (x, x, np.array([position], np.int32), inv_freq)]
    q, _ = cupykern.rope_and_cache(*places[:2], *places[1:3], inv_freq=places[3])
    angles = position * inv_freq.astype(np.float64)
    found = to_numpy(q).astype(np.float64).reshape(2, 64)
    assert abs(found - (np.cos(angles), np.sin(angles))).max() <= 3 * 2.0**-24


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_table_of_cosines_and_sines_rotates_as_its_frequencies(interleaved):
    x, options = arrays(np.float32), {"interleaved": interleaved, "attention_factor": 1.25}
    angles = np.arange(10)[:, None] * INV_FREQ.astype(np.float64)
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
    found = cupykern.rope_and_cache(*x, POSITIONS, cos_sin=table, **options)
    expected = cupykern.rope_and_cache(*x, POSITIONS, inv_freq=INV_FREQ, **options)
    for y, z in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, z, rtol=0, atol=4e-6)


def test_positions_beyond_a_table_count_as_its_ends(target):
    table = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    inside = np.array([0, 3, 3, 0], np.int32)
    outside = np.array([-1, 3, 2**31 - 1, -(2**31)], np.int32)
    x = np.random.default_rng(1).standard_normal((1, 4, 2, 64)).astype(np.float32)
    x, table, *rows = map(target.xp.asarray, (x, table, inside, outside))
    first, second = (cupykern.rope_and_cache(x, x, x, at, cos_sin=table)[0] for at in rows)
    assert (first == second).all()


def test_norms_come_first_and_only_with_a_weight():
    weight = np.linspace(0.5, 2, 64, dtype=np.float32)
    q, k = cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ, k_weight=weight, eps=0.5)
    plain, _ = cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ)
    assert (q == plain).all()
    normed = cupykern.rms_norm(K.astype(np.float32), weight, eps=0.5)
    _, expected = cupykern.rope_and_cache(
        normed[:, :, :0], normed, normed, POSITIONS, inv_freq=INV_FREQ
    )
    np.testing.assert_allclose(k.astype(np.float32), expected, rtol=2**-10, atol=1e-6)


# --- what is written where -----------------------------------------------------------------------


def test_slots_take_keys_and_values_and_others_stay(target):
    k_cache, v_cache = (target.xp.asarray(x) for x in caches())
    k_cache.fill(3), v_cache.fill(5)
    given_ = (target.xp.asarray(x) for x in (Q, K, V, POSITIONS))
    inv_freq = target.xp.asarray(INV_FREQ)
    q = cupykern.rope_and_cache(*given_, k_cache, v_cache, inv_freq=inv_freq)
    expected = cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ)
    assert check.same_bits(to_numpy(q), expected[0]) or target.name != "host"
    k_cache, v_cache = map(to_numpy, (k_cache, v_cache))
    for b, row in enumerate(POSITIONS):
        assert (v_cache[b][:, row] == V[b].swapaxes(0, 1)).all()
        others = np.setdiff1d(np.arange(12), row)
        assert (k_cache[b][:, others] == 3).all() and (v_cache[b][:, others] == 5).all()
        if target.name == "host":
            assert (k_cache[b][:, row] == expected[1][b].swapaxes(0, 1)).all()


def test_tokens_without_a_slot_are_not_written_but_rotated():
    positions = np.array([[-1, 12, 2**31 - 1], [-(2**31), 11, 4]], np.int32)
    k_cache, v_cache = caches()
    q = cupykern.rope_and_cache(Q, K, V, positions, k_cache, v_cache, inv_freq=INV_FREQ)
    expected, _ = cupykern.rope_and_cache(Q, K, V, positions, inv_freq=INV_FREQ)
    assert (q == expected).all()
    assert not v_cache[0].any() and not k_cache[0].any()
    assert (v_cache[1][:, 11] == V[1, 1]).all() and (v_cache[1][:, 4] == V[1, 2]).all()
    assert np.count_nonzero(v_cache.any(axis=(1, 3))) == 2


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_pages_hold_what_contiguous_caches_hold(layout, page):
    pages = -(-12 // page)
    table = np.random.default_rng(1).permutation(2 * pages + 1)[: 2 * pages].astype(np.int32)
    table = table.reshape(2, pages)
    paged = [np.zeros((2 * pages + 1, 2, page, 64), np.float16) for _ in range(2)]
    if layout == "nhd":
        paged = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in paged]
    plain = caches()
    options = {"inv_freq": INV_FREQ}
    q = cupykern.rope_and_cache(
        Q, K, V, POSITIONS, *paged, block_table=table, layout=layout, **options
    )
    assert (q == cupykern.rope_and_cache(Q, K, V, POSITIONS, *plain, **options)).all()
    for x, expected in zip(paged, plain, strict=True):
        x = x if layout == "hnd" else x.swapaxes(1, 2)
        found = np.moveaxis(x[table], 2, 1).reshape(2, 2, -1, 64)[:, :, :12]
        assert (found == expected).all()


def test_pages_that_are_not_there_are_not_written():
    table = np.array([[0, -1], [3, 1]], np.int32)  # of 3 pages
    paged = [np.zeros((3, 2, 8, 64), np.float16) for _ in range(2)]
    positions = np.array([[0, 8, 9], [1, 2, 10]], np.int32)
    cupykern.rope_and_cache(Q, K, V, positions, *paged, inv_freq=INV_FREQ, block_table=table)
    written = paged[1].any(axis=(1, 3))
    assert np.argwhere(written).tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("dtype", [E4M3, np.dtype(np.int8)])
def test_scales_that_are_outputs_are_those_of_quantize(dtype):
    k_cache, v_cache = caches(dtype)
    scales = [np.full((2, 2, 12), -1, np.float32) for _ in range(2)]
    cupykern.rope_and_cache(
        Q, K, V, POSITIONS, k_cache, v_cache, inv_freq=INV_FREQ, k_scale=scales[0],
        v_scale=scales[1],
    )  # fmt: skip
    codes, scale = cupykern.quantize(V, dtype, granularity="row")
    for b, row in enumerate(POSITIONS):
        assert (v_cache[b][:, row].swapaxes(0, 1) == codes[b]).all()
        assert (scale[b, :, :, 0] == scales[1][b][:, row].T).all()
        assert (np.delete(scales[0][b], row, axis=1) == -1).all()
    _, k = cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ)
    found = as_float64(k_cache) * scales[0][..., None]
    for b, row in enumerate(POSITIONS):
        half_step = scales[0][b][:, row][..., None] * (0.5 if dtype == np.int8 else 16)
        exact = k[b].swapaxes(0, 1).astype(np.float64)  # but for a rounding
        assert (abs(found[b][:, row] - exact) <= half_step + 2.0**-10 * abs(exact)).all()


@pytest.mark.parametrize("scale", [0.25, np.float32([0.25, 2]), np.float32(0.25)[None][0]])
def test_cached_values_are_divided_by_their_scale(scale):
    k_cache, v_cache = caches(np.int8)
    v = np.full_like(V, 3.5)
    scale = np.asarray(scale) if isinstance(scale, np.float32) else scale
    cupykern.rope_and_cache(
        Q, K, v, POSITIONS, k_cache, v_cache, inv_freq=INV_FREQ, k_scale=1.0, v_scale=scale
    )
    expected = np.rint(3.5 / np.broadcast_to(scale, 2))
    assert (v_cache[0][:, 1] == expected[:, None]).all()


def test_out_may_be_the_queries():
    qkv = np.concatenate((Q, K, V), axis=2)
    q, k, v = qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:]
    expected = cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ)[0]
    assert cupykern.rope_and_cache(q, k, v, POSITIONS, *caches(), inv_freq=INV_FREQ, out=q) is q
    assert (q == expected).all() and (k == K).all() and (v == V).all()


# --- the same bits -------------------------------------------------------------------------------


def run(problem: RopeProblem, config: RopeConfig | None = None) -> list[bytes]:
    call = OP.inputs(problem, 1, np)
    return [y.tobytes() for y in OP.run(*call.args, **call.kwargs, config=config)]


@pytest.mark.parametrize("heads", [(4, 2), (1, 1), (33, 3)])
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_bits_do_not_depend_on_the_config(heads, dim):
    """Blocks with tokens of several sequences, and with some or all of their heads."""
    problem = RopeProblem(3, 5, *heads, dim, slots=40, weight_dtype="float32", view="packed")
    first, *others = (run(problem, config) for config in OP.configs(problem, "host"))
    assert first == run(problem) and all(other == first for other in others)


def test_bits_do_not_depend_on_the_schedule_or_the_warp():
    problem = RopeProblem(2, 9, 6, 2, 96, slots=24, page=4, weight_dtype="float16")
    found = []
    for warp_size, schedule in ((32, "fifo"), (64, "lifo"), (32, "sticky:3")):
        with host.use(warp_size=warp_size, schedule=schedule):
            found.append(run(problem))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("view", ["C", "swapped", "padded", "sliced", "offset"])
def test_bits_do_not_depend_on_strides_without_norms(view):
    problem = RopeProblem(2, 3, 4, 2, 128, half=32, slots=24)
    assert run(replace(problem, view=view)) == run(problem)


@given(
    st.sampled_from((dtypes.float16, dtypes.float32)),
    st.integers(1, 300),
    st.integers(2, 512),
    st.integers(1, 256),
    st.booleans(),
    st.booleans(),
)
def test_blocks_have_room_for_their_tables(dtype, num_heads, dim, half, normalizes, by_vectors):
    by_vectors = by_vectors and takes_vectors(dtype, dim, half)
    task = RopeTask(dtype, 1000, num_heads, dim, min(half, dim // 2), normalizes, by_vectors)
    for config in configs(task, limits.device("sm_90a")):
        floats = 2 * config.tokens * task.half + 4 * task.num_pairs * normalizes
        assert floats <= TABLE_FLOATS


def test_bench_problems_check_out(target):
    """All options of bench, with what `sample` takes of them."""
    for options in ("", "nocache", "paged", "nhd+norm", "interleaved", "float8_e4m3fn", "int8+nhd"):
        problem = OP.bench_problem((2, 24, 6, 2, 64), f"bfloat16:{options}".rstrip(":"))
        assert check.check_problem(OP, problem, 1, target.xp).ok
        call = OP.inputs(problem, 1, target.xp)
        call, outputs = OP.sample(call, OP.run(*call.args, **call.kwargs), 5000, 1)
        references = OP.reference(*call.args, **call.kwargs)
        bounds = OP.bound(*call.args, **call.kwargs, reference=references)
        assert check.compare(outputs, references, bounds).ok
        assert options == "paged" or call.args[0].shape[1] < 24


# --- wrong calls ---------------------------------------------------------------------------------

C, C8 = caches(), caches(E4M3)
SCALES = np.ones((2, 2, 12), np.float32)
WIDE, LONG = np.ones((2, 3, 1, 514), np.float16), np.ones(33, np.float32)
WRONG = {
    "q is a list": (TypeError, "q must be a cupy or numpy array", {"q": [1.0]}),
    "dtype": (NotImplementedError, "q's dtype must be one of", {"q": Q.astype(np.float64)}),
    "k's dtype": (TypeError, "k must have q's dtype", {"k": K.astype(np.float32)}),
    "dims": (ValueError, r"q must have shape \(B, S, heads, D\)", {"q": Q[0]}),
    "large heads": (ValueError, "last dim must be at most 512", {"q": WIDE}),
    "k's shape": (ValueError, "k must have q's shape", {"k": K[:, :2]}),
    "v's shape": (ValueError, "v must have k's shape", {"v": V[..., :32]}),
    "positions' dtype": (TypeError, "positions must have dtype int32",
                         {"positions": POSITIONS.astype(np.int64)}),
    "positions' shape": (ValueError, r"positions must have shape \(2, 3\) or \(3,\)",
                         {"positions": POSITIONS[:, :2]}),
    "odd rotation": (ValueError, r"inv_freq must have shape \(R,\)", {"inv_freq": LONG}),
    "no rotation": (ValueError, r"inv_freq must have shape \(R,\)", {"inv_freq": INV_FREQ[:0]}),
    "frequencies' dtype": (TypeError, "inv_freq must have dtype float32",
                           {"inv_freq": INV_FREQ.astype(np.float64)}),
    "no frequencies": (ValueError, "inv_freq or cos_sin must be given", {"inv_freq": None}),
    "both": (ValueError, "inv_freq or cos_sin must be given, and not both", {"cos_sin": TABLE}),
    "odd table": (ValueError, r"cos_sin must have shape \(P, 2 R\), R from 1 to half",
              {"inv_freq": None, "cos_sin": TABLE[:, 1:]}),
    "wide table": (ValueError, r"cos_sin must have shape \(P, 2 R\)",
                   {"inv_freq": None, "cos_sin": np.zeros((4, 66), np.float32)}),
    "no row": (ValueError, r"cos_sin must have shape \(P, 2 R\)",
               {"inv_freq": None, "cos_sin": TABLE[:0]}),
    "cosines' dtype": (TypeError, "cos_sin must have dtype float32",
                      {"inv_freq": None, "cos_sin": TABLE.astype(np.float16)}),
    "weight": (ValueError, r"q_weight must have shape \(64,\)", {"q_weight": INV_FREQ}),
    "weight's dtype": (TypeError, "k_weight's dtype", {"k_weight": np.ones(64, np.int8)}),
    "eps": (ValueError, "eps must be at least 0", {"eps": -1.0}),
    "factor": (ValueError, "attention_factor must be finite", {"attention_factor": np.inf}),
    "interleaved": (TypeError, "interleaved must be a bool", {"interleaved": 1}),
    "layout": (ValueError, "layout must be 'hnd' or 'nhd'", {"layout": "bshd"}),
    "one cache": (ValueError, "k_cache and v_cache must both be given", {"v_cache": None}),
    "no values": (TypeError, "v must be a cupy or numpy array", {"v": None}),
    "cache's dtype": (TypeError, "k_cache's dtype",
                      {"k_cache": C[0].astype(np.float32), "v_cache": C[1].astype(np.float32)}),
    "caches' dtypes": (TypeError, "v_cache must have k_cache's dtype", {"v_cache": C8[1]}),
    "another layout": (ValueError, r"k_cache must be \(B, Hkv, Smax, D\) with layout='hnd'.*nhd",
                       {"k_cache": C[0].swapaxes(1, 2), "v_cache": C[1].swapaxes(1, 2)}),
    "batch": (ValueError, "differ in the batch: 1 and 2",
              {"k_cache": C[0][:1], "v_cache": C[1][:1]}),
    "caches' shapes": (ValueError, "v_cache must have k_cache's shape",
                       {"v_cache": C[1][:, :, :5]}),
    "one cache twice": (ValueError, "k_cache must not overlap v_cache", {"v_cache": C[0]}),
    "a cache's other tokens": (ValueError, "k_cache must not overlap v_cache",
                               {"k_cache": C[0][:, :, :5], "v_cache": C[0][:, :, 4:9]}),
    "a broadcast cache": (ValueError, "v_cache must not hold one element twice",
                          {"v_cache": as_strided(C[1], C[1].shape, (0, *C[1].strides[1:]))}),
    "table": (ValueError, r"block_table must have shape \(2, max_pages\)",
              {"block_table": np.zeros((3, 2), np.int32)}),
    "table's dtype": (TypeError, "block_table must have dtype int32",
                      {"block_table": np.zeros((2, 2), np.int64)}),
    "table alone": (ValueError, "block_table goes with k_cache",
                    {"k_cache": None, "v_cache": None, "block_table": np.zeros((2, 2), np.int32)}),
    "scale of 16 bits": (ValueError, "k_scale is for caches of 8 bits", {"k_scale": 1.0}),
    "scale of 0": (ValueError, "v_scale must not be 0",
                   {"k_cache": C8[0], "v_cache": C8[1], "v_scale": 0.0}),
    "scale's shape": (ValueError, r"k_scale must have shape \(\), \(2,\) or, as an output",
                      {"k_cache": C8[0], "v_cache": C8[1], "k_scale": SCALES[0]}),
    "scale's dtype": (TypeError, "k_scale must be a number or a float32 array",
                      {"k_cache": C8[0], "v_cache": C8[1], "k_scale": SCALES.astype(np.float64)}),
    "one output": (ValueError, "must both be outputs",
                   {"k_cache": C8[0], "v_cache": C8[1], "k_scale": SCALES}),
    "one output twice": (ValueError, "k_scale must not overlap v_scale",
                         {"k_cache": C8[0], "v_cache": C8[1], "k_scale": SCALES,
                          "v_scale": SCALES}),
    "a broadcast output": (ValueError, "v_scale must not hold one element twice",
                           {"k_cache": C8[0], "v_cache": C8[1], "k_scale": SCALES.copy(),
                            "v_scale": as_strided(SCALES, SCALES.shape, (0, 0, 4))}),
    "a read-only output": (ValueError, "k_scale must be writable",
                           {"k_cache": C8[0], "v_cache": C8[1],
                            "k_scale": np.broadcast_to(SCALES[:, :1], SCALES.shape),
                            "v_scale": SCALES}),
    "out overlaps": (ValueError, "out must not overlap v",
                     {"v": Q[:, :, :2], "k": K, "out": Q, "q": Q[:, :, ::-1].copy()}),
    "out of another row": (ValueError, "out must not overlap q", {"out": Q[:, ::-1]}),
    "config": (ValueError, "tokens must be one of", {"config": RopeConfig(3)}),
    "config's type": (TypeError, "config must be a RopeConfig", {"config": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_and_nothing_is_written(name):
    error, match, changes = WRONG[name]
    given_ = {
        "q": Q, "k": K, "v": V, "positions": POSITIONS, "k_cache": C[0], "v_cache": C[1],
        "inv_freq": INV_FREQ, **changes,
    }  # fmt: skip
    with pytest.raises(error, match=match):
        cupykern.rope_and_cache(**given_)
    assert not (C[0].any() or C[1].any())


def test_no_tokens_and_no_query_heads_are_legal():
    q, k = cupykern.rope_and_cache(
        Q[:, :0], K[:, :0], V[:, :0], POSITIONS[:, :0], inv_freq=INV_FREQ
    )
    assert q.shape == (2, 0, 4, 64) and k.shape == (2, 0, 2, 64)
    _, k = cupykern.rope_and_cache(Q[:, :, :0], K, V, POSITIONS, inv_freq=INV_FREQ)
    assert (k == cupykern.rope_and_cache(Q, K, V, POSITIONS, inv_freq=INV_FREQ)[1]).all()


# --- on a fake GPU -------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch, no_gpu):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as made:
        yield made


def heads(fake, batch, seq_len):
    qkv = fake.array((batch, seq_len, 48, 128), "float16")
    return qkv[:, :, :32], qkv[:, :, 32:40], qkv[:, :, 40:]


@pytest.mark.parametrize(
    ("batch", "seq_len", "tokens", "grid"), [(1, 4096, 2, 2048), (64, 1, 1, 192), (1, 1, 1, 3)]
)
def test_a_call_is_one_launch(fake, batch, seq_len, tokens, grid):
    """A block has two whole tokens where there are many, a part of one in decoding; a warm call
    launches the same."""
    cache = fake.array((2, batch, 8, seq_len, 128), "float16")
    positions, inv_freq = fake.array((seq_len,), "int32"), fake.array((64,), "float32")
    for _ in range(3):
        fake.launches.clear()
        cupykern.rope_and_cache(*heads(fake, batch, seq_len), positions, *cache, inv_freq=inv_freq)
        (launch,) = fake.launches
        assert launch.grid == grid
        constants = dict(launch.variant.constants)
        assert constants["kTokens"] == tokens and constants["kVectorWidth"] == 8


def test_caches_that_overlap_are_refused_after_others(fake):
    memory = fake.array((3, 1, 8, 16, 128), "float16")
    positions, inv_freq = fake.array((4,), "int32"), fake.array((64,), "float32")
    given_ = heads(fake, 1, 4)
    for _ in range(3):
        cupykern.rope_and_cache(*given_, positions, memory[0], memory[2], inv_freq=inv_freq)
    fake.launches.clear()
    nearer = memory.reshape(-1)[100:][: memory[0].size].reshape(memory[0].shape)
    for other in (memory[0], nearer):
        with pytest.raises(ValueError, match="k_cache must not overlap v_cache"):
            cupykern.rope_and_cache(*given_, positions, memory[0], other, inv_freq=inv_freq)
    assert not fake.launches


def test_scale_outputs_that_overlap_are_refused_after_others(fake):
    k_cache, v_cache = fake.array((2, 1, 8, 16, 128), "int8")
    positions, inv_freq = fake.array((4,), "int32"), fake.array((64,), "float32")
    scales = fake.array((2, 1, 8, 16), "float32")
    given_ = *heads(fake, 1, 4), positions, k_cache, v_cache
    for _ in range(3):
        cupykern.rope_and_cache(*given_, inv_freq=inv_freq, k_scale=scales[0], v_scale=scales[1])
    fake.launches.clear()
    nearer = scales.reshape(-1)[32:][: scales[0].size].reshape(scales[0].shape)
    for other in (scales[0], nearer):
        with pytest.raises(ValueError, match="k_scale must not overlap v_scale"):
            cupykern.rope_and_cache(*given_, inv_freq=inv_freq, k_scale=scales[0], v_scale=other)
    assert not fake.launches


def test_what_is_elsewhere_is_refused(fake):
    given_ = *heads(fake, 1, 3), np.arange(3, dtype=np.int32)
    with pytest.raises(TypeError, match="positions must be a cupy array as q is"):
        cupykern.rope_and_cache(*given_, inv_freq=fake.array((64,), "float32"))


def test_problems_are_drawn_with_every_option():
    drawn = [OP.draw_problem(RandomDraw(seed)) for seed in range(300)]
    for name, count in (("view", 6), ("scales", 5), ("layout", 2), ("cache_dtype", 3), ("page", 5)):
        assert len({getattr(problem, name) for problem in drawn}) == count
