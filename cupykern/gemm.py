"""How products are launched: operands, configs of the portable main loop, and plans.

The Python half of kernels_cu/gemm.cu, shared by every op that multiplies matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from . import dtypes
from .jit import get_kernel
from .rows import DTYPE_CODES
from .targets import Kernel, Target, by_value
from .targets.limits import max_shared_bytes

MAX_BATCH_DIMS = 4  # gemm_task.cuh: kMaxBatchDims
INNER, OUTER, STRIDED = range(3)  # mainloop.cuh: Layout
_WHOLE, _PARTIAL, _REDUCE = (np.int64(i) for i in range(3))  # gemm.cu: Pass
BLOCK = 128  # mainloop.cuh: kBlockK; splits begin at multiples of it
_MAX_SPLITS = 64
_ALIGNMENT = 16  # of what asynchronous copies move

_16_BIT = (dtypes.float16, dtypes.bfloat16)
_FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)

_FP8_ARCHS = ("sm_89", "sm_100a", "sm_120a", "host")
_MULTIPROCESSORS = {
    "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100a": 148, "sm_120a": 170,
    "gfx90a": 104, "gfx942": 304, "gfx1100": 48, "gfx1151": 20, "gfx1201": 32,
}  # fmt: skip
"""How many blocks run at once, for the number of splits: by architecture, so that the sums of two chips
of one architecture agree bit for bit."""


def compute_dtype(a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype that a and b can be multiplied as, which holds every number of both.

    Raises TypeError for a pair that is not supported.
    """
    if a == b and a in (*_16_BIT, dtypes.float32, dtypes.int8):
        return a
    if a in _16_BIT and b in (*_FP8, dtypes.int8):
        return a
    if a in _FP8 and b in _FP8:
        return dtypes.float16
    raise TypeError(
        f"a and b must both be float16, bfloat16, float32 or int8, both FP8, or a float16 or bfloat16 "
        f"and b FP8 or int8; got {a} and {b}"
    )


# --- configs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmTask:
    """What decides about configs: sizes, dtypes and the layouts of the operands."""

    batch: int
    m: int
    n: int
    k: int
    a: np.dtype
    b: np.dtype
    layout_a: int
    layout_b: int
    block_scales: bool = False


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


def refusal(config: GemmConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c = config
    (element_a, element_b), (compute, _) = _types(task, config)
    step = 4 if compute == dtypes.float32 else 32 // compute.itemsize
    if element_a.itemsize + element_b.itemsize < 2 * compute.itemsize:
        step = 32  # mainloop.cuh: kConverts
    if c.fp8 and not (
        task.a in _FP8 and task.b in _FP8 and STRIDED not in (task.layout_a, task.layout_b)
    ):
        return "fp8 is for two FP8 operands that lie along k"
    if c.fp8 and arch not in _FP8_ARCHS:
        return f"{arch} does not multiply FP8"
    if _promote_k(task, c) % c.tile_k:
        return f"sums are promoted every {_promote_k(task, c)} of k, no multiple of tile_k = {c.tile_k}"
    if min(c.tile_m, c.tile_n, c.tile_k, c.warps_m, c.warps_n, c.warps_k, c.splits) < 1:
        return "tiles, warps and splits must be positive"
    if c.stages < 2:
        return f"stages must be at least 2; got {c.stages}"
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


def check_config(config: Any, task: GemmTask, arch: str) -> GemmConfig:
    """`config`, or the measured one for None.  Raises TypeError and ValueError, with the reason."""
    if config is None:
        return choose_config(task, arch)
    if not isinstance(config, GemmConfig):
        raise TypeError(f"config must be a GemmConfig; got {type(config).__name__}")
    if reason := refusal(config, task, arch):
        raise ValueError(f"config does not fit: {reason}")
    return config


@cache
def _tiles(arch: str, a: np.dtype, b: np.dtype, layout_a: int, layout_b: int) -> tuple:
    """The tiles for operands of these dtypes and layouts, the largest first."""
    compute = compute_dtype(a, b)
    gfx = arch.startswith("gfx")
    if compute == dtypes.float32:
        return (GemmConfig(64, 64, 32, 2, 2, stages=2 if gfx else 3),)
    if STRIDED in (layout_a, layout_b):
        return (GemmConfig(64, 64, 128 // compute.itemsize, 2, 2, stages=2),)
    if a.itemsize == b.itemsize == 1:
        large = GemmConfig(64, 64, 128, 2, 2, stages=2 if gfx else 3)
        small = GemmConfig(16, 64, 128, 1, 1, 4, stages=4)
        native = (replace(large, fp8=True),) if a in _FP8 and arch in _FP8_ARCHS else ()
        return (*native, large, small)
    if b.itemsize == 1:
        if arch.startswith("gfx11"):  # its fragments are twice as large
            return (GemmConfig(32, 64, 64, 2, 2, stages=2),)
        large = GemmConfig(64, 64 if gfx else 128, 64, 2, 2, stages=2 if gfx else 3)
        return (large, GemmConfig(16, 64, 128, 1, 1, 4, stages=4))
    medium = GemmConfig(64, 64, 64, 2, 2, stages=2 if gfx else 4)
    small = (GemmConfig(16, 64, 128, 1, 1, 4, stages=2 if gfx else 4),)
    if gfx:
        large = GemmConfig(128, 128, 32, 2, 4, stages=2, finish_rounds=2)
    else:
        large = GemmConfig(128, 128, 64, 2, 4, stages=3)
    return (large, medium, *(small if layout_a == INNER else ()))


@cache
def configs(task: GemmTask, arch: str) -> tuple[GemmConfig, ...]:
    """The configs of `task` on `arch`, the measured one first."""
    tiles = _tiles(arch, task.a, task.b, task.layout_a, task.layout_b)
    fitting = [tile for tile in tiles if refusal(tile, task, arch) is None]
    chosen = next((tile for tile in fitting if _fills(tile, task)), fitting[-1])
    split = _split(chosen, task, arch)
    return (split, *(tile for tile in fitting if tile != split))


def _fills(tile: GemmConfig, task: GemmTask) -> bool:
    """Whether m and n have enough rows and columns for a tile as large as this."""
    return task.m > tile.tile_m // 2 and task.n > tile.tile_n // 2


def _split(tile: GemmConfig, task: GemmTask, arch: str) -> GemmConfig:
    """`tile` with so many splits that every multiprocessor has a block, each of at least 512 of k."""
    tiles = task.batch * math.ceil(task.m / tile.tile_m) * math.ceil(task.n / tile.tile_n)
    wanted = _MULTIPROCESSORS.get(arch, 4) // max(tiles, 1)
    splits = max(1, min(wanted, task.k // 512, _MAX_SPLITS))
    return replace(tile, splits=splits)


def choose_config(task: GemmTask, arch: str) -> GemmConfig:
    """The fastest measured config for `task` on `arch`."""
    return configs(task, arch)[0]


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
    return BLOCK if config.fp8 or task.block_scales else 0


def variant(task: GemmTask, config: GemmConfig) -> Variant:
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
        ),
        c.num_threads,
    )


# --- operands ----------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A batch of matrices as a plan sees it: strides in elements, 0 along dims of one element.

    aligned: every matrix begins at a multiple of 16 bytes.
    """

    dtype: np.dtype
    batch_strides: tuple[int, ...]
    row: int
    col: int
    aligned: bool


def matrix(array: Any, batch: tuple[int, ...]) -> Matrix | None:
    """`array` broadcast to `batch` matrices; None if a stride is no whole number of elements."""
    itemsize = array.dtype.itemsize
    strides = [
        0 if size == 1 else stride for size, stride in zip(array.shape, array.strides, strict=True)
    ]
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    if any(step % itemsize for step in (address, *strides)):
        return None
    aligned = not any(step % _ALIGNMENT for step in (address, *strides[:-2]))
    steps = [0] * max(0, len(batch) + 2 - len(strides)) + [s // itemsize for s in strides]
    return Matrix(array.dtype, tuple(steps[:-2]), steps[-2], steps[-1], aligned)


def layouts(a: Matrix, b: Matrix, k: int, m: int, n: int) -> tuple[int, int]:
    """How the main loop reads the operands: both by vectors, or both element by element."""
    found = _layout(a, a.col, a.row, k, m), _layout(b, b.row, b.col, k, n)
    return found if by_vectors(a.dtype, b.dtype, *found) else (STRIDED, STRIDED)


def by_vectors(a: np.dtype, b: np.dtype, layout_a: int, layout_b: int) -> bool:
    """Whether the main loop can read operands of these layouts by vectors."""
    if STRIDED in (layout_a, layout_b):
        return False
    if a.itemsize == 1:
        return (layout_a, layout_b) == (INNER, INNER)
    return layout_a == INNER if b.itemsize == 1 else True


def _layout(x: Matrix, k_step: int, outer_step: int, k: int, outer: int) -> int:
    per_vector = _ALIGNMENT // x.dtype.itemsize
    if x.aligned and (k_step == 1 or k == 1) and outer_step % per_vector == 0:
        return INNER
    neighbours = outer_step == 1 or outer == 1
    if x.aligned and neighbours and k_step % per_vector == 0:
        return OUTER
    return STRIDED


# --- plans -------------------------------------------------------------------------------------

_OPERANDS = 7  # gemm_task.cuh: Operand
_STRIDES = np.dtype([("row", np.int64), ("col", np.int64)])
_BATCH = np.dtype(
    [
        ("num_dims", np.int64),
        ("sizes", np.int64, MAX_BATCH_DIMS),
        ("strides", np.int64, (_OPERANDS, MAX_BATCH_DIMS)),
    ]
)
_EPILOGUE = np.dtype(  # epilogue.cuh: EpilogueParams
    [
        *(("m", np.int64), ("n", np.int64)),
        *(("out", _STRIDES), ("bias", _STRIDES), ("residual", _STRIDES)),
        *(("scale_a_stride", np.int64), ("scale_b_stride", np.int64)),
        *(("alpha", np.float32), ("activation", np.int32), ("out_dtype", np.int32)),
        *(("bias_dtype", np.int32), ("residual_dtype", np.int32), ("padding", np.int32)),
    ]
)
_PARAMS = np.dtype(  # gemm.cu: GemmParams
    [
        ("batch", _BATCH),
        *((name, np.int64) for name in ("batch_size", "k", "k_per_split", "tiles_m", "tiles_n")),
        *(("a", _STRIDES), ("b", _STRIDES)),
        *(("block_scales_a", _STRIDES), ("block_scales_b", _STRIDES)),
        ("epilogue", _EPILOGUE),
        *(("a_dtype", np.int32), ("b_dtype", np.int32)),
        *(("splits", np.int64), ("has_block_scales", np.int64)),
    ]
)
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")  # epilogue.cuh: Activation


class Product(NamedTuple):
    """A launch without its arrays: out = activation(alpha * (scale_a * a) @ (scale_b * b) + bias) +
    residual.

    block_scales: scale_a and scale_b hold one number for every 128 of k (and 128 columns of b).
    """

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    bias: Matrix | None
    residual: Matrix | None
    scale_a: Matrix | None
    scale_b: Matrix | None
    alpha: float
    activation: str | None
    block_scales: bool = False


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


def merge_batch(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, strides of each operand) of as few dims as walk the batch in order, innermost first."""
    dims: list[tuple[int, tuple[int, ...]]] = []
    for size, *steps in reversed(list(zip(sizes, *strides, strict=True))):
        if size == 1:
            continue
        inner = dims[-1] if dims else None
        if inner and all(s == i * inner[0] for s, i in zip(steps, inner[1], strict=True)):
            dims[-1] = (inner[0] * size, inner[1])
        else:
            dims.append((size, tuple(steps)))
    return dims


def gemm_task(product: Product) -> GemmTask:
    p = product
    layout_a, layout_b = layouts(p.a, p.b, p.k, p.m, p.n)
    return GemmTask(
        *(math.prod(p.batch), p.m, p.n, p.k, p.a.dtype, p.b.dtype),
        *(layout_a, layout_b, p.block_scales),
    )


def gemm_plan(target: Target, product: Product, config: GemmConfig | None) -> GemmPlan | None:
    """The plan of `product`; None where more than MAX_BATCH_DIMS dims of the batch do not merge.

    Raises TypeError and ValueError for a config that does not fit, or too large a grid.
    """
    p = product
    operands = (p.a, p.b, p.out, p.bias, p.residual, p.scale_a, p.scale_b)
    none = (0,) * len(p.batch)
    dims = merge_batch(p.batch, [none if x is None else x.batch_strides for x in operands])
    if len(dims) > MAX_BATCH_DIMS:
        return None
    task = gemm_task(p)
    config = check_config(config, task, target.arch)
    (element_a, element_b), _ = _types(task, config)
    tiles_m, tiles_n = -(-p.m // config.tile_m), -(-p.n // config.tile_n)
    tiles = task.batch * tiles_m * tiles_n
    if tiles * config.splits >= 2**31:
        raise ValueError(f"the product has {tiles * config.splits} tiles, more than 2^31 - 1")

    params = np.zeros((), _PARAMS)
    batch, epilogue = params["batch"], params["epilogue"]
    batch["num_dims"] = len(dims)
    for d, (size, strides) in enumerate(dims):
        batch["sizes"][d] = size
        batch["strides"][:, d] = strides
    params["batch_size"] = task.batch
    params["k"] = p.k
    per_split = -(-p.k // config.splits)
    params["k_per_split"] = max(1, -(-per_split // BLOCK)) * BLOCK
    params["tiles_m"], params["tiles_n"] = tiles_m, tiles_n
    params["splits"] = config.splits
    for name, x in (("a", p.a), ("b", p.b)):
        params[name] = (x.row, x.col)
        params[f"{name}_dtype"] = DTYPE_CODES[x.dtype]
    epilogue["m"], epilogue["n"] = p.m, p.n
    for name, x in (("out", p.out), ("bias", p.bias), ("residual", p.residual)):
        if x is not None:
            epilogue[name] = (x.row, x.col)
            epilogue[f"{name}_dtype"] = DTYPE_CODES[x.dtype]
    if p.block_scales:
        params["has_block_scales"] = 1
        for name, x in (("a", p.scale_a), ("b", p.scale_b)):
            if x is not None:
                params[f"block_scales_{name}"] = (x.row, x.col)
    epilogue["scale_a_stride"] = 0 if p.scale_a is None else p.scale_a.row
    epilogue["scale_b_stride"] = 0 if p.scale_b is None else p.scale_b.col
    epilogue["alpha"] = p.alpha
    epilogue["activation"] = ACTIVATIONS.index(p.activation)
    return GemmPlan(
        kernel=get_kernel(target, variant(task, config)),
        tiles=tiles,
        splits=config.splits,
        partial_size=tiles * config.tile_m * config.tile_n * config.splits,
        shared_bytes=config.shared_bytes(element_a.itemsize, element_b.itemsize),
        params=by_value(params),
    )
