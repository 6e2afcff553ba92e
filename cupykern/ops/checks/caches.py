"""Checks of KV caches, contiguous or paged, shared by attention ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import arguments, dtypes
from ...attention.decode_config import CACHE_DTYPES, DTYPES, LAYOUTS, MAX_DIM, MAX_KEYS
from ...targets import is_cupy
from ...typing import Array
from .score_options import check_integers

# Dims of a contiguous and of a paged cache, by layout.
_DIMS = {
    "hnd": ("(B, Hkv, Sk, D)", "(num_pages, Hkv, page, D)"),
    "nhd": ("(B, Sk, Hkv, D)", "(num_pages, page, Hkv, D)"),
}


def check_caches(
    q: Array,
    k: Array,
    v: Array,
    layout: Any,
    paged: bool,
    *,
    ndim: int,
    names: tuple[str, str],
    of_8_bits: bool = True,
) -> tuple[Any, Any]:
    """Check k and v and return them as "hnd".

    ndim: of q, whose dim 1 is the heads.  names: of k and v in error messages.  of_8_bits: whether
    8-bit caches are allowed.  Raises TypeError, ValueError and NotImplementedError.
    """
    of_k, of_v = names
    for name, x in (("q", q), (of_k, k), (of_v, v)):
        arguments.same_place(name, x, q, "q")
        if x.dtype == dtypes.float32:
            raise NotImplementedError(
                f"{name} is float32: tensor cores multiply float16 and bfloat16; convert it"
            )
        allowed = DTYPES if x is q else (q.dtype, *(CACHE_DTYPES if of_8_bits else ()))
        dtypes.resolve(x.dtype, f"{name}'s dtype", allowed)
    if v.dtype != k.dtype:
        raise TypeError(f"{of_v} must have {of_k}'s dtype {k.dtype}; got {v.dtype}")
    for name, x, dims in (("q", q, ndim), (of_k, k, 4), (of_v, v, 4)):
        if x.ndim != dims:
            raise ValueError(f"{name} must have {dims} dims; got shape {x.shape}")
        if not 1 <= x.shape[-1] <= MAX_DIM:
            raise ValueError(f"{name}'s last dim must be 1 to {MAX_DIM}; got {x.shape[-1]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{of_k} and {of_v} differ beside their last dims: {k.shape}, {v.shape}")
    if k.shape[3] != q.shape[-1]:
        raise ValueError(f"{of_k}'s last dim must be q's, {q.shape[-1]}; got {k.shape[3]}")
    arguments.check_choice("layout", layout, LAYOUTS)
    given = k.shape
    if layout == "nhd":
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        shapes = {name: _DIMS[name][paged] for name in (layout, *LAYOUTS)}
        first, other = (f"{shape} with layout={name!r}" for name, shape in shapes.items())
        raise ValueError(
            f"q's heads must be a multiple of the caches'; got {q.shape[1]} and {k.shape[1]}: "
            f"{of_k} {given} is {first}, or {other}"
        )
    return k, v


def check_keys(count: int) -> int:
    """Return count, the most keys of a sequence.  Raises ValueError beyond MAX_KEYS."""
    if count > MAX_KEYS:
        raise ValueError(f"sequences may have at most {MAX_KEYS} keys; got {count}")
    return count


def check_table(table: Array, q: Array, batch: int, k: Array) -> int:
    """Check a block table's dtype and shape, not its contents; return its capacity in keys per
    sequence.

    k: the cache as "hnd".  Raises TypeError and ValueError.
    """
    check_integers("block_table", table, q)
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must have shape ({batch}, max_pages); got {table.shape}")
    most = check_keys(table.shape[1] * k.shape[2])
    return most if k.shape[0] else 0


def check_pages(table: Array, seq_lens: Array | None, num_pages: int, page_size: int) -> None:
    """Raise ValueError if a numpy table has an invalid page within a sequence's length.

    Arrays on the GPU are not read.
    """
    if is_cupy(table) or is_cupy(seq_lens):
        return
    used = np.ones(table.shape, bool)
    if seq_lens is not None:
        pages = -(-seq_lens.astype(np.int64) // max(page_size, 1))
        used = np.arange(table.shape[1]) < pages[:, None]
    wrong = table[used & ((table < 0) | (table >= num_pages))]
    if wrong.size:
        raise ValueError(
            f"block_table must hold pages from 0 to {num_pages - 1} where it is used; "
            f"got {wrong[0]}"
        )
