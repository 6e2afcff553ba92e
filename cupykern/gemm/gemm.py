"""Choose mainloop and config of a product and make its plan.

The Python half of kernels_cu/gemm.cu, dual_gemm.cu and dequant_softmax.cu, the portable kernels.
sm90_plan.py is the Python half of Hopper's kernels.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import maker
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import device as device_named
from ..targets.repeated import Repeated
from ..typing import Namespace
from . import float32_heuristic, portable_heuristic, skinny_heuristic, sm90_heuristic
from .decode_first import DecodeFirst
from .dequantize_nvfp4 import DecodedPlan, decoded_plan
from .fma_config import FmaGemmConfig, FmaGemmPlan, fma_gemm_plan
from .gemm_task import GemmTask, make_task
from .logits import NormalizedPlan, fill_logits, normalized_plan
from .parts_config import PartsGemmConfig
from .portable_config import GemmConfig
from .product import (
    ACTIVATIONS,
    BLOCK,
    FP4,
    GROUPS,
    K_MAJOR,
    MAX_BATCH_DIMS,
    STRIDED,
    Product,
    fill_batch,
    fill_epilogue,
    fill_epilogues,
    fill_formula,
    fill_operand,
    fill_order,
    k_per_split,
    product_dims,
)
from .row_reductions import MergedRowsPlan, merged_rows_plan
from .skinny_gemm import SkinnyGemmConfig, SkinnyGemmPlan, skinny_gemm_plan
from .skinny_logits import skinny_logits_plan
from .sm90_epilogue import epilogue_of, with_a_decoded, with_both_decoded
from .sm90_heuristic import Sm90AnyConfig
from .sm90_logits_config import SkinnyLogitsConfig
from .sm90_plan import Sm90Plan, sm90_plan
from .split_float32 import PartsPlan, SplitFloat32, parts_plan
from .split_plan import SplitKWorkspace, SplitPlan, formula_plan, split_plan

_WHOLE, _PARTIAL, _REDUCE = (np.int64(i) for i in range(3))  # gemm/tile.cuh: Pass


# --- configs -----------------------------------------------------------------------------------


AnyConfig = GemmConfig | FmaGemmConfig | SplitFloat32 | SkinnyGemmConfig | Sm90AnyConfig


def refusal(config: AnyConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None if it can."""
    return config.refusal(task, device_named(arch))


def fp16_accumulate_task(task: GemmTask) -> GemmTask:
    """`task` with FP16 accumulators.  These are rare: only K-major operands are read by vectors, so
    that there are fewer variants."""
    k_major = (task.layout_a, task.layout_b) == (K_MAJOR, K_MAJOR)
    layout = K_MAJOR if k_major else STRIDED
    return replace(task, fp16_accumulate=True, layout_a=layout, layout_b=layout)


def configs(task: GemmTask, arch: str, blocks: int | None = None) -> tuple[AnyConfig, ...]:
    """The legal configs of `task` on `arch`, the preferred one first.

    blocks: number of SMs; None: the usual number of `arch`.
    """
    return _configs(task, device_named(arch, blocks))


def choose_config(task: GemmTask, arch: str, blocks: int | None = None) -> AnyConfig:
    """The preferred config of `task` on `arch`: the first of `configs`."""
    return configs(task, arch, blocks)[0]


def variant(task: GemmTask, config: AnyConfig) -> Variant:
    """The variant that computes `task`; of several launches, the product's."""
    return config.variant(task)


def _configs(task: GemmTask, device: Device) -> tuple[AnyConfig, ...]:
    """The legal configs, the preferred one first.

    The device's number of SMs may change the tile, because all tiles give the same bits.  It must
    not change split-K, which changes the order of accumulation.
    """
    if task.a == dtypes.float32:
        return float32_heuristic.configs(task, device)
    portable = portable_heuristic.configs(task, device)
    hopper = sm90_heuristic.configs(task, device)
    skinny = skinny_heuristic.configs(task, device)
    on_hopper = device.arch != "host" and hopper
    # The mainloop is chosen for the architecture's usual SM count.
    usual = device_named(device.arch)
    best = hopper if device == usual else sm90_heuristic.configs(task, usual)
    others: tuple[AnyConfig, ...] = (*portable, *hopper)
    opponent: Sm90AnyConfig | GemmConfig = portable[0]
    if on_hopper and (
        portable[0].scalar_loads or sm90_heuristic.is_profitable(task, best[0], portable[0])
    ):
        others, opponent = (*hopper, *portable), best[0]
    if skinny and skinny_heuristic.is_slower(skinny[0], task, opponent, device):
        return (*others, *skinny)
    return (*skinny, *others)


def _traits(task: GemmTask) -> tuple[dict[str, int], dict[str, Any]]:
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    sizes = {name: values.pop(name) for name in ("batch", "m", "n", "k")}
    return sizes, values


FAMILY = Family(
    "gemm",
    (GemmConfig, FmaGemmConfig, SplitFloat32, SkinnyGemmConfig, *sm90_heuristic.CONFIGS),
    _configs,
    lambda config, task, device: config.refusal(task, device),
    variant,
    _traits,
)


# --- plans -------------------------------------------------------------------------------------

_PARAMS = {
    "gemm": ("gemm.cu", "GemmParams"),
    "dual_gemm": ("dual_gemm.cu", "DualGemmParams"),
    "dequant_softmax": ("logits/epilogue.cuh", "LogitsParams"),
}
_PARTS_PARAMS = ("gemm/tile_parts.cuh", "PartsGemmParams")
_FORMULA_PARAMS = {
    "gemm": ("gemm_expression.cu", "ExpressionGemmParams"),
    "dual_gemm": ("dual_gemm_expression.cu", "ExpressionDualGemmParams"),
}


class GemmPlan(NamedTuple):
    """The launches of a product, determined by its shapes, strides, dtypes and config."""

    passes: tuple[Repeated, ...]  # one; with split-K a second one that reduces the partials
    partial_size: int  # number of partial accumulators; 0 without split-K

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, None where absent."""
        if self.partial_size:
            partials = maker(xp)((self.partial_size,), np.uint32)  # FP32 or int32
            arrays = (*arrays, partials)
        for one in self.passes:
            one.launch(arrays)

    @property
    def launches(self) -> tuple[Repeated, ...]:
        """Empty if each call allocates partial accumulators."""
        return () if self.partial_size else self.passes


LaunchPlan = (
    GemmPlan | FmaGemmPlan | PartsPlan | SkinnyGemmPlan | Sm90Plan | DecodedPlan | SplitPlan
)
AnyPlan = LaunchPlan | NormalizedPlan | MergedRowsPlan


def task_of(product: Product) -> GemmTask:
    p = product
    size = math.prod(p.batch)
    scales = (p.scale_a, p.scale_b, p.scale_b2)
    scaled = any(scale is not None and (scale.row, scale.col) != (0, 0) for scale in scales)
    task = make_task(p.a, p.b, size, p.m, p.n, p.k, p.block_scales, p.kernel, p.b2, scaled)
    task = replace(
        task,
        slow_activation=ACTIVATIONS[p.activation].slow or p.formula is not None,
        precision=p.precision,
        stored_a=p.stored[0],
        stored_b=p.stored[1],
        formula=None if p.formula is None else p.formula.code(p.out.dtype),
    )
    if p.kernel == "gemm":  # the others have one epilogue for all results
        task = replace(task, epilogue=epilogue_of(with_a_decoded(p), task.mixed_input))
        if p.b.dtype == FP4:
            task = replace(task, epilogue_decoded=epilogue_of(with_both_decoded(p), False))
    return fp16_accumulate_task(task) if p.fp16_accumulate else task


def runs_skinny(target: Target, product: Product) -> bool:
    """Whether `product`, with its operands as they are in memory, runs as a skinny GEMM."""
    return isinstance(FAMILY.config(task_of(product), target), SkinnyGemmConfig)


def gemm_plan(target: Target, product: Product, config: AnyConfig | None) -> AnyPlan | None:
    """The plan of `product`; None if its batch merges into more than MAX_BATCH_DIMS dims.

    Raises TypeError or ValueError if `config` cannot compute it, ValueError if the grid is too
    large.
    """
    if len(product_dims(product)) > MAX_BATCH_DIMS:
        return None
    task = task_of(product)
    config = FAMILY.config(task, target, config)
    if task.formula is not None and task.formula.reduces_rows:
        return merged_rows_plan(
            target, product, config, lambda p: _plan_of(target, p, task, config)
        )
    plan = _plan_of(target, product, task, config)
    return normalized_plan(target, product, plan) if product.kernel == "dequant_softmax" else plan


def _plan_of(target: Target, product: Product, task: GemmTask, config: AnyConfig) -> LaunchPlan:
    """The plan of the product alone, without the merge of row reductions and the softmax."""
    if isinstance(config, GemmConfig):
        return _portable_plan(target, product, task, config)
    whole = isinstance(config, SplitFloat32)
    whole = whole or (isinstance(config, FmaGemmConfig) and config.splits == 1)
    if whole and product.formula is not None:
        return formula_plan(target, product, lambda p: gemm_plan(target, p, config))
    if isinstance(config, SplitFloat32):
        own, of_parts = config.config, config.of_parts(task)

        def plan_of(p: Product) -> Any:
            if isinstance(own, PartsGemmConfig):
                return _portable_plan(target, p, of_parts, own)
            return sm90_plan(target, p, of_parts, own)

        return parts_plan(target, product, task, config, plan_of)
    if isinstance(config, FmaGemmConfig):
        return fma_gemm_plan(target, product, task, config)
    if isinstance(config, SplitKWorkspace):
        of_part, part = config.config, config.split(task)
        first = partial(sm90_plan, splits=config.splits)

        def of_splits(p: Product) -> Any:
            return _decoded_a_plan(target, p, part, of_part, first)

        return split_plan(target, product, config.splits, of_splits)
    if isinstance(config, DecodeFirst):
        mainloop = config.config

        def of_decoded(p: Product) -> Sm90Plan:
            return sm90_plan(target, p, task.decoded, mainloop)

        return decoded_plan(target, product, ("a", "b", "b2"), of_decoded)
    plan: Any = sm90_plan
    if isinstance(config, (SkinnyGemmConfig, SkinnyLogitsConfig)):
        plan = skinny_gemm_plan if isinstance(config, SkinnyGemmConfig) else skinny_logits_plan
    return _decoded_a_plan(target, product, task, config, plan)


def _decoded_a_plan(
    target: Target, product: Product, task: GemmTask, config: Any, plan: Any
) -> Any:
    """`plan` of the product, or of a decoded NVFP4 a."""
    if task.a != FP4:
        return plan(target, product, task, config)
    of = task.a_decoded
    return decoded_plan(target, product, ("a",), lambda p: plan(target, p, of, config))


def _portable_plan(
    target: Target, product: Product, task: GemmTask, config: GemmConfig | PartsGemmConfig
) -> GemmPlan:
    p, c = product, config.tile if isinstance(config, PartsGemmConfig) else config
    tiles_m, tiles_n = -(-p.m // c.tile_m), -(-p.n // c.tile_n)
    tiles = task.batch * tiles_m * tiles_n
    if tiles * c.splits >= 2**31:
        raise ValueError(f"the product has {tiles * c.splits} tiles, more than 2^31 - 1")

    of_kernel = (_PARAMS if p.formula is None else _FORMULA_PARAMS)[p.kernel]
    if isinstance(config, PartsGemmConfig):
        of_kernel = _PARTS_PARAMS
    params = zeros(*of_kernel, kProducts=task.products)
    tile = params["tile"]
    fill_batch(tile["batch"], product_dims(p))
    fill_order(tile["order"], tiles_m, tiles_n, task.batch)
    tile["m"], tile["n"], tile["k"] = p.m, p.n, p.k
    tile["k_per_split"] = k_per_split(p.k, c.splits, BLOCK)
    tile["splits"] = c.splits
    tile["has_block_scales"] = p.block_scales
    fill_operand(tile["a"], p.a, p.scale_a, p.groups_a)
    fill_operand(tile["b"][0], p.b, p.scale_b, p.groups_b)
    kernel = get_kernel(target, config.variant(task))
    shared = config.shared_bytes(task)
    if p.kernel == "dequant_softmax":
        fill_logits(params, p)
    elif p.b2 is None:
        fill_epilogue(params["epilogue"], p)
        if isinstance(config, PartsGemmConfig):
            params["part_steps"] = p.part_steps
    else:
        fill_operand(tile["b"][1], p.b2, p.scale_b2, p.groups_b2)
        fill_epilogues(params["epilogues"], p)
        if p.formula is None:
            params["policy"] = p.policy
    if p.formula is not None:
        fill_formula(params["expression"], p)
    struct = target.by_value(params)
    # The logits kernel does not take the result, the parts kernel no NVFP4 scales.
    without: tuple[str, ...] = ("out",) if p.kernel == "dequant_softmax" else ()
    without = GROUPS if isinstance(config, PartsGemmConfig) else without
    places = tuple(i for i, name in enumerate(p.array_names) if name not in without)

    split, num_arrays = c.splits > 1, len(p.array_names)

    def one_pass(grid: int, number: np.int64) -> Repeated:
        def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
            partials = arrays[num_arrays] if split else None
            return (*(arrays[i] for i in places), partials, struct, number)

        return Repeated(kernel, grid, shared, arguments)

    if not split:
        return GemmPlan((one_pass(tiles, _WHOLE),), 0)
    return GemmPlan(
        passes=(one_pass(tiles * c.splits, _PARTIAL), one_pass(tiles, _REDUCE)),
        partial_size=tiles * c.tile_m * c.tile_n * c.splits * task.products,
    )
