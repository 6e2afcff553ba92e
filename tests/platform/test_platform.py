"""Every word of the platform's vocabulary against numpy, on each target: threads and memory.

test_numbers.py and test_fragments.py have the others.
"""

from __future__ import annotations

from contextlib import nullcontext

import needs
import numpy as np
import pytest
from platform_kernels import F32, U32, run

from cupykern.targets import host
from cupykern.targets.limits import is_measured


def test_atomic_add_acq_rel(target):
    """The block that comes last sees what all others have written."""
    text = (
        "KERNEL void word(uint32_t* count, uint32_t* written, uint32_t* sum) {\n"
        "    if (threadIdx.x != 0) return;\n"
        "    written[blockIdx.x] = blockIdx.x + 1;\n"
        "    if (atomic_add_acq_rel(count, 1) != gridDim.x - 1) return;\n"
        "    for (int i = 0; i < int(gridDim.x); ++i) *sum += written[i];\n}\n"
    )
    zeros = np.zeros(1, U32), np.zeros(100, U32), np.zeros(1, U32)
    count, _, total = run(target, text, *zeros, grid=100)
    assert (count[0], total[0]) == (100, 5050)


def test_what_lanes_have_together(target):
    """Every lane gets the largest and the sum."""
    rng = np.random.default_rng(4)
    a = rng.integers(0, 2**32, 128, U32)
    b = rng.integers(-(2**40), 2**40, 128).astype(np.float64)
    text = (
        "KERNEL void word(const uint32_t* a, const double* b, uint32_t* largest, double* sums) {\n"
        "    const int i = threadIdx.x;\n"
        "    largest[i] = maximum_of_warp(a[i]);\n    sums[i] = sum_of_warp(b[i]);\n}\n"
    )
    zeros = np.zeros(128, U32), np.zeros(128)
    *_, largest, sums = run(target, text, a, b, *zeros, threads=128)
    warp = target.warp_size
    np.testing.assert_array_equal(largest, a.reshape(-1, warp).max(1).repeat(warp))
    np.testing.assert_array_equal(sums, b.reshape(-1, warp).sum(1).repeat(warp))


def test_atomic_min_of_64_bits_in_shared_and_global_memory(target):
    text = (
        "KERNEL void word(const uint64_t* x, uint64_t* least) {\n"
        "    SHARED(uint64_t, of_block, [1]);\n"
        "    const uint64_t mine = x[blockIdx.x * blockDim.x + threadIdx.x];\n"
        "    if (threadIdx.x == 0) of_block[0] = mine;\n    sync_block();\n"
        "    atomic_min(of_block, mine);\n    sync_block();\n"
        "    if (threadIdx.x == 0) atomic_min(least, of_block[0]);\n}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**64, 7 * 64, np.uint64)
    _, least = run(target, text, x, np.array([2**64 - 1], np.uint64), grid=7)
    assert least[0] == x.min()


def test_words_that_blocks_leave_for_one(target):
    """Relaxed stores, which the block that was the last to begin waits for."""
    text = (
        "KERNEL void word(uint32_t* num_begun, uint64_t* words, uint64_t* sum) {\n"
        "    if (threadIdx.x != 0) return;\n"
        "    const bool is_last = atomic_add(num_begun, 1u) == gridDim.x - 1;\n"
        "    store_relaxed(words + blockIdx.x, (uint64_t(blockIdx.x) << 32) + 1);\n"
        "    for (int i = 0; is_last && i < int(gridDim.x); ++i) {\n"
        "        uint64_t word = 0;\n"
        "        while (word == 0) word = load_relaxed(words + i);\n"
        "        *sum += word;\n    }\n}\n"
    )
    zeros = np.zeros(1, U32), np.zeros(100, np.uint64), np.zeros(1, np.uint64)
    *_, total = run(target, text, *zeros, grid=100)
    assert total[0] == (4950 << 32) + 100


AFTER_ALL = (
    "KERNEL void word(GridBarrier* barrier, const uint32_t* given, uint32_t* written, uint32_t* "
    "sums,\n"
    "                 uint32_t* by) {\n"
    "    if (threadIdx.x == 0) written[blockIdx.x] = given[blockIdx.x];\n"
    "    after_all_blocks(barrier, [&](uint32_t block) {\n"
    "        uint32_t sum = 0;\n"
    "        for (int i = 0; i < int(gridDim.x); ++i) sum += written[i];\n"
    "        sums[block * blockDim.x + threadIdx.x] += sum;\n"
    "        if (threadIdx.x == 0) by[block] = blockIdx.x;\n"
    "    });\n}\n"
)


@pytest.mark.parametrize("grid", [1, 2, 7])
@pytest.mark.parametrize("waits", [False, True])
def test_work_after_all_blocks_sees_what_each_of_them_wrote(target, grid, waits):
    """Each share is computed once, by its block or the last one, which zeroes the barrier."""
    given = np.arange(1, grid + 1, dtype=U32)
    barrier = np.zeros(132, U32)
    for _ in range(3):  # as one launch leaves it to the next
        zeros = np.zeros(grid, U32), np.zeros((grid, 64), U32), np.zeros(grid, U32)
        barrier, _, _, sums, by = run(
            target, AFTER_ALL, barrier, given, *zeros, grid=grid, waits=waits
        )
        assert not (barrier[0] or barrier[1] % (1 << 31) or barrier[2:].any())
        np.testing.assert_array_equal(sums, given.sum())
        helpers = by[by != np.arange(grid)]
        assert len(set(helpers)) <= 1


def test_blocks_leave_under_some_schedules_and_wait_under_others():
    """Both ways of the barrier are emulated."""
    grid, seen = 7, set()
    for schedule in ("fifo", "lifo", *(f"sticky:{seed}" for seed in range(4))):
        target = host.HostTarget(schedule=schedule)
        zeros = np.zeros(grid, U32), np.zeros((grid, 64), U32), np.zeros(grid, U32)
        *_, by = run(target, AFTER_ALL, np.zeros(132, U32), zeros[0], *zeros, grid=grid, waits=True)
        seen.add(bool((by != np.arange(grid)).any()))
    assert seen == {False, True}


def test_at_most_16_blocks_wait_for_each_other_on_the_host():
    zeros = [np.zeros(132, U32)] * 5
    with pytest.raises(ValueError, match="at most 16 blocks wait for each other here; got 17"):
        run(host.HostTarget(), AFTER_ALL, *zeros, grid=17, waits=True)


def test_maximum_and_exp2(target):
    rng = np.random.default_rng(3)
    a = np.concatenate([rng.uniform(-126, 126, 60), [np.nan, 1, -np.inf, -200]]).astype(F32)
    b = np.concatenate([rng.uniform(-126, 126, 60), [1, np.nan, -np.inf, 0]]).astype(F32)
    text = (
        "KERNEL void word(const float* a, const float* b, float* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = maximum(a[i], b[i]);\n    y[64 + i] = exp2_approx(a[i]);\n}\n"
    )
    *_, y = run(target, text, a, b, np.zeros(128, F32))
    np.testing.assert_array_equal(y[:64], np.fmax(a, b))
    expected = np.exp2(a.astype(np.float64))
    normal = expected >= 2.0**-126
    assert (np.abs(y[64:] - expected)[normal] <= 2.0**-22 * expected[normal]).all()
    assert (y[64:][a < -126] == 0).all() and np.isnan(y[64:][np.isnan(a)]).all()


def test_maximum_or_nan(target):
    numbers = np.array([0, 1, -1, 2.5, np.inf, -np.inf, np.nan, 2.0**-126], F32)
    a, b = (x.reshape(-1) for x in np.meshgrid(numbers, numbers))
    text = (
        '#include "platform/maximum_or_nan.cuh"\n'
        "KERNEL void word(const float* a, const float* b, float* y) {\n"
        "    const int i = threadIdx.x;\n    y[i] = maximum_or_nan(a[i], b[i]);\n}\n"
    )
    *_, y = run(target, text, a, b, np.zeros(64, F32))
    np.testing.assert_array_equal(y, np.maximum(a, b))


def test_multiply_add_rounds_once(target):
    rng = np.random.default_rng(4)
    a, b = (rng.uniform(1, 2, 64).astype(F32) for _ in range(2))
    c = -(a * b)
    text = (
        "KERNEL void word(const float* a, const float* b, const float* c, float* y) {\n"
        "    const int i = threadIdx.x;\n    y[i] = multiply_add(a[i], b[i], c[i]);\n}\n"
    )
    *_, y = run(target, text, a, b, c, np.zeros(64, F32))
    # What the product lost when it was rounded: FP32 holds it.
    np.testing.assert_array_equal(y, (a.astype(np.float64) * b + c).astype(F32))
    assert y.any()


def test_shuffles_and_votes(target):
    text = (
        "KERNEL void word(int* y, double* z) {\n    const int i = threadIdx.x;\n"
        "    y[i] = shuffle_xor(i, 5);\n    y[128 + i] = shuffle(i, 3);\n"
        "    y[256 + i] = vote_any(i == 7);\n    z[i] = shuffle_xor(double(i) + 0.5, 1);\n"
        "    sync_warp();\n    y[384 + i] = lane_id();\n    y[512 + i] = uniform(i / kWarpSize - "
        "7);\n}\n"
    )
    y, z = run(target, text, np.zeros(640, np.int32), np.zeros(128), threads=128)
    i, warp = np.arange(128), target.warp_size
    np.testing.assert_array_equal(y[:128], i ^ 5)
    np.testing.assert_array_equal(y[128:256], i // warp * warp + 3)
    np.testing.assert_array_equal(y[256:384], i < warp)
    np.testing.assert_array_equal(y[384:512], i % warp)
    np.testing.assert_array_equal(y[512:], i // warp - 7)
    np.testing.assert_array_equal(z, (i ^ 1) + 0.5)


def test_code_is_compact_where_nothing_is_measured(target):
    """And at one of the host's two warp sizes, so that the tests run both."""
    (y,) = run(
        target, "KERNEL void word(int* y) { y[threadIdx.x] = kCompact; }", np.full(64, 7, np.int32)
    )
    on_host = target.warp_size == 64
    compact = on_host if target.name == "host" else not is_measured(target.arch)
    np.testing.assert_array_equal(y, np.full(64, compact, np.int32))


@needs.named_barriers
def test_shared_memory_and_barriers(target):
    text = (
        "struct Storage { float values[128]; };\n"
        "KERNEL void word(const float* x, float* y, int* count) {\n"
        "    SHARED(float, reversed, [2][64]);\n    SHARED_STORAGE(Storage, storage);\n"
        "    const int i = threadIdx.x;\n"
        "    reversed[i / 64][i % 64] = x[i];\n    sync_block();\n"
        "    storage.values[i] = reversed[1 - i / 64][63 - i % 64];\n"
        "    if (i < 64) named_barrier(1, 64);\n    else named_barrier(2, 64);\n"
        "    y[i] = storage.values[i / 64 * 64 + (i + 1) % 64];\n"
        "    atomic_add(count, 1);\n}\n"
    )
    x = np.random.default_rng(4).standard_normal(128).astype(F32)
    arrays = x, np.zeros(128, F32), np.zeros(1, np.int32)
    _, y, count = run(target, text, *arrays, threads=128, shared=512)
    halves = x[::-1].reshape(2, 64)
    np.testing.assert_array_equal(y, np.roll(halves, -1, axis=1).reshape(-1))
    assert count[0] == 128


@needs.named_barriers
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_an_ordered_barrier_lets_one_warpgroup_in_after_another(target, warpgroups):
    """Each sees what those before it wrote; nobody waits for the last arrivals."""
    text = (
        '#include "pipeline/ordered_barrier.cuh"\n'
        "KERNEL void word(int* log) {\n"
        "    SHARED(int, count, [1]);\n"
        "    if (threadIdx.x == 0) count[0] = 0;\n    sync_block();\n"
        "    const int warpgroup = threadIdx.x / 128;\n"
        f"    const pipeline::OrderedBarrier<{warpgroups}, 3> order{{warpgroup}};\n"
        "    order.begin();\n"
        "    for (int i = 0; i < 5; ++i) {\n        order.wait();\n"
        "        if (threadIdx.x % 128 == 64) log[count[0]++] = 10 * warpgroup + i;\n"
        "        order.arrive();\n    }\n}\n"
    )
    (log,) = run(target, text, np.zeros(5 * warpgroups, np.int32), threads=128 * warpgroups)
    np.testing.assert_array_equal(log, [10 * w + i for i in range(5) for w in range(warpgroups)])


@pytest.mark.parametrize("size", [4, 8, 16])
def test_asynchronous_and_vector_copies_bring_every_byte(target, size):
    text = (
        f"struct Storage {{ Bytes<{size}> values[64]; }};\n"
        f"KERNEL void word(const Bytes<{size}>* x, Bytes<{size}>* y) {{\n"
        "    SHARED_STORAGE(Storage, storage);\n    const int i = threadIdx.x;\n"
        f"    copy_async<{size}>(&storage.values[i], x + i, i % 3 != 0);\n    "
        f"copy_async_commit();\n"
        "    copy_async_wait<0>();\n    sync_block();\n    y[i] = storage.values[63 - i];\n"
        f"    store_vector<{size}>(y + 64 + i, load_vector<{size}>(x + i));\n}}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**32, (64, size // 4), dtype=U32)
    _, y = run(target, text, x, np.zeros((128, size // 4), U32), shared=64 * size)
    copied = np.where(np.arange(64)[:, None] % 3 != 0, x, 0)
    np.testing.assert_array_equal(y[:64], copied[::-1])
    np.testing.assert_array_equal(y[64:], x)


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(
    "copy",
    [
        "copy_async<8>(to, from)",
        "copy_async<16>(to, from)",
        "copy_async<16>(to, from, false)",
        "copy_async<16>(to, from, load_policy(false))",
        "copy_async_part(to, from, 12)",
        "copy_async_part(to, from, 0)",
    ],
)
def test_misaligned_copies_are_an_error_that_names_the_line(copy, offset):
    """A GPU faults on them, even where a copy brings no byte."""
    text = (
        "struct Storage { Bytes<16> to[1]; };\n"
        "KERNEL void word(const char* x) {\n    SHARED_STORAGE(Storage, storage);\n"
        f"    const void* from = x + {offset};\n    void* to = storage.to;\n"
        f"    {copy};\n    copy_async_commit();\n    copy_async_wait<0>();\n}}\n"
    )
    says = r"word\.cu:6: an access is not aligned to its size"
    with pytest.raises(host.HostKernelError, match=says) if offset else nullcontext():
        run(host.current(), text, np.zeros(32, np.uint8), threads=1, shared=16)


@pytest.mark.parametrize("evict_last", [False, True])
def test_cache_policies_change_no_byte(target, evict_last):
    """They bring and leave the same bytes as loads and stores without one."""
    text = (
        "struct Storage { Bytes<16> values[64]; };\n"
        "KERNEL void word(const Bytes<16>* x, Bytes<16>* y, const int* last) {\n"
        "    SHARED_STORAGE(Storage, storage);\n    const int i = threadIdx.x;\n"
        "    const LoadPolicy policy = load_policy(*last != 0);\n"
        "    copy_async<16>(&storage.values[i], x + i, policy);\n    copy_async_commit();\n"
        "    copy_async_wait<0>();\n    sync_block();\n    y[i] = storage.values[63 - i];\n"
        "    store_vector<16>(y + 64 + i, load_vector<16>(x + i, policy), store_policy(*last != "
        "0));\n}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**32, (64, 4), dtype=U32)
    y = np.zeros((128, 4), U32)
    _, y, _ = run(target, text, x, y, np.array([evict_last], np.int32), shared=64 * 16)
    np.testing.assert_array_equal(y[:64], x[::-1])
    np.testing.assert_array_equal(y[64:], x)


@pytest.mark.parametrize("cluster", [pytest.param(n, marks=needs.clusters(n)) for n in (2, 8, 16)])
def test_blocks_of_a_cluster_write_to_each_others_shared_memory(target, cluster):
    text = (
        "KERNEL void word(int* y) {\n    SHARED(int, inbox, [kClusterSize]);\n"
        "    const int rank = cluster_rank();\n    cluster_arrive();\n    cluster_wait();\n"
        "    if (threadIdx.x < kClusterSize) {\n"
        "        *cluster_shared(&inbox[rank], threadIdx.x) = 100 * blockIdx.x + threadIdx.x;\n"
        "    }\n    cluster_arrive();\n    cluster_wait();\n"
        "    if (threadIdx.x < kClusterSize) {\n"
        "        y[blockIdx.x * kClusterSize + threadIdx.x] = inbox[threadIdx.x];\n    }\n}\n"
    )
    (y,) = run(target, text, np.zeros((2 * cluster, cluster), np.int32), grid=2 * cluster,
               cluster=cluster)  # fmt: skip
    block = np.arange(2 * cluster)
    first = block // cluster * cluster
    sender = first[:, None] + np.arange(cluster)
    np.testing.assert_array_equal(y, 100 * sender + (block % cluster)[:, None])


def test_parts_of_copies(target):
    """The first bytes of 16, the others zero."""
    text = (
        "KERNEL void word(const Bytes<16>* x, Bytes<16>* y) {\n    SHARED(Bytes<16>, s, [64]);\n"
        "    const int i = threadIdx.x;\n    copy_async_part(&s[i], x + i, i % 17);\n"
        "    copy_async_commit();\n    copy_async_wait<0>();\n    sync_block();\n    y[i] = s[63 - "
        "i];\n}\n"
    )
    x = np.random.default_rng(6).integers(1, 256, (64, 16), dtype=np.uint8)
    _, y = run(target, text, x, np.full((64, 16), 0xA5, np.uint8))
    kept = np.arange(16) < np.arange(64)[:, None] % 17
    np.testing.assert_array_equal(y[::-1], np.where(kept, x, 0))


@pytest.mark.parametrize("line", [0, 128])
def test_copies_of_lines_that_others_bring_the_rest_of(target, line):
    text = (
        "KERNEL void word(const Bytes<16>* x, Bytes<16>* y) {\n    SHARED(Bytes<16>, s, [64]);\n"
        "    const int i = threadIdx.x;\n"
        f"    copy_async<16, {line}>(&s[i], x + i, i % 3 > 0);\n"
        "    copy_async_commit();\n    copy_async_wait<0>();\n    sync_block();\n    y[i] = s[63 - "
        "i];\n}\n"
    )
    x = np.random.default_rng(6).integers(1, 256, (64, 16), dtype=np.uint8)
    _, y = run(target, text, x, np.full((64, 16), 0xA5, np.uint8))
    kept = np.arange(64)[:, None] % 3 > 0
    np.testing.assert_array_equal(y[::-1], np.where(kept, x, 0))


# --- what only the host says ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "if (threadIdx.x < 40) sync_block();",
            "word.cu:2: sync_block: 40 of 64 threads of block 0 arrived; "
            r"24 threads \(40-63\) left the kernel",
        ),
        (
            "if (threadIdx.x < 40) sync_block();\n else sync_block();",
            r"word.cu:[23]: sync_block: [0-9]+ of 64 threads .* wait at word.cu:[23]: sync_block",
        ),
        (
            "if (threadIdx.x % 2) x[0] = shuffle_xor(x[0], 1);",
            "word.cu:2: shuffle_xor: (16 of 32|32 of 64) lanes of warp 0 of block 0 arrived",
        ),
    ],
)
@pytest.mark.parametrize("schedule", ["fifo", "lifo", "sticky:1"])
def test_divergence_is_an_error(body, said, schedule):
    with host.use(schedule=schedule) as target, pytest.raises(host.HostKernelError, match=said):
        run(target, "KERNEL void word(float* x) {\n" + body + "\n}\n", np.zeros(4, F32))


def test_a_copy_that_nobody_waits_for_is_poison():
    text = (
        "KERNEL void word(const float* x, uint32_t* y) {\n    SHARED(float, s, [64]);\n"
        "    copy_async<4>(&s[threadIdx.x], x + threadIdx.x);\n    copy_async_commit();\n"
        "    y[threadIdx.x] = bit_cast<uint32_t>(s[threadIdx.x]);\n}\n"
    )
    with host.use() as target:
        _, y = run(target, text, np.ones(64, F32), np.zeros(64, U32))
    assert (y == 0xFFFFFFFF).all()


def test_schedules_expose_a_missing_barrier():
    """One warp's partial sums are read by all before the others have written theirs."""
    text = (
        "KERNEL void word(float* y) {\n    SHARED(float, s, [256]);\n    s[threadIdx.x] = 1.0f;\n"
        "    y[threadIdx.x] = s[255 - threadIdx.x];\n}\n"
    )
    wrong = 0
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            (y,) = run(target, text, np.zeros(256, F32), threads=256)
        wrong += not (y == 1).all()
    assert wrong == 3
