"""Products of complex64 matrices as FP32 products with twice the columns and twice the depth.

A and the result are viewed in place as FP32, with interleaved real and imaginary parts.
kernels_cu/embed_complex64.cu writes B to memory as an FP32 matrix of 2 x 2 blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import arguments, dtypes
from ..arrays import assign, in_elements, maker, packed, steps_of
from ..kernels import Variant
from ..param_structs import zeros
from ..runtime import plans
from ..runtime.jit import get_kernel
from ..targets import Target
from ..targets.repeated import Repeated
from ..typing import Array
from . import launch
from .copied_plan import CopiedPlan
from .gemm import AnyConfig
from .product import ARRAYS, merge_batch

_BLOCKS = 8  # per multiprocessor
_PITCH = 32  # floats: rows are padded to multiples of 128 bytes
EMBED = Variant("embed_complex64", (), (), 256)
_B = ARRAYS["gemm"].index("b")


def run(
    target: Target,
    a: Array,
    b: Array,
    addends: dict[str, Any],
    shape: tuple[int, ...],
    out: Array | None,
    config: AnyConfig | None,
    key: Any,
    **options: Any,
) -> Array:
    """Launch the product and return its result.  The caller has checked the arguments.

    addends: bias and residual, of the result's shape, or None.  shape: the result's (..., M, N).
    key: the key of plans.find.  options: passed on to launch.run.
    """
    with arguments.on_device(target):
        given = {"a": a, "b": b, **addends}
        if out is not None:
            arguments.check_new_out(out, shape, dtypes.complex64, given)
        y = maker(target.xp)(shape, dtypes.complex64) if out is None else out
        if y.size == 0:
            return y
        views = {n: real_view(x) for n, x in given.items() if n != "b" and x is not None}
        embedding = embedding_of(target, b)
        whole = y if real_view(y) is not None else maker(target.xp)(shape, dtypes.complex64)
        copied = whole is not y or embedding is None or any(x is None for x in views.values())
        if embedding is None:
            b = packed(b)
            embedding = embedding_of(target, b)
        for name, view in views.items():
            if view is None:
                views[name] = real_view(packed(given[name]))
        real = {**dict.fromkeys(given), **views, "b": embedding.view(embedding(b))}
        step = None if key is None else (key, "complex64")
        launch.run_step(
            target, real, (*shape[:-1], 2 * shape[-1]), dtypes.float32, real_view(whole), config,
            step, **options,
        )  # fmt: skip
        if whole is not y:
            assign(y, whole)
        known = None if copied else plans.recall(step)
        if known is not None:
            _, product, pick, *_ = known
            plan = CopiedPlan(((_B, embedding),), product)
            plans.remember(key, (target, plan, pick, shape, dtypes.complex64, ()))
    return y


def real_view(x: Any) -> Any:
    """The FP32 view (..., 2 n) of a complex x (..., n), with interleaved real and imaginary parts;
    None unless the last dim is contiguous."""
    if not in_elements(x) or (x.shape[-1] > 1 and x.strides[-1] != x.itemsize):
        return None
    shape, strides = (*x.shape[:-1], 2 * x.shape[-1]), (*x.strides[:-1], 4)
    if isinstance(x, np.ndarray):
        view = np.lib.stride_tricks.as_strided
        return view(x.real, shape, strides, writeable=x.flags.writeable)
    return type(x)(shape, np.float32, x.data, strides)


class Embedding(NamedTuple):
    """Allocates and fills the FP32 matrix of 2 x 2 blocks, from any array that begins at B's
    address."""

    empty: Callable[..., Any]
    shape: tuple[int, ...]
    near_size: int  # length of a row, without its padding
    k_major: bool
    launch: Callable[..., None] | None  # None: B is empty

    def __call__(self, b: Array) -> Array:
        made = self.empty(self.shape, dtypes.float32)
        if self.launch is not None:
            self.launch((b, made))
        return made

    def view(self, made: Array) -> Array:
        """The FP32 matrices (..., 2 K, 2 N) in the memory that the call returned."""
        found = made[..., : self.near_size]
        return found.swapaxes(-1, -2) if self.k_major else found


def embedding_of(target: Target, b: Any) -> Any:
    """The Embedding of b (..., K, N).

    None if the batch does not merge into one dim or a stride is not a multiple of the itemsize; the
    caller then embeds a contiguous copy.
    """
    steps = steps_of(b)
    dims = merge_batch(b.shape[:-2], (steps[:-2],))
    if not in_elements(b) or len(dims) > 1:
        return None
    matrices, (matrix_step,) = dims[0] if dims else (1, (0,))
    row, col = (step // b.itemsize for step in steps[-2:])
    k, n = b.shape[-2:]
    k_major = n == 1 or (k > 1 and abs(row) < abs(col))  # a dim of size 1 has a stride of 0
    (far, far_step), (near, near_step) = (k, row), (n, col)
    if k_major:
        far, far_step, near, near_step = near, near_step, far, far_step
    pitch = -(-2 * near // _PITCH) * _PITCH
    launch = None
    if b.size:
        params = zeros("embed_complex64.cu", "EmbedParams")
        params["matrix_step"], params["pitch"] = matrix_step // b.itemsize, pitch
        params["far_step"], params["near_step"] = far_step, near_step
        params["num_rows"], params["near_size"] = matrices * far, near
        params["far_size"], params["flip"] = far, 2**31 if k_major else 0
        grid = min(matrices * far, _BLOCKS * target.multiprocessors)
        kernel, struct = get_kernel(target, EMBED), target.by_value(params)
        launch = Repeated(kernel, grid, 0, lambda arrays: (*arrays, struct)).launch
    shape = *b.shape[:-2], 2 * far, pitch
    return Embedding(maker(target.xp), shape, 2 * near, k_major, launch)
