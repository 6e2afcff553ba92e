"""The ways in which a legal call can be broken."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ... import OPS, dtypes
from ...attention.block_mask import BlockMask
from ...check import GuardedArray
from ...numerics import to_numpy
from ...nvfp4 import GROUP, NvFp4
from ...op import Op
from ...targets import Target, is_cupy
from .bad_values import (
    ARRAY_DTYPES,
    DIMS,
    EXTRA,
    MAY_BE_NONE_WITH,
    MAY_BE_NUMPY,
    ONLY_WHERE,
    OPTIONS,
    REQUIRED,
    SAME_DTYPE,
    SIZES,
    is_array,
    options,
)
from .bits import codes


class Break(NamedTuple):
    """make: returns the arguments that replace those of the legal call."""

    label: str
    make: Callable[[], dict[str, Any]]


def _value(name: str, bad: Any) -> Break:
    shown = re.sub(" at 0x[0-9a-f]+", "", repr(bad))
    return Break(f"{name}={shown}", lambda: {name: bad})


def _array(name: str, what: Any, make: Callable[..., Any], *args: Any) -> Break:
    """make(*args) returns the array."""
    return Break(f"{name}: {what}", lambda: {name: make(*args)})


@dataclass
class Drawn:
    """A legal call.

    arguments: by name, with `out` if the op takes one.  guarded: the memory of `out`.
    size: elements of the result.
    """

    op: Op
    problem: Any
    arguments: dict[str, Any]
    guarded: GuardedArray | None
    size: int
    target: Target

    def arrays(self) -> list[Any]:
        """Return the input arrays."""
        return [x for name, x in self.arguments.items() if name != "out" and _is_array(x)]


def breaks(drawn: Drawn, rng: Any) -> list[Break]:
    """Return all breaks that apply to the call; some have a random detail."""
    return [
        _value("nonsense", 1),
        *_options(drawn),
        *_arrays(drawn),
        *_contents(drawn),
        *_outs(drawn, rng),
        *_configs(drawn, rng),
    ]


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_cupy(x)


def _options(drawn: Drawn) -> Iterator[Break]:
    for name, parameter in inspect.signature(drawn.op.run).parameters.items():
        other, value = ONLY_WHERE.get(name, (None, None))
        if other is not None and drawn.arguments.get(other) != value:
            continue
        may_be_none = drawn.arguments.get(MAY_BE_NONE_WITH.get(name, "")) is not None
        for bad in options(parameter):
            if bad is not None or not may_be_none:
                yield _value(name, bad)


# --- arrays -------------------------------------------------------------------------------------


def _arrays(drawn: Drawn) -> Iterator[Break]:
    for name in inspect.signature(drawn.op.run).parameters:
        x = drawn.arguments.get(name)
        if not is_array(name) and not (name not in ("out", *OPTIONS) and _is_array(x)):
            continue
        needed = name in REQUIRED and x is not None
        for bad in (object(), [[1.0]], {}, *((None,) if needed else ())):
            yield _value(name, bad)
        if isinstance(x, NvFp4):
            yield _array(name, "an NvFp4's bytes", lambda x=x: x.data)
            yield _array(name, "an NvFp4 of more columns", _wider, drawn, x)
        elif isinstance(x, BlockMask):
            yield _array(name, "a BlockMask's indices", lambda x=x: x.kv_indices)
        elif _is_array(x):
            yield from _kinds(drawn, name, x)
            yield from _dtypes(drawn, name, x)
            yield from _shapes(drawn, name, x)


def _wider(drawn: Drawn, x: NvFp4) -> NvFp4:
    *outer, k = x.shape
    k += GROUP
    data = _zeros(drawn, (*outer, k // 2), np.dtype(np.uint8))
    return NvFp4(data, _zeros(drawn, (*outer, k // GROUP), dtypes.float8_e4m3fn))


def _kinds(drawn: Drawn, name: str, x: Any) -> Iterator[Break]:
    """Arrays of another library than the call's other arrays."""
    alone = len(drawn.arrays()) == 1 and drawn.guarded is None
    if drawn.target.name == "host":
        yield _array(name, "a masked array", lambda: np.ma.MaskedArray(np.zeros(x.shape, x.dtype)))
    elif name not in MAY_BE_NUMPY and x.ndim and not alone:
        yield _array(name, "numpy's", np.zeros, x.shape, x.dtype)


def _dtypes(drawn: Drawn, name: str, x: Any) -> Iterator[Break]:
    for bad in map(np.dtype, ARRAY_DTYPES if x.ndim else (np.complex128,)):
        yield _array(name, bad, _zeros, drawn, x.shape, bad)
    other = SAME_DTYPE.get(name)
    if other is not None and _is_array(drawn.arguments.get(other)):
        wrong = dtypes.bfloat16 if x.dtype == dtypes.float16 else dtypes.float16
        yield _array(name, f"{wrong}, not {x.dtype}", _zeros, drawn, x.shape, wrong)


def _shapes(drawn: Drawn, name: str, x: Any) -> Iterator[Break]:
    shapes: list[tuple[int, ...]] = []
    for axis in SIZES.get(name, ()):
        if axis in range(-x.ndim, max(x.ndim, 1)):
            shape = list(x.shape) or [1]
            shape[axis] += EXTRA
            shapes.append(tuple(shape))
    if name in DIMS:
        shapes += (), (1,) if x.ndim > 1 else (1, 1, 1)
    yield from (_array(name, bad, _zeros, drawn, bad, x.dtype) for bad in shapes)


def _zeros(drawn: Drawn, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return zeros of any shape that share one element of memory."""
    one = drawn.target.xp.zeros(dtype.itemsize, np.uint8).view(dtype)
    return drawn.target.xp.broadcast_to(one.reshape(()), shape)


# --- arrays that steer a kernel -----------------------------------------------------------------


def _contents(drawn: Drawn) -> Iterator[Break]:
    """Illegal contents of NumPy arrays, which are checked on every target."""
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if name in drawn.arguments:
            yield from _offsets(name, to_numpy(drawn.arguments[name]))
    parameters = inspect.signature(drawn.op.run).parameters
    lengths, table = (drawn.arguments.get(name) for name in ("seq_lens", "block_table"))
    for bad in (-1, 2**31 - 1):
        if lengths is not None and lengths.size:
            yield _array("seq_lens", f"{bad} at its end", _changed, to_numpy(lengths), -1, bad)
        if table is not None and table.size and "seq_lens" in parameters:
            changed = {"block_table": _changed(to_numpy(table), (0, 0), bad), "seq_lens": None}
            yield Break(f"block_table: {bad} at its beginning", changed.copy)


def _changed(x: np.ndarray, place: Any, value: int) -> np.ndarray:
    x = x.copy()
    x[place] = value
    return x


def _offsets(name: str, offsets: np.ndarray) -> Iterator[Break]:
    """Offsets that do not grow from 0 to the row count; a sequence longer than max_seqlen."""
    for place, value in ((0, 1), (-1, int(offsets[-1]) + 1), (0, -1)):
        yield _array(name, f"{value} at {place}", _changed, offsets, place, value)
    longest = int(np.diff(offsets).max(initial=0))
    if longest:
        of_lengths = f"max_seqlen_{name[-1]}"
        bad = {name: offsets.copy(), of_lengths: longest - 1}
        yield Break(f"{of_lengths}: less than the longest", bad.copy)


# --- out ----------------------------------------------------------------------------------------


def _outs(drawn: Drawn, rng: Any) -> Iterator[Break]:
    if drawn.guarded is None:
        return
    out = drawn.guarded.array
    bits = codes(out)
    yield from (_value("out", bad) for bad in (object(), [1.0], "x"))
    yield _array("out", "another dtype", lambda: bits)
    yield _array("out", "one dim more", lambda: out[None])
    if out.ndim > 1:
        yield _array("out", "one dim", out.reshape, -1)
        if out.shape[-1] != out.shape[-2]:
            yield _array("out", "transposed", out.swapaxes, -1, -2)
    if out.size:
        yield _array("out", "a row less", lambda: out[:-1])
    if drawn.target.name == "host":
        yield _array("out", "read-only", _read_only, out)
    elif out.ndim:
        yield _array("out", "numpy's", np.zeros, out.shape, out.dtype)
    long = [axis for axis, size in enumerate(out.shape) if size > 1]
    if out.size and long:
        strides = list(out.strides)
        strides[rng.choice(long)] = 0
        yield _array("out", "one element for many", _strided, drawn, bits, strides)
    if out.size and len(long) > 1:
        strides = [out.itemsize] * out.ndim
        yield _array("out", "rows that overlap", _strided, drawn, bits, strides)
    for name, x in drawn.arguments.items():
        here = name != "out" and _is_array(x) and is_cupy(x) == is_cupy(out)
        # An input that broadcasts to no elements is not read.
        read = all(y.size for y in drawn.arrays())
        if here and read and out.size and x.nbytes > _SHIFT:
            yield Break(f"out: overlaps {name}", partial(_overlapping, drawn, name))


def _read_only(out: Any) -> Any:
    view = out.view()
    view.flags.writeable = False
    return view


def _strided(drawn: Drawn, bits: Any, strides: list[int]) -> Any:
    assert drawn.guarded is not None
    view = drawn.target.xp.lib.stride_tricks.as_strided(bits, bits.shape, strides)
    return view.view(drawn.guarded.array.dtype)


_SHIFT = 16  # bytes: whole elements of every dtype


def _overlapping(drawn: Drawn, name: str) -> dict[str, Any]:
    """Place an input so that it begins _SHIFT bytes before `out`."""
    x, out = drawn.arguments[name], drawn.arguments["out"]
    memory = drawn.target.xp.zeros(max(x.nbytes, _SHIFT + out.nbytes), np.uint8)
    moved = memory[: x.nbytes].view(f"u{x.itemsize}").reshape(x.shape)
    moved[...] = codes(x)
    place = memory[_SHIFT : _SHIFT + out.nbytes].view(out.dtype).reshape(out.shape)
    return {name: moved.view(x.dtype), "out": place}


# --- config -------------------------------------------------------------------------------------


def _configs(drawn: Drawn, rng: Any) -> Iterator[Break]:
    """Illegal configs of calls that launch a kernel; other calls ignore the config."""
    if not all(x.size for x in drawn.arrays()) or not drawn.size:
        return
    yield from (_value("config", bad) for bad in (object(), "fast", 1))
    try:
        own = drawn.op.configs(drawn.problem, drawn.target.arch)
    except (ValueError, NotImplementedError):
        return
    packages = set(map(_package, own))
    for config in _some_configs(drawn.target.arch):
        if _package(config) not in packages:
            yield _value("config", config)
    if own and own[0] is not None:
        config = own[rng.integers(len(own))]
        for field in dataclasses.fields(config):
            for bad in ("8", None, 1.5, -1, 2**31):
                if (changed := _changed_config(config, field.name, bad)) is not None:
                    yield _value("config", changed)


def _changed_config(config: Any, field: str, bad: Any) -> Any:
    """Return None where a config's class refuses such a field."""
    try:
        return dataclasses.replace(config, **{field: bad})
    except (TypeError, ValueError):
        return None


@cache
def _some_configs(arch: str) -> tuple[Any, ...]:
    """Return a config of every op's first bench problem."""
    problems = ((op, op.bench_problem(op.bench_shapes("host")[0], op.dtypes[0])) for op in OPS)
    found = (op.configs(problem, arch)[0] for op, problem in problems)
    return tuple(dict.fromkeys(config for config in found if config is not None))


def _package(config: Any) -> str:
    """Return the package of a config's class: ops of one package share their configs."""
    return type(config).__module__.rpartition(".")[0]
