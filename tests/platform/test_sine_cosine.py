"""rope/sine_cosine.cuh against FP64, on each target, a * b + c contracted and not.

Largest errors, in units of 2^-24, of 4 million angles each, on the host: 1.07 of sines and 1.55 of
cosines up to pi / 4, 1.56 up to 131072 and up to 2^20; 2.9 up to 1.5 * 2^30.
"""

from __future__ import annotations

import numpy as np
import pytest
from platform_kernels import UNCONTRACTED

from cupykern.kernels import Variant
from cupykern.reference import elementary

KERNEL = """
#include "rope/sine_cosine.cuh"

KERNEL void angles(const double* x, float* sines, float* cosines) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const SineCosine found = sine_cosine(x[i]);
    sines[i] = found.sine, cosines[i] = found.cosine;
}
"""
COUNT = 2**16
FREQUENCIES = (10_000.0 ** (-np.arange(64) / 64)).astype(np.float32).astype(np.float64)
RANGES = {"near zero": 1e-3, "first quadrant": np.pi / 4, "first turn": 2 * np.pi}
POSITIONS = {"128k": 131_072, "1M": 2**20, "16M": 2**24, "2G": 2**31 - 1}


def angles(name: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    if name in RANGES:
        return rng.uniform(-RANGES[name], RANGES[name], COUNT)
    last = POSITIONS[name]
    positions = np.concatenate((rng.integers(-last, last, COUNT - 2), (last, -last)))
    return positions * FREQUENCIES[rng.integers(0, 64, COUNT)]


def run(target, prefix: str, x: np.ndarray) -> list[np.ndarray]:
    kernel = target.compile(Variant("angles", (), (), num_threads=256, text=prefix + KERNEL))
    found = [target.xp.empty(x.size, np.float32) for _ in range(2)]
    kernel(x.size // 256, (target.xp.asarray(x), *found), 0)
    return [y if isinstance(y, np.ndarray) else y.get() for y in found]


@pytest.mark.parametrize("name", [*RANGES, *POSITIONS])
def test_errors_are_those_stated(target, name):
    x = angles(name)
    allowed = elementary.SINE_COSINE_ERROR * 2**-24 + elementary.SINE_COSINE_PER_ANGLE * abs(x)
    for prefix in ("", UNCONTRACTED) if target.name == "host" else ("",):
        for y, exact in zip(run(target, prefix, x), (np.sin(x), np.cos(x)), strict=True):
            error = y - exact
            assert (abs(error) <= allowed).all()
            rms = np.sqrt(np.mean(error**2))
            stated = elementary.SINE_COSINE_RMS * 2**-24
            stated += elementary.SINE_COSINE_RMS_PER_ANGLE * np.sqrt(np.mean(x**2))
            assert rms <= 1.3 * stated  # of small angles cosines are all alike
            if name not in RANGES:
                assert 0.5 * stated <= rms
                bias = np.mean(error * np.sign(exact))
                assert abs(bias) <= elementary.SINE_COSINE_BIAS * 2**-24 + 6 * rms / COUNT**0.5


@pytest.mark.in_turn
def test_multiples_of_a_quarter_turn(target):
    """0, and doubles next to multiples of pi / 2: relative errors of what is nearly zero are small,
    too."""
    x = np.resize(np.arange(-300, 300) * (np.pi / 2), COUNT)
    for y, exact in zip(run(target, "", x), (np.sin(x), np.cos(x)), strict=True):
        small = abs(exact) < 1e-9
        assert small.any() and (abs(y - exact)[small] <= 1e-15).all()
        assert (abs(y[~small]) == 1).all() and (y[x == 0] == exact[x == 0]).all()
