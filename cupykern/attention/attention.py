"""attention, attention_varlen and scaled_dot_product_attention: fused, in one read of q, k and v."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments, plans
from ..arrays import assign, in_elements, maker, packed
from ..numerics import namespace
from ..targets import is_cupy
from .attention_arguments import (
    ALIGNMENTS,
    arrays_of,
    block_arrays,
    check_accumulate,
    check_array_mask,
    check_block_mask,
    check_causal,
    check_causal_align,
    check_cu_seqlens,
    check_length,
    check_operands,
    check_scale,
    check_shapes,
    mask_arrays,
    starts_at,
    steps,
    walkable,
    walks,
)
from .attention_hopper import AttentionHopperConfig
from .attention_plan import AttentionConfig, attention_plan
from .attention_task import AttentionTask
from .block_mask import BlockMask

_find = plans.finder("attention", arrays=4, options=11)
_find_blocks = plans.finder("attention", arrays=5, options=11)
_find_varlen = plans.finder("attention_varlen", arrays=5, options=7)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_align: str | None = None,
    mask: Any = None,
    input_pos: int | None = None,
    scale: Any = None,
    layout: str = "bhsd",
    qk_accumulate: str = "float32",
    return_lse: bool = False,
    return_row_stats: bool = False,
    algorithm: str = "flash",
    out: Any = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Any:
    """softmax(scale * q k^T + bias, over the keys that are kept) v, for every batch and head.

    q: (B, H, Sq, D).  k: (B, Hkv, Sk, D).  v: (B, Hkv, Sk, Dv).  All float16 or all bfloat16; H a multiple
        of Hkv: query head h has the keys and values of head h // (H // Hkv).  D and Dv: multiples of 8 up
        to 256.
    causal: row i keeps keys j <= i + offset.  causal_align: "top_left", offset 0, or "bottom_right",
        offset Sk - Sq.  input_pos: an integer >= 0 that is added to the offset.  Where Sq != Sk, one of
        these two must be given; None of both: offset 0.
    mask: a bool array, True = keep, or a float16, bfloat16 or float32 bias, added to the scaled scores
        (-inf: not kept), that broadcasts to (B, H, Sq, Sk); or a `BlockMask` of the lengths Sq and Sk, whose
        masked blocks are skipped.  It applies beside causal.
    scale: a finite real number.  None: 1 / sqrt(D).
    layout: "bhsd", or "bshd": q (B, Sq, H, D), k and v (B, Sk, Hkv, D), the result alike.
    qk_accumulate: "float16" sums q k^T in FP16, of float16 on NVIDIA GPUs and the host: less exact, and
        infinite beyond 65504.
    algorithm: "flash", or "naive": all scores in memory, in three kernels, for comparison.
    out: array to write into, of the result's shape and dtype, apart from all operands.
    config: an AttentionConfig or AttentionHopperConfig, or None, the tuned or default one; "naive" has none.

    Returns (B, H, Sq, Dv) of q's dtype; with return_lse also the logarithm of the sum of the exponentials of
    the scaled scores; with return_row_stats then row_max, the largest of these scores that is a number, and
    row_sum, the sum of exp(score - row_max): FP32 (B, H, Sq), in either layout.

    Scores, softmax and sums in FP32; probabilities are rounded to q's dtype before they are multiplied by v.
    A row without keys gives zeros, -inf, -inf and 0.  Keys that a row does not keep do not reach it, whatever
    they hold; a NaN or infinity of v at such a key may make NaN of it if the key's tile is computed and some
    row keeps a key at or after it (0 * NaN), but not where v is beyond Sk or in blocks that are skipped.
    Any strides: arrays whose rows are contiguous and begin at multiples of 16 bytes are read where they are,
    others are copied.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scale, config, devices) and
    NotImplementedError (float32, FP16 sums where there are none).  Error bound:
    `reference.attention_bound`.
    """
    array_mask, arrays, sizes = mask, (q, k, v, mask), None
    if isinstance(mask, BlockMask):
        array_mask, sizes = None, mask.sizes
        arrays = q, k, v, mask.block_mask_types, mask.partial_tiles
    options = (causal, causal_align, input_pos, scale, layout, qk_accumulate, return_lse,
               return_row_stats, algorithm, config, sizes)  # fmt: skip
    key, known, places = (_find if sizes is None else _find_blocks)(*arrays, *options, out)
    if known is not None:
        # Where its arrays lie decides about all checks: one look-up.
        target, out_shape, stats_shape, plan = known
        y = maker(target.xp)(out_shape, q.dtype) if out is None else out
        if not (return_lse or return_row_stats or sizes):
            if mask is None:
                plan.launch(target.xp, (q, k, v, y), (*places, y.data.ptr))
            else:
                nothing = None, None, None, array_mask, None, None, None, None, None, None
                plan.launch(target.xp, (q, k, v, y, *nothing))
            return y
        stats = _empty_stats(target.xp, stats_shape, return_lse, return_row_stats)
        arrays = (array_mask, None, None, None, None) if sizes is None else block_arrays(mask)
        plan.launch(target.xp, (q, k, v, y, *stats, *arrays, None, None))
        return _results(y, stats)
    target = arguments.target_of("q", q)
    check_operands(q, k, v, 4)
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout must be 'bhsd' or 'bshd'; got {layout!r}")
    if algorithm not in ("flash", "naive"):
        raise ValueError(f"algorithm must be 'flash' or 'naive'; got {algorithm!r}")
    if algorithm == "naive" and (config is not None or qk_accumulate == "float16"):
        raise ValueError("the naive algorithm has no config and sums in FP32")
    places = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    heads_first = tuple(x.transpose(places) for x in (q, k, v))
    batch, heads, sq, dim, kv_heads, sk, dim_v = check_shapes(*heads_first)
    offset = check_causal(causal, causal_align, input_pos, sq, sk)
    arguments.check_flags(return_lse=return_lse, return_row_stats=return_row_stats)
    scale = check_scale(scale, dim)
    half_scores = check_accumulate(qk_accumulate, q.dtype, target)
    shape = (batch, heads, sq, dim_v)
    if mask is not None and not isinstance(mask, BlockMask):
        mask = check_array_mask(mask, q, (batch, heads, sq, sk))
    elif mask is not None:
        check_block_mask(mask, q, (batch, heads, sq, sk))
    out_shape = tuple(shape[i] for i in places)
    if out is not None:
        arguments.check_new_out(out, out_shape, q.dtype, arrays_of(q, k, v, mask))
    with arguments.on_device(target):
        xp = target.xp
        y = xp.empty(out_shape, q.dtype) if out is None else out
        stats = _empty_stats(xp, shape[:3], return_lse, return_row_stats)
        if 0 not in shape:
            q, k, v = (walkable(x) for x in heads_first)
            into = y.transpose(places)
            place = into if walks(into) else xp.empty(shape, q.dtype)
            arrays, mask_place = mask_arrays(mask)
            copied = any(x is not y for x, y in zip((q, k, v), heads_first, strict=True))
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, sq, sk, dim, dim_v),
                *map(steps, (q, k, v, place)), scale, offset, mask_place,
                half_scores=half_scores, naive=algorithm == "naive",
            )  # fmt: skip
            plan = attention_plan(target, task, config)
            plan.launch(xp, (q, k, v, place, *stats, *arrays, None, None))
            if place is not into:
                assign(into, place)
            elif not copied and (array_mask is None or starts_at(mask, array_mask)):
                plans.remember(key, (target, out_shape, shape[:3], plan))
    return _results(y, stats)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    causal_align: str = "bottom_right",
    scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    config: AttentionConfig | AttentionHopperConfig | None = None,
) -> Any:
    """`attention` of sequences of different lengths, packed one after another.

    q: (rows, H, D).  k: (rows of keys, Hkv, D).  v: (rows of keys, Hkv, Dv).
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,): rows cu_seqlens[i] to cu_seqlens[i + 1] are sequence i.
        numpy arrays are checked: from 0 to all rows, not decreasing, no sequence longer than its maximum.
        cupy arrays are not read back: a kernel clamps them to the rows that there are and sequences to
        their maximum, and rows of q that belong to no sequence are not written.
    max_seqlen_q, max_seqlen_k: the longest sequences.
    causal: row i of a sequence keeps keys j <= i + offset, with "bottom_right" its keys' number less its
        queries'; with "top_left" 0.

    Returns (rows, H, Dv) of q's dtype; with return_lse also FP32 (H, rows).  The rest as for `attention`.
    Error bound: `reference.attention_varlen_bound`.
    """
    key, known, places = _find_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, causal_align,
        scale, return_lse, config, out,
    )  # fmt: skip
    if known is not None:
        make, out_shape, launch = known
        y = make(out_shape, q.dtype) if out is None else out
        lse = make(out_shape[1::-1], np.float32) if return_lse else None
        places = (*places, y.data.ptr, lse.data.ptr if return_lse else None)
        launch(places, q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k)
        return (y, lse) if return_lse else y
    target = arguments.target_of("q", q)
    check_operands(q, k, v, 3)
    heads_first = tuple(x[None].transpose(0, 2, 1, 3) for x in (q, k, v))
    _, heads, rows, dim, kv_heads, key_rows, dim_v = check_shapes(*heads_first)
    check_causal_align(causal_align, *ALIGNMENTS)
    arguments.check_flags(causal=causal, return_lse=return_lse)
    scale = check_scale(scale, dim)
    longest_q = check_length("max_seqlen_q", max_seqlen_q)
    longest_k = check_length("max_seqlen_k", max_seqlen_k)
    cu_q = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, rows, longest_q)
    cu_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, key_rows, longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one shape; got {cu_q.shape}, {cu_k.shape}"
        )
    if out is not None:
        steering = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        there = {name: x for name, x in steering.items() if is_cupy(x) == is_cupy(out)}
        others = {"q": q, "k": k, "v": v, **there}
        arguments.check_new_out(out, (rows, heads, dim_v), q.dtype, others)
    with arguments.on_device(target):
        xp = target.xp
        out_shape = rows, heads, dim_v
        y = xp.empty(out_shape, q.dtype) if out is None else out
        lse = xp.empty((heads, rows), np.float32) if return_lse else None
        batch = cu_q.size - 1
        if y.size and batch and longest_q:
            q, k, v = (walkable(x) for x in heads_first)
            into = y[None].transpose(0, 2, 1, 3)
            place = into if walks(into) else xp.empty(into.shape, q.dtype)
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, min(longest_q, rows), min(longest_k, key_rows)),
                *(dim, dim_v), *map(steps, (q, k, v, place)), scale, 0 if causal else None,
                totals=(rows, key_rows), bottom_right=causal_align == "bottom_right",
            )  # fmt: skip
            cu_q, cu_k = (
                x
                if namespace(x) is xp and x.flags.c_contiguous and in_elements(x)
                else packed(xp.asarray(x))
                for x in (cu_q, cu_k)
            )
            plan = attention_plan(target, task, config)
            plan.launch(xp, (q, k, v, place, lse, *(None,) * 7, cu_q, cu_k))
            here = *heads_first, into, cu_seqlens_q, cu_seqlens_k
            if place is not into:
                assign(into, place)
            elif all(a is b for a, b in zip((q, k, v, place, cu_q, cu_k), here, strict=True)):
                launch = plan.launcher(target.xp, _packed)
                plans.remember(key, (maker(target.xp), out_shape, launch))
    return (y, lse) if return_lse else y


def _packed(q: Any, k: Any, v: Any, y: Any, lse: Any, cu_q: Any, cu_k: Any) -> tuple[Any, ...]:
    """As AttentionPlan.launch takes them: without statistics of rows, or a mask's arrays."""
    return (q, k, v, y, lse, *(None,) * 7, cu_q, cu_k)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Any:
    """`attention` by the names of torch.nn.functional.scaled_dot_product_attention.

    query: (B, H, Sq, D).  key: (B, Hkv, Sk, D).  value: (B, Hkv, Sk, Dv); Hkv is H unless enable_gqa.
    attn_mask: bool, True = keep, or a bias; not together with is_causal, which keeps keys j <= i.
    Raises NotImplementedError for dropout_p other than 0, ValueError for numbers of heads that differ
    without enable_gqa and for attn_mask with is_causal, and what `attention` raises.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"there is no dropout; got dropout_p = {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None where is_causal is set")
    shapes = tuple(getattr(x, "shape", ()) for x in (query, key))
    if not enable_gqa and all(len(shape) == 4 for shape in shapes) and shapes[0][1] != shapes[1][1]:
        raise ValueError(
            f"query and key must have as many heads unless enable_gqa is set; got {shapes[0][1]} and "
            f"{shapes[1][1]}"
        )
    return attention(
        query, key, value, causal=is_causal, causal_align="top_left", mask=attn_mask, scale=scale
    )


_NO_STATS = None, None, None


def _empty_stats(xp: Any, shape: tuple[int, ...], lse: bool, row_stats: bool) -> tuple[Any, ...]:
    """lse, row_max and row_sum; None where not wanted."""
    if not lse and not row_stats:
        return _NO_STATS
    wanted = lse, row_stats, row_stats
    return tuple(xp.empty(shape, np.float32) if one else None for one in wanted)


def _results(y: Any, stats: tuple[Any, ...]) -> Any:
    if stats is _NO_STATS:
        return y
    results = (y, *(x for x in stats if x is not None))
    return results if len(results) > 1 else y
