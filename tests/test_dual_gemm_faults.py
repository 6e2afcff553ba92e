"""Planted faults in the kernels of NVFP4, dual_gemm_silu and dequant_softmax, each of which a check must
catch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from planted import Fault, caught_by, first_failure

import cupykern
from cupykern import OPS, check
from cupykern.gemm import nvfp4
from cupykern.gemm.dequant_softmax import LogitsProblem
from cupykern.gemm.dual_gemm import DualProblem
from cupykern.gemm.gemm_hopper import HopperConfig
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
        "normalize_logits.cu", "total = merge.across_lanes(total, 1, kWarpSize);", "", "softmax"
    ),
    "the first warp's statistics for all": Fault(
        "normalize_logits.cu", "for (int i = 1; i < kWarps; ++i) total", "for (int i = kWarps; i < kWarps; ++i) total",
        "many columns",
    ),
    "a block's part of a row is every block's": Fault(
        "normalize_logits.cu", "(part * kNumThreads + threadIdx.x) * kRun", "(threadIdx.x) * kRun",
        "many columns",
    ),
    "groups past the scale's rounding": Fault(
        "quantize_nvfp4.cu", "1.0f / (kLargestCode * global)", "1.0f / (kLargestScale * global)", "quantised"
    ),
    "codes of the unrounded scale": Fault(
        "quantize_nvfp4.cu", "coded ? 0x1p-14f / factor", "coded ? 0x1p-14f", "quantised"
    ),
    "NaN is not the group's": Fault(
        "quantize_nvfp4.cu", "bits < kInfinityBits ? number_of_bits(bits) * of_codes : nan",
        "number_of_bits(bits) * of_codes", "not finite",
    ),
    "infinities are the largest": Fault(
        "quantize_nvfp4.cu", "if (largest < kInfinityBits) return largest;", "return largest;", "not finite"
    ),
    "codes beyond 6": Fault(
        "quantize_nvfp4.cu", "min_unsigned_pair(pairs[i] & 0x7fff7fffu, 0x0e000e00u)", "(pairs[i] & 0x0fff0fffu)",
        "saturated",
    ),
    "ties to odd": Fault("quantize_nvfp4.cu", "1.5f * 0x1p22f", "1.5f * 0x1p21f", "quantised"),
    "the last lines are not decoded": Fault(
        "dequantize_nvfp4.cu", "if (at >= lines) continue;\n            Bytes", "if (i > 0) continue;\n            Bytes",
        "decoded",
    ),
    "every batch decodes the first matrix": Fault(
        "dequantize_nvfp4.cu", "from += p.batch.offset(kA, matrix);", "", "decoded"
    ),
    "one scale of all is forgotten": Fault(
        "parts/epilogue_hopper.cuh", "if (!kScales && epilogue.scale_b)", "if (false)", "decoded"
    ),
    "the other row's codes": Fault(
        "parts/rows_nvfp4_hopper.cuh", "line + half * other, k / 2", "line, k / 2", "nvfp4"
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
        "dual_gemm_hopper.cu", "PairStage::kBytes, b2_map, full", "PairStage::kBytes, b1_map, full", "hopper"
    ),
    "b2 before b1": Fault(
        "dual_gemm_hopper.cu", "PairStage::load(pairs, b1_map", "PairStage::load(pairs, b2_map", "hopper"
    ),
    "the second product's sums are the first one's": Fault(
        "dual_gemm_hopper.cu", "finish_part(second, vectors, number + kOwnParts,",
        "finish_part(second, vectors, number,", "hopper",
    ),
    "tiles as wide as both products": Fault(
        "dual_gemm_hopper.cu", "uint32_t(params.batch_size), kTileM, kPair,",
        "uint32_t(params.batch_size), kTileM, kTileN,", "hopper",
    ),
    "the first one's scales for both products": Fault(
        "dual_gemm_hopper.cu", "chunk < kChunks / 2 ? first : second", "first", "hopper"
    ),
    "a stage of one product alone is waited for": Fault(
        "dual_gemm_hopper.cu", "arrive_expect_tx(RowStage::kBytes + ColStage::kBytes)",
        "arrive_expect_tx(RowStage::kBytes + PairStage::kBytes)", "hopper",
    ),
    "the output's last column twice": Fault(
        "dual_gemm_hopper.cu", "at_col + 1 < params.n ? 2 : 1, pair", "2, pair", "hopper"
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
    for y in (x, x.to("blocked")):
        sums = cupykern.scaled_mm(picks, y, out_dtype="float32")
        assert (16 * scale.astype(np.float64) == sums.T).all()


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
    from dataclasses import replace

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
    for problem in (
        DualProblem(136, 140, 144, "float16", "float16"),
        DualProblem(20, 75, 144, "float16", "float16", out_dtype="float32"),
        DualProblem(70, 80, 272, "float8_e4m3fn", "float8_e4m3fn", scales="rows"),
    ):
        call = DUAL.inputs(problem, 1, np)
        references = DUAL.reference(*call.args, **call.kwargs)
        bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
        guarded = Call(call.args, {**call.kwargs, "config": HopperConfig(128, 128, 6)})
        try:
            (y,) = check.guarded_run(DUAL, guarded, DUAL.run(*call.args, **call.kwargs))
        except check.Violation as violation:
            raise AssertionError(str(violation)) from None
        assert check.compare((y,), references, bounds).ok


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
    "blocked scales": _check_blocked_scales,
    "padding": _check_padding,
    "policies": _check_policies,
    "splits": _check_splits,
    "many columns": _check_many_columns,
}


def test_nothing_fails_without_a_fault():
    assert first_failure(_problems, CHECKS) is None


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    fault = FAULTS[name]
    # Memory that is overwritten may end the process first.
    assert caught_by(fault, tmp_path_factory, _problems, CHECKS) in (fault.caught, "a crash")
