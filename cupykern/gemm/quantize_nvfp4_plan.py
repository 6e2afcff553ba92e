"""Configs, tasks and plans of quantize_nvfp4."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, dtypes, nvfp4
from ..arguments import config_class
from ..kernels import Variant
from ..nvfp4 import GROUP, NvFp4
from ..param_structs import zeros
from ..runtime import plans, workspace
from ..runtime.choice import Family
from ..runtime.jit import get_kernel
from ..targets import Device, Target
from ..targets.limits import is_measured, max_shared_bytes
from ..targets.repeated import Repeated
from ..typing import Array
from .product import Groups, Matrix, groups

_VECTOR_BYTES, _STATIC_BYTES = 16, 1024  # the kernel's static shared memory, at most
DTYPES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)


@config_class
class NvFp4Config:
    """A persistent grid whose blocks loop over groups of 16 elements, in two passes.

    num_threads: threads per block.  num_blocks: the most blocks per multiprocessor.
    at_once: groups that a thread loads before it computes.
    cached_groups: groups that a thread keeps in shared memory from the first pass to the second; a
        multiple of at_once.
    """

    num_threads: int = 256
    num_blocks: int = 4
    at_once: int = 1
    cached_groups: int = 0

    def shared_bytes(self, itemsize: int) -> int:
        """rows/quantize_nvfp4.cuh: CachedGroups"""
        return _VECTOR_BYTES * self.num_threads * max(1, self.cached_groups * itemsize)


@dataclass(frozen=True)
class NvFp4Task:
    """Everything that determines how an array is quantized.  Equal tasks have equal plans."""

    shape: tuple[int, ...]
    dtype: np.dtype
    x: Matrix  # the array, with one batch dim
    layout: str


def configs(dtype: np.dtype, arch: str) -> tuple[NvFp4Config, ...]:
    """The configs for inputs of `dtype`, the preferred one first."""
    at_once = 2 if dtype.itemsize == 2 and is_measured(arch) else 1  # 2 spills elsewhere
    if arch == "host":
        return (NvFp4Config(256, 1, at_once, cached_groups=2),)
    one = NvFp4Config(1024, 1, at_once)
    most = (max_shared_bytes(arch) - _STATIC_BYTES) // one.shared_bytes(1)
    if most < 8:  # vectors per thread: too little shared memory for a cache
        return (NvFp4Config(256, 4, at_once),)
    return (replace(one, cached_groups=most // dtype.itemsize // at_once * at_once),)


def _refusal(config: NvFp4Config, task: NvFp4Task, device: Device) -> str | None:
    c, arch = config, device.arch
    if c.num_threads not in range(64, 1025, 64):
        return f"num_threads must be a multiple of 64 up to 1024; got {c.num_threads}"
    if c.num_blocks < 1:
        return f"num_blocks must be positive; got {c.num_blocks}"
    if c.at_once not in (1, 2, 4):
        return f"at_once must be 1, 2 or 4; got {c.at_once}"
    if c.cached_groups < 0 or c.cached_groups % c.at_once:
        return f"cached_groups must be a multiple of at_once; got {c.cached_groups}"
    needed, most = c.shared_bytes(task.dtype.itemsize), max_shared_bytes(arch) - _STATIC_BYTES
    if needed > most:
        return f"{needed} bytes of shared memory are more than {most}"
    return None


def variant_of(dtype: np.dtype, config: NvFp4Config) -> Variant:
    types = (("Element", dtypes.CPP_NAMES[dtype]),)
    together = (1536 if dtype.itemsize == 2 else 1024) // config.num_threads
    blocks = max(1, min(config.num_blocks, together))
    constants = (("kAtOnce", config.at_once), ("kCachedGroups", config.cached_groups))
    return Variant(
        "quantize_nvfp4", types, constants, config.num_threads, min_blocks=blocks, waits=True
    )


FAMILY = Family(
    "quantize_nvfp4",
    (NvFp4Config,),
    lambda task, device: configs(task.dtype, device.arch),
    _refusal,
    lambda task, config: variant_of(task.dtype, config),
    lambda task: (
        {"size": math.prod(task.shape)},
        {"dtype": task.dtype.name, "layout": task.layout},
    ),
)


@plans.cached
def plan(target: Target, task: NvFp4Task, given: NvFp4Config | None) -> NvFp4Plan:
    config, layout = FAMILY.config(task, target, given), task.layout
    *outer, rows, k = task.shape
    batch, scale_shape = math.prod(outer), nvfp4.scale_shape(task.shape, layout)
    steps = groups(task.x._replace(row=k // GROUP), k, layout == "blocked")
    params = _params(batch, rows, k, task.x, steps, math.prod(scale_shape) // batch, layout)
    threads = batch * int(params["scale_rows"] * params["scale_groups"])
    kernel = get_kernel(target, FAMILY.variant(task, config))
    shared = config.shared_bytes(task.dtype.itemsize)
    most = min(config.num_blocks * target.multiprocessors, workspace.MOST_BLOCKS)
    grid = min(-(-threads // config.num_threads), most, kernel.blocks_at_once(shared))
    shape = (*outer, rows, k // 2)
    struct = target.by_value(params)
    launch = Repeated(kernel, grid, shared, lambda *arrays: (*arrays, struct))
    places = _places(shape, scale_shape)
    return NvFp4Plan(target, launch, 4 * grid, shape, scale_shape, layout, places)


class NvFp4Plan(NamedTuple):
    """The launch of a call, determined by x's shape, strides and dtype and by the config."""

    target: Target
    repeated: Repeated
    partial_bytes: int
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    layout: str
    places: tuple[int, int, int]  # _places'

    def launch(self, x: Array, places: Any) -> NvFp4:
        """Quantize x.  places: (x's address,) for CuPy arrays."""
        target = self.target
        xp = target.xp
        if xp is np:
            data = arrays.empty_of(np, self.shape, np.uint8)
            scale = arrays.empty_of(np, self.scale_shape, dtypes.float8_e4m3fn)
            global_scale = arrays.empty_of(np, (), np.float32)
            barrier = workspace.take_for_grid(target, self.partial_bytes)
            places = None
        else:  # one allocation: the three are used together
            first, second, size = self.places
            memory = xp.cuda.alloc(size)
            make = arrays.maker(xp)
            data = make(self.shape, np.uint8, memory)
            scale = make(self.scale_shape, dtypes.float8_e4m3fn, memory + first)
            global_scale = make((), np.float32, memory + second)
            barrier = workspace.take_for_grid(target, self.partial_bytes)
            places = (*places, memory.ptr, barrier.data.ptr)
        self.repeated.launch_at(places, x, data, scale, global_scale, barrier)
        return NvFp4.unchecked(data, scale, self.layout, global_scale)


def _places(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Offsets of the scales and the global scale behind the codes, and the total size, in bytes."""
    codes, scales = (-(-math.prod(sizes) // 512) * 512 for sizes in (shape, scale_shape))
    return codes, codes + scales, codes + scales + 4


def _params(
    batch: int, rows: int, k: int, x: Matrix, steps: Groups, matrix_scales: int, layout: str
) -> np.ndarray:
    params = zeros("rows/quantize_nvfp4.cuh", "QuantizeNvfp4Params")
    params["batch"], params["rows"], params["groups"] = batch, rows, k // GROUP
    padded = (-(-rows // 128) * 128, -(-k // 64) * 4) if layout == "blocked" else (rows, k // GROUP)
    params["scale_rows"], params["scale_groups"] = padded
    params["batch_stride"] = x.batch_strides[0]
    params["row_stride"], params["col_stride"] = x.row, x.col
    for name in ("block", "quarter", "row", "word"):
        params[name] = getattr(steps, name)
    params["matrix_scales"] = matrix_scales
    return params
