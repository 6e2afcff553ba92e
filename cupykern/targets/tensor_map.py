"""Tensor maps: kernel arguments that describe an array to TMA, which copies boxes of it.

A kernel declares one as `GRID_CONSTANT TensorMap map`.  Shapes, strides and boxes are in numpy's
order, the innermost dimension last; the kernel's coordinates are in TMA's, the innermost first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import address_of
from ..param_structs import zeros
from ..typing import Array
from . import is_cupy
from .base import UnavailableError, by_value, launch_argument_at

SWIZZLES = (0, 32, 64, 128)

_MAX_RANK = 5
_MAX_BOX = 256
_MAX_KEPT = 4096
_ALIGNMENT = 16  # bytes, of the array and its strides

# cuda.h: CUtensorMapDataType.  FP8 is copied as bytes; a zero outside the array is 0 in all dtypes.
_DATA_TYPES = {
    np.dtype(np.uint8): 0,
    dtypes.int8: 0,
    dtypes.float8_e4m3fn: 0,
    dtypes.float8_e5m2: 0,
    np.dtype(np.uint16): 1,
    np.dtype(np.uint32): 2,
    dtypes.int32: 3,
    dtypes.float16: 6,
    dtypes.float32: 7,
    dtypes.bfloat16: 9,
}
_INTERLEAVE_NONE = 0
_L2_PROMOTION_128B, _L2_PROMOTION_256B = 2, 3
_OUTSIDE_IS_ZERO = 0
_HOST_MAGIC = int.from_bytes(b"TnsorMap", "little")


def of_array(array: Array, box: Sequence[int], swizzle: int) -> np.ndarray:
    """The map of `array` (cupy or numpy); box, swizzle and errors: see `encode`."""
    if is_cupy(array):
        name, address = "cuda", array.data.ptr
    else:
        name, address = "host", address_of(array)
    return encode(name, address, array.dtype, array.shape, array.strides, tuple(box), swizzle)


def encode(
    target: str,
    address: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> np.ndarray:
    """A kernel argument: the map of the array at `address` on `target` ("cuda" or "host").

    strides: in bytes.  box: elements per dimension that one instruction copies.
    swizzle: 0, or the bytes of the box's rows in shared memory, 32, 64 or 128, whose 16-byte chunks
        are then permuted.

    Raises ValueError beyond TMA's limits, TypeError for a dtype that it cannot copy, and
    UnavailableError without a CUDA driver.
    """
    key = dtype, shape, strides, box, swizzle
    if target == "cuda" and (known := _encoded.get(key)) is not None and not address % _ALIGNMENT:
        return argument_of(replace_address(known, address))
    dtype = np.dtype(dtype)
    if dtype not in _DATA_TYPES:
        raise TypeError(f"a tensor map's dtype must be one of {_names()}; got {dtype}")
    strides = _check(address, dtype.itemsize, shape, strides, box, swizzle)
    if target == "host":
        return _encode_host(address, dtype.itemsize, shape, strides, box, swizzle)
    if target == "cuda":
        found = encode_cuda(address, dtype, shape, strides, box, swizzle)
        if len(_encoded) >= _MAX_KEPT:
            _encoded.clear()
        _encoded[key] = found
        return argument_of(found)
    raise ValueError(f"a tensor map's target must be cuda or host; got {target!r}")


_encoded: dict[Any, _CudaMap] = {}  # by all but the address, which is faster to replace
forget = _encoded.clear


def argument_of(encoded: _CudaMap) -> Any:
    """Return the map as a kernel argument."""
    return launch_argument_at(encoded.address, _MAP_BYTES, encoded)


def _names() -> str:
    return ", ".join(map(str, _DATA_TYPES))


def _check(
    address: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> tuple[int, ...]:
    """Check TMA's limits; return the strides, valid ones for dimensions of size 1.

    Raises ValueError.
    """
    rank = len(shape)
    if not 1 <= rank <= _MAX_RANK:
        raise ValueError(f"a tensor map has 1 to {_MAX_RANK} dimensions; got shape {shape}")
    if len(strides) != rank or len(box) != rank:
        raise ValueError(
            f"shape, strides and box must be of one length; got {shape}, {strides}, {box}"
        )
    if not all(1 <= size < 2**32 for size in shape):
        raise ValueError(f"a tensor map's sizes are 1 to 2**32 - 1; got shape {shape}")
    if not all(1 <= size <= _MAX_BOX for size in box):
        raise ValueError(f"a box's sizes are 1 to {_MAX_BOX}; got {box}")
    if address % _ALIGNMENT:
        raise ValueError(f"a tensor map's array must be aligned to 16 bytes; got {address:#x}")
    if shape[-1] > 1 and strides[-1] != itemsize:
        raise ValueError(
            f"a tensor map's last dimension must be contiguous; got a stride of {strides[-1]} bytes"
        )
    row = -(-shape[-1] * itemsize // _ALIGNMENT) * _ALIGNMENT
    strides = tuple(
        row if size == 1 else stride for size, stride in zip(shape, strides, strict=True)
    )
    if not all(0 <= stride < 2**40 and stride % _ALIGNMENT == 0 for stride in strides[:-1]):
        raise ValueError(
            f"a tensor map's strides are multiples of 16 bytes below 2**40; got {strides[:-1]}"
        )
    if swizzle not in SWIZZLES:
        raise ValueError(f"swizzle must be one of {SWIZZLES} bytes; got {swizzle}")
    row_bytes = box[-1] * itemsize
    if row_bytes % 16:
        raise ValueError(f"a box's rows are multiples of 16 bytes; got {row_bytes}")
    # TMA accepts rows shorter than the swizzle, but leaves gaps between them.
    if swizzle and row_bytes != swizzle:
        raise ValueError(
            f"a box's rows must be as long as the swizzle, {swizzle} bytes; got {row_bytes}"
        )
    return strides


def _encode_host(
    address: int,
    itemsize: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> np.ndarray:
    rank = len(shape)
    data = zeros("platform/host/interface.h", "TensorMap")
    data["magic"], data["address"] = _HOST_MAGIC, address
    data["shape"][:rank] = shape[::-1]
    data["strides"][: rank - 1] = strides[-2::-1]
    data["box"][:rank] = box[::-1]
    data["rank"], data["item_bytes"], data["swizzle_bytes"] = rank, itemsize, swizzle
    return by_value(data)


_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_Memory = ctypes.c_uint64 * ((_MAP_BYTES + _MAP_ALIGNMENT) // 8)


class _CudaMap:
    """Memory for a map, aligned to 64 bytes as the driver requires."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = _Memory()
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT


def encode_cuda(
    address: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> _CudaMap:
    rank, made = len(shape), _CudaMap()
    # Boxes of long misaligned rows contain parts of 128-byte lines.  Promotion to 256 bytes would
    # load more of other boxes: (4096, 4096, 4104) takes 190 us instead of 197 (bf16, H200).
    anywhere = rank > 1 and strides[-2] % 128 != 0 and shape[-1] * dtype.itemsize > 512
    error = _called(
        _driver().cuTensorMapEncodeTiled,
        made.address,
        _DATA_TYPES[dtype],
        rank,
        address,
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * rank)(*strides[-2::-1]),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE,
        SWIZZLES.index(swizzle),
        _L2_PROMOTION_128B if anywhere else _L2_PROMOTION_256B,
        _OUTSIDE_IS_ZERO,
    )
    if error:
        raise ValueError(
            f"cuTensorMapEncodeTiled gives error {error} for shape {shape}, strides {strides}, "
            f"box {box}, swizzle {swizzle}"
        )
    return made


def replace_address(encoded: _CudaMap, address: int) -> _CudaMap:
    """Copy the map `encoded`, with another address, a multiple of 16."""
    made = _CudaMap()
    ctypes.memmove(made.address, encoded.address, _MAP_BYTES)
    error = _called(_driver().cuTensorMapReplaceAddress, made.address, address)
    if error:
        raise ValueError(f"cuTensorMapReplaceAddress gives error {error} for address {address:#x}")
    return made


_INVALID_CONTEXT = 201  # cuda.h: CUDA_ERROR_INVALID_CONTEXT


def _called(function: Any, *args: Any) -> int:
    """Call the driver and return its error code.

    A thread that has not used the runtime has no context; a call of CuPy makes the device's
    current.
    """
    error = function(*args)
    if error == _INVALID_CONTEXT:
        import cupy

        cupy.cuda.runtime.free(0)
        error = function(*args)
    return error


@cache
def _driver() -> ctypes.PyDLL:
    """The CUDA driver, called with the GIL held: its calls take less time than releasing it."""
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
        pointer, unsigned, signed = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
        driver.cuTensorMapEncodeTiled.argtypes = (
            *(pointer, signed, unsigned), *[pointer] * 5, *[signed] * 4,
        )  # fmt: skip
        driver.cuTensorMapReplaceAddress.argtypes = pointer, pointer
        return driver
    except (OSError, AttributeError) as error:  # an older driver lacks them
        raise UnavailableError(f"no CUDA driver that makes tensor maps: {error}") from None
