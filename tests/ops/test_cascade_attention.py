"""cascade_attention, beside the properties that hold for every op."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import fake_gpu

import cupykern
from cupykern import check, reference
from cupykern.attention.decode_config import DecodeConfig
from cupykern.attention.merge_plan import MergeConfig
from cupykern.op import RandomDraw, as_tuple
from cupykern.ops.cascade_attention import OP
from cupykern.reference.partial_attention import Partial
from cupykern.runtime import choice, jit, plans

RNG = np.random.default_rng(5)
B, H, HKV, S, SK, D, DV = 3, 4, 2, 40, 24, 64, 48


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float16)


Q, SHARED_K, SHARED_V = normal(B, H, 2, D), normal(1, HKV, S, D), normal(1, HKV, S, DV)
K, V = normal(B, HKV, SK, D), normal(B, HKV, SK, DV)
LENS = np.array([5, 0, 24], np.int32)


def at_odd_bytes(x):
    """x's elements one after the other from an odd address on."""
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    made = memory.view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def cascade(q=Q, shared_k=SHARED_K, shared_v=SHARED_V, k_cache=K, v_cache=V, **options):
    return cupykern.cascade_attention(
        q, shared_k, shared_v, k_cache, v_cache, **{"seq_lens": LENS, **options}
    )


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_sample_is_right_alone(first):
    """Of paged and contiguous caches, with scales and without."""
    for seed in range(first, first + 10):
        problem = OP.draw_problem(RandomDraw(seed))
        call = OP.inputs(problem, seed, np)
        outputs = as_tuple(OP.run(*call.args, **call.kwargs))
        part, some = OP.sample(call, outputs, 0, seed)
        exact = OP.reference(*part.args, **part.kwargs)
        bounds = OP.bound(*part.args, **part.kwargs, reference=exact)
        assert check.compare(some, exact, bounds).ok, problem


def test_a_sample_has_few_sequences_and_heads():
    call = OP.inputs(OP.bench_problem((20, 12, 6, 8, 16, 8), "bfloat16:int8"), 1, np)
    found = []
    for seed in range(9):
        part, _ = OP.sample(call, (), 64, seed)
        q, shared_k, _, k, _ = part.args
        assert 2 <= len(q) == len(k) <= 3 and shared_k.shape == (1, 2, 8, 8)
        assert q.shape[1] == 4 and k.shape[1] == 2 and part.kwargs["k_scale"].shape == (2,)
        assert (q[[0, -1]][:, [0, 3]] == call.args[0][[0, 19]][:, [0, 11]]).all()
        found.append(q.tobytes())
    assert len(set(found)) > 1


# --- the config of the own keys ------------------------------------------------------------------

CONFIG = DecodeConfig(16, 32, 2, chunk=64, min_chunk=32, chunks_per_block=8)


def test_a_config_is_of_the_own_keys():
    with jit.recording() as recorded:
        cascade(config=CONFIG)
    own, shared, merge = (dict(variant.constants) for variant in recorded)
    assert own["kTileN"] == 32 != shared["kTileN"] and "kWidth" in merge
    (exact,) = reference.cascade_attention(Q, SHARED_K, SHARED_V, K, V, seq_lens=LENS)
    np.testing.assert_allclose(cascade(config=CONFIG).astype(float), exact, atol=2e-3)


def test_a_config_that_does_not_fit_launches_nothing():
    with jit.logging_launches() as launches:
        with pytest.raises(ValueError, match="config does not fit: chunk must be min_chunk"):
            cascade(config=replace(CONFIG, chunk=96))
        with pytest.raises(TypeError, match="config must be a DecodeConfig; got MergeConfig"):
            cascade(config=MergeConfig(1))
    assert not launches


def test_plans_of_a_config_are_not_those_of_other_calls(monkeypatch):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as gpu:
        shared, own = (gpu.array((n, HKV, 64, D), np.float16) for n in (1, B))
        q, lens = gpu.array((B, H, 1, D), np.float16), gpu.array((B,), np.int32)

        def run(function, *args, config):
            gpu.launches.clear()
            function(*args, seq_lens=lens, return_lse=True, config=config)
            return [launch.variant for launch in gpu.launches]

        calls = [
            (function, *args, config)
            for function, *args in (
                (cupykern.cascade_attention, q, shared, shared, own, own),
                (cupykern.decode_attention, q, own, own),
            )
            for config in (None, CONFIG)
        ]
        alone = []
        for *call, config in calls:
            plans.clear()
            alone.append(run(*call, config=config))
        assert alone[0] != alone[1] and alone[2] == alone[0][:1] and alone[3] == alone[1][:1]
        for order in itertools.permutations(range(4)):
            plans.clear()
            for number in (*order, *order):
                *call, config = calls[number]
                assert run(*call, config=config) == alone[number]


def test_only_configs_of_the_own_keys_are_requested():
    """Also where their plan is known: CUPYKERN_TUNE=1 tunes the first request, with config=."""
    for known in (False, True):
        plans.clear()
        if known:
            cupykern.decode_attention(Q, K, V, seq_lens=LENS, return_lse=True)
        with choice.recording() as requests:
            cascade()
        assert [request.task.batch for request in requests] == ([] if known else [B])
        assert all(request.task.dim_v == DV for request in requests)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_reference_is_attention_over_all_keys(softcap):
    """Causal among the own keys; of one sequence after the other."""
    options = {"scale": 0.2, "softcap": softcap, "return_lse": True}
    y, lse = reference.cascade_attention(Q, SHARED_K, SHARED_V, K, V, seq_lens=LENS, **options)
    for b, length in enumerate(LENS):
        keys, values = (
            np.concatenate((shared, own[b : b + 1, :, :length]), axis=2)
            for shared, own in ((SHARED_K, K), (SHARED_V, V))
        )
        seen = np.arange(S + length) <= S + length - 2 + np.arange(2)[:, None]
        seen[:, :S] = True  # with fewer own keys than queries too
        alone, of_alone = reference.attention(Q[b : b + 1], keys, values, mask=seen, **options)
        np.testing.assert_allclose(y[b], alone[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b], of_alone[0], rtol=1e-12)


def test_a_share_that_is_off_exceeds_the_bound():
    """By one key of 40."""
    call = (Q, SHARED_K, SHARED_V, K, V), {"seq_lens": LENS, "return_lse": True}
    exact = reference.cascade_attention(*call[0], **call[1])
    bounds = reference.cascade_attention_bound(*call[0], **call[1], reference=exact)
    assert check.compare(cascade(return_lse=True), exact, bounds).ok
    fewer = cascade(shared_k=SHARED_K[:, :, 1:], shared_v=SHARED_V[:, :, 1:], return_lse=True)
    assert not check.compare(fewer, exact, bounds).within_bound


def test_errors_are_carried_through_a_merge():
    """Those of both results and of both log-sum-exps, at their largest and of the worst signs."""
    rng, d = np.random.default_rng(0), 1e-4
    first, other = (
        Partial(rng.standard_normal((1, 1, 8, 4)), rng.standard_normal((1, 1, 8)), d, d, d, d)
        for _ in range(2)
    )
    exact = reference.merge_attention(first.out, first.lse, other.out, other.lse)
    moved = [
        reference.merge_attention(first.out + e, first.lse + d1, other.out + e, other.lse + d2)
        for e, d1, d2 in itertools.product((d, -d), repeat=3)
    ]
    found = first.merged(other, "bhsd")
    for i, bound in enumerate((found.out_error, found.lse_error)):
        worst = np.max([abs(x[i] - exact[i]) for x in moved], axis=0)
        assert (worst <= bound).all() and (worst >= 0.95 * bound).all()


def test_without_shared_keys_it_is_decode_attention():
    found = cascade(shared_k=SHARED_K[:, :, :0], shared_v=SHARED_V[:, :, :0], return_lse=True)
    expected = cupykern.decode_attention(Q, K, V, seq_lens=LENS, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_without_own_keys_it_is_attention_over_the_shared_ones():
    rows = Q.swapaxes(0, 1).reshape(1, H, B * 2, D)
    expected = cupykern.decode_attention(rows, SHARED_K, SHARED_V, causal=False)
    expected = expected.reshape(H, B, 2, DV).swapaxes(0, 1)
    np.testing.assert_array_equal(cascade(seq_lens=np.zeros(B, np.int32)), expected)
    np.testing.assert_array_equal(cascade(k_cache=K[:, :, :0], v_cache=V[:, :, :0], seq_lens=None),
                                  expected)  # fmt: skip
    np.testing.assert_array_equal(cascade()[1], expected[1])


def test_without_keys_it_gives_zeros():
    y, lse = cascade(
        shared_k=SHARED_K[:, :, :0], shared_v=SHARED_V[:, :, :0], seq_lens=0 * LENS, return_lse=True
    )
    assert (y == 0).all() and (lse == -np.inf).all()


def test_what_caches_hold_after_a_length_is_not_seen():
    k, v = K.copy(), V.copy()
    for b, length in enumerate(LENS):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    np.testing.assert_array_equal(cascade(k_cache=k, v_cache=v), cascade())


@pytest.mark.parametrize("batch, reads", [(32, "decode_attention"), (33, "attention")])
def test_what_reads_the_shared_keys(batch, reads):
    """Decoding's kernel, which splits the keys over blocks, for up to 64 rows."""
    q, own = normal(batch, H, 2, D), normal(batch, HKV, 4, D)
    with jit.recording() as recorded:
        cupykern.cascade_attention(q, SHARED_K, SHARED_K, own, own)
    kernels = {variant.kernel for variant in recorded} - {"decode_merge"}
    assert kernels == {"decode_attention", reads, "merge_attention"}


@pytest.mark.parametrize("shape", [(0, H, 1, D), (B, 0, 1, D), (B, H, 0, D)])
def test_empty_batches_heads_and_queries_give_empty_results(shape):
    q, k = np.zeros(shape, np.float16), np.zeros((shape[0], HKV, SK, D), np.float16)
    shared = SHARED_K
    if shape[1] == 0:
        k, shared = k[:, :0], shared[:, :0]
    y, lse = cupykern.cascade_attention(q, shared, shared, k, k, return_lse=True)
    assert y.shape == shape and lse.shape == shape[:3]


def test_out_is_written_whatever_its_strides():
    expected = cascade()
    out = np.full((B, 2, H, DV), np.nan, np.float16).swapaxes(1, 2)
    assert cascade(out=out) is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", ["q", "shared_k", "shared_v", "k_cache", "v_cache"])
def test_arrays_may_have_any_strides(name):
    given = {"q": Q, "shared_k": SHARED_K, "shared_v": SHARED_V, "k_cache": K, "v_cache": V}
    for move in (at_odd_bytes, lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2)):
        np.testing.assert_array_equal(cascade(**{name: move(given[name])}), cascade())


def test_the_queries_of_a_model_are_not_copied(monkeypatch):
    """(B, S, H, D) in memory, as rope_and_cache leaves them; others are."""
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as gpu:
        shared, own = (gpu.array((n, HKV, 64, D), np.float16) for n in (1, B))
        lens, options = gpu.array((B,), np.int32), {"return_lse": True}
        q = gpu.array((B, 2, H, D), np.float16).transpose(0, 2, 1, 3)
        for _ in range(2):  # also a call whose plans are known
            gpu.launches.clear()
            y, lse = cupykern.cascade_attention(
                q, shared, shared, own, own, seq_lens=lens, **options
            )
            assert y.shape == (B, H, 2, D) and lse.shape == (B, H, 2)
            kernels = [launch.variant.kernel for launch in gpu.launches]
            assert kernels.count("decode_attention") == 2 and kernels[-1] == "merge_attention"
            assert gpu.copies == []


def test_what_was_illegal_stays_so(monkeypatch):
    """After calls whose plans are kept."""
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as gpu:
        memory, cache = (gpu.array((B, H, 16, D), np.float16) for _ in range(2))
        shared, own, lens = cache[:1, :HKV], cache[:, :HKV], gpu.array((B,), np.int32)

        def run(out=None, q=memory[:, :, :1], lens=lens, **options):
            return cupykern.cascade_attention(
                q, shared, shared, own, own, seq_lens=lens, out=out, **options
            )

        for _ in range(3):
            assert run(memory[:, :, 1:2]).shape == (B, H, 1, D)
            run(return_lse=True, softcap=1.0, scale=1)
            for name, out in (("q", memory[:, :, :1]), ("shared_k", cache[:, :, 1:2])):
                with pytest.raises(ValueError, match=f"out must not overlap {name}"):
                    run(out)
            with pytest.raises(TypeError, match="return_lse must be a bool"):
                run(return_lse=1, softcap=1.0, scale=1)
            with pytest.raises(TypeError, match="scale must be a real number"):
                run(return_lse=True, softcap=1.0, scale=True)
            with pytest.raises(ValueError, match="seq_lens must be from 0"):
                run(lens=np.full(B, 17, np.int32))
            with pytest.raises(TypeError, match="shared_k must be a numpy array"):
                run(q=np.zeros((B, H, 1, D), np.float16))
            with pytest.raises(ValueError, match="k_scale is for caches of 8 bits"):
                run(k_scale=1.0)


@pytest.mark.gpu
def test_in_a_graph(gpu):
    """Lengths may change between launches."""
    xp = gpu.xp
    arrays = [xp.asarray(x) for x in (Q, SHARED_K, SHARED_V, K, V)]
    lens = xp.asarray(LENS)
    cupykern.cascade_attention(*arrays, seq_lens=lens)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        y = cupykern.cascade_attention(*arrays, seq_lens=lens)
        graph = stream.end_capture()
        for changed in (LENS, LENS[::-1]):
            lens[...] = xp.asarray(np.ascontiguousarray(changed))
            graph.launch()
            expected = cupykern.cascade_attention(*arrays, seq_lens=lens)
            stream.synchronize()
            assert bool((y == expected).all())


@pytest.mark.parametrize(
    "error, message, given",
    [
        (TypeError, "shared_k must be a cupy or numpy array", {"shared_k": [1.0]}),
        (TypeError, "shared_k's dtype must be one of float16; got",
         {"shared_k": SHARED_K.astype(np.int8), "shared_v": SHARED_V.astype(np.int8)}),
        (TypeError, "shared_v's dtype must be one of float16; got",
         {"shared_v": SHARED_V.astype(np.int8)}),
        (NotImplementedError, "shared_k is float32", {"shared_k": SHARED_K.astype(np.float32)}),
        (NotImplementedError, "shared_k's dtype", {"shared_k": SHARED_K.astype(np.float64)}),
        (NotImplementedError, "q is float32", {"q": Q.astype(np.float32)}),
        (ValueError, "shared_k must have one sequence", {"shared_k": K, "shared_v": V}),
        (ValueError, "shared_k must have 4 dims", {"shared_k": SHARED_K[0]}),
        (ValueError, "shared_k's last dim must be q's, 64", {"shared_k": SHARED_K[..., :32]}),
        (ValueError, "shared_k and shared_v differ", {"shared_v": SHARED_V[:, :, 1:]}),
        (ValueError, "shared_v must have the caches' KV heads and last dim, 2 and 48",
         {"shared_v": SHARED_V[..., :40]}),
        (ValueError, "shared_k must have the caches' KV heads and last dim, 2 and 64",
         {"shared_k": SHARED_K[:, :1], "shared_v": SHARED_V[:, :1]}),
        (ValueError, "caches and q differ in the batch", {"k_cache": K[:2], "v_cache": V[:2]}),
        (ValueError, "seq_lens", {"seq_lens": LENS + 1}),
        (ValueError, "layout must be 'hnd' or 'nhd'", {"layout": "bhsd"}),
        (ValueError, "block_table must have shape", {"block_table": LENS[:, None][:2]}),
        (ValueError, "scale must be", {"scale": np.inf}),
        (ValueError, "softcap must be", {"softcap": -1.0}),
        (TypeError, "return_lse", {"return_lse": "yes"}),
        (ValueError, "out must have shape", {"out": np.zeros((B, H, 2, D), np.float16)}),
        (ValueError, "q must have at most 64 queries", {"q": np.zeros((B, H, 65, D), np.float16)}),
        (TypeError, "unexpected keyword argument 'window'", {"window": (1, 0)}),
    ],
)  # fmt: skip
def test_wrong_calls_launch_nothing(error, message, given):
    with jit.logging_launches() as launches, pytest.raises(error, match=message):
        cascade(**given)
    assert not launches


@pytest.mark.parametrize("name", ["q", "shared_v", "v_cache"])
def test_out_must_not_overlap_an_input(name):
    memory = np.zeros((B, H, 40, D), np.float16)
    inputs = {
        "q": memory[:, :, :2],
        "shared_k": SHARED_K,
        "shared_v": memory[:1, :HKV],
        "k_cache": K,
        "v_cache": memory[:, :HKV, :SK],
    }
    others = {"shared_v": SHARED_K, "v_cache": K, "q": Q}
    given = {**inputs, **others, name: inputs[name]}
    with pytest.raises(ValueError, match=f"out.*overlap.*{name}"):
        cascade(**given, out=memory[:, :, 1:3])
