"""FlashAttention 4 (the package flash-attn-4), whose kernels are CuTe DSL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..op import Call
from .base import Peer
from .torch_attention import self_attention


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    found = self_attention(op, call)
    if found is None:
        return None
    import torch
    from flash_attn.cute import flash_attn_func

    arrays, causal, scale = found
    tensors = [torch.from_dlpack(x).transpose(1, 2) for x in arrays]  # (B, S, H, D)

    def attention() -> Any:
        out = flash_attn_func(*tensors, softmax_scale=scale, causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attention


PEERS = (Peer("flash_attn", "flash_attn.cute", _build),)
