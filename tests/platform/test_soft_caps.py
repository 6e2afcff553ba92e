"""Soft caps of kernels_cu/attention/score.cuh against FP64, on each target.

Of what the bound allows the host gave 0.44 at most, a * b + c contracted and not; 0.84 with
exp2_approx 2 ulp and reciprocal_approx 1 ulp off.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupykern.kernels import Variant
from cupykern.reference import elementary

F32, F64 = np.float32, np.float64
UNIT = 2.0**-24
KERNEL = """
// Off by kShift ulps, or half as many, for the worst that a platform's own may be.
DEVICE float shifted(float y, int by) {
    return y >= 0x1p-126f && y < kInfinity ? bit_cast<float>(bit_cast<int>(y) + by) : y;
}
DEVICE float shifted_exp2(float x) { return shifted(exp2_approx(x), kShift); }
DEVICE float shifted_reciprocal(float x) { return shifted(reciprocal_approx(x), -kShift / 2); }
#define exp2_approx shifted_exp2
#define reciprocal_approx shifted_reciprocal
#include "attention/score.cuh"

KERNEL void soft_cap(const float* x, float* y, float cap, float exponent) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    y[i] = GeneralScore::capped(x[i], cap, exponent);
}
"""
UNCONTRACTED = """
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
"""
CAPS = ((50.0, 128**-0.5), (30.0, -1.0), (0.7, 3.0), (1e30, 1e20), (1e-20, 1e-22))


def builds(target):
    host = target.name == "host"
    for prefix in ("", UNCONTRACTED) if host else ("",):
        for shift in (0, -2, 2) if host else (0,):
            constants = (("kShift", shift),)
            yield target.compile(Variant("soft_cap", (), constants, 256, text=prefix + KERNEL))


def run(target, kernel, x, cap, scale):
    count = x.size
    padded = np.zeros(-(-count // 256) * 256, F32)
    padded[:count] = x
    y = target.xp.empty(padded.size, F32)
    exponent = F32(2 * math.log2(math.e) * scale / cap)
    kernel(padded.size // 256, (target.xp.asarray(padded), y, F32(cap), exponent), 0)
    return (y if isinstance(y, np.ndarray) else y.get())[:count]


def allowed(ratio, cap, shifted):
    """attention_bound's, of the function itself.  shifted: beside the host's own roundings."""
    tanh = np.tanh(ratio)
    rest = 1 - tanh
    power, of_ratio = cap * rest * (1 - rest / 2), cap * rest
    exp2, reciprocal = elementary.EXP2_ULPS + shifted / 2, 1 + shifted / 2
    rounded = 2 * exp2 * power + (1 + 2 * reciprocal) * of_ratio + 4 * cap * np.abs(tanh)
    return UNIT * rounded * (1 + 2.0**-10) + 4 * 2.0**-126


def ratios(seed):
    """Of s / c: dense up to 12, near 1, and of all sizes."""
    rng = np.random.default_rng(seed)
    near = 1 + np.arange(-2000, 2000) * 2.0**-23
    sizes = (
        rng.uniform(0, 1.2, 40000),
        rng.uniform(1, 12, 20000),
        2.0 ** rng.uniform(-140, 30, 4000),
    )
    x = np.concatenate([near, *sizes])
    return rng.permutation(np.concatenate([x, -x]))


@pytest.mark.in_turn
def test_errors_are_within_what_bounds_take(target):
    for build, kernel in enumerate(builds(target)):
        shifted = build % 3 > 0
        for cap, scale in CAPS:
            with np.errstate(all="ignore"):
                x = (ratios(build) * (cap / scale)).astype(F32)
            x = x[np.isfinite(x) & ((np.abs(x) >= 2.0**-126) | (x == 0))]
            ratio = x.astype(F64) * scale / cap
            found = run(target, kernel, x, cap, scale)
            share = np.abs(found - cap * np.tanh(ratio)) / allowed(ratio, cap, shifted)
            assert share.max() <= 1, (cap, scale, ratio[share.argmax()], share.max())
            assert share.max() > 0.25  # or nothing was measured


def test_scores_end_at_the_cap(target):
    special = F32([0, np.inf, -np.inf, 3e38, -3e38, 1000, -1000, np.nan])
    for kernel in builds(target):
        y = run(target, kernel, special, 3.0, 3.0)
        np.testing.assert_allclose(y, [0, 3, -3, 3, -3, 3, -3, np.nan], atol=3e-6)
