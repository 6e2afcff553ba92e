"""Random cases of every op against FP64, like `cupykern check`."""

from __future__ import annotations

from collections.abc import Sequence

from ... import check
from ...op import Op
from ...targets import Target
from .tally import Tally, Task, find_op


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: cases of each op.  The ops take turns, so that a cut run has cases of every op."""
    return [
        Task("cases", op.name, first, min(chunk, count - first), seed)
        for first in range(0, count, chunk)
        for op in ops
    ]


def run(task: Task, target: Target) -> Tally:
    tally = Tally()
    for case in check.run_cases((find_op(task.subject),), target, task.count, task.seeds[0]):
        tally.add(case.op, case.dtype, case.comparison)
        if case.error is not None:
            tally.fail(case.op, case.dtype, case.seed, case.problem, case.error)
        if tally.context_lost:
            break
    return tally
