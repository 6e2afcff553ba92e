"""A GPU that is not there: CuPy arrays in host memory, and kernels that only note their launches.

What the wrappers do before a launch can be tested so on any machine.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from fake_copies import replace_copies

from cupykern import targets
from cupykern.kernels import Variant
from cupykern.runtime import plans, workspace
from cupykern.targets import tensor_map

_PAGE = 512  # bytes: what CuPy aligns new arrays to
_SIZE = 1 << 24


class Launch(NamedTuple):
    """args: addresses of arrays, bytes of values and structs, None."""

    variant: Variant
    grid: int
    args: tuple[Any, ...]
    shared_bytes: int


class FakeGpu:
    """A CUDA target of device 0 whose launches are noted and whose memory is reused in a ring."""

    name = "cuda"
    arch = "sm_90a"
    warp_size = 32
    multiprocessors = 132
    device_id = 0

    def __init__(self, size: int = _SIZE) -> None:
        import cupy

        self.size = size

        self.xp = cupy
        self.launches: list[Launch] = []
        self.copies: list[tuple[Any, ...]] = []
        self._buffer = mmap.mmap(-1, size)  # pages of memory, that are there once they are touched
        self.begin = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._memory = cupy.cuda.UnownedMemory(self.begin, size, self._buffer, 0)
        self.offset = 0  # of the next array; a test may set it back
        self.num_allocations = 0
        self.num_packed = 0  # of the launches

    def allocate(self, size: int) -> Any:
        self.num_allocations += 1
        if self.offset + size > self.size:
            self.offset = 0
        pointer = self.xp.cuda.MemoryPointer(self._memory, self.offset)
        self.offset += -(-max(size, 1) // _PAGE) * _PAGE
        return pointer

    def reuse(self) -> None:
        """Give out the memory again from its beginning: no array is needed any more."""
        self.offset = 0

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A CuPy array, of whatever was in memory: nothing reads it."""
        return self.xp.ndarray(shape, np.dtype(dtype))

    def asarray(self, x: np.ndarray) -> Any:
        """A CuPy array of x's shape, strides and dtype, and whatever was in memory."""
        low, high = np.lib.array_utils.byte_bounds(x) if x.size else (x.ctypes.data,) * 2
        memory = self.allocate(high - low) + (x.ctypes.data - low)  # strides may be negative
        if x.itemsize > 1:
            return self.xp.ndarray(x.shape, x.dtype, memory, x.strides)
        return self.xp.ndarray(x.shape, np.uint8, memory, x.strides).view(x.dtype)

    def by_value(self, struct: np.ndarray) -> np.ndarray:
        return targets.base.by_value(struct)

    def compile(self, variant: Variant) -> Any:
        def kernel(grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
            noted = (
                x.data.ptr
                if isinstance(x, self.xp.ndarray)
                else x.ptr
                if isinstance(x, self.xp.cuda.MemoryPointer)
                else None
                if x is None
                else x.tobytes()
                for x in args
            )
            self.launches.append(Launch(variant, grid, tuple(noted), shared_bytes))

        def packed(*launch: Any) -> None:
            kernel(*launch)
            self.num_packed += 1

        kernel.pack = lambda *launch: partial(packed, *launch)
        kernel.blocks_at_once = lambda shared_bytes: variant.cluster_size
        return kernel


_DEFAULT_STREAM = SimpleNamespace(ptr=0, synchronize=lambda: None)


def on_fake_gpu(x: Any, gpu: FakeGpu) -> Any:
    """`x` with arrays of `gpu` in place of numpy's, also in tuples, calls, operands and NvFp4s."""
    if isinstance(x, np.ndarray):
        return gpu.asarray(x)
    if isinstance(x, tuple):
        found = (on_fake_gpu(y, gpu) for y in x)
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    if isinstance(x, dict):
        return {name: on_fake_gpu(y, gpu) for name, y in x.items()}
    if is_dataclass(x):
        copy = object.__new__(type(x))
        copy.__dict__.update(on_fake_gpu(x.__dict__, gpu))
        return copy
    return x


def _note_map(address: int, *args: Any) -> bytes:
    """What a driver would make a tensor map of."""
    return f"{args} at {address}".encode()


def _move_map(encoded: bytes, address: int) -> bytes:
    return encoded[: encoded.rindex(b" ")] + b" %d" % address


@contextmanager
def fake_gpu(monkeypatch: Any, size: int = _SIZE) -> Iterator[FakeGpu]:
    """Within the block, CuPy's arrays lie in the memory of the FakeGpu given, and run on it."""
    gpu = FakeGpu(size)
    monkeypatch.setattr(targets, "gpu_target", lambda device_id: gpu)
    monkeypatch.setattr(gpu.xp.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(gpu.xp.cuda, "get_current_stream", lambda: _DEFAULT_STREAM)
    monkeypatch.setattr(gpu.xp.cuda, "Stream", lambda **options: nullcontext(_DEFAULT_STREAM))
    monkeypatch.setattr(gpu.xp, "zeros", gpu.array)
    monkeypatch.setattr(workspace, "of_streams", {})
    monkeypatch.setattr(workspace, "of_grids", {})
    monkeypatch.setattr(workspace, "of_devices", {gpu.device_id: (np.zeros(0, np.uint32), 0)})
    monkeypatch.setattr(tensor_map, "encode_cuda", _note_map)
    monkeypatch.setattr(tensor_map, "replace_address", _move_map)
    monkeypatch.setattr(
        tensor_map, "argument_of", lambda made: targets.base.by_value(np.frombuffer(made, np.uint8))
    )
    replace_copies(monkeypatch, gpu)
    gpu.xp.cuda.set_allocator(gpu.allocate)
    plans.clear()
    try:
        yield gpu
    finally:
        gpu.xp.cuda.set_allocator(None)
        plans.clear()
