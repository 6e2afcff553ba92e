"""Scales of 8-bit KV caches in FP64, and the errors that they add to attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics import as_float64, namespace
from ..typing import Array


def of_tokens(scale: Any, cache: Array, layout: str) -> Array:
    """Return the scale of each token of `cache` (B or num_pages, Hkv, keys, D): FP64 (..., 1)."""
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
    """Stored keys and values (B or num_pages, Hkv, keys, D); for 8 bits also the scale of each
    token (..., 1)."""

    arrays: tuple[Array, ...]
    codes: np.dtype | None
    per_token: tuple[bool, bool]

    @classmethod
    def of(
        cls, dtype: np.dtype, k: Array, v: Array, layout: str, k_scale: Any, v_scale: Any
    ) -> Caches:
        """Return the caches of a call; dtype: q's dtype."""
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
        """Return (k, v, scales) of a sequence as a batch of one, cut to `length` keys.

        pick: selects the sequence's keys (Hkv, keys, D) of an array.  8-bit caches are multiplied
        by their scales.
        """
        k, v, *scales = (pick(x)[None, :, :length] for x in self.arrays)
        if self.codes is None:
            return k, v, None
        codes = self.codes
        k, v = (as_float64(x.view(codes)) * scale for x, scale in zip((k, v), scales, strict=True))
        return k, v, CacheScales.of(scales[0], scales[1], self.per_token, codes)


class CacheScales(NamedTuple):
    """Magnitudes of the scales of keys and values, for bounds.

    k, v: (B, Hkv, 1, 1, keys).  per_token: whether k and v have a scale per token.
    codes: the caches' dtype.
    """

    k: Array
    v: Array
    per_token: tuple[bool, bool]
    codes: np.dtype

    @classmethod
    def of(cls, k: Array, v: Array, per_token: tuple[bool, bool], codes: np.dtype) -> CacheScales:
        """Take k and v (B, Hkv, keys, 1); non-finite scales become 0."""
        xp = namespace(k)

        def sizes(x: Array) -> Array:
            size = xp.abs(x[..., 0])[:, :, None, None]
            return xp.where(xp.isfinite(size), size, 0.0)

        return cls(sizes(k), sizes(v), per_token, codes)

    def constant_error(self, scale: float) -> Any:
        """Return the relative error of scale * log2 e * (k's scale of a head) in FP32."""
        exact = scale / math.log(2)
        if self.per_token[0] or not exact:
            return abs(float(np.float32(exact)) / exact - 1) if exact else 0.0
        xp = namespace(self.k)
        product = (float(np.float32(exact)) * self.k).astype(np.float32).astype(np.float64)
        return xp.abs(product / xp.where(self.k > 0, exact * self.k, np.inf) - (self.k > 0))

    @property
    def largest_v(self) -> Any:
        """The largest scale of v over a head's tokens: (B, Hkv, 1, 1, 1)."""
        xp, v = namespace(self.v), self.v
        return xp.max(v, axis=-1, keepdims=True) if v.shape[-1] else xp.zeros((*v.shape[:-1], 1))

    @property
    def ratios(self) -> Any:
        """Factors of probabilities before the rounding to 16 bits, (B, Hkv, 1, 1, keys): scales of
        tokens divided by the power of two above the largest."""
        xp = namespace(self.v)
        if not self.per_token[1]:
            return xp.ones_like(self.v)
        unit = xp.exp2(xp.floor(xp.log2(xp.maximum(self.largest_v, 2.0**-126))) + 1)
        return xp.where(self.v > 0, self.v / unit, 1.0)
