"""Every word of the platform's vocabulary against numpy, on each target."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupykern import dtypes
from cupykern.gemm import nvfp4
from cupykern.targets import host
from cupykern.targets.limits import is_measured, max_cluster_size
from kernels_cu import Variant

F32, U32 = np.float32, np.uint32
FORMATS = {
    "half": (np.float16, np.uint16),
    "bf16": (ml_dtypes.bfloat16, np.uint16),
    "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
    "e5m2": (ml_dtypes.float8_e5m2, np.uint8),
}


def run(
    target, text, *arrays, types=(), grid=1, threads=64, cluster=1, shared=0, cooperative=False
):
    """Run `KERNEL void word(...)` on copies of the arrays; returns them."""
    variant = Variant("word", types, (), threads, cluster, text=text, cooperative=cooperative)
    here = [target.xp.asarray(x) for x in arrays]
    here = [x.copy() if target.name == "host" else x for x in here]
    target.compile(variant)(grid, tuple(here), shared)
    return [x if isinstance(x, np.ndarray) else x.get() for x in here]


def decoded(target, cpp):
    number, code = FORMATS[cpp]
    codes = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code)
    text = (
        "KERNEL void word(const Code* x, float* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    y[i] = to_float(bit_cast<Number>(x[i]));\n}\n"
    )
    types = (("Number", cpp), ("Code", f"uint{8 * np.dtype(code).itemsize}_t"))
    y = np.zeros(codes.size, F32)
    _, y = run(target, text, codes, y, types=types, grid=codes.size // 64)
    return codes.view(number), y


@pytest.mark.parametrize("cpp", FORMATS)
def test_to_float_of_every_code(target, cpp):
    numbers, y = decoded(target, cpp)
    expected = numbers.astype(F32)
    nan = np.isnan(expected)
    assert (np.isnan(y) == nan).all()
    assert (y[~nan].view(U32) == expected[~nan].view(U32)).all()


@pytest.mark.parametrize("cpp", FORMATS)
def test_from_float_rounds_to_nearest_even(target, cpp):
    number, code = FORMATS[cpp]
    exact = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code).view(number).astype(F32)
    exact = np.sort(exact[np.isfinite(exact)])
    between = (exact[1:].astype(np.float64) + exact[:-1]) / 2
    x = np.concatenate(
        [
            exact,
            between.astype(F32),  # ties
            np.nextafter(between.astype(F32), F32(np.inf)),
            np.nextafter(between.astype(F32), F32(-np.inf)),
            np.random.default_rng(1).standard_normal(4096).astype(F32),
            np.array([np.nan, np.inf, -np.inf, 1e38, -1e38, 0.0, -0.0], F32),
        ]
    )
    # FP32 subnormals are flushed on every target.
    x = np.where(np.abs(x) < 2.0**-126, np.copysign(F32(0), x), x)
    x = np.resize(x, -(-x.size // 64) * 64).astype(F32)
    with np.errstate(over="ignore"):
        expected = x.astype(number)
    if code == np.uint8:  # these saturate, infinities too
        largest = float(ml_dtypes.finfo(number).max)
        expected = np.where(np.isnan(x), x, np.clip(x, -largest, largest)).astype(number)
    text = (
        "KERNEL void word(const float* x, Code* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    y[i] = bit_cast<Code>(from_float<Number>(x[i]));\n}\n"
    )
    types = (("Number", cpp), ("Code", f"uint{8 * np.dtype(code).itemsize}_t"))
    _, y = run(target, text, x, np.zeros(x.size, code), types=types, grid=x.size // 64)
    nan = np.isnan(expected.astype(F32))
    assert (np.isnan(y.view(number).astype(F32)) == nan).all()
    assert (y[~nan] == expected.view(code)[~nan]).all()


@pytest.mark.parametrize("cpp", ["half", "bf16"])
def test_pack_and_maximum_pair(target, cpp):
    number, _ = FORMATS[cpp]
    a, b = np.random.default_rng(2).standard_normal((2, 64)).astype(F32)
    text = (
        "KERNEL void word(const float* a, const float* b, uint32_t* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = pack<Number>(a[i], b[i]);\n"
        "    y[64 + i] = maximum_pair<Number>(pack<Number>(a[i], b[i]), pack<Number>(b[i], a[i]));\n"
        "}\n"
    )
    *_, y = run(target, text, a, b, np.zeros(128, U32), types=(("Number", cpp),))
    pairs = np.stack([a, b], 1).astype(number)
    assert (y[:64].view(number).reshape(64, 2) == pairs).all()
    larger = np.maximum(pairs, pairs[:, ::-1])
    assert (y[64:].view(number).reshape(64, 2) == larger).all()


@pytest.mark.parametrize("cpp", FORMATS)
def test_unpack_of_every_code(target, cpp):
    number, code = FORMATS[cpp]
    codes = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code)
    text = (
        "KERNEL void word(const Pair* x, float* y) {\n"
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    unpack<Number>(x[i], y[2 * i], y[2 * i + 1]);\n}\n"
    )
    pair = np.dtype(f"u{2 * codes.itemsize}")
    types = (("Number", cpp), ("Pair", f"uint{16 * codes.itemsize}_t"))
    for shift in (0, 3):
        x = np.roll(codes, shift)
        y = np.zeros(codes.size, F32)
        _, y = run(target, text, x.view(pair), y, types=types, grid=codes.size // 128)
        expected = x.view(number).astype(F32)
        nan = np.isnan(expected)
        assert (np.isnan(y) == nan).all()
        assert (y[~nan].view(U32) == expected[~nan].view(U32)).all()


def test_extremes_of_integer_pairs(target):
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFF00, 0x00FF], np.uint16)
    a = np.repeat(edges, 32)
    b = np.tile(np.repeat(edges, 2), 16)
    text = (
        "KERNEL void word(const uint32_t* a, const uint32_t* b, uint32_t* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = max_unsigned_pair(a[i], b[i]);\n    y[128 + i] = min_unsigned_pair(a[i], b[i]);\n"
        "    y[256 + i] = max_signed_pair(a[i], b[i]);\n}\n"
    )
    *_, y = run(target, text, a.view(U32), b.view(U32), np.zeros(384, U32), threads=128)
    got = y.view(np.uint16).reshape(3, -1)
    np.testing.assert_array_equal(got[0], np.maximum(a, b))
    np.testing.assert_array_equal(got[1], np.minimum(a, b))
    signed = np.maximum(a.view(np.int16), b.view(np.int16))
    np.testing.assert_array_equal(got[2].view(np.int16), signed)


def test_picked_bytes(target):
    rng = np.random.default_rng(1)
    (a, b), digits = rng.integers(0, 2**32, (2, 64), np.uint32), rng.integers(0, 8, (64, 4))
    select = (digits << 4 * np.arange(4)).sum(1).astype(U32)
    text = (
        "KERNEL void word(const uint32_t* a, const uint32_t* b, const uint32_t* select, uint32_t* y) {\n"
        "    const int i = threadIdx.x;\n"
        "    y[i] = pick_bytes(a[i], b[i], select[i]);\n    y[64 + i] = pick_bytes(a[i], b[i], 0x7342);\n}\n"
    )
    *_, y = run(target, text, a, b, select, np.zeros(128, U32), threads=64)
    both = np.concatenate([a.view(np.uint8).reshape(64, 4), b.view(np.uint8).reshape(64, 4)], 1)
    expected = np.concatenate([np.take_along_axis(both, digits, 1), both[:, [2, 4, 3, 7]]])
    np.testing.assert_array_equal(y.view(np.uint8).reshape(128, 4), expected)


@pytest.mark.parametrize("number", ["half", "bf16"])
def test_decoded_codes(target, number):
    """Eight e2m1 numbers, every code at every place, times every e4m3 scale."""
    text = (
        "KERNEL void word(const uint32_t* codes, T* y) {\n"
        "    for (int i = threadIdx.x; i < 16 * 256; i += 64) {\n"
        "        uint32_t pairs[4];\n"
        "        decode_scaled<T>(codes[i % 16], bit_cast<e4m3>(uint8_t(i / 16)), pairs);\n"
        "        memcpy(y + 8 * i, pairs, 16);\n    }\n}\n"
    )
    places = (np.arange(16)[:, None] + np.arange(8)) % 16
    codes = (places << 4 * np.arange(8)).sum(1).astype(U32)
    dtype = dtypes.float16 if number == "half" else dtypes.bfloat16
    y = np.zeros((256, 16, 8), dtype)
    *_, y = run(target, text, codes, y, threads=64, types=(("T", number),))
    of_codes = np.array([*nvfp4.NUMBERS, *(-x for x in nvfp4.NUMBERS)], F32)[places]
    scales = np.arange(256, dtype=np.uint8).view(dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(y.astype(F32), scales[:, None, None] * of_codes)


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


def test_atomic_min(target):
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


MEETING = (
    "KERNEL void word(uint32_t* counter, const uint32_t* given, uint32_t* written, uint32_t* sums) {\n"
    "    for (int time = 0; time < 2; ++time) {\n"
    "        uint32_t* here = written + time * gridDim.x;\n"
    "        if (threadIdx.x == 0) here[blockIdx.x] = given[blockIdx.x] + time;\n"
    "        sync_grid(counter);\n"
    "        uint32_t sum = 0;\n"
    "        for (int i = 0; i < int(gridDim.x); ++i) sum += here[i];\n"
    "        sums[(blockIdx.x * 2 + time) * blockDim.x + threadIdx.x] = sum;\n"
    "    }\n}\n"
)


@pytest.mark.parametrize("grid", [1, 7])
def test_sync_grid(target, grid):
    """Every thread sees what all blocks have written before they met, at each of their meetings."""
    given = np.arange(1, grid + 1, dtype=U32)
    for start in (0, 1 << 31):  # as one launch leaves it to the next
        zeros = np.zeros(2 * grid, U32), np.zeros((grid, 2, 64), U32)
        counter, _, _, sums = run(
            target, MEETING, np.array([start], U32), given, *zeros, grid=grid, cooperative=True
        )
        assert counter[0] % (1 << 31) == 0
        np.testing.assert_array_equal(sums[:, 0], given.sum())
        np.testing.assert_array_equal(sums[:, 1], given.sum() + grid)


def test_blocks_meet_in_cooperative_launches_alone():
    target, zeros = host.HostTarget(), np.zeros(100, U32)
    with pytest.raises(host.HostKernelError, match="not a cooperative one"):
        run(target, MEETING, zeros[:1], zeros, zeros, np.zeros((2, 2, 64), U32), grid=2)
    with pytest.raises(ValueError, match="up to 16 blocks here; got 17"):
        run(target, MEETING, *[zeros] * 4, grid=17, cooperative=True)


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
        "    sync_warp();\n    y[384 + i] = lane_id();\n    y[512 + i] = uniform(i / kWarpSize - 7);\n}\n"
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
    if target.name == "hip":
        pytest.skip("AMD GPUs have no named barriers")
    _, y, count = run(target, text, *arrays, threads=128, shared=512)
    halves = x[::-1].reshape(2, 64)
    np.testing.assert_array_equal(y, np.roll(halves, -1, axis=1).reshape(-1))
    assert count[0] == 128


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies(target, size):
    text = (
        f"struct Storage {{ Bytes<{size}> values[64]; }};\n"
        f"KERNEL void word(const Bytes<{size}>* x, Bytes<{size}>* y) {{\n"
        "    SHARED_STORAGE(Storage, storage);\n    const int i = threadIdx.x;\n"
        f"    copy_async<{size}>(&storage.values[i], x + i, i % 3 != 0);\n    copy_async_commit();\n"
        "    copy_async_wait<0>();\n    sync_block();\n    y[i] = storage.values[63 - i];\n"
        f"    store_vector<{size}>(y + 64 + i, load_vector<{size}>(x + i));\n}}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**32, (64, size // 4), dtype=U32)
    _, y = run(target, text, x, np.zeros((128, size // 4), U32), shared=64 * size)
    copied = np.where(np.arange(64)[:, None] % 3 != 0, x, 0)
    np.testing.assert_array_equal(y[:64], copied[::-1])
    np.testing.assert_array_equal(y[64:], x)


@pytest.mark.parametrize("evict_last", [False, True])
def test_cache_policies(target, evict_last):
    """They bring and leave the same bytes as loads and stores without one."""
    text = (
        "struct Storage { Bytes<16> values[64]; };\n"
        "KERNEL void word(const Bytes<16>* x, Bytes<16>* y, const int* last) {\n"
        "    SHARED_STORAGE(Storage, storage);\n    const int i = threadIdx.x;\n"
        "    const LoadPolicy policy = load_policy(*last != 0);\n"
        "    copy_async<16>(&storage.values[i], x + i, policy);\n    copy_async_commit();\n"
        "    copy_async_wait<0>();\n    sync_block();\n    y[i] = storage.values[63 - i];\n"
        "    store_vector<16>(y + 64 + i, load_vector<16>(x + i, policy), store_policy(*last != 0));\n}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**32, (64, 4), dtype=U32)
    y = np.zeros((128, 4), U32)
    _, y, _ = run(target, text, x, y, np.array([evict_last], np.int32), shared=64 * 16)
    np.testing.assert_array_equal(y[:64], x[::-1])
    np.testing.assert_array_equal(y[64:], x)


def test_copies_of_what_is_read_once(target):
    """They bring the same bytes, or zeros."""
    text = (
        "struct Storage { Bytes<16> values[64]; };\n"
        "KERNEL void word(const Bytes<16>* x, Bytes<16>* y) {\n"
        "    SHARED_STORAGE(Storage, storage);\n    const int i = threadIdx.x;\n"
        "    copy_async<16>(&storage.values[i], x + i, i % 3 != 0, load_policy_once());\n"
        "    copy_async_commit();\n"
        "    copy_async_wait<0>();\n    sync_block();\n    y[i] = storage.values[63 - i];\n}\n"
    )
    x = np.random.default_rng(5).integers(0, 2**32, (64, 4), dtype=U32)
    _, y = run(target, text, x, np.zeros((64, 4), U32), shared=64 * 16)
    copied = np.where(np.arange(64)[:, None] % 3 != 0, x, 0)
    np.testing.assert_array_equal(y, copied[::-1])


@pytest.mark.parametrize("cluster", [2, 8, 16])
def test_clusters(target, cluster):
    if max_cluster_size(target.arch) < cluster:
        pytest.skip("no clusters of this size")
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
        "    copy_async_commit();\n    copy_async_wait<0>();\n    sync_block();\n    y[i] = s[63 - i];\n}\n"
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
        "    copy_async_commit();\n    copy_async_wait<0>();\n    sync_block();\n    y[i] = s[63 - i];\n}\n"
    )
    x = np.random.default_rng(6).integers(1, 256, (64, 16), dtype=np.uint8)
    _, y = run(target, text, x, np.full((64, 16), 0xA5, np.uint8))
    kept = np.arange(64)[:, None] % 3 > 0
    np.testing.assert_array_equal(y[::-1], np.where(kept, x, 0))


# --- fragments and their products ----------------------------------------------------------------

MATRIX_FORMATS = {
    **{cpp: number for cpp, (number, _) in FORMATS.items()},
    "int8_t": np.int8,
    "float": np.float32,
}
_MATRICES = """
// Lines of kBytes from global memory on; chunk c of line i.
template <int kLines, int kBytes> struct Lines {
    Bytes<16> chunks[kLines][kBytes / 16];
    DEVICE const void* operator()(int line, int chunk) const { return &chunks[line][chunk]; }
    DEVICE void fill(const void* from) {
        const Bytes<16>* p = static_cast<const Bytes<16>*>(from);
        for (int i = threadIdx.x; i < kLines * kBytes / 16; i += kNumThreads) {
            chunks[i / (kBytes / 16)][i % (kBytes / 16)] = p[i];
        }
    }
};
"""


def multiply(target, body, a, b, out, types, constants=()):
    """One warp's `body`, with a and b (32 outer lines of k, or k lines of 32) in shared memory."""
    k = a.shape[1]

    def storage(x):
        lines, elements = x.T.shape if not x.flags.c_contiguous else x.shape
        return f"Lines<{lines}, {elements * x.itemsize}>"

    text = (
        f"{_MATRICES}struct Storage {{ {storage(a)} a; {storage(b)} b; }};\n"
        "KERNEL void word(const uint8_t* a, const uint8_t* b, Out* y) {\n"
        "    SHARED_STORAGE(Storage, s);\n    s.a.fill(a);\n    s.b.fill(b);\n    sync_block();\n"
        f"    constexpr int kDepth = {k};\n{body}}}\n"
    )
    as_bytes = [
        np.ascontiguousarray(x if x.flags.c_contiguous else x.T).view(np.uint8) for x in (a, b)
    ]
    shared = sum(x.nbytes for x in as_bytes)
    variant = Variant("word", types, constants, target.warp_size, text=text)
    here = [target.xp.asarray(x) for x in (*as_bytes, out)]
    here[-1] = here[-1].copy()
    target.compile(variant)(1, tuple(here), shared)
    return here[-1] if isinstance(here[-1], np.ndarray) else here[-1].get()


def integers(shape, cpp, outer_major, seed):
    """Small integers: (outer, k), in memory by k if outer_major."""
    x = np.random.default_rng(seed).integers(-8, 9, shape).astype(MATRIX_FORMATS[cpp])
    return np.asfortranarray(x) if outer_major else x


def skip_without_fp8(target, *cpp):
    fp8 = {"e4m3", "e5m2"} & {*cpp}
    if fp8 and (target.name == "hip" or target.arch in ("sm_80", "sm_86", "sm_87")):
        pytest.skip(f"{target.arch} does not multiply FP8")


_STORE = """
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = Accumulator<A>::row(lane_id(), i), col = Accumulator<A>::col(lane_id(), i);
            y[(m * 16 + row) * 32 + n * 16 + COLUMN] = acc[m][n].values[i];
        }
    }
"""


@pytest.mark.parametrize(
    ("a", "b", "outer_major"),
    [
        *((c, c, (i, j)) for c in ("half", "bf16", "float") for i in (0, 1) for j in (0, 1)),
        *((c, c, (0, 0)) for c in ("int8_t", "e4m3", "e5m2")),  # bytes lie along k
        *(("e4m3", "e5m2", (0, 0)), ("e5m2", "e4m3", (0, 0))),
    ],
)
def test_products_of_fragments(target, a, b, outer_major):
    """Every element of the product, each in one place, added to what the accumulator held."""
    skip_without_fp8(target, a, b)
    size = np.dtype(MATRIX_FORMATS[a]).itemsize
    depth = 2 * (4 if a == "float" else 32 // size)
    body = """
    Accumulator<A> acc[2][2] = {};
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) acc[m][n].values[i] = m * 2 + n;
    }
    for (int k = 0; k < kDepth; k += kFragmentK<A>) {
        FragmentA<A> f[2];
        FragmentB<B> g[2];
        for (int i = 0; i < 2; ++i) {
            load_fragment<kOuterA != 0>(f[i], s.a, 16 * i, k);
            load_fragment<kOuterB != 0>(g[i], s.b, 16 * i, k);
        }
        mma(acc, f, g);
    }
""" + _STORE.replace("COLUMN", "col")
    out = "int" if a == "int8_t" else "float"
    x, y = (
        integers((32, depth), c, o, i)
        for i, (c, o) in enumerate(zip((a, b), outer_major, strict=True))
    )
    poison = np.full((32, 32), -(2**20), np.int32 if a == "int8_t" else F32)
    product = multiply(
        target, body, x, y, poison, (("A", a), ("B", b), ("Out", out)),
        (("kOuterA", outer_major[0]), ("kOuterB", outer_major[1])),
    )  # fmt: skip
    expected = x.astype(np.float64) @ y.astype(np.float64).T
    expected += np.kron([[0, 1], [2, 3]], np.ones((16, 16)))
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("outer_major", [0, 1])
@pytest.mark.parametrize("chunks", [8, 16])
def test_loaders_load_fragments(target, chunks, outer_major):
    """What load_fragment does, of a tile of 64 lines from line 16 (or the first element) on."""
    text = """
#include "parts/shared_tile.cuh"
using Tile = SharedTile<64, 16 * kChunks>;
struct Storage { Tile tile; };
KERNEL void word(const half* x, uint32_t* y) {
    SHARED_STORAGE(Storage, s);
    TileCopier<half, Tile>(x, 8 * kChunks, 8 * kChunks).start<false>(s.tile, 0, 64);
    copy_async_commit();
    copy_async_wait<0>();
    sync_block();
    constexpr int kFirst = kOuterMajor ? 0 : 16;
    FragmentLoader<kOuterMajor != 0, half, kSideB, Tile> loader(kFirst);
    loader.forget();
    for (int outer = 0; outer < 32; outer += 16) for (int k = 0; k < 48; k += 16) {
        Fragment<half, kSideB> f, g;
        loader.load(f, s.tile, outer, k);
        load_fragment<kOuterMajor != 0>(g, s.tile, kFirst + outer, k);
        uint32_t a[sizeof(f) / 4], b[sizeof(f) / 4];
        memcpy(a, &f, sizeof(f));
        memcpy(b, &g, sizeof(g));
        for (int i = 0; i < int(sizeof(f) / 4); ++i) y[threadIdx.x] += a[i] == b[i];
    }
}
"""
    x = np.arange(64 * 8 * chunks, dtype=np.uint16).view(np.float16)
    y = np.zeros(target.warp_size, U32)
    constants = (("kChunks", chunks), ("kOuterMajor", outer_major))
    variant = Variant("word", (), constants, target.warp_size, text=text)
    here = [target.xp.asarray(a) for a in (x, y)]
    target.compile(variant)(1, tuple(here), 64 * 16 * chunks)
    same = here[1] if target.name == "host" else here[1].get()
    assert (same == same[0]).all() and same[0] >= 6 * 2 and same[0] % 6 == 0


@pytest.mark.parametrize("number", ["half", "bf16"])
def test_sums_become_an_operand(target, number):
    """(a b^T) b, the sums of the first product in registers; where columns stay columns, transposed."""
    body = """
    constexpr bool kRowsStay = kSumsSide == kSideA;
    Accumulator<A> sums[2][2] = {}, acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 16) {
        FragmentA<A> f[2];
        FragmentB<A> g[2];
        for (int i = 0; i < 2; ++i) {
            if constexpr (kRowsStay) load_fragment<false>(f[i], s.a, 16 * i, k);
            else load_fragment<false>(f[i], s.b, 16 * i, k);
            if constexpr (kRowsStay) load_fragment<false>(g[i], s.b, 16 * i, k);
            else load_fragment<false>(g[i], s.a, 16 * i, k);
        }
        mma(sums, f, g);
    }
    for (int k = 0; k < 2; ++k) {
        Fragment<A, kSumsSide> f[2];
        Fragment<A, kRowsStay ? kSideB : kSideA> g[2];
        for (int i = 0; i < 2; ++i) {
            sums_to_fragment<A>(f[i], kRowsStay ? sums[i][k] : sums[k][i]);
            load_fragment<true>(g[i], s.b, 16 * i, 16 * k);
        }
        const auto multiply = [&](const auto& sums, const auto& other) {
            if constexpr (kRowsStay) mma(acc, sums, other);
            else mma(acc, other, sums);
        };
        multiply(f, g);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = m * 16 + Accumulator<A>::row(lane_id(), i);
            const int col = n * 16 + Accumulator<A>::col(lane_id(), i);
            y[kRowsStay ? row * 32 + col : col * 32 + row] = acc[m][n].values[i];
        }
    }
"""
    x, y = (np.sign(integers((32, 32), number, False, i)) for i in range(2))
    product = multiply(
        target, body, x, y, np.full((32, 32), -1, F32), (("A", number), ("Out", "float"))
    )
    x, y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_array_equal(product, x @ y.T @ y)


def test_products_summed_in_fp16(target):
    if target.name == "hip":
        pytest.skip("AMD's matrix units sum FP16 in FP32")
    body = """
    HalfAccumulator acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 16) {
        FragmentA<half> f[2];
        FragmentB<half> g[2];
        for (int i = 0; i < 2; ++i) {
            load_fragment<false>(f[i], s.a, 16 * i, k);
            load_fragment<false>(g[i], s.b, 16 * i, k);
        }
        mma(acc, f, g);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < HalfAccumulator::kCount; ++i) {
            const int row = m * 16 + Accumulator<half>::row(lane_id(), i);
            const int col = n * 16 + Accumulator<half>::col(lane_id(), i);
            y[row * 32 + col] = acc[m][n].value(i);
        }
    }
"""
    x, y = (integers((32, 48), "half", False, i) for i in range(2))
    x[:, 0], y[0, 0], x[:, 16:], y[0, 16:] = 64, 64, 0, 0  # 4096 and more is a multiple of 4
    out = multiply(target, body, x, y, np.full((32, 32), -1, F32), (("Out", "float"),))
    exact = x.astype(np.float64) @ y.astype(np.float64).T
    assert (np.abs(exact[:, 0]) > 2048).any()
    np.testing.assert_array_equal(out, exact.astype(np.float16).astype(F32))


@pytest.mark.parametrize("outer_major", [0, 1])
@pytest.mark.parametrize("stored", ["e4m3", "e5m2", "int8_t"])
@pytest.mark.parametrize("a", ["half", "bf16"])
def test_converted_fragments(target, a, stored, outer_major):
    """B is stored in bytes and multiplied as A's numbers: 32 of k at once, in whichever order."""
    body = f"""
    constexpr bool kOuter = {outer_major};
    constexpr LaneOrder kOrder = kOuter ? LaneOrder::kPairs : LaneOrder::kFours;
    Accumulator<A> acc[2][2] = {{}};
    for (int k = 0; k < kDepth; k += 32) {{
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {{
            load_converted<A, false, kOrder>(f[0][i], f[1][i], s.a, 16 * i, k);
            load_converted<Stored, kOuter, kOrder>(g[0][i], g[1][i], s.b, 16 * i, k);
        }}
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }}
""" + _STORE.replace("COLUMN", "stored_column<Stored, A, kOuter>(col)")
    x, y = integers((32, 64), a, False, 1), integers((32, 64), stored, outer_major, 2)
    product = multiply(
        target,
        body,
        x,
        y,
        np.full((32, 32), np.nan, F32),
        (("A", a), ("Stored", stored), ("Out", "float")),
    )
    np.testing.assert_array_equal(product, x.astype(np.float64) @ y.astype(np.float64).T)


@pytest.mark.parametrize(("a", "b"), [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_both_operands_converted(target, a, b):
    body = """
    Accumulator<A> acc[2][2] = {};
    for (int k = 0; k < kDepth; k += 32) {
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {
            load_converted<StoredA, false, LaneOrder::kFours>(f[0][i], f[1][i], s.a, 16 * i, k);
            load_converted<StoredB, false, LaneOrder::kFours>(g[0][i], g[1][i], s.b, 16 * i, k);
        }
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }
""" + _STORE.replace("COLUMN", "col")
    x, y = integers((32, 64), a, False, 1), integers((32, 64), b, False, 2)
    types = (("A", "half"), ("StoredA", a), ("StoredB", b), ("Out", "float"))
    product = multiply(target, body, x, y, np.full((32, 32), np.nan, F32), types)
    np.testing.assert_array_equal(product, x.astype(np.float64) @ y.astype(np.float64).T)


@pytest.mark.parametrize("first", ["scaled", "plain"])
@pytest.mark.parametrize("a", ["half", "bf16"])
def test_scaled_fragments(target, a, first):
    """e2m1 numbers, two to a byte, with e4m3 scales, multiplied with each other or with A's numbers."""
    body = """
    struct Scaled {
        const unsigned char* bytes;
        const e4m3* scales;
        DEVICE const void* codes(int line, int chunk) const { return bytes + line * 32 + chunk * 16; }
        DEVICE e4m3 scale(int line, int group) const { return scales[line * 4 + group]; }
    };
    const Scaled ours{s.codes, s.scales}, theirs{s.codes + 1024, s.scales + 128};
    Accumulator<A> acc[2][2] = {};
    for (int k = 0; k < 64; k += 32) {
        FragmentA<A> f[2][2];
        FragmentB<A> g[2][2];
        for (int i = 0; i < 2; ++i) {
            if (kPlain) load_converted<A, false, LaneOrder::kEights>(f[0][i], f[1][i], s.a, 16 * i, k);
            else load_scaled(f[0][i], f[1][i], ours, 16 * i, k);
            load_scaled(g[0][i], g[1][i], theirs, 16 * i, k);
        }
        mma(acc, f[0], g[0]);
        mma(acc, f[1], g[1]);
    }
    for (int m = 0; m < 2; ++m) for (int n = 0; n < 2; ++n) {
        for (int i = 0; i < Accumulator<A>::kCount; ++i) {
            const int row = Accumulator<A>::row(lane_id(), i), col = Accumulator<A>::col(lane_id(), i);
            y[(m * 16 + row) * 32 + n * 16 + col] = acc[m][n].values[i];
        }
    }
"""
    text = """
struct alignas(16) Storage {
    unsigned char codes[2048];
    e4m3 scales[256];
    struct {
        alignas(16) A numbers[32 * 64];
        DEVICE const void* operator()(int line, int chunk) const { return numbers + line * 64 + chunk * 8; }
    } a;
};
KERNEL void word(const unsigned char* codes, const unsigned char* scales, const unsigned short* a, float* y) {
    SHARED_STORAGE(Storage, s);
    for (int i = threadIdx.x; i < 2048; i += kWarpSize) s.codes[i] = codes[i];
    for (int i = threadIdx.x; i < 256; i += kWarpSize) s.scales[i] = bit_cast<e4m3>(scales[i]);
    for (int i = threadIdx.x; i < 2048; i += kWarpSize) s.a.numbers[i] = bit_cast<A>(a[i]);
    sync_block();
    constexpr bool kPlain = PLAIN;
BODY}
""".replace("BODY", body).replace("PLAIN", "true" if first == "plain" else "false")
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (2, 32, 32), np.uint8)
    scales = (2.0 ** rng.integers(-3, 4, (2, 32, 4))).astype(ml_dtypes.float8_e4m3fn)
    plain = integers((32, 64), a, False, 1)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.stack([codes & 15, codes >> 4], -1).reshape(2, 32, 64)
    values = (
        np.where(values > 7, -1, 1)
        * numbers[values % 8]
        * np.repeat(scales.astype(np.float64), 16, -1)
    )
    x = values[0] if first == "scaled" else plain.astype(np.float64)
    *_, y = run(
        target, text, codes.reshape(-1), scales.view(np.uint8).reshape(-1), plain.view(np.uint16),
        np.zeros((32, 32), F32), types=(("A", a),), threads=target.warp_size, shared=2048 + 256 + 4096,
    )  # fmt: skip
    np.testing.assert_array_equal(y, x @ values[1].T)


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
