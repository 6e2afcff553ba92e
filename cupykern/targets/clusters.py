"""What CuPy has no words for: launches in clusters whose size the launch says, and how many
clusters a CUDA device runs at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_CLUSTER_DIMENSION = 4  # cuda.h: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_UINT = ctypes.c_uint


class _Attribute(ctypes.Structure):
    """cuda.h: CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", _UINT * 16))


class _LaunchConfig(ctypes.Structure):
    """cuda.h: CUlaunchConfig."""

    _fields_ = (
        ("grid", _UINT * 3),
        ("block", _UINT * 3),
        ("shared_bytes", _UINT),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", _UINT),
    )


def max_active_clusters(function: int, size: int, num_threads: int, shared_bytes: int) -> int:
    """How many clusters of `size` blocks of the CUfunction run at once on the current device.

    Raises RuntimeError with the driver's error.
    """
    config = _ClusterLaunch(size, (size, num_threads, shared_bytes), None)
    count = ctypes.c_int(0)
    error = _driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.c_void_p(config.address)
    )
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters gives error {error}")
    return count.value


def cluster_launcher(
    function: int, size: int, sizes: tuple[int, int, int]
) -> Callable[[int, int], None]:
    """What launches the CUfunction, which says nothing of clusters, in clusters of `size` blocks:
    called with a stream and the address of the arguments' addresses.

    sizes: blocks, threads of a block, bytes of dynamic shared memory.  Raises RuntimeError with the
    driver's error.
    """
    launch_kernel = _driver().cuLaunchKernelEx
    launch_kernel.argtypes = [ctypes.c_void_p] * 4
    configs: dict[int, _ClusterLaunch] = {}  # by stream: two threads may launch at once

    def launch(stream: int, arguments: int) -> None:
        config = configs.get(stream)
        if config is None:
            config = configs[stream] = _ClusterLaunch(size, sizes, stream)
        if error := launch_kernel(config.address, function, arguments, None):
            raise RuntimeError(f"cuLaunchKernelEx gives error {error}")

    return launch


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _ClusterLaunch:
    """A CUlaunchConfig, at `address`, and the attribute that it names."""

    def __init__(self, size: int, sizes: tuple[int, int, int], stream: int | None):
        grid, num_threads, shared_bytes = sizes
        self._attribute = _Attribute(_CLUSTER_DIMENSION, 0, (_UINT * 16)(size, 1, 1))
        self._config = _LaunchConfig(
            (_UINT * 3)(grid, 1, 1),
            (_UINT * 3)(num_threads, 1, 1),
            shared_bytes,
            stream,
            ctypes.addressof(self._attribute),
            1,
        )
        self.address = ctypes.addressof(self._config)
