"""Argument checks of rope_and_cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import arguments, dtypes
from ...attention.rope_config import CACHE_DTYPES, DTYPES, LAYOUTS, MAX_DIM
from ...typing import Factor
from . import cache_scales

# Dims of a contiguous and of a paged cache, by layout.
_DIMS = {
    "hnd": ("(B, Hkv, Smax, D)", "(num_pages, Hkv, page, D)"),
    "nhd": ("(B, Smax, Hkv, D)", "(num_pages, page, Hkv, D)"),
}


def check_eps(eps: Factor | None) -> float:
    number = arguments.finite_float("eps", eps, 1e-6)
    if number < 0:
        raise ValueError(f"eps must be at least 0; got {number}")
    return number


def check_arrays(given: dict[str, Any], layout: Any) -> None:
    """Check the array arguments, by name, except scales and out.

    Raises TypeError and ValueError.
    """
    _check_places(given)
    _check_heads(given)
    _check_others(given)
    _check_cache(given, layout)


def _check_places(given: dict[str, Any]) -> None:
    """Check that all arrays are on q's device, and that those which exclude or need each other are
    given so.  Raises TypeError and ValueError."""
    q = given["q"]
    for name in ("k", "v", "positions"):
        arguments.same_place(name, given[name], q, "q")
    for name, x in given.items():
        if x is not None and name != "q":
            arguments.same_place(name, x, q, "q")
    if (given["k_cache"] is None) != (given["v_cache"] is None):
        raise ValueError("k_cache and v_cache must both be given, or neither")
    if (given["inv_freq"] is None) == (given["cos_sin"] is None):
        raise ValueError("inv_freq or cos_sin must be given, and not both")


def _check_heads(given: dict[str, Any]) -> None:
    q, k, v, k_cache, v_cache = (given[name] for name in ("q", "k", "v", "k_cache", "v_cache"))
    dtypes.resolve(q.dtype, "q's dtype", DTYPES)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}; got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (B, S, heads, D); got {x.shape}")
    if q.shape[3] > MAX_DIM:
        raise ValueError(f"q's last dim must be at most {MAX_DIM}; got {q.shape[3]}")
    if (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3]):
        raise ValueError(f"k must have q's shape {q.shape} but for its heads; got {k.shape}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {k.shape}; got {v.shape}")
    if k_cache is not None:
        dtypes.resolve(k_cache.dtype, "k_cache's dtype", (q.dtype, *CACHE_DTYPES))
        if v_cache.dtype != k_cache.dtype:
            raise TypeError(
                f"v_cache must have k_cache's dtype {k_cache.dtype}; got {v_cache.dtype}"
            )


def _check_others(given: dict[str, Any]) -> None:
    """Check positions, inv_freq or cos_sin, and weights.  Raises TypeError and ValueError."""
    q, positions = given["q"], given["positions"]
    if positions.dtype != np.int32:
        raise TypeError(f"positions must have dtype int32; got {positions.dtype}")
    if positions.shape not in (q.shape[:2], q.shape[1:2]):
        raise ValueError(
            f"positions must have shape {q.shape[:2]} or {q.shape[1:2]}; got {positions.shape}"
        )
    name, shape, ndim = "inv_freq", "(R,)", 1
    if given["cos_sin"] is not None:
        name, shape, ndim = "cos_sin", "(P, 2 R)", 2
    rotation = given[name]
    if rotation.dtype != np.float32:
        raise TypeError(f"{name} must have dtype float32; got {rotation.dtype}")
    pairs, odd = divmod(rotation.shape[-1], ndim) if rotation.ndim == ndim else (0, 0)
    if odd or not 1 <= pairs <= q.shape[3] // 2 or not rotation.size:
        raise ValueError(
            f"{name} must have shape {shape}, R from 1 to half of a head's {q.shape[3]} numbers; "
            f"got {rotation.shape}"
        )
    if ndim == 2 and rotation.shape[0] >= 2**31:
        raise ValueError(f"cos_sin must have less than 2^31 rows; got {rotation.shape[0]}")
    for name in ("q_weight", "k_weight"):
        weight = given[name]
        if weight is None:
            continue
        dtypes.resolve(weight.dtype, f"{name}'s dtype", DTYPES)
        if weight.shape != q.shape[3:]:
            raise ValueError(f"{name} must have shape {q.shape[3:]}; got {weight.shape}")


def _check_cache(given: dict[str, Any], layout: Any) -> None:
    k, k_cache, v_cache, table = (given[n] for n in ("k", "k_cache", "v_cache", "block_table"))
    arguments.check_choice("layout", layout, LAYOUTS)
    if k_cache is None:
        if table is not None:
            raise ValueError("block_table goes with k_cache and v_cache")
        return
    names = {name: _DIMS[name][table is not None] for name in (layout, *LAYOUTS)}
    heads = 1 if layout == "hnd" else 2
    batch, _, kv_heads, dim = k.shape
    shape = k_cache.shape
    if len(shape) != 4 or shape[heads] != kv_heads or shape[3] != dim:
        first, other = (f"{dims} with layout={name!r}" for name, dims in names.items())
        raise ValueError(
            f"k_cache must be {first}, Hkv {kv_heads} and D {dim} (or {other}); got {shape}"
        )
    if v_cache.shape != shape:
        raise ValueError(f"v_cache must have k_cache's shape {shape}; got {v_cache.shape}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        arguments.check_writable(name, cache)
    if arguments.overlap(k_cache, v_cache):
        raise ValueError("k_cache must not overlap v_cache")
    if table is None:
        if shape[0] != batch:
            raise ValueError(f"caches and q differ in the batch: {shape[0]} and {batch}")
        return
    if table.dtype != np.int32:
        raise TypeError(f"block_table must have dtype int32; got {table.dtype}")
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must have shape ({batch}, max_pages); got {table.shape}")


def check_scales(
    given: dict[str, Any], k_scale: Factor | None, v_scale: Factor | None
) -> tuple[tuple[Any, Any], tuple[float, float]]:
    """(arrays, numbers) of the scales, see cache_scales.check_scales."""
    q, cache, kv_heads = given["q"], given["k_cache"], given["k"].shape[2]
    arrays, numbers = cache_scales.check_scales(
        q, cache, kv_heads, k_scale, v_scale, "as an output"
    )
    outputs = [x is not None and x.ndim == 3 for x in arrays]
    if sum(outputs) == 1:
        raise ValueError("k_scale and v_scale must both be outputs, or neither")
    if all(outputs):
        for name, scale in zip(("k_scale", "v_scale"), arrays, strict=True):
            arguments.check_writable(name, scale)
        if arguments.overlap(*arrays):
            raise ValueError("k_scale must not overlap v_scale")
    return arrays, numbers
