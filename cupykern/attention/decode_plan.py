"""Plans of decode attention: kernel parameters, grids, and memory for partial results."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays import in_elements, packed, steps_of
from ..param_structs import fast_divmod, zeros
from ..rows.row_layout import Operand, operand
from ..runtime import plans, workspace
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Array
from .attention_task import ScoreOptions
from .cache_scales import KvScales, aligned_scale, array_of, place_of, scale_params
from .decode_config import (
    CHUNKS_PER_GROUP,
    FAMILY,
    MAX_CHUNKS,
    NUM_THREADS,
    DecodeConfig,
    DecodeTask,
    merge_states_bytes,
    merge_variant,
    variant,
)
from .formulas import Formulas


class DecodeCall(NamedTuple):
    """A checked call: shapes, strides and options.

    q, out: (B, H, Sq, D).  k, v: (B or num_pages, Hkv, keys, D).  Rows of q, k and v are contiguous
    and 16-byte aligned.
    max_keys: the most keys of a sequence.
    table_stride: row stride of the block table, in elements; None: contiguous caches.
    options: a causal call has right = 0.
    cache_dtype, scales: dtype and scales of 8-bit caches; else None.
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
    scale: float
    options: ScoreOptions = ScoreOptions()
    formulas: Formulas | None = None
    cache_dtype: np.dtype | None = None
    scales: KvScales | None = None

    @property
    def causal(self) -> bool:
        return self.options.right == 0

    @property
    def general(self) -> bool:
        """Whether the call has formulas, or options other than a causal mask."""
        has_options = self.options._replace(right=-1) != ScoreOptions() or self.options.right > 0
        return has_options or self.formulas is not None

    @property
    def most_seen(self) -> int:
        """The most keys that the queries of a sequence can attend to."""
        if self.options.left < 0:
            return self.max_keys
        return min(self.max_keys, self.options.left + self.q_shape[2])


class DecodePlan(NamedTuple):
    """The launches of a call.

    merge: the launch of the second kernel, if any.  shape: shape of the result.
    partial_bytes, num_counters: scratch memory for partial results, and counters.
    """

    target: Target
    kernel: Repeated
    merge: Repeated | None
    shape: tuple[int, ...]
    partial_bytes: int
    num_counters: int

    def launch(
        self, places: Any, q: Array, k: Array, v: Array, lens: Array | None, table: Array | None,
        out: Array, lse: Array | None, slopes: Array | None, sinks: Array | None,
        k_scale: Array | None, v_scale: Array | None, operands: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Launch the kernel, then the merge if it is a kernel of its own.

        places: a key that determines the addresses of all arrays, or None.  operands: the formulas'
        arrays.
        """
        partials: Any = None
        counters: Any = None
        if self.partial_bytes:
            partials, counters = workspace.take(self.target, self.partial_bytes, self.num_counters)
            places = places and (places, partials.data.ptr, counters.data.ptr)
        self.kernel.launch_at(
            places, q, k, v, lens, table, out, lse, partials, counters,
            slopes, sinks, k_scale, v_scale, operands,
        )  # fmt: skip
        if self.merge is not None:
            self.merge.launch_at(places, lens, out, lse, partials)


def has_aligned_rows(x: Operand, shape: tuple[int, ...]) -> bool:
    """Whether rows are contiguous and 16-byte aligned, as 16-byte async copies require."""
    outer = zip(shape[:-1], x.strides[:-1], strict=True)
    aligned = x.offset % 16 == 0 and all(n <= 1 or stride % 16 == 0 for n, stride in outer)
    return aligned and x.strides[-1] == x.itemsize


def make_plan(target: Target, call: DecodeCall, given: DecodeConfig | None) -> DecodePlan:
    """The plan of `call`.  Raises TypeError or ValueError if `given` does not fit, ValueError if
    the grid is too large."""
    batch, num_heads, num_queries, dim = call.q_shape
    num_kv_heads, page_size = call.k_shape[1:3]
    rows = num_heads // num_kv_heads * num_queries
    task = DecodeTask(
        call.dtype, batch, num_kv_heads, rows, dim, call.dim_v, call.most_seen, call.general,
        call.formulas and call.formulas.code, call.cache_dtype,
    )  # fmt: skip
    config = FAMILY.config(task, target, given)
    max_chunks = task.max_chunks(config)
    grid = task.num_work_tiles(config)
    if grid >= 2**30:
        raise ValueError(f"the call has {grid} work tiles, more than 2^30")

    row_tiles_per_head = -(-rows // config.tile_m)
    row_tiles = batch * num_kv_heads * row_tiles_per_head
    groups = -(-max_chunks // CHUNKS_PER_GROUP)
    chunk_partials = max_chunks if config.stores_chunks(max_chunks) else 0
    partials = chunk_partials + groups
    # False if one block computes a whole sequence.
    has_partials = config.merges(max_chunks) > 0
    counters = 0
    if has_partials and not config.has_merge_kernel and config.cluster == 1:
        counters = 1 + (groups if chunk_partials else 0)
    divisors = {
        "row_tiles": row_tiles_per_head,
        "splits": -(-max_chunks // config.chunks_per_block),
        "kv_heads": num_kv_heads,
        "queries": num_queries,
        "min_chunk": config.min_chunk,
        "page_size": max(1, page_size),
    }
    values = {
        "table_stride": call.table_stride or 0,
        "num_partials": row_tiles * partials,
        **{name: fast_divmod(divisor) for name, divisor in divisors.items()},
        "num_pages": call.k_shape[0],
        "heads_per_kv_head": num_heads // num_kv_heads,
        "num_rows": rows,
        "dim": dim,
        "dim_v": call.dim_v,
        "max_keys": call.max_keys,
        "max_doublings": (config.chunk // config.min_chunk).bit_length() - 1,
        "chunks_per_block": config.chunks_per_block,
        "chunk_partials": chunk_partials,
        "partials": partials,
        "counters": counters,
        "causal": call.causal,
        "scale_log2": call.scale * math.log2(math.e),
    }
    if call.general:
        values |= _general_values(call)
    struct = "GeneralDecodeParams" if call.general else "DecodeParams"
    params = zeros("attention/decode/work_tile.cuh", struct)
    if call.formulas:
        params = zeros("attention/decode/formula.cuh", "FormulaDecodeParams")
        call.formulas.fill(params["operands"])
    for name, value in values.items():
        params[name] = value
    for name, x in (
        *(("q_strides", call.q), ("out_strides", call.out)),
        *(("k_strides", call.k), ("v_strides", call.v)),
    ):
        params[name] = [step // x.itemsize for step in x.strides[: params[name].size]]
    kind = call.dtype, task.padded_dim, config
    row_tile_bytes = partials * config.tile_m * (4 * task.padded_dim + 8)
    kernel = get_kernel(
        target,
        variant(*(*kind, call.general, task.formulas), cache_dtype=call.cache_dtype),
    )
    scales = (scale_params(call.scales),) if call.scales else ()
    structs = tuple(map(target.by_value, (params, *scales)))
    num_options = 4 if call.scales is not None else 2 if call.general else 0

    def arguments(*given: Any) -> tuple[Any, ...]:
        pointers = call.formulas.pointers(given[-1]) if call.formulas else ()
        return (*given[: 9 + num_options], *pointers, *structs)

    shared_bytes = config.shared_bytes(task.padded_dim, task.dtype, task.cache_dtype)
    merge = None
    if has_partials and config.has_merge_kernel:
        merge_blocks = config.tile_m * task.padded_dim // (4 * NUM_THREADS)
        merge_bytes = 16 * NUM_THREADS * (MAX_CHUNKS // CHUNKS_PER_GROUP)
        merge = Repeated(
            get_kernel(target, merge_variant(*kind)),
            row_tiles * merge_blocks,
            merge_bytes + merge_states_bytes(task.padded_dim, NUM_THREADS),
            lambda *arrays: (*arrays, *structs),
        )
    return DecodePlan(
        target=target,
        kernel=Repeated(kernel, grid, shared_bytes, arguments),
        merge=merge,
        shape=(*call.q_shape[:3], call.dim_v),
        partial_bytes=row_tiles * row_tile_bytes if has_partials else 0,
        num_counters=row_tiles * counters,
    )


def _general_values(call: DecodeCall) -> dict[str, Any]:
    """The values of GeneralDecodeParams that differ from, or are not in, DecodeParams."""
    options = call.options
    batch, head = options.slopes or (0, 0)
    values = {
        "left": options.left, "right": options.right, "slope_batch": batch, "slope_head": head,
        "score_scale": call.scale,
    }  # fmt: skip
    if options.softcap:
        exponent = 2 * math.log2(math.e) * call.scale / options.softcap
        values |= {"softcap": options.softcap, "softcap_exponent": exponent}
    has_score = call.formulas is not None and call.formulas.score
    if options.softcap or options.slopes is not None or has_score:
        values["scale_log2"] = math.log2(math.e)
    return values


def run(
    target: Target,
    arrays: tuple[Any, Any, Any, Any, Any],
    y: Array,
    lse: Array | None,
    max_keys: int,
    scale: float,
    config: DecodeConfig | None,
    options: tuple[ScoreOptions, Any, Any] = (ScoreOptions(), None, None),
    formulas: Formulas | None = None,
    operands: tuple[Any, ...] = (),
    scales: tuple[Any, Any] | None = None,
) -> DecodePlan | None:
    """Launch a call whose arguments are checked, except the contents of lengths and block table.

    arrays: q, both caches as "hnd", lengths and block table (int32 of the target, or None).
    options: the score's options, slopes and sinks.  operands: the formulas' arrays.
    scales: of 8-bit caches as "hnd", numbers or arrays.
    Returns the plan, or None if arrays had to be copied.
    """
    *inputs, lens, table = arrays
    is_copy = False
    if scales is not None:
        given, scales = scales, (aligned_scale(scales[0]), aligned_scale(scales[1]))
        is_copy = any(x is not y for x, y in zip(given, scales, strict=True))
    places = [operand(x) for x in (*inputs, y)]
    for i, x in enumerate(inputs):
        # Empty caches too: a tile of zeros issues 0-byte copies, whose addresses must be aligned.
        if not has_aligned_rows(places[i], x.shape):
            inputs[i], is_copy = packed(x), True
            places[i] = operand(inputs[i])
    q, k, v = inputs
    if lens is not None and not (lens.flags.c_contiguous and in_elements(lens)):
        lens, is_copy = packed(lens), True
    table_stride = None
    if table is not None:
        if (table.shape[1] > 1 and table.strides[1] != 4) or not in_elements(table):
            table, is_copy = packed(table), True
        table_stride = steps_of(table)[0] // 4
    sizes = q.shape, k.shape, v.shape[3], max_keys
    call = DecodeCall(*(q.dtype, *sizes, *places, table_stride, scale, options[0], formulas))
    scale_arrays: tuple[Any, Any] = (None, None)
    if scales is not None:
        scale_arrays = array_of(scales[0]), array_of(scales[1])
        scale_places = place_of(scales[0]), place_of(scales[1])
        call = call._replace(cache_dtype=k.dtype, scales=scale_places)
    found = plan(target, call, config)
    found.launch(None, q, k, v, lens, table, y, lse, *options[1:], *scale_arrays, operands)
    return None if is_copy else found


@plans.cached
def plan(target: Target, call: DecodeCall, config: DecodeConfig | None) -> DecodePlan:
    return make_plan(target, call, config)
