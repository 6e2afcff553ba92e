"""PyTorch, eager ("torch") and compiled ("torch.compile").

"torch.fast": torch._scaled_mm with use_fast_accum, which the other peers do not use.  "torch.cast":
products with weights that were converted in advance and take twice the memory.  "torch.tf32": FP32
products with TF32 (11 bits) allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import dtypes
from ..op import Call
from .base import Peer, norm_arguments, only_array
from .torch_dual import dual, logits, steps_of_dual
from .torch_product import product, steps_of_product

_Function = Callable[..., Any]


def _function(op: str, call: Call) -> tuple[_Function, tuple[Any, ...]] | None:
    """Return (function, its tensors), or None."""
    import torch

    if op in ("softmax", "log_softmax"):
        x, function = only_array(call), getattr(torch, op)
        return None if x is None else (lambda x: function(x, -1), (torch.from_dlpack(x),))
    if op == "quantize":
        return _quantize(call)
    if op in ("matmul", "complex_matmul", "scaled_mm"):
        return product(op, call)
    if op == "dual_gemm_silu":
        return dual(call)
    if op == "dequant_softmax":
        return logits(call)
    norm = norm_arguments(op, call)
    if norm is None:
        return None
    shape, eps = norm.x.shape[-1:], norm.eps
    functional = torch.nn.functional
    arrays = (norm.x, norm.weight, norm.bias, norm.residual)
    tensors = tuple(array if array is None else torch.from_dlpack(array) for array in arrays)

    def layer_norm(x: Any, weight: Any, bias: Any, _: Any) -> Any:
        return functional.layer_norm(x, shape, weight, bias, eps)

    def rms_norm(x: Any, weight: Any, _: Any, residual: Any) -> Any:
        if residual is None:
            return functional.rms_norm(x, shape, weight, eps)
        s = x + residual
        return functional.rms_norm(s, shape, weight, eps), s

    return (layer_norm if op == "layer_norm" else rms_norm), tensors


def _quantize(call: Call) -> tuple[_Function, tuple[Any, ...]] | None:
    """Quantise rows to FP8."""
    import torch

    if call.args[1:] != ("e4m3",) or call.kwargs != {"granularity": "row"}:
        return None

    def quantize(x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        values = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return values, scale

    return quantize, (torch.from_dlpack(call.args[0]),)


def _eager(op: str, call: Call) -> Callable[[], Any] | None:
    found = _function(op, call)
    if found is None:
        return None
    function, tensors = found
    return lambda: function(*tensors)


def _compiled(op: str, call: Call) -> Callable[[], Any] | None:
    import torch

    found = _function(op, call)
    if found is None:
        return None
    function, tensors = found
    # Each shape gets its own kernel: a recompilation would use symbolic shapes, and after the
    # eighth torch falls back to eager.
    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=False)
    return lambda: compiled(*tensors)


def _compiled_parts(op: str, call: Call) -> dict[str, Callable[[], Any]]:
    """Return cast, product and epilogue of a single or dual product, each compiled separately."""
    import torch

    if op == "dual_gemm_silu":
        steps = steps_of_dual(call)
    elif op in ("matmul", "scaled_mm"):
        steps = steps_of_product(op, call)
    else:
        return {}
    compiled = {}
    for name, (function, tensors) in steps.items():
        compiled[name] = _bind(torch.compile(function, dynamic=False), tensors)
    return compiled


def _bind(function: _Function, tensors: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: function(*tensors)


def _fast(op: str, call: Call) -> Callable[[], Any] | None:
    found = product(op, call, True) if op in ("matmul", "scaled_mm") else None
    if found is None:
        return None
    function, tensors = found
    return lambda: function(*tensors)


def _cast(op: str, call: Call) -> Callable[[], Any] | None:
    found = product(op, call, cast=True) if op in ("matmul", "scaled_mm") else None
    if found is None:
        return None
    function, tensors = found
    return lambda: function(*tensors)


def _tf32(op: str, call: Call) -> Callable[[], Any] | None:
    import torch

    found = product(op, call) if op == "matmul" and call.args[0].dtype == dtypes.float32 else None
    if found is None:
        return None
    function, tensors = found
    allowed = torch.backends.cuda.matmul

    def compute() -> Any:
        before, allowed.allow_tf32 = allowed.allow_tf32, True
        try:
            return function(*tensors)
        finally:
            allowed.allow_tf32 = before

    return compute


PEERS = (
    Peer("torch", "torch", _eager),
    Peer("torch.compile", "torch", _compiled, _compiled_parts),
    Peer("torch.fast", "torch", _fast),
    Peer("torch.cast", "torch", _cast),
    Peer("torch.tf32", "torch", _tf32),
)
