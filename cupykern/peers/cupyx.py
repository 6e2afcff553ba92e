"""CuPy's own functions; otherwise an expression of CuPy operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..numerics import namespace
from ..op import Call
from .base import Norm, Peer, norm_arguments, only_array


def _build(op: str, call: Call) -> Callable[[], Any] | None:
    if op in ("matmul", "complex_matmul"):
        return _matmul(call)
    norm = norm_arguments(op, call)
    if norm is not None:
        return _norm(op, norm)
    x = only_array(call)
    if op not in ("softmax", "log_softmax") or x is None:
        return None
    from cupyx.scipy import special

    function = getattr(special, op)
    return lambda: function(x, axis=-1)


def _matmul(call: Call) -> Callable[[], Any] | None:
    """Products of floating-point operands without options; int8 would overflow."""
    a, b = call.args
    if set(call.kwargs) - {"precision"} or a.dtype != b.dtype or a.dtype.itemsize == 1:
        return None
    import cupy

    return lambda: cupy.matmul(a, b)


def _norm(op: str, norm: Norm) -> Callable[[], Any]:
    """A norm in FP32, with a kernel per operation."""
    xp = namespace(norm.x)

    def compute() -> Any:
        total = norm.x.astype(np.float32)
        if norm.residual is not None:
            total = total + norm.residual
        s = total
        if op == "layer_norm":
            s = s - s.mean(-1, keepdims=True)
        y = s / xp.sqrt((s * s).mean(-1, keepdims=True) + np.float32(norm.eps))
        if norm.weight is not None:
            y = y * norm.weight.astype(np.float32)
        if norm.bias is not None:
            y = y + norm.bias.astype(np.float32)
        y = y.astype(norm.x.dtype)
        return y if norm.residual is None else (y, total.astype(norm.x.dtype))

    return compute


PEERS = (Peer("cupy", "cupyx.scipy.special", _build),)
