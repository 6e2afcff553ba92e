"""Calls with one illegal argument: each must raise a typed error before anything is launched.

A legal call is drawn and then broken in one of many ways.  Its inputs and the memory passed as
`out` must keep every byte; on a GPU the call must cause no CUDA error.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...check import GuardedArray, accepts_out
from ...op import Op, RandomDraw
from ...targets import Target
from .bits import arrays_of, codes, differing
from .breaks import Break, Drawn, breaks
from .tally import Tally, Task, describe, find_op

ERRORS = (
    *(TypeError, ValueError, NotImplementedError, np.exceptions.AxisError),
    *(SyntaxError, NameError),  # from formulas
)
_BREAKS = 10  # per drawn call


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: broken calls of all ops together.  A case is a drawn call, broken in _BREAKS ways."""
    each = -(-count // (_BREAKS * max(len(ops), 1)))
    return [
        Task("bad_calls", op.name, first, min(chunk, each - first), seed)
        for first in range(0, each, chunk)
        for op in ops
    ]


def run(task: Task, target: Target) -> Tally:
    op, tally = find_op(task.subject), Tally()
    for seed in task.seeds:
        _run_one(op, seed, target, tally)
        if tally.context_lost:
            break
    return tally


def draw(op: Op, seed: int, target: Target) -> Drawn:
    """Return a legal call; `out`, where the op takes one, is guarded memory."""
    problem = op.draw_problem(RandomDraw(seed))
    call = op.inputs(problem, seed, target.xp)
    result = arrays_of(op.run(*call.args, **call.kwargs))[0]
    arguments = dict(inspect.signature(op.run).bind(*call.args, **call.kwargs).arguments)
    guarded = None
    if accepts_out(op):
        guarded = GuardedArray(target.xp, result.shape, result.dtype)
        arguments["out"] = guarded.array
    return Drawn(op, problem, arguments, guarded, result.size, target)


def _run_one(op: Op, seed: int, target: Target, tally: Tally) -> None:
    rng = np.random.default_rng((seed, 2))
    try:
        drawn = draw(op, seed, target)
    except Exception as error:
        tally.add(op.name, "")
        tally.fail(op.name, "", seed, "the legal call", describe(error))
        return
    ways = breaks(drawn, rng)
    chosen = rng.permutation(len(ways))[:_BREAKS]
    before = [codes(x).copy() for x in drawn.arrays()]  # CuPy cannot copy FP8
    dtype = str(getattr(drawn.problem, "dtype", ""))
    tally.add(op.name, dtype, count=len(chosen))
    for number in chosen:
        wrong = outcome(op, drawn, ways[number])
        if wrong is not None:
            tally.fail(op.name, dtype, seed, f"{drawn.problem!r}: {ways[number].label}", wrong)
    wrong = _touched(drawn, before, target)
    if wrong is not None:
        labels = ", ".join(ways[number].label for number in chosen)
        tally.fail(op.name, dtype, seed, f"{drawn.problem!r}: one of {labels}", wrong)


def outcome(op: Op, drawn: Drawn, way: Break) -> str | None:
    """Return what is wrong with how the broken call ends, or None."""
    arguments = {**drawn.arguments, **way.make()}
    try:
        op.run(**arguments)
    except Exception as error:
        # NumPy's and CuPy's own errors are subclasses of these, and not accepted.
        return None if type(error) in ERRORS else describe(error)
    return "it was accepted"


def _touched(drawn: Drawn, before: list[Any], target: Target) -> str | None:
    """Return which memory was written, or None."""
    try:
        if target.name != "host":
            target.xp.cuda.Device().synchronize()
        for x, y in zip(drawn.arrays(), before, strict=True):
            if differing(codes(x), y):
                return "an input was written"
        if drawn.guarded is not None:
            drawn.guarded.check()
            bits = codes(drawn.guarded.array)
            if not bool((bits == np.iinfo(bits.dtype).max).all()):
                return "out was written"
    except Exception as error:
        return describe(error)
    return None
