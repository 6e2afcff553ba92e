"""PyTorch's products, for peers/torch.py: torch.matmul, F.linear, torch._scaled_mm, F.scaled_mm and
torch._int_mm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes
from ..gemm.product import FP8
from ..numerics import namespace
from ..nvfp4 import NvFp4
from ..op import Call

_OPTIONS = {"bias", "activation", "alpha", "residual", "out_dtype", "precision"}
_ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu_tanh": ("gelu", {"approximate": "tanh"})
}
"""What torch.nn.functional has by another name."""


def product(
    op: str, call: Call, fast_accumulation: bool = False, cast: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return (function, tensors) of a matmul or scaled_mm call, or None if torch lacks it.

    fast_accumulation: an option of torch._scaled_mm.  cast: convert b to a's dtype and scale it in
    advance; NvFp4 operands too, which torch cannot multiply otherwise.  Returns None if an option
    does not apply to the call.
    """
    import torch

    found = _parse(op, call, fast_accumulation, cast)
    if found is None:
        return None
    multiply, finish, tensors, bias_inside = found
    linear = torch.nn.functional.linear

    def compute(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, residual: Any) -> Any:
        if bias_inside:
            return finish(linear(a, b.T, bias), None, residual)
        return finish(multiply(a, b, scale_a, scale_b), bias, residual)

    return compute, tensors


_Steps = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def steps_of_product(op: str, call: Call) -> _Steps:
    """Return (function, tensors) of the cast of b, the bare product and the epilogue, by name.

    The epilogue includes the scales of cast operands.  Returns {} for products of one step.
    """
    found = _parse(op, call)
    if found is None:
        return {}
    multiply, finish, (a, b, scale_a, scale_b, bias, residual), _ = found
    steps: _Steps = {}
    wide, scales = b, (scale_a, scale_b)
    if multiply is _mixed:
        wide = b.to(a.dtype)
        steps["cast"] = (lambda a, b: b.to(a.dtype)), (a, b)
    if multiply in (_plain, _mixed):
        steps["product"] = _plain, (a, wide)
    elif multiply is _integer:
        steps["product"] = (lambda a, b: multiply(a, b, None, None)), (a, b)
    else:
        steps["product"], scales = (multiply, (a, b, scale_a, scale_b)), (None, None)
    function, tensors = steps["product"]
    y = function(*tensors)

    def epilogue(y: Any, scale_a: Any, scale_b: Any, bias: Any, residual: Any) -> Any:
        return finish(_scaled(y, scale_a, scale_b), bias, residual)

    result = epilogue(y, *scales, bias, residual)
    if result is not y:
        steps["epilogue"] = epilogue, (y, *scales, bias, residual)
    return steps if len(steps) > 1 else {}


def _parse(
    op: str, call: Call, fast_accumulation: bool = False, cast: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], bool] | None:
    """Return (multiply, finish, tensors of both, whether F.linear adds the bias), or None."""
    import torch

    scales = (*call.args[2:], None, None)[:2]
    options = dict(call.kwargs)
    if op == "scaled_mm":
        scales = tuple(
            options.pop(name, scale)
            for name, scale in zip(("scale_a", "scale_b"), scales, strict=True)
        )
    a, b = call.args[:2]
    if isinstance(a, NvFp4) or isinstance(b, NvFp4):
        if not cast:
            return None  # torch does not multiply NvFp4 on Hopper
        a, b, cast = *_decoded(a, b), False
    fp8 = a.dtype in FP8 and b.dtype in FP8
    blocks = fp8 and not _known_scales(a, b, scales) and _by_block(a, b, scales)
    if set(options) - _OPTIONS or not (blocks or _known_scales(a, b, scales)):
        return None
    if blocks and (fast_accumulation or not hasattr(torch.nn.functional, "scaled_mm")):
        return None
    mixed = a.dtype != b.dtype and not fp8
    if (fast_accumulation and not fp8) or (cast and not mixed):
        return None
    if blocks:
        multiply = _block_scaled_mm(options)
    elif fp8:
        multiply = _scaled_mm(options, fast_accumulation)
    elif a.dtype == b.dtype == dtypes.int8:
        multiply = _integer
    else:
        multiply = _mixed if mixed and not cast else _plain
    if cast and any(getattr(s, "ndim", 0) and s.shape[-2:] != (1, 1) for s in scales[:1]):
        return None  # row scales cannot be folded into b
    names = ("bias", "residual")
    arrays = (a, b, *(_scale(a, scale) for scale in scales), *map(options.get, names))
    finish = _epilogue(a, options)
    bias = options.get("bias")
    bias_inside = (
        multiply is _plain
        and a.ndim == b.ndim == 2
        and options.get("alpha", 1.0) == 1.0
        and bias is not None
        and bias.ndim == 1
        and bias.dtype == a.dtype
    )
    tensors = list(map(as_tensor, arrays))
    if blocks:
        tensors[2:4] = _block_scales(*tensors[2:4])
    if cast:
        scaled = _scaled(tensors[1].to(tensors[0].dtype), *tensors[2:4]).to(tensors[0].dtype)
        # In b's memory layout.
        tensors[1:4] = [torch.empty_like(tensors[1], dtype=scaled.dtype).copy_(scaled), None, None]
    return multiply, finish, tuple(tensors), bias_inside


def _decoded(a: Any, b: Any) -> tuple[Any, Any]:
    """Dequantise NvFp4 operands to the other one's dtype, else FP16; b becomes (K, N)."""
    of_numbers = [x.dtype for x in (a, b) if not isinstance(x, NvFp4)]
    dtype = of_numbers[0] if of_numbers else dtypes.float16
    wide_a, wide_b = (x.dequantize().astype(dtype) if isinstance(x, NvFp4) else x for x in (a, b))
    return wide_a, wide_b.swapaxes(-1, -2) if isinstance(b, NvFp4) else wide_b


_BLOCK = 128  # elements of a block along k, and along n of b


def _by_block(a: Any, b: Any, scales: tuple[Any, Any]) -> bool:
    """Return whether a has scales per 1 x 128 block and b per 128 x 128 block."""
    (m, k), n = a.shape[-2:], b.shape[-1]
    wanted = (m, -(-k // _BLOCK)), (-(-k // _BLOCK), -(-n // _BLOCK))
    shapes = tuple(getattr(scale, "shape", ()) for scale in scales)
    return a.ndim == b.ndim == 2 and shapes == wanted


def _known_scales(a: Any, b: Any, scales: tuple[Any, Any]) -> bool:
    """Return whether all scales are per tensor, or per row of a and column of b."""
    m, n = a.shape[-2], b.shape[-1]
    return all(
        getattr(scale, "size", 1) == 1 or scale.shape == wanted
        for scale, wanted in zip(scales, ((m, 1), (1, n)), strict=True)
    )


def _scale(a: Any, scale: Any) -> Any:
    """Return a number as a 0-d array in a's namespace."""
    if scale is None or (hasattr(scale, "dtype") and not isinstance(scale, np.generic)):
        return scale
    return namespace(a).asarray(scale, np.float32)


def as_tensor(array: Any) -> Any:
    """Return a tensor of the same memory; FP8 goes as bytes, because DLPack lacks it."""
    import torch

    if array is None:
        return None
    if array.dtype in FP8:
        e4m3 = array.dtype == dtypes.float8_e4m3fn
        dtype = torch.float8_e4m3fn if e4m3 else torch.float8_e5m2
        return torch.from_dlpack(array.view(np.uint8)).view(dtype)
    return torch.from_dlpack(array)


def _scaled(y: Any, scale_a: Any, scale_b: Any) -> Any:
    for scale in (scale_a, scale_b):
        if scale is not None:
            y = y * scale
    return y


def _plain(a: Any, b: Any, *_: Any) -> Any:
    return a @ b


def _mixed(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    return _scaled(a @ b.to(a.dtype), scale_a, scale_b)


def _integer(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    import torch

    return _scaled(torch._int_mm(a, b), scale_a, scale_b)


def _scaled_mm(options: dict[str, Any], fast: bool) -> Callable[..., Any]:
    """torch._scaled_mm: b is column-major; scales are per tensor, or all per row and column."""
    import torch

    out_dtype = _torch_dtype(options.get("out_dtype") or dtypes.bfloat16)

    def multiply(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        rows = any(scale is not None and scale.numel() > 1 for scale in (scale_a, scale_b))
        shapes = ((a.shape[0], 1), (1, b.shape[1])) if rows else ((), ())
        full = [
            torch.ones(shape, dtype=torch.float32, device=a.device)
            if scale is None
            else scale.reshape(()).expand(shape).contiguous()
            if scale.numel() == 1
            else scale
            for scale, shape in zip((scale_a, scale_b), shapes, strict=True)
        ]
        return torch._scaled_mm(a, b, *full, out_dtype=out_dtype, use_fast_accum=fast)

    return multiply


def _block_scales(scale_a: Any, scale_b: Any) -> tuple[Any, Any]:
    """Convert block scales of 1 x 128 and 128 x 128 to the layout of F.scaled_mm.

    The first dim is contiguous, and b's blocks along k are padded to a multiple of 4.
    """
    import torch

    along_k, along_n = scale_b.shape
    rows = -(-along_k // 4) * 4
    options = {"dtype": scale_b.dtype, "device": scale_b.device}
    padded = torch.empty_strided((rows, along_n), (1, rows), **options).zero_()
    padded[:along_k] = scale_b
    strides = (1, scale_a.shape[0])
    return torch.empty_strided(scale_a.shape, strides, **options).copy_(scale_a), padded


def _block_scaled_mm(options: dict[str, Any]) -> Callable[..., Any]:
    """torch.nn.functional.scaled_mm (torch 2.10 and later), for scales from _block_scales."""
    import torch

    functional = torch.nn.functional
    kinds = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    out_dtype = _torch_dtype(options.get("out_dtype") or dtypes.bfloat16)

    def multiply(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
        return functional.scaled_mm(
            a, b, scale_a, kinds[0], scale_b, kinds[1], output_dtype=out_dtype
        )

    return multiply


def _torch_dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, dtype if isinstance(dtype, str) else dtype.name)


def _activation(activation: str | None) -> Callable[[Any], Any]:
    """Return torch's function of the same name, or of that in _ACTIVATIONS."""
    import torch

    if activation is None:
        return lambda y: y
    name, options = _ACTIVATIONS.get(activation, (activation, {}))
    return partial(getattr(torch.nn.functional, name), **options)


def _epilogue(a: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """Return (y, bias, residual) -> result, rounded to the op's output dtype."""
    activate, alpha = _activation(options.get("activation")), options.get("alpha", 1.0)
    out_dtype = options.get("out_dtype")
    if out_dtype is None and a.dtype in (dtypes.float16, dtypes.bfloat16):
        out_dtype = a.dtype
    wanted = None if out_dtype is None else _torch_dtype(out_dtype)

    def finish(y: Any, bias: Any, residual: Any) -> Any:
        if alpha != 1.0:
            y = y * alpha
        if bias is not None:
            y = y + bias
        y = activate(y)
        if residual is not None:
            y = y + residual
        return y if wanted is None else y.to(wanted)

    return finish
