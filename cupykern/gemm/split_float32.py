"""Products of FP32 matrices as sums of products of their 16-bit parts, on tensor cores.

The Python half of kernels_cu/split_float32.cu and gemm_flagged.cu.  kernels_cu/gemm_hopper.cu and
gemm_parts.cu multiply the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..arrays import maker
from ..kernels import Variant
from ..param_structs import zeros
from ..precisions import FLOAT32_LEAST_K, SPLITS, AnyParts
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import max_shared_bytes
from ..targets.repeated import Repeated
from ..typing import Namespace
from .fma_config import FmaGemmConfig, fill_fma_params
from .gemm_task import GemmTask
from .parts_config import PartsGemmConfig
from .product import (
    ALIGNMENT,
    K_MAJOR,
    MN_MAJOR,
    Matrix,
    Product,
    fill_batch,
    fill_epilogue,
    merge_batch,
    transposed,
)
from .sm90_gemm_config import Sm90PartsGemmConfig

_NUM_THREADS, _BLOCKS = 512, 2  # per block; per multiprocessor
_BLOCK_MN, _BLOCK_K = 128, 64  # gemm/split_float32.cuh: kBlockMn, kBlockK
_STAGE_BYTES = 4 * (_BLOCK_MN + 4) * _BLOCK_K  # a stage of SplitStorage
_PITCH = 64  # elements: rows are padded to multiples of 128 bytes
_FLAGGED = FmaGemmConfig(128, 128, 8, 16, 8, stages=4, min_blocks=2)
# _FLAGGED, measured on Hopper, spills on sm_80 and RDNA 4.
_FLAGGED_ELSEWHERE = FmaGemmConfig(128, 128, 8, 8, 8, stages=4)


@config_class
class SplitFloat32:
    """Split both operands into 16-bit parts in memory, multiply these by `config`, then recompute
    by multiply-adds the tiles that the parts cannot represent.  Each step is a launch."""

    config: Sm90PartsGemmConfig | PartsGemmConfig

    @property
    def num_threads(self) -> int:
        return self.config.num_threads

    @property
    def counts(self) -> tuple[int, int]:
        """Number of parts of a and of b."""
        return self.config.parts.count_a, self.config.parts.count_b

    def of_parts(self, task: GemmTask) -> GemmTask:
        """The task of the second launch."""
        dtype = self.config.parts.dtype
        return replace(
            task, a=dtype, b=dtype, layout_a=K_MAJOR, layout_b=K_MAJOR, tma=True,
            epilogue="general", formula=None,
        )  # fmt: skip

    def shared_bytes(self, task: GemmTask) -> int:
        return self.config.shared_bytes(self.of_parts(task))

    def variant(self, task: GemmTask) -> Variant:
        """The variant of the second launch."""
        return self.config.variant(self.of_parts(task))

    def refusal(self, task: GemmTask, device: Device) -> str | None:
        """Why this config cannot compute `task` on `device`; None if it can."""
        if task.kernel != "gemm" or not task.a == task.b == dtypes.float32:
            return f"SplitFloat32 is for two FP32 operands of matmul; got {task.a} and {task.b}"
        parts = self.config.parts
        if parts != parts.of(task.stored_a, task.stored_b):
            return f"{parts} is not of {task.stored_a} and {task.stored_b}"
        if task.precision not in ("float32", parts.name):
            return f'precision "{task.precision}" is not "{parts.name}"'
        if task.precision == "float32" and (not parts.is_float32 or task.k < FLOAT32_LEAST_K):
            return f"{parts.name} with k = {task.k} is less accurate than FP32"
        if flushes_parts(parts, device.arch):
            return f"{parts.name}: {device.arch} flushes FP16 parts that are subnormal"
        blocks = task.batch * math.ceil(max(task.m, task.n) / _BLOCK_MN)
        if blocks * math.ceil(task.k / _BLOCK_K) >= 2**30:
            return "the operands have too many blocks of 128 x 64"
        return self.config.refusal(self.of_parts(task), device)


def flushes_parts(parts: AnyParts, arch: str) -> bool:
    """Whether matrix cores of `arch` flush subnormal parts to zero: MI200 does so with FP16 parts,
    which then lose more than the bounds allow.  BF16 parts are normal numbers."""
    return arch == "gfx90a" and parts.dtype == dtypes.float16


def split_variant(parts: AnyParts, count: int, arch: str) -> Variant:
    """The variant that splits an operand into `count` parts."""
    shift = parts.shift if count > 1 else 0
    return Variant(
        "split_float32",
        (("Part", dtypes.CPP_NAMES[parts.dtype]),),
        (("kParts", count), ("kShift", shift), ("kStages", _split_stages(arch))),
        _NUM_THREADS,
        min_blocks=_BLOCKS,
    )


def _split_stages(arch: str) -> int:
    return 2 if _split_bytes(2) <= max_shared_bytes(arch) else 1


def _split_bytes(stages: int) -> int:
    """Dynamic shared memory (SplitStorage): the stages, and two numbers per warp."""
    return stages * _STAGE_BYTES + 2 * 4 * _NUM_THREADS // 32


def flagged_config(arch: str) -> FmaGemmConfig:
    """The config of the last launch, which recomputes flagged tiles by multiply-adds."""
    return _FLAGGED if arch in ("sm_90a", "host") else _FLAGGED_ELSEWHERE


def flagged_variant(task: GemmTask, arch: str) -> Variant:
    return replace(flagged_config(arch).variant(task), kernel="gemm_flagged")


def variants(arch: str) -> tuple[Variant, ...]:
    """The variants of the launches before and after the products of parts."""
    f32 = dtypes.float32
    both = (K_MAJOR, MN_MAJOR)
    tasks = (GemmTask(1, 4096, 4096, 4096, f32, f32, a, b) for a in both for b in both)
    counts = ((parts, count) for parts in SPLITS.values() for count in (parts.count, 1))
    splits = (split_variant(parts, count, arch) for parts, count in counts)
    return (*dict.fromkeys(splits), *(flagged_variant(task, arch) for task in tasks))


class _Split(NamedTuple):
    """An operand's parts and scales in memory."""

    parts: Matrix
    part_step: int
    scales: Matrix
    num_parts: int  # elements of all matrices
    num_scales: int


class PartsPlan(NamedTuple):
    """The launches: one or two that split the operands, the product of the parts, and one that
    recomputes flagged tiles."""

    splits: tuple[tuple[int, Repeated], ...]  # (first index in `lossy` that it writes, launch)
    sizes: tuple[tuple[int, int], tuple[int, int]]  # elements of parts and scales, for a and b
    num_lossy: int
    dtype: np.dtype
    product: Any
    flagged: Repeated
    launches: tuple[Any, ...] = ()  # empty: each call allocates memory

    def launch(self, xp: Namespace, arrays: tuple[Any, ...]) -> None:
        """arrays: product.ARRAYS."""
        empty = maker(xp)
        a, b, out, bias, residual, *rest = arrays
        (num_a, scales_a), (num_b, scales_b) = self.sizes
        parts = empty(num_a, self.dtype), empty(num_b, self.dtype)
        scales = empty(scales_a, np.float32), empty(scales_b, np.float32)
        lossy = empty(self.num_lossy, np.int32)
        for first, split in self.splits:
            split.launch((a, b, *parts, *scales, lossy[first:] if first else lossy))
        self.product.launch(xp, (*parts, out, bias, residual, *scales, *rest[2:]))
        self.flagged.launch((a, b, out, bias, residual, *scales, lossy))


def parts_plan(
    target: Target,
    product: Product,
    task: GemmTask,
    config: SplitFloat32,
    plan_of: Callable[[Product], Any],
) -> PartsPlan:
    """The plan of a product of FP32 operands by their parts.

    plan_of: maps the Product of the parts to its plan.
    """
    p, kind, counts = product, config.config.parts, config.counts
    filled = zeros("gemm/split_float32.cuh", "SplitParams")["operands"]
    operands = zip(filled, (p.a, transposed(p.b)), (p.m, p.n), counts, strict=True)
    a, b = (_fill_operand(to, x, p.batch, mn, p.k, count) for to, x, mn, count in operands)
    parts = p._replace(
        a=a.parts._replace(dtype=kind.dtype),
        b=transposed(b.parts._replace(dtype=kind.dtype)),
        scale_a=a.scales,
        scale_b=transposed(b.scales),
        block_scales=True,
        num_parts=counts,
        part_steps=(a.part_step, b.part_step),
    )
    splits, num_lossy = _splits(target, task, config, filled)
    return PartsPlan(
        splits=splits,
        sizes=((a.num_parts, a.num_scales), (b.num_parts, b.num_scales)),
        num_lossy=num_lossy,
        dtype=kind.dtype,
        product=plan_of(parts),
        flagged=_flagged(target, parts._replace(a=p.a, b=p.b), task, num_lossy),
    )


def _splits(
    target: Target, task: GemmTask, config: SplitFloat32, operands: np.ndarray
) -> tuple[tuple[tuple[int, Repeated], ...], int]:
    """The launches that split `operands`, each after the first index in `lossy` that it writes, and
    the size of `lossy`.

    One launch splits both operands if their variants and tolerances are equal; else there are two.
    """
    kind, kinds = config.config.parts, (task.stored_a, task.stored_b)
    tolerances = [kind.tolerance(task.k, dtype) for dtype in kinds]
    kernels = [split_variant(kind, count, target.arch) for count in config.counts]
    same = kernels[0] == kernels[1] and tolerances[0] == tolerances[1]
    found, first = [], 0
    for i in (0,) if same else (0, 1):
        params = zeros("gemm/split_float32.cuh", "SplitParams")
        params["operands"] = operands
        if not same:
            params["operands"]["num_blocks"][1 - i] = 0
        params["tolerance"], params["smallest"] = tolerances[i], kind.smallest(task.k)
        blocks = int(params["operands"]["num_blocks"].sum())
        grid, struct = min(blocks, _BLOCKS * target.multiprocessors), target.by_value(params)
        shared = _split_bytes(_split_stages(target.arch))

        def arguments(arrays: tuple[Any, ...], struct: Any = struct) -> tuple[Any, ...]:
            return (*arrays, struct)

        found.append((first, Repeated(get_kernel(target, kernels[i]), grid, shared, arguments)))
        first += grid
    return tuple(found), first


def _flagged(target: Target, product: Product, task: GemmTask, num_lossy: int) -> Repeated:
    p, params, config = (
        product,
        zeros("gemm_flagged.cu", "FlaggedParams"),
        flagged_config(target.arch),
    )
    tiles = fill_fma_params(params["product"], p, task, config)
    fill_epilogue(params["product"]["epilogue"], p._replace(scale_a=None, scale_b=None))
    if p.scale_a is not None and p.scale_b is not None:
        params["scales_row"], params["scales_col"] = p.scale_a.row, p.scale_b.col
    params["num_scales"], params["num_lossy"] = math.ceil(p.k / _BLOCK_K), num_lossy
    struct = target.by_value(params)
    return Repeated(
        get_kernel(target, flagged_variant(task, target.arch)),
        min(tiles, config.min_blocks * target.multiprocessors),
        config.shared_bytes(task),
        lambda arrays: (*arrays, struct),
    )


def _fill_operand(
    operand: np.ndarray, x: Matrix, batch: tuple[int, ...], mn: int, k: int, count: int
) -> _Split:
    """Fill `operand`, a zeroed SplitOperand, for x (mn, k).  A broadcast matrix is split once."""
    own = [i for i, size in enumerate(batch) if size > 1 and x.batch_strides[i]]
    matrices = math.prod(batch[i] for i in own)
    pitch = math.ceil(k / _PITCH) * _PITCH
    part_step, num_mn, num_k = mn * pitch, math.ceil(mn / _BLOCK_MN), math.ceil(k / _BLOCK_K)
    dims = merge_batch([batch[i] for i in own], [[x.batch_strides[i] for i in own]])
    fill_batch(operand["batch"], [(size, 0) for size, _ in dims])
    for d, (_, (step,)) in enumerate(dims):
        operand["batch"]["strides"][0, d] = step
    along_mn = x.col != 1 and k > 1
    near, far = (x.row, x.col) if along_mn else (x.col, x.row)
    whole = all(step % (ALIGNMENT // 4) == 0 for step in (far, *x.batch_strides))
    operand["mn_step"], operand["k_step"], operand["part_step"] = x.row, x.col, part_step
    operand["mn_size"], operand["k_size"], operand["pitch"] = mn, k, pitch
    operand["num_mn"], operand["num_k"] = num_mn, num_k
    operand["num_blocks"], operand["along_mn"] = matrices * num_mn * num_k, along_mn
    operand["vectors"] = x.aligned and near == 1 and whole

    def strides(of_matrix: int) -> tuple[int, ...]:
        steps, step = [0] * len(batch), of_matrix
        for i in reversed(own):
            steps[i] = step
            step *= batch[i]
        return tuple(steps)

    return _Split(
        parts=Matrix(x.dtype, strides(count * part_step), pitch, 1, True),
        part_step=part_step,
        scales=Matrix(np.dtype(np.float32), strides(num_mn * num_k), num_k, 1, True),
        num_parts=matrices * count * part_step,
        num_scales=matrices * num_mn * num_k,
    )
