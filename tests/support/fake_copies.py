"""CuPy's copies and transfers by numpy, for arrays that lie in the host's memory (fake_gpu.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

MOST_COPIED = 1 << 14  # bytes; nothing reads larger arrays


def in_numpy(x: Any) -> np.ndarray:
    """The elements of a CuPy array, as bits, in place."""
    memory = (ctypes.c_uint8 * max(x.itemsize, 1)).from_address(x.data.ptr)
    bits = np.ndarray((1,), f"V{x.itemsize}", memory)
    return np.lib.stride_tricks.as_strided(bits, x.shape, x.strides)


def replace_copies(monkeypatch: Any, gpu: Any) -> None:
    """Let the methods of CuPy's arrays that would launch a kernel or ask the driver work without
    them.  Each copy is noted in `gpu.copies`."""
    xp = gpu.xp
    reshape, kernels_missing = xp.ndarray.reshape, xp.cuda.runtime.CUDARuntimeError

    def note(name: str, x: Any) -> None:
        gpu.copies.append((name, x.shape, x.strides, str(x.dtype)))

    def copy(x: Any, order: str = "C") -> Any:
        note("copy", x)
        bits = np.uint8 if x.itemsize == 1 else x.dtype  # CuPy makes no FP8 arrays
        made = gpu.array(x.shape, bits).view(x.dtype)
        if x.nbytes <= MOST_COPIED:
            in_numpy(made)[...] = in_numpy(x)
        return made

    def assign(x: Any, where: Any, value: Any) -> None:
        part = x[where]
        note("assign", part)
        if part.nbytes > MOST_COPIED:
            return
        bits = in_numpy(value).view(value.dtype) if isinstance(value, xp.ndarray) else value
        in_numpy(part)[...] = np.asarray(bits).astype(part.dtype).view(f"V{part.itemsize}")

    def reshape_or_copy(x: Any, *shape: Any, order: str = "C") -> Any:
        try:
            return reshape(x, *shape, order=order)
        except kernels_missing:  # it is no view
            return reshape(copy(x), *shape)

    def asarray(x: Any, dtype: Any = None, order: str = "K") -> Any:
        if isinstance(x, xp.ndarray):
            return x
        x = np.array(x, dtype, order="C")
        made = gpu.asarray(x)
        note("upload", made)
        in_numpy(made)[...] = x.view(f"V{x.itemsize}")
        return made

    def get(x: Any) -> np.ndarray:
        note("download", x)
        return in_numpy(x).copy().view(x.dtype)

    monkeypatch.setattr(xp.ndarray, "copy", copy)
    monkeypatch.setattr(xp.ndarray, "__setitem__", assign)
    monkeypatch.setattr(xp.ndarray, "reshape", reshape_or_copy)
    monkeypatch.setattr(xp.ndarray, "get", get)
    monkeypatch.setattr(xp.ndarray, "item", lambda x: get(x).item())
    monkeypatch.setattr(xp, "asarray", asarray)
    monkeypatch.setattr(xp, "array", lambda x, order="C": copy(x))
    monkeypatch.setattr(xp, "ones", lambda shape, dtype: asarray(np.ones(shape, dtype)))
    monkeypatch.setattr(
        xp, "full", lambda shape, value, dtype: asarray(np.full(shape, value, dtype))
    )
