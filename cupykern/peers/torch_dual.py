"""PyTorch's dual_gemm_silu and dequant_softmax, for peers/torch.py.

dual_gemm_silu is one product with b1 and b2 side by side, and an epilogue.  dequant_softmax
dequantises the weights, multiplies, and computes the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes
from ..nvfp4 import NvFp4
from ..op import Call
from .torch_product import as_tensor

_Built = tuple[Callable[..., Any], tuple[Any, ...]]
_SCALES = ("scale_a", "scale_b1", "scale_b2")


def steps_of_dual(call: Call) -> dict[str, _Built]:
    """Return (function, tensors) of the product alone and of the epilogue alone.

    Supports FP16, BF16, FP32 and E4M3 without a batch, with per-tensor scales; {} otherwise.
    """
    import torch

    a, b1, b2 = call.args
    options = dict(call.kwargs)
    scales = [options.pop(name, None) for name in _SCALES]
    if options or any(isinstance(x, NvFp4) or x.ndim != 2 for x in call.args):
        return {}
    fp8 = a.dtype == b1.dtype == dtypes.float8_e4m3fn
    plain = dtypes.float16, dtypes.bfloat16, dtypes.float32
    if not fp8 and not (a.dtype == b1.dtype and a.dtype in plain):
        return {}
    if any(getattr(scale, "size", 1) != 1 for scale in scales):
        return {}
    n = b1.shape[1]
    x, left, right = map(as_tensor, (a, b1, b2))
    # The columns are contiguous in memory, the fast layout of torch.
    weights = torch.cat([w.T.contiguous().view(_bits(w)) for w in (left, right)])
    weights = weights.view(left.dtype).T
    factors = [_factor(scale, x) for scale in scales]

    def multiply(x: Any, weights: Any) -> Any:
        if not fp8:
            return x @ weights
        one = factors[0].reshape(())
        return torch._scaled_mm(
            x, weights, one, torch.ones_like(one), out_dtype=torch.float16, use_fast_accum=False
        )

    def finish(y: Any, scale1: Any, scale2: Any) -> Any:
        gate, factor = y[:, :n].float() * scale1, y[:, n:].float() * scale2
        return (torch.nn.functional.silu(gate) * factor).to(y.dtype)

    scale1, scale2 = factors[1:]
    if not fp8:
        scale1, scale2 = scale1 * factors[0], scale2 * factors[0]
    y = multiply(x, weights)
    return {"product": (multiply, (x, weights)), "epilogue": (finish, (y, scale1, scale2))}


def dual(call: Call) -> _Built | None:
    steps = steps_of_dual(call)
    if not steps:
        return None
    (multiply, operands), (finish, (_, *scales)) = steps["product"], steps["epilogue"]
    return (lambda x, w, *scales: finish(multiply(x, w), *scales)), (*operands, *scales)


def logits(call: Call) -> _Built | None:
    """dequant_softmax: dequantise the weights, multiply, softmax."""
    import torch

    a, w, scale = call.args
    if call.kwargs:
        return None
    x = as_tensor(a)

    def compute(x: Any, w: Any, scale: Any) -> Any:
        y = x @ (w.to(x.dtype) * scale.to(x.dtype))
        return torch.softmax(y.float(), -1).to(x.dtype)

    return compute, (x, as_tensor(w), _factor(scale, x))


def _factor(scale: Any, x: Any) -> Any:
    """Return a scale as a float32 tensor on x's device; None means 1."""
    import torch

    if hasattr(scale, "dtype") and not isinstance(scale, np.generic):
        return as_tensor(scale)
    return torch.tensor(
        1.0 if scale is None else float(scale), dtype=torch.float32, device=x.device
    )


def _bits(w: Any) -> Any:
    """Return an integer dtype of w's itemsize: torch.cat does not support FP8."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[w.element_size()]
