"""Argument checks shared by the ops.  Invalid arguments raise before any kernel is launched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import index
from typing import Any, TypeVar, cast, dataclass_transform, get_args, get_type_hints

import numpy as np

from .targets import Target, address_of, is_cupy, of_array
from .typing import Array

T = TypeVar("T")

_NO_CHANGE: AbstractContextManager[object] = nullcontext()
_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)  # the smallest normal number


def target_of(name: str, array: object) -> Target:
    """The target that holds `array`.

    Raises TypeError unless it is a cupy or numpy array; masked arrays are refused.
    """
    if not (_is_numpy(array) or is_cupy(array)):
        kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{name} must be a cupy or numpy array; got {kind}")
    return of_array(cast(Array, array))


def _is_numpy(array: object) -> bool:
    """Whether kernels can read `array`: a masked array's mask would be lost."""
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


def on_device(target: Target) -> AbstractContextManager[object]:
    """A context in which allocations and launches go to the device of `target`."""
    if target.name == "host" or target.device_id == target.xp.cuda.runtime.getDevice():
        return _NO_CHANGE
    return target.xp.cuda.Device(target.device_id)


def same_place(name: str, array: Any, x: Any, x_name: str = "x") -> None:
    """Raise TypeError unless `array` and x are both cupy or both numpy arrays, and ValueError if
    they are on different devices."""
    target_of(name, array)
    if isinstance(array, np.ndarray) != isinstance(x, np.ndarray):
        kinds = "numpy", "cupy"
        got, wanted = kinds[is_cupy(array)], kinds[is_cupy(x)]
        raise TypeError(f"{name} must be a {wanted} array as {x_name} is; got a {got} array")
    if is_cupy(array) and array.device.id != x.device.id:
        raise ValueError(
            f"{name} must be on {x_name}'s device {x.device.id}; it is on device {array.device.id}"
        )


def finite_float(name: str, value: Any, default: float) -> float:
    """Return `value` (a Python or numpy number, or a 0-d array) as a float in FP32's range.

    None gives `default`.  Raises TypeError for other types, and ValueError for arrays with dims
    and for values that are not finite, or subnormal, in FP32.
    """
    if value is None:
        return default
    if _is_numpy(value) or isinstance(value, np.generic) or is_cupy(value):
        if value.ndim:
            raise ValueError(f"{name} must be a number or a 0-d array; got shape {value.shape}")
        value = value.item()  # ml_dtypes' scalars do not derive from np.floating
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
        raise TypeError(f"{name} must be a real number; got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # a large int
        number = math.inf
    return checked_float(name, number)


def checked_float(name: str, number: float) -> float:
    """Return `number`, with -0.0 replaced by 0.0: keys of cached plans do not distinguish them.

    Raises ValueError unless it is 0 or a normal FP32 number: kernels flush subnormals.
    """
    if not math.isfinite(number) or abs(number) > _LARGEST_FLOAT:
        raise ValueError(f"{name} must be finite in FP32; got {number}")
    if 0 < abs(number) < _SMALLEST_FLOAT:
        raise ValueError(f"{name} must be 0 or of a magnitude of at least 2^-126; got {number}")
    return number + 0.0


def check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> None:
    """Raise ValueError unless `value` is one of `allowed`, whatever its type (an array, say)."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        names = list(map(repr, allowed))
        legal = " or ".join(names) if len(names) < 4 else f"one of {', '.join(names)}"
        raise ValueError(f"{name} must be {legal}; got {value!r}")


def check_flags(**flags: object) -> None:
    """Raise TypeError unless every flag is a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} must be a bool; got {type(flag).__name__}")


def number_of(name: str, value: Any) -> float:
    """Return a scalar operand of a formula, rounded to FP32; a bool becomes 0 or 1.

    Infinite floats are allowed.  Raises TypeError for None and other types, ValueError for NaN and
    numbers beyond FP32's range.
    """
    if value is None:
        raise TypeError(f"{name} must be a number or an array; got None")
    if (_is_numpy(value) or isinstance(value, np.generic)) and not value.ndim:
        value = value.item()
    if isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_:
        return float(bool(value))
    if isinstance(value, (float, np.floating)) and math.isinf(value):
        return float(value)
    return float(np.float32(finite_float(name, value, 0.0)))


def integers(**numbers: Any) -> tuple[int, ...]:
    """Return the values as Python ints.

    Raises TypeError unless all are integers (a bool is not), ValueError beyond signed 32 bits.
    """
    found = []
    for name, number in numbers.items():
        try:
            value = None if isinstance(number, (bool, np.bool_)) else index(number)
        except TypeError:
            value = None
        if value is None:
            raise TypeError(f"{name} must be an integer; got {type(number).__name__}")
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"{name} must fit 32 bits; got {value}")
        found.append(value)
    return tuple(found)


def is_number(value: object, beside: Array) -> bool:
    """Whether `value`, a factor of the array `beside`, is a number rather than an array.

    True for scalars, and for 0-d numpy arrays that a kernel cannot read as FP32: those of another
    dtype, and all if `beside` is a cupy array.
    """
    if isinstance(value, np.ndarray):
        return value.ndim == 0 and (is_cupy(beside) or value.dtype != np.float32)
    return isinstance(value, np.generic) or not hasattr(value, "dtype")


# --- configs ----------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A decorator: a frozen dataclass whose instances have fields of the declared types only.

    Caches look configs up by value, and 1, 1.0 and True are equal values.  Hence an instance with a
    field of another type raises TypeError when it is made, not when it is used.
    """
    cls.__post_init__ = _check_fields  # type: ignore[attr-defined]  # of dataclasses
    return dataclass(frozen=True)(cls)


def _check_fields(made: Any) -> None:
    """Raises TypeError for a field of another type, ValueError for integers beyond 32 bits."""
    name = made.__class__.__name__
    for field, kinds in field_kinds(made.__class__).items():
        value = getattr(made, field)
        if value.__class__ not in kinds:
            raise TypeError(f"{name}'s {field} must be {_written(kinds)}; got {value!r}")
        if value.__class__ is int and not -(2**31) <= value < 2**31:
            raise ValueError(f"{name}'s {field} must fit 32 bits; got {value}")


def _written(kinds: tuple[type, ...]) -> str:
    words = {bool: "bool", int: "integer"}
    *others, last = (words.get(kind, kind.__name__) for kind in kinds)
    names = f"{', '.join(others)} or {last}" if others else last
    return f"an {names}" if names.startswith("i") else f"a {names}"


@cache
def field_kinds(kind: type) -> dict[str, tuple[type, ...]]:
    """The types that each field of a config's class may have."""
    hints = get_type_hints(kind)
    return {x.name: get_args(hints[x.name]) or (hints[x.name],) for x in fields(kind)}


def check_config(given: Any, *kinds: type[Any]) -> None:
    """Raises TypeError unless `given` is a complete config of one of these classes."""
    if not isinstance(given, kinds):
        raise TypeError(f"config must be {_written(kinds)}; got {type(given).__name__}")
    check_complete(given)


def check_complete(given: object) -> None:
    """Raises TypeError if `given` has no hash, by which plans are looked up.

    Examples: a dict, and a config that another version pickled with fewer fields.
    """
    if is_dataclass(given):
        missing = [field.name for field in fields(given) if not hasattr(given, field.name)]
        if missing:
            raise TypeError(f"config, a {type(given).__name__}, lacks {', '.join(missing)}")
    if type(given).__hash__ is None:
        raise TypeError(f"config must be a config of the op; got {type(given).__name__}")


# --- axes and outputs -------------------------------------------------------------------------


def normalize_axis(axis: object, shape: tuple[int, ...]) -> int:
    """Return `axis` of an array x of `shape` as an int in [0, len(shape)).

    Raises TypeError for a non-integer and numpy.exceptions.AxisError if it is out of range.
    """
    if isinstance(axis, (bool, np.bool_)) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"axis must be an integer; got {type(axis).__name__}")
    if not -len(shape) <= axis < len(shape):
        raise np.exceptions.AxisError(int(axis), len(shape), f"x of shape {tuple(shape)}")
    return int(axis) % len(shape)


def check_out(
    out: Array,
    x: Array,
    shape: Sequence[int],
    dtype: np.dtype,
    others: Mapping[str, Array | None],
    x_name: str = "x",
) -> None:
    """Like `check_new_out`, but `out` may be exactly x (same memory, strides and dtype)."""
    _check_result("out", out, x, shape, dtype, x_name)
    if not same_elements(out, x):
        others = {x_name: x, **others}
    _check_apart(out, others, f" (only exactly in place, out={x_name})")


def check_new_out(
    out: Array, shape: Sequence[int], dtype: np.dtype, others: Mapping[str, Array | None]
) -> None:
    """Raise TypeError or ValueError unless `out` can hold a result.

    It must be on the device of the first of `others`, have `shape` and `dtype`, be writable and
    overlap none of `others`.
    """
    name, x = next(iter(others.items()))
    _check_result("out", out, x, shape, dtype, name)
    _check_apart(out, others)


def _check_result(
    name: str, out: Array, x: Array | None, shape: Sequence[int], dtype: np.dtype, x_name: str = "x"
) -> None:
    same_place(name, out, x, x_name)
    if out.dtype != dtype:
        raise TypeError(f"out must have dtype {dtype}; got {out.dtype}")
    if out.shape != tuple(shape):
        raise ValueError(f"out must have shape {tuple(shape)}; got {out.shape}")
    check_writable(name, out)


def check_writable(name: str, out: Array) -> None:
    """Raise ValueError if `out` is read-only or its elements overlap each other in memory."""
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{name} must be writable; it is read-only")
    if out.size == 0:
        return
    extent = out.itemsize
    for stride, size in sorted((abs(s), n) for n, s in zip(out.shape, out.strides, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(f"{name} must not hold one element twice; got strides {out.strides}")
        extent += (size - 1) * stride


def same_elements(out: Array, x: Array) -> bool:
    """Whether `out` and x, of the same shape, have the same dtype, address and strides.

    Strides of dims of size 1 do not count.
    """
    steps = zip(out.shape, out.strides, x.strides, strict=True)
    same_steps = all(size <= 1 or of_out == of_x for size, of_out, of_x in steps)
    return same_steps and out.dtype == x.dtype and address_of(out) == address_of(x)


def _check_apart(out: Array, others: Mapping[str, Array | None], unless: str = "") -> None:
    for name, other in others.items():
        if other is not None and overlap(out, other):
            raise ValueError(f"out must not overlap {name}{unless}")


def _byte_range(array: Array) -> tuple[int, int]:
    low = high = address_of(array)
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + array.dtype.itemsize


def overlap(a: Array, b: Array) -> bool:
    """Whether two cupy or two numpy arrays share a byte."""
    if a.size == 0 or b.size == 0:
        return False
    (a_low, a_high), (b_low, b_high) = _byte_range(a), _byte_range(b)
    if a_high <= b_low or b_high <= a_low:
        return False
    # Interleaved views (x[::2], x[1::2]) share a range but no byte: numpy decides by strides alone.
    try:
        most: Any = 100_000  # numpy accepts any number, its stub does not
        return np.shares_memory(_shadow(a), _shadow(b), max_work=most)
    except np.exceptions.TooHardError:  # only for strides that slicing does not make
        return True


def _shadow(array: Array) -> np.ndarray:
    """A numpy array with the addresses of `array`, for comparing addresses only.

    Its elements must not be read or written.
    """
    if isinstance(array, np.ndarray):
        return array
    interface = {
        "data": (array.data.ptr, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
        "version": 3,
    }
    return np.asarray(type("Shadow", (), {"__array_interface__": interface})())
