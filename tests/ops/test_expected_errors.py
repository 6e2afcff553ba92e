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
from cupykern.ops.problems.dual_gemm import DualProblem
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.problems.products import FORMULAS, RESULTS, MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.precisions import SPLITS
from cupykern.reference.accumulation import HALF, Products, Terms, expected_error
from cupykern.reference.rounding import stored

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
    "what BF16 parts lose of one column": (
        "matmul",
        MatmulProblem(
            65, 1, 128, "bfloat16", "float32", batch_a=(3,), layout_a="sliced", layout_b="offset",
            alpha=0.125, kind="same_sign", precision="bf16x3", epilogue=RESULTS,
        ),
        710806,
    ),
    "large products that cancel, before relu's kink": (
        "matmul",
        MatmulProblem(
            130, 130, 64, *("float8_e5m2",) * 2, layout_b="F", bias=(130,), residual=(130, 130),
            activation="relu", kind="special",
        ),
        710221,
    ),
    "large products that cancel, where silu is flat": (
        "scaled_mm",
        ScaledProblem(
            MatmulProblem(
                127, 64, 128, *("float8_e5m2",) * 2, layout_b="F", activation="silu",
                out_dtype="float16", kind="special",
            ),
            scales="rows",
        ),
        708938,
    ),
    "large products that cancel, before a formula's kink": (
        "matmul",
        MatmulProblem(
            130, 8, 16, *("float8_e5m2",) * 2, layout_b="F", epilogue=FORMULAS[0], **_CANCELLING
        ),
        285268,
    ),
    "large products that cancel, where a formula is curved": (
        "matmul",
        MatmulProblem(
            65, 130, 64, "float8_e5m2", "float8_e4m3fn", layout_b="F", kind="special",
            epilogue=FORMULAS[1],
        ),
        34115,
    ),
    "a sum of integers that is zero, but by scales in FP64": (
        "scaled_mm",
        ScaledProblem(
            MatmulProblem(
                65, 130, 31, "int8", batch_a=(2, 1), batch_b=(3,), layout_a="negative",
                layout_b="offset", kind="special", epilogue=FORMULAS[1],
            ),
            scales="blocks",
        ),
        707424,
    ),
    "operands that are subnormal, but not times their scales": (
        "dual_gemm_silu",
        DualProblem(
            7, 127, 136, *("bfloat16",) * 2, batch_a=(2, 1), batch_b=(3,), layout_a="broadcast",
            scales="blocks", policy="hybrid", out_dtype="float16", kind="subnormal",
        ),
        1501067,
    ),
    "a sink without a key, whose exponent has a shift": (
        "attention",
        AttentionProblem(
            1, 4, 2, 16, 0, 40, 33, causal=True, mask="bool", mask_dims=(True, False, False, True),
            input_pos=0, row_stats=True, kind="subnormal",
            options=ScoreChoice(window=(-1, 5), softcap=30.0, sinks=True),
        ),
        803329,
    ),
    "products that are exact, half of them cut off": (
        "matmul",
        MatmulProblem(
            16, 65, 1, "float32", "bfloat16", batch_b=(2,), layout_a="broadcast",
            layout_b="offset", activation="relu", kind="exact",
        ),
        800961,
    ),
    "sums that repeat": (
        "nonfinite_report",
        NonfiniteProblem((8, 8, 3, 1024), "float32", kind="uniform", layout="broadcast"),
        11354,
    ),
}  # fmt: skip


_EQUAL_TERMS = {"layout_b": "broadcast", "kind": "same_sign"}
EQUAL_TERMS = {
    702168: ComplexProblem(7, 65, 64, layout_a="sliced", precision="fp16x3", **_EQUAL_TERMS),
    702920: ComplexProblem(65, 1, 64, bias=(1, 1), precision="tf32x3", **_EQUAL_TERMS),
    703282: ComplexProblem(
        7, 7, 100, layout_a="broadcast", residual=(7, 7), precision="bf16x3", **_EQUAL_TERMS
    ),
    703295: ComplexProblem(
        65, 65, 64, alpha=-3.7, bias=(1, 65), residual=(65, 65), precision="tf32x3", **_EQUAL_TERMS
    ),
    705220: ComplexProblem(1, 65, 100, residual=(1, 65), precision="bf16x3", **_EQUAL_TERMS),
    707813: ComplexProblem(
        33, 16, 257, batch_a=(3,), layout_a="F", precision="fp16x3", **_EQUAL_TERMS
    ),
    707851: ComplexProblem(65, 33, 100, layout_a="sliced", precision="tf32x3", **_EQUAL_TERMS),
    708669: ComplexProblem(33, 1, 64, batch_a=(3,), precision="bf16x3", **_EQUAL_TERMS),
    709890: ComplexProblem(
        65, 1, 64, layout_a="offset", bias=(1,), residual=(65, 1), precision="bf16x3",
        **_EQUAL_TERMS,
    ),
    710032: ComplexProblem(
        65, 16, 100, layout_a="sliced", alpha=-3.7, bias=(65, 1), precision="tf32x3",
        **_EQUAL_TERMS,
    ),
    711175: ComplexProblem(
        65, 33, 257, batch_a=(3,), layout_a="offset", bias=(65, 1), residual=(3, 65, 33),
        precision="fp16x3", **_EQUAL_TERMS,
    ),
    711276: ComplexProblem(33, 65, 8, layout_a="offset", precision="bf16x3", **_EQUAL_TERMS),
}  # fmt: skip


@pytest.mark.parametrize("seed", EQUAL_TERMS)
def test_what_parts_lose_of_equal_terms_adds_up(seed):
    """All rows of b are equal, so all terms of a sum lose the same share."""
    comparison = check.check_problem(BY_NAME["complex_matmul"], EQUAL_TERMS[seed], seed, np)
    assert comparison.ok, comparison


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


@pytest.mark.parametrize("layout", ["C", "broadcast"])
@pytest.mark.parametrize("precision", SPLITS)
def test_what_parts_lose_is_computed(precision, layout):
    """`known` is the error of the products of parts that are computed, without any rounding."""
    parts = SPLITS[precision]
    a = as_float64(inputs.values("uniform", (33, 64), dtypes.float32, 1))
    b = inputs.values("uniform", (64, 17), dtypes.float32, 2)
    b = as_float64(inputs.with_layout(b, layout, np))

    def split(x):
        found = []
        for p in range(parts.count):
            unit = 2.0 ** (parts.shift * p)
            found.append(as_float64(((x - sum(found)) * unit).astype(parts.dtype)) / unit)
        return found

    of_b, total = split(b), np.zeros((33, 17))
    for i, x in enumerate(split(a)):
        for y in of_b[: parts.order - i + 1]:
            total += x @ y
    known = Products(dtypes.float32, dtypes.float32, precision=precision).of(a, b).known
    np.testing.assert_allclose(known, total - a @ b, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("off", [-1.6, 1.6])
def test_scales_of_rows_have_the_error_of_one_reciprocal_root(off):
    """Of rows whose mean squares are small beside eps: one segment of the GPU's table, which may be
    so many units of 2^-24 off (RSQRT_TABLE_MAX)."""
    op, eps = BY_NAME["rms_norm"], np.float32(0.5)
    x = inputs.values("normal", (1445, 64), dtypes.float16, 1) * np.float16(2.0**-7)
    reference = op.reference(x, eps=0.5, quantize="e5m2")
    bound = op.bound(x, eps=0.5, quantize="e5m2", reference=reference)[1]
    s = as_float64(x)
    whole = np.mean(s**2, -1, keepdims=True).astype(np.float32) + eps
    rstd = (1 / np.sqrt(as_float64(whole)) * (1 + off * 2.0**-24)).astype(np.float32)
    largest = np.abs(x).max(-1, keepdims=True).astype(np.float32)
    scale = largest * rstd / np.float32(57344)
    assert scale.dtype == np.float32
    found = check.compare_numbers(as_float64(scale), scale.dtype, reference[1], bound)
    assert found.ok, found


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


def test_what_is_flushed_is_expected_whole_or_not_at_all():
    """As a mean too; not at all where it may exceed what roundings make expected."""
    y, flushed = np.array([1.0, 2.0**-98, 2.0**-110, 0.0]), 2.0**-126
    bound = stored(y, np.float32, 0.0, 0.0, floor=flushed)
    floor = 2 * flushed  # the result may be flushed too
    roundings = 2.0**-23 * y[:2] / np.sqrt(12)
    np.testing.assert_allclose(bound.rms, [*np.hypot(roundings, floor), 0, 0], rtol=1e-12)
    assert bound.bias == floor and (bound.elementwise >= floor).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2), (1, 3, 1)])
def test_products_of_few_numbers_err_as_expected(shape):
    """Of one rounding: where a gap exceeds the mean expected error, its place decides the error."""
    for seed in range(100):
        problem = MatmulProblem(*shape, "float32", ("float32", "float16")[seed % 2])
        comparison = check.check_once(BY_NAME["matmul"], problem, seed, np, None)
        assert comparison.rms_ratio <= check.RMS_LIMIT, comparison
