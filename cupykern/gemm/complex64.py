"""Products of complex64 matrices as products of FP32 ones, of twice as many columns and depth.

A and the result are read as FP32 where they lie, with real and imaginary parts in turn; B is
embedded in memory by kernels_cu/embed_complex64.cu.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments, dtypes
from ..arrays import assign, in_elements, maker, packed, steps_of
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime.jit import get_kernel
from ..targets import Target
from . import launch
from .gemm import AnyConfig
from .product import merge_batch

_BLOCKS = 8  # of a multiprocessor
_PITCH = 32  # floats: rows of whole 128 bytes
EMBED = Variant("embed_complex64", (), (), 256)


def run(
    target: Target,
    a: Any,
    b: Any,
    addends: dict[str, Any],
    shape: tuple[int, ...],
    out: Any,
    config: AnyConfig | None,
    key: Any,
    **options: Any,
) -> Any:
    """The product, whose arguments are checked.

    addends: bias and residual, of the result's shape, or None.  key: that of plans.find.  options:
    those of launch.run.
    """
    with arguments.on_device(target):
        given = {"a": a, "b": b, **addends}
        if out is not None:
            arguments.check_new_out(out, shape, dtypes.complex64, given)
        y = maker(target.xp)(shape, dtypes.complex64) if out is None else out
        if y.size == 0:
            return y
        real = {"a": _readable(a), "b": embedded(target, b)}
        real |= {name: None if x is None else _readable(x) for name, x in addends.items()}
        whole = y if real_view(y) is not None else maker(target.xp)(shape, dtypes.complex64)
        launch.run_step(
            target, real, (*shape[:-1], 2 * shape[-1]), dtypes.float32, real_view(whole), config,
            None if key is None else (key, "complex64"), **options,
        )  # fmt: skip
        if whole is not y:
            assign(y, whole)
    return y


def real_view(x: Any) -> Any:
    """(..., 2 n) of FP32, real and imaginary parts in turn, of (..., n); None where these do not
    lie side by side."""
    if not in_elements(x) or (x.shape[-1] > 1 and x.strides[-1] != x.itemsize):
        return None
    shape, strides = (*x.shape[:-1], 2 * x.shape[-1]), (*x.strides[:-1], 4)
    if isinstance(x, np.ndarray):
        view = np.lib.stride_tricks.as_strided
        return view(x.real, shape, strides, writeable=x.flags.writeable)
    return type(x)(shape, np.float32, x.data, strides)


def _readable(x: Any) -> Any:
    found = real_view(x)
    return real_view(packed(x)) if found is None else found


def embedded(target: Target, b: Any) -> Any:
    """(..., 2 K, 2 N) of FP32 in memory of its own, of (..., K, N)."""
    steps = steps_of(b)
    dims = merge_batch(b.shape[:-2], (steps[:-2],))
    if not in_elements(b) or len(dims) > 1:
        b = packed(b)
        steps = steps_of(b)
        dims = merge_batch(b.shape[:-2], (steps[:-2],))
    matrices, (matrix_step,) = dims[0] if dims else (1, (0,))
    row, col = (step // b.itemsize for step in steps[-2:])
    k_major = abs(row) < abs(col)
    (far, far_step), (near, near_step) = (b.shape[-2], row), (b.shape[-1], col)
    if k_major:
        far, far_step, near, near_step = near, near_step, far, far_step
    pitch = -(-2 * near // _PITCH) * _PITCH
    params = zeros("embed_complex64.cu", "EmbedParams")
    params["matrix_step"], params["pitch"] = matrix_step // b.itemsize, pitch
    params["far_step"], params["near_step"] = far_step, near_step
    params["num_rows"], params["near_size"] = matrices * far, near
    params["far_size"], params["flip"] = far, 2**31 if k_major else 0
    made = maker(target.xp)((*b.shape[:-2], 2 * far, pitch), np.float32)
    if b.size:
        grid = min(matrices * far, _BLOCKS * target.multiprocessors)
        get_kernel(target, EMBED)(grid, (b, made, target.by_value(params)))
    found = made[..., : 2 * near]
    return found.swapaxes(-1, -2) if k_major else found
