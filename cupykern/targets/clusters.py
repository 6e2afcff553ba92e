"""How many clusters of a kernel's blocks a CUDA device runs at once, which CuPy does not tell."""

from __future__ import annotations

import ctypes

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
    driver = ctypes.CDLL("libcuda.so.1")
    attribute = _Attribute(_CLUSTER_DIMENSION, 0, (_UINT * 16)(size, 1, 1))
    config = _LaunchConfig(
        (_UINT * 3)(size, 1, 1),
        (_UINT * 3)(num_threads, 1, 1),
        shared_bytes,
        None,
        ctypes.addressof(attribute),
        1,
    )
    count = ctypes.c_int(0)
    error = driver.cuOccupancyMaxActiveClusters(
        ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)
    )
    if error:
        raise RuntimeError(f"cuOccupancyMaxActiveClusters gives error {error}")
    return count.value
