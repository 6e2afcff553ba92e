"""attention, attention_varlen and scaled_dot_product_attention: fused, in one read of q, k and v."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import arguments, dtypes, plans
from .attention_plan import (
    BIAS_MASK,
    BLOCK_MASK,
    BOOL_MASK,
    DTYPES,
    HEAD_DIMS,
    AttentionConfig,
    AttentionTask,
    MaskPlace,
    attention_plan,
    has_half_scores,
)
from .block_mask import BlockMask
from .numerics import namespace
from .product import address_of
from .targets import Target

_ALIGNMENT = 16  # bytes, of what asynchronous copies move
_BIASES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_LARGEST = 2**31 - 1024  # of lengths: positions are 32-bit numbers


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_align: str = "top_left",
    mask: Any = None,
    input_pos: int = 0,
    scale: Any = None,
    layout: str = "bhsd",
    qk_accumulate: str = "float32",
    return_lse: bool = False,
    return_row_stats: bool = False,
    algorithm: str = "flash",
    out: Any = None,
    config: AttentionConfig | None = None,
) -> Any:
    """softmax(scale * q k^T + bias, over the keys that are kept) v, for every batch and head.

    q: (B, H, Sq, D).  k: (B, Hkv, Sk, D).  v: (B, Hkv, Sk, Dv).  All float16 or all bfloat16; H a multiple
        of Hkv: query head h has the keys and values of head h // (H // Hkv).  D and Dv: multiples of 8 up
        to 256.
    causal: row i keeps keys j <= i + offset; offset: input_pos, with causal_align "bottom_right" (instead
        of "top_left") Sk - Sq more.
    mask: a bool array, True = keep, or a float16, bfloat16 or float32 bias, added to the scaled scores
        (-inf: not kept), that broadcasts to (B, H, Sq, Sk); or a `BlockMask` of the lengths Sq and Sk, whose
        masked blocks are skipped.  It applies beside causal.
    scale: a finite real number.  None: 1 / sqrt(D).
    layout: "bhsd", or "bshd": q (B, Sq, H, D), k and v (B, Sk, Hkv, D), the result alike.
    qk_accumulate: "float16" sums q k^T in FP16, of float16 on NVIDIA GPUs and the host: less exact, and
        infinite beyond 65504.
    algorithm: "flash", or "naive": all scores in memory, in three kernels, for comparison.
    out: array to write into, of the result's shape and dtype, apart from all operands.
    config: None, the measured one, or an AttentionConfig; "naive" has none.

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
    array_mask = None if isinstance(mask, BlockMask) else mask
    options = (causal, causal_align, input_pos, scale, layout, qk_accumulate, return_lse,
               return_row_stats, algorithm, config)  # fmt: skip
    key, known = None, None
    if mask is array_mask:
        key, known = plans.find("attention", (q, k, v, array_mask), options, out)
    if known is not None:
        # Where its arrays lie decides about all checks: one look-up.
        target, out_shape, stats_shape, plan = known
        with arguments.on_device(target):
            y = target.xp.empty(out_shape, q.dtype) if out is None else out
            stats = _empty_stats(target.xp, stats_shape, return_lse, return_row_stats)
            plan.launch(target.xp, (q, k, v, y, *stats, mask, *(None,) * 6))
        return _results(y, stats)
    target = arguments.target_of("q", q)
    _check_operands(q, k, v, 4)
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"layout must be 'bhsd' or 'bshd'; got {layout!r}")
    if algorithm not in ("flash", "naive"):
        raise ValueError(f"algorithm must be 'flash' or 'naive'; got {algorithm!r}")
    if algorithm == "naive" and (config is not None or qk_accumulate == "float16"):
        raise ValueError("the naive algorithm has no config and sums in FP32")
    places = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    heads_first = tuple(x.transpose(places) for x in (q, k, v))
    batch, heads, sq, dim, kv_heads, sk, dim_v = _check_shapes(*heads_first)
    offset = _check_causal(causal, causal_align, input_pos, sq, sk)
    scale = _check_scale(scale, dim)
    half_scores = _check_accumulate(qk_accumulate, q.dtype, target)
    shape = (batch, heads, sq, dim_v)
    if mask is not None and not isinstance(mask, BlockMask):
        mask = _check_array_mask(mask, q, (batch, heads, sq, sk))
    elif mask is not None:
        _check_block_mask(mask, q, (batch, heads, sq, sk))
    out_shape = tuple(shape[i] for i in places)
    if out is not None:
        arguments.check_new_out(out, out_shape, q.dtype, _arrays_of(q, k, v, mask))
    with arguments.on_device(target):
        xp = target.xp
        y = xp.empty(out_shape, q.dtype) if out is None else out
        stats = _empty_stats(xp, shape[:3], return_lse, return_row_stats)
        if 0 not in shape:
            q, k, v = (_walkable(xp, x) for x in heads_first)
            into = y.transpose(places)
            place = into if _walks(into) else xp.empty(shape, q.dtype)
            arrays, mask_place = _mask_arrays(mask)
            copied = any(x is not y for x, y in zip((q, k, v), heads_first, strict=True))
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, sq, sk, dim, dim_v),
                *map(_steps, (q, k, v, place)), scale, offset, mask_place,
                half_scores=half_scores, naive=algorithm == "naive",
            )  # fmt: skip
            plan = attention_plan(target, task, config)
            plan.launch(xp, (q, k, v, place, *stats, *arrays, None, None))
            if place is not into:
                into[...] = place
            elif not copied and (mask is None or _starts_at(mask, array_mask)):
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
    config: AttentionConfig | None = None,
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
    target = arguments.target_of("q", q)
    _check_operands(q, k, v, 3)
    heads_first = tuple(x[None].transpose(0, 2, 1, 3) for x in (q, k, v))
    _, heads, rows, dim, kv_heads, key_rows, dim_v = _check_shapes(*heads_first)
    _check_causal(causal, causal_align, 0, rows, key_rows)
    scale = _check_scale(scale, dim)
    longest_q = _check_length("max_seqlen_q", max_seqlen_q)
    longest_k = _check_length("max_seqlen_k", max_seqlen_k)
    cu_q = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, rows, longest_q)
    cu_k = _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, key_rows, longest_k)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one shape; got {cu_q.shape}, {cu_k.shape}"
        )
    if out is not None:
        arguments.check_new_out(out, (rows, heads, dim_v), q.dtype, {"q": q, "k": k, "v": v})
    with arguments.on_device(target):
        xp = target.xp
        y = xp.empty((rows, heads, dim_v), q.dtype) if out is None else out
        lse = xp.empty((heads, rows), np.float32) if return_lse else None
        batch = cu_q.size - 1
        if y.size and batch and longest_q:
            q, k, v = (_walkable(xp, x) for x in heads_first)
            into = y[None].transpose(0, 2, 1, 3)
            place = into if _walks(into) else xp.empty(into.shape, q.dtype)
            task = AttentionTask(
                *(q.dtype, batch, heads, kv_heads, min(longest_q, rows), min(longest_k, key_rows)),
                *(dim, dim_v), *map(_steps, (q, k, v, place)), scale, 0 if causal else None,
                totals=(rows, key_rows), bottom_right=causal_align == "bottom_right",
            )  # fmt: skip
            cu_q, cu_k = (xp.ascontiguousarray(xp.asarray(x)) for x in (cu_q, cu_k))
            plan = attention_plan(target, task, config)
            plan.launch(xp, (q, k, v, place, lse, *(None,) * 7, cu_q, cu_k))
            if place is not into:
                into[...] = place
    return (y, lse) if return_lse else y


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
    return attention(query, key, value, causal=is_causal, mask=attn_mask, scale=scale)


def _empty_stats(xp: Any, shape: tuple[int, ...], lse: bool, row_stats: bool) -> tuple[Any, ...]:
    """lse, row_max and row_sum; None where not wanted."""
    wanted = lse, row_stats, row_stats
    return tuple(xp.empty(shape, np.float32) if one else None for one in wanted)


def _results(y: Any, stats: tuple[Any, ...]) -> Any:
    results = (y, *(x for x in stats if x is not None))
    return results if len(results) > 1 else y


# --- arguments -----------------------------------------------------------------------------------


def _check_operands(q: Any, k: Any, v: Any, ndim: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.same_place(name, x, q, "q")
        if x.dtype == dtypes.float32:
            raise NotImplementedError(
                f"{name} is float32: tensor cores multiply float16 and bfloat16"
            )
        dtypes.resolve(x.dtype, f"{name}'s dtype", DTYPES)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}; got {x.dtype}")
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dims; got shape {x.shape}")


def _check_shapes(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    """(B, H, Sq, D, Hkv, Sk, Dv) of (B, H, S, D) arrays.  Raises ValueError."""
    batch, heads, sq, dim = q.shape
    kv_heads, sk = k.shape[1:3]
    if k.shape != (batch, kv_heads, sk, dim):
        raise ValueError(f"q and k must have one batch and head size; got {q.shape} and {k.shape}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k and v must have one batch, heads and length; got {k.shape} and {v.shape}"
        )
    for name, size in (("D", dim), ("Dv", v.shape[3])):
        if not 0 < size <= HEAD_DIMS[-1] or size % 8:
            raise ValueError(f"{name} must be a multiple of 8 up to {HEAD_DIMS[-1]}; got {size}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q's {heads} heads must be a multiple of k's {kv_heads}")
    if max(sq, sk) > _LARGEST:
        raise ValueError(f"lengths must be at most {_LARGEST}; got {sq} and {sk}")
    return batch, heads, sq, dim, kv_heads, sk, v.shape[3]


def _check_causal(causal: Any, align: Any, input_pos: Any, sq: int, sk: int) -> int | None:
    """The offset of causal attention, None without.  Raises TypeError and ValueError."""
    if align not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_align must be 'top_left' or 'bottom_right'; got {align!r}")
    if isinstance(input_pos, (bool, np.bool_)) or not isinstance(input_pos, (int, np.integer)):
        raise TypeError(f"input_pos must be an integer; got {type(input_pos).__name__}")
    if input_pos < 0:
        raise ValueError(f"input_pos must not be negative; got {input_pos}")
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be a bool; got {type(causal).__name__}")
    if not causal:
        return None
    offset = int(input_pos) + (sk - sq if align == "bottom_right" else 0)
    return min(max(offset, -sq), sk)  # beyond: none, or all


def _check_scale(scale: Any, dim: int) -> float:
    scale = arguments.finite_float("scale", scale, 1 / math.sqrt(dim))
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    return scale


def _check_accumulate(qk_accumulate: Any, dtype: np.dtype, target: Target) -> bool:
    if qk_accumulate not in ("float32", "float16"):
        raise ValueError(f"qk_accumulate must be 'float32' or 'float16'; got {qk_accumulate!r}")
    half_scores = qk_accumulate == "float16"
    if half_scores and not has_half_scores(dtype, target.arch):
        raise NotImplementedError(
            f"qk_accumulate='float16' is for float16 on NVIDIA GPUs and the host; got {dtype} on "
            f"{target.arch}"
        )
    return half_scores


def _check_array_mask(mask: Any, q: Any, shape: tuple[int, ...]) -> Any:
    """`mask` broadcast to `shape`.  Raises TypeError and ValueError."""
    arguments.same_place("mask", mask, q, "q")
    if mask.dtype != np.bool_ and mask.dtype not in _BIASES:
        raise TypeError(
            f"mask must be bool (True = keep), a float16, bfloat16 or float32 bias, or a BlockMask; got "
            f"{mask.dtype}"
        )
    xp = namespace(mask)
    try:
        mask = xp.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"mask must broadcast to {shape}; got shape {mask.shape}") from None
    if any(step % mask.dtype.itemsize for step in (address_of(mask), *mask.strides)):
        mask = xp.array(mask, order="C")
    return mask


def _check_block_mask(mask: BlockMask, q: Any, shape: tuple[int, ...]) -> None:
    arguments.same_place("mask", mask.kv_indices, q, "q")
    if (mask.seq_len_q, mask.seq_len_k) != shape[2:]:
        raise ValueError(
            f"mask is of {mask.seq_len_q} queries and {mask.seq_len_k} keys; there are {shape[2]} and "
            f"{shape[3]}"
        )
    for name, size, wanted in zip("BH", mask.batch_shape, shape, strict=False):
        if size not in (1, wanted):
            raise ValueError(f"mask's {name} must be 1 or {wanted}; got {size}")


def _check_length(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__}")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} must be 0 to {_LARGEST}; got {value}")
    return int(value)


def _check_cu_seqlens(name: str, cu: Any, q: Any, rows: int, longest: int) -> Any:
    """Raises TypeError and ValueError; contents are looked at in numpy arrays only."""
    if not isinstance(cu, np.ndarray):
        arguments.same_place(name, cu, q, "q")
    if cu.dtype != np.int32:
        raise TypeError(f"{name} must be int32; got {cu.dtype}")
    if cu.ndim != 1 or cu.size == 0:
        raise ValueError(f"{name} must have shape (B + 1,); got {cu.shape}")
    if isinstance(cu, np.ndarray):
        lengths = np.diff(cu.astype(np.int64))
        if cu[0] != 0 or cu[-1] != rows or (lengths < 0).any():
            raise ValueError(f"{name} must grow from 0 to {rows}; got {cu.tolist()[:16]}")
        if (lengths > longest).any():
            raise ValueError(f"{name} has a sequence of {lengths.max()}, longer than {longest}")
    return cu


def _arrays_of(q: Any, k: Any, v: Any, mask: Any) -> dict[str, Any]:
    """What the result must not overlap."""
    if isinstance(mask, BlockMask):
        return {"q": q, "k": k, "v": v, "mask's tiles": mask.partial_tiles}
    return {"q": q, "k": k, "v": v, "mask": mask}


def _walks(x: Any) -> bool:
    """Whether kernels can read or write (B, H, S, D) as it lies in memory."""
    itemsize = x.dtype.itemsize
    outer = [s for size, s in zip(x.shape[:3], x.strides, strict=False) if size > 1]
    return x.strides[3] == itemsize and not any(s % _ALIGNMENT for s in (address_of(x), *outer))


def _starts_at(mask: Any, given: Any) -> bool:
    """Whether a broadcast mask is the array that was given, and no copy."""
    return given is not None and address_of(mask) == address_of(given)


def _walkable(xp: Any, x: Any) -> Any:
    return x if x.size == 0 or _walks(x) else xp.array(x, order="C")


def _steps(x: Any) -> tuple[int, int, int]:
    """Elements from a batch, head and row to the next; 0 along dims of one."""
    steps = zip(x.shape[:3], x.strides, strict=False)
    return tuple(0 if size <= 1 else s // x.dtype.itemsize for size, s in steps)


def _mask_arrays(mask: Any) -> tuple[tuple[Any, ...], MaskPlace]:
    """What kernels take of a mask."""
    if mask is None:
        return (None,) * 5, MaskPlace()
    if not isinstance(mask, BlockMask):
        kind = BOOL_MASK if mask.dtype == np.bool_ else BIAS_MASK
        strides = tuple(s // mask.dtype.itemsize for s in mask.strides)
        return (mask, None, None, None, None), MaskPlace(kind, mask.dtype, strides)
    types = mask.block_mask_types
    (b, h), (rows, cols) = types.shape[:2], types.shape[2:]
    place = MaskPlace(
        BLOCK_MASK, None, blocks=(mask.q_block.bit_length() - 1, mask.kv_block.bit_length() - 1, cols),
        block_strides=(rows * h if b > 1 else 0, rows if h > 1 else 0),
        causal_offset=min(max(mask.causal_offset, -mask.seq_len_q), mask.seq_len_k),
    )  # fmt: skip
    arrays = (mask.partial_tiles, mask.kv_num_blocks, mask.kv_indices, types, mask.partial_indices)
    return arrays, place
