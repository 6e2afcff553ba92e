"""A whole decoder in PyTorch, for `bench --model`: torch.compile and CUDA graphs over a static
cache, like gpt-fast (https://github.com/meta-pytorch/gpt-fast).

Products are F.linear, with one product for queries, keys and values.  Decoding uses flex_attention,
which splits the keys over blocks; prefill uses scaled_dot_product_attention.  The whole step is
compiled as one graph, and its launches are captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..op import Call
from .base import Peer


def step(op: str, call: Call) -> Callable[[], Any] | None:
    """Return a step that is neither compiled nor captured, or None; arguments: see `_parts`."""
    parts = _parts(op, call)
    if parts is None:
        return None
    embed, layers = parts
    return lambda: layers(embed())


def _parts(op: str, call: Call) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return (function that embeds the tokens, function from the embedded tokens to logits).

    They are separate because the embedding lookup must not be compiled: inductor times its kernels
    with random indices.

    op: "decode" or "prefill".  call: (decoder, tokens, cache, start) of cupykern.tools.model, with
    `start` earlier tokens per sequence.  None for unsupported models: 8-bit weights and caches,
    windows shorter than the sequence, soft caps.
    """
    import torch

    decoder, tokens, cache, start = call.args
    config, n = decoder.config, tokens.shape[1]
    linears = [linear for layer in decoder.layers for linear in layer.linears]
    if any(linear.weight.dtype != decoder.embedding.dtype for linear in linears):
        return None
    if cache.scales is not None:
        return None
    if config.softcap or config.logit_softcap or config.gate != "silu":
        return None
    if any(kind.window is not None and kind.window < start + n for kind in config.kinds):
        return None
    model = _module(torch, decoder, cache, start + n)
    number = torch.from_dlpack(tokens.astype(np.int64))
    positions = torch.arange(start, start + n, device=number.device)

    def embed() -> Any:
        return torch.nn.functional.embedding(number, model.embedding)

    if op == "prefill":
        return embed, lambda x: model(x, positions, None)
    from torch.nn.attention.flex_attention import create_block_mask

    def is_seen(b: Any, h: Any, query: Any, key: Any) -> Any:
        return key <= start + query  # evaluated on blocks, which have more queries than exist

    room = cache.keys[0].shape[2]
    mask = create_block_mask(is_seen, None, None, 1, room, device=number.device)
    return embed, lambda x: model(x, positions, mask)


def _module(torch: Any, decoder: Any, cache: Any, length: int) -> Any:
    """Return the decoder as a torch module.  Weights share the memory; the cache is a copy."""
    from torch.nn.attention.flex_attention import flex_attention

    functional, config = torch.nn.functional, decoder.config
    eps, scale = config.norm_eps, config.attention_scale

    class Layer(torch.nn.Module):  # type: ignore[misc]  # torch has no stubs here
        def __init__(self, number: int):
            super().__init__()
            layer = decoder.layers[number]
            for name in ("qkv", "out", "gate", "up", "down"):
                linear = getattr(layer, name)
                self.keep(name, linear.weight)
                self.keep(f"{name}_bias", linear.bias)
            for name in ("input", "mlp", "q", "k", "post_attention", "post_mlp"):
                self.keep(f"{name}_norm", getattr(layer, f"{name}_norm"))
            inv_freq, factor = decoder.rotations[number]
            inv_freq = torch.from_dlpack(inv_freq)
            angles = torch.arange(length, device=inv_freq.device)[:, None] * inv_freq
            for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
                self.register_buffer(name, table * factor)
            for name, old in (("keys", cache.keys), ("values", cache.values)):
                self.register_buffer(name, torch.from_dlpack(old[number]).clone())

        def keep(self, name: str, array: Any) -> None:
            value = None
            if array is not None:
                value = torch.nn.Parameter(torch.from_dlpack(array), requires_grad=False)
            setattr(self, name, value)

        def rotate(self, x: Any, positions: Any) -> Any:
            """x: (B, heads, n, head_dim)."""
            cos, sin = self.cos[positions], self.sin[positions]
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

        def forward(self, x: Any, positions: Any, mask: Any) -> Any:
            batch, n, _ = x.shape
            y = functional.rms_norm(x, x.shape[-1:], self.input_norm, eps)
            qkv = functional.linear(y, self.qkv, self.qkv_bias)
            qkv = qkv.view(batch, n, -1, config.head_dim).transpose(1, 2)
            q, k, v = qkv.split((config.heads, config.kv_heads, config.kv_heads), 1)
            if self.q_norm is not None:
                q = functional.rms_norm(q, q.shape[-1:], self.q_norm, eps)
                k = functional.rms_norm(k, k.shape[-1:], self.k_norm, eps)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            self.keys[:, :, positions] = k
            self.values[:, :, positions] = v
            grouped = config.heads != config.kv_heads
            if mask is None:  # no tokens come before these
                mixed = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
                )
            else:
                mixed = flex_attention(
                    *(q, self.keys, self.values),
                    block_mask=mask, scale=scale, enable_gqa=grouped,
                )  # fmt: skip
            mixed = mixed.transpose(1, 2).reshape(batch, n, -1)
            x = x + self.post(functional.linear(mixed, self.out), self.post_attention_norm)
            y = functional.rms_norm(x, x.shape[-1:], self.mlp_norm, eps)
            gate, up = functional.linear(y, self.gate), functional.linear(y, self.up)
            inner = functional.linear(functional.silu(gate) * up, self.down)
            return x + self.post(inner, self.post_mlp_norm)

        def post(self, x: Any, weight: Any) -> Any:
            return x if weight is None else functional.rms_norm(x, x.shape[-1:], weight, eps)

    class Decoder(torch.nn.Module):  # type: ignore[misc]  # torch has no stubs here
        def __init__(self) -> None:
            super().__init__()
            arrays = {"embedding": decoder.embedding, "norm": decoder.norm}
            for name, array in {**arrays, "head": decoder.head.weight}.items():
                value = torch.nn.Parameter(torch.from_dlpack(array), requires_grad=False)
                setattr(self, name, value)
            self.layers = torch.nn.ModuleList(map(Layer, range(len(decoder.layers))))

        def forward(self, x: Any, positions: Any, mask: Any) -> Any:
            if config.embedding_scale != 1:
                x = x * config.embedding_scale
            for layer in self.layers:
                x = layer(x, positions, mask)
            y = functional.rms_norm(x[:, -1], x.shape[-1:], self.norm, eps)
            return functional.linear(y, self.head).float()

    return Decoder()


def _compiled(op: str, call: Call) -> Callable[[], Any] | None:
    import torch

    parts = _parts(op, call)
    if parts is None:
        return None
    embed, layers = parts
    torch.compiler.reset()
    # Products of one row become inductor's own kernels, tuned one parameter after the other.
    options = {"coordinate_descent_tuning": call.args[1].size == 1}
    compiled = torch.compile(layers, dynamic=False, fullgraph=True, options=options)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(3):
                compiled(embed())
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            out = compiled(embed())

    def replay() -> Any:
        graph.replay()
        return out

    return replay


MODEL_PEERS = {peer.name: peer for peer in (Peer("torch.compile", "torch", _compiled),)}
