"""Calls with arrays of other libraries: find and convert these arguments, convert the results.

The rules for every public function:

- An array argument, `out` and the arrays of an NvFp4 included, may be a torch tensor, a JAX array,
  or an object with `__dlpack__` or `__cuda_array_interface__`.  It is used in place, with its
  strides.
- Results belong to the library of the first array among the arguments, in the order of the
  signature.  `out` is returned as the given object.
- Arrays of several libraries may be mixed if all are on one device.
- The call runs on torch's current stream if the first array is a tensor, else on CuPy's.  If arrays
  come from another stream, the two streams wait for each other.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from ..targets import is_cupy

Function = TypeVar("Function", bound=Callable[..., Any])


class Library(Protocol):
    name: str

    def running(self, x: Any, mixed: bool) -> AbstractContextManager[object]:
        """The context of a call whose first array is x.  mixed: some arrays can be CuPy's own."""

    def instead(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """The function to call in place of `function` if calls are traced; None: `function`."""

    def native(self, name: str, x: Any) -> Any:
        """x, the argument `name`, as a cupy or numpy array of the same memory."""

    def before(self, natives: Sequence[Any]) -> None:
        """Make CuPy's current stream wait for `natives`, in a call that another library runs."""

    def after(self, natives: Sequence[Any], runs: bool) -> None:
        """Called after the launch.  runs: whether this library ran the call."""

    def place(self, x: Any) -> str:
        """The device of x, for messages."""

    def back(self, array: Any, like: Any) -> Any:
        """Convert a cupy or numpy array to this library's, of like's kind."""


class _Kind(Enum):
    """Arguments that are not foreign arrays: cupy or numpy arrays, holders of arrays, dtypes."""

    OTHER, NATIVE, HOLDER, DTYPE = range(4)


_OTHER, _NATIVE, _HOLDER, _DTYPE = _Kind  # faster to look up than attributes of the class

libraries: dict[type, Library] = {}
"""The library of each class of foreign arrays seen so far."""
_kinds: dict[type, Library | _Kind] = {}


def _kind_of(x: Any) -> Library | _Kind:
    found = _kinds.get(type(x))
    return _classify(x) if found is None else found


def _classify(x: Any) -> Library | _Kind:
    kind = type(x)
    found = _kinds[kind] = _find(kind, x)
    if not isinstance(found, _Kind):
        libraries[kind] = found
    return found


def register(kind: type, library: Library) -> None:
    """Register the class `kind` as arrays of `library`."""
    _kinds[kind] = libraries[kind] = library


def _find(kind: type, x: Any) -> Library | _Kind:
    if isinstance(x, np.ndarray) or is_cupy(x):
        return _NATIVE
    if isinstance(x, (type, np.generic)):
        return _OTHER
    if kind is dict or hasattr(kind, "arrays"):
        return _HOLDER
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, (torch.Tensor, torch.dtype)):
        from .tensors import TENSORS

        return TENSORS if issubclass(kind, torch.Tensor) else _DTYPE
    jax = sys.modules.get("jax")
    is_traced = jax is not None and issubclass(kind, jax.core.Tracer)
    if is_traced or hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        from .protocols import Protocols

        return Protocols(kind)
    return _OTHER


def library_of(x: Any) -> Library | None:
    """The library of a foreign array; None for anything else, including cupy and numpy arrays."""
    _kind_of(x)
    return libraries.get(type(x))


def _held(holder: Any) -> Iterable[Any]:
    """The contents of a holder: a dict, or an object with `arrays()` (NvFp4, BlockMask)."""
    return holder.values() if type(holder) is dict else holder.arrays()


def is_foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments needs `call`."""
    for value in (*args, *kwargs.values()):
        kind = _kind_of(value)
        if kind is _HOLDER:
            if any(library_of(x) is not None for x in _held(value)):
                return True
        elif kind is not _OTHER and kind is not _NATIVE:
            return True
    return False


def takes_foreign(function: Function) -> Function:
    """Decorate a function of cupy and numpy arrays to take those of other libraries too."""

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        if is_foreign(args, kwargs):
            return call(function, args, kwargs)
        return function(*args, **kwargs)

    return cast(Function, taking)


def native(name: str, x: Any) -> Any:
    """x as a cupy or numpy array of the same memory; unchanged unless it is a foreign array."""
    library = library_of(x)
    return x if library is None else library.native(name, x)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of cupy and numpy arrays with arguments of which some are foreign arrays.

    Raises the function's exceptions, TypeError for arrays that kernels cannot read or write, and
    RuntimeError for tensors that require grad.
    """
    names = _names(function)
    first = _first(args)
    if first is None:
        first = _first([kwargs[name] for name in names if name in kwargs])
    library = libraries.get(type(first))
    taken = _Taken(names, args, kwargs)
    if library is None:
        return taken.run(function, None, None)
    instead = library.instead(function, args, kwargs)
    if instead is not None:
        return instead(*args, **kwargs)
    with library.running(first, taken.mixed()):
        return taken.run(function, library, first)


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    found = _signatures.get(function)
    if found is None:
        found = _signatures[function] = tuple(inspect.signature(function).parameters)
    return found


_signatures: dict[Callable[..., Any], tuple[str, ...]] = {}


def _first(values: Iterable[Any]) -> Any:
    """The first array, foreign or not."""
    for value in values:
        if type(value) in libraries:
            return value
        kind = _kind_of(value)
        if kind is _HOLDER:
            found = _first(_held(value))
            if found is not None:
                return found
        elif kind is _NATIVE or not isinstance(kind, _Kind):
            return value
    return None


class _Taken:
    """The arguments of one call."""

    def __init__(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]):
        if len(args) > len(names):  # the last name is that of *args
            names += names[-1:] * (len(args) - len(names))
        self._labels, self._args, self._kwargs = names, args, kwargs
        self._foreign: dict[int, Any] = {}  # by the id of the native array
        self._natives: dict[Library, list[Any]] = {}

    def mixed(self) -> bool:
        """Whether some arguments are native arrays or holders."""
        for values in (self._args, self._kwargs.values()):
            for value in values:
                kind = _kind_of(value)
                if kind is _NATIVE or kind is _HOLDER:
                    return True
        return False

    def run(self, function: Callable[..., Any], library: Library | None, first: Any) -> Any:
        """Call `function`; return the results as arrays of `library`, of first's kind."""
        args = [self._native(name, x) for name, x in zip(self._labels, self._args, strict=False)]
        kwargs = {name: self._native(name, x) for name, x in self._kwargs.items()}
        for used, natives in self._natives.items():
            if used is not library:
                used.before(natives)
        try:
            outputs = function(*args, **kwargs)
        except TypeError as error:
            places = self._places()
            if len(set(places.values())) < 2:
                raise
            given = ", ".join(f"{name}: {place}" for name, place in places.items())
            raise TypeError(f"{error} ({given})") from None
        for used, natives in self._natives.items():
            used.after(natives, used is library)

        return self._back(library, first, outputs)

    # Not a recursive closure: its reference cycle would keep the arrays until it is collected.
    def _back(self, library: Library | None, first: Any, value: Any) -> Any:
        if id(value) in self._foreign:
            return self._foreign[id(value)]
        if library is not None and _kind_of(value) is _NATIVE:
            return library.back(value, first)
        if type(value) is tuple:
            return tuple([self._back(library, first, x) for x in value])
        if library is None:
            return value
        if hasattr(type(value), "map_arrays"):
            return value.map_arrays(functools.partial(self._back, library, first))
        return value

    def _native(self, name: str, value: Any) -> Any:
        library = libraries.get(type(value))
        if library is not None:
            found = library.native(name, value)
            self._foreign[id(found)] = value
            self._natives.setdefault(library, []).append(found)
            return found
        kind = _kind_of(value)
        if kind is _OTHER or kind is _NATIVE:
            return value
        if kind is _DTYPE:
            from .tensors import DTYPES

            return DTYPES.get(value, str(value))  # the op refuses the name
        if kind is not _HOLDER:  # the first array of its class
            return self._native(name, value)
        if type(value) is dict:
            return {key: self._native(f"{name}[{key!r}]", x) for key, x in value.items()}
        if not hasattr(value, "map_arrays"):  # its arrays are native
            return value
        return value.map_arrays(functools.partial(self._native, name))

    def _places(self) -> dict[str, str]:
        """The kinds and devices of the arrays by argument, for messages."""
        found = {}
        for name, value in (*zip(self._labels, self._args, strict=False), *self._kwargs.items()):
            for x in _held(value) if _kind_of(value) is _HOLDER else (value,):
                library = library_of(x)
                if library is not None:
                    found[name] = f"{library.name} array on {library.place(x)}"
                elif _kind_of(x) is _NATIVE:
                    place = (
                        f"cupy array on gpu {x.device.id}" if is_cupy(x) else "numpy array on cpu"
                    )
                    found[name] = place
        return found
