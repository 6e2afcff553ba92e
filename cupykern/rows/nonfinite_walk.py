"""The order in which nonfinite_report reads an array's elements, and the kernel's configs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arguments import config_class
from ..kernels import Variant
from ..targets.limits import is_measured
from .row_layout import VECTOR_BYTES, Operand

MAX_DIMS = 8


@config_class
class NonfiniteConfig:
    """A block has num_threads threads, each with `batch` vectors in flight.

    vector_width: elements of a vector.  plain: the elements fill one contiguous span.
    min_blocks: blocks per multiprocessor.
    """

    num_threads: int
    batch: int
    vector_width: int
    plain: bool
    min_blocks: int


class Walk(NamedTuple):
    """The order in which an array's elements are read (rows/nonfinite.cuh: NonfiniteParams).

    dims: (size, stride, weight), innermost first; strides are in elements and not negative.
    start: offset of the first element read.  first: its index in C order; a dim's weight is the
    step of that index.
    plain: the elements fill one contiguous span, whose ends can be partial vectors.
    whole: the innermost dim consists of whole, aligned vectors.
    """

    num_elements: int
    start: int
    first: int
    dims: tuple[tuple[int, int, int], ...]
    plain: bool
    whole: bool


def make_walk(shape: Sequence[int], x: Operand) -> Walk | None:
    """The Walk over an array of `shape`.

    None if the kernel does not support it: a stride or the address is not a multiple of the
    itemsize, or more than MAX_DIMS dims remain after merging.
    """
    if any(step % x.itemsize for step in (x.offset, *x.strides)):
        return None
    start = first = 0
    weight = 1
    dims: list[tuple[int, int, int]] = []
    for size, stride in zip(reversed(shape), reversed(x.strides), strict=True):
        step, its_weight = stride // x.itemsize, weight
        weight *= size
        if size == 1:
            continue
        if step < 0:
            start += (size - 1) * step
            first += (size - 1) * its_weight
            step, its_weight = -step, -its_weight
        dims.append((size, step, its_weight))
    # Memory order, with broadcast dims (stride 0) outermost.
    dims.sort(key=lambda dim: (dim[1] == 0, dim[1]))
    merged: list[tuple[int, int, int]] = []
    reach = 1
    plain = True
    for size, stride, its_weight in dims:
        plain = plain and stride == reach
        reach *= size
        if merged:
            inner_size, inner_stride, inner_weight = merged[-1]
            if (stride, its_weight) == (inner_stride * inner_size, inner_weight * inner_size):
                merged[-1] = (inner_size * size, inner_stride, inner_weight)
                continue
        merged.append((size, stride, its_weight))
    if len(merged) > MAX_DIMS:
        return None
    merged = merged or [(1, 1, 1)]
    width = VECTOR_BYTES // x.itemsize
    whole = (
        merged[0][1] == 1
        and merged[0][0] % width == 0
        and (x.offset // x.itemsize + start) % width == 0
        and all(stride % width == 0 for _, stride, _ in merged[1:])
    )
    return Walk(math.prod(shape), start, first, tuple(merged), plain, whole)


def choose_config(arch: str, itemsize: int, walk: Walk) -> NonfiniteConfig:
    """The preferred config for elements of `itemsize` bytes."""
    one_span, *several_dims = configs_of(arch, itemsize)
    return one_span if walk.plain else several_dims[walk.whole]


@cache
def configs_of(arch: str, itemsize: int) -> tuple[NonfiniteConfig, ...]:
    """A config for one contiguous span; on measured architectures also one for several dims by
    elements and one for several dims by vectors."""
    width = VECTOR_BYTES // itemsize
    # Elsewhere NVRTC needs a few more registers than two blocks per SM leave.
    blocks = 2 if arch in ("sm_90a", "host") or arch.startswith("gfx") else 1
    configs = (
        NonfiniteConfig(512, 4, width, True, blocks),
        NonfiniteConfig(256, 8, 1, False, 3),
        NonfiniteConfig(256, 4, width, False, 3),
    )
    return configs if is_measured(arch) else configs[:1]


def refusal(config: NonfiniteConfig, itemsize: int, walk: Walk) -> str | None:
    """Why `config` cannot walk the array; None if it can."""
    c, width = config, VECTOR_BYTES // itemsize
    if c.plain and not walk.plain:
        return "the array is not one contiguous span"
    if c.vector_width != 1 and not (c.vector_width == width and (c.plain or walk.whole)):
        wide = f" or {width}" if walk.plain or walk.whole else ""
        return f"these strides allow vector_width 1{wide}" + (
            ", if it is plain" if wide and not walk.whole else ""
        )
    if c.num_threads not in (64, 128, 256, 512):  # 64 is a warp on AMD; 1024 is slower
        return "num_threads must be a power of two from 64 to 512"
    if c.batch not in (1, 2, 4, 8, 16, 32):
        return "batch must be a power of two up to 32"
    if not 1 <= c.min_blocks <= 32:
        return "min_blocks must be from 1 to 32"
    return None


def walk_variant(dtype: np.dtype, config: NonfiniteConfig) -> Variant:
    return Variant(
        "nonfinite",
        (("Element", dtypes.CPP_NAMES[dtype]),),
        (
            ("kVectorWidth", config.vector_width),
            ("kBatch", config.batch),
            ("kPlain", config.plain),
            ("kMaxDims", MAX_DIMS),
        ),
        config.num_threads,
        min_blocks=config.min_blocks,
    )
