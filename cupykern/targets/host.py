"""The host target: kernels compiled as C++ and run on the CPU, for tests and machines without GPU.

Settings, by `use(...)` or the environment:
    warp_size   CUPYKERN_HOST_WARP_SIZE   32 (default) or 64
    schedule    CUPYKERN_HOST_SCHEDULE    thread order: fifo (default), lifo or sticky:<seed>
    sanitizer   CUPYKERN_HOST_SANITIZER   build kernels with a sanitizer: address (and undefined
                                          behaviour) or thread
    late_producer                         False (default); True: arrays hold poison until
                                          wait_for_previous_grid
And by the environment alone:
                CUPYKERN_HOST_OPTIMIZE    2 (default); 1: two thirds of the compile time, somewhat
                                          slower kernels; 0: less than half of the compile time
Schedules differ in the races that they expose.  A barrier or shuffle that not all threads reach
raises HostKernelError instead of hanging.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from .. import environment
from ..kernels import Variant, file_text, overlaps, source_text
from ..typing import Namespace
from . import limits
from .base import CompileError, Usage, by_value
from .host_compiler import (
    SANITIZERS,
    Compiler,
    CompilerFailed,
    build,
    check_sanitizer,
    kernel_flags,
    the_compiler,
)

_ORDERS = {"fifo": 0, "lifo": 1, "sticky": 2}  # platform/host/ready_list.h: Order
_KERNEL_SYMBOLS = ("host_load", "host_parameters", "host_entry")
_RUNTIME_SYMBOLS = ("host_runtime", "host_create", "host_run", "host_finish")
_POLL_MS = 50  # between Python's checks for Ctrl-C during a launch


class HostKernelError(RuntimeError):
    """A kernel broke a rule of its platform; the message names file, line and threads."""


@dataclass(frozen=True)
class HostTarget:
    """The CPU with these settings.  Raises ValueError for invalid ones."""

    warp_size: int = 32
    schedule: str = "fifo"
    sanitizer: str | None = None
    late_producer: bool = False

    device_id: ClassVar[int] = 0  # numpy has one
    name: ClassVar[str] = "host"
    arch: ClassVar[str] = "host"
    multiprocessors: ClassVar[int] = limits.multiprocessors("host")
    xp: ClassVar[Namespace] = np

    def __post_init__(self) -> None:
        if self.warp_size not in (32, 64):
            raise ValueError(f"warp_size of the host target must be 32 or 64; got {self.warp_size}")
        if self.sanitizer not in (None, *SANITIZERS):
            raise ValueError(
                f"sanitizer must be one of {', '.join(SANITIZERS)}; got {self.sanitizer!r}"
            )
        _parse_schedule(self.schedule)

    def by_value(self, struct: np.ndarray | np.generic) -> np.ndarray:
        return by_value(struct)

    def compile(self, variant: Variant) -> HostKernel:
        """Compile, or take from the disk cache, and load.

        Raises CompileError, and UnavailableError without a compiler or the sanitizer's library.
        """
        compiler = the_compiler()
        if self.sanitizer:
            check_sanitizer(compiler, self.sanitizer)
        flags = (*kernel_flags(compiler, self.sanitizer), f"-DHOST_WARP_SIZE={self.warp_size}")
        try:
            runtime = _load_runtime(compiler, self.sanitizer)
            library = build(compiler, flags, source_text(variant, "host"), _KERNEL_SYMBOLS)
        except CompilerFailed as failure:
            raise CompileError(variant, self.arch, failure.args[0]) from None
        return HostKernel(self, variant, runtime, library)


def _parse_schedule(schedule: str) -> tuple[int, int]:
    """(order, seed).  Raises ValueError."""
    order, _, seed = schedule.partition(":")
    if (
        order not in _ORDERS
        or (order == "sticky") != seed.isdecimal()
        or (seed and order != "sticky")
    ):
        raise ValueError(f"schedule must be fifo, lifo or sticky:<seed>; got {schedule!r}")
    return _ORDERS[order], int(seed or 0)


# --- the current target ------------------------------------------------------------------------

_override: ContextVar[HostTarget | None] = ContextVar("cupykern_host_target", default=None)


def current() -> HostTarget:
    """The host target with the settings of `use`, else of the environment.  Raises ValueError."""
    return _override.get() or _target(
        environment.host_warp_size(), environment.host_schedule(), environment.host_sanitizer()
    )


_target = cache(HostTarget)


@contextmanager
def use(**settings: Any) -> Iterator[HostTarget]:
    """Within the block, `current()` has these HostTarget settings in this thread or task."""
    target = replace(current(), **settings)
    token = _override.set(target)
    try:
        yield target
    finally:
        _override.reset(token)


# --- kernels -----------------------------------------------------------------------------------


class HostKernel:
    """A loaded variant.  Calls return when the kernel has ended."""

    usage: Usage | None = None

    def __init__(
        self, target: HostTarget, variant: Variant, runtime: ctypes.CDLL, library: ctypes.CDLL
    ):
        order, seed = _parse_schedule(target.schedule)
        library.host_load(ctypes.c_void_p(runtime.host_runtime()))
        library.host_parameters.restype = ctypes.POINTER(ctypes.c_int)
        sizes = library.host_parameters()
        self._sizes: list[int] = []
        while size := sizes[len(self._sizes)]:
            self._sizes.append(size)
        self._variant = variant
        self._library = library  # keeps it loaded
        self._runtime = runtime
        self._config = (
            ctypes.cast(library.host_entry, ctypes.c_void_p).value,
            *variant.launch_sizes,
            target.warp_size,
            order,
            seed,
            overlaps(variant),
        )
        self._is_late = target.late_producer and overlaps(variant)
        self._addresses = ctypes.c_uint64 * (2 * len(self._sizes))

    def _config_of(self, grid: int) -> tuple[Any, ...]:
        """The first arguments of host_create.  With a grid barrier all blocks form one cluster."""
        if not self._variant.waits:
            return self._config
        most = limits.max_cluster_size("host")
        if grid > most:
            raise ValueError(f"at most {most} blocks wait for each other here; got {grid}")
        return (*self._config[:2], grid, *self._config[3:])

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Run `grid` blocks with `shared_bytes` of dynamic shared memory; arguments as in Kernel.

        Ctrl-C ends the kernel at the next barrier, shuffle or start of a block.  A loop without
        these cannot be interrupted.

        Raises TypeError for arguments that do not fit the kernel's parameters, ValueError for a
        grid that is not a multiple of the cluster, and HostKernelError.
        """
        _, cluster_size = self._variant.launch_sizes
        if grid <= 0 or grid % cluster_size:
            raise ValueError(f"grid must be a positive multiple of {cluster_size}; got {grid}")
        addresses = self._pack(args)
        runtime = self._runtime
        late = _late_arrays(args) if self._is_late else None
        launch = runtime.host_create(
            *self._config_of(grid), shared_bytes, grid, addresses, late, len(late or ())
        )
        message = ctypes.create_string_buffer(2048)
        try:
            while not runtime.host_run(launch, _POLL_MS):
                pass
        finally:
            runtime.host_finish(launch, message, len(message))
        if message.value:
            raise HostKernelError(f"{self._variant.kernel}: {message.value.decode()}")

    def blocks_at_once(self, shared_bytes: int) -> int:
        """A few clusters, so that each persistent block processes several rows."""
        return (4 if self._variant.waits else 2) * self._variant.launch_sizes[1]

    def _pack(self, args: tuple[Any, ...]) -> ctypes.Array[ctypes.c_uint64]:
        """The addresses of the arguments, then the values of pointers and scalars."""
        n = len(self._sizes)
        if len(args) != n:
            raise TypeError(f"{self._variant.kernel} takes {n} arguments; got {len(args)}")
        packed = self._addresses()
        values = ctypes.addressof(packed) + 8 * n
        for i, (arg, size) in enumerate(zip(args, self._sizes, strict=True)):
            is_pointer = arg is None or isinstance(arg, np.ndarray)
            is_struct = isinstance(arg, np.ndarray) and arg.dtype.type is np.void and arg.size == 1
            if is_struct and arg.dtype.names is None:
                is_pointer = False
            if is_pointer != (size == -1) or not (is_pointer or arg.nbytes == size):
                raise TypeError(
                    f"{self._variant.kernel}: argument {i} must be "
                    + ("an array or None" if size == -1 else f"a scalar or struct of {size} bytes")
                    + f"; got {type(arg).__name__}"
                    + (f" of {arg.nbytes} bytes" if hasattr(arg, "nbytes") else "")
                )
            packed[i] = values + 8 * i
            if is_pointer:
                packed[n + i] = 0 if arg is None else arg.__array_interface__["data"][0]
            elif isinstance(arg, np.ndarray):
                packed[i] = arg.__array_interface__["data"][0]
            else:
                packed[n + i] = int.from_bytes(arg.tobytes(), sys.byteorder)
        return packed


class _LateArray(ctypes.Structure):
    """platform/host/launch.h: LateArray."""

    _fields_ = (("array", ctypes.c_void_p), ("copy", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


def _late_arrays(args: tuple[Any, ...]) -> ctypes.Array[_LateArray]:
    """The memory ranges of a launch's arrays, merged where they touch."""
    spans = sorted(
        np.lib.array_utils.byte_bounds(arg)
        for arg in args
        if isinstance(arg, np.ndarray) and arg.dtype.type is not np.void and arg.size
    )
    merged: list[tuple[int, int]] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            begin, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((begin, end))
    late = [_LateArray(begin, None, end - begin) for begin, end in merged]
    return (_LateArray * len(late))(*late)


_runtime_lock = threading.Lock()  # reset after fork, where its owner does not exist
_reinit = _runtime_lock._at_fork_reinit  # type: ignore[attr-defined]  # CPython's own
os.register_at_fork(after_in_child=_reinit)
_RUNTIME_DEFINES = {"address": "-DHOST_ASAN", "thread": "-DHOST_TSAN"}
runtimes: dict[tuple[Compiler, str | None], ctypes.CDLL] = {}  # by compiler and sanitizer


def _load_runtime(compiler: Compiler, sanitizer: str | None) -> ctypes.CDLL:
    """Compile and load platform/host/runtime.cpp, which is never instrumented itself."""
    with _runtime_lock:
        runtime = runtimes.get((compiler, sanitizer))
        if runtime is None:
            defines = [_RUNTIME_DEFINES[sanitizer]] if sanitizer else []
            flags = (*kernel_flags(compiler, None, "2"), *defines, "-pthread")
            source = file_text("platform/host/runtime.cpp")
            runtime = build(compiler, flags, source, _RUNTIME_SYMBOLS)
            c_int, c_void_p = ctypes.c_int, ctypes.c_void_p
            runtime.host_runtime.restype = c_void_p
            runtime.host_create.argtypes = (
                *(c_void_p, c_int, c_int, c_int, c_int),
                *(ctypes.c_uint64, c_int, c_int, c_int, c_void_p, c_void_p, c_int),
            )
            runtime.host_create.restype = c_void_p
            runtime.host_run.argtypes = (c_void_p, c_int)
            runtime.host_finish.argtypes = (c_void_p, ctypes.c_char_p, c_int)
            runtimes[compiler, sanitizer] = runtime
        return runtime
