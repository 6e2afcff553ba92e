"""Argument checks of attention, and the memory layout of its arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ... import arguments, dtypes
from ...arrays import in_elements, packed, steps_of
from ...attention.attention_plan import DTYPES, has_half_scores
from ...attention.attention_task import BIAS_MASK, BLOCK_MASK, BOOL_MASK, HEAD_DIMS, MaskPlace
from ...attention.block_mask import BlockMask
from ...numerics import namespace
from ...targets import Target, address_of, is_cupy
from ...typing import Array, Factor

ALIGNMENTS = ("top_left", "bottom_right")
_ALIGNED = 8  # elements per vector that kernels load or copy
_BIASES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_LARGEST_STEP = 2**31 - 1  # row stride in elements, 32 bits in kernels
_LARGEST = 2**31 - 1024  # sequence length: positions are 32-bit integers


def check_operands(q: Array, k: Array, v: Array, ndim: int) -> None:
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


def check_shapes(q: Array, k: Array, v: Array) -> tuple[int, ...]:
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
        if not 0 < size <= HEAD_DIMS[-1]:
            raise ValueError(f"{name} must be 1 to {HEAD_DIMS[-1]}; got {size}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q's {heads} heads must be a multiple of k's {kv_heads}")
    if max(sq, sk) > _LARGEST:
        raise ValueError(f"lengths must be at most {_LARGEST}; got {sq} and {sk}")
    return batch, heads, sq, dim, kv_heads, sk, v.shape[3]


def check_causal_align(align: Any, *allowed: str | None) -> None:
    arguments.check_choice("causal_align", align, allowed)


def check_offset(align: Any, input_pos: Any, sq: int, sk: int, needed_by: str | None) -> int | None:
    """Return the offset: query i is at position i + offset among the keys.

    needed_by: the argument that depends on positions; None: none does, and the offset is None.
    Raises TypeError and ValueError.
    """
    check_causal_align(align, *ALIGNMENTS, None)
    if input_pos is not None:
        if isinstance(input_pos, (bool, np.bool_)) or not isinstance(input_pos, (int, np.integer)):
            raise TypeError(f"input_pos must be an integer; got {type(input_pos).__name__}")
        if input_pos < 0:
            raise ValueError(f"input_pos must not be negative; got {input_pos}")
    if needed_by is None:
        return None
    if align is None and input_pos is None and sq != sk:
        ways = (f"{a!r} {_keys_seen(a, sq, sk)}" for a in ALIGNMENTS)
        of_causal = "" if needed_by == "causal=True" else "of causal queries, "
        raise ValueError(
            f"{needed_by} with {sq} queries and {sk} keys needs causal_align or input_pos: "
            + of_causal + ", ".join(ways)
        )  # fmt: skip
    return int(input_pos or 0) + (sk - sq if align == "bottom_right" else 0)


def _keys_seen(align: str, sq: int, sk: int) -> str:
    """For error messages: the keys that the first and the last causal query see."""
    if not sq:
        return "(there are no queries)"

    def keys(query: int) -> str:
        last = min(query + (sk - sq if align == "bottom_right" else 0), sk - 1)
        return "no key" if last < 0 else f"keys 0 to {last}" if last else "key 0"

    seen = (f"query {i} sees {keys(i)}" for i in dict.fromkeys((0, sq - 1)))
    return f"({', '.join(seen)})"


def check_scale(scale: Factor | None, dim: int) -> float:
    scale = arguments.finite_float("scale", scale, 1 / math.sqrt(dim))
    if abs(scale) * math.log2(math.e) > float(np.finfo(np.float32).max):
        raise ValueError(f"scale * log2(e) must be finite in FP32; got scale {scale}")
    return scale


def check_accumulate(qk_accumulate: Any, dtype: np.dtype, target: Target) -> bool:
    arguments.check_choice("qk_accumulate", qk_accumulate, ("float32", "float16"))
    half_scores = qk_accumulate == "float16"
    if half_scores and not has_half_scores(dtype, target.arch):
        raise NotImplementedError(
            f"qk_accumulate='float16' is for float16 on NVIDIA GPUs and the host; got {dtype} on "
            f"{target.arch}"
        )
    return half_scores


def check_array_mask(mask: Any, q: Array, shape: tuple[int, ...]) -> Any:
    """`mask` broadcast to `shape`.  Raises TypeError and ValueError."""
    arguments.same_place("mask", mask, q, "q")
    if mask.dtype != np.bool_ and mask.dtype not in _BIASES:
        raise TypeError(
            f"mask must be bool (True = keep), a float16, bfloat16 or float32 bias, or a "
            f"BlockMask; got {mask.dtype}"
        )
    xp = namespace(mask)
    try:
        mask = xp.broadcast_to(mask, shape)
    except ValueError:
        raise ValueError(f"mask must broadcast to {shape}; got shape {mask.shape}") from None
    if not in_elements(mask):
        mask = packed(mask)
    return mask


def check_block_mask(mask: BlockMask, q: Array, shape: tuple[int, ...]) -> None:
    arguments.same_place("mask", mask.kv_indices, q, "q")
    if (mask.seq_len_q, mask.seq_len_k) != shape[2:]:
        raise ValueError(
            f"mask is of {mask.seq_len_q} queries and {mask.seq_len_k} keys; there are {shape[2]} "
            f"and {shape[3]}"
        )
    for name, size, wanted in zip("BH", mask.batch_shape, shape, strict=False):
        if size not in (1, wanted):
            raise ValueError(f"mask's {name} must be 1 or {wanted}; got {size}")


def check_length(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {type(value).__name__}")
    if not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} must be 0 to {_LARGEST}; got {value}")
    return int(value)


def check_cu_seqlens(name: str, cu: Array, q: Array, rows: int, longest: int) -> Array:
    """Check offsets, int32 (B + 1,), the contents only of numpy arrays; return `cu`.

    rows: the last offset.  longest: the longest sequence allowed.  Raises TypeError and ValueError.
    """
    arguments.target_of(name, cu)
    if is_cupy(cu):
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


def arrays_of(q: Array, k: Array, v: Array, mask: Any) -> dict[str, Any]:
    """The arrays that the result must not overlap."""
    if isinstance(mask, BlockMask):
        return {"q": q, "k": k, "v": v, "mask's tiles": mask.partial_tiles}
    return {"q": q, "k": k, "v": v, "mask": mask}


def padded_size(dim: int, step: int = 8) -> int:
    """The head size that kernels compute: dim rounded up to a multiple of `step`."""
    return -(-dim // step) * step


def walks(x: Array) -> bool:
    """Whether kernels can read or write the (B, H, S, D) array in place."""
    if x.shape[3] % 8:
        return False
    itemsize = x.dtype.itemsize
    outer = [s for size, s in zip(x.shape[:3], x.strides, strict=False) if size > 1]
    if x.shape[2] > 1 and abs(x.strides[2]) > _LARGEST_STEP * itemsize:
        return False
    alignment = _ALIGNED * itemsize
    return x.strides[3] == itemsize and not any(s % alignment for s in (address_of(x), *outer))


def starts_at(mask: Any, given: Any) -> bool:
    """Whether a broadcast mask is a view of the given array, not a copy."""
    return given is not None and address_of(mask) == address_of(given)


def readable(x: Array) -> Array:
    """x if kernels can read it in place, else a copy; rows are zero-padded to 8 elements."""
    if x.shape[3] % 8:
        return padded_to(x, 8)
    return x if x.size == 0 or walks(x) else packed(x)


def padded_to(x: Array, step: int) -> Array:
    """x, or a copy with rows zero-padded to a multiple of `step` elements."""
    if x.shape[3] % step == 0:
        return x
    codes = x.view(np.uint8) if x.itemsize == 1 else x  # CuPy cannot copy FP8
    made = namespace(x).zeros((*x.shape[:3], padded_size(x.shape[3], step)), codes.dtype)
    made[..., : x.shape[3]] = codes
    return made.view(x.dtype)


def steps(x: Array) -> tuple[int, int, int]:
    """Strides of batch, head and row in elements; 0 along dims of size 1."""
    batch, head, row = (step // x.dtype.itemsize for step in steps_of(x)[:3])
    return batch, head, row


def mask_arrays(mask: Any) -> tuple[tuple[Any, ...], MaskPlace]:
    """(the mask arrays in the order of the kernels' arguments, their MaskPlace)."""
    if mask is None:
        return (None,) * 5, MaskPlace()
    if not isinstance(mask, BlockMask):
        kind = BOOL_MASK if mask.dtype == np.bool_ else BIAS_MASK
        strides = tuple(step // mask.dtype.itemsize for step in steps_of(mask))
        return (mask, None, None, None, None), MaskPlace(kind, mask.dtype, strides)
    types = mask.block_mask_types
    (b, h), (rows, cols) = types.shape[:2], types.shape[2:]
    place = MaskPlace(
        BLOCK_MASK, None,
        blocks=(mask.q_block.bit_length() - 1, mask.kv_block.bit_length() - 1, cols),
        block_strides=(rows * h if b > 1 else 0, rows if h > 1 else 0),
        causal_offset=min(max(mask.causal_offset, -mask.seq_len_q), mask.seq_len_k),
    )  # fmt: skip
    return block_arrays(mask), place


def block_arrays(mask: Any) -> tuple[Array, ...]:
    """The arrays of a BlockMask in the order of the kernels' arguments."""
    return (mask.partial_tiles, mask.kv_num_blocks, mask.kv_indices, mask.block_mask_types,
            mask.partial_indices)  # fmt: skip
