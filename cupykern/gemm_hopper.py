"""Products by Hopper's main loop: its configs, and plans with tensor maps.

The Python half of kernels_cu/gemm_hopper.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from . import dtypes
from .jit import get_kernel
from .product import (
    ALIGNMENT,
    BATCH,
    EPILOGUE,
    FLOAT16S,
    INNER,
    OUTER,
    STRIDED,
    GemmTask,
    Matrix,
    Product,
    address_of,
    fill_batch,
    fill_epilogue,
)
from .targets import Kernel, Target, by_value, tensor_map
from .targets.limits import max_shared_bytes, multiprocessors

ARCHS = ("sm_90a", "host")
_LINE = 128  # mainloop_hopper.cuh: kLineBytes
_STAGING = 8 * 4096  # gemm_hopper.cu: HopperStorage.staging
_GROUP_ROWS = 2048  # of tiles that blocks compute at the same time, below each other
_STORE_BOX = (1, 16, 64)  # gemm_hopper.cu: kWarpRows, kChunk
_PARAMS = np.dtype(  # gemm_hopper.cu: HopperParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "num_k_tiles", "tiles_m", "tiles_n")),
        ("epilogue", EPILOGUE),
        *(("tma_stores", np.int32), ("group_height", np.int32)),
    ]
)
_NO_MAP = by_value(np.zeros(128, np.uint8))


@dataclass(frozen=True)
class HopperConfig:
    """A tile of Hopper's main loop (the constants of mainloop_hopper.cuh).

    Two warpgroups compute tile_m x tile_n sums from `stages` stages of 128 bytes of k: each half of the
    rows, or, with ping_pong, every other tile.  lead: stages that the first one is ahead of the other
    one, so that one finishes its rows while the other multiplies.
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = False
    lead: int = 0

    @property
    def num_threads(self) -> int:
        return 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block (gemm_hopper.cu: HopperStorage)."""
        ring = self.stages * ((self.tile_m + self.tile_n) * _LINE + 16) + 16
        return _STAGING + -(-ring // 1024) * 1024


_TILE_TIMES = {
    HopperConfig(128, 256, 4): 45.5,
    HopperConfig(128, 192, 4): 34.0,
    HopperConfig(128, 128, 6, ping_pong=True): 23.7,
}
"""Measured on an H200 at 4096 and 8192 cubed: us that a multiprocessor takes for a tile of k = 4096."""

CONFIGS = tuple(_TILE_TIMES)


def refusal(config: HopperConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c = config
    if arch not in ARCHS:
        return f"{arch} has neither TMA nor wgmma"
    if task.a != task.b or task.a not in FLOAT16S:
        return f"Hopper's main loop takes float16 or bfloat16 operands; got {task.a} and {task.b}"
    if task.block_scales:
        return "Hopper's main loop takes no scales of blocks"
    if STRIDED in (task.layout_a, task.layout_b) or not task.tma:
        return "TMA takes operands with neighbours along one dim and positive multiples of 16 bytes"
    if task.k == 0:
        return "a tensor map has no dims of size 0"
    rows = c.tile_m if c.ping_pong else c.tile_m // 2
    if min(c.tile_m, c.tile_n, c.stages) < 1 or rows % 64 or c.tile_n % 64:
        return f"tiles must be multiples of {64 if c.ping_pong else 128} x 64; got {c.tile_m} x {c.tile_n}"
    if max(c.tile_m, c.tile_n) > 256 or rows // 64 * c.tile_n > 256:
        return f"the registers of two warpgroups do not hold {c.tile_m} x {c.tile_n} sums"
    if c.lead not in range(1 if c.ping_pong else c.stages + 1):
        return f"no warpgroup is {c.lead} stages ahead in a ring of {c.stages}, or with ping_pong"
    limit = max_shared_bytes(arch)
    if c.shared_bytes > limit:
        return f"{c.shared_bytes} bytes of shared memory are more than the {limit} of {arch}"
    return None


def configs(task: GemmTask, arch: str, blocks: int) -> tuple[HopperConfig, ...]:
    """The configs of `task` on `arch`, of which `blocks` run at once, the fastest first."""
    fitting = (config for config in CONFIGS if refusal(config, task, arch) is None)
    return tuple(sorted(fitting, key=lambda config: _estimate(config, task, blocks)))


def _estimate(config: HopperConfig, task: GemmTask, blocks: int) -> float:
    """In which time the busiest block computes its tiles."""
    tiles = task.batch * math.ceil(task.m / config.tile_m) * math.ceil(task.n / config.tile_n)
    return math.ceil(tiles / blocks) * _TILE_TIMES[config]


def pays(task: GemmTask) -> bool:
    """Whether the tiles are enough to keep most of a GPU busy."""
    tiles = task.batch * math.ceil(task.m / 128) * math.ceil(task.n / 256)
    return task.m > 64 and 2 * tiles >= multiprocessors("sm_90a")


def variant(task: GemmTask, config: HopperConfig) -> Variant:
    c = config
    return Variant(
        "gemm_hopper",
        (("ElementA", dtypes.CPP_NAMES[task.a]), ("ElementB", dtypes.CPP_NAMES[task.b])),
        (
            ("kTileM", c.tile_m),
            ("kTileN", c.tile_n),
            ("kStages", c.stages),
            ("kOuterMajorA", task.layout_a == OUTER),
            ("kOuterMajorB", task.layout_b == OUTER),
            ("kPingPong", c.ping_pong),
            ("kLead", c.lead),
        ),
        c.num_threads,
    )


# --- tensor maps -------------------------------------------------------------------------------


class MapPlan(NamedTuple):
    """A tensor map without its address (tensor_map.encode)."""

    dtype: np.dtype
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int]

    def encode(self, target: Target, array: Any) -> np.ndarray:
        return tensor_map.encode(
            target.name, address_of(array), self.dtype, self.shape, self.strides, self.box, _LINE
        )


def _batch_unit(x: Matrix, sizes: tuple[int, ...]) -> tuple[int, int]:
    """(a stride that all strides of the batch are multiples of, how many of it the batch spans)."""
    strides = [s for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1]
    unit = math.gcd(*strides) or 1
    spanned = sum(
        (size - 1) * s // unit for s, size in zip(x.batch_strides, sizes, strict=True) if size > 1
    )
    return unit, spanned + 1


def _map_plan(
    x: Matrix, batch: tuple[int, ...], shape: tuple[int, int], strides: tuple[int, int], box: tuple
) -> MapPlan:
    unit, count = _batch_unit(x, batch)
    size = x.dtype.itemsize
    return MapPlan(
        x.dtype, (count, *shape), (unit * size, strides[0] * size, strides[1] * size), box
    )


def _operand_map(
    x: Matrix,
    batch: tuple[int, ...],
    layout: int,
    outer: int,
    outer_step: int,
    k: int,
    k_step: int,
    rows: int,
) -> MapPlan:
    """rows: of the outer dim, that one load brings where k is the inner one."""
    line = _LINE // x.dtype.itemsize
    if layout == INNER:
        return _map_plan(x, batch, (outer, k), (outer_step, 1), (1, rows, line))
    return _map_plan(x, batch, (k, outer), (k_step, 1), (1, line, line))


def _tma_stores(product: Product) -> bool:
    """Whether the output can be stored by TMA."""
    p, out = product, product.out
    per_line = ALIGNMENT // out.dtype.itemsize
    return (
        out.dtype in FLOAT16S
        and out.aligned
        and (out.col == 1 or p.n == 1)
        and (p.m == 1 or (out.row > 0 and out.row % per_line == 0))
        and all(stride >= 0 for stride in out.batch_strides)
        and max(out.row, *out.batch_strides, 0, 0) * out.dtype.itemsize < 2**40
    )


# --- plans -------------------------------------------------------------------------------------


class HopperPlan(NamedTuple):
    """The launch of a product, as shapes, strides, dtypes and config decide it."""

    target: Target
    kernel: Kernel
    grid: int
    shared_bytes: int
    maps: tuple[MapPlan, MapPlan, MapPlan | None]
    params: np.ndarray

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: a, b, out, bias, residual, scale_a, scale_b, of which some are None, and others."""
        maps = (
            _NO_MAP if plan is None else plan.encode(self.target, array)
            for plan, array in zip(self.maps, arrays[:3], strict=True)
        )
        self.kernel(self.grid, (*maps, *arrays[2:7], self.params), self.shared_bytes)


def hopper_plan(
    target: Target,
    product: Product,
    task: GemmTask,
    dims: list[tuple[int, tuple[int, ...]]],
    config: HopperConfig,
) -> HopperPlan:
    """The plan of `product`, whose dims are product_dims'.  Raises ValueError for what its config
    alone does not tell."""
    p, c = product, config
    if target.warp_size != 32:
        raise ValueError(f"Hopper's main loop needs warps of 32 lanes; got {target.warp_size}")
    tiles_m, tiles_n = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    tiles = task.batch * tiles_m * tiles_n
    if tiles >= 2**30 or max(p.m, p.n) >= 2**31 - 512:
        raise ValueError(f"a product of {p.m} x {p.n} is too large for Hopper's main loop")
    map_a = _operand_map(p.a, p.batch, task.layout_a, p.m, p.a.row, p.k, p.a.col, c.tile_m)
    map_b = _operand_map(p.b, p.batch, task.layout_b, p.n, p.b.col, p.k, p.b.row, c.tile_n)
    map_out = None
    if _tma_stores(p):
        map_out = _map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), _STORE_BOX)

    params = np.zeros((), _PARAMS)
    units = [
        1 if plan is None else plan.strides[0] // plan.dtype.itemsize
        for plan in (map_a, map_b, map_out)
    ]
    fill_batch(params["batch"], dims)
    params["batch"]["strides"][:3] //= np.array(units)[:, None]
    fill_epilogue(params["epilogue"], p)
    params["batch_size"] = task.batch
    params["num_k_tiles"] = math.ceil(p.k * task.a.itemsize / _LINE)
    params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
    params["tma_stores"] = map_out is not None
    params["group_height"] = _GROUP_ROWS // c.tile_m
    return HopperPlan(
        target=target,
        kernel=get_kernel(target, variant(task, c)),
        grid=min(tiles, target.multiprocessors),
        shared_bytes=c.shared_bytes,
        maps=(map_a, map_b, map_out),
        params=by_value(params),
    )
