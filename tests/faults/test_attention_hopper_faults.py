"""Planted faults of attention's Hopper kernel: the named check must catch each."""

from __future__ import annotations

from functools import partial

import numpy as np
from attention_checks import bytes_of_l2, check_far_scores
from attention_hopper_checks import PROBLEMS, SIZES, check_scores_that_grow, compare, hopper
from planted import Fault, fault_tests

from cupykern import check, dtypes
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.ops.problems.attention import AttentionProblem
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.targets import host

MAIN, MASK, EPILOGUE, PRODUCER, STORAGE, ORDER, SOFTMAX = (
    f"attention/{x}_sm90.cuh"
    for x in ("mainloop", "mask", "epilogue", "producer", "storage", "scheduler", "softmax")
)
NAMES = (
    "full", "causal", "layout", "padded", "blocks", "causal blocks", "large blocks", "bool", "bias",
    "negative scale",
    "empty tiles", "packed", "causal packed", "causal window", "window", "capped", "padded batch",
)  # fmt: skip
NAMES_OF_SIZES = ("80", "96", "192 and 128")

FAULTS = {
    "keys of one stage alone": Fault(
        PRODUCER, "key_pipeline.producer_acquire(to);",
        "key_pipeline.producer_acquire(KvState());", "full"
    ),
    "queries are loaded while outputs are there": Fault(
        PRODUCER, "storage.query_pipeline.producer_acquire(query); if (tile", "if (tile",
        "packed",
    ),
    "values are released before they are multiplied": Fault(
        MAIN,
        "wgmma_wait<0>(outputs); storage.value_pipeline.consumer_release(at.stage); if (grown)",
        "storage.value_pipeline.consumer_release(at.stage); wgmma_wait<0>(outputs); if (grown)",
        "full",
    ),
    "scores are read too early": Fault(
        MAIN, "wgmma_wait<1>(scores);", "wgmma_wait<2>(scores);", "full"
    ),
    "outputs are read too early": Fault(
        MAIN, "wgmma_wait<1>(outputs);", "wgmma_wait<2>(outputs);", "full"
    ),
    "the next tile's scores are read too early": Fault(
        MAIN, "query = next; wgmma_wait<0>(scores);", "query = next;", "full"
    ),
    "the next tile's scores are of this tile's queries": Fault(
        MAIN, "begin_scores(next.stage, at.stage);", "begin_scores(query.stage, at.stage);",
        "full",
    ),
    "values of the next tile": Fault(
        MAIN, "const KvState before(index), at(++index);",
        "const KvState before(++index), at(index);",
        "full",
    ),
    "products are not rescaled": Fault(
        MAIN, "outputs[j] *= factors[j / 2 % 2];", "outputs[j] *= 1.0f;", "growing"
    ),
    "rows of the other half are rescaled": Fault(
        MAIN, "outputs[j] *= factors[j / 2 % 2];", "outputs[j] *= factors[j % 2];", "growing"
    ),
    "origins stay until probabilities exceed FP16": Fault(
        SOFTMAX, "(kRescaleAbove - 1.0f)", "(kRescaleAbove + 8.0f)", "growing"
    ),
    "far origins have a limit": Fault(
        SOFTMAX, "this->is_far(origin, scale) ? -kInfinity : origin + grows", "origin + grows",
        "far scores"
    ),
    "far origins are not subtracted from the first scores": Fault(
        SOFTMAX, "if (vote_any(this->any_far))", "if (false)", "far scores"
    ),
    "a sink is as large as the first scores": Fault(
        SOFTMAX, "exp2_approx(this->exponent(r, begun, scale))", "exp2_approx(kShift<T>)", "capped"
    ),
    "a tile at the end is not masked": Fault(
        MASK, "if (key + kTileN <= limit && key + kTileN <= sk && begun) return;", "return;",
        "causal"
    ),
    "one key too many": Fault(
        MASK, "if (8 * n + i >= left || (", "if (8 * n + i > left || (", "causal"
    ),
    "a window, one key too many": Fault(
        MASK, "8 * n + i < before", "8 * n + i + 1 < before", "causal window"
    ),
    "a tile that the last rows' window cuts is not masked": Fault(
        MASK, "begin_of_first(params) + 63;", "begin_of_first(params);", "causal window"
    ),
    "keys are counted from the first one": Fault(
        MASK, "tile += begin > 0 ? begin / Traits::kTileN : 0;", "", "causal window"
    ),
    "tiles before the window are awaited": Fault(
        PRODUCER, "const int left = tile.num_key_tiles - first_tile(tile.head, tile.row);",
        "const int left = tile.num_key_tiles;", "causal window"
    ),
    "a sink that every lane counts": Fault(
        MAIN, "softmax.begin(top[0], params.exponent_scale, lane_id() % 4 == 0);",
        "softmax.begin(top[0], params.exponent_scale, true);", "capped"
    ),
    "distances of the first rows": Fault(
        MASK, "const float distance = float(position - key + 8 * half);",
        "const float distance = float(position - key);", "capped"
    ),
    "queries of the first warpgroup": Fault(
        MAIN, "q.k_major(warpgroup * 64)", "q.k_major(0)", "full"
    ),
    "outputs are overwritten while they are stored": Fault(
        EPILOGUE, "tma_store_wait_read<0>(); if (!kEvery", "if (!kEvery", "full"
    ),
    "outputs are stored without a fence": Fault(
        EPILOGUE, "fence_async_proxy(); sync_warp();", "sync_warp();", "full"
    ),
    "probabilities in another order": Fault(
        MAIN, "scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]",
        "scores[8 * i + 2 * j + 1], scores[8 * i + 2 * j]",
        "full",
    ),
    "statistics of the other row": Fault(
        EPILOGUE, "Layout::row(lane, 2 * r); if", "Layout::row(lane, 2 - 2 * r); if", "full"
    ),
    "rows past the end have statistics": Fault(
        EPILOGUE, "lane % 4 == 0 && own < sq)", "lane % 4 == 0)", "full"
    ),
    "a tile without keys is left out": Fault(
        MAIN,
        "clear(); finish(query.stage, tile);",
        "clear();",
        "empty tiles",
    ),
    "a partial block's tile is transposed": Fault(
        MASK, "next_row + i / 4 * 8 + i % 2", "next_row + i / 4 * 4 + i % 2", "blocks"
    ),
    "a masked block is computed": Fault(
        MASK, "return vote_any(type() != kMaskedBlock);", "return true;", "blocks"
    ),
    "a skipped stage is released at once": Fault(
        MAIN,
        "storage.value_pipeline.consumer_wait(at);"
        "storage.value_pipeline.consumer_release(at.stage); }",
        "storage.value_pipeline.consumer_release(at.stage); }", "blocks"
    ),
    "a block's causality is left out": Fault(
        MASK, "block_end = first_row + params.mask.causal_offset + 1;", ";", "blocks"
    ),
    "what is known of the block before": Fault(
        MAIN, "keys.look_up(storage, at.stage, keys.state);",
        "keys.look_up(storage, before.stage, keys.state);",
        "large blocks",
    ),
    "an element of the mask for the next key": Fault(
        MASK, "change(score, at + i * step)", "change(score, at + step)", "bool"
    ),
    "a mask's rows of the first warp": Fault(
        MASK, "tile.row + warp_row() + Layout::row(lane, 2 * half); const int row",
        "tile.row + Layout::row(lane, 2 * half); const int row", "bias"
    ),
    "a bias of -inf is added": Fault(
        MASK, "bias == -kInfinity ? bias : x + bias", "x + bias", "bias"
    ),
    "scores are not scaled before": Fault(
        MASK, "scores[i] *= params.score_scale;", "scores[i] *= 1.0f;", "negative scale"
    ),
    "the last block is not the last": Fault(
        PRODUCER, "partial, !keys.more()", "partial, keys.more()", "large blocks"
    ),
    "keys of the next sequence": Fault(
        STORAGE, "kRagged - p.length + p.row : p.row;", "kRagged / 2 - p.length + p.row : p.row;",
        "packed"
    ),
    "rows of the sequence before": Fault(
        STORAGE, "p.first + p.length : p.batch;", "p.first + p.length - 1 : p.batch;", "packed"
    ),
    "sequences of one length count as one": Fault(
        ORDER, "other.longest == own.longest && j < i", "other.longest == own.longest && j < 0",
        "packed"
    ),
    "the last section of a sequence too large": Fault(
        "attention/work_tile.cuh", "heads = rest < per_section ? rest : per_section;",
        "heads = per_section;", "sections"
    ),
    "the last section too large": Fault(
        "attention/work_tile.cuh", "(whole ? order.heads : order.last_heads)", "order.heads",
        "sections"
    ),
    "the first section's heads for all": Fault(
        "attention/work_tile.cuh", "section * order.heads.divisor + head", "head", "sections"
    ),
    "a sequence's last tile is left out": Fault(
        ORDER, "((head.sq + kTileM - 1) / kTileM) * heads", "(head.sq / kTileM) * heads",
        "causal packed"
    ),
    "the offset of the sequences' batch": Fault(
        MASK, "warpgroup_row() + tile.head.offset + 1", "warpgroup_row() + params.offset + 1",
        "causal packed"
    ),
    "an odd number of steps along the dims, the last one left out": Fault(
        MAIN, "dim < kHeadDim; dim += kStepK", "dim < kHeadDim / 32 * 32; dim += kStepK", "80"
    ),
    "a box of which few dims are used is not loaded": Fault(
        STORAGE, "kBoxes = (kDims + kBoxDims - 1) / kBoxDims", "kBoxes = kDims / kBoxDims", "80"
    ),
    "the boxes of keys are stored": Fault(
        EPILOGUE, "kBoxes = Traits::kHeadDimV / kBoxDims",
        "kBoxes = Traits::kHeadDim / kBoxDims", "80"
    ),
    "keys have the dims of values": Fault(
        STORAGE, "SharedRows<Traits, Traits::kTileN, Traits::kHeadDim> keys",
        "SharedRows<Traits, Traits::kTileN, Traits::kHeadDimV> keys", "192 and 128"
    ),
    "the dims of values are multiplied": Fault(
        MAIN, "kHeadDim = Traits::kHeadDim, kHeadDimV", "kHeadDim = Traits::kHeadDimV, kHeadDimV",
        "192 and 128"
    ),
}  # fmt: skip


def _check(problem: AttentionProblem | VarlenProblem) -> None:
    if host.current().schedule != "fifo":
        return  # the first call goes through all
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            try:
                assert compare(target, problem, hopper(problem)).ok
            except check.Violation as violation:
                raise AssertionError from violation


def _check_sections() -> None:
    """Fewer heads in the last section than in the others: of one call, and of each sequence."""
    config = AttentionHopperConfig(128, 128)
    with bytes_of_l2(3 * 200 * 64 * 2 * 2):  # of 3 of the 5 heads
        for problem in (
            AttentionProblem(1, 5, 5, 200, 200, 64, 64, causal=True, input_pos=0),
            VarlenProblem(((200, 200), (0, 0), (130, 130)), 5, 5, 64, 64, causal=True),
        ):
            try:
                assert compare(host.current(), problem, config).ok
            except check.Violation as violation:
                raise AssertionError from violation


CHECKED = (*zip(NAMES, PROBLEMS, strict=False), *zip(NAMES_OF_SIZES, SIZES, strict=False))
CHECKS = {name: partial(_check, problem) for name, problem in CHECKED}
CHECKS["growing"] = lambda: (
    host.current().warp_size == 32 and check_scores_that_grow(host.current())
)
CHECKS["sections"] = lambda: host.current().warp_size == 32 and _check_sections()
CHECKS["far scores"] = lambda: (
    host.current().warp_size == 32
    and check_far_scores(np, dtypes.float16, config=AttentionHopperConfig(128, 64))
)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS
)
