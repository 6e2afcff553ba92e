"""Shared by the targets: protocols of kernels and targets, devices, launch arguments, errors."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..kernels import Variant
from ..typing import Array, Namespace


class CompileError(RuntimeError):
    """A variant did not compile; the message names kernel, variant, architecture, file and line.

    >>> from cupykern.kernels import Variant
    >>> broken = Variant("broken", (), (), 32, text="KERNEL void broken() { none; }")
    >>> try:
    ...     targets.get("host").compile(broken)
    ... except targets.CompileError as error:
    ...     print(error.arch, error.variant.kernel)
    host broken
    """

    def __init__(self, variant: Variant, arch: str, log: str):
        self.variant, self.arch, self.log = variant, arch, log
        super().__init__(f"{variant} does not compile for {arch}:\n{log}")

    def __reduce__(self) -> tuple[Any, ...]:  # to be raised across processes
        return CompileError, (self.variant, self.arch, self.log)


class UnavailableError(RuntimeError):
    """A target cannot run here; the message says what is missing.

    >>> try:
    ...     name = targets.get("cuda").name
    ... except targets.UnavailableError:
    ...     name = targets.get("host").name
    >>> name in targets.available()
    True
    """


class Usage(NamedTuple):
    """Resources of a loaded kernel: registers per thread, local memory per thread (spills and
    arrays) and static shared memory per block, both in bytes.

    >>> usage = targets.Usage(registers=64, local_bytes=0, shared_bytes=1024)
    >>> usage.local_bytes == 0  # nothing is spilled
    True
    """

    registers: int
    local_bytes: int
    shared_bytes: int


class Kernel(Protocol):
    """A compiled and loaded variant.

    >>> from cupykern.kernels import Variant
    >>> text = "KERNEL void twice(float* x) { if (threadIdx.x < 3) x[threadIdx.x] *= 2; }"
    >>> kernel = targets.get("host").compile(Variant("twice", (), (), 32, text=text))
    >>> x = np.array([1, 2, 3], np.float32)
    >>> kernel(1, (x,))  # one block of 32 threads
    >>> x.tolist()
    [2.0, 4.0, 6.0]

    CUDA kernels also have pack(grid, args, shared_bytes), which prepares a launch
    (`repeated.Repeated`).
    """

    @property
    def usage(self) -> Usage | None:
        """None: not known, as on the host."""

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Launch `grid` blocks with `shared_bytes` of dynamic shared memory each.

        On a GPU: asynchronously, on CuPy's current stream.

        args, in the kernel's order: arrays of the target (passed as pointers; with CuPy also
        MemoryPointers), None (a null pointer), numpy scalars (by value, of the parameter's exact
        type) and structs from `Target.by_value`.
        """

    def blocks_at_once(self, shared_bytes: int) -> int:
        """The number of co-resident blocks, in whole clusters: at least one cluster."""


class GpuKernel(Kernel, Protocol):
    """A kernel of a GPU.

    >>> from cupykern.kernels import Variant
    >>> nothing = Variant("nothing", (), (), 32, text="KERNEL void nothing() {}")
    >>> kernel = targets.get("host").compile(nothing)
    >>> hasattr(kernel, "launch_plainly")  # on the host it is a Kernel
    False
    """

    def launch_plainly(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> None:
        """The same launch by CuPy's RawKernel, as in code without this wrapper."""


class Target(Protocol):
    """A device that runs kernels: a GPU through CuPy, or the host.

    >>> host = targets.get("host")
    >>> host.name, host.arch, host.xp.__name__
    ('host', 'host', 'numpy')
    """

    def __hash__(self) -> int: ...  # plans are looked up by target
    @property
    def name(self) -> str:
        """ "cuda", "hip" or "host"."""

    @property
    def arch(self) -> str:
        """ "sm_90a", "gfx942", "host"."""

    @property
    def device_id(self) -> int:
        """The GPU's number; the host is 0."""

    @property
    def warp_size(self) -> int: ...
    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors: the co-resident blocks if one fills a multiprocessor."""

    @property
    def xp(self) -> Namespace:
        """The array namespace: cupy or numpy."""

    def compile(self, variant: Variant) -> Kernel:
        """Compile (or read from the disk cache) and load.  Raises CompileError."""

    def by_value(self, struct: np.ndarray | np.generic) -> Any:
        """A kernel argument: `struct`'s bytes, passed by value.  It can be used many times."""


class Device(NamedTuple):
    """The properties of a device that determine how a task is computed.

    Equal devices have equal plans.

    >>> h200 = targets.Device("cuda", "sm_90a", 32, 132)
    >>> h200 == targets.Device("cuda", "sm_90a", 32, 132)
    True
    """

    target: str  # "cuda", "hip" or "host"
    arch: str
    warp_size: int
    multiprocessors: int


def by_value(struct: np.ndarray | np.generic) -> np.ndarray:
    """A kernel argument passed by value: `struct`'s bytes as one element of a plain void dtype."""
    data = np.ascontiguousarray(struct)
    return np.frombuffer(data.tobytes(), dtype=f"V{data.nbytes}")


def launch_argument(struct: np.ndarray) -> Any:
    """Convert a struct of `by_value` to the object that CuPy's launch makes of it.

    CuPy accepts this object as well.  It reads a numpy array's address from a dictionary at every
    launch, 1 to 2 microseconds per struct.
    """
    pointer = _launch_pointer()
    return struct if pointer is None else pointer(struct)


def launch_argument_at(address: int, num_bytes: int, owner: Any) -> Any:
    """Like launch_argument, for a struct at `address` in memory that `owner` keeps alive."""
    pointer = _launch_pointer()
    if pointer is None:
        return np.frombuffer(ctypes.string_at(address, num_bytes), f"V{num_bytes}")
    return pointer(_Owned(address, owner))


def address_of(array: Array) -> int:
    """The address of the first element of a cupy or numpy array.

    >>> x = np.zeros(4, np.float32)
    >>> targets.address_of(x[1:]) - targets.address_of(x)
    4
    """
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


class _Owned:
    """Memory with numpy's `__array_interface__` as a stored attribute, which is faster to read."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, owner: Any):
        self.__array_interface__ = {"data": (address, False)}
        self._owner = owner


@cache
def _launch_pointer() -> Any:
    import cupy

    return getattr(cupy.cuda.function, "CNumpyArray", None)  # not documented
