"""Repeated launches: a launch reuses packed arguments if its arrays have the same addresses.

Packed arguments are stored as CUDA's driver takes them, and prepared once.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .base import Kernel
from .launches import Launcher

Packer = Callable[[int, tuple[Any, ...], int], Callable[[], None]]
MOST_PACKED = 1024  # launches kept per plan


class Repeated:
    """The launches of one plan, by the addresses of their arrays.

    CuPy examines every argument of every launch, and tensor maps depend on addresses.  Addresses
    often recur: a result takes the memory of a freed one.  The second launch with the same
    addresses is packed; later ones reuse it and examine nothing.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_known", "_pack", "_shared_bytes")

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        shared_bytes: int,
        arguments: Callable[..., tuple[Any, ...]],
    ):
        """arguments: maps the arguments of `launch` or `launch_at` to the kernel's arguments."""
        self._kernel, self._grid, self._shared_bytes = kernel, grid, shared_bytes
        self._arguments = arguments
        self._pack: Packer | None = getattr(kernel, "pack", None)
        self._known: dict[Any, Callable[[], None]] = {}

    def of(self, make: Callable[..., tuple[Any, ...]]) -> Repeated:
        """The same launch, of arrays that `make` derives from the launch's arguments."""
        arguments = self._arguments
        return Repeated(
            self._kernel, self._grid, self._shared_bytes, lambda *given: arguments(make(*given))
        )

    def launch(self, arrays: tuple[Any, ...], places: Any = None) -> None:
        """Launch with `arguments(arrays)`; some arrays may be None.

        places: a key that determines the addresses of all of them; None: use their addresses.
        """
        if places is None:
            # places_of, inlined.
            try:
                places = tuple([x if x is None else x.data.ptr for x in arrays])
            except (AttributeError, TypeError, ValueError):
                places = None
        known = self._known.get(places)
        if known is None or known is _seen:
            self._launch(places, known, (arrays,))
        else:
            known()

    def launch_at(self, places: Any, *given: Any) -> None:
        """Launch with `arguments(*given)`.

        places: a key that determines the addresses; None: there is none, and nothing is kept.
        """
        known = self._known.get(places)
        if known is None or known is _seen:
            self._launch(places, known, given)
        else:
            known()

    def _launch(self, places: Any, known: Any, given: tuple[Any, ...]) -> None:
        args = self._arguments(*given)
        if known is _seen and self._pack is not None:
            packed = self._known[places] = self._pack(self._grid, args, self._shared_bytes)
            packed()
            return
        self._kernel(self._grid, args, self._shared_bytes)
        if self._pack is not None and places is not None:
            if len(self._known) >= MOST_PACKED:
                self._known.clear()
            self._known[places] = _seen


def _seen() -> None:
    """The placeholder of a launch that was seen once."""


def places_of(arrays: tuple[Any, ...]) -> tuple[int | None, ...] | None:
    """The addresses of cupy arrays, None for an array that is None; None for numpy arrays."""
    try:
        return tuple([x if x is None else x.data.ptr for x in arrays])
    except (AttributeError, TypeError, ValueError):  # numpy's x.data
        return None


# --- packed launches ---------------------------------------------------------------------------


def pack(
    kernel: Any,
    device_id: int,
    sizes: tuple[int, int, int],
    args: tuple[Any, ...],
    launch_on: Launcher | None = None,
) -> Callable[[], None]:
    """Return a function that launches CuPy's `kernel` (a Function) on the then current stream.

    sizes: blocks, threads per block, bytes of dynamic shared memory.
    args: as for Kernel; arrays are kept as addresses only.
    device_id: the current device.
    launch_on: launches `kernel` with attributes (launches.launcher); None: without attributes.
    """
    import cupy

    arguments = _Arguments(args)
    grid, num_threads, shared_bytes = sizes
    launch_sizes = kernel.ptr, grid, 1, 1, num_threads, 1, 1, shared_bytes
    get_stream, memory_info = cupy.cuda.get_current_stream, cupy.cuda.runtime.memGetInfo
    launch_kernel = cupy.cuda.driver.launchKernel

    def launch() -> None:
        if device_id not in _thread.devices:
            memory_info()  # makes the device's context current in this thread
            _thread.devices.add(device_id)
        launch_kernel(*launch_sizes, get_stream().ptr, arguments.address, 0)

    if launch_on is None:
        return launch

    def launch_with_attributes() -> None:
        if device_id not in _thread.devices:
            memory_info()
            _thread.devices.add(device_id)
        launch_on(get_stream().ptr, arguments.address)

    return launch_with_attributes


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[int] = set()  # with a context in this thread


_thread = _Thread()


class _Arguments:
    """The array of argument addresses, at `address`, and the values that they point to."""

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
            else:  # base.launch_argument's
                self._addresses[i] = arg.ptr
                self._kept.append(arg)
        self.address = ctypes.addressof(self._addresses)
