"""Arrays that are accessed only by DLPack or `__cuda_array_interface__`, including JAX's."""

from __future__ import annotations

import atexit
import functools
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from . import dlpack

_NOTHING: AbstractContextManager[object] = nullcontext()
# (event, arrays that kernels launched before it may read).  The exporting library does not know
# CuPy's stream, so the arrays are kept until the event is done.
in_use: deque[tuple[Any, Sequence[Any]]] = deque()


class Protocols:
    """The Library of one class of arrays.

    Calls run on CuPy's current stream, which waits until the arrays are ready.
    """

    def __init__(self, kind: type):
        root = kind.__module__.partition(".")[0]
        self.name = "jax" if root == "jaxlib" else root
        self._has_dlpack = hasattr(kind, "__dlpack__")

    def running(self, x: Any, mixed: bool) -> AbstractContextManager[object]:
        return _NOTHING

    def instead(self, *_: Any) -> None:
        return None

    def native(self, name: str, x: Any) -> Any:
        if self.name == "jax":
            if isinstance(x, sys.modules["jax"].core.Tracer):
                raise TypeError(
                    f"{name} must not be traced by JAX: kernels are launched by the call itself; "
                    f"call outside of jax.jit, jax.grad and jax.vmap"
                )
            if name == "out":
                raise TypeError("out must not be a jax array, which cannot be written to")
        return dlpack.take(name, x) if self._has_dlpack else _of_interface(name, x)

    def before(self, natives: Sequence[Any]) -> None:
        """Nothing: `native` already made the stream wait."""

    def after(self, natives: Sequence[Any], runs: bool) -> None:
        there = [x for x in natives if not isinstance(x, np.ndarray)]
        if there:
            _keep(there)

    def place(self, x: Any) -> str:
        """The device of x, for messages."""
        if not self._has_dlpack:
            return "gpu"
        kind, device_id = x.__dlpack_device__()
        return "cpu" if int(kind) in dlpack.CPU else f"gpu {int(device_id)}"

    def back(self, array: Any, like: Any) -> Any:
        """Convert `array` by from_dlpack of like's namespace or module; unchanged without one."""
        find = getattr(like, "__array_namespace__", None)
        space = sys.modules.get(self.name) if find is None else find()
        make = getattr(space, "from_dlpack", None)
        return array if make is None else make(dlpack.Exported(array))


def _of_interface(name: str, x: Any) -> Any:
    """The cupy array of an object with `__cuda_array_interface__` (version 3)."""
    import cupy

    interface = x.__cuda_array_interface__
    address, read_only = interface["data"]
    if name == "out" and read_only:
        raise ValueError("out must be writable; it is read-only")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    device_id = _device_of(cupy, address)
    stream = interface.get("stream")
    if stream is not None:
        _wait(cupy, 0 if stream == 1 else stream, device_id)
    strides = interface.get("strides")
    return dlpack.cupy_at(cupy, address, shape, dtype, strides, x, device_id)


def _device_of(cupy: Any, address: int) -> int:
    runtime = cupy.cuda.runtime
    return runtime.pointerGetAttributes(address).device if address else runtime.getDevice()


class ForeignStream:
    """A stream's handle with the protocol that CuPy takes, `__cuda_stream__`."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _wait(cupy: Any, handle: int, device_id: int) -> None:
    """Make CuPy's current stream of the device wait for all work of another stream."""
    with dlpack.on_device(cupy, device_id):
        current = cupy.cuda.get_current_stream()
        if current.ptr != handle:
            join(cupy, current, cupy.cuda.Stream.from_external(ForeignStream(handle)))


def join(cupy: Any, stream: Any, other: Any) -> None:
    """Make `stream` wait for the work submitted to `other` so far."""
    stream.wait_event(other.record(cupy.cuda.Event(disable_timing=True)))


@functools.cache
def release_at_exit() -> None:
    """Register `_release` when the first array is kept.

    It then follows the exit handlers of the array's library, and runs before them.  JAX's ends its
    clients, after which a capsule's deleter can crash.
    """
    atexit.register(_release)


def _release() -> None:
    """Wait for the kernels, then release the arrays that they may have read."""
    while in_use:
        in_use[0][0].synchronize()
        in_use.popleft()


def _keep(arrays: Sequence[Any]) -> None:
    import cupy

    release_at_exit()

    with dlpack.on_device(cupy, arrays[0].device.id):
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():  # launches come later: the graph's owner keeps the arrays
            return
        while in_use and in_use[0][0].done:
            in_use.popleft()
        in_use.append((stream.record(cupy.cuda.Event(disable_timing=True)), arrays))
