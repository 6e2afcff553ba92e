"""Expressions alone: what they compute, how far off, and that bounds are not too wide."""

from __future__ import annotations

import numpy as np
import pytest
from expressions import UNARY, Computed, texts
from hypothesis import given, settings
from hypothesis import strategies as st

from cupykern import check
from cupykern.expression import read

USUAL = (
    "maximum(acc * s + t, 0)",
    "acc / (1 + exp(-acc)) + t",
    "0.5 * acc * (1 + erf(acc * 0.7071067811865476))",
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
