"""Repeated calls give the same bits, in any order, on any stream, with a new or a cached plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ...op import Op
from ...runtime import plans
from ...targets import Target
from .bits import Mismatches, arrays_of
from .shapes import problems
from .tally import Tally, Task, describe, find_op

_PROBLEMS = {"host": 3}  # problems of an op that are repeated in turns
_PROBLEMS_ON_GPU = 12
_STREAMS = 4
_COLD_EVERY = 50  # rounds between clearings of the plan cache
_MOST_POISON = 1 << 20  # bytes


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: repeats of each problem of an op.  Every task of an op has other problems."""
    return [
        Task("repeats", op.name, first, min(chunk, count - first), seed)
        for first in range(0, count, chunk)
        for op in ops
    ]


def run(task: Task, target: Target) -> Tally:
    op, seed, tally = find_op(task.subject), task.seeds[0], Tally()
    chosen = problems(op, target, _PROBLEMS.get(target.name, _PROBLEMS_ON_GPU), 1000 * seed)
    calls = [op.inputs(problem, seed + i, target.xp) for i, problem in enumerate(chosen)]
    expected = [arrays_of(op.run(*call.args, **call.kwargs)) for call in calls]
    mismatches = Mismatches(target.xp, len(calls))
    rng = np.random.default_rng(seed)
    streams = _streams(target)
    for round_ in range(task.count):
        if round_ % _COLD_EVERY == 0:
            plans.clear()
        for number in rng.permutation(len(calls)):
            call, stream = calls[number], streams[rng.integers(len(streams))]
            with stream:
                poison(target.xp, int(rng.integers(1, _MOST_POISON)))
                outputs = arrays_of(op.run(*call.args, **call.kwargs))
                mismatches.compare(number, outputs, expected[number])
    _count(tally, op, chosen, mismatches, task)
    return tally


def _count(tally: Tally, op: Op, chosen: Sequence[Any], mismatches: Mismatches, task: Task) -> None:
    try:
        counts = mismatches.counts()
    except Exception as error:  # a CUDA error, which any of the calls can have caused
        tally.add(op.name, "", count=1)
        tally.fail(op.name, "", task.seeds[0], chosen, describe(error))
        return
    for problem, wrong in zip(chosen, counts, strict=True):
        dtype = str(getattr(problem, "dtype", ""))
        tally.add(op.name, dtype, count=task.count)
        if wrong:
            text = f"{wrong} elements differ in {task.count} repeats"
            tally.fail(op.name, dtype, task.seeds[0], repr(problem), text)


def poison(xp: Any, size: int) -> None:
    """Leave NaN in memory that the stream's next call can get."""
    xp.empty(size, np.uint8).fill(0xFF)


def _streams(target: Target) -> list[AbstractContextManager[Any]]:
    if target.name == "host":
        return [nullcontext()]
    cuda = target.xp.cuda
    cuda.Device().synchronize()  # inputs and expected results are complete
    return [cuda.Stream.null, *(cuda.Stream(non_blocking=True) for _ in range(_STREAMS - 1))]
