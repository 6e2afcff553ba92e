"""Checks of the kernel that copies operands into aligned memory."""

from __future__ import annotations

import math

import numpy as np

from cupykern.gemm import copied_plan


def check_copy(target, shape, dtype, gap: int, first: int, columns: bool = False) -> None:
    """Raises AssertionError.

    shape: of rows in memory, with `gap` elements behind each, `first` ones before.
    """
    *batch, count, size = shape
    whole = math.prod(batch) * count * (size + gap)
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    values = np.arange(first + whole, dtype=np.int64).astype(bits)
    memory = target.xp.asarray(values)
    steps = np.cumprod([bits.itemsize, size + gap, count, *batch[::-1]])[: len(shape)][::-1]
    steps = tuple(map(int, steps))
    x = memory[first:].view(dtype)
    given, strides = ((*t[:-2], t[-1], t[-2]) if columns else tuple(t) for t in (shape, steps))
    made = copied_plan.Copy("b", np.dtype(dtype), given, strides, columns).copier(target)(x)
    assert made.shape[-1] * bits.itemsize % 128 == 0
    expected = np.lib.stride_tricks.as_strided(values[first:], shape, steps)
    made = made if isinstance(made, np.ndarray) else made.get()
    np.testing.assert_array_equal(made[..., :size], expected)
