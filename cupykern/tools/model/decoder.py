"""Decoder: layers built from the ops, for many tokens per sequence (prefill) or one (decode).

A layer is eight launches: norm, packed qkv product, rope_and_cache, attention, out, norm, gated
product, down.  No elementwise kernels run between them: each norm adds the residual, products add
their biases, and the ops read queries and keys directly from the qkv product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupykern
from cupykern.numerics import namespace

from .cache import Cache
from .config import LayerKind, ModelConfig
from .linear import Linear, norm_for

_Attend = Callable[[Any, int, dict[str, Any]], Any]
"""(queries, number of the layer, options of attention) -> the result of attention."""

_GELU_GATE = "0.5 * acc * (1 + tanh(0.7978845608028654 * (acc + 0.044715 * acc * acc * acc))) * up"


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer; norms have shape (hidden,), head norms (head_dim,)."""

    input_norm: Any
    qkv: Linear
    out: Linear
    mlp_norm: Any
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Any = None
    k_norm: Any = None
    post_attention_norm: Any = None
    post_mlp_norm: Any = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate, self.up, self.down


@dataclass(frozen=True)
class Decoder:
    """A model: weights and dimensions.  Calls run on the arrays' target and do not synchronise.

    embedding: (vocab, hidden) in the activations' dtype.  rotations: results of rope_inv_freq, per
    layer.  scale: factor of embedded tokens, a 0-d array, or None.
    """

    config: ModelConfig
    embedding: Any
    layers: tuple[Layer, ...]
    norm: Any
    head: Linear
    rotations: tuple[tuple[Any, float], ...]
    scale: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a decode step reads: linear layers and the head, no embedding."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        return sum(linear.nbytes for linear in (*linears, self.head))

    def prefill(self, tokens: Any, cache: Cache, start: int = 0) -> Any:
        """Return the logits after the last token, float32 (B, vocab).

        tokens: integers (B, n), which follow `start` earlier tokens per sequence.  cache: of the
        same B sequences; it stores their keys and values, and its counters do not change.
        Raises ValueError if the cache has too little room.
        """
        batch, n = tokens.shape
        if cache.block_table is not None:
            return self.append(tokens.reshape(-1), [n] * batch, [start] * batch, cache)
        _check_room(cache, start + n)
        xp = namespace(tokens)
        positions = xp.arange(start, start + n, dtype=np.int32)
        if cache.scales is None:
            attend = _over_cache(cache, start + n)
        else:  # `attention` does not support scales
            cu_seqlens = xp.arange(0, batch * n + 1, n, dtype=np.int32)
            lens = xp.full(batch, start + n, np.int32)
            attend = _over_pages(cache.as_pages(), cu_seqlens, lens, n, start + n)
        x, change = self._run(tokens, positions, cache, attend)
        last = (a.reshape(batch, n, -1)[:, -1] for a in (x, change))
        return self._logits(*last)

    def append(
        self, tokens: Any, counts: Sequence[int], starts: Sequence[int], cache: Cache
    ) -> Any:
        """Return the logits after new tokens of several sequences, float32 (B, vocab).

        The new tokens can be prompts, chunks of prompts, or single tokens.
        tokens: integers (n,), sequence after sequence.  counts, starts: on the host, for each of
        the cache's B sequences: its number of `tokens`, and of earlier tokens.  cache: paged; its
        counters do not change.  Logits of sequences without new tokens are undefined.
        Raises ValueError if the cache has too little room or counts do not add up to n.
        """
        new, before = np.array(counts, np.int32), np.array(starts, np.int32)
        if new.sum() != len(tokens):
            raise ValueError(f"counts must add up to {len(tokens)} tokens; got {new.sum()}")
        xp, of_tokens = namespace(tokens), np.repeat(np.arange(len(new)), new)
        offsets = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        positions = np.arange(len(tokens), dtype=np.int32) - (offsets[:-1] - before)[of_tokens]
        cu_seqlens, lens = xp.asarray(offsets), xp.asarray(before + new)
        most_new, most = int(new.max()), int((before + new).max())
        _check_room(cache, most)
        attend = _over_pages(cache, cu_seqlens, lens, most_new, most)
        # The other ops treat each token as a sequence.
        by_token = replace(cache, block_table=cache.block_table[xp.asarray(of_tokens)])
        x, change = self._run(tokens[:, None], xp.asarray(positions[:, None]), by_token, attend)
        last = xp.asarray(np.maximum(offsets[1:] - 1, 0))
        return self._logits(x[last], change[last])

    def decode(self, tokens: Any, cache: Cache) -> Any:
        """Return the logits after one more token per sequence, float32 (B, vocab).

        tokens: integers (B,).  cache: of B sequences; first the active ones grow by one token.
        Logits of empty slots are undefined.
        """
        cache.counters += cache.active
        positions, lengths = cache.counters[0][:, None], cache.counters[1]

        def attend(q: Any, number: int, options: dict[str, Any]) -> Any:
            keys, values = cache.keys[number], cache.values[number]
            q = q.transpose(0, 2, 1, 3)
            return cupykern.decode_attention(
                q, keys, values, seq_lens=lengths, **cache.options(number), **options
            )

        return self._logits(*self._run(tokens[:, None], positions, cache, attend))

    def _run(self, tokens: Any, positions: Any, cache: Cache, attend: _Attend) -> tuple[Any, Any]:
        """Return (x, change), (B n, hidden) each; their sum is the output of the layers."""
        config, eps, (batch, n) = self.config, self.config.norm_eps, tokens.shape
        x, change = self.embedding[tokens.reshape(-1)], None
        if self.scale is not None:
            x = x * self.scale
        for number, layer in enumerate(self.layers):
            y, x = _add_norm(layer.qkv, x, change, layer.input_norm, eps)
            qkv = layer.qkv(y).reshape(batch, n, -1, config.head_dim)
            q = self._rotated(qkv, positions, cache, number)
            options = {**config.attention_options, **_window(config.kinds[number])}
            change = layer.out(attend(q, number, options).reshape(batch * n, -1))
            change = _norm(change, layer.post_attention_norm, eps)
            y, x = _add_norm(layer.gate, x, change, layer.mlp_norm, eps)
            change = _norm(layer.down(self._gated(layer, y)), layer.post_mlp_norm, eps)
        return x, change

    def _rotated(self, qkv: Any, positions: Any, cache: Cache, number: int) -> Any:
        """Return the rotated queries; write keys and values to the cache.

        qkv: (B, n, heads + 2 KV heads, head_dim).
        """
        config, layer = self.config, self.layers[number]
        both = config.heads + config.kv_heads
        inv_freq, factor = self.rotations[number]
        return cupykern.rope_and_cache(
            *(qkv[:, :, : config.heads], qkv[:, :, config.heads : both], qkv[:, :, both:]),
            *(positions, cache.keys[number], cache.values[number]),
            inv_freq=inv_freq, attention_factor=factor, eps=config.norm_eps,
            q_weight=layer.q_norm, k_weight=layer.k_norm, **cache.options(number),
        )  # fmt: skip

    def _gated(self, layer: Layer, y: Any) -> Any:
        if self.config.gate == "silu":
            return layer.gate.gated(y, layer.up)
        return layer.gate(y, epilogue=_GELU_GATE, operands={"up": layer.up(y)})

    def _logits(self, x: Any, change: Any) -> Any:
        y, _ = _add_norm(self.head, x, change, self.norm, self.config.norm_eps)
        cap = self.config.logit_softcap
        if cap is None:
            return self.head(y, out_dtype=np.float32)
        capped = {"epilogue": "cap * tanh(acc / cap)", "operands": {"cap": cap}}
        return self.head(y, out_dtype=np.float32, **capped)


def _over_cache(cache: Cache, count: int) -> _Attend:
    """Attention of each sequence's newest tokens, of `count` in a contiguous cache."""

    def attend(q: Any, number: int, options: dict[str, Any]) -> Any:
        keys, values = (
            of[number][:, :, :count].transpose(0, 2, 1, 3) for of in (cache.keys, cache.values)
        )
        return cupykern.attention(
            *(q, keys, values), causal=True, causal_align="bottom_right", layout="bshd", **options
        )

    return attend


def _over_pages(cache: Cache, cu_seqlens: Any, lens: Any, most_new: int, most: int) -> _Attend:
    """Attention of new tokens; `lens`: tokens per sequence, with the new ones."""

    def attend(q: Any, number: int, options: dict[str, Any]) -> Any:
        return cupykern.attention_varlen(
            q.reshape(-1, *q.shape[2:]), cache.keys[number], cache.values[number], cu_seqlens,
            max_seqlen_q=most_new, max_seqlen_k=most, seq_lens_k=lens, causal=True,
            **cache.options(number), **options,
        )  # fmt: skip

    return attend


def _check_room(cache: Cache, tokens: int) -> None:
    if not 0 < tokens <= cache.room:
        raise ValueError(f"the cache has room for {cache.room} tokens, not for {tokens}")


def _add_norm(linear: Linear, x: Any, change: Any, weight: Any, eps: float) -> tuple[Any, Any]:
    """Return (norm of x + change in the format for `linear`, x + change), from one kernel.

    change None: only x.
    """
    if change is None:
        return norm_for(linear, x, weight, eps=eps), x
    return norm_for(linear, change, weight, eps=eps, residual=x)


def _norm(x: Any, weight: Any, eps: float) -> Any:
    return x if weight is None else cupykern.rms_norm(x, weight, eps=eps)


def _window(kind: LayerKind) -> dict[str, Any]:
    return {} if kind.window is None else {"window": (kind.window - 1, 0)}
