"""Hopper's words: barriers, bulk copies, matrices.

On the host at hostile schedules; the same tests on a GPU.
"""

from __future__ import annotations

import needs
import numpy as np
import pytest
import record_golden
from hopper_kernels import (
    MATMUL,
    MATMUL_SHARED,
    launch_all,
    matmul_problem,
    variant,
)

from cupykern.targets import host
from cupykern.tools import gate

F16, F32, I32, U16, U32 = np.float16, np.float32, np.int32, np.uint16, np.uint32


pytestmark = needs.hopper


# --- barriers ------------------------------------------------------------------------------------


def test_phases_of_a_ring(target):
    """One warp produces, three consume, through a pipeline of two stages."""
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
struct Storage { alignas(16) uint32_t stages[2][128]; Barrier full[2]; };
KERNEL void word(const uint32_t* x, uint32_t* y, int count) {
    SHARED_STORAGE(Storage, s);
    const int i = threadIdx.x;
    if (i == 0) {
        for (int stage = 0; stage < 2; ++stage) s.full[stage].init(1);
        fence_barrier_init();
        for (int line = 0; line < 2; ++line) {
            s.full[line].arrive_expect_tx(512 - 16 * line);
            bulk_load(s.stages[line], x + 128 * line, 512 - 16 * line, s.full[line]);
        }
    }
    sync_block();
    for (int line = 0; line < count; ++line) {
        const int stage = line % 2, next = line + 2;
        s.full[stage].wait(line / 2 % 2);
        const uint32_t value = s.stages[stage][i];
        sync_block();
        if (i == 0 && next < count) {
            s.full[stage].arrive_expect_tx(512 - 16 * next);
            bulk_load(s.stages[stage], x + 128 * next, 512 - 16 * next, s.full[stage],
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


# --- all together --------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n", "k"), [(256, 384, 640), (128, 128, 64), (200, 136, 200)])
def test_a_warp_specialised_matmul_is_exact(target, m, n, k):
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


# --- what a GPU has given ------------------------------------------------------------------------


@pytest.mark.skipif(not record_golden.FILE.exists(), reason="nothing recorded")
def test_the_host_gives_what_a_gpu_gave():
    with host.use() as target, np.load(record_golden.FILE) as recorded:
        here = record_golden.vectors(target)
        assert set(recorded) <= set(here)
        for name, expected in recorded.items():
            np.testing.assert_array_equal(here[name], expected, err_msg=name)
