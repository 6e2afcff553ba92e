"""A call's arguments as printable values that can be placed in memory repeatedly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes, inputs, nvfp4
from ...attention.block_mask import CAUSAL, FULL, MASKED, PARTIAL, BlockMask
from ...nvfp4 import NvFp4

ALIGNMENT = 512  # bytes, of an argument with begin = 0
GUARD = 4096  # bytes before, between and after arguments
_POISON = 0xA5
_GAP = 11  # elements
_TILES = 3  # of a block mask
_POOL = 65521  # random elements, a prime number, so that no two rows of an array are equal

Shape = tuple[int, ...]

# For an array of shape `s`: the shape of its memory, and the array as a view of this memory `m`.
_LAYOUTS: dict[str, tuple[Callable[[Shape], Shape], Callable[[np.ndarray, Shape], np.ndarray]]] = {
    "C": (lambda s: s, lambda m, s: m),
    "gap": (lambda s: (*s[:-1], s[-1] + _GAP), lambda m, s: m[..., : s[-1]]),
    "gap of 8": (lambda s: (*s[:-1], s[-1] // 8 * 8 + 16), lambda m, s: m[..., : s[-1]]),
    "columns of 2048": (lambda s: (*s[:-1], max(s[-1], 2048)), lambda m, s: m[..., : s[-1]]),
    "shifted": (lambda s: (*s[:-1], s[-1] + _GAP), lambda m, s: m[..., 1 : s[-1] + 1]),
    "every other": (lambda s: (*s[:-1], 2 * s[-1]), lambda m, s: m[..., ::2]),
    "negative": (lambda s: s, lambda m, s: m[..., ::-1]),
    "rows negative": (lambda s: s, lambda m, s: m[..., ::-1, :]),
    "heads negative": (lambda s: s, lambda m, s: m[:, ::-1]),
    "F": (lambda s: (*s[:-2], s[-1], s[-2]), lambda m, s: m.swapaxes(-1, -2)),
    "heads inside": (lambda s: (s[0], s[2], s[1], s[3]), lambda m, s: m.swapaxes(1, 2)),
    "corner": (
        lambda s: tuple(1 << n.bit_length() for n in s),
        lambda m, s: m[tuple(map(slice, s))],
    ),
    "broadcast": (lambda s: (1, *s[1:]), lambda m, s: np.broadcast_to(m, s)),
}
LAYOUTS = tuple(_LAYOUTS)
_LEAST_DIMS = {
    "C": 0,
    "corner": 0,
    "rows negative": 2,
    "heads negative": 2,
    "F": 2,
    "heads inside": 4,
}


@dataclass(frozen=True)
class Array:
    """An array of `shape` in its own memory.

    layout: one of LAYOUTS; "C" if the shape has too few dims.  begin: elements between a multiple
    of 512 bytes and the start of the memory.
    """

    shape: Shape
    dtype: str = "float16"
    layout: str = "C"
    begin: int = 0


@dataclass(frozen=True)
class Alias:
    """A view of the argument `of`.

    layout: "C" is the argument itself, "next" starts one element later, others are from LAYOUTS.
    """

    of: str
    layout: str = "C"


@dataclass(frozen=True)
class Integers:
    """An int32 array, in NumPy unless `on_target`.  layout, begin: see Array."""

    values: tuple[Any, ...]
    on_target: bool = True
    layout: str = "C"
    begin: int = 0


@dataclass(frozen=True)
class Fp4:
    """An NvFp4 of `shape`.  memory: layout of its data.  global_scale None: an array."""

    shape: Shape
    layout: nvfp4.Layout = "plain"
    memory: str = "C"
    global_scale: float | None = 1.0


@dataclass(frozen=True)
class Operands:
    """A dict of numbers and arrays, as (name, Array or number) pairs."""

    values: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Blocks:
    """A BlockMask with blocks of every type."""

    batch_shape: tuple[int, int]
    sq: int
    sk: int
    q_block: int = 128
    kv_block: int = 128
    causal_offset: int = 0


class Place(NamedTuple):
    """An array's location: `offset` bytes from the start of an image to its first element."""

    offset: int
    shape: Shape
    strides: Shape
    dtype: np.dtype


class Image:
    """The memory of a call's arguments.

    arguments: by name, with a Place for each array of the target.  size: bytes.
    """

    def __init__(self, arguments: tuple[tuple[str, Any], ...]):
        self.arguments: dict[str, Any] = {}
        self.size = GUARD
        self._contents: list[tuple[int, int, Callable[[], np.ndarray]]] = []
        for name, value in sorted(arguments, key=lambda one: isinstance(one[1], Alias)):
            self.arguments[name] = self._argument(name, value)

    def content(self) -> np.ndarray:
        """Return the bytes of the memory before the call."""
        memory = np.full(self.size, _POISON, np.uint8)
        for offset, part in self.parts():
            memory[offset : offset + part.size] = part
        return memory

    def parts(self, most: int = 1 << 40) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (offset, bytes) of each array of up to `most` bytes."""
        for offset, num_bytes, make in self._contents:
            if num_bytes <= most:
                yield offset, make().reshape(-1).view(np.uint8)

    def build(self, array: Callable[[Place], Any]) -> dict[str, Any]:
        """Return the call's arguments; array: makes the array at a Place."""
        made: dict[Place, Any] = {}  # out=x passes one array twice

        def build_one(value: Any) -> Any:
            if isinstance(value, Place):
                if value not in made:
                    made[value] = array(value)
                return made[value]
            if isinstance(value, (NvFp4, BlockMask)):
                found = copy(value)
                found.__dict__.update({name: build_one(x) for name, x in vars(value).items()})
                return found
            if isinstance(value, dict):
                return {name: build_one(x) for name, x in value.items()}
            return value

        return {name: build_one(value) for name, value in self.arguments.items()}

    def _argument(self, name: str, value: Any) -> Any:
        if isinstance(value, Array):
            dtype = np.dtype(bool) if value.dtype == "bool" else dtypes.NAMES[value.dtype]
            return self._add(name, value.shape, dtype, value.layout, value.begin)
        if isinstance(value, Integers):
            numbers = np.array(value.values, np.int32)
            return self._copy(numbers, value.layout, value.begin) if value.on_target else numbers
        if isinstance(value, Operands):
            return {key: self._argument(key, x) for key, x in value.values}
        if isinstance(value, Alias):
            return self._alias(self.arguments.get(value.of), value.layout)
        if isinstance(value, (Fp4, Blocks)):
            made = copy(_nvfp4(value) if isinstance(value, Fp4) else _block_mask(value))
            for field, x in vars(made).items():
                if isinstance(x, np.ndarray):
                    layout = value.memory if field == "data" and isinstance(value, Fp4) else "C"
                    made.__dict__[field] = self._copy(x, layout)
            return made
        return value

    def _add(
        self,
        name: str,
        shape: Shape,
        dtype: np.dtype,
        layout: str,
        begin: int = 0,
        values: np.ndarray | None = None,
    ) -> Place:
        """Reserve memory for an array.  values: its contents; None: random."""
        memory_shape, view = _LAYOUTS[layout if len(shape) >= _LEAST_DIMS.get(layout, 1) else "C"]
        memory = _view(memory_shape(shape), dtype)
        start = -(-self.size // ALIGNMENT) * ALIGNMENT + begin * dtype.itemsize
        self.size = start + memory.nbytes + GUARD

        def content() -> np.ndarray:
            # resize copies all that it is given.
            found = np.resize(_pool(name, dtype)[: memory.size], memory.shape)
            if values is not None:
                view(found, shape)[...] = values
            return found

        self._contents.append((start, memory.nbytes, content))
        return _place(start, memory, view(memory, shape), dtype)

    def _copy(self, x: np.ndarray, layout: str = "C", begin: int = 0) -> Place:
        return self._add("", x.shape, x.dtype, layout, begin, x)

    @staticmethod
    def _alias(place: Any, layout: str) -> Any:
        if layout == "C" or not isinstance(place, Place):
            return place
        if layout == "next":
            return place._replace(offset=place.offset + place.dtype.itemsize)
        array = _view(place.shape, place.dtype, place.strides)
        return _place(place.offset, array, _LAYOUTS[layout][1](array, place.shape), place.dtype)


make_image = lru_cache(maxsize=1024)(Image)


def _view(shape: Shape, dtype: np.dtype, strides: Shape | None = None) -> np.ndarray:
    """Make an array that describes a memory layout; its elements must not be accessed."""
    if strides is None:
        steps = [dtype.itemsize]
        for size in shape[:0:-1]:
            steps.append(steps[-1] * max(size, 1))
        strides = tuple(steps[: len(shape)][::-1])
    bits = np.empty(1, f"V{dtype.itemsize}")  # as_strided does not support FP8
    return np.lib.stride_tricks.as_strided(bits, shape, strides)


def _place(start: int, memory: np.ndarray, view: np.ndarray, dtype: np.dtype) -> Place:
    """Return the Place of `view` if `memory` starts at `start`."""
    first, begin = (x.__array_interface__["data"][0] for x in (view, memory))
    return Place(start + first - begin, view.shape, view.strides, dtype)


@cache
def _pool(name: str, dtype: np.dtype) -> np.ndarray:
    """Return random elements, the same for all arguments of one name."""
    seed = zlib.crc32(name.encode())
    if dtype == np.bool_:
        return np.random.default_rng(seed).random(_POOL) < 0.7
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.random.default_rng(seed).integers(info.min, info.max, _POOL, dtype, True)
    return inputs.values("normal", (_POOL,), dtype, seed)


@lru_cache(maxsize=256)
def _nvfp4(spec: Fp4) -> NvFp4:
    x = nvfp4.random("unit", spec.shape, 1, np, "C").to(spec.layout)
    number = x.global_scale if spec.global_scale is None else spec.global_scale
    return NvFp4.unchecked(x.data, x.scale, spec.layout, number)


@lru_cache(maxsize=256)
def _block_mask(spec: Blocks) -> BlockMask:
    rng = np.random.default_rng(spec.sq)
    shape = (*spec.batch_shape, -(-spec.sq // spec.q_block), -(-spec.sk // spec.kv_block))
    types = rng.choice((MASKED, CAUSAL, FULL, PARTIAL), shape).astype(np.uint8)
    tiles = rng.random((_TILES, spec.q_block, spec.kv_block)) < 0.5
    numbers = rng.integers(0, _TILES, shape, np.int32)
    sizes = spec.sq, spec.sk, spec.q_block, spec.kv_block, spec.causal_offset
    return BlockMask(types, numbers, tiles, *sizes)
