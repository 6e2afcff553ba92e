"""Random sequences of calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from ... import OPS
from ...op import Draw, Op
from . import attention, products, rope, rows
from .draws import DrawValue, Family, Setting, with_fitting_out
from .others import family_of

FAMILIES: dict[str, Family] = {
    **rows.FAMILIES,
    **products.FAMILIES,
    **attention.FAMILIES,
    **rope.FAMILIES,
}
_DESCRIBED = {family.op.run for family in FAMILIES.values()}
FAMILIES |= {op.name: family_of(op) for op in OPS if op.run not in _DESCRIBED}
_ARRAYS = {
    *("x", "a", "b", "b1", "b2", "w", "q", "k", "v", "k_cache", "v_cache", "shared_k", "shared_v"),
    "out",
}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call of FAMILIES[name]'s function, with its arguments at `place`, 0 or 1."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    place: int = 0

    def __str__(self) -> str:
        words = [f"{name}={_text(value)}" for name, value in self.arguments]
        if self.place:
            words.append(f"place={self.place}")
        return f"call({', '.join((repr(self.name), *words))})"


def call(name: str, place: int = 0, **arguments: Any) -> Call:
    return Call(name, tuple(arguments.items()), place)


def _text(value: Any) -> str:
    """Return the repr; of dataclasses, without fields that have their default."""
    if not is_dataclass(value):
        return repr(value)
    given = ((f.name, getattr(value, f.name)) for f in fields(value))
    defaults = {f.name: f.default for f in fields(value)}
    words = [f"{name}={one!r}" for name, one in given if one != defaults[name]]
    return f"{type(value).__name__}({', '.join(words)})"


def names_of(ops: Iterable[Op]) -> tuple[str, ...]:
    """Return the families of `ops`."""
    functions = [op.run for op in ops]
    return tuple(name for name, family in FAMILIES.items() if family.op.run in functions)


def draw_sequence(
    draw: Draw, names: tuple[str, ...] = tuple(FAMILIES), large: bool = False
) -> tuple[Call, ...]:
    """Draw 2 to 8 calls of one function.

    Most arguments have their plainest value.  Plain calls select the fastest kernels, which must
    not be used for the other calls.  large: include settings that are only for GPUs.
    """
    name = draw.choice(names)
    family = FAMILIES[name]
    setting = draw.choice(family.settings + family.large * large)
    drawn = draw.choice((_options_in_turn, _changes))(draw, family.options, setting)
    return tuple(
        call_of(name, with_fitting_out(draw, arguments), draw.choice((0, 0, 0, 1)))
        for arguments in drawn
    )


def _options_in_turn(
    draw: Draw, options: dict[str, DrawValue], setting: Setting
) -> list[Arguments]:
    """Draw one plain call, and calls that each change one option.

    The arrays of all calls have the same memory layout.
    """
    plain = {option: draw_value(PLAIN, setting) for option, draw_value in options.items()}
    for option in options:
        if option in _ARRAYS and draw.choice((True, False)):
            plain[option] = options[option](draw, setting)
    others = [option for option in options if option not in _ARRAYS] or list(options)
    drawn = []
    for _ in range(draw.integer(1, 7)):
        option = draw.choice(others)
        tries = (options[option](draw, setting) for _ in range(4))
        drawn.append({**plain, option: next((x for x in tries if x != plain[option]), None)})
    drawn.insert(draw.integer(0, len(drawn)), plain)
    return drawn


def _changes(draw: Draw, options: dict[str, DrawValue], setting: Setting) -> list[Arguments]:
    """Draw calls that each change up to three arguments of an earlier call."""
    drawn = [
        {
            option: draw_value(draw if draw.choice((True, False)) else PLAIN, setting)
            for option, draw_value in options.items()
        }
    ]
    for _ in range(draw.integer(1, 7)):
        arguments = dict(draw.choice(drawn))
        for _ in range(draw.choice((0, 1, 1, 2, 3))):
            option = draw.choice(tuple(options))
            arguments[option] = options[option](draw, setting)
        drawn.append(arguments)
    return drawn


class _PlainDraw:
    """Chooses the first value, which is the plainest."""

    def integer(self, low: int, high: int) -> int:
        return low

    def choice(self, options: Sequence[Any]) -> Any:
        return options[0]


PLAIN = _PlainDraw()


def call_of(name: str, arguments: Arguments, place: int) -> Call:
    """Return the call without arguments that equal their default."""
    defaults = defaults_of(name)
    given = (
        (option, value)
        for option, value in arguments.items()
        if (value, type(value)) != defaults.get(option)
    )
    return Call(name, tuple(given), place)


@cache
def defaults_of(name: str) -> dict[str, tuple[Any, type]]:
    """Return (default, type of the default) of a function's optional arguments."""
    parameters = inspect.signature(FAMILIES[name].run).parameters.values()
    return {p.name: (p.default, type(p.default)) for p in parameters if p.default is not p.empty}
