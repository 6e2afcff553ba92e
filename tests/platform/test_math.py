"""The elementary functions of common/math.cuh against FP64, on each target.

Every function has been run over all 2^32 codes (`--exhaustive`) on the host, compiled by g++ 12,
which gave these largest errors in ulps, a * b + c contracted and not; sigmoid's beside 1.25 max(-x,
0), gelu_tanh's beside 5 max(-2 t, 0):

    exp2_approx     as it is         2 ulp lower      2 ulp higher
    log_accurate    0.9338  0.9519
    erf_accurate    1.1157  1.3144   1.6215  1.7049   1.6149  1.6948
    sigmoid         1.9989  1.9989   5.0610  5.0610   3.9979  3.9979
    gelu_tanh       2.3620  2.3620   5.2656  5.2656   5.4393  5.4393   (every 256th code)
    gelu            1.4239  1.8702   2.2171  2.4064   2.6493  2.6493
    gelu_of_twice   0.9954  1.4686   0.9957  1.4676   0.9951  1.4666   (every 64th code)

gelu's are in units of 2^-24 |x|; gelu_of_twice's too, of 2 x, beside 2^-16 of the result.
sigmoid's are of a division, before reciprocal_approx took its place, which adds at most 1 ulp.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from platform_kernels import UNCONTRACTED

from cupykern.kernels import Variant
from cupykern.reference import elementary

F32, F64, U32 = np.float32, np.float64, np.uint32
SMALLEST_NORMAL = 2.0**-126
CHUNK = 2**22
FUNCTIONS = ("log_accurate", "erf_accurate", "sigmoid", "gelu", "gelu_of_twice", "gelu_tanh")

GELUS = {
    "gelu": 1,
    "gelu_of_twice": 2,
}  # of so many times their argument, to which errors are relative

# Where the functions change from one polynomial, or formula, to another.
EDGES = {
    "log_accurate": (2 / 3, 1.0, 4 / 3, 1.5),
    "erf_accurate": (1.0, 4.0),
    "gelu": (5.5, 13.0),
    "gelu_of_twice": (2.7, 6.5),
    "gelu_tanh": (2.7, 5.0, 10.0, 2.0**64),
    "sigmoid": (16.6, 17.3, 87.3, 126 * math.log(2), 88.0, 88.7, 89.0),
}

KERNEL = """
// exp2_approx off by kExp2Shift ulps and reciprocal_approx by half as many, for the worst that a
// platform's own may be; in sigmoid both ways add up where they are opposite.
DEVICE float shifted_reciprocal(float x) {
    const float y = reciprocal_approx(x);
    const bool normal = y >= 0x1p-126f && y < kInfinity;
    return normal ? bit_cast<float>(bit_cast<int>(y) - kExp2Shift / 2) : y;
}
DEVICE float shifted_exp2(float x) {
    const float y = exp2_approx(x);
    const bool normal = y >= 0x1p-126f && y < kInfinity;
    return normal ? bit_cast<float>(bit_cast<int>(y) + kExp2Shift) : y;
}
#define exp2_approx shifted_exp2
#define reciprocal_approx shifted_reciprocal
#include "common/math.cuh"

KERNEL void word(uint32_t first, uint32_t step, float* y) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = FUNCTION(bit_cast<float>(first + i * step));
}
"""


def builds(target, name, shifts=(0, -2, 2)):
    """Kernels that write the function of the codes first, first + step, ... to y: as it is and, on
    the host, with the other contraction and the worst exp2_approx, which a GPU's may already be."""
    if target.name != "host" or name == "log_accurate":
        shifts = [shift for shift in shifts if shift == 0]
    for prefix in ("", UNCONTRACTED) if target.name == "host" else ("",):
        for shift in shifts:
            text = prefix + KERNEL.replace("FUNCTION", name)
            constants = (("kExp2Shift", shift),)
            yield target.compile(Variant("word", (), constants, num_threads=256, text=text))


def values(target, kernel, first, step, count):
    y = target.xp.empty(count, target.xp.float32)
    kernel(count // 256, (U32(first), U32(step), y), 0)
    return y if isinstance(y, np.ndarray) else y.get()


def codes_from(first, step, count):
    with np.errstate(over="ignore"):
        return U32(first) + np.arange(count, dtype=U32) * U32(step)


def erf(x):
    """math.erf; numpy has none.  Where the series is exact to 2^-59, that, because it is faster."""
    s = x * x
    series = 1 - s * (1 / 3 - s * (1 / 10 - s * (1 / 42 - s / 216)))
    y = 2 / math.sqrt(math.pi) * x * series
    large = np.abs(x) >= 6
    y[large] = np.sign(x[large])
    medium = (np.abs(x) > 2**-5) & ~large
    y[medium] = np.fromiter(map(math.erf, x[medium].tolist()), F64)
    return y


def twice_t(x):
    """gelu_tanh's."""
    return 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def reference(name, x):
    """The function of FP32 numbers in FP64; subnormal numbers count as zero."""
    with np.errstate(all="ignore"):
        x = np.where(np.abs(x) < F32(SMALLEST_NORMAL), np.copysign(F32(0), x), x).astype(F64)
        if name == "log_accurate":
            return np.log(x)
        if name == "gelu_tanh":
            return x / (1 + np.exp(-twice_t(x)))
        if name == "gelu":
            return x / 2 * (1 + erf(x / math.sqrt(2)))
        if name == "gelu_of_twice":
            y = x * (1 + erf(x * math.sqrt(2)))
            return np.where(y > np.finfo(F32).max, np.inf, y)
        return erf(x) if name == "erf_accurate" else 1 / (1 + np.exp(-x))


def allowed_ulps(name, x):
    if name == "sigmoid":
        slope = elementary.SIGMOID_ULPS_PER_UNIT
        return elementary.SIGMOID_ULPS + slope * np.maximum(-x.astype(F64), 0)
    if name == "gelu_tanh":
        slope = elementary.GELU_TANH_ULPS_PER_UNIT
        return elementary.GELU_TANH_ULPS + slope * np.maximum(-twice_t(x.astype(F64)), 0)
    if name in GELUS:
        return elementary.GELU_ERROR
    ulps = {"log": elementary.LOG_ULPS, "erf": elementary.ERF_ULPS}
    return ulps[name.removesuffix("_accurate")]


class Expected:
    """What a function of the FP32 numbers x may give."""

    def __init__(self, name, x):
        self.name, self.x = name, x
        self.exact = reference(name, x)
        size = np.abs(self.exact)
        if name in GELUS:
            with np.errstate(invalid="ignore"):
                argument = GELUS[name] * x.astype(F64)
            size = np.where(np.abs(argument) <= np.finfo(F32).max, np.abs(argument), np.inf)
        # Results below 2^-126 are flushed or not; an error may take those a little above below it.
        # gelu_tanh's are 10 times a sigmoid that is.
        factor = 4 if name in GELUS else 16 if name == "gelu_tanh" else 1 + 2**-16
        self.least = SMALLEST_NORMAL * factor
        # An error may take gelu_tanh's largest ones beyond FP32.
        self.most = np.finfo(F32).max * (1 - 2.0**-19) if name == "gelu_tanh" else np.inf
        normal = (size >= self.least) & (size < self.most)
        self.normal = slice(None) if normal.all() else normal
        self.rest = np.flatnonzero(~normal)
        size = size[self.normal]
        self.ulp = (size.view(np.int64) & (0x7FF << 52)).view(F64) * 2.0**-23
        if name in GELUS:
            self.ulp = size * 2.0**-24
        self.allowed = allowed_ulps(name, x[self.normal])
        if name == "gelu_of_twice":
            share = np.abs(self.exact[self.normal]) / self.ulp
            self.allowed = self.allowed + elementary.GELU_OF_TWICE * share

    def check(self, y):
        """Raise AssertionError unless y is that; returns the largest error in ulps, for sigmoid and
        gelu_of_twice less what they are allowed for the size of x and of the result."""
        ulps = np.abs(y[self.normal] - self.exact[self.normal]) / self.ulp
        wrong = ~(ulps <= self.allowed)
        assert not wrong.any(), (self.name, self.x[self.normal][wrong][:4], ulps[wrong][:4])
        if self.rest.size:
            self._check_rest(y[self.rest], self.exact[self.rest], self.x[self.rest])
        if self.name == "sigmoid":
            ulps -= self.allowed - elementary.SIGMOID_ULPS
        if self.name == "gelu_tanh":
            ulps -= self.allowed - elementary.GELU_TANH_ULPS
        if self.name == "gelu_of_twice":
            ulps -= self.allowed - elementary.GELU_ERROR
        return ulps.max(initial=0.0)

    def _check_rest(self, y, exact, x):
        with np.errstate(invalid="ignore"):
            y, allowed = y.astype(F64), allowed_ulps(self.name, x)
        right = (y == exact) & (np.signbit(y) == np.signbit(exact))  # zeros and infinities
        right |= np.isnan(y) & np.isnan(exact)
        right |= (exact >= self.most) & (y >= self.most * (1 - 2.0**-19))
        if self.name in GELUS:
            right |= (y == 0) & (exact == 0)  # a zero has any sign
            with np.errstate(invalid="ignore", over="ignore"):
                most = GELUS[self.name] * np.abs(x)
                right |= (np.abs(x) < self.least) & (np.abs(y) <= most)
        # Up to 2^-126, where a result may be zero, and above it by the error alone.
        most = np.maximum(np.abs(exact), SMALLEST_NORMAL) + allowed * self.least * 2.0**-23
        right |= (exact != 0) & (np.abs(exact) < self.least) & (np.abs(y) <= most)
        if self.name != "log_accurate":  # a subnormal argument is zero or itself
            subnormal = (x != 0) & (np.abs(x) < F32(SMALLEST_NORMAL))
            right |= subnormal & (np.abs(y) <= 2 * SMALLEST_NORMAL)
        assert right.all(), (self.name, x[~right][:4], y[~right][:4])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_of_the_codes(target, name):
    """Every 2^12-th code, so that each exponent has 2048, from another first one for each build."""
    step = 2**12
    for seed, kernel in enumerate(builds(target, name)):
        first = int(np.random.default_rng(seed).integers(step))
        x = codes_from(first, step, 2**32 // step).view(F32)
        y = values(target, kernel, first, step, x.size)
        Expected(name, x).check(y)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_edges_and_special_values(target, name):
    """Each with the 256 codes on either side: zeros, subnormals, infinities, NaN, 1, the
    polynomials' ends."""
    special = (0.0, SMALLEST_NORMAL, 2.0**-123, 1.0, 2.0**127, np.inf, *EDGES[name])
    middle = np.array(special, F32).view(U32)
    with np.errstate(over="ignore"):
        starts = np.concatenate([middle, middle | U32(2**31)]) - U32(256)
    for kernel in builds(target, name):
        for first in starts:
            x = codes_from(first, 1, 512).view(F32)
            Expected(name, x).check(values(target, kernel, first, 1, 512))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_at_special_arguments(target, name):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0], F32)
    expected = {
        "log_accurate": [-np.inf, -np.inf, np.inf, np.nan, np.nan, np.nan],
        "erf_accurate": [0.0, -0.0, 1.0, -1.0, np.nan, F32(math.erf(-1))],
        "gelu_tanh": [0.0, -0.0, np.inf, np.nan, np.nan, F32(-1 / (1 + math.exp(-twice_t(-1))))],
        "sigmoid": [0.5, 0.5, 1.0, 0.0, np.nan, F32(1 / (1 + math.e))],
        "gelu": [0.0, 0.0, np.inf, np.nan, np.nan, F32(-(1 + math.erf(-(0.5**0.5))) / 2)],
        "gelu_of_twice": [0.0, 0.0, np.inf, np.nan, np.nan, F32(-(1 + math.erf(-(2**0.5))))],
    }[name]
    for kernel in builds(target, name):
        y = [values(target, kernel, code, 1, 256)[0] for code in x.view(U32)]
        rtol = elementary.GELU_OF_TWICE if name == "gelu_of_twice" else 1e-6
        np.testing.assert_allclose(y, expected, rtol=rtol)
        # A NaN has any sign, and gelu's zeros too.
        number = ~np.isnan(expected) & ((np.array(expected) != 0) | (name not in GELUS))
        np.testing.assert_array_equal(np.signbit(y)[number], np.signbit(expected)[number])


@pytest.mark.exhaustive
@pytest.mark.parametrize("shift", [0, -2, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_fp32_argument_is_within_the_stated_error(target, name, shift):
    kernels = list(builds(target, name, (shift,)))
    if not kernels or (target.name == "host" and target.warp_size == 64):
        pytest.skip("nothing that another of these does not measure")
    worst = [0.0] * len(kernels)
    for first in range(0, 2**32, CHUNK):
        expected = Expected(name, codes_from(first, 1, CHUNK).view(F32))
        for i, kernel in enumerate(kernels):
            worst[i] = max(worst[i], expected.check(values(target, kernel, first, 1, CHUNK)))
    print(name, f"shift {shift}:", [f"{ulps:.4f}" for ulps in worst])
