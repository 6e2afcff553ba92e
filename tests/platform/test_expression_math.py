"""The functions of expression/math.cuh against FP64, on each target.

Every 64th FP32 number gave these largest errors in ulps on the host, a * b + c contracted and not:

    square_root     0.50, as with reciprocal_square_root 2 ulp off
    tanh_accurate   1.70; 3.29 with exp2_approx 2 ulp and reciprocal_approx 1 ulp off
    sine, cosine    1.56, for arguments up to 2^16
"""

from __future__ import annotations

import numpy as np
import pytest

from cupykern.kernels import Variant
from cupykern.reference import elementary

F32, U32 = np.float32, np.uint32
SMALLEST = 2.0**-126
ULPS = {
    "square_root": elementary.SQRT_ULPS,
    "tanh_accurate": elementary.TANH_ULPS,
    "sine": elementary.SINE_ULPS,
    "cosine": elementary.SINE_ULPS,
}
REFERENCES = {"square_root": np.sqrt, "tanh_accurate": np.tanh, "sine": np.sin, "cosine": np.cos,
              "whole_below": np.floor}  # fmt: skip
KERNEL = """
// Off by kShift ulps, or half as many, for the worst that a platform's own may be.
DEVICE float shifted(float y, int by) {
    return y >= 0x1p-126f && y < kInfinity ? bit_cast<float>(bit_cast<int>(y) + by) : y;
}
DEVICE float shifted_rsqrt(float x) { return shifted(reciprocal_square_root(x), kShift); }
DEVICE float shifted_exp2(float x) { return shifted(exp2_approx(x), kShift); }
DEVICE float shifted_reciprocal(float x) { return shifted(reciprocal_approx(x), -kShift / 2); }
#define reciprocal_square_root shifted_rsqrt
#define exp2_approx shifted_exp2
#define reciprocal_approx shifted_reciprocal
#include "expression/math.cuh"

KERNEL void word(uint32_t first, uint32_t step, float* y) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = FUNCTION(bit_cast<float>(first + i * step));
}
"""
UNCONTRACTED = """
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
"""


def builds(target, name):
    host = target.name == "host"
    for prefix in ("", UNCONTRACTED) if host else ("",):
        for shift in (0, -2, 2) if host and name != "whole_below" else (0,):
            text = prefix + KERNEL.replace("FUNCTION", name)
            yield target.compile(Variant("word", (), (("kShift", shift),), 256, text=text))


def values(target, kernel, first, step, count):
    y = target.xp.empty(count, target.xp.float32)
    kernel(count // 256, (U32(first), U32(step), y), 0)
    return y if isinstance(y, np.ndarray) else y.get()


def numbers(first, step, count):
    with np.errstate(over="ignore"):
        return (U32(first) + np.arange(count, dtype=U32) * U32(step)).view(F32)


def errors(name, x, y):
    """In ulps of the exact result, where it and x are normal numbers, and x is in the range."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        exact = REFERENCES[name](wide)
        known = (np.abs(wide) >= SMALLEST) & np.isfinite(exact) & (np.abs(exact) >= 2 * SMALLEST)
        if name in ("sine", "cosine"):
            known &= np.abs(wide) <= elementary.SINE_LIMIT
        ulp = np.exp2(np.floor(np.log2(np.abs(exact))) - 23)
        return np.where(known, np.abs(y - exact) / ulp, 0.0)


@pytest.mark.parametrize("name", ULPS)
def test_errors_are_within_what_bounds_take(target, name):
    step = 2**12
    for seed, kernel in enumerate(builds(target, name)):
        first = int(np.random.default_rng(seed).integers(step))
        x = numbers(first, step, 2**32 // step)
        found = errors(name, x, values(target, kernel, first, step, x.size))
        assert found.max() <= ULPS[name], (x[found.argmax()], found.max())
        assert found.max() > 0.4  # or nothing was measured


@pytest.mark.in_turn
def test_exponentials_are_within_what_bounds_take(target):
    """By which the exponent is rounded grows with it."""
    for build, kernel in enumerate(builds(target, "exp_of")):
        shifted = build % 3 > 0  # beside the host's own rounding
        for first in (0x3C000000, 0xBC000000):  # from 2^-7 on, either sign
            x = numbers(first, 2**7, 2**20)
            y = values(target, kernel, first, 2**7, x.size)
            wide = x.astype(np.float64)
            with np.errstate(all="ignore"):
                exact = np.exp(wide)
                known = (exact > 2 * SMALLEST) & (exact < 3e38)
                found = np.where(known, np.abs(y - exact) / exact, 0.0)
            ulps = elementary.EXP2_ULPS + shifted / 2
            allowed = (2 * ulps + 1.25 * np.abs(wide)) * 2.0**-24
            assert (found <= allowed).all() and found.max() > 2.0**-20


@pytest.mark.parametrize("name", ["sine", "cosine"])
def test_sines_near_their_zeros(target, name):
    """The FP32 numbers next to multiples of pi / 2, where all of the result comes from pi's end."""
    multiples = np.arange(1, int(elementary.SINE_LIMIT / (np.pi / 2)), dtype=np.float64)
    codes = (multiples * (np.pi / 2)).astype(F32).view(U32)
    (kernel, *_) = builds(target, name)
    for code in codes[:: max(1, codes.size // 300)]:
        x = numbers(int(code) - 128, 1, 256)
        found = errors(name, x, values(target, kernel, int(code) - 128, 1, 256))
        assert found.max() <= ULPS[name], (x[found.argmax()], found.max())


def test_floor_is_exact(target):
    for kernel in builds(target, "whole_below"):
        for first in (
            0,
            0x3F000000,
            0xBF000000,
            0x4B000000 - 2**16,
            0xCB000000 - 2**16,
            0x7F7FFF00,
        ):
            x = numbers(first, 1, 2**17)
            y = values(target, kernel, first, 1, x.size)
            np.testing.assert_array_equal(y, np.floor(np.where(np.abs(x) < SMALLEST, 0, x)))


@pytest.mark.parametrize("name", [*ULPS, "whole_below"])
def test_values_at_special_arguments(target, name):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1.0], F32)
    with np.errstate(all="ignore"):
        expected = REFERENCES[name](special)
    for kernel in builds(target, name):
        y = [values(target, kernel, int(code), 1, 256)[0] for code in special.view(U32)]
        np.testing.assert_allclose(y, expected, rtol=1e-6)
