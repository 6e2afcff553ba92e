"""Planted faults in merge_attention (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern.op import Op
from cupykern.ops.merge_attention import OP, MergeProblem

KERNEL = "merge_attention.cu"
ROWS = "attention/merge_rows.cuh"
FAULTS = {
    "shares of the other set": Fault(
        ROWS, "first = share(lse1, weight1", "first = share(lse1, weight2", "rows"
    ),
    "base 2": Fault(ROWS, "(lse2 - origin) * kLog2E", "(lse2 - origin)", "rows"),
    "the larger log-sum-exp": Fault(
        ROWS, "return largest + log_accurate(sum);", "return largest;", "rows"
    ),
    "a rounded reciprocal": Fault(
        ROWS, "inverse = 1.0f / sum;", "inverse = to_float(from_float<half>(1.0f / sum));",
        "one precision",
    ),
    "two sets without keys": Fault(
        ROWS, "largest == -kInfinity ? 0.0f : largest", "largest", "sets without keys"
    ),
    "sets without keys are used": Fault(
        ROWS, "first == 0.0f ? 0.0f : x1", "x1", "sets without keys"
    ),
    "no smallest share": Fault(
        ROWS, "x < kSmallestNormal ? kSmallestNormal : x", "x", "far apart"
    ),
    "strides of the other dim": Fault(
        ROWS, "index.offset(p.lse2_strides)", "index.offset(p.lse_strides)", "strides"
    ),
    "steps of the first": Fault(ROWS, "col * p.steps[1]", "col * p.steps[0] * 0", "strides"),
    "rows after the last": Fault(
        KERNEL, "if (row_of_thread + i * rows_at_once >= p.num_rows) continue;", "", "rows"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, Op, MergeProblem]]:
    for name, problem in {
        "rows": MergeProblem((2, 3, 5, 64)),
        "one precision": MergeProblem((5, 3, 64), "float32", kind="same_sign"),
        "strides": MergeProblem((2, 3, 5, 24), memory="sliced", layout="bshd"),
    }.items():
        yield name, OP, problem


def _agrees(**given: np.ndarray) -> None:
    """The call agrees with the reference, NaN and infinities included."""
    out1 = np.ones((1, 2, 3, 8), np.float32)
    lse1 = np.zeros((1, 2, 3), np.float32)
    call = {"out1": out1, "lse1": lse1, "out2": 2 * out1, "lse2": lse1, **given}
    expected = OP.reference(**call)
    for y, x in zip(OP.run(**call), expected, strict=True):
        assert np.allclose(y, x, rtol=1e-5, atol=1e-6, equal_nan=True)


def _check_sets_without_keys() -> None:
    none, nan = np.full((1, 2, 3), -np.inf, np.float32), np.full((1, 2, 3, 8), np.nan, np.float32)
    _agrees(lse1=none, out1=nan)
    _agrees(lse1=none, lse2=none)


def _check_far_apart() -> None:
    out1, lse1 = np.full((1, 2, 3, 8), np.inf, np.float32), np.full((1, 2, 3), -1e4, np.float32)
    _agrees(out1=out1, lse1=lse1)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    _problems,
    {"sets without keys": _check_sets_without_keys, "far apart": _check_far_apart},
)
