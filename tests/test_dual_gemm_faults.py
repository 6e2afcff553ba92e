"""Planted faults in the kernels of NVFP4, dual_gemm_silu and dequant_softmax, each of which a check must
catch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from planted import Fault, fault_tests

import cupykern
from cupykern import OPS, check
from cupykern.gemm import nvfp4
from cupykern.gemm.dequant_softmax import LogitsProblem
from cupykern.gemm.dual_gemm import DualProblem
from cupykern.gemm.hopper_config import HopperConfig
from cupykern.gemm.nvfp4 import NvFp4
from cupykern.gemm.quantize_nvfp4 import NvFp4Problem
from cupykern.gemm.scaled_problem import NVFP4
from cupykern.op import Call
from cupykern.targets import host

DUAL, LOGITS, QUANTIZE = (
    next(op for op in OPS if op.name == name)
    for name in ("dual_gemm_silu", "dequant_softmax", "quantize_nvfp4")
)
HOST = "platform/mma_host.cuh"
GATED, SPLIT = "parts/gated_epilogue_hopper.cuh", "parts/split_sums_hopper.cuh"
SHARES, STREAM = "parts/shares_hopper.cuh", "dequant_softmax_stream.cu"
NORMALIZE = "parts/normalize_logits.cuh"

FAULTS = {
    "nibbles in the wrong order": Fault(
        HOST, "chunk[at % 32 / 2] >> at % 2 * 4 & 0xf", "chunk[at % 32 / 2] >> (1 - at % 2) * 4 & 0xf",
        "codes",
    ),
    "the scale of the next group": Fault(
        HOST, "to_float(tile.scale(outer, at / 16))", "to_float(tile.scale(outer, at / 16 ^ 1))", "codes"
    ),
    "the scale of another row": Fault(
        HOST, "to_float(tile.scale(outer, at / 16))", "to_float(tile.scale(outer ^ 8, at / 16))", "codes"
    ),
    "an e2m1 subnormal is zero": Fault(
        "platform/common.cuh", "mantissa * 0x3f000000u", "0u", "codes"
    ),
    "e2m1's sign is lost": Fault(
        "platform/common.cuh", "magnitude | code >> 3 << 31", "magnitude", "codes"
    ),
    "blocks of 128 rows as far apart as quarters": Fault(
        "parts/nvfp4.cuh", "line / 128 * block", "line / 128 * quarter", "blocked scales"
    ),
    "quarters of a block left out": Fault(
        "parts/nvfp4.cuh", "line % 128 / 32 * quarter", "0", "codes"
    ),
    "the next word of scales": Fault(
        "parts/nvfp4.cuh", "k / kWordK * word", "0", "blocked scales"
    ),
    "scales behind the last group are read": Fault(
        "parts/nvfp4.cuh",
        "clamp_to(num_k / kGroup - word * kWord, kWord)",
        "kWord",
        "padding",
    ),
    "tiles begin at the first scale": Fault(
        "parts/nvfp4.cuh", "groups.at(first_line + line,", "groups.at(line,", "blocked scales"
    ),
    "bytes of 8 where there are 16": Fault(
        "parts/nvfp4.cuh", "piece % 2 * 8;", "0;", "padding"
    ),
    "b2 is b1": Fault(
        "parts/gemm_tile.cuh", "element_address(b[i].data,", "element_address(b[0].data,", "two products"
    ),
    "b1 and b2 swapped": Fault(
        "dual_gemm.cu", "gate_all(values, factors, policy)", "gate_all(factors, values, policy), values[0] = factors[0]",
        "two products",
    ),
    "the second product's fragments are the first one's": Fault(
        "parts/gemm_tile.cuh", "acc[m][product * kColFragments + n]", "acc[m][n]", "two products"
    ),
    "the second product's columns beside the first one's": Fault(
        "parts/mainloop.cuh", "fragment % kColFragments) * 16; }", "fragment) * 16; }", "two products"
    ),
    "silu's exponential with the other sign": Fault(
        "parts/math.cuh", "exp2_approx(-kLog2E * x)", "exp2_approx(kLog2E * x)", "two products"
    ),
    "the first one's scale for both": Fault(
        "dual_gemm.cu", "second = epilogue(1, scale_b2, kScaleB2)", "second = epilogue(1, scale_b1, kScaleB)",
        "scales",
    ),
    "the blocks' scales of b1 for both": Fault(
        "parts/mainloop.cuh", "b[n / kColFragments];\n", "b[0];\n", "scales"
    ),
    "the batch's offset of b2": Fault(
        "parts/gemm_tile.cuh", "kBs[] = {kB, kB2}", "kBs[] = {kB, kA}", "batches"
    ),
    "policies mixed up": Fault(
        "parts/gate.cuh",
        "{ kAllFp32, kHybrid, kAllFp16 }", "{ kHybrid, kAllFp32, kAllFp16 }", "policies"
    ),
    "hybrid rounds nothing": Fault(
        "parts/gate.cuh",
        "round_to_half(round_to_half(activate(x, kSilu)) * round_to_half(y))",
        "activate(x, kSilu) * y",
        "policies",
    ),
    "partial sums of one product alone": Fault(
        "parts/gemm_tile.cuh", "kTileSize = kProducts * kTileM * kTileN", "kTileSize = kTileM * kTileN",
        "splits",
    ),
    "the ragged last set counts what is not there": Fault(
        "dequant_softmax.cu", "if (i < count) run.sum +=", "run.sum +=", "softmax"
    ),
    "rows of a fragment share no statistics": Fault(
        "dequant_softmax.cu", "run = merge.across_lanes(run, 1, 16 / kRun);", "", "softmax"
    ),
    "statistics before they are there": Fault(
        "dequant_softmax.cu", "    sync_block();\n    constexpr int kSets", "    constexpr int kSets", "softmax"
    ),
    "a set's first fragment alone": Fault(
        "dequant_softmax.cu", "j < kFragmentsOfSet;", "j < 1;", "softmax"
    ),
    "sets past the end": Fault(
        "dequant_softmax.cu", " || set >= num_sets) continue;", ") continue;", "softmax"
    ),
    "a lane's statistics for all": Fault(
        NORMALIZE, "total = merge.across_lanes(total, 1, kWarpSize);", "", "softmax"
    ),
    "the first warp's statistics for all": Fault(
        NORMALIZE, "for (int i = 1; i < kBlockWarps; ++i) total",
        "for (int i = kBlockWarps; i < kBlockWarps; ++i) total", "many columns",
    ),
    "a block's part of a row is every block's": Fault(
        NORMALIZE, "int64_t piece = blockIdx.x * all / gridDim.x;", "int64_t piece = 0;", "softmax"
    ),
    "groups past the scale's rounding": Fault(
        "quantize_nvfp4.cu", "1.0f / (kLargestCode * global)", "1.0f / (kLargestScale * global)", "quantised"
    ),
    "codes of the unrounded scale": Fault(
        "quantize_nvfp4.cu", "0x1p-14f * reciprocal_approx(factor)", "0x1p-14f", "quantised"
    ),
    "NaN is not the group's": Fault(
        "quantize_nvfp4.cu", "bits < kInfinityBits ? number_of_bits(bits) * of_codes : nan",
        "number_of_bits(bits) * of_codes", "not finite",
    ),
    "infinities are the largest": Fault(
        "quantize_nvfp4.cu", "if (largest < kInfinityBits) return largest;", "return largest;", "not finite"
    ),
    "codes beyond 6": Fault(
        "quantize_nvfp4.cu", "min_unsigned_pair(pair & 0x7fff7fffu, 0x0e000e00u)", "(pair & 0x7fff7fffu)",
        "saturated",
    ),
    "blocks that do not meet": Fault("quantize_nvfp4.cu", "sync_grid(barrier);", "", "quantised"),
    "ties to odd": Fault("quantize_nvfp4.cu", "1.5f * 0x1p22f", "1.5f * 0x1p21f", "quantised"),
    "the last lines are not decoded": Fault(
        "dequantize_nvfp4.cu", "if (at >= lines) continue;\n            Bytes", "if (i > 0) continue;\n            Bytes",
        "decoded",
    ),
    "every batch decodes the first matrix": Fault(
        "dequantize_nvfp4.cu", "from += p.batch.offset(kA, matrix);", "", "decoded"
    ),
    "one scale of all is forgotten": Fault(
        GATED, "factors[i] = b * a * e.params.alpha;", "factors[i] = e.params.alpha;", "hopper"
    ),
    "one factor where there are many": Fault(GATED, "return fits;", "return true;", "hopper"),
    "the other row's codes": Fault(
        "parts/rows_nvfp4_hopper.cuh", "half * other * RowStage::kLine", "0", "nvfp4"
    ),
    "the same words of scales for ever": Fault(
        "parts/rows_nvfp4_hopper.cuh", "fetch(word + kWordsAhead)", "fetch(0)", "nvfp4"
    ),
    "b2's scales in b1's order": Fault(
        "dual_gemm_hopper.cu", "work.row_scales.steps[1] = others.steps[0];", "", "nvfp4"
    ),
    "both products' columns are the first one's": Fault(
        "dual_gemm_hopper.cu", "products[i / 2 % 2][i / 4 * 2 + i % 2]", "products[i % 2][i / 4 * 2 + i / 2 % 2]", "nvfp4"
    ),
    "statistics of a warp's columns alone": Fault(
        "dequant_softmax_hopper.cu", "for (int j = 1; j < 4; ++j) total", "for (int j = 4; j < 4; ++j) total", "logits"
    ),
    "logits of columns that are not there": Fault(
        "dequant_softmax_hopper.cu", "if (i < count) total.sum +=", "total.sum +=", "logits"
    ),
    "sums before they are all there": Fault(
        "dequant_softmax_hopper.cu", "        sync_warp();\n#pragma unroll 1\n        for (int line",
        "#pragma unroll 1\n        for (int line", "logits",
    ),
    "statistics before the other warps have theirs": Fault(
        "dequant_softmax_hopper.cu", "            named_barrier(1 + warpgroup, 128);\n            const int64_t set",
        "            const int64_t set", "logits",
    ),
    "the even columns are the first ones": Fault(
        "dequant_softmax_hopper.cu", "kOuterMajorRows ? 2 * j + i / 4 : i + j", "i + j", "logits"
    ),
    "b2's stage is b1's": Fault(
        "dual_gemm_hopper.cu", "load_pair(pairs + kSecondPair, b2_map", "load_pair(pairs + kSecondPair, b1_map",
        "hopper",
    ),
    "b2 before b1": Fault(
        "dual_gemm_hopper.cu", "load_pair(pairs, b1_map", "load_pair(pairs, b2_map", "hopper"
    ),
    "the second product's sums are the first one's": Fault(
        GATED, "float(sums[block][kCols / 4 + at]) * factors[1]", "float(sums[block][at]) * factors[1]",
        "hopper",
    ),
    "tiles as wide as both products": Fault(
        "dual_gemm_hopper.cu", "kTileM * kClusterSize : kTileM, kPair,",
        "kTileM * kClusterSize : kTileM, kTileN,", "hopper",
    ),
    "the first one's scales for both products": Fault(
        GATED, "GateScales::col(second, at)", "GateScales::col(first, at)", "hopper"
    ),
    "a stage of one product alone is waited for": Fault(
        "dual_gemm_hopper.cu", "arrive_expect_tx(RowStage::kBytes + ColStage::kBytes - missing)",
        "arrive_expect_tx(RowStage::kBytes + PairStage::kBytes)", "hopper",
    ),
    "the output's last column twice": Fault(
        GATED, "at_col + 1 < params.n ? 2 : 1, pair", "2, pair", "hopper"
    ),
    "a cluster's blocks finish the same columns": Fault(
        "dual_gemm_hopper.cu", "(kSplitK ? rank * kOwnCols : 0)", "0", "split"
    ),
    "the other block's part of k is left out": Fault(
        SPLIT, "bit_cast<SumType>(part.words[j]);", "SumType(0);", "split"
    ),
    "the other block's columns of the first product for both": Fault(
        SPLIT, "i / kOwn * (kCols / 2 / kProducts) + rank", "rank", "split"
    ),
    "stages are overwritten while they are read": Fault(
        SPLIT, "else sync_cluster();                  // and no stage is read any more", "", "split"
    ),
    "every block has all of k": Fault(
        "dual_gemm_hopper.cu", "kSplitK ? rank * all_k_tiles / kClusterSize : 0;", "0;", "split"
    ),
    "the second warpgroup's stages are left out": Fault(
        "dual_gemm_hopper.cu", "sums[0][i] + of_tile[i][128 + thread]", "sums[0][i]", "few rows"
    ),
    "few rows: columns of the next block": Fault(
        "dual_gemm_hopper.cu", "end - part < kUnits ? end - part : kUnits", "true ? kUnits : end", "few rows"
    ),
    "few rows: the second unit's columns are the first one's": Fault(
        "dual_gemm_hopper.cu", "map, full, k, col + i * kUnit,", "map, full, k, col,", "few rows"
    ),
    "few rows: the other half of the columns": Fault(
        "dual_gemm_hopper.cu", "of_tile[i][64 + thread] +", "of_tile[i][32 + thread] +", "few rows"
    ),
    "few rows: sums before they are there": Fault(
        "dual_gemm_hopper.cu", "named_barrier(3, 128 * kConsumers);", "", "few rows"
    ),
    "shares of a warp's largest": Fault(
        SHARES, "max = maximum(max, to.warp_max[i][thread])", "max = to.warp_max[0][thread]", "shares"
    ),
    "sums of a warp's shares alone": Fault(
        SHARES, "sum += to.warp_sum[i][thread]", "sum = to.warp_sum[0][thread]", "shares"
    ),
    "shares of columns that are not there": Fault(
        SHARES, "there ? 0.0f : -kInfinity", "0.0f", "shares"
    ),
    "the largest before all warps have theirs": Fault(
        SHARES, "        named_barrier(barrier, 128);\n        if (thread < kRowsAtOnce) {",
        "        if (thread < kRowsAtOnce) {", "shares",
    ),
    "lanes merge the same half of their rows": Fault(
        SHARES, "const float sent = upper ? values[i] : values[i + rest];",
        "const float sent = upper ? values[i + rest] : values[i];", "shares",
    ),
    "all parts' rows are the first one's": Fault(
        SHARES, "first_row + part * kRowsAtOnce", "first_row", "shares"
    ),
    "the next part's sums stay where they are": Fault(
        SHARES, "sums[0][i] = sums[0][i + kRowSums];", ";", "shares"
    ),
    "a box is stored before all warps have filled it": Fault(
        SHARES, "to.warp_sum[warp][merged(i)] = values[i];\n        named_barrier(barrier, 128);",
        "to.warp_sum[warp][merged(i)] = values[i];", "shares",
    ),
    "shares of the row's first set": Fault(
        SHARES, "sets[at * kNormalRun / kSetColumns].max", "sets[0].max", "shares"
    ),
    "the ragged last run stays as it is": Fault(
        SHARES, "if (col < end) {", "if (false) {", "shares"
    ),
    "a row's statistics before all warps have theirs": Fault(
        NORMALIZE, "= total;\n    sync_block();", "= total;", "shares"
    ),
    "shares on Hopper: blocks that do not meet": Fault(
        "dequant_softmax_hopper.cu", "    sync_grid(barrier);", "if (logits) sync_grid(barrier);", "shares"
    ),
    "logits: blocks that do not meet": Fault("dequant_softmax.cu", "        sync_grid(barrier);", "", "softmax"),
    "logits on Hopper: blocks that do not meet": Fault(
        "dequant_softmax_hopper.cu", "    sync_grid(barrier);", "", "logits"
    ),
    "streams: blocks that do not meet": Fault(STREAM, "    sync_grid(barrier);", "", "streams"),
    "streams: the first blocks' columns are all": Fault(
        STREAM, "i < int(gridDim.x); i += 32", "i < int(gridDim.x) - 1; i += 32", "streams"
    ),
    "streams: logits are kept where others are": Fault(
        STREAM, "kept ? own * (kColumns / kWarpCols)", "kept ? 0 * (kColumns / kWarpCols)", "streams"
    ),
    "streams: all logits have been kept": Fault(
        STREAM, "if (set < params.kept_sets)", "if (set < 1000u)", "many streams"
    ),
    "streams: warps without columns count": Fault(STREAM, "own < num_own;", "true;", "streams"),
    "streams: statistics of one warp": Fault(
        STREAM, "for (int i = 1; i < kWarps; ++i) total", "for (int i = kWarps; i < kWarps; ++i) total", "streams"
    ),
    "streams: half of a row": Fault(STREAM, "merge.across_lanes(total, 1, 2)", "total", "streams"),
    "streams: the first half of k twice": Fault(
        STREAM, "{i * kDepth + 64, 0, 0}", "{i * kDepth, 0, 0}", "streams"
    ),
    "streams: stages are released by the first warp": Fault(
        STREAM, "storage.empty[i].init(kWarps)", "storage.empty[i].init(1)", "streams"
    ),
    "streams: the last tile's statistics alone": Fault(
        STREAM, "seen = merge(seen, merge", "seen = (merge", "streams"
    ),
    "the even columns of shares are the first ones": Fault(
        SHARES, "pack<Out>(two[0], two[2])", "pack<Out>(two[2], two[0])", "shares"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, object]]:
    yield "two products", DUAL, DualProblem(17, 24, 40)
    yield "two products", DUAL, DualProblem(70, 75, 72, layout_b1="C", layout_b2="C")
    for scales in ("rows", "blocks"):
        yield (
            "scales",
            DUAL,
            DualProblem(40, 70, 300, "float16", "int8", scales=scales, out_dtype="float32"),
        )
    yield "batches", DUAL, DualProblem(5, 9, 24, batch_a=(2, 1), batch_b=(3,))
    yield "codes", DUAL, DualProblem(70, 40, 80, "float16", NVFP4)
    yield "softmax", LOGITS, LogitsProblem(40, 190, 64, layout_w="F", out_dtype="float32")
    yield "softmax", LOGITS, LogitsProblem(3, 1000, 40, bias=(1000,))
    yield "not finite", QUANTIZE, NvFp4Problem((5, 64), kind="special")
    yield "quantised", QUANTIZE, NvFp4Problem((33, 80), "float32", "blocked")


def _check_blocked_scales() -> None:
    """Rows and groups of more than one block, each with a scale of its own."""
    rows, k = 300, 192
    scale = (2.0 ** np.random.default_rng(1).integers(-6, 8, (rows, k // 16))).astype(
        "float8_e4m3fn"
    )
    x = NvFp4(nvfp4.pack_e2m1(np.ones((rows, k))), scale)
    picks = np.repeat(np.eye(k // 16), 16, 1).astype(np.float16)
    expected = 16 * scale.astype(np.float64).T
    for y in (x, x.to("blocked")):
        for copies in (1, 2):  # up to 16 rows are another kernel's
            sums = cupykern.scaled_mm(np.tile(picks, (copies, 1)), y, out_dtype="float32")
            assert (np.tile(expected, (copies, 1)) == sums).all()


def _check_padding() -> None:
    """K = 48 in blocks of 64 and rows of 24 bytes; padding is NaN."""
    rng = np.random.default_rng(2)
    numbers = rng.choice((-2.0, 1.0, 3.0, 6.0), (20, 48))
    x = NvFp4(nvfp4.pack_e2m1(numbers), np.ones((20, 3), "float8_e4m3fn")).to("blocked")
    padded = x.scale.view(np.uint8).copy()
    padded[padded == 0] = 0x7F
    x = NvFp4(x.data, padded.view("float8_e4m3fn"), "blocked")
    a = rng.integers(-4, 5, (5, 48)).astype(np.float16)
    assert (cupykern.scaled_mm(a, x, out_dtype="float32") == a.astype(np.float64) @ numbers.T).all()


def _check_policies() -> None:
    """One product each, between FP16's numbers."""
    x = np.linspace(-10, 10, 201)[None].astype(np.float16)
    b1 = np.concatenate([x, np.zeros((7, 201), np.float16)])
    b2 = np.full((8, 201), 1 + 2.0**-10, np.float16)
    a = np.eye(1, 8, dtype=np.float16)
    exact, half = {}, {}
    for policy in ("fp32", "hybrid", "fp16"):
        y = cupykern.dual_gemm_silu(a, b1, b2, policy=policy, out_dtype="float32").astype(
            np.float64
        )
        wide = x.astype(np.float64)
        expected = wide / (1 + np.exp(-wide)) * (1 + 2.0**-10)
        exact[policy] = np.abs(y - expected).max()
        half[policy] = (y == y.astype(np.float16)).mean()
    assert exact["fp32"] < 1e-5 < min(exact["hybrid"], exact["fp16"])
    assert half["fp32"] < 0.5 and half["hybrid"] == half["fp16"] == 1


def _check_splits() -> None:
    from cupykern.gemm import gemm
    from cupykern.gemm.dual_gemm import _task

    problem = DualProblem(20, 70, 1100, scales="none", out_dtype="float32")
    call = DUAL.inputs(problem, 1, np)
    config = gemm.choose_config(_task(problem), "host")
    first, second = (
        DUAL.run(*call.args, config=replace(config, splits=splits)) for splits in (1, 4)
    )
    np.testing.assert_allclose(first, second, rtol=1e-2, atol=1e-3)


def _check_many_columns() -> None:
    rng = np.random.default_rng(3)
    a = rng.standard_normal((1, 16)).astype(np.float16)
    w = np.asfortranarray(rng.integers(-128, 128, (16, 40_000)).astype(np.int8))
    args = (a, w, 0.01)
    references = LOGITS.reference(*args)
    bounds = LOGITS.bound(*args, dtype="float32", reference=references)
    y = LOGITS.run(*args, dtype="float32")
    assert check.compare((y,), references, bounds).ok


def _check_hopper() -> None:
    if host.current().warp_size != 32:
        return
    _check_configs(
        (HopperConfig(128, 128, 6),),
        DualProblem(136, 1100, 48, "float16", "float16", scales="numbers"),
        DualProblem(20, 75, 144, "float16", "float16", out_dtype="float32"),
        DualProblem(70, 80, 272, "float8_e4m3fn", "float8_e4m3fn", scales="rows"),
        DualProblem(70, 80, 272, "float8_e4m3fn", "float8_e4m3fn", scales="tensor"),
    )


def _check_split() -> None:
    if host.current().warp_size == 32:
        config = HopperConfig(128, 128, 3, cluster=2, split_k=True)
        _check_configs(
            (config,), DualProblem(136, 144, 208), DualProblem(20, 70, 144, scales="tensor")
        )


def _check_few_rows() -> None:
    """More tiles than blocks, and columns that are spread over all blocks."""
    if host.current().warp_size == 32:
        config = HopperConfig(16, 64, 4, share_k=True, turned=True)
        problems = (DualProblem(20, 300, 208), DualProblem(9, 1100, 208))
        _check_configs((config,), *(replace(p, out_dtype="float32") for p in problems))


def _check_configs(configs: tuple[HopperConfig, ...], *problems: DualProblem) -> None:
    for problem, config in itertools.product(problems, configs):
        call = DUAL.inputs(problem, 1, np)
        references = DUAL.reference(*call.args, **call.kwargs)
        bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
        guarded = Call(call.args, {**call.kwargs, "config": config})
        try:
            (y,) = check.guarded_run(DUAL, guarded, DUAL.run(*call.args, **call.kwargs))
        except check.Violation as violation:
            raise AssertionError(str(violation)) from None
        assert check.compare((y,), references, bounds).ok


def _check_streams() -> None:
    """More than one tile for every block, ragged ones."""
    if host.current().warp_size != 32:
        return
    call = LOGITS.inputs(LogitsProblem(9, 1100, 272, layout_w="F", out_dtype="float32"), 1, np)
    references = LOGITS.reference(*call.args, **call.kwargs)
    bounds = LOGITS.bound(*call.args, **call.kwargs, reference=references)
    y = LOGITS.run(*call.args, **call.kwargs, config=HopperConfig(16, 128, 2, streams=True))
    assert check.compare((y,), references, bounds).ok


def _check_many_streams() -> None:
    """More logits than shared memory keeps."""
    if host.current().warp_size != 32:
        return
    call = LOGITS.inputs(LogitsProblem(9, 12_300, 16, layout_w="F"), 1, np)
    references = LOGITS.reference(*call.args, **call.kwargs)
    bounds = LOGITS.bound(*call.args, **call.kwargs, reference=references)
    y = LOGITS.run(*call.args, **call.kwargs, config=HopperConfig(16, 128, 2, streams=True))
    assert check.compare((y,), references, bounds).ok


def _check_shares() -> None:
    """Results of 16 bits on Hopper: ragged tiles, both parts of a tile's rows, both orders of w."""
    if host.current().warp_size != 32:
        return
    for layout, m, n, config in (
        ("F", 140, 203, HopperConfig(256, 128, 2)),
        ("C", 70, 272, HopperConfig(64, 128, 3, lines=2)),
    ):
        # Logits that differ from row to row and from set to set, among them large ones.
        call = LOGITS.inputs(LogitsProblem(m, n, 80, layout_w=layout), 1, np)
        a, w, scale = call.args
        out = np.zeros((m, -(-n // 8) * 8), a.dtype)[:, :n]
        args = (a * np.linspace(1, 30, m)[:, None].astype(a.dtype), w, scale)
        references = LOGITS.reference(*args)
        bounds = LOGITS.bound(*args, reference=references)
        assert check.compare((LOGITS.run(*args, config=config, out=out),), references, bounds).ok


def _check_decoded() -> None:
    """NVFP4 operands of products on Hopper, batches of which some are broadcast."""
    if host.current().warp_size != 32:
        return
    problem = DualProblem(140, 136, 80, NVFP4, NVFP4, batch_a=(2, 1), batch_b=(3,))
    for seed in (1, 2):
        call = DUAL.inputs(problem, seed, np)
        references = DUAL.reference(*call.args, **call.kwargs)
        bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
        y = DUAL.run(*call.args, **call.kwargs, config=HopperConfig(128, 128, 6, decoded=True))
        assert check.compare((y,), references, bounds).ok


def _check_nvfp4() -> None:
    """NVFP4 weights, one in plain and one in blocked order, decoded in registers on Hopper."""
    if host.current().warp_size != 32:
        return
    call = DUAL.inputs(DualProblem(70, 136, 544, NVFP4, NVFP4, out_dtype="float32"), 1, np)
    references = DUAL.reference(*call.args, **call.kwargs)
    bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
    y = DUAL.run(*call.args, **call.kwargs, config=HopperConfig(64, 128, 3, lines=2))
    assert check.compare((y,), references, bounds).ok


def _check_logits() -> None:
    """Equal logits and others, ragged tiles, on Hopper."""
    if host.current().warp_size != 32:
        return
    for problem in (
        LogitsProblem(70, 203, 272, layout_w="F", out_dtype="float32"),
        LogitsProblem(40, 272, 80, layout_w="C", out_dtype="float32"),
    ):
        call = LOGITS.inputs(problem, 1, np)
        references = LOGITS.reference(*call.args, **call.kwargs)
        bounds = LOGITS.bound(*call.args, **call.kwargs, reference=references)
        config = HopperConfig(64, 128, 3, lines=2)
        assert check.compare(
            (LOGITS.run(*call.args, **call.kwargs, config=config),), references, bounds
        ).ok


def _check_saturated() -> None:
    """A group whose scale, a subnormal e4m3 number, is rounded down by a third."""
    x = np.full((1, 32), 2688.0, np.float32)
    x[0, 16:] = 1.49 * 2.0**-9 * 6
    y = cupykern.quantize_nvfp4(x).dequantize()
    assert (y[0, 16:] == 2.0**-9 * 6).all()


CHECKS = {
    "decoded": _check_decoded,
    "nvfp4": _check_nvfp4,
    "logits": _check_logits,
    "saturated": _check_saturated,
    "hopper": _check_hopper,
    "split": _check_split,
    "few rows": _check_few_rows,
    "shares": _check_shares,
    "streams": _check_streams,
    "many streams": _check_many_streams,
    "blocked scales": _check_blocked_scales,
    "padding": _check_padding,
    "policies": _check_policies,
    "splits": _check_splits,
    "many columns": _check_many_columns,
}


test_nothing_fails_without_a_fault, test_caught = fault_tests(FAULTS, _problems, CHECKS, every=4)
