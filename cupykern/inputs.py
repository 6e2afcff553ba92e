"""Inputs for checks and benchmarks: seeded values of several kinds, in several memory layouts."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from . import dtypes
from .numerics import finfo
from .typing import Array, Namespace

KINDS = ("normal", "uniform", "same_sign", "wide", "exact", "subnormal", "special")
LAYOUTS = ("C", "F", "sliced", "negative", "offset", "broadcast")


def values(kind: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Random numbers of `kind`, rounded to `dtype`.

    normal: N(0, 1).  uniform: [-10, 10).  same_sign: [0.5, 1.5).  wide: exponents over a third of
    the format's range.  exact: small integers.  subnormal: normal, times the smallest normal number
    and a power of two from 1/8 to 4096.  special: normal with NaN, infinities, zeros of both signs,
    subnormals and +-max / 2 (differences stay finite) sprinkled in, not in every row.
    """
    rng = np.random.default_rng(seed)
    info = finfo(dtype)
    x: np.ndarray
    if kind == "normal":
        x = rng.standard_normal(shape, dtype=np.float32)
    elif kind == "uniform":
        x = rng.uniform(-10, 10, shape)
    elif kind == "same_sign":
        x = rng.uniform(0.5, 1.5, shape)
    elif kind == "wide":
        low, high = np.log2(info.min_normal) / 3, np.log2(info.max) / 3
        x = np.exp2(rng.uniform(low, high, shape)) * rng.choice((-1.0, 1.0), shape)
    elif kind == "exact":
        x = rng.integers(-8, 9, shape).astype(np.float64)
    elif kind == "subnormal":
        x = rng.standard_normal(shape) * info.min_normal * 2.0 ** rng.integers(-3, 13)
    elif kind == "special":
        x = rng.standard_normal(shape)
        specials = (np.nan, np.inf, -np.inf, 0.0, -0.0, info.min_subnormal, -info.min_normal,
                    info.max / 2, -info.max / 2)  # fmt: skip
        where = rng.random(shape) < min(0.2, 2.0 / max(shape[-1] if shape else 1, 1))
        x = np.where(where, rng.choice(specials, shape), x)
    else:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    with np.errstate(over="ignore"):
        return np.asarray(x, dtype=dtype)


def with_layout(x: Array, layout: str, xp: Namespace) -> Array:
    """x's numbers in `xp`, in another memory layout; some layouts are views of larger memory.

    sliced: every second element of a larger array along the last axis.  negative: reversed strides.
    offset: one element off the alignment of the allocation.  broadcast: stride 0 along the first
    axis (whose first entry is repeated).
    """
    if xp is not np and isinstance(x, np.ndarray) and x.ndim and layout != "C":
        return upload(with_layout(x, layout, np), xp)
    x = xp.asarray(x)
    if x.ndim == 0 or layout == "C":
        return x
    if layout == "F":
        return xp.asfortranarray(x)
    if layout == "sliced":
        large = xp.empty((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        large[..., ::2] = x
        large[..., 1::2] = x
        return large[..., ::2]
    if layout == "negative":
        return xp.ascontiguousarray(x[..., ::-1])[..., ::-1]
    if layout == "offset":
        if x.size == 0:  # `flat` has no element to start at
            large = xp.empty([n + 2 for n in x.shape], x.dtype)
            return large[..., 1:][tuple(map(slice, x.shape))]
        flat = xp.empty(x.size + 1, x.dtype)
        flat[1:] = x.ravel()
        return flat[1:].reshape(x.shape)
    if layout == "broadcast":
        return xp.broadcast_to(x[:1], x.shape)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")


def upload(x: Any, xp: Namespace) -> Array:
    """Copy x and its whole memory to CuPy's `xp` as bytes; keep its offset and strides.

    CuPy compiles a kernel per dtype and number of dims for each strided copy.
    """
    if not x.size:
        return xp.asarray(x)
    root = x
    while isinstance(root.base, np.ndarray):
        root = root.base
    low, high = np.lib.array_utils.byte_bounds(root)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low))
    start = xp.asarray(memory).data + (x.ctypes.data - low)
    dtype = np.dtype(np.uint8) if x.itemsize == 1 else x.dtype  # CuPy copies FP8 only as bytes
    return xp.ndarray(x.shape, dtype, start, x.strides).view(x.dtype)


def bench_options(op: str, text: str, legal: Sequence[str]) -> tuple[str, set[str]]:
    """Split a bench row's dtype and options: "float32:a+b" gives ("float32", {"a", "b"}).

    Raises ValueError for options that are not in `legal`.
    """
    name, _, rest = text.partition(":")
    chosen = set(rest.split("+")) if rest else set()
    if unknown := chosen - set(legal):
        raise ValueError(
            f"{op} has no bench option {', '.join(sorted(unknown))}; "
            f"it has {', '.join(legal) or 'none'}"
        )
    return name, chosen


_without_contents: ContextVar[bool] = ContextVar("cupykern_without_contents", default=False)


@contextmanager
def without_contents() -> Iterator[None]:
    """Within the block, bench_values and `drawn` return uninitialised arrays.

    That suffices for tasks, which depend only on shapes, strides and alignment.
    """
    token = _without_contents.set(True)
    try:
        yield
    finally:
        _without_contents.reset(token)


def bench_values(
    shape: tuple[int, ...], dtype: np.dtype, seed: int, xp: Namespace, unit: Any = None
) -> Array:
    """Numbers of N(0, 1), rounded to `dtype`; int8: of N(0, 32^2).

    unit: a number of `dtype`, not FP8, to multiply them by.

    Blocks of 2^22 numbers are rotated copies of one random block.  No two rows are equal, and large
    GPU arrays need neither a full transfer nor cuRAND.
    """
    if _without_contents.get():
        return xp.empty(shape, dtype)
    rng = np.random.default_rng()
    numbers, rng.bit_generator.state = _normal_block(dtype, seed)
    block = xp.asarray(numbers) if unit is None else xp.asarray(numbers) * xp.asarray(unit)
    bits = numbers.dtype
    size = int(np.prod(shape, dtype=np.int64))
    x = xp.empty(size, bits)
    for start in range(0, size, block.size):
        shift = int(rng.integers(block.size))
        part = x[start : start + block.size]
        head = block[shift : shift + part.size]
        part[: head.size] = head
        part[head.size :] = block[: part.size - head.size]
    return x.view(dtype).reshape(shape)


def drawn(shape: tuple[int, ...], draw: Callable[[int], np.ndarray]) -> np.ndarray:
    """An array of `shape` with the numbers of draw(count); uninitialised in without_contents.

    Beyond 2^22 - 3 numbers they repeat; rows still differ.
    """
    size = math.prod(shape)
    if _without_contents.get():
        return np.empty(shape, draw(0).dtype)
    return np.resize(draw(min(size, 2**22 - 3)), shape)  # odd: not a multiple of an even row length


@functools.lru_cache(maxsize=8)
def _normal_block(dtype: np.dtype, seed: int) -> tuple[np.ndarray, Mapping[str, Any]]:
    """The 2^22 numbers of bench_values' block, and the generator's state after them.

    Cached, because many rows of a benchmark share them.
    """
    rng = np.random.default_rng(seed)
    numbers: np.ndarray = rng.standard_normal(1 << 22, dtype=np.float32)
    if dtype == dtypes.int8:
        numbers = np.clip(np.rint(32 * numbers), -128, 127)
    # CuPy copies FP8 only as bytes.
    numbers = numbers.astype(dtype).view(np.uint8 if dtype.itemsize == 1 else dtype)
    numbers.flags.writeable = False
    return numbers, rng.bit_generator.state


def sample_rows(x: Array, max_elements: int, seed: int) -> np.ndarray | None:
    """Sorted random indices along x's first axis, for about max_elements elements in all.

    They include the first and the last index.  None if x has no more elements than that.
    """
    num_rows = x.shape[0]
    keep = max(2, max_elements * num_rows // max(x.size, 1))
    if keep >= num_rows:
        return None
    rows = np.sort(np.random.default_rng(seed).choice(num_rows, keep, replace=False))
    rows[0], rows[-1] = 0, num_rows - 1
    return rows
