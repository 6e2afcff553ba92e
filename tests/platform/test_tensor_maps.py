"""Tensor maps, and what TMA loads and stores by them."""

from __future__ import annotations

import itertools

import needs
import numpy as np
import pytest
from hopper_kernels import (
    BOXES,
    Map,
    coordinates,
    launch_all,
    tma_image,
    values,
    variant,
)

from cupykern.targets import host, tensor_map

F16, I32, U32 = np.float16, np.int32, np.uint32


pytestmark = needs.hopper


# --- TMA -----------------------------------------------------------------------------------------


def swizzle(image: np.ndarray, span: int) -> np.ndarray:
    """What TMA makes of lines of `span` bytes: within 8 times that, the part number i (of 16 bytes)
    of what would be line j of 128 bytes goes to the part number i ^ (j mod span / 16)."""
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
def test_a_tma_load_brings_the_swizzled_box(target, dtype, shape, box, at, span):
    image = np.frombuffer(box_of(values(shape, dtype), at, box).tobytes(), np.uint8)
    y = tma_image(target, dtype, shape, box, at, span)
    np.testing.assert_array_equal(y, swizzle(image, span))


@pytest.mark.parametrize(
    ("dtype", "shape", "box", "at", "span"),
    [
        (dtype, shape, box, tuple(max(i, 0) for i in at), span)
        for dtype, shape, box, at, span in BOXES
        if shape[-1] * np.dtype(dtype).itemsize % 16 == 0  # which a store writes whole
    ],
)
def test_a_tma_store_writes_the_box_and_nothing_else(target, dtype, shape, box, at, span):
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


def test_stores_of_earlier_launches_need_no_fence():
    """Those of store_matrix, where a later launch stores other bytes by TMA; a launch with less
    shared memory lies between them."""
    text = """
struct Storage { alignas(1024) uint16_t box[kRows * 64]; };
KERNEL void word(GRID_CONSTANT TensorMap map, int number) {
    SHARED_STORAGE(Storage, s);
    if (number == 1) return;
    uint16_t* last = s.box + (kRows - 1) * 64;
    const uint32_t registers[1] = {};
    store_matrix((number == 0 ? last : s.box) + threadIdx.x % 8 * 8, registers);
    if (number == 2 && threadIdx.x == 0) {
        for (int i = 0; i < 64; ++i) last[i] = 1;
        fence_async_proxy();
        tma_store(map, last, {0, 0});
        tma_store_commit();
        tma_store_wait<0>();
    }
}
"""
    with host.use() as target:
        for number, rows in enumerate((512, 8, 512)):
            kernel = variant(f"constexpr int kRows = {rows};\n" + text, threads=32)
            arrays, args = {"y": np.zeros((1, 64), F16)}, (Map("y", (1, 64), 0), I32(number))
            y = launch_all(target, kernel, arrays, args, 64, shared=128 * rows)["y"]
            assert (y.view(np.uint16) == (number == 2)).all()


@pytest.mark.parametrize("cluster", [2, 4])
def test_a_tma_multicast_reaches_every_block_of_the_cluster(target, cluster):
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
