"""How products are launched: which main loop and config, and the portable main loop's plans.

The Python half of kernels_cu/gemm.cu and the other kernels on its main loop; gemm_hopper.py is that of Hopper's main loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..choice import choose
from ..jit import get_kernel
from ..targets import Kernel, Target
from ..targets.limits import max_shared_bytes, multiprocessors
from ..targets.repeated import Repeated
from . import gemm_hopper, gemm_stream, hopper_choice, hopper_config
from .dequantize_nvfp4 import DecodedPlan, decoded_plan
from .gemm_stream import StreamConfig, StreamPlan
from .hopper_config import HopperConfig
from .product import (
    BATCH,
    BLOCK,
    EPILOGUE,
    FLOAT16S,
    FP4,
    FP8,
    INNER,
    MAX_BATCH_DIMS,
    OPERAND,
    OUTER,
    STRIDED,
    GemmTask,
    Product,
    compute_dtype,
    fill_batch,
    fill_epilogue,
    fill_epilogues,
    fill_operand,
    make_task,
    product_dims,
)

_WHOLE, _PARTIAL, _REDUCE = (np.int64(i) for i in range(3))  # gemm_tile.cuh: Pass
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

    def shared_bytes(self, element_a: np.dtype, element_b: np.dtype, products: int = 1) -> int:
        """Dynamic shared memory of a block (gemm_tile.cuh: GemmStorage), at either warp size."""
        line_a, line_b = (_line_bytes(dtype, self.tile_k) for dtype in (element_a, element_b))
        stages = self.stages * (self.tile_m * line_a + products * self.tile_n * line_b)
        sums = self.tile_m * self.tile_n * self.warps_k * products
        fragments = sums // self.finish_rounds // 256
        return max(stages, fragments * 16 * 20 * 4, sums * 4 if self.warps_k > 1 else 0)


def _line_bytes(dtype: np.dtype, numbers: int) -> int:
    """Of so many numbers along k in shared memory; FP4's with their scales."""
    return numbers // 2 + numbers // 16 if dtype == FP4 else numbers * dtype.itemsize


AnyConfig = GemmConfig | HopperConfig | StreamConfig


def refusal(config: AnyConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    if isinstance(config, HopperConfig):
        return hopper_config.refusal(config, task, arch)
    if isinstance(config, StreamConfig):
        return gemm_stream.refusal(config, task, arch)
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
    if task.kernel == "dequant_softmax" and c.tile_n % 64:
        return f"statistics are of 64 columns each: tile_n must be a multiple; got {c.tile_n}"
    if c.num_threads > 1024:
        return f"{c.num_threads} threads are more than 1024"
    fragments = c.tile_m * c.tile_n // (256 * c.warps_m * c.warps_n)
    if fragments % c.finish_rounds:
        return f"finish_rounds must divide a warp's {fragments} fragments; got {c.finish_rounds}"
    for layout, outer, element in (
        (task.layout_a, c.tile_m, element_a),
        (task.layout_b, c.tile_n, element_b),
    ):
        if element == FP4 and c.tile_k % 64:
            return f"tile_k must be a multiple of 64 for NVFP4; got {c.tile_k}"
        line = (outer if layout == OUTER else c.tile_k) * element.itemsize // 16
        line = line // 2 if element == FP4 else line
        if line < 1 or line & (line - 1):
            return f"a line of {16 * line} bytes in shared memory is not 16 times a power of two"
    needed, limit = c.shared_bytes(element_a, element_b, task.products), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    if c.splits > 1 and c.splits > math.ceil(task.k / BLOCK):
        return f"{c.splits} splits of k = {task.k} would be shorter than {BLOCK}"
    return None


def activates(activation: str | None) -> bool:
    """Whether it takes many instructions (GemmTask)."""
    return activation not in (None, "relu")


def half_sums_task(task: GemmTask) -> GemmTask:
    """`task` with sums in FP16: with columns of a in memory it is rare, and has no variants of its own."""
    layouts = (task.layout_a, task.layout_b)
    layouts = layouts if task.layout_a == INNER else (STRIDED, STRIDED)
    return replace(task, half_sums=True, layout_a=layouts[0], layout_b=layouts[1])


def check_config(config: Any, task: GemmTask, arch: str) -> None:
    """Raises TypeError and ValueError, with the reason, for a config that cannot compute `task`."""
    if not isinstance(config, AnyConfig):
        raise TypeError(
            f"config must be a GemmConfig, HopperConfig or StreamConfig; got {type(config).__name__}"
        )
    if reason := refusal(config, task, arch):
        raise ValueError(f"config does not fit: {reason}")


def tuned_config(task: GemmTask, target: Target) -> AnyConfig:
    """The tuned config of `task` if there is one, else `choose_config`'s."""
    t = task
    return choose(
        t.kernel,
        target,
        {"batch": t.batch, "m": t.m, "n": t.n, "k": t.k},
        {
            "a": t.a.name,
            "b": t.b.name,
            "layouts": f"{t.layout_a}{t.layout_b}",
            "blocks": t.block_scales,
            "tma": f"{t.tma}{t.tma_codes}{t.scaled}" if t.b == FP4 else t.tma,
            "half_sums": t.half_sums,
            **({"activates": True} if t.activates else {}),
            **({} if t.plain else {"plain": False}),
        },
        lambda: configs(task, target.arch, target.multiprocessors),
        lambda config: variant(task, config),
    )


@cache
def _tiles(
    arch: str,
    a: np.dtype,
    b: np.dtype,
    layout_a: int,
    layout_b: int,
    block_scales: bool,
    kernel: str = "gemm",
) -> tuple[GemmConfig, ...]:
    """The tiles for operands of these dtypes and layouts, the largest first.

    Few for what is rare: each is a variant for every pair of dtypes and layouts.  Hopper's main loops have
    tiles of few rows for FP8 and for what is converted, but logits have so many columns that several small
    blocks on a multiprocessor stream them.
    """
    compute = compute_dtype(a, b)
    gfx = arch.startswith("gfx")
    gfx11 = arch.startswith("gfx11")  # whose fragments take twice as many registers
    roomy = max_shared_bytes(arch) >= 160 * 1024
    few = 2 if gfx else 3  # stages
    small = GemmConfig(16, 64, 128, 1, 1, 4, stages=2 if gfx and a.itemsize == 2 else 4)
    if STRIDED in (layout_a, layout_b) and b != FP4:
        warps_n = 4 if gfx11 and block_scales else 2
        return (GemmConfig(64, 64, 128 // compute.itemsize, 2, warps_n, stages=2),)
    if compute == dtypes.float32:
        return (GemmConfig(64, 64, 32, 2, 2, stages=few),)
    e5m2 = dtypes.float8_e5m2 in (a, b)
    if b == FP4:
        cols = 64 if gfx else 128
        large = GemmConfig(64, cols, 64, 2, 4 if gfx11 else 2, stages=4 if roomy else few)
        if arch == "sm_90a" and layout_a != STRIDED:
            # Hopper's main loop takes more rows.  (16, 8192, 8192) in 47.7 us, with 128 of k in 52.9 (H200).
            return (replace(small, tile_k=256, stages=3),)
        return (large,) if gfx11 or layout_a == STRIDED else (large, small)
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
            return (GemmConfig(32, 64, 64, 2, 4, stages=2),)
        # Scaled blocks have their sums twice, of the products and of the blocks.
        cols = 64 if gfx or block_scales else 128
        large = GemmConfig(64, cols, 64, 2, 2, stages=4 if roomy else few)
        hopper = arch == "sm_90a" and kernel == "gemm"
        if kernel == "dequant_softmax" and roomy:
            small = replace(
                small, tile_k=256, stages=3
            )  # (16, 128256, 4096) in 155 us, not 173 (H200)
        return (large,) if e5m2 or block_scales or hopper else (large, small)
    if gfx:
        large = GemmConfig(128, 128, 32, 2, 4, stages=2, finish_rounds=2)
        medium = GemmConfig(64, 64, 64, 2, 2, stages=2)
    else:
        large = GemmConfig(128, 128, 64, 2, 4, stages=3)
        medium = GemmConfig(64, 128, 64, 2, 2, stages=4 if roomy else 3)
    if layout_a == OUTER:
        return (large,)
    return (large, small) if arch == "sm_90a" else (large, medium, small)


@cache
def _dual_tiles(
    arch: str, a: np.dtype, b: np.dtype, layout_a: int, layout_b: int, block_scales: bool
) -> tuple[GemmConfig, ...]:
    """As `_tiles`, for two products: a block has tile_n columns of each."""
    gfx, gfx11 = arch.startswith("gfx"), arch.startswith("gfx11")
    roomy = max_shared_bytes(arch) >= 160 * 1024
    few = 2 if gfx else 3
    if STRIDED in (layout_a, layout_b) and b != FP4:
        wide = dtypes.int8 not in (a, b) or a != b
        rows, cols, warps_n = (32 if block_scales else 64, 64, 4) if gfx11 else (64, 32, 2)
        return (GemmConfig(rows, cols, 64 if wide else 128, 2, warps_n, stages=2),)
    if a in FLOAT16S and a == b:
        large = GemmConfig(128, 64, 64, 2, 4, stages=3 if roomy else 2)
        if gfx:
            large = GemmConfig(64, 64, 32, 2, 4, stages=2, finish_rounds=2)
        small = GemmConfig(16, 32, 128, 1, 1, 4, stages=4 if roomy else 2)
        keeps_small = (
            layout_b == INNER and not gfx and arch != "sm_90a"
        )  # where it is for odd strides
        return (large, small) if keeps_small else (large,)
    large = GemmConfig(64, 32 if gfx else 64, 64, 2, 2, stages=4 if roomy else few)
    if gfx11:
        large = GemmConfig(32, 32, 64, 2, 2, stages=2)
    if a.itemsize == 1 and a != FP4 and not gfx:
        large = replace(large, tile_k=128, stages=few)
    if block_scales:
        return (replace(large, tile_n=32),)
    small = GemmConfig(16, 32, 128, 1, 1, 4, stages=4 if roomy else 2)
    keeps_small = not gfx and b != dtypes.int8 and layout_a == INNER
    if arch == "sm_90a" and b == FP4 and keeps_small:
        # As above: (16, 14336, 4096) in 77 us instead of 84.
        return (replace(small, tile_k=256, stages=3),)
    return (large, small) if keeps_small else (large,)


def configs(task: GemmTask, arch: str, blocks: int | None = None) -> tuple[AnyConfig, ...]:
    """The configs of `task` on `arch`, the measured one first.

    blocks: how many multiprocessors the device has; None: as most of `arch`.  It decides between tiles
    of Hopper's main loop, the sums of which agree bit for bit, but not about splits.
    """
    portable = _portable_configs(task, arch)
    hopper = hopper_choice.configs(task, arch, blocks or multiprocessors(arch))
    streams = gemm_stream.configs(task, arch)
    if arch != "host" and hopper_choice.pays(task):
        return (*streams, *hopper, *portable)
    return (*streams, *portable, *hopper)


@cache
def _portable_configs(task: GemmTask, arch: str) -> tuple[GemmConfig, ...]:
    kinds = (arch, task.a, task.b, task.layout_a, task.layout_b, task.block_scales)
    tiles = _dual_tiles(*kinds) if task.products == 2 else _tiles(*kinds, task.kernel)
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
    layouts = (task.layout_a, compute[0], task.a), (task.layout_b, compute[0], task.b)
    return tuple(wide if layout == STRIDED else x for layout, wide, x in layouts), compute


def element_types(task: GemmTask, config: GemmConfig) -> tuple[np.dtype, np.dtype]:
    """a and b as they lie in shared memory."""
    return _types(task, config)[0]


def _promote_k(task: GemmTask, config: GemmConfig) -> int:
    if task.half_sums:
        return _ALL_OF_K
    return BLOCK if config.fp8 or task.block_scales else 0


def variant(task: GemmTask, config: AnyConfig) -> Variant:
    if isinstance(config, HopperConfig):
        return gemm_hopper.variant(task, config)
    if isinstance(config, StreamConfig):
        return gemm_stream.variant(task, config)
    elements, computes = _types(task, config)
    names = ("ElementA", "ElementB", "ComputeA", "ComputeB")
    c = config
    return Variant(
        task.kernel,
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


@cache
def _params_dtype(kernel: str) -> np.dtype:
    """gemm.cu: GemmParams, dual_gemm.cu: DualParams, dequant_softmax.cu: LogitsParams"""
    products = 2 if kernel == "dual_gemm" else 1
    sizes = ("batch_size", "m", "n", "k", "k_per_split", "tiles_m", "tiles_n", "splits")
    tile = [  # gemm_tile.cuh: TileParams
        ("batch", BATCH),
        *((name, np.int64) for name in sizes),
        *(("a", OPERAND), ("b", OPERAND, products)),
        ("has_block_scales", np.int64),
    ]
    last = [("policy", np.int64)] if products == 2 else []
    return np.dtype([("tile", tile), ("epilogues", EPILOGUE, products), *last])


class GemmPlan(NamedTuple):
    """The launches of a product, as shapes, strides, dtypes and config decide them."""

    kernel: Kernel
    tiles: int
    splits: int
    partial_size: int
    shared_bytes: int
    params: Any
    repeated: Repeated  # where k is not split

    def launch(self, xp: Any, arrays: tuple[Any, ...], places: Any = None) -> None:
        """arrays: the kernel's, from a on; None where absent.  places: as HopperPlan's."""
        if self.splits == 1:
            if places is None:
                self.repeated.launch(arrays)
            else:
                self.repeated.launch_at(places, arrays)
            return
        partials = xp.empty(self.partial_size, np.uint32)  # FP32 or int32
        args = (*arrays, partials, self.params)
        self.kernel(self.tiles * self.splits, (*args, _PARTIAL), self.shared_bytes)
        self.kernel(self.tiles, (*args, _REDUCE), self.shared_bytes)


def gemm_plan(
    target: Target, product: Product, config: AnyConfig | None
) -> GemmPlan | gemm_hopper.HopperPlan | StreamPlan | DecodedPlan | None:
    """The plan of `product`; None where more than MAX_BATCH_DIMS dims of the batch do not merge.

    Raises TypeError and ValueError for a config that does not fit, or too large a grid.
    """
    p = product
    dims = product_dims(p)
    if len(dims) > MAX_BATCH_DIMS:
        return None
    size = math.prod(p.batch)
    scales = (p.scale_a, p.scale_b, p.scale_b2)
    scaled = any(scale is not None and (scale.row, scale.col) != (0, 0) for scale in scales)
    task = make_task(p.a, p.b, size, p.m, p.n, p.k, p.block_scales, p.kernel, p.b2, scaled)
    plain = gemm_hopper.is_plain(p, hopper_config.converts(task))
    task = replace(task, activates=activates(p.activation), plain=plain)
    if p.half_sums:
        task = half_sums_task(task)
    if config is None:
        config = tuned_config(task, target)
    check_config(config, task, target.arch)
    if isinstance(config, HopperConfig):

        def plan_of(product: Product) -> gemm_hopper.HopperPlan:
            return gemm_hopper.hopper_plan(
                target,
                product,
                hopper_config.multiplied(task, config),
                product_dims(product),
                config,
            )

        names = hopper_config.decoded_operands(task, config)
        return decoded_plan(target, p, names, plan_of) if names else plan_of(p)
    if isinstance(config, StreamConfig):

        def stream_of(product: Product) -> StreamPlan:
            return gemm_stream.stream_plan(target, product, task, config)

        return decoded_plan(target, p, ("a",), stream_of) if task.a == FP4 else stream_of(p)
    elements, _ = _types(task, config)
    tiles_m, tiles_n = -(-p.m // config.tile_m), -(-p.n // config.tile_n)
    tiles = task.batch * tiles_m * tiles_n
    if tiles * config.splits >= 2**31:
        raise ValueError(f"the product has {tiles * config.splits} tiles, more than 2^31 - 1")

    params = np.zeros((), _params_dtype(p.kernel))
    tile = params["tile"]
    fill_batch(tile["batch"], dims)
    tile["batch_size"], tile["m"], tile["n"], tile["k"] = task.batch, p.m, p.n, p.k
    per_split = -(-p.k // config.splits)
    tile["k_per_split"] = max(1, -(-per_split // BLOCK)) * BLOCK
    tile["tiles_m"], tile["tiles_n"], tile["splits"] = tiles_m, tiles_n, config.splits
    tile["has_block_scales"] = p.block_scales
    fill_operand(tile["a"], p.a, p.scale_a, p.groups_a)
    fill_operand(tile["b"][0], p.b, p.scale_b, p.groups_b)
    if p.b2 is None:
        fill_epilogue(params["epilogues"][0], p)
    else:
        fill_operand(tile["b"][1], p.b2, p.scale_b2, p.groups_b2)
        fill_epilogues(params["epilogues"], p)
        params["policy"] = p.policy
    kernel, struct = get_kernel(target, variant(task, config)), target.by_value(params)
    shared = config.shared_bytes(*elements, task.products)
    return GemmPlan(
        kernel=kernel,
        tiles=tiles,
        splits=config.splits,
        partial_size=tiles * config.tile_m * config.tile_n * config.splits * task.products,
        shared_bytes=shared,
        params=struct,
        repeated=Repeated(kernel, tiles, shared, lambda arrays: (*arrays, None, struct, _WHOLE)),
    )
