"""Planted faults in attention's kernels, each of which a check must catch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from attention_checks import (
    bytes_of_l2,
    check_bias_over_nan,
    check_far_distances,
    check_far_scores,
)
from planted import Fault, fault_tests

import cupykern
from cupykern import OPS, check, dtypes, inputs
from cupykern.attention.attention_plan import AttentionConfig
from cupykern.ops.problems.attention import AttentionProblem, ScoreChoice
from cupykern.ops.problems.attention_varlen import VarlenProblem

ATTENTION, VARLEN = (
    next(op for op in OPS if op.name == name) for name in ("attention", "attention_varlen")
)

BLOCK = "attention/block.cuh"

FAULTS = {
    "a large cap as a small one": Fault(
        "attention/score.cuh", "if (cap > kLargeCap) {", "if (cap > 1e38f) {", "large caps"
    ),
    "a large cap without its cubic term": Fault(
        "attention/score.cuh", "square, -1.0f / 3.0f)", "square, 0.0f)", "large caps"
    ),
    "a bias of -inf is added": Fault(
        "attention/mask.cuh", "bias == -kInfinity ? bias : score + bias", "score + bias",
        "hidden keys",
    ),
    "causal, one key too many": Fault(
        "attention/work_tile.cuh", "row + offset + 1;", "row + offset + 2;", "tails"
    ),
    "a tile that the causal limit cuts is not masked": Fault(
        BLOCK,
        "if (first_key + kTileN <= limit &&",
        "if (first_key + kTileN <= limit + 1 &&",
        "blocks",
    ),
    "the last tile of keys is skipped": Fault(
        "attention/work_tile.cuh",
        "? ((end - 1) / kTileN + 1) * kTileN : 0)",
        "? end / kTileN * kTileN : 0)",
        "tails",
    ),
    "scores are not scaled": Fault(
        "attention/online_softmax.cuh",
        "x = exp2_approx(multiply_add(x, scale,",
        "x = exp2_approx(multiply_add(x, 1.0f,",
        "tails",
    ),
    "the largest score of a lane, not of the row": Fault(
        "attention/online_softmax.cuh",
        "const float top = Rows::across_lanes(largest[r], Max());",
        "const float top = largest[r];",
        "tails",
    ),
    "the largest score of the last tile alone": Fault(
        BLOCK, "top = maximum(top, largest[m][r]);", "top = largest[m][r];", "tails"
    ),
    "products are not rescaled": Fault(
        BLOCK, "values[i] *= factors[Rows::slot(i)];", "values[i] *= 1.0f;", "growing"
    ),
    "sums are not rescaled": Fault(
        "attention/online_softmax.cuh", "sum[r] *= factors[r];", "sum[r] *= 1.0f;", "growing"
    ),
    "probabilities beyond FP16": Fault(
        "attention/online_softmax.cuh", "half> ? 7.0f", "half> ? 9.0f", "growing"
    ),
    "inf - inf of rows without keys": Fault(
        "attention/online_softmax.cuh", "from[r] = -kShift<T>;", "from[r] = -kInfinity;", "blocks"
    ),
    "far origins are rounded": Fault(
        "attention/online_softmax.cuh",
        "constexpr float kFar = 0x1p23f;",
        "constexpr float kFar = kInfinity;",
        "far scores",
    ),
    "a far origin is subtracted from the scores of all rows": Fault(
        "attention/online_softmax.cuh", "first != -kInfinity && is_far(first, scale)",
        "first != -kInfinity", "far scores"
    ),
    "a far origin is subtracted in the tile that moves it alone": Fault(
        BLOCK, "softmax.any_far || softmax.exceeds", "softmax.exceeds", "far scores"
    ),
    "a far origin moves by rounded differences": Fault(
        "attention/online_softmax.cuh",
        "exact ? (origin[r] - top) * scale",
        "exact ? shifted(origin[r], scale) - shifted(top, scale)",
        "far distances",
    ),
    "states of far rows are of exact origins": Fault(
        "attention/decode/mma.cuh", "if (vote_any(any_far)) {", "if (false) {", "far distances"
    ),
    "a sum of rows with far scores from the rounded origin": Fault(
        "attention/online_softmax.cuh", "if (is_far(origin[r], scale)) score -= origin[r];", "",
        "far scores"
    ),
    "rows without keys are divided by zero": Fault(
        BLOCK, "total == 0.0f ? 0.0f : 1.0f / total;", "1.0f / total;", "no keys"
    ),
    "values are loaded over while they are read": Fault(
        BLOCK, "sync_block();  // the keys have arrived", "// the keys are there", "tails"
    ),
    "keys are loaded over while they are read": Fault(
        BLOCK, "sync_block();  // the values have arrived", "// the values are there",
        "tails"
    ),
    "keys too early": Fault(
        BLOCK,
        "copy_async_wait<0>();\n        sync_block();  // the keys have arrived",
        "copy_async_wait<1>();\n        sync_block();  // the keys have arrived",
        "tails",
    ),
    "values too early": Fault(
        BLOCK,
        "copy_async_wait<0>();\n        sync_block();  // the values have arrived",
        "copy_async_wait<1>();\n        sync_block();  // the values have arrived",
        "tails",
    ),
    "the tile that the end cuts is taken for a whole one": Fault(
        BLOCK, "tiles.key + kTileN > whole_keys)", "tiles.key >= whole_keys)", "tails"
    ),
    "keys past the end are read": Fault(
        "common/shared_tile.cuh", "(kUnpredicated || first + row < num_rows)", "(true)", "tails"
    ),
    "elements past the end of a row are read": Fault(
        "common/shared_tile.cuh",
        "exists = chunk * kPerChunk < num_elements;",
        "exists = true;",
        "padded rows",
    ),
    "rows past the end are written": Fault(
        BLOCK, "if (row < rows && chunk < chunks)", "if (chunk < chunks)", "tails"
    ),
    "the keys of another head": Fault(
        "attention/work_tile.cuh",
        "params.group.divide(h.kv_head);",
        "h.kv_head = params.group.divide(h.kv_head);",
        "groups",
    ),
    "the mask of the first batch": Fault(
        "attention/mask.cuh", "batch * params.strides[0] + head", "head", "masks"
    ),
    "a bias is added to scores without scale": Fault(
        BLOCK, "if (params.prescale) {", "if (params.prescale && params.unit < 0) {",
        "masks"
    ),
    "a masked block is computed where its neighbour is": Fault(
        BLOCK, "type != kMaskedBlock && key <", "key <", "large tiles"
    ),
    "the end of a causal block is not masked": Fault(
        BLOCK, "limit = limit < block_limit ? limit : block_limit;", "", "blocks"
    ),
    "blocks of a head's neighbour": Fault(
        "attention/mask.cuh", "head * params.block_stride_h}", "0}", "blocks"
    ),
    "a packed sequence's causality from the other end": Fault(
        "attention/work_tile.cuh", "params.bottom_right ? h.sk - h.sq : 0;", "0;", "packed"
    ),
    "a packed sequence reads into the next": Fault(
        "attention/work_tile.cuh",
        "h.sk = clamp_index(k_end - h.k_first, 0, params.sk);",
        "h.sk = clamp_index(params.total_k - h.k_first, 0, params.sk);",
        "packed",
    ),
    "the logarithm without the largest score": Fault(
        "attention/online_softmax.cuh", "row_max + log_accurate(row_sum)", "log_accurate(row_sum)",
        "tails"
    ),
    "an offset in 32 bits": Fault(
        "attention/kv.cuh",
        "v + head.k_offset(params.v);", "v + int(head.k_offset(params.v));", "large offsets",
    ),
    "the last section too large": Fault(
        "attention/work_tile.cuh",
        "(whole ? order.heads : order.last_heads)",
        "order.heads",
        "sections",
    ),
    "the first section's heads for all": Fault(
        "attention/work_tile.cuh", "section * order.heads.divisor + head", "head", "sections"
    ),
    "a window, one key too few": Fault(
        "attention/work_tile.cuh", "row + offset - left;", "row + offset - left + 1;",
        "windows"
    ),
    "a tile that the window's begin cuts is not masked": Fault(
        BLOCK, "first_key(params, first_row + kWarpRows - 1)",
        "first_key(params, first_row)", "windows"
    ),
    "a block that the window's begin cuts is skipped": Fault(
        "attention/work_tile.cuh", "(last[i] + 1) << kv_shift <= begin",
        "last[i] << kv_shift <= begin", "windows"
    ),
    "a sink that is in no sum": Fault(
        "attention/online_softmax.cuh",
        "owns ? exp2_approx(kShift<T>) + (score - score) : 0.0f;",
        "0.0f;",
        "options",
    ),
    "a sink that every lane counts": Fault(
        "attention/online_softmax.cuh",
        "owns ? exp2_approx(kShift<T>) + (score - score) : 0.0f;",
        "exp2_approx(kShift<T>);",
        "options",
    ),
    "ALiBi with the wrong sign": Fault(
        "attention/score.cuh", "multiply_add(-slope,", "multiply_add(slope,", "options"
    ),
    "ALiBi of the first batch element": Fault(
        "attention/score.cuh", "head.batch * options.slope_batch +", "", "options"
    ),
    "a soft cap after the mask": Fault(
        BLOCK,
        """Score::apply(params, arrays, head, all);
        if (params.mask.kind == kBoolMask || params.mask.kind == kBiasMask) {
            // Rows and columns past the end are clamped: they are unused or masked below.
            const int last_row = head.sq - 1, last_key = head.sk - 1;
            for_each_score(scores, first_row, first_key, [&](float& x, int row, int col) {
                x = mask.of_array(x, row < last_row ? row : last_row,
                                  col < last_key ? col : last_key);
            });
        }""",
        """if (params.mask.kind == kBoolMask || params.mask.kind == kBiasMask) {
            const int last_row = head.sq - 1, last_key = head.sk - 1;
            for_each_score(scores, first_row, first_key, [&](float& x, int row, int col) {
                x = mask.of_array(x, row < last_row ? row : last_row,
                                  col < last_key ? col : last_key);
            });
        }
        Score::apply(params, arrays, head, all);
        """,
        "options",
    ),
    "a soft cap of half the score": Fault(
        "attention/score.cuh", "exp2_approx(x * exponent)", "exp2_approx(0.5f * x * exponent)",
        "options"
    ),
    "a soft cap that ends below the cap": Fault(
        "attention/score.cuh", "1.0f + power), cap)", "1.0f + power), 0.999f * cap)", "options"
    ),
    "keys after the lengths of a padded batch": Fault(
        "attention/work_tile.cuh", "h.sk = clamp_index(cu_seqlens_k[h.batch], 0, params.sk);",
        "", "padded batch"
    ),
    "a padded batch's causality from its longest": Fault(
        "attention/work_tile.cuh",
        "if (params.bottom_right) h.offset += h.sk - int(params.sk);", "", "padded batch"
    ),
    "an output that is all zero": Fault(
        BLOCK, "rows_of_warp.outputs.at(m, d).values[i] * inverse", "0.0f * inverse",
        "tails"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, object]]:
    def problem(b, h, h_kv, sq, sk, d, dv, **options):
        return ATTENTION, AttentionProblem(b, h, h_kv, sq, sk, d, dv, **options)

    stats = {"lse": True, "row_stats": True}
    yield (
        "tails",
        *problem(1, 2, 2, 100, 130, 40, 64, causal=True, causal_align="top_left", **stats),
    )
    yield "tails", *problem(1, 1, 1, 65, 97, 64, 64, **stats)
    yield "tails", *problem(1, 1, 1, 33, 96, 64, 64, view="padded", **stats)
    yield "growing", *problem(1, 1, 1, 64, 200, 64, 64, kind="peaked", scale=1.0, **stats)
    yield "no keys", *problem(1, 1, 1, 70, 0, 64, 64, **stats)
    yield "padded rows", *problem(1, 1, 1, 65, 70, 24, 40, view="padded")
    yield "groups", *problem(2, 4, 2, 20, 40, 16, 16, layout="bshd")
    for mask in ("bool", "bias"):
        yield "masks", *problem(2, 2, 1, 40, 70, 16, 16, mask=mask, **stats)
    for blocks in ((64, 64), (128, 64), (64, 128), (128, 128)):
        yield "blocks", *problem(2, 2, 1, 300, 400, 16, 16, mask="block", blocks=blocks)
    right = {"causal_align": "bottom_right", **stats}
    window = ScoreChoice((30, 10))
    yield "windows", *problem(1, 1, 1, 150, 200, 16, 16, options=window, **right)
    yield "windows", *problem(1, 1, 1, 150, 300, 16, 16, mask="block", options=window, **right)
    options = ScoreChoice((90, 10), 2.0, "bh", True)
    yield "options", *problem(2, 2, 1, 100, 130, 16, 16, mask="bool", options=options, **right)
    yield "padded batch", *problem(2, 1, 1, 20, 130, 16, 16, causal=True, lens=(130, 47), **right)
    lengths = (40, 70), (0, 3), (65, 33), (7, 100)
    for align in ("bottom_right", "top_left"):
        options = {"causal": True, "causal_align": align, "lse": True}
        yield "packed", VARLEN, VarlenProblem(lengths, 2, 1, 16, 16, **options)


def _compare(q, k, v, **options) -> None:
    references = ATTENTION.reference(q, k, v, **options)
    bounds = ATTENTION.bound(q, k, v, reference=references, **options)
    outputs = cupykern.attention(q, k, v, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert check.compare(outputs, references, bounds).ok


def _normal(*shape: int) -> np.ndarray:
    return inputs.values("normal", shape, dtypes.float16, sum(shape))


def _check_growing() -> None:
    """The largest score grows from tile to tile, by more and by less than the rescale threshold."""
    for step in (0.5, 5.4, 5.6, 9.0):  # natural units; rescaled from 8 log 2 = 5.55 on
        q, v = np.ones((1, 1, 16, 8), np.float16), _normal(1, 1, 200, 8)
        k = np.repeat(step / 8 * np.arange(200) / 32, 8).astype(np.float16).reshape(1, 1, 200, 8)
        _compare(q, k, v, scale=1.0, return_row_stats=True)
        tiles = (step * (np.arange(200) // 32) / 8).astype(np.float16)
        _compare(q, np.repeat(tiles, 8).reshape(k.shape), v, scale=1.0, return_row_stats=True)


def _check_large_tiles() -> None:
    """Tiles of two rows of blocks, warps of two rows of fragments."""
    problem = AttentionProblem(1, 2, 1, 200, 300, 16, 16, mask="block", lse=True)
    for blocks in ((64, 64), (64, 128), (128, 64)):
        call = ATTENTION.inputs(replace(problem, blocks=blocks), 5, np)
        _compare(*call.args, **call.kwargs, config=AttentionConfig(128, 32, 4))


def _check_empty_rows() -> None:
    """Rows that never see a key, and rows that do after a masked tile."""
    mask = np.zeros((64, 130), bool)
    mask[::3, 100:] = True
    options = {"mask": mask, "return_lse": True, "return_row_stats": True}
    _compare(_normal(1, 1, 64, 8), _normal(1, 1, 130, 8), _normal(1, 1, 130, 8), **options)
    _compare(_normal(1, 1, 64, 8), _normal(1, 1, 30, 8), _normal(1, 1, 30, 8), causal=True,
             causal_align="bottom_right", return_lse=True)  # fmt: skip


def _check_large_caps() -> None:
    """Scores of a 500th of the cap, and of a 20th, which the cubic term moves by 8e-4."""
    q, k, v = _normal(1, 1, 20, 16), _normal(1, 1, 30, 16), _normal(1, 1, 30, 8)
    for scale, cap in ((0.25, 1e3), (0.05 * 2000 / 10, 2000.0)):
        _compare(q, k, v, scale=scale, softcap=cap, return_row_stats=True)


def _check_large_offsets() -> None:
    stride, flags = 2**32 + 64, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 3 * stride, flags=flags), np.float16)

    def far(x: np.ndarray) -> np.ndarray:
        y = np.lib.stride_tricks.as_strided(memory, x.shape, (x.strides[0], stride, *x.strides[2:]))
        y[...] = x
        return y

    v = far(_normal(1, 3, 20, 8))
    _compare(_normal(1, 3, 20, 8), _normal(1, 3, 20, 8), v)


def _check_sections() -> None:
    """Fewer heads in the last section than in the others."""
    with bytes_of_l2(3 * 40 * 16 * 2):  # of 3 of the 5 heads
        x = _normal(1, 5, 80, 8)
        _compare(x, x[:, :, :40], x[:, :, :40], causal=True, causal_align="top_left")


CHECKS = {
    "growing": _check_growing,
    "large tiles": _check_large_tiles,
    "large caps": _check_large_caps,
    "empty rows": _check_empty_rows,
    "large offsets": _check_large_offsets,
    "sections": _check_sections,
    "hidden keys": lambda: check_bias_over_nan(20, 70, 16),
    "far scores": lambda: check_far_scores(np, dtypes.float16),
    "far distances": lambda: check_far_distances(np, dtypes.float16),
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
