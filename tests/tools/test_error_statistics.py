"""The limits of mean squares and means of errors: what chance explains and what not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupykern import check
from cupykern.error_statistics import chi_square_quantile, repeats, statistics
from cupykern.op import Bound

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def errors(seed: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Results of no particular format; normal errors with a relative root mean square of 1e-3."""
    rng = np.random.default_rng(seed)
    y = rng.uniform(1, 2, shape)
    return y, 1e-3 * y * rng.standard_normal(shape)


def bound(y: np.ndarray, **more: object) -> Bound:
    return Bound(np.full_like(y, np.inf), 1e-3 * y, **{"bias": 0.0, **more})


@pytest.mark.parametrize("size", [1, 2, 10, 1000])
def test_chance_stays_within_its_limits(size):
    for seed in range(2000 // size + 20):
        y, error = errors(seed, (size,))
        found = statistics(error, y, bound(y), F32)
        assert found.rms_ratio <= 1 and found.bias_ratio <= 1


@pytest.mark.parametrize("factor", [1.8, -1.0])
def test_many_elements_leave_chance_little(factor):
    """Errors 1.8 times as large; all of one sign."""
    y, error = errors(1, (10_000,))
    found = statistics(factor * error if factor > 0 else np.abs(error), y, bound(y), F32)
    assert found.most_rms < 1.1 and found.most_mean < 0.07
    assert found.rms_ratio > check.RMS_LIMIT if factor > 0 else found.bias_ratio > 1


def test_one_element_may_be_six_times_as_far():
    y = np.array([1.0])
    for factor, ok in ((5.9, True), (8.0, False)):
        found = statistics(np.array([factor * 1e-3]), y, bound(y), F32)
        assert (found.rms_ratio <= 1) is ok


@pytest.mark.parametrize("figure", ["rms_ratio", "bias_ratio"])
def test_errors_that_a_row_shares_count_once(figure):
    """One error for each of 8 rows of 1000."""
    rows = {"rms_ratio": [[1.6], [-1.6]] * 4, "bias_ratio": [[0.9], [-0.4]] * 4}[figure]
    y, _ = errors(2, (8, 1000))
    error = 1e-3 * y * np.array(rows)
    alone = statistics(error, y, bound(y), F32)
    shared = statistics(error, y, bound(y, shared=1e-3 * y), F32)
    assert getattr(alone, figure) > 1 >= getattr(shared, figure)
    assert shared.most_mean == pytest.approx(6 / math.sqrt(8), rel=0.1)
    across = statistics(error, y, bound(y, shared=1e-3 * y, axis=0), F32)
    assert across.most_mean < 0.3


def test_equal_results_count_once():
    y = np.full((4000,), 1.2345678)
    assert statistics(2e-3 * y, y, bound(y), F32).rms_ratio <= 1
    apart = y * np.random.default_rng(3).uniform(1, 2, y.shape)
    assert statistics(2e-3 * apart, apart, bound(apart), F32).rms_ratio > check.RMS_LIMIT


def test_places_of_results_that_are_not_rounded_there_do_not_count():
    """FP32 numbers whose errors are a hundred times their gaps, and 1.7 times those expected."""
    y = np.random.default_rng(5).uniform(1, 2, 4000).astype(np.float32).astype(F64)
    error = 1.7e-5 * y * np.random.default_rng(6).choice((-1, 1), y.shape)
    found = statistics(error, y, Bound(y, 1e-5 * y), F32)
    assert found.rms_ratio > check.RMS_LIMIT and found.most_rms < 1.1


@pytest.mark.parametrize("kind", ["equal", "whole gaps apart", "nearly equal", "of both signs"])
def test_results_at_the_same_place_between_their_neighbours_repeat(kind):
    places = {
        "equal": np.full(1000, 0.3),
        "whole gaps apart": np.full(1000, 0.3),
        "nearly equal": 0.3 + np.linspace(0, 0.001, 1000),
        "of both signs": np.full(1000, 0.3),
    }[kind]
    assert repeats(places) == pytest.approx(1, abs=1e-3)
    assert repeats(np.random.default_rng(4).uniform(-0.5, 0.5, 100_000)) < 1e-3


def test_a_known_rounding_is_no_bias():
    """All results lie 0.4 gaps above a number of their format, to which they are rounded."""
    y = 1 + np.arange(1000) * 2.0**-10 + 0.4 * 2.0**-10
    rounded = y.astype(np.float16).astype(F64)
    rms = np.full_like(y, 2.0**-10 / math.sqrt(12))
    found = statistics(rounded - y, y, Bound(rms, rms, bias=0.0), np.dtype(np.float16))
    assert found.rms > 1.3 and abs(found.mean) < 1e-6 and found.rms_ratio < 1
    off = statistics(rounded + 2.0**-10 - y, y, Bound(rms, rms, bias=0.0), np.dtype(np.float16))
    assert off.mean == pytest.approx(math.sqrt(12))


def test_a_bias_that_the_arithmetic_has_is_allowed():
    y, error = errors(5, (10_000,))
    error = error + 0.5e-3 * y
    assert statistics(error, y, bound(y), F32).bias_ratio > 1
    assert statistics(error, y, bound(y, bias=0.6e-3 * y), F32).bias_ratio <= 1
    assert statistics(error, y, bound(y, bias=math.inf), F32).bias_ratio == 0


def test_what_nothing_is_expected_of_counts_for_nothing():
    y, error = errors(6, (100,))
    y[::2], error[::2] = np.nan, 0.0
    some = statistics(error, y, bound(y), F32)
    others = statistics(error[1::2], y[1::2], bound(y[1::2]), F32)
    np.testing.assert_allclose(some, others, rtol=1e-12)
    nothing = Bound(np.ones_like(y), np.zeros_like(y))
    assert statistics(error, y, nothing, F32).rms_ratio == 0


def test_quantiles_of_chi_square():
    """Two degrees of freedom: half the sum of squares is exponential; many: normal."""
    assert -math.log(1e-9) <= chi_square_quantile(2) <= -1.2 * math.log(1e-9)
    assert chi_square_quantile(1e6) == pytest.approx(1 + 6 * math.sqrt(2e-6), rel=1e-4)


@pytest.mark.parametrize(
    ("ratios", "ok"),
    [((0.5,), True), ((1.3, 0.9), True), ((1.3, 1.2, 0.9), True), ((1.3, 1.2, 1.1), False)],
)
def test_errors_of_one_sign_must_be_so_for_other_inputs(monkeypatch, ratios, ok):
    found = iter(ratios)
    monkeypatch.setattr(check, "check_once", lambda *args: check.Comparison(bias_ratio=next(found)))
    assert check.check_problem(None, None, 0, np).ok is ok
    assert next(found, None) is None


def test_an_error_beyond_the_bound_fails_at_once(monkeypatch):
    found = iter((check.Comparison(error_over_bound=2.0, bias_ratio=3.0),))
    monkeypatch.setattr(check, "check_once", lambda *args: next(found))
    assert not check.check_problem(None, None, 0, np).ok
