"""The expected errors of roundings and sums against those of arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupykern import dtypes, numerics
from cupykern.reference import rounding

FORMATS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


def numbers(seed: int, size: int = 1 << 16, low: float = -4, high: float = 4) -> np.ndarray:
    """FP64, their logarithms uniform, of both signs."""
    rng = np.random.default_rng(seed)
    return np.exp2(rng.uniform(low, high, size)) * rng.choice((-1.0, 1.0), size)


@pytest.mark.parametrize("name", FORMATS)
def test_a_gap_is_the_distance_to_the_next_number(name):
    """Of all positive numbers but the largest; of FP32 every 2^16-th."""
    dtype = dtypes.NAMES[name]
    bits = 8 * dtype.itemsize
    step = 1 << max(bits - 16, 0)
    last = int(np.asarray(numerics.finfo(dtype).max, dtype).view(f"u{dtype.itemsize}"))
    codes = np.arange(0, last, step, dtype=f"u{dtype.itemsize}")
    x, following = ((codes + i).view(dtype).astype(np.float64) for i in (0, 1))
    np.testing.assert_array_equal(numerics.gap(x, dtype), following - x)
    np.testing.assert_array_equal(numerics.gap(-x, dtype), following - x)
    assert (numerics.gap(x, np.int8) == 1).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_rms_of_roundings(name):
    dtype, x = dtypes.NAMES[name], numbers(1)
    ratios = (x.astype(dtype).astype(np.float64) - x) / rounding.rounding_rms(x, dtype)
    assert np.sqrt(np.mean(ratios**2)) == pytest.approx(1, abs=0.01)


def test_the_relative_rms_of_a_rounding():
    x = numbers(2)
    errors = (x.astype(np.float32) - x) / x
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(rounding.ROUNDING, rel=0.01)


def test_fp32_numbers_are_exact():
    x = numbers(3, 100).astype(np.float32).astype(np.float64)
    assert not rounding.inexact_rms(x).any()
    assert rounding.inexact_rms(x * (1 + 2.0**-30)).all()


def tree_sum(x: np.ndarray, chain: int) -> np.ndarray:
    """Of rows in FP32: each thread a chain of so many, then pairs."""
    parts = x.astype(np.float32).reshape(len(x), -1, chain)
    sums = np.zeros(parts.shape[:2], np.float32)
    for i in range(chain):
        sums += parts[..., i]
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return sums[:, 0]


@pytest.mark.parametrize("chain", [1, 8, 32])
@pytest.mark.parametrize("kind", ["same sign", "a few large", "both signs"])
def test_the_variance_of_sums(kind, chain):
    rng = np.random.default_rng(4)
    x = rng.uniform(0.5, 1.5, (4000, 256)).astype(np.float32)
    if kind == "a few large":
        x *= np.where(rng.random(x.shape) < 0.02, np.float32(997), np.float32(1))
    if kind == "both signs":
        x *= rng.choice((-1, 1), x.shape).astype(np.float32)
    exact = x.astype(np.float64)
    size = np.sqrt((exact**2).sum(1)) if kind == "both signs" else exact.sum(1)
    shares = exact / exact.sum(1, keepdims=True)
    concentration = 1.0 if kind == "both signs" else (shares**2).sum(1)
    expected = rounding.ROUNDING * np.sqrt(rounding.sum_variance(concentration, 256, chain))
    ratios = (tree_sum(x, chain) - exact.sum(1)) / (size * expected)
    assert 0.5 <= np.sqrt(np.mean(ratios**2)) <= 1.2


def test_what_is_stored_has_one_rounding_more():
    y = numbers(5, 100)
    bound = rounding.stored(y, np.float16, 0.0, 0.0)
    np.testing.assert_array_equal(bound.elementwise, numerics.gap(y, np.float16) / 2)
    np.testing.assert_allclose(bound.rms, numerics.gap(y, np.float16) / math.sqrt(12))
    np.testing.assert_array_equal(np.abs(y.astype(np.float16) - y) <= bound.elementwise, True)


def test_nothing_is_expected_of_what_is_flushed_or_rounded_to_zero():
    y = np.array([2.0**-25, 2.0**-24, 1.0])
    assert (rounding.stored(y, np.float16, 0.0, 0.0).rms > 0).tolist() == [False, True, True]
    y = np.array([2.0**-130, 2.0**-110, 1.0])
    assert (rounding.stored(y, np.float32, 0.0, 0.0).rms > 0).tolist() == [False, False, True]
    assert not rounding.stored(y, np.float32, 0.0, 0.0, floor=1e-6).rms.any()
