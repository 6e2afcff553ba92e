"""Launches of attention for decoding: a call's parameters, its grid, and what its blocks leave for others."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import workspace
from ..jit import get_kernel
from ..rows.row_layout import Operand
from ..targets import Kernel, Target
from .decode_config import (
    FAMILY,
    GROUP,
    MAX_CHUNKS,
    NUM_THREADS,
    DecodeConfig,
    DecodeTask,
    merge_sums_bytes,
    merge_variant,
    variant,
)

_DIVISOR = np.dtype([("by", np.int32), ("reciprocal", np.uint32)])
_DIVISORS = ("row_blocks", "runs", "kv_heads", "queries", "least_chunk", "page_size")
_PARAMS = np.dtype(  # parts/decode_task.cuh: DecodeParams
    [
        *((name, np.int64, (4,)) for name in ("q", "out")),
        *((name, np.int64, (3,)) for name in ("k", "v")),
        *((name, np.int64) for name in ("table_stride", "num_nodes")),
        *((name, _DIVISOR) for name in _DIVISORS),
        *(
            (name, np.int32)
            for name in (
                *("num_pages", "heads_per_kv_head", "num_rows", "dim", "dim_v", "max_keys"),
                *("doublings", "chunks_per_block", "chunk_nodes", "nodes", "counters", "causal"),
            )
        ),
        ("exponent_scale", np.float32),
        ("padding", np.int32),
    ]
)


class DecodeCall(NamedTuple):
    """A checked call: shapes, strides and options.

    q, out: (B, H, Sq, D); k, v: (B or pages, Hkv, keys, D), rows of which are contiguous and aligned.
    table_stride: of the block table, in elements; None: there is none.
    """

    dtype: np.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    dim_v: int
    max_keys: int
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    table_stride: int | None
    causal: bool
    scale: float


class DecodePlan(NamedTuple):
    """The launch of a call.  shape: the result's.  num_partials: bytes of partial results; num_counters: that it needs.
    merge: a second launch that makes results of these, of merge_grid blocks, if any."""

    kernel: Kernel
    merge: Kernel | None
    merge_grid: int
    merge_shared_bytes: int
    shape: tuple[int, ...]
    grid: int
    shared_bytes: int
    params: Any
    num_partials: int
    num_counters: int

    def launch(
        self, target: Target, q: Any, k: Any, v: Any, lens: Any, table: Any, out: Any, lse: Any
    ) -> None:
        partials = counters = None
        if self.num_partials:
            partials, counters = workspace.take(target, self.num_partials, self.num_counters)
        args = (q, k, v, lens, table, out, lse, partials, counters, self.params)
        self.kernel(self.grid, args, self.shared_bytes)
        if self.merge is not None:
            args = (lens, out, lse, partials, self.params)
            self.merge(self.merge_grid, args, self.merge_shared_bytes)


def has_vectors(x: Operand, shape: tuple[int, ...]) -> bool:
    """Whether rows of 8 or more 16-bit numbers are contiguous and begin at multiples of 16 bytes."""
    outer = zip(shape[:-1], x.strides[:-1], strict=True)
    aligned = x.offset % 16 == 0 and all(n <= 1 or stride % 16 == 0 for n, stride in outer)
    return aligned and x.strides[-1] == x.itemsize


def _steps(x: Operand, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides in elements.  0 along dims of one and where there are no elements: there the
    strides of equal calls may differ."""
    empty = 0 in shape
    return tuple(
        0 if empty or size == 1 else stride // x.itemsize
        for size, stride in zip(shape, x.strides, strict=True)
    )


def make_plan(target: Target, call: DecodeCall, given: DecodeConfig | None) -> DecodePlan:
    """Raises TypeError and ValueError for a config that does not fit, or too large a grid."""
    batch, num_heads, num_queries, dim = call.q_shape
    num_kv_heads, page_size = call.k_shape[1:3]
    rows = num_heads // num_kv_heads * num_queries
    task = DecodeTask(call.dtype, batch, num_kv_heads, rows, dim, call.dim_v, call.max_keys)
    config = FAMILY.config(task, target, given)
    max_chunks = task.max_chunks(config)
    num_tasks = task.num_tasks(config)
    if num_tasks >= 2**30:
        raise ValueError(f"the call has {num_tasks} tasks, more than 2^30")

    params = np.zeros((), _PARAMS)
    for name, x, shape in (
        *(("q", call.q, call.q_shape), ("out", call.out, call.q_shape)),
        *(("k", call.k, call.k_shape), ("v", call.v, call.k_shape)),
    ):
        params[name] = _steps(x, shape)[: params[name].size]
    row_blocks = -(-rows // config.rows)
    groups = -(-max_chunks // GROUP)
    chunk_nodes = max_chunks if config.chunks_per_block == 1 else 0
    nodes = chunk_nodes + groups
    # Nothing is left for others where one block does all of a sequence.
    leaves = max_chunks > max(1, config.chunks_per_block) or groups > 1
    counters = (
        0
        if config.merges_later or config.pairs or not leaves
        else 1 + (groups if chunk_nodes else 0)
    )
    places = batch * num_kv_heads * row_blocks
    divisors = {
        "row_blocks": row_blocks,
        "runs": -(-max_chunks // config.chunks_per_block),
        "kv_heads": num_kv_heads,
        "queries": num_queries,
        "least_chunk": config.least_chunk,
        "page_size": max(1, page_size),
    }
    values = {
        "table_stride": call.table_stride or 0,
        "num_nodes": places * nodes,
        **{name: (by, (2**32 - 1) // by) for name, by in divisors.items()},
        "num_pages": call.k_shape[0],
        "heads_per_kv_head": num_heads // num_kv_heads,
        "num_rows": rows,
        "dim": dim,
        "dim_v": call.dim_v,
        "max_keys": call.max_keys,
        "doublings": (config.chunk // config.least_chunk).bit_length() - 1,
        "chunks_per_block": config.chunks_per_block,
        "chunk_nodes": chunk_nodes,
        "nodes": nodes,
        "counters": counters,
        "causal": call.causal,
        "exponent_scale": call.scale * math.log2(math.e),
    }
    for name, value in values.items():
        params[name] = value
    kind = call.dtype, task.padded_dim, config
    merge, merge_parts = None, config.rows * task.padded_dim // (4 * NUM_THREADS)
    if leaves and config.merges_later:
        merge = get_kernel(target, merge_variant(*kind))
    return DecodePlan(
        kernel=get_kernel(target, variant(*kind, call.table_stride is not None)),
        merge=merge,
        merge_grid=places * merge_parts,
        merge_shared_bytes=16 * NUM_THREADS * (MAX_CHUNKS // GROUP)
        + merge_sums_bytes(task.padded_dim, NUM_THREADS),
        shape=(*call.q_shape[:3], call.dim_v),
        grid=num_tasks,
        shared_bytes=config.shared_bytes(task.padded_dim),
        params=target.by_value(params),
        num_partials=places * nodes * config.rows * (4 * task.padded_dim + 8) if leaves else 0,
        num_counters=places * counters,
    )
