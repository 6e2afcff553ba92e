"""Liger: Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..op import Call
from .base import Norm, Peer, norm_arguments, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    norm = norm_arguments(op, call)
    if norm is not None:
        return _norm(op, norm)
    x = only_array(call)
    if op != "softmax" or x is None:
        return None
    import torch
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    tensor = torch.from_dlpack(x)
    return lambda: LigerSoftmaxFunction.apply(tensor)


def _norm(op: str, norm: Norm) -> Callable[[], Any] | None:
    import torch
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    arrays = (norm.x, norm.weight, norm.bias, norm.residual)
    x, weight, bias, residual = (a if a is None else torch.from_dlpack(a) for a in arrays)
    if weight is None or (op == "layer_norm" and bias is None):
        return None
    if op == "layer_norm":
        return lambda: LigerLayerNormFunction.apply(x, weight, bias, norm.eps)
    # "gemma": multiplies by the weight in FP32, like ours.
    if op == "rms_norm":
        return lambda: LigerRMSNormFunction.apply(x, weight, norm.eps, 0.0, "gemma")
    return lambda: LigerFusedAddRMSNormFunction.apply(x, residual, weight, norm.eps, 0.0, "gemma")


PEERS = (Peer("liger", "liger_kernel", _build),)
