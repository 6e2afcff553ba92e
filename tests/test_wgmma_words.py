"""What wgmma's A in registers is made of, and how FP8 sums are cut."""

from __future__ import annotations

import numpy as np
import pytest
import record_golden
from hopper_kernels import NUMBERS, integers, launch_all, skip_unless_hopper, variant

from cupykern.gemm import nvfp4
from cupykern.reference.matmul import MMA_FP8_ERROR


@pytest.fixture(autouse=True)
def _hopper(request):
    if "target" in request.fixturenames:
        skip_unless_hopper(request.getfixturevalue("target"))


@pytest.mark.parametrize("stored", ["e4m3", "e5m2", "int8_t"])
@pytest.mark.parametrize("number", ["half", "bf16"])
def test_every_code_converts_exactly(target, stored, number):
    text = """
KERNEL void word(const uint32_t* x, uint32_t* y) {
    for (int i = threadIdx.x; i < 64; i += 32) {
        convert_bytes<Stored, T>(permute_bytes<0x3120>(x[i]), y[2 * i], y[2 * i + 1]);
    }
}
"""
    x = np.arange(256, dtype=np.uint8)
    y = np.zeros(256, NUMBERS[number])
    kernel = variant(text, threads=32, Stored=stored, T=number)
    y = launch_all(target, kernel, {"x": x, "y": y}, ("x", "y"))["y"].astype(np.float32)
    expected = (
        x.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1).view(NUMBERS[stored]).astype(np.float32)
    )
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("number", ["half", "bf16"])
def test_every_pair_of_codes_times_every_scale(target, number):
    """All bytes of two e2m1 codes times all e4m3 scales, NaN too, whichever byte and word it is."""
    text = """
KERNEL void word(const uint32_t* scales, uint32_t* y) {
    for (int i = threadIdx.x; i < 128; i += 32) {
        for (int j = 0; j < 256; ++j) {
            uint32_t words[4], pairs[4];
            for (int n = 0; n < 4; ++n) {
                const uint32_t byte = j + 64 * n & 0xff, shift = j % 4 * 8;
                words[n] = 0x5a5a5a5au & ~(0xffu << shift) | byte << shift;
            }
            decode_bytes<T>(words, j % 4, scales[i], pairs);
            for (int n = 0; n < 4; ++n) y[(i * 256 + j) * 4 + n] = pairs[n];
        }
    }
}
"""
    x = np.arange(256, dtype=np.uint8)
    scales = x.reshape(128, 2).astype(np.uint32) << np.array([0, 8], np.uint32)
    y = np.zeros((128, 256, 4, 2), NUMBERS[number])
    arrays = {"scales": scales.sum(1).astype(np.uint32), "y": y}
    kernel = variant(text, threads=32, T=number)
    y = launch_all(target, kernel, arrays, ("scales", "y"))["y"].astype(np.float32)
    numbers = nvfp4.unpack_e2m1(
        ((x[:, None] + 64 * np.arange(4)) % 256).astype(np.uint8)[..., None]
    )
    factors = x.view(NUMBERS["e4m3"]).astype(np.float32).reshape(128, 1, 2).repeat(2, -1)
    np.testing.assert_array_equal(y, factors[..., None] * numbers)


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_cut_sums_are_within_the_bound(target, a, b):
    """128 of k in the tensor core: less than the products' sum, by as much as the bound says at most."""
    y = record_golden.cut_sums(target, a, b).astype(np.float64)
    rng = np.random.default_rng(9)
    rows = []
    for name in (a, b):
        codes = rng.integers(0x20, 0x50, (4, 2, 8, 8, 16)).astype(np.uint8)
        # (step, half of 32 bytes, group of rows, row, byte)
        rows.append(codes.transpose(2, 3, 0, 1, 4).reshape(64, 128).view(NUMBERS[name]))
    expected = rows[0].astype(np.float64) @ rows[1].astype(np.float64).T
    error = (expected - y) / expected
    assert error.min() >= 0 and 2.0**-14 < error.max() <= 4 * MMA_FP8_ERROR


def test_small_integers_are_not_cut(target):
    """Sums up to 2^13 have no bits to lose."""
    x = integers((2, 64 * 128), NUMBERS["e4m3"], limit=8)
    text = record_golden._CUT
    y = np.zeros((64, 64), np.float32)
    arrays = {"a": x[0].view(np.uint8), "b": x[1].view(np.uint8), "y": y}
    kernel = variant(text, A="e4m3", B="e4m3")
    y = launch_all(target, kernel, arrays, ("a", "b", "y"), shared=16384)["y"]
    a, b = (
        i.reshape(4, 2, 8, 8, 16).transpose(2, 3, 0, 1, 4).reshape(64, 128).astype(np.float32)
        for i in x
    )
    np.testing.assert_array_equal(y, a @ b.T)
