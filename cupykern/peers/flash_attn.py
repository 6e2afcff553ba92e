"""FlashAttention 4 (the package flash-attn-4), with kernels in CuTe DSL."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..op import Call
from .base import Peer
from .torch_attention import self_attention

_OPTIONS = {"window": "window_size", "softcap": "softcap", "sinks": "learnable_sink"}
"""Names of the library's arguments; some versions lack some of them."""


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    found = self_attention(op, call, _OPTIONS)
    if found is None:
        return None
    import torch
    from flash_attn.cute import flash_attn_func

    arrays, causal, scale = found
    tensors = [torch.from_dlpack(x).transpose(1, 2) for x in arrays]  # (B, S, H, D)
    given = {name: x for name in _OPTIONS if (x := call.kwargs.get(name)) is not None}
    known = inspect.signature(flash_attn_func).parameters
    if any(_OPTIONS[name] not in known for name in given):
        return None
    if "window" in given:
        # Around the diagonal that ends at the last key, like ours; causal makes the right end 0.
        given["window"] = tuple(None if size < 0 else size for size in given["window"])
    if "sinks" in given:
        given["sinks"] = torch.from_dlpack(given["sinks"])
    options = {_OPTIONS[name]: x for name, x in given.items()}

    def attention() -> Any:
        out = flash_attn_func(*tensors, softmax_scale=scale, causal=causal, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


PEERS = (Peer("flash_attn", "flash_attn.cute", _build),)
