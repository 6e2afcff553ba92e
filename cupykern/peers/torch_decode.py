"""PyTorch's attention for decoding, for peers/torch.py: scaled_dot_product_attention by one backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..op import Call


def decode(call: Call, backend: str) -> Callable[[], Any] | None:
    """What computes a decode_attention call, by the backend of this name of torch's; None where it has
    no such call: lengths and pages by sequence, several queries that do not see all keys."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = call.args
    causal = call.kwargs.get("causal", True) and q.shape[2] > 1
    if set(call.kwargs) - {"causal", "scale"} or causal:
        return None
    tensors = tuple(map(torch.from_dlpack, (q, k, v)))
    options = {"scale": call.kwargs.get("scale"), "enable_gqa": q.shape[1] != k.shape[1]}
    chosen = getattr(SDPBackend, backend)

    def compute() -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

    return compute
