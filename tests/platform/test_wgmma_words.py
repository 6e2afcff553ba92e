"""wgmma: its products, what its A in registers is made of, and how FP8 sums are cut."""

from __future__ import annotations

import itertools

import needs
import numpy as np
import pytest
import record_golden
import tensor_core
from hopper_kernels import (
    NUMBERS,
    Map,
    integers,
    launch_all,
    variant,
)

from cupykern import nvfp4
from cupykern.reference.accumulation import TENSOR_8

F32, I32 = np.float32, np.int32


pytestmark = needs.hopper


# --- products -----------------------------------------------------------------------------------

# A product of tiles with 128 bytes of K: TMA brings the tiles in boxes whose rows have kSwizzle
# bytes, without swizzle 16.
PRODUCT = """
constexpr int kSize = sizeof(A), kK = 128 / kSize, kRowBytes = kSwizzle ? kSwizzle : 16;
constexpr int kStep = 32 / kSize;
// The last box along N may be used in part.
constexpr int kBoxN = kMajorB == kMajorK ? 1 : kRowBytes / kSize;
constexpr int kPaddedN = (kN + kBoxN - 1) / kBoxN * kBoxN;
struct Storage {
    alignas(1024) unsigned char a[64 * 128], b[kPaddedN * 128];
    Barrier full;
};

// The tile's descriptor for k on, of kRows rows.
template <Major kMajor, int kRows>
DEVICE uint64_t descriptor(const unsigned char* tile, int k) {
    if (kMajor == kMajorK) {
        const unsigned char* p =
            tile + k * kSize / kRowBytes * kRowBytes * kRows + k * kSize % kRowBytes;
        return matrix_descriptor<kSwizzle>(p, kRowBytes * kRows, 8 * kRowBytes);
    }
    const unsigned char* p = tile + k * kRowBytes;
    if (kSwizzle) return matrix_descriptor<kSwizzle>(p, kK * kRowBytes, 8 * kRowBytes);
    return matrix_descriptor<kSwizzle>(p, 8 * kRowBytes, kK * kRowBytes);
}

template <Major kMajor, int kRows>
DEVICE void load(unsigned char* tile, const TensorMap& map, Barrier& full) {
    constexpr int kBoxRows = kMajor == kMajorK ? kRows : kK;
    constexpr int kWidth = kMajor == kMajorK ? kK : kRows;
    for (int i = 0; i < kWidth * kSize / kRowBytes; ++i) {
        tma_load(tile + i * kRowBytes * kBoxRows, map, full, {i * kRowBytes / kSize, 0});
    }
}

KERNEL void word(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map, const A* a, D* y) {
    SHARED_STORAGE(Storage, s);
    const int t = threadIdx.x;
    if (t == 0) {
        s.full.init(1);
        fence_barrier_init();
        s.full.arrive_expect_tx(sizeof(s.a) + sizeof(s.b));
        load<kMajorA, 64>(s.a, a_map, s.full);
        load<kMajorB, kPaddedN>(s.b, b_map, s.full);
    }
    sync_block();
    s.full.wait(0);
    D d[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = D(wgmma_row(t, i) - wgmma_col(t, i));
    uint32_t registers[kK / kStep][4];
    wgmma_fence(d);
#pragma unroll
    for (int k = 0; k < kK; k += kStep) {
        const uint64_t b_tile = descriptor<kMajorB, kN>(s.b, k);
        if (kInRegisters) {
            uint32_t(&now)[4] = registers[k / kStep];
            for (int i = 0; i < 4; ++i) {
                const int row = wgmma_row(t, 2 * (i % 2)), col = k + t % 4 * (4 / kSize);
                memcpy(&now[i], a + row * kK + col + i / 2 * (16 / kSize), 4);
            }
            wgmma_fence(d);
            wgmma<A, B, kMajorK, kMajorB>(d, now, b_tile, true);
        } else {
            wgmma<A, B, kMajorA, kMajorB>(d, descriptor<kMajorA, 64>(s.a, k), b_tile, true);
        }
    }
    wgmma_commit();
    wgmma_wait<0>(d);
    for (int i = 0; i < kN / 2; ++i) y[wgmma_row(t, i) * kN + wgmma_col(t, i)] = d[i];
}
"""

PRODUCTS = [
    # A, B, N, swizzle, major of A, of B, A in registers
    *(("half", "half", n, 128, "K", "K", False) for n in range(8, 257, 8)),
    *(
        (a, a, 64, span, major_a, major_b, registers)
        for a in ("half", "bf16")
        for span in (0, 32, 64, 128)
        for major_a, major_b, registers in (
            *(("K", "K", False), ("K", "MN", False), ("MN", "K", False), ("MN", "MN", False)),
            *(("K", "K", True), ("K", "MN", True)),
        )
    ),
    ("half", "half", 256, 64, "MN", "MN", False),
    # Of the last box along N a part is used.
    *(("bf16", "bf16", n, 128, "K", "MN", True) for n in (80, 96, 112)),
    *(
        (a, b, n, span, "K", "K", registers)
        for a, b in itertools.product(("e4m3", "e5m2"), repeat=2)
        for n, span, registers in ((8, 0, False), (96, 32, False), (256, 64, True))
    ),
    *(
        ("int8_t", "int8_t", n, span, "K", "K", registers)
        for n, span, registers in ((8, 0, True), (96, 32, False), (256, 64, False))
    ),
]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("a", "b", "n", "span", "major_a", "major_b", "registers"), PRODUCTS)
def test_wgmma_of_every_layout_is_exact(target, a, b, n, span, major_a, major_b, registers):
    size = NUMBERS[a].itemsize
    k, line = 128 // size, (span or 16) // size
    a_values, b_values = integers((64, k), NUMBERS[a]), integers((n, k), NUMBERS[b], seed=2)
    a_stored = a_values if major_a == "K" else np.ascontiguousarray(a_values.T)
    b_stored = b_values if major_b == "K" else np.ascontiguousarray(b_values.T)
    constants = (
        f"constexpr int kN = {n}, kSwizzle = {span};\n"
        f"constexpr bool kInRegisters = {'true' if registers else 'false'};\n"
        f"constexpr Major kMajorA = kMajor{major_a}, kMajorB = kMajor{major_b};\n"
    )
    out = "int" if a == "int8_t" else "float"
    kernel = variant(constants + PRODUCT, A=a, B=b, D=out)
    y = np.zeros((64, n), I32 if out == "int" else F32)
    arrays = {"a": a_stored, "b": b_stored, "y": y}
    maps = (Map(x, (arrays[x].shape[0], line), span) for x in ("a", "b"))
    padding = -n % line if major_b == "MN" else 0
    shared = 128 * (72 + n + padding)
    y = launch_all(target, kernel, arrays, (*maps, "a", "y"), shared=shared)["y"]
    expected = a_values.astype(F32) @ b_values.astype(F32).T
    np.testing.assert_array_equal(y, expected + np.arange(64)[:, None] - np.arange(n))


def test_two_products_under_way(target):
    """The first is waited for while the second goes on; its tile may then be overwritten."""
    text = """
struct Storage { alignas(1024) half a[2][64 * 64], b[64 * 64]; Barrier full; };
KERNEL void word(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map, float* y) {
    SHARED_STORAGE(Storage, s);
    const int t = threadIdx.x;
    if (t == 0) {
        s.full.init(1);
        fence_barrier_init();
        s.full.arrive_expect_tx(sizeof(s.a) + sizeof(s.b));
        tma_load(s.a[0], a_map, s.full, {0, 0});
        tma_load(s.a[1], a_map, s.full, {0, 64});
        tma_load(s.b, b_map, s.full, {0, 0});
    }
    sync_block();
    s.full.wait(0);
    float d[2][32];
    for (int i = 0; i < 2; ++i) {
        wgmma_fence(d[i]);
        for (int k = 0; k < 4; ++k) {
            wgmma<half>(d[i], advance(matrix_descriptor<128>(s.a[i], 16, 1024), 32 * k),
                        advance(matrix_descriptor<128>(s.b, 16, 1024), 32 * k), k > 0);
        }
        wgmma_commit();
    }
    wgmma_wait<1>(d[0]);
    sync_block();
    s.a[0][t] = half();
    for (int i = 0; i < 32; ++i) y[wgmma_row(t, i) * 64 + wgmma_col(t, i)] = d[0][i];
    wgmma_wait<0>(d[1]);
    for (int i = 0; i < 32; ++i) y[(64 + wgmma_row(t, i)) * 64 + wgmma_col(t, i)] = d[1][i];
}
"""
    a, b = integers((128, 64), NUMBERS["half"]), integers((64, 64), NUMBERS["half"], seed=2)
    arrays = {"a": a, "b": b, "y": np.zeros((128, 64), F32)}
    args = (Map("a", (64, 64), 128), Map("b", (64, 64), 128), "y")
    y = launch_all(target, variant(text), arrays, args, shared=25 * 1024)["y"]
    np.testing.assert_array_equal(y, a.astype(F32) @ b.astype(F32).T)


# --- A in registers, and sums --------------------------------------------------------------------


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


@pytest.mark.parametrize("in_units", [True, False])
@pytest.mark.parametrize("number", ["half", "bf16"])
def test_every_pair_of_codes_times_every_scale(target, number, in_units):
    """All bytes of two e2m1 codes times all e4m3 scales, NaN too, whichever byte and word it is."""
    text = """
#include "platform/nvfp4.cuh"
KERNEL void word(const uint32_t* scales, uint32_t* y, float* unit) {
    for (int i = threadIdx.x; i < 128; i += 32) {
        for (int j = 0; j < 256; ++j) {
            uint32_t words[4], pairs[4];
            for (int n = 0; n < 4; ++n) {
                const uint32_t byte = j + 64 * n & 0xff, shift = j % 4 * 8;
                words[n] = 0x5a5a5a5au & ~(0xffu << shift) | byte << shift;
            }
            const uint32_t factors = scale_factors<T, IN_UNITS>(scales[i]);
            decode_bytes<T, IN_UNITS>(words, j % 4, factors, pairs);
            for (int n = 0; n < 4; ++n) y[(i * 256 + j) * 4 + n] = pairs[n];
            unit[0] = IN_UNITS ? kScaledUnit<T> : 1.0f;
        }
    }
}
"""
    x = np.arange(256, dtype=np.uint8)
    scales = x.reshape(128, 2).astype(np.uint32) << np.array([0, 8], np.uint32)
    y = np.zeros((128, 256, 4, 2), NUMBERS[number])
    unit = np.zeros(1, np.float32)
    arrays = {"scales": scales.sum(1).astype(np.uint32), "y": y, "unit": unit}
    text = text.replace("IN_UNITS", str(in_units).lower())
    kernel = variant(text, threads=32, T=number)
    found = launch_all(target, kernel, arrays, ("scales", "y", "unit"))
    y, unit = found["y"].astype(np.float32), found["unit"]
    numbers = nvfp4.unpack_e2m1(
        ((x[:, None] + 64 * np.arange(4)) % 256).astype(np.uint8)[..., None]
    )
    factors = x.view(NUMBERS["e4m3"]).astype(np.float32).reshape(128, 1, 2).repeat(2, -1)
    np.testing.assert_array_equal(y, factors[..., None] * numbers * unit)


@pytest.mark.parametrize(
    ("a", "b"), [("half", "half"), ("bf16", "bf16"), ("e4m3", "e4m3"), ("e5m2", "e4m3")]
)
def test_products_are_added_as_tensor_cores_do(target, a, b):
    """Truncated after alignment, bit for bit; 128 bytes of k."""
    x, y, product = record_golden.cut_sums(target, a, b)
    np.testing.assert_array_equal(product, tensor_core.product(x, y, (a, b)))


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_cut_sums_are_within_the_bound(target, a, b):
    """128 of k in the tensor core: below the sum of products by at most the bound."""
    x, y, product = record_golden.cut_sums(target, a, b)
    expected = x @ y.T
    error = (expected - product) / expected
    assert error.min() >= 0 and 2.0**-14 < error.max() <= 4 * TENSOR_8.worst


def test_small_integers_are_not_cut(target):
    """Sums up to 2^13 have no bits to lose."""
    x = integers((2, 64 * 128), NUMBERS["e4m3"], limit=8)
    text = record_golden.CUT
    y = np.zeros((64, 64), np.float32)
    arrays = {"a": x[0].view(np.uint8), "b": x[1].view(np.uint8), "y": y}
    kernel = variant(text, A="e4m3", B="e4m3")
    y = launch_all(target, kernel, arrays, ("a", "b", "y"), shared=16384)["y"]
    a, b = (
        i.reshape(4, 2, 8, 8, 16).transpose(2, 3, 0, 1, 4).reshape(64, 128).astype(np.float32)
        for i in x
    )
    np.testing.assert_array_equal(y, a @ b.T)
