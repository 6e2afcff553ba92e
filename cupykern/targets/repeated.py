"""Launches that come again: with its arrays where they lay before, a launch is one that is packed.

The arguments of a packed launch lie in memory as CUDA's driver takes them, read once.
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
MOST_PACKED = 1024  # that one plan keeps


class Repeated:
    """The launches of one plan, by where their arrays lie.

    CuPy looks at every argument of every launch, and tensor maps are of addresses.  When arrays lie
    where they lay before, as results often do whose predecessors were freed, nothing is left to
    look at: a launch that comes for the second time is packed, and later ones are that one.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_known", "_pack", "_shared_bytes")

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        shared_bytes: int,
        arguments: Callable[..., tuple[Any, ...]],
    ):
        """arguments: the kernel's, of what is launched with."""
        self._kernel, self._grid, self._shared_bytes = kernel, grid, shared_bytes
        self._arguments = arguments
        self._pack: Packer | None = getattr(kernel, "pack", None)
        self._known: dict[Any, Callable[[], None]] = {}

    def of(self, make: Callable[..., tuple[Any, ...]]) -> Repeated:
        """The same launch, of arrays that `make` makes of what it is launched with."""
        arguments = self._arguments
        return Repeated(
            self._kernel, self._grid, self._shared_bytes, lambda *given: arguments(make(*given))
        )

    def launch(self, arrays: tuple[Any, ...], places: Any = None) -> None:
        """With what `arguments` makes of `arrays`, of which some may be None.

        places: what the addresses of all of them follow from; None to look.
        """
        if places is None:
            # As places_of, without a call.
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
        """With what `arguments` makes of `given`; None: addresses do not follow from `places`."""
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
    """In place of a launch that has come once."""


def places_of(arrays: tuple[Any, ...]) -> tuple[int | None, ...] | None:
    """The addresses of CuPy's arrays, of which some may be None; None for numpy's."""
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
    """What launches CuPy's `kernel` (a Function) on the stream that is current when it is called.

    sizes: blocks, threads of a block, bytes of dynamic shared memory.  args: as Kernel takes them;
    of arrays the address alone is kept.  The current device is `device_id`.  launch_on: what
    launches `kernel` with attributes (launches.launcher); None: without.
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
            else:  # base.launch_argument's
                self._addresses[i] = arg.ptr
                self._kept.append(arg)
        self.address = ctypes.addressof(self._addresses)
