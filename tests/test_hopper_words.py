"""Hopper's words: barriers, TMA, wgmma.  On the host at hostile schedules; the same tests on a GPU."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import record_golden
from hopper_kernels import (
    BOXES,
    MATMUL,
    MATMUL_SHARED,
    NUMBERS,
    SCHEDULES,
    Map,
    coordinates,
    integers,
    launch,
    launch_all,
    matmul_problem,
    skip_unless_hopper,
    tma_image,
    values,
    variant,
)

from cupykern.targets import UnavailableError, host, host_compiler, tensor_map
from cupykern.tools import gate

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
struct Storage { alignas(16) Word inbox[32]; Barrier full, seen, free; };
KERNEL void word(const Word* x, Word* y) {
    SHARED_STORAGE(Storage, s);
    const int i = threadIdx.x, rank = cluster_rank(), next = (rank + 1) % kClusterSize;
    if (i == 0) {
        s.full.init(1);
        s.seen.init(32);
        s.free.init(32);
        fence_barrier_init();
        s.full.arrive_expect_tx(sizeof(s.inbox));
    }
    cluster_arrive();
    cluster_wait();
    store_async(&s.inbox[31 - i], x[blockIdx.x * 32 + i], s.full, next);
    s.full.wait(0);  // as quick as in a block: bytes that are counted here bring what they carry
    y[blockIdx.x * 32 + i] = s.inbox[i];
    s.seen.arrive_remote((rank + kClusterSize - 1) % kClusterSize);
    s.seen.wait_cluster(0);
    s.free.release_remote(next);
    s.free.wait(0);
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


# --- bulk copies ---------------------------------------------------------------------------------


def test_bulk_loads_through_a_ring(target):
    """Lines of different lengths, a stage filled again once all have read it."""
    text = """
struct Storage { alignas(16) uint32_t ring[2][128]; Barrier full[2]; };
KERNEL void word(const uint32_t* x, uint32_t* y, int count) {
    SHARED_STORAGE(Storage, s);
    const int i = threadIdx.x;
    if (i == 0) {
        for (int stage = 0; stage < 2; ++stage) s.full[stage].init(1);
        fence_barrier_init();
        for (int line = 0; line < 2; ++line) {
            s.full[line].arrive_expect_tx(512 - 16 * line);
            bulk_load(s.ring[line], x + 128 * line, 512 - 16 * line, s.full[line]);
        }
    }
    sync_block();
    for (int line = 0; line < count; ++line) {
        const int stage = line % 2, next = line + 2;
        s.full[stage].wait(line / 2 % 2);
        const uint32_t value = s.ring[stage][i];
        sync_block();
        if (i == 0 && next < count) {
            s.full[stage].arrive_expect_tx(512 - 16 * next);
            bulk_load(s.ring[stage], x + 128 * next, 512 - 16 * next, s.full[stage],
                      load_policy(true));
        }
        y[128 * line + i] = i < 128 - 4 * line ? value : 0;
    }
}
"""
    count = 7
    x = np.random.default_rng(3).integers(0, 2**32, (count, 128), dtype=U32)
    arrays = {"x": x, "y": np.zeros_like(x)}
    y = launch_all(target, variant(text), arrays, ("x", "y", I32(count)), shared=2048)["y"]
    there = np.arange(128) < 128 - 4 * np.arange(count)[:, None]
    np.testing.assert_array_equal(y, np.where(there, x, 0))


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


@pytest.mark.parametrize(("dtype", "shape", "box", "at", "span"), BOXES)
def test_tma_load(target, dtype, shape, box, at, span):
    image = np.frombuffer(box_of(values(shape, dtype), at, box).tobytes(), np.uint8)
    y = tma_image(target, dtype, shape, box, at, span)
    np.testing.assert_array_equal(y, swizzle(image, span))


@pytest.mark.parametrize(
    ("dtype", "shape", "box", "at", "span"),
    [(*box, tuple(max(i, 0) for i in at), span) for *box, at, span in BOXES],
)
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
    y = launch_all(target, kernel, arrays, (*maps, "a", "y"), shared=128 * (72 + n))["y"]
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


# --- all together --------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 640), (128, 128, 64), (200, 136, 200)])
def test_matmul(target, m, n, k):
    arrays, args, grid = matmul_problem(m, n, k)
    kernel = variant(MATMUL, threads=384)
    c = launch_all(target, kernel, arrays, args, grid, MATMUL_SHARED)["c"]
    expected = arrays["a"].astype(F32) @ arrays["b"].astype(F32).T
    np.testing.assert_array_equal(c, expected.astype(F16))


@pytest.mark.compile
def test_matmul_compiles_without_spills():
    row = gate.compile_row(variant(MATMUL, threads=384), "sm_90a")
    assert gate.failure(row) is None
    assert row.local_bytes == 0 and row.registers <= 168


# --- mistakes, which only the host reports -------------------------------------------------------

_TOO_LATE = "changed while wgmma read it"
MISTAKES = {
    # name: (old, new, what the report says; None: the result is wrong)
    "no wait for the tile": (
        "        s.full[stage].wait(parity);\n",
        "",
        "0 of 2 arr|in one phase|" + _TOO_LATE,
    ),
    "the other parity of a full stage": (
        "full[stage].wait(parity)",
        "full[stage].wait(parity ^ 1)",
        "",
    ),
    "the other parity of an empty stage": (
        "empty[stage].wait(parity ^ 1)",
        "empty[stage].wait(parity)",
        r"word.cu:\d+: Barrier::wait: 1 thread \(287\) of block \d wait for parity 0 of the Barrier "
        r"of word.cu:\d+: 0 of 2 arrivals",
    ),
    "too many bytes expected": (
        "sizeof(s.b[0]));",
        "sizeof(s.b[0]) + 16);",
        r"word.cu:\d+: Barrier::wait: 256 threads \(0-255\) of block \d wait for parity 0 of the "
        r"Barrier of word.cu:\d+: 1 of 1 arrivals, 16 bytes are missing",
    ),
    "too few bytes expected": (
        "sizeof(s.b[0]));",
        "sizeof(s.b[0]) - 16);",
        "1 of 1 arrivals, 16 bytes more than expected",
    ),
    "one operand's bytes forgotten": (
        " + sizeof(s.b[0]));",
        ");",
        "bytes more than expected|" + _TOO_LATE,
    ),
    "no wait for an empty stage": (
        "                s.empty[stage].wait(parity ^ 1);\n",
        "",
        "in one phase|" + _TOO_LATE,
    ),
    "a stage released too early": (
        "        wgmma_wait<1>();\n        if (i > 0 && thread == 0) s.empty[(i - 1) % kStages]",
        "        if (thread == 0) s.empty[stage]",
        r"word.cu:\d+: shared memory changed while wgmma read it",
    ),
    "the stage under way released": (
        "if (i > 0 && thread == 0) s.empty[(i - 1) % kStages]",
        "if (thread == 0) s.empty[stage]",
        _TOO_LATE,
    ),
    "no wait for the last product": ("    wgmma_wait<0>(d);\n", "", "without wgmma_wait"),
    "no fence before wgmma": ("        wgmma_fence(d);\n", "", "without wgmma_fence"),
    "a stage is never released": (
        "        if (i > 0 && thread == 0) s.empty[(i - 1) % kStages].arrive();\n",
        "",
        "0 of 2 arrivals",
    ),
    "one more arrival counted": ("s.empty[i].init(2)", "s.empty[i].init(3)", "2 of 3 arrivals"),
    "one arrival too few counted": ("s.empty[i].init(2)", "s.empty[i].init(1)", ""),
    "every thread arrives": ("i > 0 && thread == 0", "i > 0", "in one phase|arrivals|" + _TOO_LATE),
    "store before all have written": (
        "    named_barrier(1 + warpgroup, 128);\n",
        "",
        "changed while tma_store read it|without fence_async_proxy",
    ),
    "no fence before the store": (
        "    fence_async_proxy();\n",
        "",
        r"word.cu:\d+: tma_store reads what store_matrix has stored without fence_async_proxy",
    ),
    "left before the store has read": (
        "        tma_store_wait_read<0>();\n",
        "",
        "left the kernel before tma_store had read",
    ),
    "store not committed": (
        "        tma_store_commit();\n",
        "",
        "left the kernel before tma_store",
    ),
    "another swizzle": ("<128>(s.b", "<64>(s.b", None),
    "another stride": ("s.b[stage], 16, 1024)", "s.b[stage], 16, 512)", None),
    "tiles past the end": ("s.b[stage], 16, 1024)", "s.b[stage], 16, 16384)", "past the dynamic"),
    "advance by too little": ("advance(b, 32 * k)", "advance(b, 16 * k)", None),
    "coordinates in the wrong order": ("{i * kTileK, col}", "{col, i * kTileK}", None),
    "a coordinate too many": ("{i * kTileK, col}", "{i * kTileK, col, 0}", "as many coordinates"),
}


def test_every_mistake_changes_the_kernel():
    for name, (old, _new, _said) in MISTAKES.items():
        assert MATMUL.count(old) == 1, name


# Whether the values show these depends on the schedule; the race checker sees them always.
RACES = ("store before all have written",)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name):
    old, new, said = MISTAKES[name]
    arrays, args, grid = matmul_problem(128, 256, 640)
    expected = arrays["a"].astype(F32) @ arrays["b"].astype(F32).T
    kernel = variant(MATMUL.replace(old, new), threads=384)
    reported = 0
    for schedule in SCHEDULES:
        with host.use(schedule=schedule) as target:
            try:
                c = launch(target, kernel, arrays, args, grid, MATMUL_SHARED)["c"]
                reported += said is None and bool((c != expected).any())
            except host.HostKernelError as error:
                assert re.search(said or "", str(error)), error
                reported += 1
    assert reported >= (1 if name in RACES else len(SCHEDULES))


_PRODUCT = (
    "float d[32]; wgmma_fence(d); "
    "wgmma<half>(d, matrix_descriptor<128>(s.tile, 16, 1024), "
    "matrix_descriptor<128>(s.tile, 16, 1024), false); wgmma_commit();"
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (t == 0) s.first.init(1);", "word.cu:6: a Barrier is initialised twice"),
        ("if (t == 0) s.second.arrive();", "word.cu:6: the Barrier is not initialised"),
        ("if (t == 0) { s.first.state = 7; s.first.arrive(); }", "not initialised, or overwritten"),
        (
            "if (t == 0) s.first.arrive_expect_tx(16);\nsync_block();\nif (t < 3) s.first.arrive();",
            "word.cu:8: more threads arrive at the Barrier in one phase than it counts",
        ),
        ("s.first.wait(2);", "parity is 0 or 1"),
        (
            "if (t == 0) s.first.arrive();\nelse if (t == 5) s.first.wait(0);\nelse sync_block();",
            r"word.cu:7: Barrier::wait: 1 thread \(5\) of block 0 wait for parity 0 of the Barrier of "
            r"word.cu:5: 1 of 3 arrivals; .*126 threads \(1-4, 6-127\) of block 0 wait",
        ),
        (
            "if (t == 0) { s.first.arrive_expect_tx(8192); tma_load(s.tile, map, s.first, {0, 0}); }",
            "word.cu:6: the block left the kernel before this had arrived",
        ),
        ("if (t == 0) s.first.arrive_expect_tx(64);", "fewer bytes have arrived at the Barrier"),
        ("if (t < 64) { " + _PRODUCT + " }", "word.cu:6: wgmma: 64 of 128 threads of warpgroup 0"),
        (_PRODUCT + " wgmma_wait<1>(d);", "wgmma_wait: these accumulators are still under way"),
        (
            "uint32_t a[4] = {}; float d[32]; wgmma_fence(d); "
            "wgmma<half>(d, a, matrix_descriptor<128>(s.tile, 16, 1024), false); wgmma_commit(); "
            "a[t % 4] = 1; wgmma_wait<0>(d);",
            "word.cu:6: A's registers changed while wgmma read them",
        ),
        (
            _PRODUCT + " if (t % 2) wgmma_wait<0>(d);\n else wgmma_wait<0>(d);",
            "word.cu:[67]: wgmma_wait: .* of 128 threads",
        ),
        ("if (t == 0) s.first.arrive_remote(1);", "no such rank"),
        ("if (t == 0) bulk_load(s.tile, s.tile + 4, 16, s.first);", r"6: bulk_load: .* of 16"),
        ("if (t == 0) bulk_load(s.tile, s.tile, 24, s.first);", r"word.cu:6: bulk_load: .* of 16"),
        (
            "if (t == 0) bulk_load(s.tile + 4096, s.tile, 4096, s.first);",
            "word.cu:6: bulk_load: the copy is larger than the rest of shared memory",
        ),
        (
            "if (t == 0) { s.first.arrive_expect_tx(64); bulk_load(s.tile, &map, 64, s.first); }",
            "word.cu:6: the block left the kernel before this had arrived",
        ),
        (
            "if (t == 0) tma_load(s.tile, map, s.first, {4, 0});",
            "word.cu:6: TMA: the innermost coordinate must be a multiple of 16 bytes",
        ),
        (
            "if (t == 0) tma_store(map, s.tile, {12, 0});",
            "word.cu:6: TMA: the innermost coordinate must be a multiple of 16 bytes",
        ),
        (
            "if (t == 0) tma_store(map, s.tile, {8, -1});",
            "word.cu:6: tma_store: no coordinate may be negative",
        ),
    ],
)
def test_misuse_is_reported(body, said):
    text = (
        "struct Storage { alignas(1024) half tile[64 * 64]; Barrier first, second; };\n"
        "KERNEL void word(GRID_CONSTANT TensorMap map) {\n"
        "    SHARED_STORAGE(Storage, s);\n    const int t = threadIdx.x;\n"
        "    if (t == 0) s.first.init(3); sync_block();\n" + body + "\n}\n"
    )
    x = np.zeros((64, 64), F16)
    for schedule in ("fifo", "lifo"):
        with host.use(schedule=schedule) as target:
            with pytest.raises(host.HostKernelError, match=said):
                launch(target, variant(text), {"x": x}, (Map("x", (64, 64), 128),), shared=9216)


# --- the race checker ----------------------------------------------------------------------------

_RACE_CHECK = """
import sys
from hopper_kernels import MATMUL, MATMUL_SHARED, launch, matmul_problem, variant
from test_hopper_words import MISTAKES
from cupykern.targets import host

text = MATMUL
if sys.argv[2] in MISTAKES:
    text = text.replace(*MISTAKES[sys.argv[2]][:2])
arrays, args, grid = matmul_problem(128, 256, 640)
for schedule in ("fifo", "lifo"):
    with host.use(sanitizer=sys.argv[1], schedule=schedule) as target:
        launch(target, variant(text, threads=384), arrays, args, grid, MATMUL_SHARED)
"""


def _check(sanitizer: str, mistake: str) -> subprocess.CompletedProcess:
    try:
        added = host_compiler.sanitizer_environment(sanitizer)
    except UnavailableError as error:
        pytest.skip(str(error))
    if "TSAN_OPTIONS" in added:
        added["TSAN_OPTIONS"] += " halt_on_error=1"  # each report takes long
    return subprocess.run(
        [sys.executable, "-c", _RACE_CHECK, sanitizer, mistake],
        env={**os.environ, **added, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", host.SANITIZERS)
def test_the_checkers_find_nothing_in_matmul(sanitizer):
    done = _check(sanitizer, "none")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Sanitizer" not in done.stderr, done.stderr[-3000:]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        ("store before all have written", "tma_store("),
        ("a stage released too early", "tma_load(s.a"),
        ("no wait for the tile", "wgmma<half>"),
    ],
)
def test_the_race_checker_names_the_line(mistake, word):
    old, new = MISTAKES[mistake][:2]
    lines = MATMUL.replace(old, new).splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if word in line)
    done = _check("thread", mistake)
    assert done.returncode != 0
    # The host's own checks may come first: a store's of fences, wgmma's of what changes under it.
    named = f"word.cu:{number}" in done.stderr
    assert named or "changed while wgmma read it" in done.stderr, done.stderr[-3000:]


# --- tensor maps ---------------------------------------------------------------------------------


def encode(**changes) -> np.ndarray:
    arguments = {
        "target": "host",
        "address": 1 << 20,
        "dtype": np.dtype(F16),
        "shape": (100, 72),
        "strides": (144, 2),
        "box": (128, 64),
        "swizzle": 128,
    }
    return tensor_map.encode(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"address": 8}, "aligned to 16 bytes; got 0x8"),
        ({"strides": (136, 2)}, "multiples of 16 bytes"),
        ({"strides": (2**40, 2)}, "below 2\\*\\*40"),
        ({"strides": (-144, 2)}, "multiples of 16 bytes"),
        ({"strides": (16, 200)}, "last dimension must be contiguous; got a stride of 200"),
        ({"box": (257, 64)}, "1 to 256"),
        ({"box": (0, 64)}, "1 to 256"),
        ({"box": (128, 32)}, "as long as the swizzle, 128 bytes; got 64"),
        ({"box": (128, 4), "swizzle": 0}, "multiples of 16 bytes; got 8"),
        ({"box": (64,)}, "of one length"),
        ({"swizzle": 96}, "swizzle must be one of"),
        ({"shape": (0, 72)}, "sizes are 1 to"),
        ({"shape": (1,) * 6, "strides": (16,) * 6, "box": (1,) * 6}, "1 to 5 dimensions"),
        ({"target": "hip"}, "must be cuda or host"),
    ],
)
def test_tensor_map_refuses(changes, said):
    with pytest.raises(ValueError, match=said):
        encode(**changes)


def test_tensor_map_refuses_a_dtype():
    with pytest.raises(TypeError, match="complex64"):
        encode(dtype=np.dtype(np.complex64))


def test_tensor_map_is_128_bytes():
    assert encode().nbytes == 128
    # What a dimension of size 1 has for a stride means nothing.
    assert encode(shape=(1, 72), strides=(3, 2)) is not None


def test_a_map_of_another_rank_or_none_is_refused():
    text = """
struct Storage { alignas(128) char box[256]; Barrier full; };
KERNEL void word(GRID_CONSTANT TensorMap map) {
    SHARED_STORAGE(Storage, s);
    if (threadIdx.x == 0) {
        s.full.init(1);
        tma_load(s.box + OFFSET, map, s.full, {0});
    }
}
"""
    good = tensor_map.of_array(np.zeros(256, np.uint8), (128,), 0)
    bad = np.frombuffer(bytes(128), "V128")
    for map_, offset, said in ((bad, 0, "not a TensorMap"), (good, 64, "not aligned")):
        with host.use() as target, pytest.raises(host.HostKernelError, match=said):
            target.compile(variant(text.replace("OFFSET", str(offset))))(1, (map_,), 1024)


# --- what a GPU has given ------------------------------------------------------------------------


@pytest.mark.skipif(not record_golden.FILE.exists(), reason="nothing recorded")
def test_the_host_gives_what_a_gpu_gave():
    with host.use() as target, np.load(record_golden.FILE) as recorded:
        here = record_golden.vectors(target)
        assert set(recorded) <= set(here)
        for name, expected in recorded.items():
            if name.startswith("cut"):  # in another order, perhaps with a guard bit
                unit = record_golden.CUT_UNITS * np.abs(expected).max()
                np.testing.assert_allclose(here[name], expected, rtol=0, atol=unit, err_msg=name)
            else:
                np.testing.assert_array_equal(here[name], expected, err_msg=name)
