"""How products are launched: which main loop and config, and the portable main loop's plans.

The Python half of kernels_cu/gemm.cu; gemm_hopper.py is that of Hopper's main loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from . import dtypes, gemm_hopper
from .choice import choose
from .gemm_hopper import HopperConfig
from .jit import get_kernel
from .product import (
    BATCH,
    BLOCK,
    EPILOGUE,
    FP8,
    MAX_BATCH_DIMS,
    OUTER,
    STRIDED,
    STRIDES,
    GemmTask,
    Product,
    compute_dtype,
    fill_batch,
    fill_epilogue,
    make_task,
    product_dims,
)
from .rows import DTYPE_CODES
from .targets import Kernel, Target, by_value
from .targets.limits import max_shared_bytes, multiprocessors

_WHOLE, _PARTIAL, _REDUCE = (np.int64(i) for i in range(3))  # gemm.cu: Pass
_MAX_SPLITS = 64
_ALL_OF_K = 2**30  # no sum is promoted before its end
_FP8_ARCHS = ("sm_89", "sm_100a", "sm_120a", "host")


# --- configs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmConfig:
    """A tile of the portable main loop and how it is computed (the constants of mainloop.cuh).

    A block of warps_m * warps_n * warps_k warps computes tile_m x tile_n sums, tile_k of k at a time,
    through `stages` buffers; `splits` blocks share the k of a tile.  finish_rounds: in how many parts
    a warp's sums go through shared memory to the epilogue.  fp8: FP8 operands are multiplied as they
    are, with sums promoted every 128 of k; otherwise as FP16.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps_m: int
    warps_n: int
    warps_k: int = 1
    stages: int = 3
    splits: int = 1
    finish_rounds: int = 1
    fp8: bool = False

    @property
    def num_threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    def shared_bytes(self, itemsize_a: int, itemsize_b: int) -> int:
        """Dynamic shared memory of a block (gemm.cu: GemmStorage), at either warp size."""
        stages = self.stages * self.tile_k * (self.tile_m * itemsize_a + self.tile_n * itemsize_b)
        fragments = self.tile_m * self.tile_n * self.warps_k // self.finish_rounds // 256
        slices = self.tile_m * self.tile_n * self.warps_k * 4 if self.warps_k > 1 else 0
        return max(stages, fragments * 16 * 20 * 4, slices)


AnyConfig = GemmConfig | HopperConfig


def refusal(config: AnyConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    if isinstance(config, HopperConfig):
        return gemm_hopper.refusal(config, task, arch)
    c = config
    sizes = (c.tile_m, c.tile_n, c.tile_k, c.warps_m, c.warps_n, c.warps_k)
    if min(*sizes, c.splits, c.finish_rounds) < 1:
        return "tiles, warps, splits and finish_rounds must be positive"
    if c.stages < 2:
        return f"stages must be at least 2; got {c.stages}"
    (element_a, element_b), (compute, _) = _types(task, config)
    step = 4 if compute == dtypes.float32 else 32 // compute.itemsize
    if element_a.itemsize + element_b.itemsize < 2 * compute.itemsize:
        step = 32  # mainloop.cuh: kConverts
    if c.fp8 and not (
        task.a in FP8 and task.b in FP8 and STRIDED not in (task.layout_a, task.layout_b)
    ):
        return "fp8 is for two FP8 operands that lie along k"
    if task.half_sums and not task.a == task.b == dtypes.float16:
        return f"only FP16 products are summed in FP16; got {task.a} and {task.b}"
    if task.half_sums and arch.startswith("gfx"):
        return f"{arch} does not sum in FP16"
    if c.fp8 and arch not in _FP8_ARCHS:
        return f"{arch} does not multiply FP8"
    if _promote_k(task, c) % c.tile_k:
        return f"sums are promoted every {_promote_k(task, c)} of k, no multiple of tile_k = {c.tile_k}"
    if c.tile_m % (16 * c.warps_m) or c.tile_n % (16 * c.warps_n):
        return f"warps {c.warps_m} x {c.warps_n} do not share {c.tile_m} x {c.tile_n} in fragments of 16 x 16"
    if c.tile_k % (step * c.warps_k):
        return f"tile_k must be a multiple of {step * c.warps_k}; got {c.tile_k}"
    if c.num_threads > 1024:
        return f"{c.num_threads} threads are more than 1024"
    fragments = c.tile_m * c.tile_n // (256 * c.warps_m * c.warps_n)
    if fragments % c.finish_rounds:
        return f"finish_rounds must divide a warp's {fragments} fragments; got {c.finish_rounds}"
    for layout, outer, element in (
        (task.layout_a, c.tile_m, element_a),
        (task.layout_b, c.tile_n, element_b),
    ):
        line = (outer if layout == OUTER else c.tile_k) * element.itemsize // 16
        if line < 1 or line & (line - 1):
            return f"a line of {16 * line} bytes in shared memory is not 16 times a power of two"
    needed, limit = c.shared_bytes(element_a.itemsize, element_b.itemsize), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    if c.splits > 1 and c.splits > math.ceil(task.k / BLOCK):
        return f"{c.splits} splits of k = {task.k} would be shorter than {BLOCK}"
    return None


def check_config(config: Any, task: GemmTask, arch: str) -> None:
    """Raises TypeError and ValueError, with the reason, for a config that cannot compute `task`."""
    if not isinstance(config, AnyConfig):
        raise TypeError(f"config must be a GemmConfig or HopperConfig; got {type(config).__name__}")
    if reason := refusal(config, task, arch):
        raise ValueError(f"config does not fit: {reason}")


def tuned_config(task: GemmTask, target: Target) -> AnyConfig:
    """The tuned config of `task` if there is one, else `choose_config`'s."""
    t = task
    return choose(
        "gemm",
        target,
        {"batch": t.batch, "m": t.m, "n": t.n, "k": t.k},
        {
            "a": t.a.name,
            "b": t.b.name,
            "layouts": f"{t.layout_a}{t.layout_b}",
            "blocks": t.block_scales,
            "tma": t.tma,
            "half_sums": t.half_sums,
        },
        lambda: configs(task, target.arch, target.multiprocessors),
        lambda config: variant(task, config),
    )


@cache
def _tiles(
    arch: str, a: np.dtype, b: np.dtype, layout_a: int, layout_b: int, block_scales: bool
) -> tuple[GemmConfig, ...]:
    """The tiles for operands of these dtypes and layouts, the largest first.

    Few for what is rare: each is a variant for every pair of dtypes and layouts.  Hopper's main loops have
    tiles of few rows for FP8 and for what is converted.
    """
    compute = compute_dtype(a, b)
    gfx = arch.startswith("gfx")
    gfx11 = arch.startswith("gfx11")  # whose fragments take twice as many registers
    roomy = max_shared_bytes(arch) >= 160 * 1024
    few = 2 if gfx else 3  # stages
    small = GemmConfig(16, 64, 128, 1, 1, 4, stages=2 if gfx and a.itemsize == 2 else 4)
    if STRIDED in (layout_a, layout_b):
        warps_n = 4 if gfx11 and block_scales else 2
        return (GemmConfig(64, 64, 128 // compute.itemsize, 2, warps_n, stages=2),)
    if compute == dtypes.float32:
        return (GemmConfig(64, 64, 32, 2, 2, stages=few),)
    e5m2 = dtypes.float8_e5m2 in (a, b)
    if a.itemsize == b.itemsize == 1:
        converted = GemmConfig(64, 64, 128, 2, 2, stages=few)
        if gfx11 and a in FP8:
            converted = GemmConfig(64, 64, 64, 2, 4, stages=2)
        native = replace(converted, fp8=True)
        large = (converted,)
        if a in FP8 and arch in _FP8_ARCHS:
            large = (native, converted) if arch == "host" else (native,)
        few_tiles = e5m2 or block_scales or (arch == "sm_90a" and a in FP8)
        return large if few_tiles else (*large, small)
    if b.itemsize == 1:
        if gfx11:
            return (GemmConfig(32, 64, 64, 2, 4 if block_scales else 2, stages=2),)
        # Scaled blocks have their sums twice, of the products and of the blocks.
        cols = 64 if gfx or block_scales else 128
        large = GemmConfig(64, cols, 64, 2, 2, stages=4 if roomy else few)
        return (large,) if e5m2 or block_scales or arch == "sm_90a" else (large, small)
    if gfx:
        large = GemmConfig(128, 128, 32, 2, 4, stages=2, finish_rounds=2)
        medium = GemmConfig(64, 64, 64, 2, 2, stages=2)
    else:
        large = GemmConfig(128, 128, 64, 2, 4, stages=3)
        medium = GemmConfig(64, 128, 64, 2, 2, stages=4 if roomy else 3)
    if layout_a == OUTER:
        return (large,)
    return (large, small) if arch == "sm_90a" else (large, medium, small)


def configs(task: GemmTask, arch: str, blocks: int | None = None) -> tuple[AnyConfig, ...]:
    """The configs of `task` on `arch`, the measured one first.

    blocks: how many multiprocessors the device has; None: as most of `arch`.  It decides between tiles
    of Hopper's main loop, the sums of which agree bit for bit, but not about splits.
    """
    portable = _portable_configs(task, arch)
    hopper = gemm_hopper.configs(task, arch, blocks or multiprocessors(arch))
    if arch != "host" and gemm_hopper.pays(task):
        return (*hopper, *portable)
    return (*portable, *hopper)


@cache
def _portable_configs(task: GemmTask, arch: str) -> tuple[GemmConfig, ...]:
    tiles = _tiles(arch, task.a, task.b, task.layout_a, task.layout_b, task.block_scales)
    if task.half_sums:  # few variants for what is rare
        tiles = tiles[:1]
    fitting = [tile for tile in tiles if refusal(tile, task, arch) is None]
    chosen = next((tile for tile in fitting if _fills(tile, task)), fitting[-1])
    split = _split(chosen, task, arch)
    return (split, *(tile for tile in fitting if tile != split))


def _fills(tile: GemmConfig, task: GemmTask) -> bool:
    """Whether there are enough rows, and of the largest tile also columns, for a tile as large."""
    wide_enough = tile.tile_m <= 64 or task.n > tile.tile_n // 2
    return task.m > tile.tile_m // 2 and wide_enough


def _split(tile: GemmConfig, task: GemmTask, arch: str) -> GemmConfig:
    """`tile` with so many splits, each of at least 512 of k, that every multiprocessor has a block, or
    two of 64 rows: (64, 8192, 8192) of FP16 by E4M3 takes 50 us instead of 58 so (H200).
    """
    tiles = task.batch * math.ceil(task.m / tile.tile_m) * math.ceil(task.n / tile.tile_n)
    blocks = multiprocessors(arch) * (2 if tile.tile_m == 64 else 1)
    splits = max(1, min(blocks // max(tiles, 1), task.k // 512, _MAX_SPLITS))
    return replace(tile, splits=splits)


def choose_config(task: GemmTask, arch: str, blocks: int | None = None) -> AnyConfig:
    """The fastest measured config for `task` on `arch` with `blocks` multiprocessors (`configs`)."""
    return configs(task, arch, blocks)[0]


def _types(
    task: GemmTask, config: GemmConfig
) -> tuple[tuple[np.dtype, np.dtype], tuple[np.dtype, np.dtype]]:
    """(a, b) as they lie in shared memory, and as they are multiplied."""
    if config.fp8:
        return (task.a, task.b), (task.a, task.b)
    compute = (compute_dtype(task.a, task.b),) * 2
    # What lies in any strides is converted on the way to shared memory.
    strided = STRIDED in (task.layout_a, task.layout_b)
    return compute if strided else (task.a, task.b), compute


def _promote_k(task: GemmTask, config: GemmConfig) -> int:
    if task.half_sums:
        return _ALL_OF_K
    return BLOCK if config.fp8 or task.block_scales else 0


def variant(task: GemmTask, config: AnyConfig) -> Variant:
    if isinstance(config, HopperConfig):
        return gemm_hopper.variant(task, config)
    elements, computes = _types(task, config)
    names = ("ElementA", "ElementB", "ComputeA", "ComputeB")
    c = config
    return Variant(
        "gemm",
        tuple(
            (name, dtypes.CPP_NAMES[dtype])
            for name, dtype in zip(names, (*elements, *computes), strict=True)
        ),
        (
            ("kTileM", c.tile_m),
            ("kTileN", c.tile_n),
            ("kTileK", c.tile_k),
            ("kWarpsM", c.warps_m),
            ("kWarpsN", c.warps_n),
            ("kWarpsK", c.warps_k),
            ("kStages", c.stages),
            ("kLayoutA", task.layout_a),
            ("kLayoutB", task.layout_b),
            ("kFinishRounds", c.finish_rounds),
            ("kPromoteK", _promote_k(task, c)),
            ("kHalfSums", task.half_sums),
        ),
        c.num_threads,
    )


# --- plans -------------------------------------------------------------------------------------

_PARAMS = np.dtype(  # gemm.cu: GemmParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "k", "k_per_split", "tiles_m", "tiles_n")),
        *(("a", STRIDES), ("b", STRIDES)),
        *(("block_scales_a", STRIDES), ("block_scales_b", STRIDES)),
        ("epilogue", EPILOGUE),
        *(("a_dtype", np.int32), ("b_dtype", np.int32)),
        *(("splits", np.int64), ("has_block_scales", np.int64)),
    ]
)


class GemmPlan(NamedTuple):
    """The launches of a product, as shapes, strides, dtypes and config decide them."""

    kernel: Kernel
    tiles: int
    splits: int
    partial_size: int
    shared_bytes: int
    params: np.ndarray

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: a, b, out, bias, residual, scale_a, scale_b; None where absent."""
        if self.splits == 1:
            self.kernel(self.tiles, (*arrays, None, self.params, _WHOLE), self.shared_bytes)
            return
        partials = xp.empty(self.partial_size, np.uint32)  # FP32 or int32
        args = (*arrays, partials, self.params)
        self.kernel(self.tiles * self.splits, (*args, _PARTIAL), self.shared_bytes)
        self.kernel(self.tiles, (*args, _REDUCE), self.shared_bytes)


def gemm_plan(
    target: Target, product: Product, config: AnyConfig | None
) -> GemmPlan | gemm_hopper.HopperPlan | None:
    """The plan of `product`; None where more than MAX_BATCH_DIMS dims of the batch do not merge.

    Raises TypeError and ValueError for a config that does not fit, or too large a grid.
    """
    p = product
    dims = product_dims(p)
    if len(dims) > MAX_BATCH_DIMS:
        return None
    task = make_task(p.a, p.b, math.prod(p.batch), p.m, p.n, p.k, p.block_scales)
    task = replace(task, half_sums=p.half_sums)
    if config is None:
        config = tuned_config(task, target)
    check_config(config, task, target.arch)
    if isinstance(config, HopperConfig):
        return gemm_hopper.hopper_plan(target, p, task, dims, config)
    (element_a, element_b), _ = _types(task, config)
    tiles_m, tiles_n = -(-p.m // config.tile_m), -(-p.n // config.tile_n)
    tiles = task.batch * tiles_m * tiles_n
    if tiles * config.splits >= 2**31:
        raise ValueError(f"the product has {tiles * config.splits} tiles, more than 2^31 - 1")

    params = np.zeros((), _PARAMS)
    fill_batch(params["batch"], dims)
    fill_epilogue(params["epilogue"], p)
    params["batch_size"] = task.batch
    params["k"] = p.k
    per_split = -(-p.k // config.splits)
    params["k_per_split"] = max(1, -(-per_split // BLOCK)) * BLOCK
    params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
    params["splits"] = config.splits
    for name, x in (("a", p.a), ("b", p.b)):
        params[name] = (x.row, x.col)
        params[f"{name}_dtype"] = DTYPE_CODES[x.dtype]
    if p.block_scales:
        params["has_block_scales"] = 1
        for name, x in (("a", p.scale_a), ("b", p.scale_b)):
            if x is not None:
                params[f"block_scales_{name}"] = (x.row, x.col)
    return GemmPlan(
        kernel=get_kernel(target, variant(task, config)),
        tiles=tiles,
        splits=config.splits,
        partial_size=tiles * config.tile_m * config.tile_n * config.splits,
        shared_bytes=config.shared_bytes(element_a.itemsize, element_b.itemsize),
        params=by_value(params),
    )
