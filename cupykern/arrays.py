"""Allocation and copies of arrays of every dtype that kernels take, on a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from . import dtypes, targets
from .targets import address_of
from .typing import Array, DTypeLike, Namespace

ALIGNMENT = 512  # bytes, of every array that the library allocates, like CuPy's
ONE_BYTE = frozenset((dtypes.float8_e4m3fn, dtypes.float8_e5m2))


def empty(shape: int | Sequence[int], dtype: DTypeLike, target: str | None = None) -> Array:
    """An uninitialised array of `shape` and `dtype` (a name or dtype: float16, bfloat16,
    float32, float8_e4m3fn, float8_e5m2, int8 or int32).

    >>> x = cupykern.empty((2, 3), "bfloat16", target="host")
    >>> x.shape, x.dtype
    ((2, 3), dtype(bfloat16))

    target: "cuda" or "hip" (a cupy array), "host" (a numpy array), or None (the GPU if there is
        one, else the host).

    FP8 arrays on CuPy are views of uint8 memory, since CuPy itself cannot allocate them.
    Raises TypeError (shape, dtype), ValueError (negative sizes, target's name),
    targets.UnavailableError.
    """
    dtype = dtypes.resolve(dtype, "dtype", dtypes.OF_ARRAYS)
    try:
        shape = np.broadcast_to(np.uint8(0), shape).shape
    except TypeError:
        raise TypeError(f"shape must be integers; got {shape!r}") from None
    except ValueError:
        raise ValueError(f"shape must not be negative, nor too large; got {shape!r}") from None
    return empty_of(targets.get(target).xp, shape, dtype)


def empty_of(xp: Namespace, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
    """Like `empty`, in the namespace `xp`."""
    return maker(xp)(shape, dtype)


@cache
def maker(xp: Namespace) -> Callable[..., Array]:
    """The function that allocates arrays: make(shape, dtype), for CuPy also with memory, strides.

    Arrays are C-contiguous unless strides, in bytes, are given.  numpy: `_aligned_empty`.  CuPy:
    like cupy.ndarray, but calls its undocumented `_init` directly where that works.  The class
    forwards the arguments twice first, a third of the time to allocate small results.  FP8, which
    CuPy cannot allocate, is a view of uint8 memory.
    """
    if xp is np:
        return _aligned_empty
    kind, takes_fp8 = xp.ndarray, _takes_fp8(xp)
    blank = kind.__mro__[1].__new__

    def plain(shape: Any, dtype: DTypeLike, memory: Any = None, strides: Any = None) -> Any:
        if dtype in ONE_BYTE and (memory is None or not takes_fp8):
            return kind(shape, np.uint8, memory, strides).view(dtype)
        return kind(shape, dtype, memory, strides)

    def fast(shape: Any, dtype: DTypeLike, memory: Any = None, strides: Any = None) -> Any:
        if dtype in ONE_BYTE and (memory is None or not takes_fp8):
            return plain(shape, dtype, memory, strides)
        made = blank(kind)
        made._init(shape, dtype, memory, strides, None)
        return made

    try:
        found, wanted = (f((2, 3), np.float16, _nowhere(xp), (2, 4)) for f in (fast, plain))
        names = "shape", "dtype", "strides", "size", "base"
        same = all(getattr(found, name) == getattr(wanted, name) for name in names)
        return fast if same and found.data.ptr == wanted.data.ptr else plain
    except (AttributeError, TypeError, ValueError):  # another version of CuPy
        return plain


def _aligned_empty(
    shape: int | Sequence[int], dtype: DTypeLike, strides: tuple[int, ...] | None = None
) -> np.ndarray:
    """A numpy array that begins at a multiple of ALIGNMENT bytes, full of NaN.

    Elements that a kernel does not write show, even where malloc returns an earlier result.  numpy
    aligns to 16 bytes only, and kernels choose their loads by the alignment: a result's last
    bits would depend on the address that malloc returns.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod((shape,) if isinstance(shape, int) else shape) * dtype.itemsize
    memory = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
    begin = -memory.__array_interface__["data"][0] % ALIGNMENT
    return np.ndarray(shape, dtype, memory, begin, strides)


def _nowhere(xp: Namespace) -> Any:
    """A dummy CuPy pointer, to test constructors: its memory must not be read or written."""
    return xp.cuda.MemoryPointer(xp.cuda.UnownedMemory(512, 512, None, 0), 0)


def _takes_fp8(xp: Namespace) -> bool:
    """Whether CuPy makes FP8 arrays in given memory, which is faster than a view of uint8."""
    try:
        xp.ndarray((1,), dtypes.float8_e4m3fn, _nowhere(xp))
        return True
    except (TypeError, ValueError):
        return False


def empty_pair(
    xp: Namespace, x: Array, dtype: np.dtype, scale_shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """Two uninitialised cupy arrays in one allocation: x's shape with the one-byte `dtype`, and
    FP32 scales of `scale_shape`."""
    size = -(-x.size // 512) * 512
    memory, make = xp.cuda.alloc(size + 4 * math.prod(scale_shape)), maker(xp)
    return make(x.shape, dtype, memory), make(scale_shape, np.float32, memory + size)


_SMALL = 2**20  # bytes


class Pieces(NamedTuple):
    """Arrays in one allocation of `size` bytes: (offset in bytes, shape, dtype) of each."""

    places: tuple[tuple[int, tuple[int, ...], np.dtype], ...]
    size: int

    @staticmethod
    def of(*parts: tuple[tuple[int, ...], np.dtype]) -> Pieces:
        """parts: shape and dtype of each; no FP8.  Each begins at a multiple of ALIGNMENT."""
        places, size = [], 0
        for shape, dtype in parts:
            begin = -(-size // ALIGNMENT) * ALIGNMENT
            places.append((begin, shape, dtype))
            size = begin + math.prod(shape) * dtype.itemsize
        return Pieces(tuple(places), size)

    def at(self, make: Callable[..., Array], memory: Any) -> list[Array]:
        """The cupy arrays in `memory`, a MemoryPointer.  make: see `maker`."""
        return [make(shape, dtype, memory + offset) for offset, shape, dtype in self.places]


def small_twins(shape: tuple[int, ...], first: np.dtype, second: np.dtype) -> Pieces | None:
    """The Pieces of two small arrays of `shape`.

    None if the second exceeds 1 MiB, so that each can be freed alone, or if the first is FP8.
    """
    if math.prod(shape) * second.itemsize > _SMALL or first in ONE_BYTE:
        return None
    return Pieces.of((shape, first), (shape, second))


def empty_like_of(xp: Namespace, x: Array, dtype: np.dtype) -> Array:
    """An uninitialised array of x's shape and stride order, in the namespace `xp`."""
    if xp is np:
        strides = np.empty_like(x, dtype=dtype, order="K").strides
        return _aligned_empty(x.shape, dtype, strides)
    if dtype in ONE_BYTE:
        return xp.empty_like(x, dtype=np.uint8, order="K").view(dtype)
    return xp.empty_like(x, dtype=dtype, order="K")


def steps_of(array: Array) -> tuple[int, ...]:
    """The strides in bytes, with 0 for dims of size 1 and for arrays without elements.

    Such strides are arbitrary even in C-contiguous arrays.  With zeros, all C-contiguous arrays of
    one shape have the same steps, and the same plans.
    """
    if array.size == 0:
        return (0,) * array.ndim
    steps = zip(array.shape, array.strides, strict=True)
    return tuple(0 if size == 1 else stride for size, stride in steps)


def in_elements(array: Array) -> bool:
    """Whether an array's address and strides are multiples of its item size, as kernels require."""
    return not any(step % array.dtype.itemsize for step in (address_of(array), *steps_of(array)))


def packed(x: Array) -> Array:
    """A C-contiguous copy of a cupy or numpy array."""
    if isinstance(x, np.ndarray):
        made = _aligned_empty(x.shape, x.dtype)
        made[...] = x
        return made
    if x.itemsize == 1:  # CuPy cannot copy FP8
        return x.view(np.uint8).copy(order="C").view(x.dtype)
    if in_elements(x):
        return x.copy(order="C")
    return _bytes(x).copy(order="C").view(x.dtype).reshape(x.shape)


def take(x: Array, index: Any) -> Array:
    """x[index], also for dtypes that CuPy's own kernels do not support."""
    return x.view(f"u{x.itemsize}")[index].view(x.dtype)


def assign(y: Array, x: Array) -> None:
    """y[...] = x, for arrays of the same shape and dtype."""
    if isinstance(y, np.ndarray) or in_elements(y):
        y[...] = x
    else:
        _bytes(y)[...] = _bytes(x)


def _bytes(x: Array) -> Array:
    """The bytes of a cupy array, along an additional last dim.

    CuPy's own kernels access whole elements, which faults at misaligned addresses.
    """
    return cast(
        Array, cast(Any, type(x))((*x.shape, x.itemsize), np.uint8, x.data, (*x.strides, 1))
    )


def transposed(x: Any) -> Any:
    """`x` with its last two dims exchanged, if it has them."""
    return x.swapaxes(-1, -2) if getattr(x, "ndim", 0) >= 2 else x


def transposed_addend(x: Any) -> Any:
    """`x`, which broadcasts to a matrix, rearranged to broadcast to the matrix's transpose; numbers
    and None unchanged."""
    return x[:, None] if getattr(x, "ndim", 0) == 1 else transposed(x)
