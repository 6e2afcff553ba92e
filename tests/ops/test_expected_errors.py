"""Errors that are larger than those of independent roundings of steady sums, and expected to be."""

from __future__ import annotations

import numpy as np
import pytest
import tensor_core

from cupykern import OPS, check, dtypes, inputs
from cupykern.numerics import as_float64
from cupykern.ops.complex_matmul import ComplexProblem
from cupykern.ops.dequant_softmax import LogitsProblem
from cupykern.ops.nonfinite_report import NonfiniteProblem
from cupykern.ops.problems.attention import AttentionProblem, ScoreChoice
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.problems.products import MatmulProblem
from cupykern.reference.accumulation import HALF, Products, Terms, expected_error

BY_NAME = {op.name: op for op in OPS}
_HALF_SCORES = {
    "d": 8,
    "dv": 8,
    "layout": "bshd",
    "qk_accumulate": "float16",
    "row_stats": True,
    "kind": "subnormal",
}
_CANCELLING = {"out_dtype": "float32", "kind": "special"}
FOUND = {
    "scores below FP16's normal numbers, one key": (
        "attention",
        AttentionProblem(
            1, 4, 2, 33, 1, **{**_HALF_SCORES, "d": 24, "dv": 40}, input_pos=1, scale=-0.3
        ),
        407,
    ),
    "scores below FP16's normal numbers": (
        "attention",
        AttentionProblem(2, 1, 1, 130, 32, **_HALF_SCORES, scale=-0.3, lse=True, view="negative"),
        7112,
    ),
    "masked scores below FP16's normal numbers": (
        "attention",
        AttentionProblem(
            1, 4, 2, 100, 64, **_HALF_SCORES, scale=0.05, lse=True, view="sliced", mask="bool",
            mask_dims=(True, False, True, True),
        ),
        11527,
    ),
    "large products that cancel": (
        "matmul",
        MatmulProblem(
            8, 64, 16, dtype_b="float8_e4m3fn", layout_a="negative", layout_b="broadcast",
            bias=(1, 64), activation="gelu_tanh", **_CANCELLING,
        ),
        6512,
    ),
    "large products of logits that cancel": (
        "dequant_softmax",
        LogitsProblem(
            17, 1000, 16, batch=(2, 3), layout_a="offset", layout_w="broadcast", scale="number",
            bias=(1000,), **_CANCELLING,
        ),
        11173,
    ),
    "means as distances from a warp's": (
        "layer_norm",
        NormProblem((2, 17, 17, 4097), return_stats=True, kind="exact", layout="sliced"),
        5881,
    ),
    "probabilities of capped scores beside a sink": (
        "attention",
        AttentionProblem(
            1, 4, 2, 100, 100, 8, 8, scale=1.0, causal=True, qk_accumulate="float16",
            kind="same_sign", options=ScoreChoice(window=(-1, 5), softcap=0.5, sinks=True),
        ),
        244874,
    ),
    "probabilities by distance, of queries at all positions": (
        "attention",
        AttentionProblem(
            1, 1, 1, 65, 100, 33, 64, scale=0.0, causal_align="top_left", kind="same_sign",
            options=ScoreChoice(window=(-1, 5), softcap=0.5, slopes="h", sinks=True),
        ),
        321,
    ),
    "sums that repeat": (
        "nonfinite_report",
        NonfiniteProblem((8, 8, 3, 1024), "float32", kind="uniform", layout="broadcast"),
        11354,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_errors_that_random_cases_found_larger(name):
    op, problem, seed = FOUND[name]
    comparison = check.check_problem(BY_NAME[op], problem, seed, np)
    assert comparison.ok, comparison


_EQUAL_ROWS = {
    "n": 1,
    "layout_a": "broadcast",
    "precision": "fma",
}
REPEATED = {
    "complex rows": ("complex_matmul", ComplexProblem(65, k=100, bias=(65, 1), **_EQUAL_ROWS)),
    "rows": ("matmul", MatmulProblem(65, k=100, dtype="float32", bias=(65, 1), **_EQUAL_ROWS)),
    "matrices": (
        "matmul",
        MatmulProblem(
            2, k=100, dtype="float32", batch_a=(33,), residual=(33, 2, 1), **_EQUAL_ROWS
        ),
    ),
    "rows of a formula": (
        "matmul",
        MatmulProblem(
            65, k=100, dtype="float32", epilogue="maximum(acc * s + t, 0) + r", **_EQUAL_ROWS
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATED)
def test_errors_of_equal_products_count_once(name):
    """Products are all equal, results not: 100 errors as large and as often as chance makes one."""
    op, problem = REPEATED[name]
    for seed in range(100):
        comparison = check.check_problem(BY_NAME[op], problem, seed, np)
        assert comparison.ok, (seed, comparison)


def rms_ratio(y: np.ndarray, exact: np.ndarray, square: np.ndarray) -> float:
    expects = square > 0
    return float(np.sqrt(np.mean((y - exact)[expects] ** 2 / square[expects])))


@pytest.mark.parametrize("exponent", [0, -10, -14, -18, -22, -26, -30])
def test_errors_of_half_sums_are_those_expected_below_the_normal_numbers(exponent):
    """Neither more nor far less, down to sums that round to zero."""
    rng, k = np.random.default_rng(1), 64
    x, y = rng.standard_normal((64, k)), rng.standard_normal((64, k)) * 2.0 ** (exponent - 3)
    total = np.zeros((64, 64), np.float16)
    for first in range(0, k, 16):
        part = slice(first, first + 16)
        total = (total + x[:, part] @ y[:, part].T).astype(np.float16)
    exact, squares = x @ y.T, (x * x) @ (y * y).T
    square, bias = expected_error(HALF, Terms(exact, np.abs(x) @ np.abs(y).T, squares, k, 22), k)
    assert 0.5 <= rms_ratio(as_float64(total), exact, square) <= 1.1
    mean = np.mean((np.abs(as_float64(total)) - np.abs(exact)) / np.sqrt(square))
    assert abs(mean) <= np.mean(bias / np.sqrt(square)) + 6 / 64


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize(("a", "b"), [("half", "half"), ("half", "e4m3"), ("bf16", "bf16")])
def test_errors_of_large_products_that_cancel_are_those_expected(a, b, pairs):
    """Products of 2^15 and -2^15 of which only what they cut from the others is left."""
    names = {"half": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
    kinds = [dtypes.NAMES[names[x]] for x in (a, b)]
    x, y = (as_float64(inputs.values("normal", (64, 16), z, i)) for i, z in enumerate(kinds))
    for i in range(pairs):
        x[:, 2 * i], x[:, 2 * i + 1], y[:, 2 * i + 1] = 2.0**15, -(2.0**15), y[:, 2 * i]
    total = tensor_core.product(x, y, ("half", "half") if b == "e4m3" else (a, b))
    value = Products(*kinds).of(x, y.T)
    assert 0.3 <= rms_ratio(total, value.exact, value.square) <= 1.5


@pytest.mark.parametrize("copies", [1, 4, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_mean_of_copies_errs_as_a_mean_of_one(dtype, copies):
    """The expected error of a mean does not become smaller by copies, but by more numbers."""
    op = BY_NAME["nonfinite_report"]
    x = inputs.values("normal", (1, 1 << 14), dtypes.NAMES[dtype], 1)
    expected = []
    for array in (x, np.broadcast_to(x, (copies, x.size)), np.repeat(x, copies, 0)):
        bounds = op.bound(array, reference=op.reference(array))
        expected.append(bounds[1].rms[2])
    np.testing.assert_allclose(expected, expected[0], rtol=0.1)
    more = inputs.values("normal", (64, 1 << 14), dtypes.NAMES[dtype], 1)
    bounds = op.bound(more, reference=op.reference(more))
    assert bounds[1].rms[2] < 0.2 * expected[0]
