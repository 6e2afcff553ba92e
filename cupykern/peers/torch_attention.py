"""PyTorch's attention: FlashAttention 2 ("torch.flash") and cuDNN's ("torch.cudnn")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..op import Call
from .base import Peer

_Function = Callable[[], Any]


def _flash(op: str, call: Call) -> _Function | None:
    if op == "attention_varlen":
        return _packed(call)
    return _by_backend("FLASH_ATTENTION", op, call)


def _cudnn(op: str, call: Call) -> _Function | None:
    return _by_backend("CUDNN_ATTENTION", op, call)


def self_attention(
    op: str, call: Call, options: Iterable[str] = ()
) -> tuple[tuple[Any, Any, Any], bool, Any] | None:
    """Return ((q, k, v), causal, scale) of a call that other libraries support, or None.

    options: further arguments that the library supports.  Calls with lengths or pages are not
    supported; causal ones only if both alignments are equal.
    """
    known = {"causal", "scale", *options}
    if op not in ("attention", "decode_attention") or call.kwargs.keys() - known:
        return None
    q, k, v = call.args
    causal = call.kwargs.get("causal", op == "decode_attention") and q.shape[2] > 1
    if causal and q.shape[2] != k.shape[2]:
        return None
    return (q, k, v), causal, call.kwargs.get("scale")


def _by_backend(backend: str, op: str, call: Call) -> _Function | None:
    found = self_attention(op, call)
    if found is None:
        return None
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (q, k, v), causal, scale = found
    tensors = tuple(torch.from_dlpack(x) for x in (q, k, v))
    options = {"is_causal": causal, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    function, kind = torch.nn.functional.scaled_dot_product_attention, getattr(SDPBackend, backend)

    def attention() -> Any:
        with sdpa_kernel(kind):
            return function(*tensors, **options)

    return attention


def _packed(call: Call) -> _Function | None:
    known = {"causal", "scale", "max_seqlen_q", "max_seqlen_k"}
    if set(call.kwargs) - known:
        return None
    import torch

    tensors = tuple(torch.from_dlpack(x) for x in call.args)
    longest = call.kwargs["max_seqlen_q"], call.kwargs["max_seqlen_k"]
    causal, scale = call.kwargs.get("causal", False), call.kwargs.get("scale")
    forward = torch.ops.aten._flash_attention_forward
    return lambda: forward(*tensors, *longest, 0.0, causal, False, scale=scale)[0]


PEERS = (Peer("torch.flash", "torch", _flash), Peer("torch.cudnn", "torch", _cudnn))
