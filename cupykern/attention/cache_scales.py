"""Scales of 8-bit KV caches, without their arrays.

The Python half of kernels_cu/attention/cache_scales.cuh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays import in_elements, packed, steps_of
from ..param_structs import zeros


class ScalePlace(NamedTuple):
    """The scale of an 8-bit K or V cache: a number, or an array per token or per KV head.

    strides: an array's strides along batch or page, KV head and token, in elements.
    """

    number: float = 1.0
    strides: tuple[int, ...] = (0, 0, 0)
    per_token: bool = False


KvScales = tuple[ScalePlace, ScalePlace]  # (of k, of v)


def place_of(scale: Any) -> ScalePlace:
    """The ScalePlace of a number, or of an array in "hnd" layout."""
    if not hasattr(scale, "ndim"):
        return ScalePlace(scale)
    steps = tuple(step // 4 for step in steps_of(scale))
    if scale.ndim == 3:
        return ScalePlace(1.0, steps, True)
    return ScalePlace(1.0, (0, *(steps or (0,)), 0))


def array_of(scale: Any) -> Any:
    """The kernel's argument: None for a number."""
    return scale if hasattr(scale, "ndim") else None


def aligned_scale(scale: Any) -> Any:
    """`scale`, or a contiguous copy if it is an array whose address or strides are not multiples
    of the itemsize."""
    return packed(scale) if hasattr(scale, "ndim") and not in_elements(scale) else scale


def scale_params(scales: KvScales) -> np.ndarray:
    """The CacheScaleParams of `scales`."""
    params = zeros("attention/cache_scales.cuh", "CacheScaleParams")
    for name, scale in zip("kv", scales, strict=True):
        params[f"{name}_strides"] = scale.strides
        params[f"{name}_number"] = scale.number
        params[f"{name}_per_token"] = scale.per_token
    return params
