"""Packed launches: their arguments lie in memory as CUDA's driver takes them, read once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .clusters import cluster_launcher


def pack(
    kernel: Any,
    device_id: int,
    sizes: tuple[int, int, int],
    args: tuple[Any, ...],
    cluster_size: int = 1,
) -> Callable[[], None]:
    """What launches CuPy's `kernel` (a Function) on the stream that is current when it is called.

    sizes: blocks, threads of a block, bytes of dynamic shared memory.  args: as Kernel takes them; of arrays
    the address alone is kept.  The current device is `device_id`.  cluster_size: of the launch, where the
    kernel does not say it.
    """
    import cupy

    arguments = _Arguments(args)
    grid, num_threads, shared_bytes = sizes
    launch_sizes = kernel.ptr, grid, 1, 1, num_threads, 1, 1, shared_bytes
    get_stream, memory_info = cupy.cuda.get_current_stream, cupy.cuda.runtime.memGetInfo
    launch_kernel = cupy.cuda.driver.launchKernel

    def launch() -> None:
        if device_id not in _thread.devices:
            memory_info()  # makes the device's context this thread's, as CuPy's own launches do
            _thread.devices.add(device_id)
        launch_kernel(*launch_sizes, get_stream().ptr, arguments.address, 0)

    if cluster_size == 1:
        return launch
    launch_in_clusters = cluster_launcher(kernel.ptr, cluster_size, sizes)

    def launch_clusters() -> None:
        if device_id not in _thread.devices:
            memory_info()
            _thread.devices.add(device_id)
        launch_in_clusters(get_stream().ptr, arguments.address)

    return launch_clusters


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()  # that have a context


_thread = _Thread()


class _Arguments:
    """The addresses of arguments, at `address`, and what they are addresses of."""

    def __init__(self, args: tuple[Any, ...]):
        self._values = (ctypes.c_uint64 * len(args))()
        self._addresses = (ctypes.c_uint64 * len(args))()
        self._kept: list[Any] = []
        first = ctypes.addressof(self._values)
        for i, arg in enumerate(args):
            self._addresses[i] = first + 8 * i
            if arg is None:
                continue
            if isinstance(arg, (np.generic, np.ndarray)):  # by value
                kept = np.ascontiguousarray(arg)
                self._addresses[i] = kept.ctypes.data
                self._kept.append(kept)
            elif hasattr(arg, "data"):  # an array
                self._values[i] = arg.data.ptr
            elif hasattr(arg, "mem"):  # a MemoryPointer
                self._values[i] = arg.ptr
            else:  # targets.launch_argument's
                self._addresses[i] = arg.ptr
                self._kept.append(arg)
        self.address = ctypes.addressof(self._addresses)
