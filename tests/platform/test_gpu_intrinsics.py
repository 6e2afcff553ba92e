"""Expected errors hold where intrinsics are as inexact as a GPU's, not as the host's."""

from __future__ import annotations

import numpy as np
import pytest
from planted import Fault, planted

from cupykern import OPS, check
from cupykern.error_statistics import statistics
from cupykern.op import Bound, RandomDraw
from cupykern.ops.problems.attention import AttentionProblem
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.softmax import SoftmaxProblem
from cupykern.reference import norm, rounding
from cupykern.targets import host

HOST = """
DEVICE float reciprocal_square_root(float x) { return 1.0f / __builtin_sqrtf(x); }
DEVICE float reciprocal_approx(float x) { return 1.0f / x; }
// 2^x; subnormals are zero.
DEVICE float exp2_approx(float x) { return __builtin_exp2f(x); }
"""
# Means and root mean squares of relative errors as measured on an H100 (reference/elementary.py): a
# mean, a number that depends on x's bits, and the rounding to FP32.  That of rsqrt is a
# polynomial's: in each of 64 segments, w = 1 / 64 wide, and for each parity of the exponent a
# constant, a slope, and what the best parabola leaves: a Chebyshev polynomial, of 15 / 8 / 6 (w /
# 2)^3 / 4 = 0.625 * 2^-24 at 1.  The constants are such that results are 0.3 * 2^-24 too small on
# average where variances are close to 2, as on an H200.
AS_A_GPU = """
namespace inexact {
DEVICE float number(double y, float x, double mean, double spread) {
    uint32_t bits = bit_cast<uint32_t>(x) * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    const double uniform = double(bits ^ bits >> 13) * 0x1p-32 - 0.5;
    return float(y * (1.0 + (mean + spread * 3.4641016 * uniform) * 0x1p-24));
}
DEVICE bool is_normal(float y) { return y >= 0x1p-126f && y < 1.0f / 0.0f; }
DEVICE double random(uint32_t bits) {
    bits = (bits ^ bits >> 15) * 2654435761u;
    bits = (bits ^ bits >> 13) * 2246822519u;
    return double(bits ^ bits >> 16) * 0x1p-32 - 0.5;
}
DEVICE double of_rsqrt(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x), segment = bits >> 17 & 127;
    const double t = double(bits & 0x1ffff) * 0x1p-16 - 1.0;
    const double m = 1.0 + double(bits & 0x7fffff) * 0x1p-23;
    return -0.09 + 0.9 * random(segment + 1538) + 0.6 * random(segment + 1003) * t +
           0.625 / (m * m * m) * (4.0 * t * t * t - 3.0 * t);
}
}  // namespace inexact
DEVICE float reciprocal_square_root(float x) {
    const float y = 1.0f / __builtin_sqrtf(x);
    return inexact::is_normal(y)
        ? float(1.0 / __builtin_sqrt(double(x)) * (1.0 + inexact::of_rsqrt(x) * 0x1p-24)) : y;
}
DEVICE float reciprocal_approx(float x) {
    const float y = 1.0f / x;
    return inexact::is_normal(y) ? inexact::number(1.0 / double(x), x, 0.07, 0.26) : y;
}
DEVICE float exp2_approx(float x) {
    const float y = __builtin_exp2f(x), size = x < 0.0f ? -x : x;
    if (!inexact::is_normal(y) || x == 0.0f) return y;
    const double mean = size >= 1.0f ? -0.85 : size > 0x1p-8f ? -0.35 : -0.09;
    return inexact::number(__builtin_exp2(double(x)), x, mean, 0.3);
}
"""
BY_NAME = {op.name: op for op in OPS}


@pytest.fixture(scope="module")
def as_a_gpu(tmp_path_factory):
    fault = Fault("platform/host.cuh", HOST, AS_A_GPU, "")
    with planted(fault, tmp_path_factory), host.use(warp_size=32) as target:
        yield target


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
def test_what_is_expected_holds(name, as_a_gpu):
    """Of FP32 results, which show it most, and of drawn problems."""
    op = BY_NAME[name]
    make = SoftmaxProblem if name.endswith("softmax") else NormProblem
    problems = [make((200, cols), dtype="float32") for cols in (31, 64, 1000)]
    problems += [op.draw_problem(RandomDraw(seed)) for seed in range(8)]
    worst = 0.0
    for seed, problem in enumerate(problems):
        found = check.check_problem(op, problem, seed, np)
        assert found.ok, f"{problem!r}: {found}"
        worst = max(worst, found.rms_ratio)
    assert worst >= 0.5


NORM = {"return_stats": True, "out_dtype": "float32"}
ALIKE = {
    # All variances of a binade lose the same when eps is added.
    "eps in exact variances": (
        "layer_norm",
        NormProblem((2, 17, 17, 65), kind="exact", eps=1e-6, **NORM),
    ),
    "eps, of FP32": (
        "layer_norm",
        NormProblem((170, 1024), "float32", kind="uniform", compensated=True, **NORM),
    ),
    # And rsqrt has the same error at nearly equal variances.
    "few segments": (
        "layer_norm",
        NormProblem((153, 4097), "bfloat16", kind="uniform", compensated=True, **NORM),
    ),
    "several segments": ("layer_norm", NormProblem((2000, 1024), residual=True, **NORM)),
    "one argument": ("rms_norm", NormProblem((17, 65), kind="subnormal", eps=0.5, **NORM)),
    # Elements so small that all their distances from the mean are equal.
    "equal squares": (
        "layer_norm",
        NormProblem(
            (17, 3, 5, 64),
            "bfloat16",
            weight_dtype="float32",
            eps=0.5,
            return_stats=True,
            kind="wide",
        ),
    ),
    # Parts of a sum are rescaled by exponentials that are too small on average.
    "rescaled sums": (
        "softmax",
        SoftmaxProblem((4097, 17, 30), axis=0, dtype="float32", scale=-1.0, layout="sliced"),
    ),
    # Scores in FP16 make few different probabilities.
    "FP16 scores": (
        "attention",
        AttentionProblem(
            *(24, 2, 1, 64, 200, 64, 40), qk_accumulate="float16", kind="same_sign", view="sliced"
        ),
    ),
}


SEEDS = {"one argument": 8325}  # of which all variances are much smaller than eps


@pytest.mark.parametrize("case", ALIKE)
def test_errors_that_are_alike_are_expected_to_be(case, as_a_gpu, monkeypatch):
    """Of one input, not the least of three."""
    monkeypatch.setattr(check, "REPEATS", 0)
    name, problem = ALIKE[case]
    found = check.check_problem(BY_NAME[name], problem, SEEDS.get(case, 1), np)
    assert found.ok, found


def test_ties_of_sums_are_half_a_gap_off():
    """Of x + residual, FP32 numbers of one binade, half are exact and half are ties."""
    problem = NormProblem((64, 1000), "float32", mean=-100.0, residual=True, compensated=True)
    found = check.check_problem(BY_NAME["layer_norm"], problem, 0, np)
    assert 0.7 <= found.rms_ratio <= 1.05


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5, 2.0**-23])
@pytest.mark.parametrize("size", [3e-9, 1e-6, 3e-5, 0.3, 1.3, 2.6, 20.0])
def test_the_mean_error_of_adding_eps(eps, size):
    """Of variances in a narrow range, FP32 numbers."""
    rng = np.random.default_rng(1)
    variance = (size * rng.uniform(0.99, 1.01, (20_000, 1))).astype(np.float32).astype(np.float64)
    summed = (variance.astype(np.float32) + np.float32(eps)).astype(np.float64)
    error = summed - (variance + eps)
    row = norm.Row(variance, variance, variance, variance, eps)
    size, mean = norm.errors_of_eps(row, 0.0)
    assert np.abs(error.mean()) <= mean.mean() + 0.03 * np.abs(error).max()
    assert (size >= mean).all()


@pytest.mark.parametrize(
    "arguments, low, high",
    [
        (np.exp2(np.random.default_rng(5).uniform(-8, 8, 20_000)), 0.007, 0.013),
        (2 + np.linspace(0, 0.03, 500), 0.99, 1),  # one segment
        (2 + np.linspace(0, 0.0624, 500), 0.49, 0.51),  # two
        (np.arange(16, 32, 0.25), 0.99, 1),  # the ends of 64 segments
        (np.arange(16, 32, 0.125), 0.45, 0.55),  # and the middles
        (np.array([3.0]), 0, 0),
        (np.array([3.0, np.nan, 0.0]), 0, 0),
    ],
)
def test_arguments_of_rsqrt_that_share_its_error(arguments, low, high):
    assert low <= norm.alike_in_rsqrt(arguments) <= high


def test_equal_terms_after_a_large_one_have_one_error():
    """Rows of one term of about 1, and others of one size, in chains of 16 and a tree."""
    rng = np.random.default_rng(2)
    terms = np.repeat(rng.uniform(1e-4, 2e-4, (4000, 1)), 64, axis=1).astype(np.float32)
    terms[np.arange(4000), rng.integers(64, size=4000)] = rng.uniform(0.55, 1.9, 4000)
    chains = terms.reshape(4000, 4, 16)
    sums = np.zeros((4000, 4), np.float32)
    for i in range(16):
        sums += chains[..., i]
    total = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    exact = terms.astype(np.float64).sum(axis=1)
    rms = np.sqrt(np.mean((total / exact - 1) ** 2)) / rounding.ROUNDING
    concentration = np.mean(np.sum((terms / exact[:, None]) ** 2, axis=1))
    apart, equal = (
        np.sqrt(rounding.sum_variance(concentration, 64, equal=x)) for x in (0.0, 63 / 64)
    )
    assert rms > 1.3 * apart and 0.6 <= rms / equal <= 1.2


def test_what_all_errors_have_in_common_counts_once():
    y = np.random.default_rng(3).uniform(1, 2, 4000)
    error = 1e-3 * y * (0.5 + np.random.default_rng(4).standard_normal(4000))
    alone, common = (
        statistics(error, y, Bound(y, 1e-3 * y, bias=0.0, common=x), np.dtype(np.float32))
        for x in (0.0, 2e-4 * y)
    )
    assert alone.bias_ratio > 1 >= common.bias_ratio
    assert common.most_mean == pytest.approx(6 * np.sqrt(1 / 4000 + 0.2**2), rel=0.02)
