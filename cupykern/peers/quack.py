"""QuACK: CuTe-DSL kernels for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import Call, Norm, Peer, norm_arguments, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    if call.args[0].ndim != 2:
        return None
    norm = norm_arguments(op, call)
    if norm is not None:
        return _norm(op, norm)
    x = only_array(call)
    if op != "softmax" or x is None:
        return None
    import torch
    from quack.softmax import softmax

    tensor = torch.from_dlpack(x)
    return lambda: softmax(tensor)


def _norm(op: str, norm: Norm) -> Callable[[], Any] | None:
    import torch
    from quack.rmsnorm import layernorm_fwd, rmsnorm_fwd

    arrays = (norm.x, norm.weight, norm.bias, norm.residual)
    x, weight, bias, residual = (a if a is None else torch.from_dlpack(a) for a in arrays)
    if op == "layer_norm":
        if weight is None:
            return None
        # It takes FP32 weights alone.
        weight, bias = weight.float(), None if bias is None else bias.float()
        return lambda: layernorm_fwd(x, weight, bias, norm.eps)
    if residual is None:
        return lambda: rmsnorm_fwd(x, weight, eps=norm.eps)[0]
    return lambda: rmsnorm_fwd(x, weight, residual=residual, eps=norm.eps)[:2]


PEERS = (Peer("quack", "quack", _build),)
