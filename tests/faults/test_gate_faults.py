"""Planted faults in the gates of formulas, each of which a check must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from planted import Fault, fault_tests
from products import DUAL, compare

from cupykern import check, dtypes
from cupykern.gemm.sm90_dual_config import Sm90DualGemmConfig, Sm90MixedDualGemmConfig
from cupykern.gemm.sm90_policies import PingPong
from cupykern.ops.problems.dual_gemm import GATES, RESULTS, DualProblem
from cupykern.ops.problems.products import NVFP4
from cupykern.targets import host

PORTABLE, SM90 = "dual_gemm_expression.cu", "gemm/epilogue/gate_expression.cuh"
RUNS, TILE = "expression/apply.cuh", "gemm/dual_tile.cuh"
GATED, SKINNY = "gemm/epilogue/gated.cuh", "gemm/skinny_dual.cuh"
FAULTS = {
    "the first product for both": Fault(
        RUNS, "Expression::of(operands, values[i], others[i]",
        "Expression::of(operands, values[i], values[i]", "portable",
    ),
    "the products swapped": Fault(
        RUNS, "Expression::of(operands, values[i], others[i]",
        "Expression::of(operands, others[i], values[i]", "portable",
    ),
    "the first one's scale for both": Fault(
        TILE, "second = epilogue(1, x.scale_b2, kScaleB2)",
        "second = epilogue(1, x.scale_b1, kScaleB)", "scales",
    ),
    "one column for a run": Fault(
        RUNS, "others[i], row, at, operands.matrix", "others[i], row, col, operands.matrix",
        "portable",
    ),
    "the first matrix's operands for all": Fault(
        PORTABLE, "params.tile.batch, matrix)", "params.tile.batch, 0)", "portable",
    ),
    "hopper: the first product for both": Fault(
        SM90, "Expression::of(operands, values[i], others[i]",
        "Expression::of(operands, values[i], values[i]", "hopper",
    ),
    "hopper: the first matrix's operands for all": Fault(
        SM90, "of_matrix(params.batch, tile.batch)", "of_matrix(params.batch, 0)", "hopper"
    ),
    "hopper: the first warp's rows for all": Fault(
        SM90, "element.row < last_row ? element.row : last_row", "element.row % 16", "hopper"
    ),
    "hopper: silu in place of the formula": Fault(
        SM90, "silu_in_fp32() const { return false; }", "silu_in_fp32() const { return true; }",
        "hopper",
    ),
    "hopper: a fragment's second row is its first": Fault(
        GATED, "Element{first_row + i / 2 % 2 * 8,", "Element{first_row,", "hopper"
    ),
    "skinny: the first block's columns for all": Fault(
        SKINNY, "run[0].row, run[0].col, run[0].count", "run[0].row, run[0].tile_col, run[0].count",
        "skinny",
    ),
    "skinny: the first matrix of the whole batch": Fault(
        "dual_gemm_skinny_expression.cu", "params.expression.first_matrix};",
        "params.expression.first_matrix + 1};", "skinny",
    ),
    "skinny: the first one's scale for both": Fault(
        "dual_gemm_skinny_expression.cu", "scale_b2, groups_b1, groups_b2}",
        "scale_b1, groups_b1, groups_b2}", "skinny",
    ),
    "skinny: the first one's NVFP4 scales for both": Fault(
        "dual_gemm_skinny_expression.cu", "scale_b2, groups_b1, groups_b2}",
        "scale_b2, groups_b1, groups_b1}", "skinny",
    ),
    "NVFP4: one row for a thread": Fault(
        "gemm/epilogue/gated_column.cuh", "Element{row_of(row, i), col, true}",
        "Element{row_of(row, 0), col, true}", "nvfp4"
    ),
    "results: the first one for all": Fault(
        SM90, "from_float<T>(results[which])", "from_float<T>(results[0])", "results"
    ),
    "results: rows at columns' steps": Fault(
        SM90, "row * params.i_strides[k] + col", "row * params.j_strides[k] + col", "results"
    ),
    "results: beyond the last row": Fault(
        SM90, "element.inside && row == element.row &&", "element.inside &&", "results"
    ),
    "narrow: the second 64 rows are the first": Fault(
        GATED, "params.out, row + 64 * m, first_col", "params.out, row, first_col", "narrow"
    ),
    "narrow: every slice in the first one's place": Fault(
        GATED, "params.out, row + 64 * m, first_col", "params.out, row + 64 * m, col", "narrow"
    ),
    "narrow: columns of mixed input in 16 bits": Fault(
        "gemm/epilogue/gated_column.cuh", "write_as<typename Gate::Narrow>", "write_as<void>",
        "narrow"
    ),
}  # fmt: skip
# Every operand, both indices and both products.
WHERE = GATES[2]


def problems():
    yield "portable", DUAL, DualProblem(9, 41, 24, batch_a=(2, 1), batch_b=(3,), epilogue=WHERE)
    yield "portable", DUAL, DualProblem(70, 75, 72, epilogue=GATES[0])
    yield (
        "scales", DUAL, DualProblem(70, 70, 64, "float16", "int8", scales="rows", epilogue=WHERE),
    )  # fmt: skip


def guarded(config: Any, problem: DualProblem) -> None:
    """Within the bound, and nothing is written beyond the result."""
    if host.current().warp_size != 32:
        return  # Hopper's mainloops have no others
    call = DUAL.inputs(replace(problem, epilogue=WHERE, out_dtype="float32"), 1, np)
    batch = np.broadcast_shapes(problem.batch_a, problem.batch_b)
    out = check.GuardedArray(np, (*batch, problem.m, problem.n), dtypes.float32)
    y = DUAL.run(*call.args, **call.kwargs, config=config, out=out.array)
    assert compare(DUAL, *call.args, **call.kwargs, outputs=y).ok
    try:
        out.check()
    except check.Violation as error:
        raise AssertionError from error


def check_hopper() -> None:
    config = Sm90DualGemmConfig(128, 128, 64, 6)
    guarded(config, DualProblem(136, 75, 48, batch_a=(2,)))
    call = DUAL.inputs(DualProblem(136, 136, 48, epilogue=WHERE), 1, np)  # by TMA
    if host.current().warp_size == 32:
        assert compare(DUAL, *call.args, **call.kwargs, config=config).ok


def check_skinny() -> None:
    """Of either warp size."""
    for problem in (
        DualProblem(9, 150, 208),
        DualProblem(3, 40, 272, "bfloat16", "int8", scales="rows"),
        DualProblem(5, 40, 192, "float16", NVFP4),
    ):
        call = DUAL.inputs(replace(problem, epilogue=WHERE, out_dtype="float32"), 1, np)
        assert compare(DUAL, *call.args, **call.kwargs).ok


def check_results() -> None:
    if host.current().warp_size == 32:
        problem = DualProblem(70, 75, 48, epilogue=RESULTS, out_dtype="float32")
        call = DUAL.inputs(problem, 1, np)
        y = DUAL.run(*call.args, **call.kwargs, config=Sm90DualGemmConfig(128, 128, 64, 6))
        references = DUAL.reference(*call.args, **call.kwargs)
        bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
        assert check.compare(y, references, bounds).ok


def check_narrow() -> None:
    if host.current().warp_size != 32:
        return
    for config, problem in (
        (Sm90DualGemmConfig(128, 128, 64, 4, PingPong()), DualProblem(200, 75, 136)),
        (Sm90MixedDualGemmConfig(64, 128, 128, 4), DualProblem(70, 75, 96, NVFP4, NVFP4)),
    ):
        narrow = replace(problem, epilogue=WHERE, out_dtype="float8_e4m3fn")
        call = DUAL.inputs(narrow, 1, np)
        assert compare(DUAL, *call.args, **call.kwargs, config=config).ok


def check_nvfp4() -> None:
    guarded(Sm90MixedDualGemmConfig(64, 128, 128, 4), DualProblem(70, 75, 96, NVFP4, NVFP4))


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    problems,
    {
        "hopper": check_hopper,
        "skinny": check_skinny,
        "nvfp4": check_nvfp4,
        "results": check_results,
        "narrow": check_narrow,
    },
)
