"""How the arguments of random calls are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import OPS
from ...op import Draw, Op
from .memory import LAYOUTS, Alias, Array, Shape

Setting = Mapping[str, Any]
"""Sizes and dtypes, the same for most calls of a sequence."""
DrawValue = Callable[[Draw, Setting], Any]
ShapeOf = Callable[[Setting], Shape]

FLOATS = ("float16", "float32", "bfloat16")
MATRICES = ("C", "C", "F", "F", *LAYOUTS[:8])
ANY = ("C", "C", "C", "gap", "gap", "gap", *LAYOUTS[:8], "F", "broadcast")
BEGINS = (0, 0, 0, 1, 8, 16)

_OPS = {op.name: op for op in OPS}


@dataclass(frozen=True)
class Config:
    """The config of this number among the family's."""

    number: int


@dataclass(frozen=True)
class Family:
    """The calls of one function.

    settings: small ones.  large: for GPUs only.  options: how each argument of the function is
    drawn.  configs: of an architecture, legal for some calls.
    """

    op: Op
    settings: tuple[Setting, ...]
    large: tuple[Setting, ...]
    options: dict[str, DrawValue]
    configs: Callable[[str], tuple[Any, ...]]


def family(
    name: str,
    settings: tuple[Setting, ...],
    large: tuple[Setting, ...],
    options: dict[str, DrawValue],
    bench: tuple[Shape, str],
    *more_configs: Any,
) -> Family:
    """bench: shape and dtype of the bench row whose configs are taken, besides more_configs."""
    op = _OPS[name]

    def configs(arch: str) -> tuple[Any, ...]:
        return (*op.configs(op.bench_problem(*bench), arch), *more_configs)

    config = one_of(*[None] * 9, Config(0), Config(1), Config(2))
    return Family(op, settings, large, {**options, "config": config}, configs)


def combine(**choices: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Every combination of these values."""
    found: list[dict[str, Any]] = [{}]
    for name, values in choices.items():
        found = [{**setting, name: value} for value in values for setting in found]
    return tuple(found)


def one_of(*values: Any) -> DrawValue:
    return lambda draw, setting: draw.choice(values)


def often_none(draw_value: DrawValue) -> DrawValue:
    def draw_either(draw: Draw, setting: Setting) -> Any:
        return None if draw.choice((True, True, False)) else draw_value(draw, setting)

    return draw_either


def array(
    shape: ShapeOf, dtype: str | tuple[str, ...] = "dtype", layouts: tuple[str, ...] = ANY
) -> DrawValue:
    """dtype: the name of a setting, or dtypes to draw from."""

    def draw_array(draw: Draw, setting: Setting) -> Array:
        name = setting[dtype] if isinstance(dtype, str) else draw.choice(dtype)
        return Array(shape(setting), name, draw.choice(layouts), draw.choice(BEGINS))

    return draw_array


def with_fitting_out(draw: Draw, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, where `out` mostly has the dtype that they ask for, and sometimes the layout of x."""
    out, x = arguments.get("out"), arguments.get("x")
    if not isinstance(out, Array):
        return arguments
    dtype = arguments.get("dtype") or arguments.get("out_dtype")
    if dtype is not None and draw.choice((True, True, True, False)):
        out = replace(out, dtype=dtype)
    if isinstance(x, Array) and draw.choice((True, False)):
        out = replace(out, layout=x.layout, begin=x.begin)
    return {**arguments, "out": out}


def result(shape: ShapeOf, dtype: str, layouts: tuple[str, ...], *aliases: Alias) -> DrawValue:
    """`out`: an array of its own, mostly of the dtype that the setting names, or an alias."""

    def draw_out(draw: Draw, setting: Setting) -> Any:
        alias = draw.choice((*[None] * 5, *aliases))
        if alias is not None:
            return alias
        name = draw.choice((*[setting[dtype]] * 6, *FLOATS))
        return Array(shape(setting), name, draw.choice(layouts), draw.choice(BEGINS))

    return often_none(draw_out)
