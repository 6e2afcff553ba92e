"""Launches of Hopper's GEMM kernels: tensor maps, parameters and grids.

The Python half of kernels_cu/gemm_hopper.cu, dual_gemm_hopper.cu and dequant_softmax_hopper.cu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import tuned
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Kernel, Target
from ..targets.map_plan import MapPlan, encoded_maps
from ..targets.repeated import Repeated
from ..typing import Namespace
from .gemm_task import GemmTask
from .logits import fill_logits
from .operand_maps import edge_map, map_plan, operand_map, tma_stores
from .product import (
    ARRAYS,
    K_MAJOR,
    Matrix,
    Product,
    fill_batch,
    fill_block_scales,
    fill_epilogue,
    fill_epilogues,
    fill_formula,
    fill_order,
    k_per_split,
    product_dims,
)
from .sm90_config import SWIZZLE_BYTES, Sm90Config
from .sm90_dual_config import GatedEpilogue
from .sm90_epilogue import BY_TMA, GENERAL, epilogue_of, general_kind, loaded_operand
from .sm90_gemm_config import MatmulEpilogue

_C = tuned.constants("sm_90a", "gemm")
_A, _B, _OUT, _RESIDUAL, _B2 = 0, 1, 2, 4, 9  # gemm/work_tile.cuh: Operand
PLACES = {  # indices in product.ARRAYS of the arrays that kernels take besides tensor maps
    "gemm": (2, 3, 4, 5, 6, 8),
    "dual_gemm": (3, 4, 5, 6, 8, 9),
    "dequant_softmax": (3, 4, 5, 6),
}
_MAPPED = {  # indices of the tensor maps' arrays
    "gemm": (0, 0, 1, 1, 2, 4),
    "dual_gemm": (0, 0, 1, 1, 2, 2, 3),
    "dequant_softmax": (0, 0, 1, 1, 2),
}


# The field of _FORMULA_PARAMS' structs that holds the parameters without a formula.
_WITHOUT_FORMULA = {"gemm": "matmul", "dual_gemm": "gated"}
_FORMULA_PARAMS = {
    "gemm": ("expression", "ExpressionMatmulParams"),
    "dual_gemm": ("gate_expression", "ExpressionGatedParams"),
}


class Sm90Plan(NamedTuple):
    """The launch of a product, determined by its shapes, strides, dtypes and config."""

    repeated: Repeated

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, None where absent."""
        self.repeated.launch(arrays)

    @property
    def launches(self) -> tuple[Repeated, ...]:
        return (self.repeated,)


def mapped_launch(
    target: Target,
    kernel: Kernel,
    sizes: tuple[int, int],
    maps: tuple[MapPlan | None, ...],
    places: tuple[int, ...],
    params: Any,
    mapped: Sequence[int],
) -> Sm90Plan:
    """The plan of a kernel whose first arguments are tensor maps.

    sizes: blocks, and bytes of shared memory per block.  maps: None for an empty map.
    mapped: indices in product.ARRAYS of the arrays that the maps describe.
    places: indices of the arrays that follow them (PLACES).  params: the last argument.
    """

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        others = [arrays[i] for i in places]
        return (*encoded_maps(target, maps, [arrays[i] for i in mapped]), *others, params)

    return Sm90Plan(Repeated(kernel, *sizes, arguments))


def sm90_plan(
    target: Target, product: Product, task: GemmTask, config: Sm90Config, splits: int = 0
) -> Sm90Plan:
    """The plan of `product` with its `task`; NVFP4 operands are already decoded as `config`
    requires.

    splits: if not 0, `product` is a batch of partial accumulators of so many ranges of k.
    """
    p, c = product, config
    kind, results_by_tma = GENERAL, tma_stores(p.out, p.m, p.n)
    if isinstance(c, MatmulEpilogue):
        task = replace(task, epilogue=epilogue_of(p, c.swap_ab))
        kind = general_kind(p, c.swap_ab) if task.epilogue == "general" else kind
        floats = task.epilogue == "floats" and not splits  # threads store partial accumulators
        results_by_tma |= kind == BY_TMA or floats
    residual, mapped = p.residual, _MAPPED[p.kernel]
    if loaded := loaded_operand(p, c.swap_ab):
        number, residual = loaded
        mapped = (*mapped[:-1], len(ARRAYS[p.kernel]) + number)
    tiles = task.batch * math.prod(c.cluster_tiles(p.m, p.n))
    clusters = tiles
    if c.split_k == 1 and splits <= 1:
        clusters = min(tiles, max(1, target.multiprocessors // c.cluster.size))
    sizes = clusters * c.cluster.size, c.shared_bytes(task)
    kernel = get_kernel(target, c.variant(task, splits))
    operands = _operand_maps(p, task, c)
    if p.kernel == "dequant_softmax":
        params = zeros("gemm/epilogue/partial_softmax.cuh", "PartialSoftmaxParams")
        fill_logits(params, p)
        map_out = None
        if p.logits is None:  # PartialSoftmaxEpilogue: kBoxRows
            map_out = map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), (1, 64, 64))
        results = {_OUT: map_out}
    else:
        by_tma = loaded is not None or task.epilogue == "residual"
        results = _output_maps(p, c, results_by_tma, residual if by_tma else None)
        dual = p.kernel == "dual_gemm"
        params = _dual_params(p) if dual else _matmul_params(p, c, kind, splits)
        _fill_common(params, p, task, {**operands, **results})
    # Kernel order: each operand's map and edge map, then the results' maps.
    layouts = {_A: task.layout_a, _B: task.layout_b, _B2: task.layout_b}
    maps: list[MapPlan | None] = []
    for operand, of_operand in operands.items():
        maps += of_operand, edge_map(of_operand, layouts[operand])
    maps += results.values()
    group = tiles_per_group(c.cluster_tile, task)
    fill_order(params["order"], *c.cluster_tiles(p.m, p.n), task.batch, group)
    params["num_k_tiles"] = math.ceil(p.k / c.tile_k)
    places = PLACES[p.kernel]
    if p.formula is not None:
        plain, file, struct = params, *_FORMULA_PARAMS[p.kernel]
        params = zeros(f"gemm/epilogue/{file}.cuh", struct)
        params[_WITHOUT_FORMULA[p.kernel]] = plain
        fill_formula(params["expression"], p)
        places += tuple(range(len(ARRAYS[p.kernel]), len(p.array_names)))
    by_value = target.by_value(params)
    return mapped_launch(target, kernel, sizes, tuple(maps), places, by_value, mapped)


def tiles_per_group(tile: tuple[int, int], task: GemmTask) -> int:
    """Rows of tiles in a group of the rasterisation (TileOrder).

    Neighbouring SMs read an operand that they share from L2 once.  So blocks that start together
    should compute about as many rows as columns, and a pair of them the same columns.
    """
    rows, cols = tile[0], tile[1] * task.products
    wanted = min(_C["group_tiles"] * cols, task.n * task.products / _C["groups_per_n"])
    return 2 * max(1, round(wanted / rows / 2))


def _operand_maps(p: Product, task: GemmTask, c: Sm90Config) -> dict[int, MapPlan]:
    """The operands' maps; a box is the slice of a tile that a block of a cluster multicasts."""
    parts = c.cluster.size if c.split_k == 1 else 1
    slices_a = parts if c.swap_ab and task.layout_a == K_MAJOR else 1
    slices_b = parts if not c.swap_ab and task.layout_b == K_MAJOR else 1
    cols = c.tile_n // task.products // slices_b
    (a, batch_a), (b, batch_b) = (
        (x, p.batch)
        if count == 1  # else parts are the innermost dim of the map's batch
        else (x._replace(batch_strides=(*x.batch_strides, step)), (*p.batch, count))
        for x, count, step in zip((p.a, p.b), p.num_parts, p.part_steps, strict=True)
    )
    size_a = task.layout_a, p.m, a.row, p.k, a.col, c.tile_m // slices_a, c.tile_k
    maps = {_A: operand_map(a, batch_a, *size_a)}
    for operand, x in ((_B, b), (_B2, p.b2)):
        if x is not None:
            size_b = task.layout_b, p.n, x.col, p.k, x.row, cols, c.tile_k
            maps[operand] = operand_map(x, batch_b, *size_b)
    return maps


def _output_maps(
    p: Product, c: Sm90Config, results_by_tma: bool, residual: Matrix | None
) -> dict[int, MapPlan | None]:
    """The maps of the result and the residual; None where threads access memory instead."""
    maps: dict[int, MapPlan | None] = {_OUT: None}
    if p.kernel == "gemm":
        maps[_RESIDUAL] = None
    if results_by_tma:
        wide = c.swap_ab and p.out.dtype.itemsize == 2
        rows = c.chunk if wide else 16
        box = (1, rows, SWIZZLE_BYTES // max(2, p.out.dtype.itemsize))  # MatmulArguments
        if isinstance(c, GatedEpilogue):
            box = (1, *c.store_box)
        shape = p.m, p.n
        maps[_OUT] = map_plan(p.out, p.batch, shape, (p.out.row, 1), box)
        if residual is not None:
            maps[_RESIDUAL] = map_plan(residual, p.batch, shape, (residual.row, 1), box)
    return maps


def _matmul_params(p: Product, c: Sm90Config, kind: int, splits: int) -> np.ndarray:
    params = zeros("gemm/epilogue/matmul.cuh", "MatmulParams")
    if splits:
        params["k_tiles_per_split"] = k_per_split(p.k, splits, c.tile_k) // c.tile_k
    fill_epilogue(params["epilogue"], p)
    params["epilogue_kind"] = kind
    fill_block_scales(params, p)
    return params


def _dual_params(p: Product) -> np.ndarray:
    params = zeros("gemm/epilogue/gate_silu.cuh", "GatedParams")
    fill_epilogues(params["epilogues"], p)
    fill_block_scales(params, p)
    params["policy"] = p.policy
    return params


def _fill_common(
    params: np.ndarray, p: Product, task: GemmTask, maps: dict[int, MapPlan | None]
) -> None:
    """Fill the parameters that matmul and the dual GEMM share."""
    fill_batch(params["batch"], product_dims(p))
    for operand, plan in maps.items():  # strides of mapped operands in units of the map's batch
        if plan is not None:
            params["batch"]["strides"][operand] //= plan.strides[0] // plan.dtype.itemsize
    params["tma_stores"] = maps[_OUT] is not None
    params["num_groups"] = p.k // 16
    for i, groups in enumerate((p.groups_b, p.groups_b2)[: task.products]):
        if groups is not None:
            np.atleast_1d(params["groups"])[i] = groups[1:]
