"""Configs: frozen dataclasses that name a kernel's tile sizes, threads and other fixed choices."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A decorator: a frozen dataclass whose instances have fields of the declared types only.

    Caches look configs up by value, and 1, 1.0 and True are equal values.  Hence an instance with a
    field of another type raises TypeError when it is made, not when it is used.
    """
    cls.__post_init__ = _check_fields  # type: ignore[attr-defined]  # of any class
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
