"""Targets: where a kernel runs.  An array's type picks its target; each target is one short file.

Cupy arrays run on `cuda` or `hip`, depending on CuPy's build; numpy arrays run on the CPU (`host`).
"""

from __future__ import annotations

import sys
from functools import cache

import numpy as np

from ..typing import Array
from .base import CompileError, Device, GpuKernel, Kernel, Target, UnavailableError, Usage

__all__ = [
    "CompileError",
    "Device",
    "GpuKernel",
    "Kernel",
    "Target",
    "UnavailableError",
    "Usage",
    "available",
    "cpu_name",
    "device_name",
    "device_of",
    "get",
    "is_cupy",
    "of_array",
    "product_name",
]


def device_of(target: Target) -> Device:
    """The device that `target` launches on.

    >>> targets.device_of(targets.get("host")).arch
    'host'
    """
    return Device(target.name, target.arch, target.warp_size, target.multiprocessors)


@cache
def device_name(target: Target) -> str:
    """The device's name (host: the CPU's) and architecture, as in the keys of tuned configs.

    >>> targets.device_name(targets.get("host")).startswith(targets.cpu_name())
    True
    """
    try:
        name = product_name(target)
    except Exception:  # the driver does not report it
        name = target.name
    return f"{name}, {target.arch}" + (f"{target.warp_size}" if target.name == "host" else "")


def product_name(target: Target) -> str:
    """The GPU's name; of the host target, the CPU's.

    >>> targets.product_name(targets.get("host")) == targets.cpu_name()
    True
    """
    if target.name == "host":
        return cpu_name()
    return target.xp.cuda.runtime.getDeviceProperties(target.device_id)["name"].decode()


def cpu_name() -> str:
    """The CPU's name, as the system reports it.

    >>> type(targets.cpu_name()).__name__
    'str'
    """
    import platform

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def is_cupy(array: object) -> bool:
    """True for a cupy array; does not import CuPy.

    >>> targets.is_cupy(np.ones(3))
    False
    """
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def of_array(array: Array) -> Target:
    """The target that holds `array`: a cupy array's device, or the host for numpy.

    >>> targets.of_array(np.ones(3)).name
    'host'
    """
    if isinstance(array, np.ndarray):
        from . import host

        return host.current()
    return gpu_target(array.device.id)


@cache
def gpu_target(device_id: int) -> Target:
    """Return CuPy's device as a target."""
    import cupy

    if cupy.cuda.runtime.is_hip:
        from .hip import HipTarget

        return HipTarget(device_id)
    from .cuda import CudaTarget

    return CudaTarget(device_id)


def get(name: str | None = None) -> Target:
    """The target called `name`; None: the GPU if there is one, else the host.

    >>> targets.get("host").xp is np
    True

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
        return gpu_target(cupy.cuda.runtime.getDevice())
    except Exception:  # a broken driver or CuPy: `doctor` reports the cause
        return None


def available() -> list[str]:
    """The names of the targets that can run here, the fastest first.

    >>> targets.available()[-1]
    'host'

    Raises ValueError if CXX is set but is not a compiler.
    """
    from . import host_compiler

    gpu = _current_gpu()
    return ([gpu.name] if gpu else []) + (["host"] if host_compiler.find_compiler() else [])
