"""Planted faults in NVFP4: codes, products, quantizing and decoding; a check must catch each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from nvfp4_checks import check_global_scales_of_one
from planted import Fault, fault_tests

import cupykern
from cupykern import OPS, check, nvfp4
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.sm90_dual_config import Sm90DualGemmConfig, Sm90MixedDualGemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import Multicast, PingPong
from cupykern.nvfp4 import NvFp4
from cupykern.ops.problems.dual_gemm import DualProblem
from cupykern.ops.problems.products import NVFP4
from cupykern.ops.quantize_nvfp4 import NvFp4Problem
from cupykern.targets import host

DUAL, QUANTIZE = (
    next(op for op in OPS if op.name == name) for name in ("dual_gemm_silu", "quantize_nvfp4")
)
HOST = "platform/host/nvfp4.cuh"
PASSES = "rows/quantize_nvfp4_passes.cuh"

FAULTS = {
    "a normal global scale becomes one": Fault(
        PASSES, "largest >= kSmallestNormal ?", "largest > kSmallestNormal ?",
        "global scales of one",
    ),
    "global scales become one too late": Fault(
        PASSES, "largest >= kSmallestNormal ?", "largest >= 0.0f ?",
        "global scales of one"
    ),
    "nibbles in the wrong order": Fault(
        HOST, "chunk[at % 32 / 2] >> at % 2 * 4 & 0xf",
        "chunk[at % 32 / 2] >> (1 - at % 2) * 4 & 0xf",
        "codes",
    ),
    "the scale of the next group": Fault(
        HOST, "to_float(tile.scale(mn, at / 16))", "to_float(tile.scale(mn, at / 16 ^ 1))", "codes"
    ),
    "the scale of another row": Fault(
        HOST, "to_float(tile.scale(mn, at / 16))", "to_float(tile.scale(mn ^ 8, at / 16))", "codes"
    ),
    "an e2m1 subnormal is zero": Fault(
        "platform/common.cuh", "mantissa * 0x3f000000u", "0u", "codes"
    ),
    "e2m1's sign is lost": Fault(
        "platform/common.cuh", "magnitude | code >> 3 << 31", "magnitude", "codes"
    ),
    "blocks of 128 rows as far apart as quarters": Fault(
        "gemm/nvfp4.cuh", "mn / 128 * block", "mn / 128 * quarter", "blocked scales"
    ),
    "quarters of a block left out": Fault(
        "gemm/nvfp4.cuh", "mn % 128 / 32 * quarter", "0", "codes"
    ),
    "the next word of scales": Fault(
        "gemm/nvfp4.cuh", "k / kWordK * word", "0", "blocked scales"
    ),
    "scales behind the last group are read": Fault(
        "gemm/nvfp4.cuh",
        "clamp_to(num_k / kGroup - word * kWord, kWord)",
        "kWord",
        "padding",
    ),
    "tiles begin at the first scale": Fault(
        "gemm/nvfp4.cuh", "groups.at(first_row + row,", "groups.at(row,", "blocked scales"
    ),
    "bytes of 8 where there are 16": Fault(
        "gemm/nvfp4.cuh", "piece % 2 * 8;", "0;", "padding"
    ),
    "groups past the scale's rounding": Fault(
        PASSES, "1.0f / (kLargestCode * global)", "1.0f / (kLargestScale * global)",
        "quantised"
    ),
    "codes of the unrounded scale": Fault(
        PASSES, "0x1p-14f * reciprocal_approx(factor)", "0x1p-14f", "quantised"
    ),
    "NaN is not the group's": Fault(
        PASSES, "bits < kInfinityBits ? value_of_bits(bits) * of_codes : nan",
        "value_of_bits(bits) * of_codes", "not finite",
    ),
    "infinities are the largest": Fault(
        "rows/quantize_nvfp4.cuh",
        "if (largest < kInfinityBits) return largest;", "return largest;", "not finite"
    ),
    "codes beyond 6": Fault(
        "rows/quantize_nvfp4.cuh", "min_unsigned_pair(pair & 0x7fff7fffu, 0x0e000e00u)",
        "(pair & 0x7fff7fffu)",
        "saturated",
    ),
    "no share of blocks that left": Fault(
        PASSES, "for_each_batch<true>(block, ", "for_each_batch<true>(blockIdx.x, ",
        "quantised"
    ),
    "groups that a block took with it": Fault(
        PASSES, "is_own = block == blockIdx.x;", "is_own = true;", "quantised"
    ),
    "a block that does not wait for others": Fault(
        "platform/grid.cuh", "now = load_acquire(&barrier->state);", "break;", "quantised"
    ),
    "ties to odd": Fault(
        "rows/quantize_nvfp4.cuh", "1.5f * 0x1p22f", "1.5f * 0x1p21f", "quantised"
    ),
    "the last rows are not decoded": Fault(
        "gemm/dequantize_nvfp4.cuh", "if (at >= flat_rows) continue;\n            Bytes",
        "if (i > 0) continue;\n            Bytes",
        "decoded",
    ),
    "every batch decodes the first matrix": Fault(
        "gemm/dequantize_nvfp4.cuh", "from += p.batch.offset(kA, matrix);", "", "decoded"
    ),
    "one scale of all for both operands": Fault(
        "gemm/epilogue/broadcast.cuh", "rows[1] = scale_a ? scale_a[",
        "rows[1] = scale_b ? scale_b[", "scales of all"
    ),
    "only b's scale of all": Fault(
        "gemm/epilogue/store_tma.cuh", "values[i] * of_b * of_a", "values[i] * of_b",
        "scales of all"
    ),
    "the first matrix's scale for the batch": Fault(
        "gemm/epilogue/broadcast.cuh", "scale_a[batch.offset(kScaleA, tile.batch)] : 1.0f",
        "scale_a[0] : 1.0f", "scales of all",
    ),
    "alpha where one scale stands": Fault(
        "gemm/epilogue/broadcast.cuh", "kMatrixScale ? rows[0] : p.alpha", "p.alpha", "one scale"
    ),
    "only b's scale in alpha's place": Fault(
        "gemm/epilogue/broadcast.cuh", ": scale_a ? scale_a[batch.offset(kScaleA, tile.batch)]", "",
        "one scale",
    ),
    "the first matrix's scale in alpha's place": Fault(
        "gemm/epilogue/broadcast.cuh", "scale_a[batch.offset(kScaleA, tile.batch)] : p.alpha",
        "scale_a[0] : p.alpha", "one scale",
    ),
    "the other row's codes": Fault(
        "gemm/convert_nvfp4.cuh", "half * second_row * Stage::kRowBytes", "0", "nvfp4"
    ),
    "the same words of scales for ever": Fault(
        "gemm/convert_nvfp4.cuh", "fetch(word + kPrefetchedWords)", "fetch(0)", "nvfp4"
    ),
    "accumulators in units": Fault(
        "gemm/mainloop_portable.cuh", "sum *= kAccumulatorScale", "sum *= 1.0f", "codes"
    ),
    "accumulators in units, of few rows": Fault(
        "gemm/skinny.cuh", "total *= 1.0f / kScaledUnit<Compute>", "total *= 1.0f", "blocked scales"
    ),
    "accumulators in units, on Hopper": Fault(
        "gemm/mainloop_sm90_rs.cuh", "value *= Converter::kUnit", "value *= 1.0f", "nvfp4"
    ),
    "b2's scales in b1's order": Fault(
        "gemm/epilogue/gated.cuh", "work.row_scales.steps[1] = others.steps[0];", "", "nvfp4"
    ),
    "both products' columns are the first one's": Fault(
        "gemm/epilogue/gated_column.cuh", "i / 2 * 4 + i % 2", "i * 2", "nvfp4"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, object]]:
    yield "codes", DUAL, DualProblem(70, 40, 80, "float16", NVFP4)
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
        for copies in (1, 3):  # up to 32 rows are another kernel's
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


def _check_decoded() -> None:
    """NVFP4 operands of products on Hopper, batches of which some are broadcast."""
    if host.current().warp_size != 32:
        return
    problem = DualProblem(140, 136, 80, NVFP4, NVFP4, batch_a=(2, 1), batch_b=(3,))
    for seed in (1, 2):
        call = DUAL.inputs(problem, seed, np)
        references = DUAL.reference(*call.args, **call.kwargs)
        bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
        y = DUAL.run(
            *call.args, **call.kwargs, config=DecodeFirst(Sm90DualGemmConfig(128, 128, 64, 6))
        )
        assert check.compare((y,), references, bounds).ok


def _check_scales_of_all() -> None:
    """Of decoded operands; of a one for each matrix of the batch."""
    if host.current().warp_size != 32:
        return
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (3, 1, 64)).astype(np.float16)
    numbers = rng.choice((-2.0, 1.0, 3.0, 6.0), (72, 64))
    ones = np.ones((72, 4), "float8_e4m3fn")
    b = NvFp4(nvfp4.pack_e2m1(numbers), ones, global_scale=np.float32([0.5]))
    scale = np.float32([1, -2, 4]).reshape(3, 1, 1)
    config = DecodeFirst(Sm90GemmConfig(128, 128, 64, 3, PingPong(), Multicast(2)))
    expected = scale * (a.astype(np.float32) @ numbers.T) * 0.5
    for dtype in ("float32", "float16"):
        y = cupykern.scaled_mm(a, b, scale, out_dtype=dtype, config=config)
        assert (y == expected).all()


def _check_one_scale() -> None:
    """Of all weights, or of each matrix of the batch, in alpha's place, also with swap-AB."""
    if host.current().warp_size != 32:
        return
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (3, 1, 64)).astype(np.float16)
    numbers = rng.choice((-2.0, 1.0, 3.0, 6.0), (72, 64))
    codes, ones = nvfp4.pack_e2m1(numbers), np.ones((72, 4), "float8_e4m3fn")
    product = a.astype(np.float32) @ numbers.T
    scales = np.float32([1, -2, 4]).reshape(3, 1, 1)
    for config in (
        Sm90GemmConfig(128, 64, 64, 3), Sm90GemmConfig(64, 128, 64, 3, PingPong(), swap_ab=True)
    ):  # fmt: skip
        for scale, of_all in ((None, 0.5), (scales, 1.0)):
            array = np.float32([of_all]) if scale is None else of_all
            b = NvFp4(codes, ones, global_scale=array)
            y = cupykern.scaled_mm(a, b, scale, out_dtype="float16", config=DecodeFirst(config))
            assert (y == product * (of_all if scale is None else scale)).all()


def _check_nvfp4() -> None:
    """NVFP4 weights, one in plain and one in blocked order, decoded in registers on Hopper."""
    if host.current().warp_size != 32:
        return
    call = DUAL.inputs(DualProblem(70, 136, 544, NVFP4, NVFP4, out_dtype="float32"), 1, np)
    references = DUAL.reference(*call.args, **call.kwargs)
    bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
    y = DUAL.run(*call.args, **call.kwargs, config=Sm90MixedDualGemmConfig(64, 128, 128, 3))
    assert check.compare((y,), references, bounds).ok


def _check_saturated() -> None:
    """A group whose scale, a subnormal e4m3 number, is rounded down by a third."""
    x = np.full((1, 32), 2688.0, np.float32)
    x[0, 16:] = 1.49 * 2.0**-9 * 6
    y = cupykern.quantize_nvfp4(x).dequantize()
    assert (y[0, 16:] == 2.0**-9 * 6).all()


CHECKS = {
    "global scales of one": lambda: check_global_scales_of_one(np),
    "decoded": _check_decoded,
    "scales of all": _check_scales_of_all,
    "one scale": _check_one_scale,
    "nvfp4": _check_nvfp4,
    "saturated": _check_saturated,
    "blocked scales": _check_blocked_scales,
    "padding": _check_padding,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
