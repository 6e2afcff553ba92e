"""QuACK: CuTe DSL kernels for Hopper and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..op import Call
from .base import Norm, Peer, norm_arguments, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    if call.args[0].ndim != 2:
        return None
    if op == "matmul":
        return _product(call, tuned=False)
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
        # layernorm_fwd requires FP32 weights.
        weight, bias = weight.float(), None if bias is None else bias.float()
        return lambda: layernorm_fwd(x, weight, bias, norm.eps)
    if residual is None:
        return lambda: rmsnorm_fwd(x, weight, eps=norm.eps)[0]
    return lambda: rmsnorm_fwd(x, weight, residual=residual, eps=norm.eps)[:2]


def _product(call: Call, tuned: bool) -> Callable[[], Any] | None:
    """tuned: use QuACK's autotuner, which compiles and times many configs at the first call."""
    a, b = call.args
    options = dict(call.kwargs)
    bias, alpha = options.pop("bias", None), options.pop("alpha", 1.0)
    if options or a.dtype != b.dtype or a.dtype.itemsize != 2 or b.ndim != 2:
        return None
    if bias is not None and bias.ndim != 1:
        return None
    import torch
    from quack.gemm_interface import gemm

    x, y = torch.from_dlpack(a), torch.from_dlpack(b)
    z = None if bias is None else torch.from_dlpack(bias)
    return lambda: gemm(x, y, bias=z, alpha=alpha, tuned=tuned)


def _tuned(op: str, call: Call) -> Callable[[], Any] | None:
    return _product(call, tuned=True) if op == "matmul" and call.args[0].ndim == 2 else None


PEERS = (Peer("quack", "quack", _build), Peer("quack.tuned", "quack", _tuned))
