"""Functions that draw the arguments of random calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ... import OPS
from ...op import Draw, Op
from .memory import LAYOUTS, Alias, Array, Shape

Setting = Mapping[str, Any]
"""Sizes and dtypes, shared by most calls of a sequence."""
DrawValue = Callable[[Draw, Setting], Any]
ShapeOf = Callable[[Setting], Shape]

FLOATS = ("float16", "float32", "bfloat16")
MATRICES = ("C", "C", "F", "F", *LAYOUTS[:9])
ANY = ("C", "C", "C", "gap", "gap", "gap", *LAYOUTS[:9], "F", "broadcast")
BEGINS = (0, 0, 0, 1, 8, 16)

OPS_BY_NAME = {op.name: op for op in OPS}


@dataclass(frozen=True)
class Config:
    """A config, by its number in the family."""

    number: int


@dataclass(frozen=True)
class Family:
    """The calls of one function, `run`.

    op: selects the family (`names_of`).  settings: small ones.  large: only for GPUs.
    options: draws each argument of the function.  configs: configs for an architecture, legal for
    some calls.  written: the arguments that calls write to.
    """

    op: Op
    run: Callable[..., Any]
    settings: tuple[Setting, ...]
    large: tuple[Setting, ...]
    options: dict[str, DrawValue]
    configs: Callable[[str], tuple[Any, ...]]
    written: tuple[str, ...] = ("out",)


def family(
    name: str,
    settings: tuple[Setting, ...],
    large: tuple[Setting, ...],
    options: dict[str, DrawValue],
    benches: tuple[tuple[Shape, str], ...],
    *more_configs: Any,
    written: tuple[str, ...] = ("out",),
) -> Family:
    """benches: (shape, dtype) of bench rows; the first two configs of each are used."""
    op = OPS_BY_NAME[name]

    def configs(arch: str) -> tuple[Any, ...]:
        found = (op.configs(op.bench_problem(*bench), arch)[:2] for bench in benches)
        return tuple(dict.fromkeys((*(one for some in found for one in some), *more_configs)))

    config = one_of(*[None] * 12, *map(Config, range(4)))
    return Family(op, op.run, settings, large, {**options, "config": config}, configs, written)


def combine(**choices: tuple[Any, ...]) -> tuple[Setting, ...]:
    """Return every combination of these values."""
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
    """Change `arguments` so that more calls are legal or use fast kernels.

    `out` mostly gets the requested dtype.  `out` and the mask sometimes get the memory layout of x.
    An epilogue formula mostly excludes other epilogue options, and a score mostly has its operands.
    """
    if "score" in arguments and draw.choice((*[True] * 7, False)):
        lacks = "operands" if arguments["score"] is None else "score"
        if None in (arguments["score"], arguments["operands"]):
            arguments = arguments | {lacks: None}
    if "epilogue" in arguments and draw.choice((True, True, True, False)):
        formula = arguments["epilogue"]
        others = ("operands",) if formula is None else ("bias", "activation", "residual")
        arguments = arguments | {name: None for name in others if name in arguments}
        if formula is not None and "policy" in arguments:
            arguments["policy"] = "fp32"
        if formula is not None and " s" not in formula:
            arguments["operands"] = None
    dtype = arguments.get("dtype") or arguments.get("out_dtype")
    out, mask, x = (arguments.get(name) for name in ("out", "mask", "x"))
    if isinstance(out, Array) and dtype is not None and draw.choice((True, True, True, False)):
        out = replace(out, dtype=dtype)
    if isinstance(x, Array):
        if isinstance(out, Array) and draw.choice((True, False)):
            out = replace(out, layout=x.layout, begin=x.begin)
        if isinstance(mask, Array) and mask.shape == x.shape and draw.choice((True, False)):
            mask = replace(mask, layout=x.layout, begin=x.begin)
    return arguments | {name: one for name, one in (("out", out), ("mask", mask)) if one}


def result(shape: ShapeOf, dtype: str, layouts: tuple[str, ...], *aliases: Alias) -> DrawValue:
    """Draw `out`: None, an alias, or a new array, mostly of the dtype that the setting names."""

    def draw_out(draw: Draw, setting: Setting) -> Any:
        alias = draw.choice((*[None] * 5, *aliases))
        if alias is not None:
            return alias
        name = draw.choice((*[setting[dtype]] * 6, *FLOATS))
        return Array(shape(setting), name, draw.choice(layouts), draw.choice(BEGINS))

    return often_none(draw_out)
