"""Scales of 8-bit KV caches in FP64, and what they add to the errors of attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics import as_float64, namespace
from ..typing import Array


def of_tokens(scale: Any, cache: Array, layout: str) -> Array:
    """The scale of each token of `cache`, (B or num_pages, Hkv, keys, D): (..., 1) in FP64."""
    xp = namespace(cache)
    if not hasattr(scale, "dtype"):
        scale = np.float32(1.0 if scale is None else scale)
    numbers = xp.asarray(as_float64(scale) if scale.ndim else np.float64(scale))
    if numbers.ndim == 3 and layout == "nhd":
        numbers = numbers.swapaxes(1, 2)
    if numbers.ndim == 1:
        numbers = numbers[:, None]
    return (numbers + xp.zeros(cache.shape[:3]))[..., None]


class Caches(NamedTuple):
    """Keys and values, (B or num_pages, Hkv, keys, D), as they are stored, and of 8 bits the scale
    of each token, (..., 1)."""

    arrays: tuple[Array, ...]
    codes: np.dtype | None
    per_token: tuple[bool, bool]

    @classmethod
    def of(
        cls, dtype: np.dtype, k: Array, v: Array, layout: str, k_scale: Any, v_scale: Any
    ) -> Caches:
        """dtype: of q."""
        scales = k_scale, v_scale
        per_token = getattr(k_scale, "ndim", 0) == 3, getattr(v_scale, "ndim", 0) == 3
        codes = k.dtype
        if layout == "nhd":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        if codes == dtype:
            return cls((k, v), None, per_token)
        of_tokens_ = (of_tokens(x, k, layout) for x in scales)
        k, v = (x.view(np.uint8) if codes != np.int8 else x for x in (k, v))
        return cls((k, v, *of_tokens_), codes, per_token)

    def sequence(
        self, pick: Callable[[Array], Array], length: int
    ) -> tuple[Any, Any, CacheScales | None]:
        """(k, v, scales) of a sequence, a batch of one; k and v end where it does.  pick: its keys,
        (Hkv, keys, D).  Caches of 8 bits are multiplied by their scales."""
        k, v, *scales = (pick(x)[None, :, :length] for x in self.arrays)
        if self.codes is None:
            return k, v, None
        codes = self.codes
        k, v = (as_float64(x.view(codes)) * scale for x, scale in zip((k, v), scales, strict=True))
        return k, v, CacheScales.of(scales[0], scales[1], self.per_token, codes)


class CacheScales(NamedTuple):
    """What bounds need of the scales of a call's keys and values.

    k, v: magnitudes, (B, Hkv, 1, 1, keys).  per_token: of k, of v.  codes: the caches' dtype.
    """

    k: Array
    v: Array
    per_token: tuple[bool, bool]
    codes: np.dtype

    @classmethod
    def of(cls, k: Array, v: Array, per_token: tuple[bool, bool], codes: np.dtype) -> CacheScales:
        """k, v: (B, Hkv, keys, 1)."""
        xp = namespace(k)

        def sizes(x: Array) -> Array:
            size = xp.abs(x[..., 0])[:, :, None, None]
            return xp.where(xp.isfinite(size), size, 0.0)

        return cls(sizes(k), sizes(v), per_token, codes)

    def constant_error(self, scale: float) -> Any:
        """The relative error of scale * log2 e * k's scale, of a head, in FP32."""
        exact = scale / math.log(2)
        if self.per_token[0] or not exact:
            return abs(float(np.float32(exact)) / exact - 1) if exact else 0.0
        xp = namespace(self.k)
        product = (float(np.float32(exact)) * self.k).astype(np.float32).astype(np.float64)
        return xp.abs(product / xp.where(self.k > 0, exact * self.k, np.inf) - (self.k > 0))

    @property
    def largest_v(self) -> Any:
        """Of a head's tokens: (B, Hkv, 1, 1, 1)."""
        xp, v = namespace(self.v), self.v
        return xp.max(v, axis=-1, keepdims=True) if v.shape[-1] else xp.zeros((*v.shape[:-1], 1))

    @property
    def ratios(self) -> Any:
        """By what probabilities are multiplied before they are rounded to 16 bits: scales of
        tokens over the power of two above the largest; (B, Hkv, 1, 1, keys)."""
        xp = namespace(self.v)
        if not self.per_token[1]:
            return xp.ones_like(self.v)
        unit = xp.exp2(xp.floor(xp.log2(xp.maximum(self.largest_v, 2.0**-126))) + 1)
        return xp.where(self.v > 0, self.v / unit, 1.0)
