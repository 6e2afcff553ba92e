"""Kernels in Hopper's words for the tests, and how they are launched on every target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from cupykern.kernels import Variant
from cupykern.targets import Target, UnavailableError, host, tensor_map
from cupykern.tools import gate

SCHEDULES = ("fifo", "lifo", "sticky:1", "sticky:2")
NUMBERS = {
    "half": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8_t": np.dtype(np.int8),
}


@dataclass(frozen=True)
class Map:
    """An argument: the tensor map of the array called `array`."""

    array: str
    box: tuple[int, ...]
    swizzle: int = 0


def variant(text: str, *, threads: int = 128, cluster: int = 1, **types: str) -> Variant:
    text = '#include "platform/wgmma.cuh"\n#line 1 "word.cu"\n' + text
    return Variant("word", tuple(types.items()), (), threads, cluster, text=text)


def _copy(x: np.ndarray, target: Target) -> Any:
    return target.xp.array(x.view(np.uint8) if x.itemsize == 1 else x)  # CuPy has no FP8 arrays


def launch(
    target: Target,
    kernel: Variant,
    arrays: Mapping[str, np.ndarray],
    args: Sequence[str | Map | np.generic],
    grid: int = 1,
    shared: int = 0,
) -> dict[str, np.ndarray]:
    """Run on copies of `arrays`, which args name or hold the maps of; returns the copies."""
    here = {name: _copy(x, target) for name, x in arrays.items()}

    def argument(arg: str | Map | np.generic) -> Any:
        if isinstance(arg, Map):
            return tensor_map.of_array(here[arg.array], arg.box, arg.swizzle)
        return here[arg] if isinstance(arg, str) else arg

    target.compile(kernel)(grid, tuple(map(argument, args)), shared)
    back = {name: x if isinstance(x, np.ndarray) else x.get() for name, x in here.items()}
    return {name: x.view(arrays[name].dtype) for name, x in back.items()}


@cache
def _hopper_failure(kernel: Variant) -> str | None:
    try:
        return gate.failure(gate.compile_row(kernel, "sm_90a"))
    except UnavailableError:  # NVRTC is not here
        return None


def launch_all(target: Target, kernel: Variant, *args: Any, **kwargs: Any) -> dict[str, np.ndarray]:
    """`launch`; on the host under every schedule, which must agree; compiled for Hopper too."""
    if target.name != "host":
        return launch(target, kernel, *args, **kwargs)
    assert _hopper_failure(kernel) is None
    results = []
    for schedule in SCHEDULES:
        with host.use(schedule=schedule) as here:
            results.append(launch(here, kernel, *args, **kwargs))
    for other in results[1:]:
        for name, x in results[0].items():
            assert x.tobytes() == other[name].tobytes(), f"schedules differ in {name}"
    return results[0]


def integers(shape: Sequence[int], dtype: np.dtype, limit: int = 4, seed: int = 1) -> np.ndarray:
    """Small integers: sums of their products are exact on every target."""
    values = np.random.default_rng(seed).integers(-limit, limit + 1, shape)
    return values.astype(np.float32).astype(dtype)


BOXES = [
    # dtype, shape, box, at, swizzle
    (np.uint8, (100,), (64,), (0,), 0),
    (np.uint8, (100,), (64,), (80,), 0),
    (np.float16, (40, 64), (16, 64), (8, 0), 128),
    (np.float16, (40, 96), (16, 64), (32, 64), 128),
    (np.float16, (40, 96), (16, 64), (-3, -8), 128),
    (np.float16, (40, 96), (32, 32), (5, 24), 64),
    (np.float16, (40, 96), (32, 16), (-40, 0), 32),
    (np.float32, (30, 36), (24, 4), (12, 32), 0),
    (np.float32, (30, 36), (24, 8), (12, 32), 32),
    (np.uint8, (17, 256), (16, 128), (3, 208), 128),
    (np.uint16, (5, 6, 80), (2, 4, 64), (4, 3, 24), 128),
    (np.uint16, (3, 4, 5, 64), (2, 3, 2, 32), (2, -1, 4, 40), 64),
    (np.uint32, (2, 3, 4, 3, 16), (2, 2, 3, 2, 8), (1, 2, 2, 2, 12), 32),
    (np.uint8, (96,), (64,), (80,), 0),
]


def values(shape: tuple[int, ...], dtype) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 100, shape).astype(dtype)


def coordinates(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, at[::-1])) + "}"


def tma_image(target: Target, dtype: Any, shape: Any, box: Any, at: Any, span: int) -> np.ndarray:
    """The bytes of shared memory that a tma_load of `values(shape, dtype)` gives."""
    text = f"""
struct Storage {{ alignas(1024) unsigned char box[8192]; Barrier full; }};
KERNEL void word(GRID_CONSTANT TensorMap map, unsigned char* y, int bytes) {{
    SHARED_STORAGE(Storage, s);
    if (threadIdx.x == 0) {{
        prefetch_tensor_map(map);
        tma_prefetch(map, {coordinates(at)});
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
    args = (Map("x", box, span), "y", np.int32(size))
    return launch_all(target, variant(text), arrays, args, shared=9216)["y"]


# C (M, N) = A (M, K) B (N, K)^T in fp16: a producer warp fills a ring of stages by TMA, two
# warpgroups multiply and store their halves of the tile by TMA.
MATMUL = """
constexpr int kTileM = 128, kTileN = 128, kTileK = 64, kStages = 4;
struct Storage {
    half a[kStages][kTileM * kTileK];
    half b[kStages][kTileN * kTileK];
    half c[2][2][64 * 64];  // of each warpgroup, 64 columns each
    Barrier full[kStages], empty[kStages];
};

KERNEL void word(GRID_CONSTANT TensorMap a_map, GRID_CONSTANT TensorMap b_map,
                 GRID_CONSTANT TensorMap c_map, int num_k_tiles, int num_n_tiles) {
    SHARED_STORAGE(Storage, s);
    const int row = blockIdx.x / num_n_tiles * kTileM, col = blockIdx.x % num_n_tiles * kTileN;
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            s.full[i].init(1);
            s.empty[i].init(2);
        }
        fence_barrier_init();
    }
    sync_block();
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (threadIdx.x / 32 == 8 && elect_one()) {
            for (int i = 0; i < num_k_tiles; ++i) {
                const int stage = i % kStages, parity = i / kStages % 2;
                s.empty[stage].wait(parity ^ 1);
                s.full[stage].arrive_expect_tx(sizeof(s.a[0]) + sizeof(s.b[0]));
                tma_load(s.a[stage], a_map, s.full[stage], {i * kTileK, row});
                tma_load<kEvictLast>(s.b[stage], b_map, s.full[stage], {i * kTileK, col});
            }
        }
        return;
    }
    increase_registers<232>();
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    float d[kTileN / 2];
    for (int i = 0; i < num_k_tiles; ++i) {
        const int stage = i % kStages, parity = i / kStages % 2;
        s.full[stage].wait(parity);
        const uint64_t a = matrix_descriptor<128>(&s.a[stage][warpgroup * 64 * kTileK], 16, 1024);
        const uint64_t b = matrix_descriptor<128>(s.b[stage], 16, 1024);
        wgmma_fence(d);
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
            wgmma<half>(d, advance(a, 32 * k), advance(b, 32 * k), i > 0 || k > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && thread == 0) s.empty[(i - 1) % kStages].arrive();
    }
    wgmma_wait<0>(d);
#pragma unroll
    for (int j = 0; j < kTileN / 16; ++j) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = pack<half>(d[8 * j + 2 * i], d[8 * j + 2 * i + 1]);
        const int r = warp * 16 + lane % 16, c = j * 2 + lane / 16;
        store_matrix(&s.c[warpgroup][c / 8][r * 64 + (c % 8 ^ r % 8) * 8], packed);
    }
    fence_async_proxy();
    named_barrier(1 + warpgroup, 128);
    if (thread == 0) {
        for (int i = 0; i < 2; ++i) {
            tma_store(c_map, s.c[warpgroup][i], {col + 64 * i, row + 64 * warpgroup});
        }
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}
"""
MATMUL_SHARED = 4 * (128 + 128) * 64 * 2 + 4 * 64 * 64 * 2 + 2 * 4 * 8


def matmul_problem(m: int, n: int, k: int) -> tuple[dict[str, np.ndarray], tuple, int]:
    """(arrays, args, grid) of MATMUL."""
    arrays = {
        "a": integers((m, k), np.dtype(np.float16), seed=1),
        "b": integers((n, k), np.dtype(np.float16), seed=2),
        "c": np.full((m, n), 77, np.float16),
    }
    num_n_tiles = -(-n // 128)
    args = (
        Map("a", (128, 64), 128),
        Map("b", (128, 64), 128),
        Map("c", (64, 64), 128),
        np.int32(-(-k // 64)),
        np.int32(num_n_tiles),
    )
    return arrays, args, -(-m // 128) * num_n_tiles
