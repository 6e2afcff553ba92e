"""The decoder in FP64, exact and with each op's result rounded once, for the expected error.

An op's rms error is by contract at most RMS_LIMIT times the error of rounding once.  To first order
later ops are linear in the errors of earlier ones.  So a model's rms error must not exceed
RMS_LIMIT times the error of `Rounded`.  For tokens in the cache both take the stored values, 8-bit
codes times their scales too; `Rounded` rounds new keys and values to the cache's format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...check import RMS_LIMIT
from ...numerics import as_float64, namespace
from ...reference.quantize import LARGEST, scale_of
from .cache import Cache
from .config import ModelConfig
from .decoder import Decoder, Layer
from .linear import BLOCK, Fp8Blocks, Linear, dequantized

_MOST_SCORES = 2**28  # FP64 values at once


class Exact:
    """Rounds nothing."""

    def stored(self, x: Any) -> Any:
        return x

    def activations(self, x: Any, linear: Linear) -> Any:
        """Return the activations that `linear` multiplies."""
        return x

    def cached(self, x: Any, dtype: np.dtype) -> Any:
        """Return keys or values (..., head_dim) as a cache of `dtype` stores them."""
        return x


@dataclass(frozen=True)
class Rounded(Exact):
    """Rounds results to `dtype` and activations of Fp8Blocks to e4m3 in blocks.

    Keys and values for an 8-bit cache are rounded to its dtype, with a scale per token and head.
    """

    dtype: Any

    def stored(self, x: Any) -> Any:
        return as_float64(x.astype(np.float32).astype(self.dtype))

    def activations(self, x: Any, linear: Linear) -> Any:
        if not isinstance(linear, Fp8Blocks):
            return x
        found = namespace(x).empty_like(x)
        for i in range(0, x.shape[-1], BLOCK):
            found[..., i : i + BLOCK] = _quantized(x[..., i : i + BLOCK], linear.weight.dtype)
        return found

    def cached(self, x: Any, dtype: np.dtype) -> Any:
        return _quantized(x, dtype) if dtype in LARGEST else self.stored(x)


def _quantized(x: Any, dtype: np.dtype) -> Any:
    """Quantise and dequantise x, with a scale per vector along its last axis."""
    scale = scale_of(abs(x).max(-1, keepdims=True), dtype)
    return (namespace(x).rint if dtype == np.int8 else to_e4m3)(x / scale) * scale


def to_e4m3(x: Any) -> Any:
    """Round values of magnitude up to 448 to e4m3: 4 bits above 2^-6.  CuPy has no FP8."""
    xp = namespace(x)
    quantum = xp.exp2(xp.maximum(xp.frexp(x)[1] - 1, -6) - 3.0)
    return xp.rint(x / quantum) * quantum


def logits(decoder: Decoder, tokens: Any, cache: Cache, start: Any, rounding: Exact) -> Any:
    """Return the logits after the last of tokens (B, n), FP64 (B, vocab).

    start: integers (B,): the earlier tokens of each sequence, in the contiguous `cache`.
    """
    c, keep = decoder.config, rounding.stored
    batch, n = tokens.shape
    x = as_float64(decoder.embedding[tokens.reshape(-1)])
    if decoder.scale is not None:
        x = keep(x * as_float64(decoder.scale))
    change: Any = 0.0
    for number, layer in enumerate(decoder.layers):
        total = x + change
        y, x = keep(_norm(total, layer.input_norm, c.norm_eps)), keep(total)
        qkv = keep(_product(y, layer.qkv, rounding)).reshape(batch, n, -1, c.head_dim)
        mixed = [
            _attention(decoder, number, qkv[b], cache, b, int(start[b]), rounding)
            for b in range(batch)
        ]
        mixed = namespace(x).stack(mixed).reshape(batch * n, -1)
        change = keep(_product(keep(mixed), layer.out, rounding))
        change = _post(change, layer.post_attention_norm, c, keep)
        total = x + change
        y, x = keep(_norm(total, layer.mlp_norm, c.norm_eps)), keep(total)
        inner = _gated(y, layer, c, rounding)
        change = keep(_product(inner, layer.down, rounding))
        change = _post(change, layer.post_mlp_norm, c, keep)
    last = (x + change).reshape(batch, n, -1)[:, -1]
    found = _product(keep(_norm(last, decoder.norm, c.norm_eps)), decoder.head, rounding)
    if c.logit_softcap is None:
        return found
    return c.logit_softcap * namespace(found).tanh(found / c.logit_softcap)


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * as_float64(weight)


def _post(x: Any, weight: Any, config: ModelConfig, keep: Callable[[Any], Any]) -> Any:
    return x if weight is None else keep(_norm(x, weight, config.norm_eps))


def _product(x: Any, linear: Linear, rounding: Exact) -> Any:
    found = rounding.activations(x, linear) @ dequantized(linear).T
    return found if linear.bias is None else found + as_float64(linear.bias)


def _gated(y: Any, layer: Layer, config: ModelConfig, rounding: Exact) -> Any:
    gate, up = _product(y, layer.gate, rounding), _product(y, layer.up, rounding)
    if config.gate == "silu":
        return rounding.stored(gate / (1 + np.exp(-gate)) * up)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
    return rounding.stored(0.5 * gate * (1 + np.tanh(inner)) * rounding.stored(up))


def _rotate(x: Any, positions: Any, rotation: tuple[Any, float]) -> Any:
    """x: (n, heads, head_dim); elements i and i + head_dim / 2 form a pair."""
    inv_freq, factor = rotation
    angles = positions[:, None, None] * as_float64(inv_freq)
    cos, sin, half = np.cos(angles) * factor, np.sin(angles) * factor, x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return namespace(x).concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _stored(cache: Cache, number: int, b: int, heads: slice, start: int) -> list[Any]:
    """Return keys and values of a sequence's first tokens, (heads, start, head_dim) each."""
    pair = cache.keys[number], cache.values[number]
    found = [as_float64(x[b, heads, :start]) for x in pair]
    if cache.scales is None:
        return found
    scales = [as_float64(x[b, heads, :start, None]) for x in cache.scales[number]]
    return [x * scale for x, scale in zip(found, scales, strict=True)]


def _attention(
    decoder: Decoder, number: int, qkv: Any, cache: Cache, b: int, start: int, rounding: Exact
) -> Any:
    """Return one sequence's attention, (n, heads, head_dim).

    qkv: (n, heads + 2 KV heads, head_dim).
    """
    c, layer, xp = decoder.config, decoder.layers[number], namespace(qkv)
    n, group = len(qkv), c.heads // c.kv_heads
    q, k, v = qkv[:, : c.heads], qkv[:, c.heads : c.heads + c.kv_heads], qkv[:, -c.kv_heads :]
    if layer.q_norm is not None:
        q, k = _norm(q, layer.q_norm, c.norm_eps), _norm(k, layer.k_norm, c.norm_eps)
    positions = xp.arange(start, start + n)
    q, k = (_rotate(x, positions, decoder.rotations[number]) for x in (q, k))
    q, (k, v) = rounding.stored(q), (rounding.cached(x, cache.keys[number].dtype) for x in (k, v))
    before = positions[:, None] - xp.arange(start + n)
    window = c.kinds[number].window or start + n
    seen = (before >= 0) & (before < window)
    scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
    found = xp.empty((c.kv_heads, group, n, c.head_dim))
    together = max(1, _MOST_SCORES // (group * n * (start + n)))  # KV heads at once
    for first in range(0, c.kv_heads, together):
        part = slice(first, first + together)
        queries = q.reshape(n, c.kv_heads, group, -1)[:, part].transpose(1, 2, 0, 3)
        keys, values = (
            xp.concatenate((old, new[:, part].transpose(1, 0, 2)), 1)
            for old, new in zip(_stored(cache, number, b, part, start), (k, v), strict=True)
        )
        rows = len(keys), group * n, -1
        scores = queries.reshape(rows) @ keys.swapaxes(1, 2) * scale
        if c.softcap is not None:
            scores = c.softcap * xp.tanh(scores / c.softcap)
        scores = xp.where(seen, scores.reshape(-1, group, n, start + n), -np.inf)
        p = xp.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        found[part] = (p.reshape(rows) @ values).reshape(-1, group, n, c.head_dim)
    return found.transpose(2, 0, 1, 3).reshape(n, c.heads, c.head_dim)


@dataclass(frozen=True)
class Expected:
    """FP64 logits, and the rms error of a model whose results are rounded."""

    exact: Any
    rms: float

    @classmethod
    def of(cls, decoder: Decoder, tokens: Any, cache: Cache, start: Sequence[int]) -> Expected:
        """Arguments: see `logits`."""
        exact = logits(decoder, tokens, cache, start, Exact())
        rounding = Rounded(decoder.embedding.dtype)
        rounded = logits(decoder, tokens, cache, start, rounding)
        return cls(exact, _rms(rounded - exact))

    def error_over_limit(self, found: Any) -> float:
        """Return the logits' rms error over the allowed one; inf for NaN."""
        error = _rms(as_float64(found) - self.exact) / (RMS_LIMIT * self.rms)
        return error if np.isfinite(error) else float("inf")


def _rms(x: Any) -> float:
    return float((x * x).mean()) ** 0.5
