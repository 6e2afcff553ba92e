"""How products are launched: which main loop and config, and the portable main loop's plans.

The Python half of kernels_cu/gemm.cu and the other kernels on its main loop; gemm_hopper.py is that of Hopper's main loop.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..arrays import maker
from ..choice import Family
from ..jit import get_kernel
from ..targets import Device, Kernel, Target
from ..targets.limits import multiprocessors
from ..targets.repeated import Repeated
from . import (
    gemm_hopper,
    gemm_stream,
    hopper_choice,
    hopper_config,
    portable_choice,
    portable_config,
)
from .dequantize_nvfp4 import DecodedPlan, decoded_plan
from .gemm_stream import StreamConfig, StreamPlan
from .gemm_task import GemmTask, make_task
from .hopper_config import HopperConfig
from .logits import LogitsPlan, fill_logits, logits_plan
from .portable_config import GemmConfig
from .product import (
    ARRAYS,
    BATCH,
    BLOCK,
    EPILOGUE,
    FP4,
    INNER,
    MAX_BATCH_DIMS,
    OPERAND,
    STRIDED,
    Product,
    fill_batch,
    fill_epilogue,
    fill_epilogues,
    fill_operand,
    product_dims,
)
from .split_plan import SplitPlan, split_plan

_WHOLE, _PARTIAL, _REDUCE = (np.int64(i) for i in range(3))  # gemm_tile.cuh: Pass


# --- configs -----------------------------------------------------------------------------------


AnyConfig = GemmConfig | HopperConfig | StreamConfig


def refusal(config: AnyConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    if isinstance(config, HopperConfig):
        return hopper_config.refusal(config, task, arch)
    if isinstance(config, StreamConfig):
        return gemm_stream.refusal(config, task, arch)
    return portable_config.refusal(config, task, arch)


def activates(activation: str | None) -> bool:
    """Whether it takes many instructions (GemmTask)."""
    return activation not in (None, "relu")


def half_sums_task(task: GemmTask) -> GemmTask:
    """`task` with sums in FP16, which is rare: only neighbours along k are read by vectors."""
    inner = (task.layout_a, task.layout_b) == (INNER, INNER)
    layout = INNER if inner else STRIDED
    return replace(task, half_sums=True, layout_a=layout, layout_b=layout)


def configs(task: GemmTask, arch: str, blocks: int | None = None) -> tuple[AnyConfig, ...]:
    """The configs of `task` on `arch`, the measured one first.

    blocks: how many multiprocessors the device has; None: as most of `arch`.  It decides between tiles
    of Hopper's main loop, the sums of which agree bit for bit, but not about splits.
    """
    portable = portable_choice.configs(task, arch)
    hopper = hopper_choice.configs(task, arch, blocks or multiprocessors(arch))
    streams = gemm_stream.configs(task, arch)
    on_hopper = arch != "host" and hopper
    if on_hopper and (portable[0].gathers or hopper_choice.pays(task, hopper[0])):
        return (*streams, *hopper, *portable)
    return (*streams, *portable, *hopper)


def choose_config(task: GemmTask, arch: str, blocks: int | None = None) -> AnyConfig:
    """The fastest measured config for `task` on `arch` with `blocks` multiprocessors (`configs`)."""
    return configs(task, arch, blocks)[0]


def variant(task: GemmTask, config: AnyConfig) -> Variant:
    if isinstance(config, HopperConfig):
        return gemm_hopper.variant(task, config)
    if isinstance(config, StreamConfig):
        return gemm_stream.variant(task, config)
    elements, computes = portable_config.types_of(task, config)
    layout_a, layout_b = portable_config.layouts_of(task, config)
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
            ("kLayoutA", layout_a),
            ("kLayoutB", layout_b),
            ("kFinishRounds", c.finish_rounds),
            ("kPromoteK", portable_config.promote_k(task, c)),
            ("kHalfSums", task.half_sums),
        ),
        c.num_threads,
    )


def _traits(task: GemmTask) -> tuple[dict[str, int], dict[str, Any]]:
    t = task
    kinds = {
        "kernel": t.kernel,
        "a": t.a.name,
        "b": t.b.name,
        "layouts": f"{t.layout_a}{t.layout_b}",
        "blocks": t.block_scales,
        "tma": f"{t.tma}{t.tma_codes}{t.scaled}" if t.b == FP4 else t.tma,
        "half_sums": t.half_sums,
        "activates": t.activates,
        "plain": t.plain,
        "in_lines": t.in_lines,
        "lines_b": t.lines_b,
    }
    return {"batch": t.batch, "m": t.m, "n": t.n, "k": t.k}, kinds


def _configs(task: GemmTask, device: Device) -> tuple[AnyConfig, ...]:
    found = configs(task, device.arch, device.multiprocessors)
    return tuple(c for c in found if not _refusal_of_device(c, device))


def _refusal(config: AnyConfig, task: GemmTask, device: Device) -> str | None:
    return _refusal_of_device(config, device) or refusal(config, task, device.arch)


def _refusal_of_device(config: AnyConfig, device: Device) -> str | None:
    if isinstance(config, HopperConfig) and device.warp_size != 32:
        return f"Hopper's mainloop needs warps of 32 lanes; got {device.warp_size}"
    return None


FAMILY = Family(
    "gemm", (GemmConfig, HopperConfig, StreamConfig), _configs, _refusal, variant, _traits
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
    if kernel == "dequant_softmax":
        return np.dtype([("tile", tile), ("epilogue", EPILOGUE)])
    last = [("policy", np.int64)] if products == 2 else []
    return np.dtype([("tile", tile), ("epilogues", EPILOGUE, products), *last])


class GemmPlan(NamedTuple):
    """The launches of a product, as shapes, strides, dtypes and config decide them."""

    kernel: Kernel
    grids: tuple[int, int]  # of tiles and splits, and of tiles
    splits: int
    partial_size: int
    shared_bytes: int
    params: Any
    places: tuple[int, ...]  # in product.ARRAYS, of what the kernel takes
    repeated: Repeated  # where k is not split

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, None where absent."""
        if self.splits == 1:
            self.repeated.launch(arrays)
            return
        partials = maker(xp)((self.partial_size,), np.uint32)  # FP32 or int32
        args = (*(arrays[i] for i in self.places), partials, self.params)
        for grid, number in zip(self.grids, (_PARTIAL, _REDUCE), strict=True):
            self.kernel(grid, (*args, number), self.shared_bytes)

    @property
    def launches(self) -> tuple[Repeated, ...]:
        """None where each call takes memory for partial sums."""
        return (self.repeated,) if self.splits == 1 else ()


def task_of(product: Product) -> GemmTask:
    p = product
    size = math.prod(p.batch)
    scales = (p.scale_a, p.scale_b, p.scale_b2)
    scaled = any(scale is not None and (scale.row, scale.col) != (0, 0) for scale in scales)
    task = make_task(p.a, p.b, size, p.m, p.n, p.k, p.block_scales, p.kernel, p.b2, scaled)
    plain = gemm_hopper.is_plain(p, hopper_config.converts(task))
    task = replace(task, activates=activates(p.activation), plain=plain)
    return half_sums_task(task) if p.half_sums else task


def streams(target: Target, product: Product) -> bool:
    """Whether the operands of `product` are streamed from where they lie."""
    return isinstance(FAMILY.config(task_of(product), target), StreamConfig)


def gemm_plan(
    target: Target, product: Product, config: AnyConfig | None
) -> GemmPlan | gemm_hopper.HopperPlan | StreamPlan | DecodedPlan | SplitPlan | LogitsPlan | None:
    """The plan of `product`; None where more than MAX_BATCH_DIMS dims of the batch do not merge.

    Raises TypeError and ValueError for a config that does not fit, or too large a grid.
    """
    p = product
    dims = product_dims(p)
    if len(dims) > MAX_BATCH_DIMS:
        return None
    task = task_of(p)
    config = FAMILY.config(task, target, config)
    if p.kernel == "dequant_softmax":
        return logits_plan(target, p, _plan_of(target, p, task, dims, config))
    return _plan_of(target, p, task, dims, config)


def _plan_of(
    target: Target,
    product: Product,
    task: GemmTask,
    dims: list[tuple[int, tuple[int, ...]]],
    config: AnyConfig,
) -> GemmPlan | gemm_hopper.HopperPlan | StreamPlan | DecodedPlan | SplitPlan:
    """`gemm_plan`'s, but for the softmax of logits."""
    p = product
    if isinstance(config, HopperConfig) and config.splits > 1:
        of_parts = replace(config, splits=1)
        return split_plan(target, p, config.splits, lambda x: gemm_plan(target, x, of_parts))
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
    elements, _ = portable_config.types_of(task, config)
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
    kernel = get_kernel(target, variant(task, config))
    shared = config.shared_bytes(*elements, task.products)
    if p.kernel == "dequant_softmax":
        fill_logits(params, p)
    elif p.b2 is None:
        fill_epilogue(params["epilogues"][0], p)
    else:
        fill_operand(tile["b"][1], p.b2, p.scale_b2, p.groups_b2)
        fill_epilogues(params["epilogues"], p)
        params["policy"] = p.policy
    struct = target.by_value(params)
    logits = p.kernel == "dequant_softmax"  # whose result is another launch's
    names = enumerate(ARRAYS[p.kernel])
    places = tuple(i for i, name in names if not (logits and name == "out"))

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*(arrays[i] for i in places), None, struct, _WHOLE)

    return GemmPlan(
        kernel=kernel,
        grids=(tiles * config.splits, tiles),
        splits=config.splits,
        partial_size=tiles * config.tile_m * config.tile_n * config.splits * task.products,
        shared_bytes=shared,
        params=struct,
        places=places,
        repeated=Repeated(kernel, tiles, shared, arguments),
    )
