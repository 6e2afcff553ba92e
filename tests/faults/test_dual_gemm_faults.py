"""Planted faults in dual_gemm_silu, each of which a check must catch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from dual_gemm_checks import check_fp16_policy
from planted import Fault, fault_tests
from products import DUAL

import cupykern
from cupykern import check
from cupykern.gemm.sm90_dual_config import (
    Sm90DualGemmConfig,
    Sm90Fp8DualGemmConfig,
    Sm90MixedDualGemmConfig,
)
from cupykern.gemm.sm90_policies import Cooperative, SplitK
from cupykern.op import Call
from cupykern.ops.problems.dual_gemm import DualProblem
from cupykern.ops.problems.products import NVFP4
from cupykern.targets import host

GATED, REDUCE = "gemm/epilogue/gated.cuh", "gemm/reduce.cuh"
FP8, ARGUMENTS = "gemm/mainloop_sm90_ss_fp8.cuh", "gemm/epilogue/gate_silu.cuh"
LOADER, SCHEDULER = "gemm/load_pair.cuh", "gemm/scheduler.cuh"
SKINNY, STAGES = "gemm/skinny_dual.cuh", "gemm/skinny.cuh"
CONVERT, COLUMN = "gemm/convert_8bit.cuh", "gemm/epilogue/gated_column.cuh"
RS = "gemm/mainloop_sm90_rs.cuh"

FAULTS = {
    "b2 is b1": Fault(
        "gemm/tile.cuh", "element_address(b[i].data,", "element_address(b[0].data,",
        "two products"
    ),
    "b1 and b2 swapped": Fault(
        "gemm/epilogue/gate.cuh", "gate_all(values, others, policy)",
        "gate_all(others, values, policy), values[0] = others[0]",
        "two products",
    ),
    "the second product's fragments are the first one's": Fault(
        "gemm/tile.cuh", "acc[m][product * kColFragments + n]", "acc[m][n]", "two products"
    ),
    "the second product's columns beside the first one's": Fault(
        "gemm/mainloop_portable.cuh", "fragment % kColFragments) * 16; }", "fragment) * 16; }",
        "two products"
    ),
    "silu's exponential with the other sign": Fault(
        "common/math.cuh", "exp2_approx(-kLog2E * x)", "exp2_approx(kLog2E * x)", "two products"
    ),
    "the first one's scale for both": Fault(
        "gemm/dual_tile.cuh", "second = epilogue(1, x.scale_b2, kScaleB2)",
        "second = epilogue(1, x.scale_b1, kScaleB)",
        "scales",
    ),
    "the blocks' scales of b1 for both": Fault(
        "gemm/mainloop_portable.cuh", "b[n / kColFragments];\n", "b[0];\n", "scales"
    ),
    "the batch's offset of b2": Fault(
        "gemm/tile.cuh", "kBs[] = {kB, kB2}", "kBs[] = {kB, kA}", "batches"
    ),
    "policies mixed up": Fault(
        "gemm/epilogue/gate.cuh",
        "{ kAllFp32, kHybrid, kAllFp16 }", "{ kHybrid, kAllFp32, kAllFp16 }", "policies"
    ),
    "the power is not rounded": Fault(
        "gemm/epilogue/gate.cuh",
        "const float power = round_to_half(exp2_approx(round_to_half(-kLog2E * x_half)));",
        "const float power = exp2_approx(round_to_half(-kLog2E * x_half));",
        "fp16 policy",
    ),
    "the exponent is not rounded": Fault(
        "gemm/epilogue/gate.cuh",
        "round_to_half(-kLog2E * x_half)",
        "-kLog2E * x_half",
        "fp16 policy",
    ),
    "hybrid rounds nothing": Fault(
        "gemm/epilogue/gate.cuh",
        "round_to_half(round_to_half(activate(x, kSilu)) * round_to_half(y))",
        "activate(x, kSilu) * y",
        "policies",
    ),
    "partial accumulators of one product alone": Fault(
        "gemm/tile.cuh", "kTileSize = kProducts * kTileM * kTileN",
        "kTileSize = kTileM * kTileN",
        "splits",
    ),
    "one scale of all is forgotten": Fault(
        "gemm/epilogue/gated_scales.cuh", "factors[i] = b * a * e.params.alpha;",
        "factors[i] = e.params.alpha;", "hopper"
    ),
    "one factor where there are many": Fault(
        "gemm/epilogue/gated_scales.cuh", "return fits;", "return true;", "hopper"
    ),
    "b2's stage is b1's": Fault(
        LOADER, "load_b(b + kSecond, arguments.b2_map", "load_b(b + kSecond, arguments.b1_map",
        "hopper",
    ),
    "b2 before b1": Fault(
        LOADER, "load_b(b, arguments.b1_map, arguments.b1_edge",
        "load_b(b, arguments.b2_map, arguments.b2_edge", "hopper"
    ),
    "the second product's accumulators are the first one's": Fault(
        GATED, "float(accumulator[m][kCols / 4 + at]) * factors[1]",
        "float(accumulator[m][at]) * factors[1]",
        "hopper",
    ),
    "tiles as wide as both products": Fault(
        SCHEDULER, "kTileN = kColumns * (kSwapAB", "kTileN = Mainloop::kTileN * (kSwapAB", "hopper",
    ),
    "the first one's scales for both products": Fault(
        GATED, "GatedScales::col(second, at)", "GatedScales::col(first, at)", "hopper"
    ),
    "the blocks' scales of b1 for both on Hopper": Fault(
        FP8, "[at] + product * Base::kTileM, row)", "[at], row)", "hopper"
    ),
    "the blocks' scales of b1 multiply a's for both": Fault(
        FP8, "of_a[i][of_k] * of_b[p][of_k]", "of_a[i][of_k] * of_b[0][of_k]", "hopper"
    ),
    "the rows' scales of blocks after the first ones left out": Fault(
        FP8, "rows < kRowsOfLane; rows += kInFlight", "rows < kInFlight; rows += kInFlight",
        "hopper"
    ),
    "b2's scales of blocks by b1's strides": Fault(
        ARGUMENTS, "block * b2.col + first_k_tile * b2.row", "first_k_tile * b2.row", "hopper"
    ),
    "a block's scales twice": Fault(
        GATED, "kByBlock ? nullptr : arguments.scale_a", "arguments.scale_a", "hopper"
    ),
    "a stage of one product alone is waited for": Fault(
        LOADER, "2 * StageB::bytes(b_left)", "StageB::bytes(b_left)", "hopper"
    ),
    "the output's last column twice": Fault(
        GATED, "at_col + 1 < params.n ? 2 : 1, pair", "2, pair", "hopper"
    ),
    "a cluster's blocks finish the same columns": Fault(
        GATED, "(kSplitK ? cluster_rank() * kOwnCols : 0)", "0", "split"
    ),
    "the other block's part of k is left out": Fault(
        REDUCE, "bit_cast<ElementAccumulator>(four.words[j]);", "ElementAccumulator(0);", "split"
    ),
    "the other block's columns of the first product for both": Fault(
        REDUCE, "i / kOfProduct * (kThread / kProducts) + rank", "rank", "split"
    ),
    "stages are overwritten while they are read": Fault(
        REDUCE, "else sync_cluster();                       // and all stages have been read", "",
        "split"
    ),
    "the other blocks' accumulators are read before they are there": Fault(
        REDUCE, "full.wait(0);", "", "split"
    ),
    "too few bytes of accumulators awaited": Fault(
        REDUCE, "(kClusterSize - 1) * int(sizeof(received[0][0]))",
        "(kClusterSize - 1) * int(sizeof(received[0][0])) - 16", "split"
    ),
    "every block has all of k": Fault(
        SCHEDULER, "kSplitK ? rank * all / kClusterSize : 0;", "0;", "split"
    ),
    "mixed: both products are of b1": Fault(
        CONVERT, "i % 2 * kSecondRow * Stage::kRowBytes", "0", "mixed"
    ),
    "mixed: rows of one matrix, as of a product alone": Fault(
        CONVERT, "kSecondRow = kPair ? Mainloop::kRows / 2 : 8", "kSecondRow = 8", "mixed"
    ),
    "mixed: 16 rows of either matrix": Fault(CONVERT, "kPair ? row / 2 : row", "row", "mixed"),
    "mixed: the first one's column scales for both": Fault(
        GATED, "scales[i][col *", "scales[0][col *", "mixed"
    ),
    "mixed: every matrix has the first one's column scales": Fault(
        GATED, "scales[1] += offset(tile, kScaleB2)", "scales[1] += 0", "mixed"
    ),
    "mixed: every matrix has the first one's row scales": Fault(
        GATED, "scale_a = offset(tile, kScaleA)", "scale_a = 0", "mixed"
    ),
    "mixed: the first row's scale for a column": Fault(
        COLUMN, "GatedScales::row(out, row_of(row, i))", "GatedScales::row(out, row_of(row, 0))",
        "mixed"
    ),
    "mixed: boxes without their swizzle": Fault(
        COLUMN, "place ^ (place >> 3 & (kBoxRowBytes - 16))", "place", "mixed"
    ),
    "mixed: warps in each other's columns of a box": Fault(
        COLUMN, "thread / 32 * 16", "thread / 64 * 16", "mixed"
    ),
    "mixed: every box at the tile's first row": Fault(
        COLUMN, "{col, row, batch}", "{col, row % kCols, batch}", "mixed"
    ),
    "mixed: a box is stored before it is full": Fault(
        COLUMN, "fence_async_proxy(); named_barrier(barrier, 128);", "fence_async_proxy();",
        "mixed"
    ),
    "mixed: one box in place of two": Fault(
        COLUMN, "(count * kBoxes + box) % 2 * kBoxBytes", "0", "mixed"
    ),
    "mixed: the blocks' scales of b1 for both": Fault(
        RS, "shuffle(of_b[half % kProducts]", "shuffle(of_b[0]", "mixed blocks"
    ),
    "mixed: the scales of the tile's first block of columns for all": Fault(
        GATED, "of_columns(tile, work.row / 2, arguments.n())",
        "of_columns(tile, 0, arguments.n())", "mixed blocks"
    ),
    "mixed: the epilogue applies the first block's scale of a again": Fault(
        GATED, "kByBlock ? nullptr : arguments.scale_a, nullptr", "arguments.scale_a, nullptr",
        "mixed blocks"
    ),
    "mixed: rows past the last one": Fault(
        COLUMN, "if (row_of(row, i) < out.params.m) out", "out", "mixed"
    ),
    "skinny: the first product's columns for both": Fault(
        SKINNY, "j * kTileN + run[0].tile_col", "run[0].tile_col", "skinny"
    ),
    "skinny: the second one's scales are the first one's": Fault(
        SKINNY, "epilogue(1, nullptr, x.scale_b2)", "epilogue(1, nullptr, x.scale_b1)", "skinny"
    ),
    "skinny: the second matrix's rows are the first one's": Fault(
        SKINNY, "params.b_rows[i], scales", "params.b_rows[0], scales", "skinny"
    ),
    "skinny: both matrices begin where the first one's rows do": Fault(
        SKINNY, "own_columns(b, params.b_rows[i]", "own_columns(b, params.b_rows[0]", "skinny"
    ),
    "skinny: the policy of FP32 for all": Fault(
        "dual_gemm_skinny.cu", "SiluRuns{params.policy}", "SiluRuns{kAllFp32}", "policies"
    ),
    "skinny: NVFP4 scales of the first matrix for both": Fault(
        SKINNY, "copier(x.b2, 1, x.groups_b2)", "copier(x.b2, 1, x.groups_b1)", "skinny"
    ),
    "skinny: both tiles in the first one's place": Fault(
        STAGES, "start(stage.b[i], x.cols, to_load)", "start(stage.b[0], x.cols, to_load)", "skinny"
    ),
    "skinny: fragments of the first matrix alone": Fault(
        STAGES, "stage.b[n / kMatrixFragments]", "stage.b[0]", "skinny"
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


def _check_policies() -> None:
    """One product each, between FP16's numbers; of K-major b1 and b2 by a skinny GEMM."""
    for order in "CF":
        _check_policies_of(order)


def _check_policies_of(order: Literal["C", "F"]) -> None:
    x = np.linspace(-10, 10, 201)[None].astype(np.float16)
    b1 = np.concatenate([x, np.zeros((7, 201), np.float16)]).copy(order)
    b2 = np.full((8, 201), 1 + 2.0**-10, np.float16, order)
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
    from cupykern.ops.problems.dual_gemm import task_of

    problem = DualProblem(20, 70, 1100, scales="none", out_dtype="float32")
    call = DUAL.inputs(problem, 1, np)
    config = gemm.choose_config(task_of(problem), "host")
    first, second = (
        DUAL.run(*call.args, config=replace(config, splits=splits)) for splits in (1, 4)
    )
    np.testing.assert_allclose(first, second, rtol=1e-2, atol=1e-3)


def _check_hopper() -> None:
    if host.current().warp_size != 32:
        return
    _check_configs(
        (Sm90DualGemmConfig(128, 128, 64, 6),),
        DualProblem(136, 1100, 48, "float16", "float16", scales="numbers"),
        DualProblem(20, 75, 144, "float16", "float16", out_dtype="float32"),
    )
    _check_configs(
        (Sm90Fp8DualGemmConfig(128, 128, 6),),
        DualProblem(70, 80, 272, "float8_e4m3fn", "float8_e4m3fn", scales="rows"),
        DualProblem(70, 80, 272, "float8_e4m3fn", "float8_e4m3fn", scales="tensor"),
    )
    _check_configs(
        (Sm90Fp8DualGemmConfig(128, 128, 5), Sm90Fp8DualGemmConfig(128, 256, 3)),
        DualProblem(136, 272, 400, "float8_e4m3fn", "float8_e4m3fn", scales="blocks"),
    )


def _check_split() -> None:
    if host.current().warp_size == 32:
        config = Sm90DualGemmConfig(128, 128, 64, 3, cluster=SplitK(2))
        _check_configs(
            (config,), DualProblem(136, 144, 208), DualProblem(20, 70, 144, scales="tensor")
        )
        one = Cooperative(1)
        _check_configs(
            (
                Sm90Fp8DualGemmConfig(64, 128, 4, one),
                Sm90Fp8DualGemmConfig(64, 64, 4, one, SplitK(2)),
                Sm90Fp8DualGemmConfig(64, 128, 4, one, SplitK(4)),
            ),
            DualProblem(70, 80, 528, "float8_e4m3fn", "float8_e4m3fn", scales="rows"),
        )


def _check_mixed() -> None:
    """Stored by TMA, of several tiles a block with an odd number of boxes too; and by threads."""
    if host.current().warp_size == 32:
        for n, batch, config in (
            (200, (2,), Sm90MixedDualGemmConfig(64, 128, 128, 3)),
            (456, (), Sm90MixedDualGemmConfig(48, 192, 64, 3, Cooperative(3))),
            (75, (), Sm90MixedDualGemmConfig(64, 128, 128, 3)),
        ):
            problem = DualProblem(70, n, 144, "float16", "int8", batch_a=batch, scales="rows")
            _check_configs((config,), problem)
        _check_batch_of_weights()


def _check_mixed_blocks() -> None:
    """Of three warpgroups, whose columns are of two blocks of 128."""
    if host.current().warp_size == 32:
        config = Sm90MixedDualGemmConfig(48, 192, 128, 3, Cooperative(3))
        problem = DualProblem(20, 264, 400, "bfloat16", "float8_e4m3fn", scales="blocks")
        _check_configs((config,), problem, replace(problem, scales="blocks of b"))


def _check_batch_of_weights() -> None:
    """Each matrix has column scales of its own."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal((20, 64)).astype(np.float16)
    b1, b2 = (rng.integers(-99, 99, (2, 40, 64), np.int8).swapaxes(1, 2) for _ in "12")
    scales = {
        name: (rng.uniform(0.5, 1.5, (2, 1, 40)) / 400).astype(np.float32)
        for name in ("scale_b1", "scale_b2")
    }
    _check_call(Call((a, b1, b2), scales), Sm90MixedDualGemmConfig(64, 128, 128, 3))


def _check_skinny() -> None:
    """Matrices of different strides; columns beyond the last block's, scales of columns, NVFP4."""
    for problem in (
        DualProblem(3, 40, 272, "bfloat16", "int8", scales="rows", out_dtype="float32"),
        DualProblem(5, 40, 192, "float16", NVFP4, out_dtype="float32"),
    ):
        _check_configs((None,), problem)
    a, b1, b2 = DUAL.inputs(DualProblem(9, 75, 1104, out_dtype="float32"), 1, np).args
    apart = np.full((75, 1104 + 24), np.nan, np.float16)
    apart[:, :1104] = b2.T
    _check_call(Call((a, b1, apart[:, :1104].T), {"out_dtype": "float32"}))


def _check_configs(configs: tuple[Any, ...], *problems: DualProblem) -> None:
    for problem, config in itertools.product(problems, configs):
        _check_call(DUAL.inputs(problem, 1, np), config)


def _check_call(call: Call, config: Any = None) -> None:
    references = DUAL.reference(*call.args, **call.kwargs)
    bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
    guarded = Call(call.args, {**call.kwargs, "config": config})
    try:
        (y,) = check.guarded_run(DUAL, guarded, DUAL.run(*call.args, **call.kwargs))
    except check.Violation as violation:
        raise AssertionError(str(violation)) from None
    assert check.compare((y,), references, bounds).ok


CHECKS = {
    "hopper": _check_hopper,
    "split": _check_split,
    "mixed": _check_mixed,
    "mixed blocks": _check_mixed_blocks,
    "skinny": _check_skinny,
    "policies": _check_policies,
    "fp16 policy": lambda: check_fp16_policy(host.current()),
    "splits": _check_splits,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
