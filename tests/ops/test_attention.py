"""What attention alone has: masks of blocks, arguments, gates, varlen sequences."""

from __future__ import annotations

import math
import sys

import ml_dtypes
import numpy as np
import pytest
from attention_checks import (
    check_bias_over_nan,
    check_far_distances,
    check_far_scores,
    check_far_scores_of_caches,
    check_lowest_biases,
    normal,
    qkv,
)

import cupykern
from cupykern import BlockMask, attention, check, dtypes
from cupykern import attention_varlen as varlen
from cupykern.attention import attention_plan
from cupykern.attention.attention_plan import AttentionConfig
from cupykern.attention.attention_task import HEAD_DIMS, Scores
from cupykern.op import Call
from cupykern.ops.attention import OP
from cupykern.ops.attention_varlen import OP as VARLEN_OP
from cupykern.ops.problems.attention import AttentionProblem
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.targets import host


def compared(args, kwargs, outputs) -> check.Comparison:
    references = OP.reference(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return check.compare(outputs, references, OP.bound(*args, reference=references, **kwargs))


def right(*args, **kwargs) -> None:
    comparison = compared(args, kwargs, attention(*args, **kwargs))
    assert comparison.ok, comparison


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_256_are_within_the_bound(target, causal):
    problem = AttentionProblem(
        1, 1, 1, 70, 90, 192, 256, causal=causal, causal_align="top_left", lse=True, row_stats=True
    )
    assert check.check_problem(OP, problem, 1, target.xp).ok


def test_two_rows_of_fragments_a_warp_are_within_the_bound():
    """As GPUs have them, where the host's own config has one."""
    causal = {"causal": True, "causal_align": "top_left", "return_row_stats": True}
    for kwargs in ({}, causal):
        q, k, v = qkv(150, 170, 40)
        right(q, k, v, **kwargs, config=AttentionConfig(128, 32, 4))


@pytest.mark.parametrize("accumulate", ["float32", "float16"])
def test_row_statistics_meet_the_gate_of_fp32_accumulation(accumulate):
    """FP32 accumulation: row_max within 1e-5, row_sum within 1e-4; FP16 misses both."""
    q, k, v = (normal(1, 1, 128, 64), normal(1, 1, 200, 64), normal(1, 1, 200, 64))
    _, top, total = attention(q, k, v, return_row_stats=True, qk_accumulate=accumulate)
    _, exact_top, exact_total = OP.reference(q, k, v, return_row_stats=True)
    holds = np.abs(top - exact_top).max() <= 1e-5 and np.abs(total / exact_total - 1).max() <= 1e-4
    assert holds == (accumulate == "float32")


def test_an_output_of_zeros_is_beyond_the_bound():
    for causal in (False, True):
        args, kwargs = qkv(100, 200, 64), {"causal": causal, "causal_align": "top_left"}
        y = attention(*args, **kwargs)
        assert compared(args, kwargs, y).ok
        comparison = compared(args, kwargs, np.zeros_like(y))
        assert comparison.error_over_bound > 20


def test_one_wrong_row_is_beyond_the_bound():
    args = qkv(100, 200, 64)
    y = attention(*args)
    y[0, 1, 37] = y[0, 1, 36]
    assert not compared(args, {}, y).ok


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
@pytest.mark.parametrize("scale", [0.125, 3.0, 40.0])
def test_infinite_values_are_infinite_in_results(dtype, scale):
    """Infinities of both signs are NaN.  Probabilities that may round to 0 promise nothing."""
    args = q, k, v = tuple(x.copy() for x in qkv(70, 70, 64, dtype=dtype))
    v[:, :, 5, 3], v[:, :, 9, 4], v[:, :, (9, 20), 5] = np.inf, -np.inf, (np.inf, -np.inf)
    v[:, :, 7, 8] = np.nan
    options = {"scale": scale}
    y = attention(*args, **options)
    comparison = compared(args, options, y)
    assert comparison.ok and math.isfinite(comparison.rms_ratio), comparison
    if scale == 0.125:
        assert (y[..., 3] == np.inf).all() and (y[..., 4] == -np.inf).all()
        assert np.isnan(y[..., 5]).all() and np.isnan(y[..., 8]).all()
        for column, wrong in ((3, 1.0), (3, -np.inf), (4, np.nan), (5, np.inf), (8, 0.0)):
            changed = y.copy()
            changed[0, 0, 9, column] = wrong
            assert not compared(args, options, changed).ok


def test_nan_of_keys_that_no_row_sees_does_not_count():
    """Of keys in memory, and of those that no row of the call sees yet."""
    q, k, v = qkv(20, 200, 64)
    k, v = k.copy(), v.copy()
    k[:, :, 70:], v[:, :, 70:] = np.nan, np.inf
    seen = {"causal": True, "input_pos": 50, "return_lse": True}
    outputs = attention(q, k, v, **seen)
    short = attention(q, k[:, :, :70], v[:, :, :70], **seen)
    assert all(np.isfinite(x).all() and (x == y).all() for x, y in zip(outputs, short, strict=True))
    mask = np.zeros((20, 200), bool)
    mask[:, :64] = True
    blocks = BlockMask.from_dense(mask, 64, 64)
    assert np.isfinite(attention(q, k, v, mask=blocks)).all()
    mask[:, 70:] = False
    assert not np.isnan(attention(q, k[:, :, :], np.zeros_like(v), mask=mask)).any()


@pytest.mark.parametrize("algorithm", ["flash", "naive"])
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
@pytest.mark.parametrize("checked", [check_far_scores, check_far_distances, check_lowest_biases])
def test_scores_may_have_any_size(target, checked, dtype, algorithm):
    checked(target.xp, dtype, algorithm=algorithm)


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
def test_scores_of_caches_may_have_any_size(target, dtype):
    check_far_scores_of_caches(target.xp, dtype)


@pytest.mark.parametrize("algorithm", ["flash", "naive"])
def test_a_bias_of_minus_infinity_hides_any_key(algorithm):
    check_bias_over_nan(20, 70, 16, algorithm=algorithm)


def test_layouts_and_repeated_kv_heads_give_the_same_bits():
    q, k, v = qkv(33, 40, 24, h=4, h_kv=2)
    causal = {"causal": True, "causal_align": "top_left"}
    y = attention(q, k, v, **causal)
    swapped = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v))
    z = attention(*swapped, **causal, layout="bshd")
    assert (z.transpose(0, 2, 1, 3) == y).all()
    repeated = attention(q, k.repeat(2, 1), v.repeat(2, 1), **causal)
    assert (repeated == y).all()


def test_a_rows_bits_do_not_depend_on_the_other_rows():
    q, k, v = qkv(64, 130, 64)
    y = attention(q, k, v)
    q[:, :, 1:] *= np.float16(5)
    assert (attention(q, k, v)[:, :, 0] == y[:, :, 0]).all()


def test_out_may_have_any_strides():
    q, k, v = qkv()
    y = attention(q, k, v)
    wide = np.zeros((1, 2, 20, 48), np.float16)
    assert attention(q, k, v, out=wide[..., ::2]) is not None and (wide[..., ::2] == y).all()
    fused = np.zeros((1, 20, 2, 32), np.float16)
    attention(q, k, v, out=fused.transpose(0, 2, 1, 3)[..., 8:])
    assert (fused.transpose(0, 2, 1, 3)[..., 8:] == y).all() and not fused[..., :8].any()


def test_empty_arrays_give_empty_results_and_no_keys_give_zeros():
    for shape in ((0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)):
        q = normal(*shape)
        y, lse = attention(q, q, q, return_lse=True)
        assert y.shape == shape and lse.shape == shape[:3]
    q = normal(1, 2, 5, 8)
    y, lse, top, total = attention(
        q, q[:, :, :0], q[:, :, :0], return_lse=True, return_row_stats=True
    )
    assert not y.any() and not total.any() and (lse == -np.inf).all() and (top == -np.inf).all()


def test_the_naive_algorithm_is_within_the_bound():
    q, k, v = qkv(40, 50, 24, dtype=dtypes.bfloat16)
    causal = {"causal": True, "causal_align": "bottom_right"}
    right(q, k, v, **causal, algorithm="naive", return_row_stats=True)


# --- masks of blocks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: BlockMask.causal(64, 64, causal_offset=-0.5), TypeError, "an integer"),
        (lambda: BlockMask.causal(8.5, 64), TypeError, "an integer"),
        (lambda: BlockMask.interleaved(64, 64, stride=1.5), TypeError, "an integer"),
        (lambda: from_formula("j < t", {"t": 3}, input_pos=0.5), TypeError, "an integer"),
        (lambda: from_formula("j < t", {"t": None}), TypeError, "got None"),
        (lambda: from_formula("j < t", {"t": float("nan")}), ValueError, "finite"),
        (lambda: from_formula("j < t", {"t": 1, "u": 2}), ValueError, "not name 'u'"),
        (lambda: from_formula("j < t", {"t": 1j}), TypeError, "a real number"),
        (lambda: from_formula("j < t[h]", {"t": np.ones(1, complex)}), TypeError, "real numbers"),
    ],
)
def test_illegal_arguments_of_block_masks_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def from_formula(formula: str, operands: dict[str, object], **options) -> BlockMask:
    return BlockMask.from_expression(formula, 64, 64, operands=operands, target="host", **options)


def dense_types(mask: BlockMask) -> set[int]:
    return set(np.unique(mask.block_mask_types).tolist())


@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128)])
def test_a_block_mask_from_dense_keeps_the_mask(blocks):
    rng = np.random.default_rng(1)
    keep = np.tril(np.ones((300, 400), bool))[None, None].repeat(2, 0).copy()
    keep[0, 0, :128, 128:256] = True
    keep[1, 0, 128:, :] &= rng.random((172, 400)) < 0.5
    keep[1, 0, :128] = False
    mask = BlockMask.from_dense(keep, *blocks)
    assert (mask.to_dense() == keep).all()
    assert dense_types(mask) == {0, 1, 2, 3} and mask.batch_shape == (2, 1)
    assert (mask.kv_num_blocks == (mask.block_mask_types != 0).sum(-1)).all()
    for number, row, types in zip(
        mask.kv_num_blocks.ravel(), mask.kv_indices.reshape(-1, mask.kv_indices.shape[3]),
        mask.block_mask_types.reshape(-1, mask.kv_indices.shape[3]), strict=True,
    ):  # fmt: skip
        assert row[:number].tolist() == np.nonzero(types)[0].tolist()


def test_the_usual_block_masks_hide_what_they_say():
    i, j = np.arange(300)[:, None], np.arange(400)[None]
    causal = BlockMask.causal(300, 400, causal_offset=70, target="host")
    assert (causal.to_dense() == (j <= i + 70)).all() and dense_types(causal) == {0, 1, 2}
    ids = np.repeat([3, 1, 2], [150, 50, 200])
    document = BlockMask.document(ids, causal=True, q_block=64, kv_block=64)
    k = np.arange(400)
    expected = (ids[:, None] == ids[None]) & (k[None] <= k[:, None])
    assert (document.to_dense() == expected).all()
    assert document.num_blocks < 0.6 * document.block_mask_types.size
    batch = BlockMask.document(np.stack([ids, ids[::-1]]))
    assert batch.batch_shape == (2, 1) and (batch.to_dense()[0, 0] == (ids[:, None] == ids)).all()
    blocks = BlockMask.interleaved(
        300, 400, 3, causal=True, q_block=64, kv_block=128, target="host"
    )
    expected = ((i // 64 - j // 128) % 3 == 0) & (j <= i)
    assert (blocks.to_dense() == expected).all()


def test_a_block_mask_cannot_be_changed():
    """Calls with a known plan do not check its sizes again."""
    mask = BlockMask.causal(128, 128, target="host")
    with pytest.raises(AttributeError, match="make another one for another seq_len_q"):
        mask.seq_len_q = 256


def test_masked_blocks_are_not_read():
    q, k, v = qkv(128, 256, 64)
    keep = np.ones((128, 256), bool)
    keep[:, 64:128] = False
    mask = BlockMask.from_dense(keep, 64, 64)
    right(q, k, v, mask=mask)
    k[:, :, 64:128] = v[:, :, 64:128] = np.nan
    assert np.isfinite(attention(q, k, v, mask=mask)).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q_block": 32}, ValueError, "64 or 128"),
        ({"block_mask_types": np.zeros((1, 1, 3, 4), np.uint8)}, ValueError, "must be"),
        ({"block_mask_types": np.zeros((1, 1, 2, 4), np.int32)}, TypeError, "uint8"),
        ({"partial_indices": np.zeros((1, 1, 2, 3), np.int32)}, ValueError, "partial_indices"),
        ({"partial_tiles": np.zeros((1, 64, 128), bool)}, ValueError, "partial_tiles"),
        ({"block_mask_types": [[0]]}, TypeError, "block_mask_types"),
        ({"block_mask_types": np.full((1, 1, 2, 4), 4, np.uint8)}, ValueError, "0 to 3"),
        ({"block_mask_types": np.full((1, 1, 2, 4), 3, np.uint8)}, ValueError, "tiles"),
        (
            {
                "block_mask_types": np.full((1, 1, 2, 4), 3, np.uint8),
                "partial_indices": np.full((1, 1, 2, 4), 2, np.int32),
                "partial_tiles": np.zeros((2, 64, 64), bool),
            },
            ValueError,
            "0 to 1",
        ),
    ],
)
def test_block_masks_that_do_not_fit_are_refused(change, error, says):
    arguments = {
        "block_mask_types": np.zeros((1, 1, 2, 4), np.uint8),
        "partial_indices": np.zeros((1, 1, 2, 4), np.int32),
        "partial_tiles": np.zeros((0, 64, 64), bool),
        "seq_len_q": 100, "seq_len_k": 200, "q_block": 64, "kv_block": 64, **change,
    }  # fmt: skip
    with pytest.raises(error, match=says):
        BlockMask(**arguments)


def test_makers_of_block_masks_refuse_illegal_arguments():
    with pytest.raises(TypeError, match="bool"):
        BlockMask.from_dense(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="Sq, Sk"):
        BlockMask.from_dense(np.zeros(4, bool))
    with pytest.raises(TypeError, match="integers"):
        BlockMask.document(np.zeros(4))
    with pytest.raises(ValueError, match="stride"):
        BlockMask.interleaved(4, 4, 0, target="host")
    with pytest.raises(ValueError, match="negative"):
        BlockMask.causal(-1, 4, target="host")


# --- arguments ------------------------------------------------------------------------------------

Q, K, V = qkv()
SLOPES, AT = np.ones(2, np.float32), {"input_pos": 0}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": Q.tolist()}, TypeError, "q must be a cupy or numpy array"),
        ({"k": K.astype(np.float32)}, NotImplementedError, "float32"),
        ({"k": K.astype(ml_dtypes.bfloat16)}, TypeError, "q's dtype"),
        ({"q": Q.astype(np.float64)}, NotImplementedError, "q's dtype"),
        ({"q": Q[0]}, ValueError, "4 dims"),
        ({"k": K[:, :, :-1]}, ValueError, "k and v"),
        ({"k": K[..., :8]}, ValueError, "q and k"),
        (
            {"q": normal(1, 3, 20, 16), "k": K.repeat(2, 1), "v": V.repeat(2, 1)}, ValueError,
            "heads"
        ),
        ({"v": V[..., :0]}, ValueError, "Dv must be 1 to 256; got 0"),
        ({"q": normal(1, 2, 4, 264), "k": normal(1, 1, 30, 264)}, ValueError, "256"),
        ({"layout": "shbd"}, ValueError, "layout"),
        ({"algorithm": "fast"}, ValueError, "algorithm"),
        ({"causal": 1}, TypeError, "causal"),
        ({"causal_align": "left"}, ValueError, "'top_left' or 'bottom_right' or None; got 'left'"),
        ({"causal": True}, ValueError, "20 queries and 30 keys needs causal_align or input_pos"),
        ({"window": 5, **AT}, TypeError, "window must be .left, right.; got int"),
        ({"window": (5,), **AT}, ValueError, "window must be .left, right."),
        ({"window": (5, 1.0), **AT}, TypeError, "window must have integers; got float"),
        ({"window": (-2, 0), **AT}, ValueError, "or -1 for any"),
        ({"window": (5, 0)}, ValueError, "window with 20 queries and 30 keys needs causal_align"),
        ({"alibi_slopes": SLOPES}, ValueError, "alibi_slopes with 20 queries and 30 keys needs"),
        ({"alibi_slopes": SLOPES[:1], **AT}, ValueError, r"must have shape .2,. or .1, 2."),
        ({"alibi_slopes": SLOPES.astype(np.float16), **AT}, TypeError, "must be float32"),
        ({"alibi_slopes": [0.5, 0.25], **AT}, TypeError, "alibi_slopes"),
        ({"sinks": np.ones((1, 2), np.float32)}, ValueError, r"sinks must have shape .2,."),
        ({"sinks": np.ones(2)}, TypeError, "sinks must be float32; got float64"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive, or None; got 0.0"),
        ({"softcap": -1}, ValueError, "softcap must be positive"),
        ({"softcap": "50"}, TypeError, "softcap"),
        ({"softcap": np.inf}, ValueError, "softcap"),
        ({"softcap": 1e-30, "scale": 1e30}, ValueError, "finite"),
        ({"softcap": 1e20}, ValueError, r"at most 2\^64"),
        ({"softcap": 1e19, "scale": 1e-12}, ValueError, r"at least 2\^-100"),
        ({"seq_lens": np.array([31])}, ValueError, "from 0 to k's 30 keys; got 31 to 31"),
        ({"seq_lens": np.array([1, 2])}, ValueError, r"seq_lens must have shape .1,."),
        ({"seq_lens": np.array([1.0])}, TypeError, "seq_lens must have dtype int32"),
        ({"input_pos": 2**28 + 1, "window": (2**28, 0)}, ValueError, "at most 268435456"),
        ({"input_pos": 1.0}, TypeError, "input_pos"),
        ({"input_pos": -1}, ValueError, "input_pos"),
        ({"scale": "1"}, TypeError, "scale"),
        ({"scale": np.inf}, ValueError, "scale"),
        ({"qk_accumulate": "bfloat16"}, ValueError, "qk_accumulate"),
        ({"mask": np.ones((20, 30), np.int8)}, TypeError, "mask"),
        ({"mask": np.ones((20, 31), bool)}, ValueError, "broadcast"),
        ({"mask": BlockMask.causal(20, 31, target="host")}, ValueError, "31 keys"),
        ({"mask": BlockMask.document(np.zeros((3, 20), int)), "k": K[:, :, :20], "v": V[:, :, :20]},
         ValueError, "mask's B"),
        ({"out": np.empty((1, 2, 20, 16), np.float16)}, ValueError, "out must have shape"),
        ({"out": np.empty((1, 2, 20, 24), np.float32)}, TypeError, "out"),
        ({"config": 3}, TypeError, "AttentionConfig"),
        ({"config": AttentionConfig(64, 48, 4)}, ValueError, "tile_n"),
        ({"config": AttentionConfig(64, 32, 3)}, ValueError, "warps"),
        ({"config": AttentionConfig(64, 32, 4), "algorithm": "naive"}, ValueError, "naive"),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(change, error, says):
    arguments = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(error, match=says):
        attention(**arguments)


@pytest.mark.parametrize(
    ("sq", "sk", "top_left", "bottom_right"),
    [
        (5, 12, "query 0 sees key 0, query 4 sees keys 0 to 4",
         "query 0 sees keys 0 to 7, query 4 sees keys 0 to 11"),
        (12, 5, "query 0 sees key 0, query 11 sees keys 0 to 4",
         "query 0 sees no key, query 11 sees keys 0 to 4"),
        (1, 3, "query 0 sees key 0", "query 0 sees keys 0 to 2"),
        (0, 3, "there are no queries", "there are no queries"),
        (2, 0, "query 0 sees no key, query 1 sees no key",
         "query 0 sees no key, query 1 sees no key"),
    ],
)  # fmt: skip
def test_causal_of_unequal_lengths_needs_an_alignment(sq, sk, top_left, bottom_right):
    """The error says what each alignment means for the call; the masks hold what it says."""
    q, k, v = qkv(sq, sk)
    both = (
        f"needs causal_align or input_pos: 'top_left' .{top_left}., 'bottom_right' .{bottom_right}."
    )
    for call in (attention, OP.reference):
        with pytest.raises(ValueError, match=both if call is attention else f"{sq} queries"):
            call(q, k, v, causal=True)
    first = attention(q, k, v, causal=True, causal_align="top_left")
    assert (attention(q, k, v, causal=True, input_pos=0) == first).all()
    moved = attention(q, k, v, causal=True, input_pos=max(sk - sq, 0))
    last = attention(q, k, v, causal=True, causal_align="bottom_right")
    assert sq > sk or (moved == last).all()


def test_causal_of_equal_lengths_needs_no_alignment():
    q, k, v = qkv(20, 20)
    y = attention(q, k, v, causal=True)
    for align in ("top_left", "bottom_right"):
        assert (attention(q, k, v, causal=True, causal_align=align) == y).all()
    assert (attention(q, k, v, causal=True, input_pos=0) == y).all()


def test_causal_packed_sequences_need_an_alignment():
    q, k, v, *cu = varlen_inputs()
    with pytest.raises(ValueError, match="'top_left' or 'bottom_right'; got None"):
        varlen(q, k, v, *cu, max_seqlen_q=30, max_seqlen_k=35, causal=True, causal_align=None)


def test_fp16_accumulation_is_refused_for_bfloat16():
    q = normal(1, 1, 4, 8, dtype=dtypes.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        attention(q, q, q, qk_accumulate="float16")
    assert not attention_plan.has_half_scores(dtypes.float16, "gfx942")


def test_out_that_overlaps_an_operand_is_refused():
    q = normal(1, 1, 30, 16)
    with pytest.raises(ValueError, match="overlap"):
        attention(q, q, q, out=q)


def test_scaled_dot_product_attention_takes_torchs_arguments():
    sdpa = cupykern.scaled_dot_product_attention
    q, k, v = qkv(h_kv=2)
    causal = attention(q, k, v, causal=True, causal_align="top_left")
    assert (sdpa(q, k, v, is_causal=True) == causal).all()
    bias = normal(20, 30)
    assert (sdpa(q, k, v, bias, scale=0.5) == attention(q, k, v, mask=bias, scale=0.5)).all()
    assert (sdpa(Q, K, V, enable_gqa=True) == attention(Q, K, V)).all()
    with cupykern.watch() as watch:
        sdpa(q * np.float16(np.nan), k, v)
    assert [record.op for record in watch.records] == ["scaled_dot_product_attention"]
    with pytest.raises(NotImplementedError, match="dropout"):
        sdpa(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match="is_causal"):
        sdpa(q, k, v, bias, is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        sdpa(Q, K, V)


@pytest.mark.parametrize(
    "arch", ["sm_80", "sm_86", "sm_90a", "sm_120a", "gfx942", "gfx1100", "host"]
)
def test_every_head_size_has_a_config(arch):
    for head_dim in HEAD_DIMS:
        for scores in Scores:
            for config in attention_plan.configs((head_dim, head_dim), scores, arch):
                dims = head_dim, head_dim
                assert attention_plan.refusal(config, dims, scores, arch) is None
                blocks = 2 if head_dim <= 128 and arch == "sm_90a" else 1
                limit = attention_plan.max_shared_bytes(arch)
                assert blocks * config.shared_bytes(head_dim) <= limit
    assert len(attention_plan.variants(arch)) <= {"host": 154, "sm_90a": 107}.get(arch, 49)


# --- varlen sequences -----------------------------------------------------------------------------


def varlen_inputs():
    q, k = normal(50, 2, 16), normal(60, 1, 16)
    return q, k, k, np.array([0, 20, 20, 50], np.int32), np.array([0, 10, 25, 60], np.int32)


def test_device_offsets_are_clamped(monkeypatch):
    """Offsets that nobody checks, as a GPU's: nothing outside of the arrays is read or written."""
    q, k, v, cu_q, cu_k = varlen_inputs()
    good = varlen(q, k, v, cu_q, cu_k, max_seqlen_q=30, max_seqlen_k=35)
    module = sys.modules["cupykern.ops.attention_varlen"]
    monkeypatch.setattr(module, "check_cu_seqlens", lambda _, cu, *rest: cu)
    wild = np.array([0, 10, 25, 2**31 - 1], np.int32)
    y = varlen(q, k, v, cu_q, wild, max_seqlen_q=30, max_seqlen_k=35)
    assert (y == good).all()
    wild = np.array([-(2**31), 20, 2**31 - 1, -5], np.int32)
    guarded = check.GuardedArray(np, q.shape, q.dtype)
    varlen(q, k, v, wild, wild, max_seqlen_q=30, max_seqlen_k=35, out=guarded.array)
    guarded.check()
    assert (guarded.array[:20] == varlen(
        q[:20], k[:20], v[:20], np.array([0, 20], np.int32), np.array([0, 20], np.int32),
        max_seqlen_q=30, max_seqlen_k=35)).all()  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"cu_q": np.array([0, 20, 50], np.int32)}, ValueError, "one shape"),
        ({"cu_q": np.array([0, 20, 10, 50], np.int32)}, ValueError, "grow"),
        ({"cu_q": np.array([0, 20, 20, 49], np.int32)}, ValueError, "grow"),
        ({"cu_k": np.array([0, 10, 25, 60])}, TypeError, "int32"),
        ({"cu_k": np.zeros((4, 1), np.int32)}, ValueError, "cu_seqlens_k"),
        ({"cu_k": np.ma.masked_array(np.array([0, 10, 25, 60], np.int32))}, TypeError, "numpy"),
        ({"max_seqlen_q": 29}, ValueError, "longer than 29"),
        ({"max_seqlen_k": 34.0}, TypeError, "max_seqlen_k"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
        ({"q": normal(1, 50, 2, 16)}, ValueError, "3 dims"),
    ],
)
def test_illegal_packed_arguments_are_refused(change, error, says):
    q, k, v, cu_q, cu_k = varlen_inputs()
    a = {"q": q, "cu_q": cu_q, "cu_k": cu_k, "max_seqlen_q": 30, "max_seqlen_k": 35, **change}
    with pytest.raises(error, match=says):
        varlen(
            a["q"], k, v, a["cu_q"], a["cu_k"],
            max_seqlen_q=a["max_seqlen_q"], max_seqlen_k=a["max_seqlen_k"],
        )  # fmt: skip


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_packed_results_beside_their_offsets(name):
    q, k, v, *cu = varlen_inputs()
    memory = np.zeros(q.size + 8, np.float16)
    out, offsets = memory[: q.size].reshape(q.shape), memory[q.size - 8 :].view(np.int32)[:4]
    i = name == "cu_seqlens_k"
    offsets[:] = cu[i]
    cu[i] = offsets
    with pytest.raises(ValueError, match=f"overlap {name}"):
        varlen(q, k, v, *cu, max_seqlen_q=30, max_seqlen_k=35, out=out)


def test_packed_sequences_have_the_bits_of_each_alone():
    q, k, v, cu_q, cu_k = varlen_inputs()
    y, lse = varlen(
        q, k, v, cu_q, cu_k, max_seqlen_q=30, max_seqlen_k=35, causal=True, return_lse=True
    )
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone, alone_lse = attention(
            q[None, rows], k[None, keys], v[None, keys], causal=True, causal_align="bottom_right",
            layout="bshd", return_lse=True,
        )  # fmt: skip
        assert (alone[0] == y[rows]).all() and (alone_lse[0] == lse[:, rows]).all()


def test_bench_problems_are_what_their_options_say():
    with pytest.raises(ValueError, match="causal"):
        OP.bench_problem((4, 4), "float16")
    full, causal = (OP.bench_problem((2, 4, 128, 64, *c), "float16") for c in ((), (1,)))
    assert OP.work(full).flops == 2 * OP.work(causal).flops == 4 * 2 * 4 * 128**2 * 64
    grouped = OP.bench_problem((2, 4, 128, 64, 1, 2), "bfloat16")
    assert grouped.h_kv == 2 and OP.work(grouped).bytes_read < OP.work(causal).bytes_read
    for op, problem in (
        (OP, grouped),
        (VARLEN_OP, VARLEN_OP.bench_problem((3, 4, 64, 64, 1), "float16")),
    ):
        call = op.inputs(problem, 1, np)
        y = op.run(*call.args, **call.kwargs)
        part, cut = op.sample(call, (y,), 100, 1)
        assert check.compare(cut, op.reference(*part.args, **part.kwargs), op.bound(
            *part.args, **part.kwargs,
            reference=op.reference(*part.args, **part.kwargs))).ok  # fmt: skip
    assert VarlenProblem(((3, 4), (5, 6)), 2, 1, 8, 8).scores is Scores.PLAIN


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "input_pos": 0},
        {"causal": True, "input_pos": 7},
        {"causal": True, "causal_align": "bottom_right"},
        {"window": (20, 9), "causal_align": "bottom_right"},
    ],
)
def test_samples_of_long_heads_are_some_of_their_queries(options):
    """The sample's reference is that of the same queries of the whole call."""
    q, k, v = qkv(90, 120, 16)
    whole = OP.reference(q, k, v, **options)
    call, cut = OP.sample(Call((q, k, v), options), tuple(whole), 600, 3)
    assert call.args[0].shape == (1, 1, 20, 16)
    for part, expected in zip(OP.reference(*call.args, **call.kwargs), cut, strict=True):
        np.testing.assert_allclose(part, expected, rtol=1e-13, atol=1e-15)


def test_causal_calls_read_no_keys_beyond_the_diagonal():
    """A causal call reads no keys beyond the diagonal's tile: NaN there does not matter."""
    with host.use(schedule="lifo"):
        q, k, v = qkv(64, 300, 64)
        k[:, :, 64:] = v[:, :, 64:] = np.nan
        assert np.isfinite(attention(q, k, v, causal=True, causal_align="top_left")).all()


@pytest.mark.parametrize("mask", [2, 3, 4])
def test_bench_problems_of_block_masks_count_computed_blocks(mask):
    """Their work is that of the computed blocks, and one head is checked for all."""
    problem = OP.bench_problem((1, 2, 1024, 64, mask), "float16")
    call = OP.inputs(problem, 0, np)
    blocks = {2: 36, 3: 8, 4: 16}[mask]
    assert OP.work(problem).flops == 4 * 2 * blocks * 128 * 128 * 64
    outputs = OP.run(*call.args, **call.kwargs)
    part, cut = OP.sample(call, (outputs,), 1, 0)
    assert part.args[0].shape == (1, 1, 1024, 64)
    reference = OP.reference(*part.args, **part.kwargs)
    bound = OP.bound(*part.args, **part.kwargs, reference=reference)
    assert check.compare(cut, reference, bound).ok
    with pytest.raises(ValueError, match="0 to 9, or a window's keys, at least 16; got 10"):
        OP.bench_problem((1, 2, 1024, 64, 10), "float16")


def test_bench_problems_of_windows_count_pairs():
    """A window of n keys ends at the query."""
    problem = OP.bench_problem((1, 2, 300, 64, 100), "float16")
    assert problem.options.window == (99, 0) and problem.causal
    assert OP.work(problem).flops == 4 * 2 * (sum(range(1, 101)) + 200 * 100) * 64
    assert OP.bench_problem((1, 2, 300, 64, 5), "float16").options.softcap == 50
    with_sinks = OP.bench_problem((1, 2, 5000, 64, 9), "float16")
    assert with_sinks.options.window == (4095, 0) and with_sinks.options.sinks
    assert OP.work(with_sinks).flops == 4 * 2 * (sum(range(1, 4097)) + 904 * 4096) * 64


@pytest.mark.parametrize(
    ("number", "names"),
    [
        (5, {"softcap"}),
        (6, {"alibi_slopes"}),
        (7, {"sinks"}),
        (8, {"score", "operands"}),
        (9, {"window", "sinks"}),
        (40, {"window"}),
    ],
)
def test_bench_problems_have_the_option_of_their_fifth_number(number, names):
    """What is checked of a long one is the same part of the call and of its result."""
    problem = OP.bench_problem((2, 4, 90, 16, number, 2), "float16")
    call = OP.inputs(problem, 1, np)
    assert call.kwargs.keys() == {"causal", *names}
    whole = OP.reference(*call.args, **call.kwargs)
    part, cut = OP.sample(call, (*whole, OP.run(*call.args, **call.kwargs)), 600, 3)
    heads = (2, 4) if "score" in names else (1, 1)
    assert part.args[0].shape == (*heads, 4 * 600 // 90 // math.prod(heads), 16)
    reference = OP.reference(*part.args, **part.kwargs)
    np.testing.assert_allclose(reference[0], cut[0], rtol=1e-13, atol=1e-15)
    bound = OP.bound(*part.args, **part.kwargs, reference=reference)
    assert check.compare(cut[1:], reference, bound).ok


def test_slopes_of_a_benchmark_are_those_of_the_paper():
    call = OP.inputs(OP.bench_problem((1, 8, 32, 16, 6), "float16"), 1, np)
    np.testing.assert_array_equal(call.kwargs["alibi_slopes"], 0.5 ** np.arange(1, 9))


def test_samples_with_slopes_by_batch_have_those_of_their_element():
    q, k, v = qkv(90, 90, 16)
    slopes = np.linspace(0.01, 0.5, q.shape[0] * q.shape[1], dtype=np.float32)
    options = {"alibi_slopes": slopes.reshape(q.shape[:2])}
    call, cut = OP.sample(Call((q, k, v), options), OP.reference(q, k, v, **options), 600, 3)
    assert call.kwargs["alibi_slopes"].shape == (1,)
    reference = OP.reference(*call.args, **call.kwargs)
    np.testing.assert_allclose(reference[0], cut[0], rtol=1e-13, atol=1e-15)


def test_calls_whose_heads_cannot_be_told_apart_are_checked_whole():
    q, k, v = qkv(40, 40, 16)
    blocks = BlockMask.causal(40, 40, target="host")
    both = {"score": "s + 0.1 * h", "mask": blocks}
    for options in (both, {"seq_lens": np.array([30] * len(q))}, {"mask": np.ones((40, 40), bool)}):
        call = Call((q, k, v), options)
        assert OP.sample(call, (), 60, 3) == (call, ())
