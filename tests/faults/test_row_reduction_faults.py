"""Planted faults in reductions of rows, each of which a check must catch."""

from __future__ import annotations

import numpy as np
import pytest
from planted import Fault, fault_tests
from products import MATMUL

import cupykern
from cupykern import check
from cupykern.gemm import row_reductions
from cupykern.gemm.sm90_dual_config import Sm90DualGemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import Cooperative, PingPong, SplitK
from cupykern.ops.problems.products import ROWS, MatmulProblem
from cupykern.targets import host

ROW, MERGE, APPLY = "expression/row_results.cuh", "merge_row_slices.cu", "expression/apply.cuh"
SM90, GATED = "gemm/epilogue/expression.cuh", "gemm/epilogue/gated.cuh"
GATE = "gemm/epilogue/gate_expression.cuh"
FAULTS = {
    "a maximum without NaN": Fault(
        ROW, "return larger_of(a, b)", "return a > b ? a : b", "NaN"
    ),
    "a maximum from 0 on": Fault(ROW, "kIdentity = -kInfinity", "kIdentity = 0.0f", "portable"),
    "every reduction is of the first result": Fault(
        ROW, "results[Rows::kResult]", "results[0]", "portable"
    ),
    "every slice in the first one's place": Fault(
        ROW, "i_strides[Rows::kOperand] + slice", "i_strides[Rows::kOperand]", "portable"
    ),
    "columns beyond the last one": Fault(
        APPLY, "if (i < count) rows.add(of_element);", "rows.add(of_element);", "portable"
    ),
    "the run of one lane for a slice": Fault(
        APPLY, "rows.template merge_lanes<kLanes>();", "", "portable"
    ),
    "a slice beyond the last one": Fault(
        APPLY, "row < matrix.params.m && col < matrix.params.n)", "row < matrix.params.m)",
        "portable",
    ),
    "fp32: the first run's place for all": Fault(
        "reduce_split_k_expression.cu", "store_rows<kRun, kRun>(rows, row, col)",
        "store_rows<kRun, kRun>(rows, row, 0)", "fp32",
    ),
    "gates: as for a row that is there": Fault(
        "gemm/dual_tile.cuh", "kRun>(first, rows, at_row, at_col)", "kRun>(first, rows, 0, at_col)",
        "gate",
    ),
    "merge: the first slice of each lane": Fault(
        MERGE, "slice += kWarpSize", "slice += params.slices", "many columns"
    ),
    "merge: what two lanes have": Fault(MERGE, "bit < kWarpSize", "bit < 2", "many columns"),
    "merge: the first row for all": Fault(
        MERGE, "row * params.slices + slice", "slice", "portable"
    ),
    "hopper: columns beyond the last one": Fault(
        SM90, "if (j < n) rows[v / 2 % 2]", "rows[v / 2 % 2]", "hopper"
    ),
    "hopper: both rows of a lane are one": Fault(
        SM90, "if (j < n) rows[v / 2 % 2]", "if (j < n) rows[0]", "hopper"
    ),
    "hopper: half of a quad": Fault(ROW, "merge_lanes<4>", "merge_lanes<2>", "hopper"),
    "hopper: the rows before count too": Fault(
        ROW, "rows[half] = Rows{};", "", "hopper, ping-pong"
    ),
    "hopper: rows beyond the last one": Fault(
        ROW, "threadIdx.x % 4 == 0 && at <= last_row", "threadIdx.x % 4 == 0", "hopper"
    ),
    "hopper: a slice beyond the last one": Fault(
        SM90, "&& row_slice * Tile::kOwnCols < n", "", "hopper, split"
    ),
    "hopper: the first block's slice for all": Fault(
        SM90, "Tile::kOwnCols + own.first / own.kCount", "Tile::kOwnCols", "hopper, split"
    ),
    "hopper gates: both rows of a lane are one": Fault(
        GATE, "rows[i / 2 % 2].add", "rows[0].add", "hopper gate"
    ),
    "hopper gates: a slice beyond the last one": Fault(
        GATED, "slice == kSlices - 1 && col < params.n", "slice == kSlices - 1", "hopper gate"
    ),
    "hopper gates: the first slice of each row": Fault(
        GATED, "first_row, col / kOwnCols", "first_row, 0", "hopper gate"
    ),
}  # fmt: skip


def problems():
    yield "batch", MATMUL, MatmulProblem(9, 41, 24, batch_a=(2, 1), batch_b=(3,), epilogue=ROWS)


def integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float16)


def check_integers(shape: tuple[int, ...], dtype: str = "float16", **options) -> None:
    """Sums that FP32 has exactly, and maxima that are negative."""
    *batch, m, n, k = shape
    a = integers((*batch, m, k), 1).astype(dtype)
    b = np.ascontiguousarray(integers((n, k), 2).astype(dtype)).T  # K-major
    acc = a.astype(np.float64) @ b.astype(np.float64)
    y, total, most, count = cupykern.matmul(
        a, b, epilogue="acc, row_sum(acc), row_max(-1 - acc * acc), row_sum(j)", **options
    )
    assert (y == acc).all()
    assert (total == acc.sum(-1, keepdims=True)).all()
    assert (most == (-1 - acc**2).max(-1, keepdims=True)).all()
    assert (count == n * (n - 1) // 2).all()


def check_slices(shape: tuple[int, ...], **options) -> None:
    """Nothing is stored beyond the slices of a row that there are."""
    made: list[check.GuardedArray] = []

    def make(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        made.append(check.GuardedArray(np, shape, dtype))
        return made[-1].array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reductions, "maker", lambda xp: make)
        check_integers(shape, **options)
    assert made
    for slices in made:
        try:
            slices.check()
        except check.Violation as violation:
            raise AssertionError(str(violation)) from None


def check_gate(shape: tuple[int, int, int], **options) -> None:
    m, n, k = shape
    a, b1, b2 = integers((m, k), 1), integers((n, k), 2).T, integers((n, k), 3).T
    d1, d2 = (a.astype(np.float64) @ b.astype(np.float64) for b in (b1, b2))
    formula = "acc1, row_sum(acc1 - acc2), row_max(-1 - acc1 * acc1)"
    y, total, most = cupykern.dual_gemm_silu(a, b1, b2, epilogue=formula, **options)
    assert (y == d1).all()
    assert (total == (d1 - d2).sum(-1, keepdims=True)).all()
    assert (most == (-1 - d1**2).max(-1, keepdims=True)).all()


def check_nan() -> None:
    a = np.ones((3, 8), np.float16)
    for column in (0, 5, 40, 69):
        b = np.zeros((8, 70), np.float16)
        b[0, column] = np.nan
        _, most, total = cupykern.matmul(a, b, epilogue="acc, row_max(acc), row_sum(acc)")
        assert np.isnan(most).all() and np.isnan(total).all()


def on_hopper(check, shape: tuple[int, ...], config) -> None:
    if host.current().warp_size == 32:
        check(shape, config=config)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    problems,
    {
        "NaN": check_nan,
        "portable": lambda: check_integers((2, 37, 75, 16)),
        "fp32": lambda: check_integers((2, 37, 75, 16), "float32"),
        "gate": lambda: check_gate((37, 75, 16)),
        "many columns": lambda: check_integers((3, 4099, 8)),
        "hopper": lambda: on_hopper(
            check_integers, (70, 137, 136), Sm90GemmConfig(128, 128, 64, 3)
        ),
        "hopper, ping-pong": lambda: on_hopper(
            check_integers, (200, 137, 136), Sm90GemmConfig(128, 128, 64, 3, PingPong())
        ),
        "hopper, split": lambda: on_hopper(
            check_slices, (70, 136, 136), Sm90GemmConfig(128, 128, 64, 3, cluster=SplitK(2))
        ),
        "hopper gate": lambda: on_hopper(
            check_gate, (70, 72, 136), Sm90DualGemmConfig(64, 64, 64, 12, Cooperative(1), SplitK(2))
        ),
    },
)
