"""Products of up to 16 rows, in the time of reading b: configs and plans.

The Python half of kernels_cu/gemm_stream.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kernels_cu import Variant

from .. import dtypes
from ..jit import get_kernel
from ..targets import Target
from ..targets.limits import is_measured, max_shared_bytes, multiprocessors
from ..targets.repeated import Repeated
from .gemm_task import GemmTask
from .product import (
    ALIGNMENT,
    EPILOGUE,
    FP4,
    INNER,
    OUTER,
    STRIDED,
    Product,
    compute_dtype,
    fill_epilogue,
)

ROWS = 16  # at most
GROUP = 16  # nvfp4.cuh: kGroup
_PARTS = 8  # gemm_stream.cu: kParts
_PARAMS = np.dtype(  # gemm_stream.cu: StreamParams
    [
        *(("a_row", np.int64), ("b_line", np.int64), ("k", np.int32), ("padding", np.int32)),
        *(("groups", np.int64, 4), ("epilogue", EPILOGUE)),
    ]
)


@dataclass(frozen=True)
class StreamConfig:
    """tile_n columns for a block, whose `warps` warps share k: each has every warps-th part of `depth`, and
    `stages` stages of its own for them.  min_blocks: that a multiprocessor is to hold at once.  rows: of a,
    that are read and multiplied, 8 or 16; the sums do not depend on it."""

    tile_n: int
    depth: int
    warps: int
    stages: int
    min_blocks: int = 1
    rows: int = ROWS

    @property
    def num_threads(self) -> int:
        return 32 * self.warps

    def shared_bytes(self, task: GemmTask) -> int:
        """Dynamic shared memory of a block (gemm_stream.cu: StreamStorage), at either warp size."""
        task = multiplied(task)
        covered = ALIGNMENT if is_covered(task) else 0  # bytes of a line besides its own
        lines_a = self.rows * (_line_bytes(task.a, self.depth) + covered * (not _outer(task)))
        lines_b, size = _lines_of_b(self, task)
        size += covered * _outer(task) + (self.depth // GROUP if task.b == FP4 else 0)
        stages = self.stages * (lines_a + lines_b * size)
        return self.warps * max(stages, 4 * self.rows * (self.tile_n + 4))


def multiplied(task: GemmTask) -> GemmTask:
    """`task` as the kernel sees it: an NVFP4 a is decoded in memory before."""
    return replace(task.decoded, b=FP4) if task.b == FP4 else task


def _line_bytes(dtype: np.dtype, numbers: int) -> int:
    return numbers // 2 if dtype == FP4 else numbers * dtype.itemsize


def is_covered(task: GemmTask) -> bool:
    """Whether lines begin anywhere (gemm_stream.cu: kCovered)."""
    return task.lines_b != STRIDED


def _outer(task: GemmTask) -> bool:
    return (task.lines_b if is_covered(task) else task.layout_b) == OUTER


def _lines_of_b(config: StreamConfig, task: GemmTask) -> tuple[int, int]:
    """Of a stage, and the bytes of each."""
    c = config
    lines, size = (c.depth, c.tile_n) if _outer(task) else (c.tile_n, c.depth)
    return lines, _line_bytes(task.b, size)


def refusal(config: StreamConfig, task: GemmTask, arch: str) -> str | None:
    """Why `config` cannot compute `task` on `arch`; None: it can."""
    c, t = config, multiplied(task)
    if t.kernel != "gemm" or dtypes.float32 in (t.a, t.b):
        return "streams are single products of up to 16 bits"
    if t.half_sums or t.block_scales:
        return "streams sum in FP32 or int32, without scales of blocks"
    if c.rows not in (8, ROWS):
        return f"a fragment has 8 or {ROWS} rows; got {c.rows}"
    if t.m > c.rows or t.batch != 1:
        return f"streams are of one matrix of up to {c.rows} rows; got {t.m}, {t.batch} of them"
    if not is_covered(t) and (t.layout_a != INNER or t.layout_b == STRIDED):
        return "streams read neighbours along k of a, and of b along k or n, by vectors"
    lines = ((t.k, t.a), (t.n if t.layout_b == OUTER else t.k, t.b))
    whole = is_covered(t) or not any(_line_bytes(x, size) % ALIGNMENT for size, x in lines)
    if not t.k or not whole:
        return f"streams read lines of whole vectors of {ALIGNMENT} bytes"
    if t.k > 2**30:  # they step past its end
        return f"streams count k in 32 bits; got {t.k}"
    if t.b == FP4 and (t.k % 64 or not t.tma_codes):
        return "streams read NVFP4's codes by vectors, and four scales at once"
    if min(c.tile_n, c.depth, c.warps, c.min_blocks) < 1:
        return "columns, depth, warps and blocks must be positive"
    if c.stages < 2 or c.warps % 2 or c.warps > 32:
        return "there must be an even number of warps, up to 32, and at least 2 stages"
    if c.depth % 32 or c.tile_n % 16:
        return f"fragments have 16 columns and 32 of k; got {c.tile_n} and {c.depth}"
    for line in (_line_bytes(t.a, c.depth), _lines_of_b(c, t)[1]):
        if not 64 <= line <= 512 or line & (line - 1):
            return f"a line of {line} bytes in shared memory is no power of two from 64 to 512"
    needed, limit = c.shared_bytes(t), max_shared_bytes(arch)
    if needed > limit:
        return f"{needed} bytes of shared memory are more than the {limit} of {arch}"
    return None


def configs(task: GemmTask, arch: str) -> tuple[StreamConfig, ...]:
    """Those of `task` on `arch`, the measured one first: two blocks on a multiprocessor, each with as many
    stages as fit; or, of few columns that are converted, one with twice the warps: (1, 4096, 7168) of FP16
    by E4M3 takes 13.2 us so instead of 14.0 (H200); or, of fewer by 16 bits or NVFP4, one of 16 columns, so that
    more multiprocessors have some: (1, 1024, 8192) of BF16 11.0 us instead of 14.5.
    """
    if arch.startswith("gfx") or dtypes.float8_e5m2 in (task.a, task.b):  # which is rare
        return ()
    outer = _outer(task)
    tile_n, depth = (64, 64 // task.b.itemsize) if outer else (32, 128 // task.b.itemsize)
    # Else it gains little.
    halves = task.m <= 8 and task.b.itemsize == 1 and is_measured(arch) and not outer
    task, rows = multiplied(task), 8 if halves else ROWS
    stage = StreamConfig(tile_n, depth, 4, 1, rows=rows).shared_bytes(task)
    most = 3 if task.b == FP4 else 4  # 48.4 to 47.1 us (1 x 28672 x 8192, NVFP4)
    stages = max(2, min(most, (max_shared_bytes(arch) // 2 - 1024) // stage))
    found = [StreamConfig(tile_n, depth, 4, stages, 2, rows)]
    if is_covered(task) and is_measured(arch):
        # 68.1 to 56.7 us (16 x 8191 x 8191), 32.1 to 23.2 with n along lines (16 x 4097 x 4096).
        found = [StreamConfig(64, 32, 8, 2, 2) if outer else StreamConfig(32, 128, 8, 2)]
    if arch == "sm_90a" and not outer:
        alone = []  # on a multiprocessor, where each block has one
        if not is_covered(task) and (task.b == FP4 or task.b.itemsize == 2):
            alone.append(StreamConfig(16, depth, 8, 4, rows=rows))
        if task.a.itemsize > task.b.itemsize:
            alone.append(StreamConfig(tile_n, depth, 8, stages, rows=rows))
        fit = [c for c in alone if math.ceil(task.n / c.tile_n) <= multiprocessors(arch)]
        found = [*fit, *found, *(c for c in alone if c not in fit)]
    return tuple(config for config in found if refusal(config, task, arch) is None)


def variant(task: GemmTask, config: StreamConfig) -> Variant:
    c, task = config, multiplied(task)
    types = zip(
        ("ElementA", "ElementB", "Compute"),
        (task.a, task.b, compute_dtype(task.a, task.b)),
        strict=True,
    )
    return Variant(
        "gemm_stream",
        tuple((name, dtypes.CPP_NAMES[dtype]) for name, dtype in types),
        (
            ("kRows", c.rows),
            ("kTileN", c.tile_n),
            ("kDepth", c.depth),
            ("kStages", c.stages),
            ("kOuterMajorB", _outer(task)),
            ("kCovered", is_covered(task)),
        ),
        c.num_threads,
        min_blocks=c.min_blocks,
    )


class StreamPlan(NamedTuple):
    """The launch of a product, as shapes, strides, dtypes and config decide it."""

    repeated: Repeated

    def launch(self, xp: Any, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS["gemm"], None where absent."""
        self.repeated.launch((*arrays[:7], arrays[8]))


def stream_plan(
    target: Target, product: Product, task: GemmTask, config: StreamConfig
) -> StreamPlan:
    """product: of a task that `refusal` does not refuse, an NVFP4 a decoded."""
    params = np.zeros((), _PARAMS)
    params["a_row"] = product.a.row
    params["b_line"] = product.b.row if _outer(task) else product.b.col
    params["k"] = product.k
    if product.groups_b is not None:
        params["groups"] = product.groups_b[1:]
    fill_epilogue(params["epilogue"], product)
    kernel, struct = get_kernel(target, variant(task, config)), target.by_value(params)
    parts = _PARTS if is_covered(task) and not _outer(task) else 1
    grid = parts * math.ceil(product.n / (parts * config.tile_n))
    sizes = grid, config.shared_bytes(task)
    return StreamPlan(Repeated(kernel, *sizes, lambda arrays: (*arrays, struct)))
