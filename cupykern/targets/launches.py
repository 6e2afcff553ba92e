"""Driver calls that CuPy lacks: launches with attributes, and the number of co-resident clusters.

Attributes set the blocks per cluster, and allow a launch to start before the stream's previous
kernel has ended (programmatic dependent launch).  The latter is for kernels that call
wait_for_previous_grid (platform/cuda.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from .. import environment

_CLUSTER_DIMENSION = 4  # cuda.h: CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_*
_UINT = ctypes.c_uint


Launcher = Callable[[int, int], None]  # (stream, address of the array of argument addresses)


class Attribute(ctypes.Structure):
    """cuda.h: CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", _UINT * 16))


class LaunchConfig(ctypes.Structure):
    """cuda.h: CUlaunchConfig."""

    _fields_ = (
        ("grid", _UINT * 3),
        ("block", _UINT * 3),
        ("shared_bytes", _UINT),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", _UINT),
    )


# --- whether launches overlap ------------------------------------------------------------------

_chosen: ContextVar[bool | None] = ContextVar("cupykern_overlap_launches", default=None)


@contextmanager
def overlap_launches(enabled: bool) -> Iterator[None]:
    """Within the block, set whether kernels of this thread (or task) may start before the stream's
    previous kernel ends.  The default is CUPYKERN_OVERLAP.

    enabled: False: a kernel starts when the previous one has ended.  True: on NVIDIA GPUs from
        sm_90 on, its blocks can be resident before, and wait before their first memory access.

    Results are the same.  A CUDA graph keeps the setting of its capture.  Raises TypeError if
    enabled is not a bool.

    >>> x = np.ones((8, 1000), np.float16)
    >>> with cupykern.overlap_launches(False):
    ...     y = cupykern.rms_norm(x)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be a bool; got {type(enabled).__name__}")
    token = _chosen.set(enabled)
    try:
        yield
    finally:
        _chosen.reset(token)


# --- launches with attributes ------------------------------------------------------------------


def max_active_clusters(function: int, size: int, num_threads: int, shared_bytes: int) -> int:
    """The number of co-resident clusters of `size` blocks of a CUfunction on the current device.

    Raises RuntimeError with the driver's error.
    """
    config = _Launch((size, num_threads, shared_bytes), None, size, False)
    count = ctypes.c_int(0)
    error = driver().cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.c_void_p(config.address)
    )
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters gives error {error}")
    return count.value


def launcher(
    function: int, sizes: tuple[int, int, int], cluster_size: int, overlaps: bool
) -> Launcher:
    """Return a function that launches the CUfunction; it raises RuntimeError with driver errors.

    sizes: blocks, threads per block, bytes of dynamic shared memory.
    cluster_size: 1 also if the source declares the cluster's size.
    overlaps: whether the kernel calls wait_for_previous_grid, so that launches can overlap if
        enabled.
    """
    launch_kernel = driver().cuLaunchKernelEx
    launch_kernel.argtypes = [ctypes.c_void_p] * 4
    by_default = environment.overlaps()
    # By stream, because two threads can launch at once.
    serial: dict[int, _Launch] = {}
    overlapping: dict[int, _Launch] = {}

    def launch(stream: int, arguments: int) -> None:
        chosen = _chosen.get() if overlaps else False
        if chosen is None:
            chosen = by_default
        configs = overlapping if chosen else serial
        config = configs.get(stream)
        if config is None:
            config = configs[stream] = _Launch(sizes, stream, cluster_size, chosen)
        if error := launch_kernel(config.address, function, arguments, None):
            raise RuntimeError(f"cuLaunchKernelEx gives error {error}")

    return launch


@cache
def driver() -> ctypes.CDLL:
    """Return CUDA's driver library."""
    return ctypes.CDLL("libcuda.so.1")


class _Launch:
    """A CUlaunchConfig at `address`, and the attributes that it points to."""

    def __init__(
        self, sizes: tuple[int, int, int], stream: int | None, cluster_size: int, overlaps: bool
    ):
        grid, num_threads, shared_bytes = sizes
        attributes = []
        if cluster_size > 1:
            value = (_UINT * 16)(cluster_size, 1, 1)
            attributes.append(Attribute(_CLUSTER_DIMENSION, 0, value))
        if overlaps:
            value = (_UINT * 16)(1)
            attributes.append(Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, value))
        self._attributes = (Attribute * len(attributes))(*attributes)
        self._config = LaunchConfig(
            (_UINT * 3)(grid, 1, 1),
            (_UINT * 3)(num_threads, 1, 1),
            shared_bytes,
            stream,
            ctypes.addressof(self._attributes),
            len(attributes),
        )
        self.address = ctypes.addressof(self._config)
