"""cascade_attention: decoding of sequences that share a prefix of keys, which is read once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .. import arguments, reference
from ..arrays import Pieces, maker, packed
from ..attention.decode_config import MAX_QUERIES, DecodeConfig
from ..op import Op
from ..runtime import choice, plans
from ..typing import Array, Factor, Results
from .attention import attention, cached_attention
from .checks.cache_scales import numbers_and_arrays
from .checks.caches import check_caches, check_keys
from .decode_attention import cached_decode, decode_attention
from .merge_attention import cached_merge, merge_attention
from .problems import cascade_attention as problems

_FLOAT32 = np.dtype(np.float32)


def cascade_attention(
    q: Array,
    shared_k: Array,
    shared_v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seq_lens: Array | None = None,
    block_table: Array | None = None,
    layout: Literal["hnd", "nhd"] = "hnd",
    k_scale: Factor | None = None,
    v_scale: Factor | None = None,
    scale: Factor | None = None,
    softcap: Factor | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    config: DecodeConfig | None = None,
) -> Results:
    """`decode_attention` for sequences that share a prefix of keys, which is read once.

    >>> q = np.ones((4, 8, 1, 64), np.float16)  # one new token for each of 4 sequences
    >>> shared_k = shared_v = np.ones((1, 2, 300, 64), np.float16)  # 300 keys that all of them see
    >>> k = v = np.ones((4, 2, 32, 64), np.float16)  # room for 32 keys of their own
    >>> lens = np.array([1, 32, 5, 9], np.int32)
    >>> cupykern.cascade_attention(q, shared_k, shared_v, k, v, seq_lens=lens).shape
    (4, 8, 1, 64)

    Arguments:

    q: (B, H, Sq, D), float16 or bfloat16, Sq at most 64; the new tokens' keys are in the cache
        already.
    shared_k, shared_v: (1, Hkv, S, D) and (1, Hkv, S, Dv), of q's dtype: keys and values that
        precede those of each sequence.  Every query sees all of them; S may be 0.
    k_cache, v_cache: each sequence's own keys and values, (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv) or
        paged, of q's dtype or 8 bits, as for `decode_attention`.
    seq_lens, block_table, k_scale, v_scale: for the own keys, as for `decode_attention`.  A length
        excludes the shared keys and may be 0.  Query i sees its own keys j <= seq_len - Sq + i.
    layout: order of the dims of caches and shared keys.  "hnd": as above.  "nhd":
        (B, Sk, Hkv, D) and (1, S, Hkv, D), pages (num_pages, page, Hkv, D).
    scale: finite real factor of the scores; None: 1 / sqrt(D).
    softcap: a positive number c: scaled scores s become c tanh(s / c).
    return_lse: also return the log-sum-exp of the scores (natural log), float32 (B, H, Sq).
    out: (B, H, Sq, Dv) array of q's dtype to write into; must not overlap an input.
    config: DecodeConfig for the own keys; None: chosen for the shape, as for the shared keys.

    Returns out, (B, H, Sq, Dv) of q's dtype, or (out, lse).

    This op runs three others.  The queries of all sequences become the rows of one problem over the
    shared keys: `decode_attention` for B Sq <= 64, else `attention`.  `decode_attention` computes
    the own keys.  `merge_attention` merges the two results, which are rounded to q's dtype first.
    So the shared keys are read once for all sequences, not once per sequence.

    Unlike in `decode_attention`, the last bits may depend on the number of sequences: the order of
    summation over the shared keys depends on the number of rows.  q is copied if B and Sq exceed 1
    and its memory order is not (B, Sq, H, D), the order that `rope_and_cache` writes.  The host
    reads only seq_lens and block_table in numpy arrays, which are checked.

    For windows, ALiBi, formulas and sinks, call the three ops directly.  NaN, infinities and
    strides as for these ops; a query that sees no key gives zeros and lse -inf.

    Raises the errors of `decode_attention`, and ValueError for shared keys that do not fit the
    caches.

    Formula: Ye et al., "Cascade Inference" (FlashInfer, 2024).  Error bound:
    `reference.cascade_attention_bound`.
    """
    call: tuple[Any, ...] = "cascade_attention", layout, scale, softcap, return_lse, config
    own_arrays = k_cache, v_cache, seq_lens, block_table
    of_8_bits: tuple[Any, Any] = None, None
    if k_scale is None and v_scale is None:
        key, known, places = plans.find(call, out, q, shared_k, shared_v, *own_arrays)
    else:
        numbers, of_8_bits = numbers_and_arrays(q, k_scale, v_scale)
        call = *call, *numbers
        key, known, places = plans.find(call, out, q, shared_k, shared_v, *own_arrays, *of_8_bits)
    if known is not None:
        # Calls with equal keys pass the same checks in all three calls and have the same plans.
        make, allocate, pieces, own_plan, launch_shared, merge, is_copied = known
        memory = allocate(pieces.size)
        own_lse, found, lse, *others = pieces.at(make, memory)
        own = make(own_plan.shape, q.dtype) if out is None else others.pop()
        merged_lse = make(own_plan.shape[:3], np.float32) if return_lse else others.pop()
        at_own = places, memory.ptr, own.data.ptr
        # Other calls may share these plans: the names keep their packed launches apart.
        own_plan.launch(("own", at_own), q, *own_arrays, own, own_lse, None, None, *of_8_bits, ())
        rows = packed(q.swapaxes(0, 1)) if is_copied else q
        at_all = at_own, rows.data.ptr
        launch_shared(("shared", at_all), rows, shared_k, shared_v, found, lse)
        y = own if out is None else out
        arrays = found, lse, own, own_lse, y, merged_lse
        merge.launch_at(("merge", at_all, merged_lse.data.ptr), arrays)
        return (y, merged_lse) if return_lse else y
    target = arguments.target_of("q", q)
    arguments.check_flags(return_lse=return_lse)
    keys, values = _check_shared(q, shared_k, shared_v, k_cache, v_cache, layout)
    if out is not None:
        given = {
            "q": q, "shared_k": shared_k, "shared_v": shared_v, "k_cache": k_cache,
            "v_cache": v_cache, "seq_lens": seq_lens, "block_table": block_table,
            "k_scale": k_scale, "v_scale": v_scale,
        }  # fmt: skip
        others = {name: x for name, x in given.items() if isinstance(x, target.xp.ndarray)}
        arguments.check_new_out(out, (*q.shape[:3], values.shape[3]), q.dtype, others)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    own_options: dict[str, Any] = {
        "seq_lens": seq_lens, "block_table": block_table, "layout": layout, "k_scale": k_scale,
        "v_scale": v_scale, "config": config, **options,
    }  # fmt: skip
    own, own_lse = decode_attention(q, k_cache, v_cache, return_lse=True, **own_options)
    # Requests of the other two calls are not recorded: tuning passes what it tries as `config`.
    with arguments.on_device(target), choice.recording():
        by_head = q.swapaxes(0, 1)
        is_copied = not _has_rows(q)
        rows = _as_rows(packed(by_head) if is_copied else by_head)
        if rows.shape[2] <= MAX_QUERIES:
            found, lse = decode_attention(
                rows, keys, values, causal=False, return_lse=True, **options
            )
        else:
            found, lse = attention(rows, keys, values, return_lse=True, **options)
        batch, heads, count, dim_v = own.shape
        found = found.reshape(heads, batch, count, dim_v).swapaxes(0, 1)
        lse = lse.reshape(heads, batch, count).swapaxes(0, 1)
        y = own if out is None else out
        _, merged_lse = merge_attention(found, lse, own, own_lse, out=y)
        if key is not None:
            # A plan is None if its arrays were copied: every call must copy them again.
            own_plan = cached_decode(q, k_cache, v_cache, **own_options)
            launch_shared = _cached_shared(rows, keys, values, **options)
            merge = cached_merge(found, lse, own, own_lse, y)
            if own_plan is not None and launch_shared is not None and merge is not None:
                of_rows, of_results = (own.shape[:3], _FLOAT32), (own.shape, own.dtype)
                parts = [of_rows, of_results, of_rows]  # of each call, and what is not returned
                parts += [] if return_lse else [of_rows]
                parts += [] if out is None else [of_results]
                makes = maker(target.xp), target.xp.cuda.alloc, Pieces.of(*parts)
                plans.remember(key, (*makes, own_plan, launch_shared, merge, is_copied))
    return (y, merged_lse) if return_lse else y


def _check_shared(
    q: Array, k: Array, v: Array, k_cache: Array, v_cache: Array, layout: Any
) -> tuple[Array, Array]:
    """k and v as "hnd".  Raises TypeError, NotImplementedError and ValueError."""
    names = "shared_k", "shared_v"
    keys, values = check_caches(q, k, v, layout, False, ndim=4, names=names, of_8_bits=False)
    if k.shape[0] != 1:
        raise ValueError(f"shared_k must have one sequence, of all; got shape {k.shape}")
    check_keys(keys.shape[2])
    heads = 2 if layout == "nhd" else 1
    for name, x, cache in zip(names, (k, v), (k_cache, v_cache), strict=True):
        if getattr(cache, "ndim", 0) != 4:
            continue  # decode_attention raises the error
        if (x.shape[heads], x.shape[3]) != (cache.shape[heads], cache.shape[3]):
            raise ValueError(
                f"{name} must have the caches' KV heads and last dim, {cache.shape[heads]} and "
                f"{cache.shape[3]}; got shape {x.shape} with layout={layout!r}"
            )
    return keys, values


def _has_rows(q: Array) -> bool:
    """Whether the queries of a head, sequence after sequence, are rows at one stride."""
    batch, _, count, _ = q.shape
    return batch <= 1 or count <= 1 or q.strides[0] == count * q.strides[2]


def _as_rows(by_head: Array) -> Array:
    """(H, B, Sq, D) as (1, H, B Sq, D)."""
    heads, batch, count, dim = by_head.shape
    return by_head.reshape(1, heads, batch * count, dim)


def _cached_shared(
    rows: Array, keys: Array, values: Array, **options: Any
) -> Callable[..., None] | None:
    """The cached launch(places, rows, keys, values, out, lse) over the shared keys, or None."""
    if rows.shape[2] > MAX_QUERIES:
        return cached_attention(rows, keys, values, **options)
    plan = cached_decode(rows, keys, values, causal=False, **options)
    if plan is None:
        return None
    absent = None, None, None, None, ()
    return lambda places, q, k, v, out, lse: plan.launch(
        places, q, k, v, None, None, out, lse, *absent
    )


# --- the op's record -----------------------------------------------------------------------------


OP = Op(
    name="cascade_attention",
    run=cascade_attention,
    reference=reference.cascade_attention,
    bound=reference.cascade_attention_bound,
    draw_problem=problems.draw_problem,
    bench_problem=problems.bench_problem,
    bench_shapes=problems.bench_shapes,
    inputs=problems.make_inputs,
    work=problems.work,
    variants=problems.variants,
    configs=problems.configs,
    variant=problems.variant,
    sample=problems.sample,
    dtypes=("float16", "bfloat16", "bfloat16:float8_e4m3fn", "bfloat16:int8"),
)
