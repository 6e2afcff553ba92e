"""Targets: where a kernel runs.  An array's type picks its target; each target is one short file.

`cuda` and `hip` run cupy arrays, whichever CuPy was built for; `host` runs numpy arrays on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from kernels_cu import Variant

from ..typing import Array, Namespace


class CompileError(RuntimeError):
    """A variant did not compile; the message names kernel, variant, architecture, file and line."""

    def __init__(self, variant: Variant, arch: str, log: str):
        self.variant, self.arch, self.log = variant, arch, log
        super().__init__(f"{variant} does not compile for {arch}:\n{log}")

    def __reduce__(self) -> tuple[Any, ...]:  # of a worker process to the one that waits for it
        return CompileError, (self.variant, self.arch, self.log)


class UnavailableError(RuntimeError):
    """A target cannot run here; the message says what is missing."""


class Usage(NamedTuple):
    """What a loaded kernel takes: registers of a thread, local memory of a thread (spills and arrays)
    and static shared memory of a block, both in bytes."""

    registers: int
    local_bytes: int
    shared_bytes: int


class Kernel(Protocol):
    """A compiled variant, loaded.

    CUDA's has also pack(grid, args, shared_bytes), which makes a launch ready (`repeated.Repeated`).
    """

    @property
    def usage(self) -> Usage | None:
        """None: not known, as on the host."""

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        """Launch `grid` blocks with `shared_bytes` of dynamic shared memory each.

        On a GPU: on CuPy's current stream, without waiting.

        args, in the kernel's order: arrays of the target (their pointer; of CuPy also a
        MemoryPointer), None (a null pointer),
        numpy scalars (by value, so the type is exact) and structs from `Target.by_value`.
        """

    def blocks_at_once(self, shared_bytes: int) -> int:
        """How many blocks, in whole clusters, the device runs at once: at least one cluster."""


class GpuKernel(Kernel, Protocol):
    def launch_plainly(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> None:
        """The same launch by CuPy's RawKernel, as who has no wrapper does."""


class Target(Protocol):
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
        """How many blocks run at once, if one fills a multiprocessor."""

    @property
    def xp(self) -> Namespace:
        """The array namespace: cupy or numpy."""

    def compile(self, variant: Variant) -> Kernel:
        """Compile (or read from the disk cache) and load.  Raises CompileError."""

    def by_value(self, struct: np.ndarray | np.generic) -> Any:
        """A kernel argument: `struct`'s bytes, passed by value.  Worth keeping for other launches."""


class Device(NamedTuple):
    """All of a device that decides how a task is computed: equal devices have equal plans."""

    target: str  # "cuda", "hip" or "host"
    arch: str
    warp_size: int
    multiprocessors: int


def device_of(target: Target) -> Device:
    """The device that `target` launches on."""
    return Device(target.name, target.arch, target.warp_size, target.multiprocessors)


@cache
def device_name(target: Target) -> str:
    """The GPU's name, of the host target the CPU's, and the architecture, as the store of tuned configs says it."""
    try:
        name = product_name(target)
    except Exception:  # a driver that does not tell
        name = target.name
    return f"{name}, {target.arch}" + (f"{target.warp_size}" if target.name == "host" else "")


def product_name(target: Target) -> str:
    """The GPU's name; of the host target, the CPU's."""
    if target.name == "host":
        return cpu_name()
    return target.xp.cuda.runtime.getDeviceProperties(target.device_id)["name"].decode()


def cpu_name() -> str:
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def by_value(struct: np.ndarray | np.generic) -> np.ndarray:
    """A kernel argument passed by value: `struct`'s bytes as one element of a plain void dtype."""
    data = np.ascontiguousarray(struct)
    return np.frombuffer(data.tobytes(), dtype=f"V{data.nbytes}")


def launch_argument(struct: np.ndarray) -> Any:
    """`by_value`'s struct as CuPy's launch has it in the end.

    Of a numpy array CuPy asks the address, which comes in a dictionary, at every launch: 1 to 2
    microseconds for each struct.  It also takes the object that it makes of the answer.
    """
    pointer = _launch_pointer()
    return struct if pointer is None else pointer(struct)


def launch_argument_at(address: int, num_bytes: int, owner: Any) -> Any:
    """As launch_argument, of a struct that lies at `address`, in memory that `owner` keeps."""
    pointer = _launch_pointer()
    if pointer is None:
        return np.frombuffer(ctypes.string_at(address, num_bytes), f"V{num_bytes}")
    return pointer(_Owned(address, owner))


class _Owned:
    """Says where it lies as a numpy array does, but much sooner."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, owner: Any):
        self.__array_interface__ = {"data": (address, False)}
        self._owner = owner


@cache
def _launch_pointer() -> Any:
    import cupy

    return getattr(cupy.cuda.function, "CNumpyArray", None)  # not documented


def is_cupy(array: object) -> bool:
    """True for a cupy array; does not import CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def of_array(array: Array) -> Target:
    """The target that holds `array`: of a cupy array, its device's; of a numpy array, the host's."""
    if isinstance(array, np.ndarray):
        from . import host

        return host.current()
    return _gpu(array.device.id)


@cache
def _gpu(device_id: int) -> Target:
    import cupy

    if cupy.cuda.runtime.is_hip:
        from .hip import HipTarget

        return HipTarget(device_id)
    from .cuda import CudaTarget

    return CudaTarget(device_id)


def get(name: str | None = None) -> Target:
    """The target called `name`; None: the GPU if there is one, else the host.

    Raises ValueError for an unknown name and UnavailableError where the target cannot run.
    """
    if name not in (None, "cuda", "hip", "host"):
        raise ValueError(f"target must be cuda, hip or host; got {name!r}")
    if name != "host":
        gpu = _current_gpu()
        if gpu is not None and name in (None, gpu.name):
            return gpu
        if name is not None:
            raise UnavailableError(
                f"target {name} cannot run here: "
                + (f"CuPy is built for {gpu.name}" if gpu else "CuPy sees no GPU")
            )
    from . import host

    return host.current()


def _current_gpu() -> Target | None:
    try:
        import cupy

        if not cupy.cuda.is_available():
            return None
        return _gpu(cupy.cuda.runtime.getDevice())
    except Exception:  # a broken driver or CuPy: `doctor` says what is wrong with it
        return None


def available() -> list[str]:
    """The names of the targets that can run here, the fastest first.

    Raises ValueError where CXX is set and is no compiler.
    """
    from . import host_compiler

    gpu = _current_gpu()
    return ([gpu.name] if gpu else []) + (["host"] if host_compiler.find_compiler() else [])
