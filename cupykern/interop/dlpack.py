"""Convert DLPack capsules to cupy and numpy arrays of every dtype that kernels take, and back.

CuPy and numpy do not support capsules of FP8, and numpy none of bfloat16, so this module reads the
struct in a capsule itself.  Source: dlpack.h, version 1.1.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import maker

CPU = (1, 3, 11)  # kDLCPU, and pinned memory: kDLCUDAHost, kDLROCMHost
GPU = (2, 10, 13)  # kDLCUDA, kDLROCM, kDLCUDAManaged
_CUDA = (2, 13)
_VERSION = (1, 0)
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

_FLOAT, _BFLOAT, _COMPLEX, _BOOL, _E4M3FN, _E5M2 = 2, 4, 5, 6, 10, 12  # DLDataTypeCode
_DTYPES = {
    **{(0, 8 * size): np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{(1, 8 * size): np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{(_FLOAT, 8 * size): np.dtype(f"f{size}") for size in (2, 4, 8)},
    (_BFLOAT, 16): dtypes.bfloat16,
    (_COMPLEX, 64): np.dtype(np.complex64),
    (_BOOL, 8): np.dtype(bool),
    (_E4M3FN, 8): dtypes.float8_e4m3fn,
    (_E5M2, 8): dtypes.float8_e5m2,
}
_RELABELLED = {dtype: code for code, dtype in _DTYPES.items() if code[0] in (4, 10, 12)}


class _Tensor(ctypes.Structure):  # DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):  # DLManagedTensorVersioned
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def take(name: str, x: Any) -> Any:
    """A cupy or numpy array of x's memory, ready on CuPy's current stream.

    It keeps x's capsule, and thereby the memory, alive.  Raises TypeError (dtype, device) naming
    `name`, ValueError (a read-only `out`) and BufferError (another major version of DLPack).
    """
    kind, device_id = (int(i) for i in x.__dlpack_device__())
    if kind in CPU:
        return _numpy(name, _capsule(x))
    if kind not in GPU:
        raise TypeError(f"{name} must be on a CPU or GPU; got DLPack's device type {kind}")
    import cupy

    with on_device(cupy, device_id):
        stream = cupy.cuda.get_current_stream().ptr
        if stream == 0 and kind in _CUDA:
            stream = 1  # CUDA's default stream in the array API
        capsule = _capsule(x, stream=stream)
    tensor, read_only = _struct(capsule)
    if name == "out" and read_only:
        raise ValueError("out must be writable; it is read-only")
    return cupy_at(cupy, *_layout(name, tensor), capsule, device_id)


def on_device(cupy: Any, device_id: int) -> AbstractContextManager[object]:
    """A context in which `device_id` is CuPy's current device."""
    is_current = device_id == cupy.cuda.runtime.getDevice()
    return nullcontext() if is_current else cupy.cuda.Device(device_id)


def _capsule(x: Any, **stream: int) -> Any:
    try:
        return x.__dlpack__(max_version=_VERSION, **stream)
    except TypeError:  # DLPack before 1.0
        return x.__dlpack__(**stream)


def _struct(capsule: Any) -> tuple[_Tensor, bool]:
    """(the tensor in a capsule, whether it is read-only)."""
    if _is_valid(capsule, b"dltensor_versioned"):
        found = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if found.major != _VERSION[0]:
            raise BufferError(f"DLPack {found.major}.{found.minor} is not known; 1.x is")
        return found.tensor, bool(found.flags & _READ_ONLY)
    return _Tensor.from_address(_pointer(capsule, b"dltensor")), False


def _layout(
    name: str, tensor: _Tensor
) -> tuple[int, tuple[int, ...], np.dtype, tuple[int, ...] | None]:
    """(address, shape, dtype, strides in bytes; None for C order)."""
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(
            f"{name} must have one of the dtypes {', '.join(map(str, _DTYPES.values()))}; got "
            f"DLPack's type {tensor.code} of {tensor.bits} bits"
        )
    dims = range(tensor.ndim)
    shape = tuple(tensor.shape[i] for i in dims)
    strides = None
    if tensor.strides and math.prod(shape):
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in dims)
    return (tensor.data or 0) + tensor.byte_offset, shape, dtype, strides


class _Interface:
    """An object that numpy converts to an array, which keeps `owner` alive."""

    def __init__(self, owner: Any, **interface: Any):
        self.owner, self.__array_interface__ = owner, {"version": 3, **interface}


def _numpy(name: str, capsule: Any) -> np.ndarray:
    tensor, read_only = _struct(capsule)
    address, shape, dtype, strides = _layout(name, tensor)
    if not math.prod(shape):
        return np.empty(shape, dtype)
    interface = _Interface(
        capsule,
        data=(address, read_only),
        shape=shape,
        strides=strides,
        typestr=f"|V{dtype.itemsize}",
    )
    return np.asarray(interface).view(dtype)


def cupy_at(
    cupy: Any,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    strides: tuple[int, ...] | None,
    owner: Any,
    device_id: int,
) -> Any:
    """A cupy array of memory that `owner` keeps alive.  strides: in bytes; None: C order."""
    cuda = cupy.cuda
    memory = cuda.UnownedMemory(address, extent(shape, dtype, strides), owner, device_id)
    return maker(cupy)(shape, dtype, cuda.MemoryPointer(memory, 0), strides)


def extent(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None) -> int:
    """The number of bytes that an array spans from its first element on."""
    size = math.prod(shape) * dtype.itemsize
    if strides is None or not size:
        return size
    found = dtype.itemsize
    for size, stride in zip(shape, strides, strict=True):
        if stride > 0:
            found += (size - 1) * stride
    return found


class Exported:
    """Export a cupy or numpy array of any dtype by DLPack.

    For bfloat16 and FP8, the code in a capsule of unsigned integers is replaced by the dtype's.
    """

    def __init__(self, array: Any):
        self._code = _RELABELLED.get(array.dtype)
        self._array = array if self._code is None else array.view(f"u{array.itemsize}")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        if self._code is not None:
            tensor, _ = _struct(capsule)
            tensor.code, tensor.bits = self._code
        return capsule
