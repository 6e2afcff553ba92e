"""Calls of ops with foreign arrays, and the same calls with numpy arrays of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupykern
from cupykern import OPS
from cupykern.interop.foreign import native
from cupykern.op import Call, Op, RandomDraw

CALLED = [op for op in OPS if hasattr(cupykern, op.run.__name__)]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if hasattr(type(value), "map_arrays"):
        return value.map_arrays(function)
    return function(value)


def calls(op: Op, seed: int, to_foreign: Callable[[Any], Any]) -> tuple[Call, Call]:
    """(with foreign arrays, with numpy's of the same memory and strides)."""
    call = op.inputs(op.draw_problem(RandomDraw(seed)), seed, np)

    def foreign(value: Any) -> Any:
        return _mapped(lambda x: to_foreign(x) if isinstance(x, np.ndarray) else x, value)

    def twin(value: Any) -> Any:
        return _mapped(lambda x: native("x", x), value)

    args = tuple(map(foreign, call.args))
    kwargs = {name: foreign(x) for name, x in call.kwargs.items()}
    return Call(args, kwargs), Call(tuple(map(twin, args)), {n: twin(x) for n, x in kwargs.items()})


def run(op: Op, call: Call) -> Any:
    return getattr(cupykern, op.run.__name__)(*call.args, **call.kwargs)


def arrays(outputs: Any) -> list[Any]:
    """Those of results: of a tuple, of an NvFp4."""
    found = []
    for x in outputs if isinstance(outputs, tuple) else (outputs,):
        found += x.arrays() if hasattr(type(x), "map_arrays") else [x]
    return found


def assert_same(op: Op, seed: int, to_foreign: Callable[[Any], Any], kind: type) -> None:
    """The op's results for foreign arrays are of the class `kind`, and have the bits of numpy's."""
    foreign, plain = calls(op, seed, to_foreign)
    expected, found = (arrays(run(op, call)) for call in (plain, foreign))
    for y, x in zip(expected, found, strict=True):
        if not isinstance(y, np.ndarray):
            assert x == y
            continue
        assert isinstance(x, kind)
        x = native("x", x)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes()
