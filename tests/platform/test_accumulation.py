"""The expected errors of products and attention: against tensor cores in numpy, and what they let
`check` see."""

from __future__ import annotations

import numpy as np
import pytest
import tensor_core
from products import MATMUL, SCALED

from cupykern import OPS, check, dtypes, finfo, inputs
from cupykern.gemm.product import ACTIVATIONS
from cupykern.numerics import as_float64
from cupykern.reference.accumulation import FMA, Products, Terms, aligned_sizes, expected_error
from cupykern.targets import host

NAMES = {"half": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
ATTENTION = next(op for op in OPS if op.name == "attention")


def values(kind: str, shape: tuple[int, int], name: str, seed: int) -> np.ndarray:
    return inputs.values(kind, shape, dtypes.NAMES[name], seed)


def rms_ratio(y: np.ndarray, exact: np.ndarray, square: np.ndarray) -> float:
    expects = square > 0
    return float(np.sqrt(np.mean((y - exact)[expects] ** 2 / square[expects])))


@pytest.mark.parametrize("k", [16, 64, 256, 1024, 2000])
@pytest.mark.parametrize(
    ("a", "b", "kind", "least"),
    [
        *(("half", "half", kind, 0.5) for kind in ("normal", "uniform", "same_sign")),
        *(("bf16", "bf16", kind, 0.25) for kind in ("normal", "uniform")),
        *((a, b, "normal", 0.3) for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"))),
        ("e5m2", "e5m2", "uniform", 0.3),
    ],
)
def test_errors_of_tensor_cores_are_those_expected(a, b, kind, least, k):
    """Neither more nor far less."""
    x, y = (as_float64(values(kind, (64, k), NAMES[n], i)) for i, n in enumerate((a, b)))
    chunk = 128 if a[0] == "e" else k
    total = np.zeros((64, 64), np.float32)
    for first in range(0, k, chunk):
        part = slice(first, first + chunk)
        total += tensor_core.product(x[:, part], y[:, part], (a, b)).astype(np.float32)
    value = Products(*(dtypes.NAMES[NAMES[n]] for n in (a, b))).of(x, y.T)
    assert least <= rms_ratio(total, value.exact, value.square) <= 1.1
    mean = np.mean((np.abs(total) - np.abs(value.exact)) / np.sqrt(value.square))
    assert abs(mean) <= np.mean(value.bias / np.sqrt(value.square)) + 6 / 64


@pytest.mark.parametrize("kind", ["normal", "same_sign"])
@pytest.mark.parametrize("a", ["half", "e4m3"])
def test_errors_of_blocks_with_scales_of_either_sign(a, kind):
    """Sums of one sign in each block, of either sign over all."""
    x, y = (as_float64(values(kind, (64, 1000), NAMES[a], i)) for i in range(2))
    rng = np.random.default_rng(5)
    scales = rng.uniform(0.5, 2, (64, 8)).astype(np.float32) * rng.choice((-1, 1), (64, 8))
    total = np.zeros((64, 64), np.float32)
    for i in range(8):
        part = slice(128 * i, 128 * i + 128)
        block = tensor_core.product(x[:, part], y[:, part], (a, a)).astype(np.float32)
        total += block * scales[:, i, None].astype(np.float32)
    scaled = x * np.repeat(scales.astype(np.float64), 128, 1)[:, :1000]
    value = Products(*[dtypes.NAMES[NAMES[a]]] * 2, by_block=True).of(scaled, y.T)
    assert 0.4 <= rms_ratio(total, value.exact, value.square) <= 1.1


@pytest.mark.parametrize("kind", ["normal", "uniform", "same_sign"])
@pytest.mark.parametrize("k", [1, 3, 16, 100, 1000])
def test_errors_of_fp32_sums_are_those_expected(kind, k):
    x, y = (as_float64(values(kind, (64, k), "float32", i)) for i in range(2))
    total = np.zeros((64, 64), np.float32)
    for i in range(k):
        total = (total + x[:, i, None] * y[:, i]).astype(np.float32)  # one rounding
    exact, squares = x @ y.T, (x * x) @ (y * y).T
    square, bias = expected_error(FMA, Terms(exact, np.abs(x) @ np.abs(y).T, squares, k, 48), k)
    assert not bias.any() and 0.85 <= rms_ratio(total, exact, square) <= 1.1


def test_int8_sums_have_no_error():
    a, b = (np.full((4, 200), x, np.int8) for x in (-128, 127))
    (reference,) = MATMUL.reference(a, b.T)
    (bound,) = MATMUL.bound(a, b.T, reference=(reference,))
    assert not bound.elementwise.any() and (reference == -128 * 127 * 200).all()
    off = reference + np.eye(4)
    assert check.compare((reference.astype(np.int32),), (reference,), (bound,)).ok
    assert not check.compare((off.astype(np.int32),), (reference,), (bound,)).ok


def test_scaled_int8_sums_have_the_errors_of_the_epilogue_alone():
    """A rounding for each scale: no more than an ulp of FP32 each, and none of the sum."""
    a, b = (np.random.default_rng(i).integers(-128, 128, (32, 900)).astype(np.int8) for i in (1, 2))
    scale_a, scale_b = np.full((32, 1), 0.3, np.float32), np.full((1, 32), 0.7, np.float32)
    (reference,) = SCALED.reference(a, b.T, scale_a, scale_b)
    (bound,) = SCALED.bound(a, b.T, scale_a, scale_b, reference=(reference,))
    assert (bound.elementwise <= 3.01 * 2.0**-24 * np.abs(reference) + 2.0**-120).all()
    (exact,) = SCALED.bound(a, b.T, reference=SCALED.reference(a, b.T))
    assert not exact.elementwise.any()


GOALS = [
    *((MATMUL, name, None, "float32", 18) for name in ("float32", "float16", "bfloat16")),
    *((MATMUL, "float16", b, "float32", 18) for b in ("float8_e4m3fn", "int8")),
    *((MATMUL, "float16", None, None, 10), (MATMUL, "bfloat16", None, None, 7)),
    *((MATMUL, a, "float8_e4m3fn", "float16", 10) for a in ("float8_e4m3fn", "float8_e5m2")),
    (MATMUL, "float8_e4m3fn", None, "bfloat16", 7),
    (SCALED, "int8", None, "float32", 22),
    (SCALED, "int8", None, "float16", 10),
    *((ATTENTION, "float16", None, None, 9), (ATTENTION, "bfloat16", None, None, 7)),
]


@pytest.mark.parametrize(("op", "dtype", "dtype_b", "out_dtype", "s"), GOALS)
def test_relative_errors_that_are_caught(op, dtype, dtype_b, out_dtype, s):
    """2^-s of every result, of random sign and of either sign: a unit in the last place of 16 bits,
    2^-18 of FP32 results of 1024 products."""
    kwargs = {} if out_dtype is None else {"out_dtype": out_dtype}
    if op is ATTENTION:
        args = tuple(
            inputs.values("normal", (1, 2, n, 64), dtypes.NAMES[dtype], i)
            for i, n in enumerate((64, 512, 512))
        )
    elif dtype == "int8":
        rng = np.random.default_rng(1)
        a, b = (rng.integers(-128, 128, (64, 1024)).astype(np.int8) for _ in range(2))
        scales = (rng.uniform(0.001, 0.01, shape) for shape in ((64, 1), (1, 64)))
        args = (a, b.T, *(x.astype(np.float32) for x in scales))
    else:
        second = inputs.values("normal", (64, 1024), dtypes.NAMES["float16"], 2) * np.float16(16)
        if dtype_b != "int8":
            second = values("normal", (64, 1024), dtype_b or dtype, 2)
        args = (
            values("normal", (64, 1024), dtype, 1),
            second.astype(dtypes.NAMES[dtype_b or dtype]).T,
        )
    with host.use():
        output = op.run(*args, **kwargs)
    references = op.reference(*args, **kwargs)
    (bound,) = op.bound(*args, **kwargs, reference=references)
    y, dtype = as_float64(output), output.dtype
    assert check.compare_numbers(y, dtype, references[0], bound).ok
    for sign in (np.random.default_rng(2).choice((-1, 1), y.shape), 1, -1):
        planted = y * (1 + sign * 2.0**-s)
        assert not check.compare_numbers(planted, dtype, references[0], bound).ok


def test_subnormal_operands_are_aligned_as_the_smallest_normal_number():
    """A product loses what lies below that exponent: the bound of a sum of subnormals says so."""
    low = float(finfo("float16").min_normal)
    a = np.array([[low / 8, 0.0, 2.0]])
    b = np.array([[1.0], [1.0], [0.5]])
    found = aligned_sizes(a, b, dtypes.float16, dtypes.int8, a @ b)
    assert found[0, 0] == low + 1.0
    assert aligned_sizes(a, b, dtypes.bfloat16, dtypes.int8, a @ b)[0, 0] == (a @ b)[0, 0]


@pytest.mark.parametrize("low", [-6, -2, 0, 2])
@pytest.mark.parametrize("activation", [x for x in ACTIVATIONS if ACTIVATIONS[x].slow])
def test_errors_of_activations_are_no_larger_than_expected(activation, low):
    """One FP32 product each, which is exact; a GPU's exponential is less exact than the host's."""
    x = np.random.default_rng(3).uniform(low, low + 2, (64, 64)).astype(np.float32)
    eye, kwargs = np.eye(64, dtype=np.float32), {"activation": activation}
    with host.use():
        y = MATMUL.run(eye, x, **kwargs)
    references = MATMUL.reference(eye, x, **kwargs)
    (bound,) = MATMUL.bound(eye, x, **kwargs, reference=references)
    assert 0.1 <= rms_ratio(as_float64(y), references[0], bound.rms**2) <= 1.0
