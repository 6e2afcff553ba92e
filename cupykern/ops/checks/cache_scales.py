"""Checks of the scales of 8-bit KV caches."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import arguments
from ...typing import Array, Factor

_LARGEST = 2.0**126  # its reciprocal is a normal number


def _number_or_array(scale: Any, q: Array) -> tuple[Any, Any]:
    """A scale as (number, None), or as (None, array) if kernels read it (arguments.is_number)."""
    if not hasattr(scale, "dtype") or isinstance(scale, np.ma.MaskedArray):
        return scale, None
    return (scale.item(), None) if arguments.is_number(scale, q) else (None, scale)


def numbers_and_arrays(
    q: Array, k_scale: Factor | None, v_scale: Factor | None
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(numbers, arrays) of both scales; None in the place of the other kind."""
    k_number, k_array = _number_or_array(k_scale, q)
    v_number, v_array = _number_or_array(v_scale, q)
    return (k_number, v_number), (k_array, v_array)


def as_hnd(arrays: tuple[Any, Any], numbers: tuple[float, float], layout: str) -> tuple[Any, Any]:
    """(k's scale, v's scale) from the results of check_scales: each a number, or an array whose
    heads come before its keys."""
    of_k, of_v = (
        number if x is None else x.swapaxes(1, 2) if x.ndim == 3 and layout == "nhd" else x
        for x, number in zip(arrays, numbers, strict=True)
    )
    return of_k, of_v


def check_scales(
    q: Array,
    cache: Array | None,
    kv_heads: int,
    k_scale: Factor | None,
    v_scale: Factor | None,
    of_tokens: str,
) -> tuple[tuple[Any, Any], tuple[float, float]]:
    """Check k's and v's scales; return (arrays, numbers).

    Each scale is in one of the two: the other has None (arrays) or 1.0 (numbers) in its place.
    cache: k's cache as the caller gave it; None: the call has none and takes no scales.
    of_tokens: what error messages call an array of the cache's shape without D.
    Raises TypeError and ValueError.
    """
    arrays: list[Any] = []
    numbers: list[float] = []
    of_cache: Any = cache  # an array wherever a scale is one
    scale: Any
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and (cache is None or cache.dtype == q.dtype):
            raise ValueError(f"{name} is for caches of 8 bits")
        if scale is None or arguments.is_number(scale, q):
            number = arguments.finite_float(name, scale, 1.0)
            if not 0 < abs(number) <= _LARGEST:
                raise ValueError(f"{name} must not be 0, nor larger than 2^126; got {number}")
            arrays.append(None)
            numbers.append(number)
            continue
        arguments.same_place(name, scale, q, "q")
        if scale.dtype != np.float32:
            raise TypeError(
                f"{name} must be a number or a float32 array; got an array of {scale.dtype}"
            )
        allowed = ((), (kv_heads,), of_cache.shape[:3])
        if scale.shape not in allowed:
            raise ValueError(
                f"{name} must have shape {', '.join(map(str, allowed[:2]))} or, {of_tokens}, "
                f"{allowed[2]}; got {scale.shape}"
            )
        arrays.append(scale)
        numbers.append(1.0)
    return (arrays[0], arrays[1]), (numbers[0], numbers[1])
