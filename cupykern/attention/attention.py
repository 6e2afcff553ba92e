"""attention, attention_varlen and scaled_dot_product_attention: fused attention kernels."""

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
    """Scaled dot-product attention, softmax(scale * q k^T) v, in one kernel.

    >>> q = np.ones((1, 8, 128, 64), np.float16)  # numpy: on the CPU; cupy: on the GPU
    >>> k = v = np.ones((1, 2, 128, 64), np.float16)  # 4 query heads share a KV head
    >>> cupykern.attention(q, k, v, causal=True).shape
    (1, 8, 128, 64)

    Arguments:

    q: (B, H, Sq, D), float16 or bfloat16.
    k, v: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv), of q's dtype.  H is a multiple of Hkv; query head h
        uses KV head h // (H // Hkv) (grouped-query attention).  D and Dv are multiples of 8 up to
        256.
    causal: query i sees keys j <= i + offset; default: every query sees all keys.
    causal_align, input_pos: the offset.  causal_align="top_left": 0; "bottom_right": Sk - Sq, the
        last query sees all keys.  input_pos, an integer >= 0, is added: the number of keys before
        query 0.  Where Sq == Sk both may be None (offset 0); where Sq != Sk one of them is
        required.
    scale: finite real factor of the scores; None: 1 / sqrt(D).
    mask: combined with causal.  One of:
        a bool array that broadcasts to (B, H, Sq, Sk), True = keep;
        a float16, bfloat16 or float32 array that broadcasts alike, added to the scaled scores; -inf
        masks the key;
        a `BlockMask` for Sq queries and Sk keys, whose masked blocks are skipped.
    layout: "bhsd", the shapes above, or "bshd": q (B, Sq, H, D), k and v (B, Sk, Hkv, ...), result
        (B, Sq, H, Dv).
    return_lse: also return the log-sum-exp (natural log) of the scaled and biased scores of the
        keys that a query sees.
    return_row_stats: also return row_max, the largest of these scores that is not NaN, and row_sum,
        the sum of exp(score - row_max); lse = row_max + log(row_sum).
    out: array of the result's shape and dtype to write into; must not overlap an input.
    qk_accumulate: "float16" accumulates q k^T in FP16: for float16 on NVIDIA GPUs and the CPU.
        Less exact; scores beyond 65504 before the scale overflow.
    algorithm: "flash", or "naive": three kernels that store all scores, for comparison.
    config: AttentionConfig or AttentionHopperConfig; None: chosen for the shape.  Not with "naive".

    Returns out, (B, H, Sq, Dv) of q's dtype, or a tuple: out, lse if return_lse, then row_max and
    row_sum if return_row_stats.  Statistics are float32 (B, H, Sq) in both layouts.

    Scores, softmax and accumulators are FP32; probabilities are rounded to q's dtype before the
    product with v.  A query that sees no key gives zeros, lse and row_max -inf, row_sum 0.

    NaN and infinities of k reach only queries that see the key.  Those of v may also make NaN of
    other queries of a tile that is computed (0 * NaN), but never from a skipped block.

    Arrays may have any strides.  Those with rows that are not contiguous or not 16-byte aligned are
    copied first.

    Raises TypeError (wrong kind of argument or dtype), ValueError (shape, value, overlap, device,
    config; causal with Sq != Sk and no alignment) and NotImplementedError (float32 inputs,
    qk_accumulate="float16" where it is not supported).

    Formula: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.  Algorithm: Dao,
    FlashAttention-2, arXiv:2307.08691.  Error bound: `reference.attention_bound`.
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
        y = maker(xp)(out_shape, q.dtype) if out is None else out
        stats = _empty_stats(xp, shape[:3], return_lse, return_row_stats)
        if 0 not in shape:
            q, k, v = (walkable(x) for x in heads_first)
            into = y.transpose(places)
            place = into if walks(into) else maker(xp)(shape, q.dtype)
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
    """`attention` for a batch of sequences of different lengths, concatenated without padding.

    >>> q = k = v = np.ones((5, 8, 64), np.float16)  # sequences of 2 and 3 tokens
    >>> cu = np.array([0, 2, 5], np.int32)
    >>> cupykern.attention_varlen(q, k, v, cu, cu, max_seqlen_q=3, max_seqlen_k=3).shape
    (5, 8, 64)

    Arguments:

    q: (total_q, H, D), float16 or bfloat16.  k, v: (total_k, Hkv, D) and (total_k, Hkv, Dv) of q's
        dtype.  H, Hkv, D and Dv as for `attention`.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), the first row of each sequence, and at the end the
        number of rows: sequence i has rows cu_seqlens[i]:cu_seqlens[i + 1].
    max_seqlen_q, max_seqlen_k: integers, upper limits of the sequences' lengths.
    causal: query i of a sequence sees its keys j <= i + offset.  causal_align="bottom_right":
        offset is the sequence's keys minus its queries; "top_left": 0.
    scale, out, config: as for `attention`.
    return_lse: also return the log-sum-exp, float32 (H, total_q).

    Returns out, (total_q, H, Dv) of q's dtype, or (out, lse).

    Offsets in numpy arrays are checked: they must rise from 0 to the number of rows, with no
    sequence longer than its limit.  Offsets in cupy arrays are not read on the host: the kernel
    clamps them to the rows there are and lengths to the limits.  Rows that belong to no sequence
    are not written.  Accuracy, masked keys and strides as for `attention`.

    Raises TypeError, ValueError and NotImplementedError as `attention`, and ValueError for offsets
    that fail the checks.  Error bound: `reference.attention_varlen_bound`.
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
        y = maker(xp)(out_shape, q.dtype) if out is None else out
        lse = maker(xp)((heads, rows), np.float32) if return_lse else None
        batch = cu_q.size - 1
        if y.size and batch and longest_q:
            q, k, v = (walkable(x) for x in heads_first)
            into = y[None].transpose(0, 2, 1, 3)
            place = into if walks(into) else maker(xp)(into.shape, q.dtype)
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
    """`attention` with the signature of torch.nn.functional.scaled_dot_product_attention.

    query: (B, H, Sq, D).  key, value: (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); Hkv = H without
        enable_gqa.
    attn_mask: bool array, True = keep, or a bias, added to the scores; None with is_causal.
    is_causal: query i sees keys j <= i, as in torch also where Sq != Sk ("top_left").

    Raises NotImplementedError for dropout_p other than 0, ValueError for unequal numbers of heads
    without enable_gqa and for attn_mask with is_causal, and what `attention` raises.
    """
    if dropout_p != 0:
        raise NotImplementedError(f"there is no dropout; got dropout_p = {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None where is_causal is set")
    shapes = tuple(getattr(x, "shape", ()) for x in (query, key))
    if not enable_gqa and all(len(shape) == 4 for shape in shapes) and shapes[0][1] != shapes[1][1]:
        raise ValueError(
            "query and key must have as many heads unless enable_gqa is set; got "
            f"{shapes[0][1]} and {shapes[1][1]}"
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
    return tuple(maker(xp)(shape, np.float32) if one else None for one in wanted)


def _results(y: Any, stats: tuple[Any, ...]) -> Any:
    if stats is _NO_STATS:
        return y
    results = (y, *(x for x in stats if x is not None))
    return results if len(results) > 1 else y
