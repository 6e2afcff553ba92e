"""Compare outputs bit by bit, in the memory where they are, without waiting for the GPU."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

from ...numerics import to_numpy
from ...nvfp4 import NvFp4
from ...op import Call, as_tuple
from ...targets import is_cupy


def arrays_of(outputs: Any) -> tuple[Any, ...]:
    """Return a call's output arrays; for an NvFp4, its stored arrays instead of decoded values."""
    if isinstance(outputs, NvFp4):
        outputs = outputs.data, outputs.scale, outputs.global_scale
    return tuple(x for x in as_tuple(outputs) if _is_array(x))


def codes(x: Any) -> Any:
    """View x's bits as unsigned integers of x's itemsize, in the same memory."""
    return x.view(f"u{x.itemsize}")


def differing(x: Any, y: Any) -> int:
    """Count elements whose bits differ; both arrays are CuPy's or both NumPy's.  Synchronises."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return max(x.size, y.size, 1)
    return int((codes(x) != codes(y)).sum()) if x.size else 0


def to_host(value: Any) -> Any:
    """Copy CuPy arrays to NumPy, also inside a Call, tuple, dict or dataclass."""
    if is_cupy(value):
        return to_numpy(value)
    if isinstance(value, Call):
        return Call(to_host(value.args), to_host(value.kwargs))
    if isinstance(value, tuple):
        return tuple(to_host(x) for x in value)
    if isinstance(value, dict):
        return {name: to_host(x) for name, x in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        copy = object.__new__(type(value))
        copy.__dict__.update({f.name: to_host(getattr(value, f.name)) for f in fields(value)})
        return copy
    return value


class Mismatches:
    """Count, for each of `size` calls, the elements that differ from the expected ones.

    A kernel on the current stream counts for CuPy arrays; `counts` waits for the device.
    """

    def __init__(self, xp: Any, size: int):
        self._xp = xp
        self._counts = xp.zeros(size, np.uint32)
        self._places = [self._counts[i : i + 1] for i in range(size)]

    def compare(self, number: int, outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
        place = self._places[number]
        if len(outputs) != len(expected):
            place += 1
            return
        for x, y in zip(outputs, expected, strict=True):
            if x.shape != y.shape or x.dtype != y.dtype:
                place += 1
            elif self._xp is np:
                place += np.uint32(differing(x, y))
            elif x.size:
                _count_on_gpu()(codes(x), codes(y), place)

    def counts(self) -> list[int]:
        if self._xp is not np:
            self._xp.cuda.Device().synchronize()
        return [int(n) for n in to_numpy(self._counts)]


@cache
def _count_on_gpu() -> Any:
    import cupy

    return cupy.ElementwiseKernel(
        "T x, T y", "raw uint32 count", "if (x != y) atomicAdd(&count[0], 1u);", "cupykern_differ"
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_cupy(x)
