"""Hopper's words: barriers, TMA, wgmma.  On the host at hostile schedules; the same tests on a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hopper_kernels import (
    MATMUL,
    MATMUL_SHARED,
    NUMBERS,
    SCHEDULES,
    Map,
    integers,
    launch,
    launch_all,
    matmul_problem,
    skip_unless_hopper,
    variant,
)

from cupykern import gate
from cupykern.targets import UnavailableError, host, tensor_map

F16, F32, I32, U16, U32 = np.float16, np.float32, np.int32, np.uint16, np.uint32


@pytest.fixture(autouse=True)
def _hopper(request):
    if "target" in request.fixturenames:
        skip_unless_hopper(request.getfixturevalue("target"))


# --- barriers ------------------------------------------------------------------------------------


def test_phases_of_a_ring(target):
    """One warp produces, three consume, through a ring of two stages."""
    text = """
struct Storage { Barrier full[2], empty[2]; int values[2][32]; };
KERNEL void word(int* y) {
    SHARED_STORAGE(Storage, s);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) { s.full[i].init(32); s.empty[i].init(3); }
    }
    sync_block();
    for (int i = 0; i < 7; ++i) {
        const int stage = i % 2, parity = i / 2 % 2;
        if (warp == 0) {
            s.empty[stage].wait(parity ^ 1);
            s.values[stage][lane] = 100 * i + lane;
            s.full[stage].arrive();
        } else {
            s.full[stage].wait(parity);
            y[((warp - 1) * 7 + i) * 32 + lane] = s.values[stage][31 - lane];
            sync_warp();
            if (lane == 0) s.empty[stage].arrive();
        }
    }
}
"""
    arrays = {"y": np.zeros((3, 7, 32), I32)}
    y = launch_all(target, variant(text), arrays, ("y",), shared=512)["y"]
    expected = 100 * np.arange(7)[:, None] + 31 - np.arange(32)
    np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


@pytest.mark.parametrize("cpp", ["int", "uint64_t", "Bytes<16>"])
@pytest.mark.parametrize("cluster", [2, 4])
def test_stores_into_the_next_block(target, cpp, cluster):
    text = """
struct Storage { alignas(16) Word inbox[32]; Barrier full, seen; };
KERNEL void word(const Word* x, Word* y) {
    SHARED_STORAGE(Storage, s);
    const int i = threadIdx.x, rank = cluster_rank(), next = (rank + 1) % kClusterSize;
    if (i == 0) {
        s.full.init(1);
        s.seen.init(32);
        fence_barrier_init();
        s.full.arrive_expect_tx(sizeof(s.inbox));
    }
    cluster_arrive();
    cluster_wait();
    store_async(&s.inbox[31 - i], x[blockIdx.x * 32 + i], s.full, next);
    s.full.wait_cluster(0);
    y[blockIdx.x * 32 + i] = s.inbox[i];
    s.seen.arrive_remote((rank + kClusterSize - 1) % kClusterSize);
    s.seen.wait_cluster(0);
}
"""
    size = {"int": 4, "uint64_t": 8, "Bytes<16>": 16}[cpp]
    grid = 2 * cluster
    x = np.random.default_rng(1).integers(0, 2**32, (grid, 32, size // 4), dtype=U32)
    arrays = {"x": x, "y": np.zeros_like(x)}
    kernel = variant(text, threads=32, cluster=cluster, Word=cpp)
    y = launch_all(target, kernel, arrays, ("x", "y"), grid, shared=1024)["y"]
    block = np.arange(grid)
    sender = block // cluster * cluster + (block % cluster - 1) % cluster
    np.testing.assert_array_equal(y, x[sender, ::-1])


# --- TMA -----------------------------------------------------------------------------------------


def swizzle(image: np.ndarray, span: int) -> np.ndarray:
    """What TMA makes of lines of `span` bytes: within 8 times that, the part number i (of 16 bytes) of
    what would be line j of 128 bytes goes to the part number i ^ (j mod span / 16)."""
    if span == 0:
        return image
    offset = np.arange(image.size)
    part, line = offset // 16 % 8, offset // 128
    there = line * 128 + (part ^ line % (span // 16)) * 16 + offset % 16
    swizzled = np.empty_like(image)
    swizzled[there] = image
    return swizzled


def box_of(x: np.ndarray, at: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """The box at `at` (outermost first), zero outside of x."""
    result = np.zeros(box, x.dtype)
    for i in itertools.product(*map(range, box)):
        j = tuple(a + b for a, b in zip(at, i, strict=True))
        if all(0 <= index < size for index, size in zip(j, x.shape, strict=True)):
            result[i] = x[j]
    return result


BOXES = [
    # dtype, shape, box, at, swizzle
    (np.uint8, (100,), (64,), (0,), 0),
    (np.uint8, (100,), (64,), (70,), 0),
    (F16, (40, 64), (16, 64), (8, 0), 128),
    (F16, (40, 96), (16, 64), (32, 64), 128),
    (F16, (40, 96), (16, 64), (-3, -8), 128),
    (F16, (40, 96), (32, 32), (5, 24), 64),
    (F16, (40, 96), (32, 16), (-40, 0), 32),
    (F32, (30, 36), (24, 4), (12, 33), 0),
    (F32, (30, 36), (24, 8), (12, 33), 32),
    (np.uint8, (17, 256), (16, 128), (3, 200), 128),
    (U16, (5, 6, 80), (2, 4, 64), (4, 3, 20), 128),
    (U16, (3, 4, 5, 64), (2, 3, 2, 32), (2, -1, 4, 33), 64),
    (U32, (2, 3, 4, 3, 16), (2, 2, 3, 2, 8), (1, 2, 2, 2, 12), 32),
]


def values(shape: tuple[int, ...], dtype) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 100, shape).astype(dtype)


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, at[::-1])) + "}"


@pytest.mark.parametrize(("dtype", "shape", "box", "at", "span"), BOXES)
def test_tma_load(target, dtype, shape, box, at, span):
    text = f"""
struct Storage {{ alignas(1024) unsigned char box[8192]; Barrier full; }};
KERNEL void word(GRID_CONSTANT TensorMap map, unsigned char* y, int bytes) {{
    SHARED_STORAGE(Storage, s);
    if (threadIdx.x == 0) {{
        prefetch_tensor_map(map);
        s.full.init(1);
        fence_barrier_init();
        s.full.arrive_expect_tx(bytes);
        tma_load<kEvictFirst>(s.box, map, s.full, {coordinates(at)});
    }}
    sync_block();
    s.full.wait(0);
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) y[i] = s.box[i];
}}
"""
    x = values(shape, dtype)
    size = int(np.prod(box)) * x.itemsize
    arrays = {"x": x, "y": np.zeros(size, np.uint8)}
    args = (Map("x", box, span), "y", I32(size))
    y = launch_all(target, variant(text), arrays, args, shared=9216)["y"]
    image = np.frombuffer(box_of(x, at, box).tobytes(), np.uint8)
    np.testing.assert_array_equal(y, swizzle(image, span))


@pytest.mark.parametrize(("dtype", "shape", "box", "at", "span"), BOXES)
def test_tma_store(target, dtype, shape, box, at, span):
    text = f"""
struct Storage {{ alignas(1024) unsigned char box[8192]; }};
KERNEL void word(GRID_CONSTANT TensorMap map, const unsigned char* image, int bytes) {{
    SHARED_STORAGE(Storage, s);
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) s.box[i] = image[i];
    fence_async_proxy();
    sync_block();
    if (threadIdx.x == 0) {{
        tma_store(map, s.box, {coordinates(at)});
        tma_store_commit();
        tma_store_wait<0>();
    }}
}}
"""
    x = values(shape, dtype)
    new = np.random.default_rng(4).integers(100, 120, box).astype(dtype)
    image = swizzle(np.frombuffer(new.tobytes(), np.uint8), span)
    arrays = {"x": x, "image": image}
    args = (Map("x", box, span), "image", I32(image.size))
    y = launch_all(target, variant(text), arrays, args, shared=8192)["x"]
    expected = x.copy()
    for i in itertools.product(*map(range, box)):
        j = tuple(a + b for a, b in zip(at, i, strict=True))
        if all(0 <= index < size for index, size in zip(j, shape, strict=True)):
            expected[j] = new[i]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("cluster", [2, 4])
def test_tma_multicast(target, cluster):
    """Every block brings one part of the tile to all blocks of its cluster."""
    text = """
struct Storage { alignas(1024) uint32_t tile[kClusterSize * 256]; Barrier full; };
KERNEL void word(GRID_CONSTANT TensorMap map, uint32_t* y) {
    SHARED_STORAGE(Storage, s);
    const int rank = cluster_rank();
    if (threadIdx.x == 0) {
        s.full.init(1);
        fence_barrier_init();
        s.full.arrive_expect_tx(sizeof(s.tile));
    }
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x == 0) {
        const int row = (blockIdx.x / kClusterSize * kClusterSize + rank) * 8;
        tma_load_multicast(s.tile + 256 * rank, map, s.full, {0, row}, (1 << kClusterSize) - 1);
    }
    s.full.wait(0);
    for (int i = threadIdx.x; i < 256 * kClusterSize; i += blockDim.x) {
        y[blockIdx.x * kClusterSize * 256 + i] = s.tile[i];
    }
    cluster_arrive();
    cluster_wait();
}
"""
    x = np.random.default_rng(5).integers(0, 2**32, (2 * cluster * 8, 32), dtype=U32)
    arrays = {"x": x, "y": np.zeros((2, cluster, cluster * 256), U32)}
    kernel = variant(text, cluster=cluster)
    args = (Map("x", (8, 32)), "y")
    y = launch_all(target, kernel, arrays, args, 2 * cluster, shared=8192)["y"]
    expected = x.reshape(2, 1, cluster * 256)
    np.testing.assert_array_equal(y, np.broadcast_to(expected, y.shape))


# --- warps and matrices --------------------------------------------------------------------------


def test_one_lane_is_elected_and_registers_move(target):
    text = """
KERNEL void word(int* y) {
    if (threadIdx.x < 128) decrease_registers<40>();
    else increase_registers<96>();
    if (elect_one()) y[threadIdx.x / kWarpSize] += 1;
    sync_warp();
    if (elect_one()) y[threadIdx.x / kWarpSize] += 10;
}
"""
    kernel = variant(text, threads=256)
    y = launch_all(target, kernel, {"y": np.zeros(8, I32)}, ("y",))["y"]
    assert (y == 11 * (np.arange(8) < 256 // target.warp_size)).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["false", "true"])
def test_load_and_store_matrix(target, count, transposed):
    text = f"""
struct Storage {{ alignas(16) uint16_t from[4 * 64], to[4 * 64]; }};
KERNEL void word(const uint16_t* x, uint32_t* registers, uint16_t* y) {{
    SHARED_STORAGE(Storage, s);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) {{
        s.from[i] = x[i];
        s.to[i] = 0;
    }}
    sync_warp();
    uint32_t r[{count}];
    load_matrix<{transposed}>(r, &s.from[lane % (8 * {count}) * 8]);
    store_matrix<{transposed}>(&s.to[lane % (8 * {count}) * 8], r);
    sync_warp();
    for (int i = 0; i < {count}; ++i) registers[i * 32 + lane] = r[i];
    for (int i = lane; i < 256; i += 32) y[i] = s.to[i];
}}
"""
    x = np.random.default_rng(6).integers(0, 2**16, (4, 8, 8), dtype=U16)
    arrays = {"x": x, "registers": np.zeros((count, 32), U32), "y": np.zeros_like(x)}
    out = launch_all(
        target, variant(text, threads=32), arrays, ("x", "registers", "y"), shared=1024
    )
    read = x[:count].swapaxes(1, 2) if transposed == "true" else x[:count]
    np.testing.assert_array_equal(out["registers"].view(U16).reshape(count, 8, 8), read)
    x[count:] = 0
    np.testing.assert_array_equal(out["y"], x)


# --- wgmma ---------------------------------------------------------------------------------------

# A product of tiles with 128 bytes of K: TMA brings the tiles in boxes whose lines have kSwizzle bytes,
# without swizzle 16.
PRODUCT = """
constexpr int kSize = sizeof(A), kK = 128 / kSize, kLine = kSwizzle ? kSwizzle : 16;
constexpr int kStep = 32 / kSize;
struct Storage {
    alignas(1024) unsigned char a[64 * 128], b[kN * 128];
    Barrier full;
};

// The tile's descriptor for the numbers from k on, of kRows rows.
template <Major kMajor, int kRows>
DEVICE uint64_t descriptor(const unsigned char* tile, int k) {
    if (kMajor == kMajorK) {
        const unsigned char* p = tile + k * kSize / kLine * kLine * kRows + k * kSize % kLine;
        return matrix_descriptor<kSwizzle>(p, kLine * kRows, 8 * kLine);
    }
    const unsigned char* p = tile + k * kLine;
    if (kSwizzle) return matrix_descriptor<kSwizzle>(p, kK * kLine, 8 * kLine);
    return matrix_descriptor<kSwizzle>(p, 8 * kLine, kK * kLine);
}

template <Major kMajor, int kRows>
DEVICE void load(unsigned char* tile, const TensorMap& map, Barrier& full) {
    constexpr int kLines = kMajor == kMajorK ? kRows : kK;
    constexpr int kWidth = kMajor == kMajorK ? kK : kRows;
    for (int i = 0; i < kWidth * kSize / kLine; ++i) {
        tma_load(tile + i * kLine * kLines, map, full, {i * kLine / kSize, 0});
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
        load<kMajorB, kN>(s.b, b_map, s.full);
    }
    sync_block();
    s.full.wait(0);
    D d[kN / 2];
    for (int i = 0; i < kN / 2; ++i) d[i] = D(wgmma_row(t, i) - wgmma_col(t, i));
    wgmma_fence(d);
#pragma unroll
    for (int k = 0; k < kK; k += kStep) {
        const uint64_t b_tile = descriptor<kMajorB, kN>(s.b, k);
        if (kInRegisters) {
            uint32_t registers[4];
            for (int i = 0; i < 4; ++i) {
                const int row = wgmma_row(t, 2 * (i % 2)), col = k + t % 4 * (4 / kSize);
                memcpy(&registers[i], a + row * kK + col + i / 2 * (16 / kSize), 4);
            }
            wgmma_fence(d);
            wgmma<A, B, kMajorK, kMajorB>(d, registers, b_tile, true);
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


@pytest.mark.parametrize(("a", "b", "n", "span", "major_a", "major_b", "registers"), PRODUCTS)
def test_wgmma(target, a, b, n, span, major_a, major_b, registers):
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
    run = launch if n > 96 else launch_all
    y = run(target, kernel, arrays, (*maps, "a", "y"), shared=128 * (72 + n))["y"]
    expected = a_values.astype(F32) @ b_values.astype(F32).T
    np.testing.assert_array_equal(y, expected + np.arange(64)[:, None] - np.arange(n))
