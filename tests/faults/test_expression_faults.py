"""Planted faults in the kernels' part of formulas, each of which a check must catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from expressions import Computed
from gemm_hopper_problems import compute
from planted import Fault, fault_tests
from products import MATMUL, compare

from cupykern import check, dtypes
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import Multicast, PingPong, SlicedK
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.problems.products import FORMULAS, MIXED, RESULTS, MatmulProblem
from cupykern.targets import host

OPERANDS, MATH = "expression/apply.cuh", "expression/math.cuh"
QUAD = "gemm/epilogue/store_quad.cuh"
FRAGMENT = "gemm/epilogue/operand_fragment.cuh"
SM90, REDUCE = "gemm/epilogue/expression.cuh", "reduce_split_k_expression.cu"
FAULTS = {
    "every matrix has the first one's operands": Fault(
        OPERANDS, "found.offsets[k] +=", "found.offsets[k] += 0 *", "batch"
    ),
    "a batch's dims in the wrong order": Fault(
        OPERANDS, "rest - next * size) * params", "next) * params", "batch"
    ),
    "each launch counts its matrices from 0": Fault(
        OPERANDS, "params.first_matrix + index", "index", "many dims"
    ),
    "one column for a run": Fault(OPERANDS, "col + (i < count ? i : count - 1)", "col", "batch"),
    "the formula of unscaled accumulators": Fault(
        OPERANDS, "Expression::of(operands, values[i], row", "Expression::of(operands, acc[i], row",
        "batch",
    ),
    "rows for columns where A and B are swapped": Fault(
        SM90,
        "const int i = kSwapAB ? at_col : at_row, j = kSwapAB ? at_row : at_col;",
        "const int i = at_row, j = at_col;",
        "few rows",
    ),
    "operands of rows for columns where A and B are swapped": Fault(
        FRAGMENT,
        "const int i = kSwapAB ? at_col : at_row, j = kSwapAB ? at_row : at_col;",
        "const int i = at_row, j = at_col;",
        "few rows",
    ),
    "a pair beyond the row's end": Fault(SM90, "rest > 1 ? 2 : 1", "2", "odd columns"),
    "a pair's second row beyond the end": Fault(
        SM90, "if (i + 1 < params.m) first", "first", "few rows"
    ),
    "the first warp's rows for all": Fault(
        FRAGMENT, "(i < m ? i : m - 1) * by_i", "(i % 16) * by_i", "odd columns"
    ),
    "both columns of a pair are the first": Fault(
        FRAGMENT, "e = kAlongCols ? v % 2", "e = kAlongCols ? 0", "odd columns"
    ),
    "pairs of rows that are not aligned": Fault(
        FRAGMENT, "if (aligned &&", "if (", "odd columns"
    ),
    "a slice beyond the row's end by pairs": Fault(
        FRAGMENT, "&& col + Tile::kSlice <= n", "", "even columns"
    ),
    "hopper: a box is read before it is loaded": Fault(
        SM90, "if (of_chunk == 0) consumer.residual.wait(count, chunk);", "", "loaded"
    ),
    "hopper: every box is the first": Fault(
        SM90, "consumer.residual.box(count, chunk)", "consumer.residual.box(count, 0)", "loaded"
    ),
    "hopper: both slices of a box are the first": Fault(
        SM90, "of_chunk * Tile::kSlice, words);", "0, words);", "loaded"
    ),
    "hopper: boxes of one column": Fault(
        SM90, "follow(count, chunk, work.first_row", "follow(count, chunk & 2, work.first_row",
        "loaded",
    ),
    "this slice's operands for a later one": Fault(
        SM90, "row_of(next), col_of(next)", "row_of(next), col_of(i)", "even columns"
    ),
    "partial sums of the first split": Fault(
        REDUCE, "(split * num_runs + run)", "(run)", "splits"
    ),
    "the formula of every matrix for the first": Fault(
        REDUCE, "run - index * matrix_runs", "run", "fp32"
    ),
    "every result is the first": Fault(
        OPERANDS, "first, step, count, results[which]", "first, step, count, results[0]", "results"
    ),
    "a result's rows at its columns' steps": Fault(
        OPERANDS, "row * operands.params.i_strides[k] + col", "row * step + col", "results"
    ),
    "the results of every matrix in the first": Fault(
        OPERANDS, "const_cast<void*>(arrays[k])) + offsets[k]", "const_cast<void*>(arrays[k]))",
        "results",
    ),
    "hopper: every result is the first": Fault(
        SM90, "strides, row, col, results[which]", "strides, row, col, results[0]", "hopper results"
    ),
    "hopper: a result by the other's rows": Fault(
        SM90, "strides{found.params.i_strides[k],", "strides{found.params.i_strides[0],",
        "hopper results",
    ),
    "a first result of 8 bits in the 16-bit format": Fault(
        OPERANDS, "matrix.template write_as<typename Expression::Narrow>(",
        "matrix.template write_as<void>(", "narrow results",
    ),
    "NaN of int8 saturates": Fault(
        "platform/common.cuh", "if (!(x == x)) return 0;", "if (!(x == x)) return 127;",
        "narrow NaN",
    ),
    "int8 wraps": Fault(
        "platform/common.cuh", "x > 127.0f ? 127.0f : x", "x > 1e9f ? 127.0f : x", "narrow NaN"
    ),
    "hopper: a quad's rows swapped": Fault(
        QUAD, "lane / 2 % 2 * 8, j", "(1 - lane / 2 % 2) * 8, j", "hopper narrow"
    ),
    "hopper: pairs of odd lanes before those of even ones": Fault(
        QUAD, "pick_bytes(from_even, from_odd, 0x5410)", "pick_bytes(from_odd, from_even, 0x5410)",
        "hopper narrow",
    ),
    "hopper: both groups of a run are the first": Fault(
        QUAD, "pair(g + kGroups, 0) << 16", "pair(g, 0) << 16", "hopper narrow"
    ),
    "hopper: a whole run beyond the row's end": Fault(
        QUAD, "j + kValues > params.n ||", "", "hopper narrow ends"
    ),
    "hopper: 16 bytes at a multiple of 8": Fault(
        QUAD, "address % kValues == 0", "true", "hopper narrow ends"
    ),
    "NaN is less than anything": Fault(MATH, "a > b || a != a ? a : b", "a > b ? a : b", "special"),
    "sines of the wrong half": Fault(MATH, "(q.k + 1) & 2", "q.k & 2", "functions"),
    "tanh of the wrong sign": Fault(MATH, "power), x)", "power), 1.0f)", "functions"),
    "remainders as in C": Fault(MATH, "? rest + b : rest", "? rest : rest", "functions"),
    "truncation for floor": Fault(
        MATH, "whole > x ? whole - 1.0f", "whole > x ? whole", "functions"
    ),
    "a square root without its last step": Fault(
        MATH, "const float root = multiply_add(0.5f * r, multiply_add(-y, y, scaled), y)",
        "const float root = y * 1.0000005f", "functions",
    ),
}  # fmt: skip


def problems():
    yield (
        "batch",
        MATMUL,
        MatmulProblem(9, 41, 24, batch_a=(2, 1), batch_b=(3,), alpha=-3.7, epilogue=FORMULAS[0]),
    )
    yield "fp32", MATMUL, MatmulProblem(9, 41, 24, "float32", batch_a=(3,), epilogue=FORMULAS[1])


def check_results() -> None:
    problem = MatmulProblem(9, 41, 24, batch_a=(3,), epilogue=RESULTS)
    check_several(problem)


def check_hopper_results() -> None:
    if host.current().warp_size == 32:
        problem = MatmulProblem(70, 75, 136, layout_b="F", epilogue=RESULTS)
        check_several(problem, config=Sm90GemmConfig(128, 128, 64, 3))


def check_several(problem: MatmulProblem, **options) -> None:
    call = MATMUL.inputs(problem, 1, np)
    results = MATMUL.run(*call.args, **call.kwargs, **options)
    references = MATMUL.reference(*call.args, **call.kwargs)
    bounds = MATMUL.bound(*call.args, **call.kwargs, reference=references)
    assert check.compare(results, references, bounds).ok


def check_narrow_results() -> None:
    check_several(MatmulProblem(9, 41, 24, batch_a=(3,), epilogue=RESULTS, out_dtype=MIXED[0]))


def check_narrow_nan() -> None:
    a = np.float32([[np.nan], [np.inf], [-np.inf], [1e6], [-1e6], [3]])
    y = MATMUL.run(a, np.ones((1, 5), np.float32), epilogue="acc", out_dtype="int8")
    assert (y == np.int8([[0], [127], [-128], [127], [-128], [3]])).all()


def check_hopper_narrow() -> None:
    if host.current().warp_size == 32:
        problem = MatmulProblem(70, 75, 136, layout_b="F", epilogue=RESULTS, out_dtype=MIXED[0])
        check_several(problem, config=Sm90GemmConfig(128, 128, 64, 3))


def check_hopper_narrow_ends() -> None:
    if host.current().warp_size != 32:
        return
    call = MATMUL.inputs(MatmulProblem(70, 75, 136, layout_b="F"), 1, np)
    frame = np.full((72, 168), 77, np.int8)
    options = {"epilogue": "acc", "out_dtype": "int8", "config": Sm90GemmConfig(128, 128, 64, 3)}
    wanted = MATMUL.run(*call.args, **options)
    for offset in (16, 8, 3):
        out = frame[1:71, offset : offset + 75]
        MATMUL.run(*call.args, **options, out=out)
        assert (out == wanted).all()
        out[:] = 77
        assert (frame == 77).all()


def check_many_dims() -> None:
    a = np.ones((4, 4, 4, 4, 4, 3, 8), np.float16)[::2, ::2, ::2, ::2, ::2]
    b = np.ones((8, 5), np.float16)
    assert compare(MATMUL, a, b, epilogue="acc + b").ok


def check_few_rows() -> None:
    if host.current().warp_size != 32:
        return  # Hopper's mainloops have no others
    config = Sm90GemmConfig(32, 64, 64, 4, SlicedK(), Multicast(2), swap_ab=True)
    problem = MatmulProblem(20, 137, 136, layout_b="F", epilogue=FORMULAS[0])
    compute(host.current(), problem, config)
    compute(host.current(), replace(problem, epilogue=FORMULAS[1]), config)
    guarded(MatmulProblem(19, 137, 136, layout_b="F", epilogue=FORMULAS[0]), config)


def check_odd_columns() -> None:
    if host.current().warp_size == 32:
        guarded(
            MatmulProblem(70, 137, 136, layout_b="F", epilogue=FORMULAS[0]),
            Sm90GemmConfig(128, 128, 64, 3),
        )


def check_even_columns() -> None:
    if host.current().warp_size == 32:
        guarded(
            MatmulProblem(70, 136, 136, layout_b="F", epilogue=FORMULAS[0]),
            Sm90GemmConfig(128, 128, 64, 3),
        )


def check_loaded() -> None:
    if host.current().warp_size != 32:
        return
    config = Sm90GemmConfig(128, 128, 64, 3, PingPong())
    call = MATMUL.inputs(MatmulProblem(200, 136, 136, layout_b="F"), 1, np)
    r = MATMUL.inputs(MatmulProblem(200, 8, 136), 2, np).args[0]  # 200 x 136
    for schedule in ("fifo", "lifo"):
        with host.use(schedule=schedule):
            kwargs = {"epilogue": "acc - r", "operands": {"r": r}, "config": config}
            assert compare(MATMUL, *call.args, **kwargs).ok


def guarded(problem: MatmulProblem, config: Sm90GemmConfig) -> None:
    """Within the bound, and nothing is written beyond the result."""
    call = MATMUL.inputs(problem, 1, np)
    out = check.GuardedArray(np, (problem.m, problem.n), dtypes.float16)
    assert compare(
        MATMUL, *call.args, **call.kwargs, outputs=MATMUL.run(
            *call.args, **call.kwargs, config=config, out=out.array
        ),
    ).ok  # fmt: skip
    try:
        out.check()
    except check.Violation as error:
        raise AssertionError from error


def check_splits() -> None:
    if host.current().warp_size == 32:
        config = SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4)
        problem = MatmulProblem(24, 72, 256, layout_b="F", epilogue=FORMULAS[0])
        compute(host.current(), problem, config)


def check_functions() -> None:
    for text in (
        "cos(acc * 9)",
        "tanh(acc * 2)",
        "(i - j) % 5",
        "floor(acc * 3)",
        "sqrt(acc * acc)",
    ):
        assert Computed(host.current(), text, 1, off=0.0).comparison.within_bound


def check_special() -> None:
    for text in ("maximum(acc, s)", "maximum(s, acc)"):
        assert Computed(host.current(), text, 1, "special", 0.0).comparison.within_bound


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    problems,
    {
        "many dims": check_many_dims,
        "results": check_results,
        "narrow results": check_narrow_results,
        "narrow NaN": check_narrow_nan,
        "hopper narrow": check_hopper_narrow,
        "hopper narrow ends": check_hopper_narrow_ends,
        "hopper results": check_hopper_results,
        "few rows": check_few_rows,
        "odd columns": check_odd_columns,
        "even columns": check_even_columns,
        "loaded": check_loaded,
        "splits": check_splits,
        "functions": check_functions,
        "special": check_special,
    },
)
