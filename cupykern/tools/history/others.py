"""Random calls of ops without a module of their own, derived from the ops' problems."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np

from ...nvfp4 import NvFp4
from ...op import Draw, Op, RandomDraw
from .draws import ANY, BEGINS, FLOATS, Config, DrawValue, Family, Setting, one_of
from .memory import Alias, Array, Fp4, Integers

_PROBLEMS = 24
_LAYOUTS = ("C", *ANY)
_OUT_LAYOUTS = ("C", "C", "gap", "gap of 8", "shifted", "F", "rows negative")


def family_of(op: Op) -> Family:
    """Return the calls of op's problems with varied options, memory layouts and outputs.

    A non-array argument is drawn from its values in all problems.
    """
    parameters = inspect.signature(op.run).parameters.values()
    settings = tuple(_setting(op, seed) for seed in range(_PROBLEMS))
    options = {x.name: _argument(x, settings) for x in parameters}

    def configs(arch: str) -> tuple[Any, ...]:
        problem = op.bench_problem(op.bench_shapes("host")[0], op.dtypes[0])
        return op.configs(problem, arch)[:2]

    if "out" in options:
        options["out"] = _out
    if "config" in options:
        options["config"] = one_of(*[None] * 12, *map(Config, range(4)))
    return Family(op, op.run, settings, (), options, configs)


def _setting(op: Op, seed: int) -> Setting:
    """Return the arguments of a call by name, and its result as "out"."""
    call = op.inputs(op.draw_problem(RandomDraw(seed)), seed, np)
    bound = inspect.signature(op.run).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    found = {name: _described(x) for name, x in bound.arguments.items()}
    first = next((x for x in found.values() if isinstance(x, Array)), Array(()))
    result = op.reference(*call.args, **call.kwargs)[0]
    return {**found, "out": Array(result.shape, first.dtype)}


def _described(x: Any) -> Any:
    if isinstance(x, NvFp4):
        return Fp4(x.shape, x.layout)
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == np.int32:  # indices: random numbers are not valid ones
        return Integers(_nested(x.tolist()))
    return Array(x.shape, x.dtype.name)


def _nested(values: Any) -> Any:
    return tuple(map(_nested, values)) if isinstance(values, list) else values


def _argument(parameter: inspect.Parameter, settings: tuple[Setting, ...]) -> DrawValue:
    name = parameter.name
    plain = [s[name] for s in settings if not isinstance(s[name], (Array, Fp4, Integers))]
    values = tuple({repr(x): x for x in plain}.values())

    def draw_argument(draw: Draw, setting: Setting) -> Any:
        x = setting[name]
        if isinstance(x, Array):
            found = replace(x, layout=draw.choice(_LAYOUTS), begin=draw.choice(BEGINS))
            return draw.choice((found, found, None)) if parameter.default is None else found
        return x if isinstance(x, (Fp4, Integers)) else draw.choice((x, *values))

    return draw_argument


def _out(draw: Draw, setting: Setting) -> Any:
    """Draw None, an array, mostly of the first array's dtype, or the first array."""
    first = next((name for name, x in setting.items() if isinstance(x, Array)), "out")
    dtype = draw.choice((*[setting["out"].dtype] * 6, *FLOATS))
    made = replace(
        setting["out"], dtype=dtype, layout=draw.choice(_OUT_LAYOUTS), begin=draw.choice(BEGINS)
    )
    return draw.choice((None, None, made, made, Alias(first)))
