"""Expressions alone: what they compute, how far off, and that bounds are not too wide."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from expressions import UNARY, Computed, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from cupykern import check, dtypes
from cupykern.expression import read
from cupykern.reference.expression_functions import FUNCTIONS

USUAL = (
    "maximum(acc * s + t, 0)",
    "acc / (1 + exp(-acc)) + t",
    "0.5 * acc * (1 + erf(acc * 0.7071067811865476))",
    "gelu(acc + t) * s",
    "gelu_tanh(acc + t) + s",
    "30 * tanh(acc / 30)",
    "where(acc > 0, acc, 0.1 * (exp(acc) - 1))",
    "acc * sigmoid(1.702 * acc) * s",
    "acc * cos(j * 0.01) - s * sin(j * 0.01)",
    "acc if j <= i else 0.0",
    "minimum(maximum(acc, -1), 1)",
    "acc * rsqrt(s * s + 1) + log(1 + t * t)",
    "sqrt(acc * acc + 1) - log2(abs(acc) + 2)",
    "acc * (1 - 2 * ((i // 8 + j // 8) % 2))",
)


@pytest.mark.in_turn
@given(text=texts(), seed=st.integers(0, 2**32), kind=st.sampled_from(("normal", "wide", "whole")))
@settings(max_examples=60)
def test_any_expression_is_within_its_bound(target, text, seed, kind):
    for off in (0.0, 2.0**-22, 2.0**-8):
        comparison = Computed(target, text, seed, kind, off).comparison
        assert comparison.within_bound, f"{text}: {comparison}"


@pytest.mark.in_turn
@given(text=texts(3), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_nan_and_infinities_are_where_fp64_has_them(target, text, seed):
    comparison = Computed(target, text, seed, "special", 0.0).comparison
    assert comparison.within_bound, f"{text}: {comparison}"


@pytest.mark.parametrize("text", USUAL)
def test_bounds_of_usual_formulas_are_near_their_errors(target, text):
    """The expected error is that of rounding; no bound is wider than 60 times it, and none ends."""
    for off in (0.0, 2.0**-22):
        found = Computed(target, text, 1, off=off)
        assert found.comparison.ok, found.comparison
        expected, bound = found.bound.rms, found.bound.elementwise
        assert not found.bound.free.any()
        known = expected > 0
        assert known.any() or (off == 0.0 and (found.y == found.reference).all())
        assert not known.any() or np.median(bound[known] / expected[known]) < 60
        error = np.abs(found.y - found.reference)
        assert off == 0.0 or (error > bound / 1000)[known].mean() > 0.5


@pytest.mark.parametrize("name", UNARY)
def test_functions_are_computed(target, name):
    """Of what they are defined for, within a few units in the last place."""
    found = Computed(target, f"{name}(abs(acc) + 0.5)", 1, off=0.0)
    assert found.comparison.ok, found.comparison
    np.testing.assert_allclose(found.y, found.reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_relative_error_holds_wherever_its_argument_may_be(name):
    """The kernel rounds f of a value near x, not of x."""
    relative, x = FUNCTIONS[name].relative, np.linspace(-40, 40, 161)
    for e in (2.0**-20, 0.25, 3.0):
        of_x = relative(np, x, e) + np.zeros(x.shape)
        for z in (x - e, x, x + e):
            assert (of_x >= relative(np, z, 0.0)).all()


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("1 / (acc - 3)", lambda acc, off: np.abs(acc - 3) <= off),
        ("log(acc - 3)", lambda acc, off: np.abs(acc - 3) <= off),
        ("rsqrt(acc - 3)", lambda acc, off: np.abs(acc - 3) <= off),
        ("sqrt(acc - 3)", lambda acc, off: np.abs(acc - 3) <= off),
        ("sin(acc * 70000)", lambda acc, off: np.abs(acc) * 70000 > 2.0**16),
        ("exp(acc * 30)", lambda acc, off: acc * 30 > 88.8),
    ],
)
def test_bounds_end_at_poles_and_where_fp32_overflows(target, text, ends):
    found = Computed(target, text, 2, "whole", 2.0**-20)
    acc = Computed(target, "acc", 2, "whole", 2.0**-20).reference
    expected = ends(acc, 9 * 2.0**-20)
    assert expected.any() and not expected.all()
    np.testing.assert_array_equal(found.bound.free, expected)
    assert found.comparison.within_bound


def test_either_branch_is_accepted_only_within_the_error(target):
    text = "100 if acc > 3 else -100"
    found = Computed(target, text, 2, "whole", 2.0**-20)
    near = np.abs(Computed(target, "acc", 2, "whole", 2.0**-20).reference - 3) < 1e-4
    assert near.any() and not near.all()
    assert (found.bound.elementwise[near] >= 200).all() and not found.bound.free.any()
    assert found.bound.elementwise[~near].max() < 1e-3
    assert (np.abs(found.y - found.reference)[near] == 200).any()  # the kernel took another one
    assert found.comparison.within_bound


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_casts_round_to_nearest_even(target, name):
    """Bit for bit as numpy does, of FP32 numbers; ties, subnormals and overflow among them."""
    dtype = dtypes.NAMES[name]
    for kind in ("normal", "wide", "whole", "special"):
        found, acc = (
            Computed(target, text, 3, kind, 0.0)
            for text in (f"{name}(acc * 1.0009765625)", "acc * 1.0009765625")
        )
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(found.y, acc.y.astype(dtype).astype(np.float32))
        assert found.comparison.within_bound
    ties = f"{name}(1.0 + (i * 64 + j) * {float(np.ldexp(1.0, -11 if name == 'float16' else -8))})"
    found = Computed(target, ties, 1)
    np.testing.assert_array_equal(found.y, found.reference)


@pytest.mark.parametrize("name, bits", [("float16", 11), ("bfloat16", 8)])
def test_bounds_of_casts_are_a_gap_where_the_error_reaches_the_next_number(target, name, bits):
    found = Computed(target, f"{name}(acc)", 1, off=2.0**-14)
    acc = Computed(target, "acc", 1, off=2.0**-14).reference
    gap = 2.0 ** (np.floor(np.log2(np.abs(acc))) + 1 - bits)
    places = np.abs(acc) / gap - np.floor(np.abs(acc) / gap) - 0.5
    reaches = np.abs(places) * gap < 2.0**-14 * np.abs(acc) * (1 - 1e-3)
    beyond = np.abs(places) * gap > 2.0**-14 * np.abs(acc) * (1 + 1e-3)
    assert reaches.any() and beyond.any()
    assert (found.bound.elementwise[reaches] >= gap[reaches]).all()
    assert (found.bound.elementwise[beyond] < 1e-30).all()
    assert found.comparison.within_bound
    # A kernel that did not round would be beyond it.
    unrounded = Computed(target, "acc", 1, off=2.0**-14)
    assert not check.compare((unrounded.y,), (found.reference,), (found.bound,)).within_bound


def test_a_cast_that_may_overflow_has_no_bound(target):
    found = Computed(target, "float16(65519.5 + acc * 0.5)", 1, off=2.0**-4)
    assert found.bound.free.any() and not found.bound.free.all()
    assert np.isinf(found.reference).any() and np.isfinite(found.reference).any()
    assert found.comparison.within_bound


def test_float_of_integers_and_booleans(target):
    for text, same in (
        ("float(i) / 7", "i / 7"),
        ("float(acc > s) * t", "where(acc > s, 1.0, 0.0) * t"),
        ("float(acc)", "acc"),
    ):
        assert read(text) == read(same)
    assert read(lambda acc, s, t, float: float(acc > s) * t) == read("float(acc > s) * t")
    found = Computed(target, "float(acc > 0) + float16(i)", 1, "whole", 0.0)
    np.testing.assert_array_equal(found.y, found.reference)


def test_a_parameter_with_a_default_is_that_number():
    def scaled(acc, t, factor=2.0):
        return acc * factor + t

    assert read(scaled) == read("acc * 2.0 + t")
    assert read(functools.partial(scaled, factor=3.0)) == read("acc * 3.0 + t")


def test_integers_are_exact_and_wrap(target):
    big = 2**62
    for text, expected in (
        (f"(j + {big}) * 4 % 1000", (4 * np.arange(64) + 0) % 1000),
        ("(i - j) // 7", (np.arange(16)[:, None] - np.arange(64)) // 7),
        ("(i - j) % -5", (np.arange(16)[:, None] - np.arange(64)) % -5),
        ("abs(i - j)", np.abs(np.arange(16)[:, None] - np.arange(64))),
    ):
        found = Computed(target, text, 1)
        np.testing.assert_array_equal(found.y, np.broadcast_to(expected, found.y.shape))
        np.testing.assert_array_equal(found.reference, found.y)


def test_a_wrong_kernel_is_beyond_the_bound(target):
    """What the bound is for: a formula with one other constant is found."""
    right, wrong = (Computed(target, text, 1) for text in ("acc * 1.5 + s", "acc * 1.50002 + s"))
    assert not check.compare((wrong.y,), (right.reference,), (right.bound,)).within_bound
    assert read("acc * 1.5 + s") != read("acc * 1.50002 + s")
