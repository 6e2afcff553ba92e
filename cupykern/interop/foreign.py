"""Calls with arrays of other libraries: which arguments are such, and how a call of an op takes them.

The rules, for every public function:

- An array argument, `out` and the arrays of an NvFp4 included, may be a torch tensor, a JAX array, or an
  object with `__dlpack__` or `__cuda_array_interface__`.  Its memory is used where it is, in its strides.
- Results are of the library of the first array among the arguments, in the order of the signature.  `out`
  comes back as the object that was given.
- Arrays of several libraries may be mixed where cupy's or numpy's could: on one device.
- The call runs on torch's current stream if the first array is a tensor, else on CuPy's.  Where arrays
  come from another stream, the two wait for each other.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from ..targets import is_cupy

Function = TypeVar("Function", bound=Callable[..., Any])


class Library(Protocol):
    name: str

    def running(self, x: Any, others: bool) -> Any:
        """The context in which a call runs whose first array is x; others: if some are cupy's."""

    def native(self, name: str, x: Any) -> Any:
        """x, the argument `name`, as a cupy or numpy array of the same memory."""

    def before(self, natives: Sequence[Any]) -> None:
        """CuPy's current stream waits for `natives`: in calls that another library runs."""

    def after(self, natives: Sequence[Any], runs: bool) -> None:
        """After the launch.  runs: whether the call was this library's."""

    def place(self, x: Any) -> str:
        """The device, for messages."""

    def back(self, array: Any, like: Any) -> Any:
        """A cupy or numpy array as this library's, of like's kind."""


libraries: dict[type, Library] = {}
"""Of the classes of foreign arrays that were seen so far."""
_others: set[type] = {type(None), bool, int, float, str, tuple, list, np.ndarray}


def library_of(x: Any) -> Library | None:
    """The library of a foreign array; None for anything else, cupy and numpy arrays among it."""
    kind = type(x)
    found = libraries.get(kind)
    if found is None and kind not in _others:
        found = None if isinstance(x, type) or is_native(x) else _find(kind)
        if found is None:
            _others.add(kind)
        else:
            libraries[kind] = found
    return found


def is_native(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_cupy(x)


def _find(kind: type) -> Library | None:
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        from .tensors import TENSORS

        return TENSORS
    jax = sys.modules.get("jax")
    is_traced = jax is not None and issubclass(kind, jax.core.Tracer)
    if is_traced or hasattr(kind, "__dlpack__") or hasattr(kind, "__cuda_array_interface__"):
        from .protocols import Protocols

        return Protocols(kind)
    return None


def _arrays(value: Any) -> tuple[Any, ...]:
    """`value`, or what it holds: a dictionary, or one with `arrays` (NvFp4, BlockMask)."""
    if isinstance(value, dict):
        return tuple(value.values())
    return value.arrays() if hasattr(type(value), "arrays") else (value,)


def _is_torch_dtype(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def is_foreign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments needs `call`."""
    return any(
        _is_torch_dtype(value) or any(library_of(x) is not None for x in _arrays(value))
        for value in (*args, *kwargs.values())
    )


def takes_foreign(function: Function) -> Function:
    """`function`, of cupy and numpy arrays, for those of other libraries too."""

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        if is_foreign(args, kwargs):
            return call(function, args, kwargs)
        return function(*args, **kwargs)

    return taking  # type: ignore[return-value]


def native(name: str, x: Any) -> Any:
    """x as a cupy or numpy array of the same memory; itself if it is no foreign array."""
    library = library_of(x)
    return x if library is None else library.native(name, x)


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), a function of cupy and numpy arrays, where some are foreign.

    Raises what the function raises, TypeError for arrays that kernels cannot read or write, and
    RuntimeError for tensors that require grad.
    """
    names = _names(function)
    labels = (*names[: len(args)], *names[-1:] * (len(args) - len(names)))
    ordered = [x for value in args for x in _arrays(value)]
    ordered += [x for name in names if name in kwargs for x in _arrays(kwargs[name])]
    first = next((x for x in ordered if library_of(x) is not None or is_native(x)), None)
    library = library_of(first)
    taken = _Taken()
    if library is None:
        return _run(function, args, kwargs, labels, taken, None, None)
    with library.running(first, any(map(is_cupy, ordered))):
        return _run(function, args, kwargs, labels, taken, library, first)


class _Taken:
    """The foreign arrays of a call."""

    def __init__(self) -> None:
        self.foreign: dict[int, Any] = {}  # by the id of the native one
        self.natives: dict[Library, list[Any]] = {}

    def take(self, name: str, value: Any) -> Any:
        library = library_of(value)
        if library is not None:
            found = library.native(name, value)
            self.foreign[id(found)] = value
            self.natives.setdefault(library, []).append(found)
            return found
        kind = type(value)
        if kind is dict:
            return {key: self.take(f"{name}[{key!r}]", x) for key, x in value.items()}
        if hasattr(kind, "map_arrays"):
            return value.map_arrays(functools.partial(self.take, name))
        if _is_torch_dtype(value):
            from .tensors import DTYPES

            return DTYPES.get(value, value)
        return value


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    labels: tuple[str, ...],
    taken: _Taken,
    library: Library | None,
    first: Any,
) -> Any:
    """The results as `library`'s."""
    natives = [taken.take(name, value) for name, value in zip(labels, args, strict=True)]
    options = {name: taken.take(name, value) for name, value in kwargs.items()}
    for of, its in taken.natives.items():
        if of is not library:
            of.before(its)
    try:
        outputs = function(*natives, **options)
    except TypeError as error:
        places = _places((*zip(labels, args, strict=True), *kwargs.items()))
        if len(set(places.values())) < 2:
            raise
        given = ", ".join(f"{name} a {place}" for name, place in places.items())
        raise TypeError(f"{error} ({given})") from None
    for of, its in taken.natives.items():
        of.after(its, of is library)

    def back(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(back(x) for x in value)
        if id(value) in taken.foreign:
            return taken.foreign[id(value)]
        if library is None:
            return value
        if hasattr(type(value), "map_arrays"):
            return value.map_arrays(back)
        return library.back(value, first) if is_native(value) else value

    return back(outputs)


def _places(given: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """What arrays are and where, for messages."""
    found = {}
    for name, value in given:
        for x in _arrays(value):
            library = library_of(x)
            if library is not None:
                found[name] = f"{library.name} array on {library.place(x)}"
            elif isinstance(x, np.ndarray):
                found[name] = "numpy array on cpu"
            elif is_cupy(x):
                found[name] = f"cupy array on gpu {x.device.id}"
    return found
