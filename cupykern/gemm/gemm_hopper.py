"""Products by Hopper's main loops: variants, and plans with tensor maps.

The Python half of kernels_cu/gemm_hopper.cu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..jit import get_kernel
from ..targets import Kernel, Target
from ..targets.map_plan import MapPlan, encoded_maps
from ..targets.repeated import Repeated
from .gemm_task import GemmTask
from .hopper_config import (
    LINE,
    HopperConfig,
    cluster_sizes,
    cluster_tiles,
    converts,
    in_halves,
    is_turned,
    multiplied,
    of_part,
    only_plain,
    own_columns,
    splits_epilogues,
    tile_k,
)
from .logits import SET_COLUMNS, fill_logits
from .operand_maps import map_plan, operand_map, tma_stores
from .product import (
    BATCH,
    EPILOGUE,
    FP4,
    FP8,
    INNER,
    OUTER,
    STRIDES,
    Product,
    fill_batch,
    fill_epilogue,
    fill_epilogues,
)

# Of tiles that blocks compute at the same time, below each other.  FP8's wide tiles take 4096 where these are all,
# so that b comes from memory once: 97.5 to 96.4 us at (4096, 7168, 2048), 336.8 to 335.9 at (4096, 14336, 4096), but
# 8192 cubed 769 to 785 (H200); 128 x 128 tiles 97.2 to 97.8.
_GROUP_ROWS, _ALL_ROWS = 2048, 4096
_PARAMS = np.dtype(  # gemm/epilogue/matmul.cuh: MatmulParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "num_k_tiles", "tiles_m", "tiles_n")),
        *(("block_scales_a", STRIDES), ("block_scales_b", STRIDES)),
        ("epilogue", EPILOGUE),
        *((name, np.int32) for name in ("tma_stores", "swizzle", "has_block_scales")),
        *(("stage_bytes", np.int32), ("epilogue_kind", np.int32), ("padding", np.int32)),
        *(("num_groups", np.int64), ("groups", np.int64, (1, 4))),
    ]
)
_DUAL_PARAMS = np.dtype(  # gemm/epilogue/gated.cuh: DualParams
    [
        ("batch", BATCH),
        *((name, np.int64) for name in ("batch_size", "num_k_tiles", "tiles_m", "tiles_n")),
        ("epilogues", EPILOGUE, 2),
        *(("tma_stores", np.int32), ("swizzle", np.int32), ("policy", np.int64)),
        *(("num_groups", np.int64), ("groups", np.int64, (2, 4))),
    ]
)
_LOGITS_PARAMS = np.dtype(  # gemm/epilogue/partial_softmax.cuh: LogitsParams
    [
        *((name, np.int64) for name in ("num_k_tiles", "tiles_m", "tiles_n", "swizzle")),
        ("epilogue", EPILOGUE),
    ]
)
_STREAM_PARAMS = np.dtype(  # dequant_softmax_stream.cu: StreamParams
    [
        *(("num_k_tiles", np.int64), ("rows", np.int64)),
        ("epilogue", EPILOGUE),
    ]
)
_GENERAL, _PLAIN, _BOXED = range(3)  # gemm/epilogue/matmul.cuh: EpilogueKind
_A, _B, _OUT, _RESIDUAL, _B2 = 0, 1, 2, 4, 9  # gemm_task.cuh: Operand


def _mainloop(task: GemmTask, config: HopperConfig) -> tuple[str, tuple[str, ...]]:
    """The mainloop's type (gemm/policies.cuh), and the files that declare it."""
    c, a, b = config, _operand(task.a, task.layout_a), _operand(task.b, task.layout_b)
    if task.products == 2:
        b = f"gemm::Pair<{b}>"
    if c.ping_pong:
        schedule = "gemm::PingPong"
    else:
        schedule = "gemm::SlicedK" if c.share_k else f"gemm::Cooperative<{c.warpgroups}>"
    policies = (
        f"gemm::{'SwapAB' if is_turned(c, task) else 'Operands'}<{a}, {b}>",
        f"gemm::Tile<{c.tile_m}, {c.tile_n}, {tile_k(c, task)}>",
        f"gemm::Stages<{c.stages}>",
        schedule,
        f"gemm::{'SplitK' if c.split_k else 'Cluster'}<{c.cluster}>",
    )
    if converts(task):
        name, file = ("Nvfp4", "nvfp4") if task.b == FP4 else ("8Bit", "8bit")
        kind, policies = "RS", (f"gemm::Convert{name}", *policies)
        includes = (f"gemm/convert_{file}.cuh", "gemm/mainloop_sm90_rs.cuh")
    elif task.a in FP8:
        kind, includes = "SSFp8", ("gemm/mainloop_sm90_ss_fp8.cuh",)
    else:
        kind, includes = "SS", ("gemm/mainloop_sm90_ss.cuh",)
    return f"gemm::MainloopSm90{kind}<{', '.join(policies)}>", includes


def _operand(dtype: np.dtype, layout: int) -> str:
    return f"gemm::{'MnMajor' if layout == OUTER else 'KMajor'}<{dtypes.CPP_NAMES[dtype]}>"


def variant(task: GemmTask, config: HopperConfig) -> Variant:
    if config.splits > 1:
        return variant(of_part(task, config.splits), replace(config, splits=1))
    c, task = config, multiplied(task, config)
    both = not splits_epilogues(task, config)  # of one kernel
    general = not only_plain(task, config) and (both or not task.plain)
    if c.streams:
        return Variant(
            f"{task.kernel}_stream",
            (("ElementA", dtypes.CPP_NAMES[task.a]), ("ElementB", dtypes.CPP_NAMES[task.b])),
            (("kTileN", c.tile_n), ("kStages", c.stages)),
            c.num_threads,
        )
    mainloop, includes = _mainloop(task, c)
    epilogue, file, scheduler = "gemm::GatedEpilogue<Mainloop>", "gated", "PersistentScheduler"
    if task.kernel == "dual_gemm" and is_turned(c, task) and not converts(task):
        scheduler = "EvenColumnsScheduler"
    if task.kernel == "dequant_softmax":
        epilogue, file = "gemm::PartialSoftmaxEpilogue<Mainloop>", "partial_softmax"
    if task.kernel == "gemm":
        kinds = ["gemm::TmaStore"] if both or task.plain else []
        kinds += ["gemm::General"] if general else []
        epilogue, file = f"gemm::MatmulEpilogue<{', '.join(['Mainloop', *kinds])}>", "matmul"
    return Variant(
        f"{task.kernel}_hopper",
        (
            ("Mainloop", mainloop),
            ("Epilogue", epilogue),
            ("Scheduler", f"gemm::{scheduler}<Mainloop>"),
        ),
        (),
        c.num_threads,
        c.cluster,
        includes=(*includes, f"gemm/epilogue/{file}.cuh", "gemm/scheduler.cuh"),
    )


_SMALLEST_HALVED = 2.0**-125  # whose half FP32 does not flush to zero


def is_plain(product: Product, turned: bool) -> bool:
    """Whether StoreTma (gemm/epilogue/store_tma.cuh) does, of 16-bit results without a residual.
    turned: HopperConfig's, or that b is converted."""
    p = product
    alone = p.residual is None and not _has_scales_of_all(p)
    return alone and tma_stores(p.out, p.m, p.n) and _is_short(p, turned)


def _is_boxed(product: Product, turned: bool) -> bool:
    """Whether it does for a residual of the output's dtype, or for FP32 results, or for scales of 16-bit operands."""
    p, scaled = product, _has_scales_of_all(product)
    if p.residual is None:
        floats = p.activation is None and tma_stores(p.out, p.m, p.n, (dtypes.float32,))
        boxed = floats or (scaled and tma_stores(p.out, p.m, p.n))
        return boxed and not turned and _is_short(p, turned)
    # The boxes would be the slots of scales of blocks.
    same = p.residual.dtype == p.out.dtype and not (p.block_scales or scaled)
    both = same and all(tma_stores(x, p.m, p.n) for x in (p.out, p.residual))
    return both and _is_short(p, turned)


def _has_scales_of_all(p: Product) -> bool:
    """Of 16-bit operands, which have no others."""
    return p.b.dtype.itemsize > 1 and (p.scale_a, p.scale_b) != (None, None)


def _is_short(p: Product, turned: bool) -> bool:
    scales = [None if p.block_scales else scale for scale in (p.scale_a, p.scale_b)]
    one_scale = not turned or scales[0] is None or scales[0].row == 0
    return (
        one_scale
        # alpha takes the place of a scale, or stands alone.
        and (turned or p.b.dtype.itemsize > 1 or p.alpha == 1 or None in scales)
        and (p.bias is None or (p.bias.row == 0 and p.bias.col != 0))
        and (p.activation is None or p.a.dtype.itemsize == 2)
        and (p.activation != "gelu" or p.alpha == 0 or abs(p.alpha) >= _SMALLEST_HALVED)
    )


_PLACES = {  # in product.ARRAYS, of what the kernels take beside tensor maps
    "gemm": (2, 3, 4, 5, 6, 8),
    "dual_gemm": (3, 4, 5, 6, 8, 9),
    "dequant_softmax": (3, 4, 5, 6),
}


class HopperPlan(NamedTuple):
    """The launch of a product, as shapes, strides, dtypes and config decide it."""

    repeated: Repeated

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS, of which some are None; those that the maps are of come first."""
        self.repeated.launch(arrays)

    @property
    def launches(self) -> tuple[Repeated, ...]:
        return (self.repeated,)


def _launch(
    target: Target,
    kernel: Kernel,
    sizes: tuple[int, int],
    maps: tuple[MapPlan | None, ...],
    places: tuple[int, ...],
    params: Any,
    mapped: Sequence[int] = range(4),
) -> HopperPlan:
    """sizes: blocks, and the bytes of their shared memory.  places: of _PLACES.  mapped: where the arrays of
    the maps are."""

    def arguments(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        others = [arrays[i] for i in places]
        return (*encoded_maps(target, maps, [arrays[i] for i in mapped]), *others, params)

    return HopperPlan(Repeated(kernel, *sizes, arguments))


def hopper_plan(
    target: Target,
    product: Product,
    task: GemmTask,
    dims: list[tuple[int, tuple[int, ...]]],
    config: HopperConfig,
) -> HopperPlan:
    """The plan of `product`, whose dims are product_dims'."""
    p, c = product, config
    if c.streams:
        return _stream_plan(target, p, task, c)
    end = _GENERAL
    if p.kernel == "gemm":
        turned = is_turned(c, task)
        end = _PLAIN if is_plain(p, turned) else _BOXED if _is_boxed(p, turned) else _GENERAL
    task = replace(task, plain=end == _PLAIN)
    cols = c.tile_n // task.products  # of each
    tiles_m, tiles_n = cluster_tiles(c, task, p.m, p.n)
    # Of the columns of the sums, each block of a cluster loads a part.
    turned = is_turned(c, task)
    parts_a, parts_b = (
        c.cluster if layout == INNER and is_cols and not c.split_k else 1
        for layout, is_cols in ((task.layout_a, turned), (task.layout_b, not turned))
    )
    tiles = task.batch * tiles_m * tiles_n
    depth = tile_k(c, task)
    rows_a = c.tile_m // parts_a
    if task.layout_a == INNER and parts_a == 1 and p.kernel == "gemm":
        # Rows that are not there take TMA as long as others, or longer: they are left out.
        rows_a = min(rows_a, -(-p.m // 8) * 8)
    map_a = operand_map(p.a, p.batch, task.layout_a, p.m, p.a.row, p.k, p.a.col, rows_a, depth)
    maps_b = [
        operand_map(
            b,
            p.batch,
            task.layout_b,
            p.n,
            b.col,
            p.k,
            b.row,
            16 if turned and p.b2 is not None and not converts(task) else cols // parts_b,
            depth,
        )
        for b in (p.b, p.b2)
        if b is not None
    ]
    clusters = tiles if c.split_k else min(tiles, max(1, target.multiprocessors // c.cluster))
    grid, kernel = clusters * c.cluster, get_kernel(target, variant(task, c))
    shared = c.shared_bytes(task)
    group_rows = _ALL_ROWS if in_halves(c, task) and p.m <= _ALL_ROWS else _GROUP_ROWS
    swizzle = max(1, group_rows // cluster_sizes(c, task)[0])
    num_k_tiles, places = math.ceil(p.k / depth), _PLACES[p.kernel]
    if p.kernel == "dequant_softmax":
        params = np.zeros((), _LOGITS_PARAMS)
        params["num_k_tiles"], params["swizzle"] = num_k_tiles, swizzle
        params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
        fill_logits(params, p)
        map_out = None
        if p.logits is None:  # PartialSoftmaxEpilogue: kBoxRows
            map_out = map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), (1, 64, 64))
        maps = (map_a, *maps_b, map_out)
        return _launch(target, kernel, (grid, shared), maps, places, target.by_value(params))
    map_out = map_residual = None
    in_registers = p.b2 is not None and turned  # then threads store single numbers
    if (end == _BOXED or tma_stores(p.out, p.m, p.n)) and not in_registers:
        own = c.tile_m // (c.cluster if c.split_k else 1)
        # MatmulArguments
        box = (1, min(own, 64) if turned else 16, LINE // max(2, p.out.dtype.itemsize))
        if p.b2 is not None:  # GatedEpilogue: kBoxCols
            box = (1, 16, math.gcd(own_columns(c), 64))
        map_out = map_plan(p.out, p.batch, (p.m, p.n), (p.out.row, 1), box)
        if end == _BOXED and p.residual is not None:
            map_residual = map_plan(p.residual, p.batch, (p.m, p.n), (p.residual.row, 1), box)

    maps = {_A: map_a, **dict(zip((_B, _B2), maps_b, strict=False)), _OUT: map_out}
    if p.b2 is None:
        maps[_RESIDUAL] = map_residual
    params = np.zeros((), _PARAMS if p.b2 is None else _DUAL_PARAMS)
    fill_batch(params["batch"], dims)
    for operand, plan in maps.items():
        unit = 1 if plan is None else plan.strides[0] // plan.dtype.itemsize
        params["batch"]["strides"][operand] //= unit
    if p.b2 is None:
        fill_epilogue(params["epilogue"], p)
    else:
        fill_epilogues(params["epilogues"], p)
        params["policy"] = p.policy
    params["batch_size"] = task.batch
    params["num_k_tiles"] = num_k_tiles
    params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
    params["tma_stores"] = map_out is not None
    params["swizzle"] = swizzle
    if p.b2 is None:
        of_b = c.tile_n * depth * p.b.dtype.itemsize // (2 if p.b.dtype == FP4 else 1)
        params["stage_bytes"] = rows_a * parts_a * depth * p.a.dtype.itemsize + of_b
        params["epilogue_kind"] = end
    params["num_groups"] = p.k // 16
    for i, groups in enumerate((p.groups_b, p.groups_b2)[: task.products]):
        if groups is not None:
            params["groups"][i] = groups[1:]
    if p.block_scales:
        params["has_block_scales"] = 1
        for name, x in (("a", p.scale_a), ("b", p.scale_b)):
            if x is not None:
                params[f"block_scales_{name}"] = (x.row, x.col)
    maps = tuple(maps.values())
    mapped = range(4) if p.b2 is not None else (0, 1, 2, 4)
    return _launch(target, kernel, (grid, shared), maps, places, target.by_value(params), mapped)


def stream_blocks(n: int, target: Target) -> int:
    """How many blocks share n columns of logits, each as many sets of SET_COLUMNS, but for one."""
    return min(math.ceil(n / SET_COLUMNS), target.multiprocessors)


def _stream_rows(m: int) -> int:
    """Rows that are not there take TMA as long as others: they are left out."""
    return 8 if m <= 8 else 16


def _stream_plan(target: Target, p: Product, task: GemmTask, config: HopperConfig) -> HopperPlan:
    """dequant_softmax_stream.cu's."""
    rows = _stream_rows(p.m)
    maps = (
        operand_map(p.a, (), INNER, p.m, p.a.row, p.k, 1, rows, 64),
        operand_map(p.b, (), INNER, p.n, p.b.col, p.k, 1, SET_COLUMNS, LINE),
    )
    params = np.zeros((), _STREAM_PARAMS)
    params["num_k_tiles"], params["rows"] = math.ceil(p.k / LINE), rows
    fill_logits(params, p)
    kernel = get_kernel(target, variant(task, config))
    sizes = stream_blocks(p.n, target), config.shared_bytes(task)
    return _launch(target, kernel, sizes, maps, _PLACES[p.kernel], target.by_value(params))
