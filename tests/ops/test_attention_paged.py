"""attention_varlen over paged caches: what pages add to packed sequences."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from attention_checks import normal

import cupykern
from cupykern import attention_varlen as varlen
from cupykern import check
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.attention.attention_plan import AttentionConfig
from cupykern.ops.attention_varlen import OP
from cupykern.ops.problems.attention import FORMULAS, ScoreChoice
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.ops.problems.decode_attention import CACHES, SCALES
from cupykern.targets import host

# Chunks of prompts, a whole prompt, a decoding sequence, one without queries, one without keys.
MIX = ((40, 170), (65, 65), (1, 100), (0, 30), (3, 0), (50, 20))
CONFIGS = AttentionConfig(64, 32, 4), AttentionHopperConfig(128, 128)


def paged(lengths=MIX, page=16, layout="hnd", dim=64, heads=4, kv_heads=2):
    """(q, k, v, cu_seqlens_q), keyword arguments; NaN where pages have no key."""
    problem = VarlenProblem(
        tuple(lengths), heads, kv_heads, dim, dim, causal=True, page=page, layout=layout, lse=True
    )
    call = OP.inputs(problem, 2, np)
    return call.args, call.kwargs


def packed_keys(args, kwargs, layout="hnd"):
    """The same call of packed keys: (k, v, cu_seqlens_k)."""
    lens, table = kwargs["seq_lens_k"], kwargs["block_table"]
    found = []
    for cache in args[1:3]:
        nhd = cache if layout == "nhd" else cache.swapaxes(1, 2)
        page = nhd.shape[1]
        rows = [
            nhd[own[: -(-n // page)]].reshape(-1, *nhd.shape[2:])[:n]
            for own, n in zip(table, lens, strict=True)
        ]
        found.append(np.concatenate(rows))
    return *found, np.cumsum((0, *lens), dtype=np.int32)


@pytest.mark.parametrize("config", CONFIGS, ids=("portable", "hopper"))
@pytest.mark.parametrize(("page", "layout"), [(16, "nhd"), (48, "hnd"), (64, "nhd"), (256, "hnd")])
def test_the_same_bits_as_of_packed_keys(page, layout, config):
    args, kwargs = paged(page=page, layout=layout)
    out, lse = varlen(*args, **kwargs, config=config)
    k, v, cu_k = packed_keys(args, kwargs, layout)
    of_packed, of_packed_lse = varlen(
        args[0], k, v, args[3], cu_k, max_seqlen_q=65, max_seqlen_k=170, causal=True,
        return_lse=True, config=config,
    )  # fmt: skip
    assert (out == of_packed).all() and (lse == of_packed_lse).all()


@pytest.mark.parametrize("warp_size", (32, 64))
@pytest.mark.parametrize("schedule", ("fifo", "lifo", "sticky:1"))
@pytest.mark.parametrize("page", (1, 24, 64))
def test_any_mix_of_sequences(page, schedule, warp_size):
    problem = VarlenProblem(MIX, 4, 2, 40, 64, causal=True, lse=True, page=page)
    with host.use(schedule=schedule, warp_size=warp_size) as target:
        assert check.check_problem(OP, problem, 1, target.xp).ok


@pytest.mark.parametrize("dim", (8, 128, 256))
def test_every_head_size(dim):
    options = ScoreChoice((100, -1), 2.0, "bh", True)
    for chosen in (ScoreChoice(), options):
        problem = VarlenProblem(MIX, 2, 1, dim, dim, "bfloat16", True, page=32, options=chosen)
        assert check.check_problem(OP, problem, 1, np).ok


@pytest.mark.parametrize("number", range(len(FORMULAS)))
def test_formulas_of_scores_hold_on_pages(number):
    options = ScoreChoice(None, None, None, True, *FORMULAS[number])
    problem = VarlenProblem(MIX, 4, 2, 64, 64, causal=True, lse=True, page=16, options=options)
    assert check.check_problem(OP, problem, 1, np).ok
    call = OP.inputs(problem, 1, np)
    portable = varlen(*call.args, **call.kwargs)
    fast = varlen(*call.args, **call.kwargs, config=AttentionHopperConfig(128, 128))
    for a, b in zip(portable, fast, strict=True):
        assert np.allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("config", CONFIGS, ids=("portable", "hopper"))
def test_chunks_of_a_prompt_give_what_the_prompt_gives(config):
    """A prompt in chunks, each beside a sequence that decodes."""
    (_, k, v, _), kwargs = paged([(150, 150), (1, 90)], dim=64)
    q, table = normal(151, 4, 64), kwargs["block_table"]
    options = {"causal": True, "config": config, "block_table": table}
    whole = varlen(
        q, k, v, np.array([0, 150, 151], np.int32), max_seqlen_q=150,
        seq_lens_k=np.array([150, 90]), **options,
    )  # fmt: skip
    for first, end in ((0, 60), (60, 61), (61, 150)):
        n = end - first
        part = varlen(
            np.concatenate([q[first:end], q[150:]]), k, v, np.array([0, n, n + 1], np.int32),
            max_seqlen_q=n, seq_lens_k=np.array([end, 90]), **options,
        )  # fmt: skip
        assert np.allclose(part[:n], whole[first:end], atol=1e-3)
        assert (part[n] == whole[150]).all()


@pytest.mark.parametrize("config", CONFIGS, ids=("portable", "hopper"))
def test_device_lengths_and_pages_are_clamped(config, monkeypatch):
    """Contents that nobody checks, as a GPU's: nothing outside of the arrays is read or written."""
    args, kwargs = paged([(20, 40), (0, 7), (30, 33)])
    q, k, v, cu = args
    k[np.isnan(k)], v[np.isnan(v)] = 0, 0
    module = sys.modules["cupykern.ops.attention_varlen"]
    monkeypatch.setattr(module, "check_cu_seqlens", lambda _, x, *rest: x)
    monkeypatch.setattr(module, "check_lens", lambda x, *rest: x)
    monkeypatch.setattr(module, "check_pages", lambda *given: None)
    kwargs = {**kwargs, "config": config}
    last = k.shape[0] - 1
    for wild in (-1, -(2**31), last + 1, 2**31 - 1):
        table = np.full_like(kwargs["block_table"], wild)
        legal = np.full_like(table, 0 if wild < 0 else last)
        outputs = [varlen(*args, **{**kwargs, "block_table": x}) for x in (table, legal)]
        assert all((a == b).all() for a, b in zip(*outputs, strict=True))
    room = kwargs["block_table"].shape[1] * 16
    table = np.zeros_like(kwargs["block_table"])
    of_lens = [
        varlen(*args, **{**kwargs, "block_table": table, "seq_lens_k": np.array(x, np.int32)})
        for x in ((2**31 - 1, -5, room + 1), (room, 0, room))
    ]
    assert all((a == b).all() for a, b in zip(*of_lens, strict=True))
    guarded = check.GuardedArray(np, q.shape, q.dtype)
    wild_cu = np.array([-(2**31), 20, 2**31 - 1, -5], np.int32)
    varlen(q, k, v, wild_cu, **kwargs, out=guarded.array)
    guarded.check()


def test_a_limit_of_keys():
    args, kwargs = paged([(20, 40)])
    out, _ = varlen(*args, **kwargs, max_seqlen_k=40)
    assert (out == varlen(*args, **kwargs)[0]).all()
    with pytest.raises(ValueError, match="seq_lens_k must be from 0 to the caches' 39 keys"):
        varlen(*args, **kwargs, max_seqlen_k=39)


def test_no_pages_and_no_sequences():
    q, cu = normal(3, 2, 16), np.array([0, 3], np.int32)
    none = np.zeros((0, 1, 16, 16), np.float16)
    options = {"max_seqlen_q": 3, "seq_lens_k": np.array([0])}
    out = varlen(q, none, none, cu, block_table=np.zeros((1, 5), np.int32), **options)
    assert out.shape == q.shape and not out.any()
    options["seq_lens_k"] = np.zeros(0, np.int64)
    table = np.zeros((0, 5), np.int32)
    out = varlen(q[:0], none, none, cu[:1], block_table=table, **options)
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"seq_lens_k": None}, TypeError, "block_table needs seq_lens_k"),
        ({"block_table": None}, TypeError, "needs cu_seqlens_k and max_seqlen_k, or block_table"),
        ({"cu_seqlens_k": np.array([0, 40], np.int32)}, ValueError, "cu_seqlens_k is of packed"),
        ({"layout": "bhsd"}, ValueError, "layout must be 'hnd' or 'nhd'"),
        ({"layout": "nhd"}, ValueError, "multiple of the caches'; got 4 and 16"),
        ({"k": normal(5, 2, 64)}, ValueError, "k must have 4 dims"),
        ({"q": normal(1, 4, 20, 64)}, ValueError, "q must have 3 dims"),
        ({"k": np.zeros((5, 2, 16, 64), np.int32)}, TypeError, "k's dtype"),
        ({"k": np.zeros((5, 2, 16, 64), np.float32)}, NotImplementedError, "k is float32"),
        ({"q": np.zeros((5, 2, 64), np.float32)}, NotImplementedError, "q is float32: tensor"),
        ({"v": normal(4, 2, 16, 64)}, ValueError, "k and v differ"),
        ({"k": normal(5, 2, 16, 60), "v": normal(5, 2, 16, 60)}, ValueError, "q's, 64; got 60"),
        ({"k": np.zeros((5, 2, 16, 64), np.int8)}, TypeError, "v must have k's dtype int8"),
        ({"k_scale": 2.0}, ValueError, "k_scale is for caches of 8 bits"),
        ({"v_scale": np.ones(2, np.float32)}, ValueError, "v_scale is for caches of 8 bits"),
        ({"block_table": np.zeros((1, 3))}, TypeError, "block_table must have dtype int32"),
        ({"block_table": np.zeros((2, 3), np.int32)}, ValueError, r"shape \(1, max_pages\)"),
        ({"block_table": np.full((1, 3), 5)}, ValueError, "pages from 0 to 4 .* got 5"),
        ({"seq_lens_k": np.array([49])}, ValueError, "seq_lens_k must be from 0 to"),
        ({"seq_lens_k": np.array([40, 40])}, ValueError, r"seq_lens_k must have shape \(1,\)"),
        ({"seq_lens_k": np.array([40.0])}, TypeError, "seq_lens_k must have dtype int32"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be 0"),
        ({"causal_align": "top"}, ValueError, "causal_align"),
        ({"config": AttentionHopperConfig(192, 128)}, ValueError, "tile_m is 128"),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(change, error, says):
    call = {
        "q": normal(20, 4, 64), "k": normal(5, 2, 16, 64), "v": normal(5, 2, 16, 64),
        "cu_seqlens_q": np.array([0, 20], np.int32), "max_seqlen_q": 20,
        "block_table": np.array([[3, 1, 2]]), "seq_lens_k": np.array([40]),
    }  # fmt: skip
    assert varlen(**call).shape == (20, 4, 64)
    with pytest.raises(error, match=says):
        varlen(**{**call, **change})


def test_arguments_of_pages_need_a_block_table():
    q, cu = normal(20, 4, 64), np.array([0, 20], np.int32)
    call = {"max_seqlen_q": 20, "max_seqlen_k": 20}
    for change in ({"seq_lens_k": np.array([20])}, {"layout": "nhd"}):
        with pytest.raises(ValueError, match="are of paged caches"):
            varlen(q, q, q, cu, cu, **call, **change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"page": 24}, "multiple of 16 keys"),
        ({"stride": 8}, "whole rows apart"),
    ],
)
def test_pages_that_tma_does_not_take(change, says):
    """They run on the portable kernel."""
    page, more = change.get("page", 16), change.get("stride", 0)
    q, cu = normal(20, 2, 64), np.array([0, 20], np.int32)
    memory = normal(3, 2 * page * 64 + more)
    steps = memory.strides[0], page * 128, 128, 2
    k = np.lib.stride_tricks.as_strided(memory, (3, 2, page, 64), steps)
    options = {
        "max_seqlen_q": 20, "block_table": np.array([[2, 0]]), "seq_lens_k": np.array([page + 9]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=says):
        varlen(q, k, k, cu, **options, config=AttentionHopperConfig(128, 128))
    plain = np.ascontiguousarray(k)
    assert (varlen(q, k, k, cu, **options) == varlen(q, plain, plain, cu, **options)).all()


def in_8_bits(cache_dtype="int8", scales="tokens", lengths=MIX, **more):
    """paged() of codes; more: of VarlenProblem."""
    problem = VarlenProblem(
        tuple(lengths), 4, 2, 64, 64, causal=True, lse=True,
        **{"page": 16, "cache_dtype": cache_dtype, "scales": scales, **more},
    )  # fmt: skip
    call = OP.inputs(problem, 2, np)
    return call.args, call.kwargs


@pytest.mark.parametrize("warp_size", (32, 64))
@pytest.mark.parametrize("schedule", ("fifo", "lifo", "sticky:1"))
@pytest.mark.parametrize("page", (1, 24, 64))
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_caches_of_8_bits(cache_dtype, page, schedule, warp_size):
    for scales, dim in (("tokens", 40), ("heads", 8)):
        problem = VarlenProblem(
            MIX, 4, 2, dim, 64, causal=True, lse=True, page=page, cache_dtype=cache_dtype,
            scales=scales,
        )  # fmt: skip
        with host.use(schedule=schedule, warp_size=warp_size) as target:
            assert check.check_problem(OP, problem, 1, target.xp).ok


@pytest.mark.parametrize("layout", ("hnd", "nhd"))
@pytest.mark.parametrize("scales", SCALES)
def test_scales_of_caches_of_8_bits(scales, layout):
    options = ScoreChoice((30, 5), 3.0, "h", True)
    for dim, view, chosen in ((128, "F", ScoreChoice()), (256, "offset", options)):
        problem = VarlenProblem(
            MIX, 2, 1, dim, dim, "bfloat16", page=16, layout=layout, view=view, options=chosen,
            cache_dtype="float8_e4m3fn", scales=scales,
        )  # fmt: skip
        assert check.check_problem(OP, problem, 1, np).ok


def test_one_order_of_8_bit_pages_gives_the_bits_of_another():
    """So do gaps between pages."""
    args, kwargs = in_8_bits()
    expected = varlen(*args, **kwargs)
    order = np.random.default_rng(3).permutation(len(args[1]))
    place = np.argsort(order)
    k, v, *scales = (x[order] for x in (*args[1:3], kwargs["k_scale"], kwargs["v_scale"]))
    spaced = np.zeros((3 * len(k), *k.shape[1:]), k.dtype)[::3]
    spaced[...] = k
    table = kwargs["block_table"]
    there = (table >= 0) & (table < len(order))
    change = {
        "block_table": np.where(there, place[np.where(there, table, 0)], 0).astype(np.int32),
        **dict(zip(("k_scale", "v_scale"), scales, strict=True)),
    }
    for cache in (k, spaced):
        found = varlen(args[0], cache, v, args[3], **{**kwargs, **change})
        assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_codes_are_what_a_cache_of_16_bits_holds():
    """Without scales, within the sum of both bounds."""
    args, kwargs = in_8_bits("float8_e4m3fn", None)
    wide = *(args[0], *(x.astype(np.float16) for x in args[1:3])), args[3]
    for given in (wide, args):
        out, lse = varlen(*given, **kwargs)
        references = OP.reference(*wide, **kwargs)
        bounds = OP.bound(*wide, **kwargs, reference=references)
        assert check.compare((out, lse), references, bounds).ok


def test_scales_of_tokens_follow_the_codes():
    """Powers of two in scales of one head, one number and one a token give the same bits."""
    args, kwargs = in_8_bits("int8", None)
    shape = args[1].shape[:3]
    given = [
        {"k_scale": scale[0], "v_scale": scale[1]}
        for scale in (
            (0.25, 4.0),
            (np.full(2, 0.25, np.float32), np.full(2, 4.0, np.float32)),
            (np.full(shape, 0.25, np.float32), np.full(shape, 4.0, np.float32)),
        )
    ]
    of_number, of_heads, of_tokens = (varlen(*args, **{**kwargs, **x}) for x in given)
    for a, b, c in zip(of_number, of_heads, of_tokens, strict=True):
        assert (a == b).all()
        assert np.allclose(a, c, rtol=1e-2, atol=1e-2)


def test_what_8_bit_pages_hold_after_the_keys_is_not_seen():
    args, kwargs = in_8_bits("float8_e4m3fn", "tokens", [(20, 20), (3, 33)])
    expected = varlen(*args, **kwargs)
    k, v = (x.copy() for x in args[1:3])
    scales = {name: kwargs[name].copy() for name in ("k_scale", "v_scale")}
    for x in (k, v):
        x.view(np.uint8)[np.isnan(x.astype(np.float32))] = 0x7E  # 448
    for x in scales.values():
        x[np.isnan(x)] = np.inf
    found = varlen(args[0], k, v, args[3], **{**kwargs, **scales})
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_a_number_as_scale_is_part_of_the_call():
    args, kwargs = in_8_bits("int8", "number")
    alone = varlen(*args, **{**kwargs, "v_scale": 0.5})
    doubled = varlen(*args, **{**kwargs, "v_scale": 1.0})
    assert np.allclose(2 * alone[0], doubled[0], rtol=1e-3, atol=1e-7)
    assert (alone[1] == doubled[1]).all()
    wide = np.ones(args[1].shape[:3], np.float32)
    for scale in (wide, wide[:, :1].repeat(2, 1)):
        assert np.isfinite(varlen(*args, **{**kwargs, "k_scale": scale})[0]).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"k_scale": 0.0}, ValueError, "k_scale must not be 0"),
        ({"k_scale": np.inf}, ValueError, "k_scale"),
        ({"v_scale": np.ones(3, np.float32)}, ValueError, r"v_scale must have shape \(\), \(2,\)"),
        ({"v_scale": np.ones(2, np.float16)}, TypeError, "v_scale must be a number or a float32"),
        ({"k_scale": np.ones((5, 16, 2), np.float32)}, ValueError, r"k_scale .* \(5, 2, 16\)"),
        ({"config": AttentionHopperConfig(128, 128)}, ValueError, "8 bits"),
    ],
)
def test_illegal_scales_are_refused(change, error, says):
    codes = np.ones((5, 2, 16, 64), np.int8)
    call = {
        "q": normal(20, 4, 64), "k": codes, "v": codes, "cu_seqlens_q": np.array([0, 20], np.int32),
        "max_seqlen_q": 20, "block_table": np.array([[3, 1, 2]]), "seq_lens_k": np.array([40]),
    }  # fmt: skip
    assert varlen(**call).shape == (20, 4, 64)
    with pytest.raises(error, match=says):
        varlen(**{**call, **change})


def test_codes_need_pages():
    q, codes, cu = normal(20, 2, 64), np.ones((20, 2, 64), np.int8), np.array([0, 20], np.int32)
    with pytest.raises(TypeError):
        varlen(q, codes, codes, cu, cu, max_seqlen_q=20, max_seqlen_k=20)


def test_out_must_not_overlap_what_steers():
    q, k = normal(20, 2, 64), normal(3, 2, 16, 64)
    memory = np.zeros(q.size + 8, np.float16)
    out, lens = memory[: q.size].reshape(q.shape), memory[q.size - 8 :].view(np.int32)[:1]
    cu, table = np.array([0, 20], np.int32), np.zeros((1, 2), np.int32)
    with pytest.raises(ValueError, match="overlap seq_lens_k"):
        cupykern.attention_varlen(
            q, k, k, cu, max_seqlen_q=20, block_table=table, seq_lens_k=lens, out=out
        )
