"""Functions that are given, and give, arrays of numpy, and compute with cupy's."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np

from cupykern.numerics import to_numpy
from cupykern.targets import is_cupy


class OnGpu:
    """A module whose functions compute on the GPU; classes and constants are as they are."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not callable(found) or isinstance(found, type):
            return found

        @functools.wraps(found)
        def on_gpu(*args: Any, **kwargs: Any) -> Any:
            given = [_there(x) for x in args]
            return _back(found(*given, **{name: _there(x) for name, x in kwargs.items()}))

        return on_gpu


def _there(x: Any) -> Any:
    import cupy

    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.itemsize == 1:  # FP8 too, which cupy takes as bytes
        return cupy.asarray(np.ascontiguousarray(x).view(np.uint8)).view(x.dtype)
    return cupy.asarray(x)


def _back(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(_back, found))
    return to_numpy(found) if is_cupy(found) else found
