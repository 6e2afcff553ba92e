"""Plans of rope_and_cache: the kernel's parameters and its launch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..param_structs import fast_divmod, zeros
from ..rows.row_layout import Operand
from ..runtime import plans
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from .rope_config import FAMILY, VECTOR_BYTES, RopeConfig, RopeTask, takes_vectors


class RopeCall(NamedTuple):
    """A checked call: shapes, strides and options.

    q, k, v, out: (B, S, heads, D); v is None without a cache.
    k_out, v_out: caches (B or num_pages, slots, Hkv, D); without a cache k_out is like out, and
        v_out is None.
    positions: (B, S).  block_table: None for contiguous caches.  num_slots: slots per sequence.
    rotation: frequencies (half,), with num_rows = 0; or cosines and sines (num_rows, 2 * half).
    half: pairs that are rotated.
    weights: (dtype, stride in elements) of q's and k's weight, or None.
    scales: strides of k's and v's scales along batch or page, slot and head, in elements; 0 for
        numbers.  numbers: k's and v's scales if they are numbers.
    """

    dtype: np.dtype
    cache_dtype: np.dtype
    q_shape: tuple[int, ...]
    kv_heads: int
    half: int
    q: Operand
    k: Operand
    v: Operand | None
    out: Operand
    k_out: Operand
    v_out: Operand | None
    positions: Operand
    block_table: Operand | None
    rotation: Operand
    num_rows: int
    page_size: int
    num_pages: int
    num_slots: int
    weights: tuple[tuple[np.dtype, int] | None, ...]
    scales: tuple[tuple[int, ...], tuple[int, ...]]
    scales_per_token: bool
    numbers: tuple[float, float]
    interleaved: bool
    eps: float
    attention_factor: float

    def task(self) -> RopeTask:
        batch, seq_len, heads, dim = self.q_shape
        arrays = (self.q, self.k, self.v, self.out, self.k_out, self.v_out)
        by_vectors = takes_vectors(self.dtype, dim, self.half) and all(
            _has_vectors(x, VECTOR_BYTES // self.dtype.itemsize * x.itemsize)
            for x in arrays
            if x is not None
        )
        num_heads = heads + self.kv_heads * (1 if self.v is None else 2)
        normalizes = any(self.weights)
        return RopeTask(
            *(self.dtype, batch * seq_len, num_heads, dim, self.half, normalizes, by_vectors)
        )


def _has_vectors(x: Operand, num_bytes: int) -> bool:
    """Whether head vectors are contiguous and begin at multiples of `num_bytes`."""
    starts = (x.offset, *x.strides[:-1])
    return x.strides[-1] in (x.itemsize, 0) and not any(n % num_bytes for n in starts)


@plans.cached
def plan(target: Target, call: RopeCall, config: RopeConfig | None) -> Repeated:
    """The launch of `call`.  Raises TypeError or ValueError if `config` does not fit, ValueError
    for 2^31 head vectors or more."""
    c, task = call, call.task()
    num_vectors = task.num_tokens * task.num_heads
    if num_vectors >= 2**31:
        raise ValueError(f"the call has {num_vectors} head vectors, 2^31 or more")
    chosen = FAMILY.config(task, target, config)
    params = zeros("rope/params.cuh", "RopeParams")
    for name, x in (
        *(("q_strides", c.q), ("k_strides", c.k), ("v_strides", c.v), ("out_strides", c.out)),
        *(("k_out_strides", c.k_out), ("v_out_strides", c.v_out)),
        *(("position_strides", c.positions), ("table_strides", c.block_table)),
    ):
        if x is not None:
            params[name] = [step // x.itemsize for step in x.strides]
    values = {
        "rotation_strides": [step // 4 for step in (0, *c.rotation.strides)[-2:]],
        "num_rows": c.num_rows,
        "seq_len": fast_divmod(c.q_shape[1]),
        "num_tokens": task.num_tokens,
        "num_q_heads": c.q_shape[2],
        "num_kv_heads": c.kv_heads,
        "num_heads": task.num_heads,
        "dim": task.dim,
        "half": fast_divmod(c.half),
        "lanes_log2": task.lanes.bit_length() - 1,
        "blocks_per_token": fast_divmod(task.blocks_per_token(chosen)),
        "interleaved": c.interleaved,
        "has_cache": c.v_out is not None,
        "page_size": fast_divmod(c.page_size),
        "num_pages": c.num_pages,
        "num_slots": c.num_slots,
        "cache_dtype": dtypes.CODES[c.cache_dtype],
        "scales_per_token": c.scales_per_token,
        "eps": c.eps,
        "inv_dim": np.float32(1) / np.float32(task.dim),
        "attention_factor": c.attention_factor,
        **dict(zip(("k_scale", "v_scale"), c.numbers, strict=True)),
        **dict(zip(("k_scale_strides", "v_scale_strides"), c.scales, strict=True)),
    }
    for name, weight in zip(("q_weight", "k_weight"), c.weights, strict=True):
        if weight is not None:
            values[f"{name}_dtype"] = dtypes.CODES[weight[0]]
            values[f"{name}_stride"] = weight[1]
    for name, value in values.items():
        params[name] = value
    kernel, struct = get_kernel(target, FAMILY.variant(task, chosen)), target.by_value(params)
    return Repeated(kernel, task.num_blocks(chosen), 0, lambda arrays: (*arrays, struct))
