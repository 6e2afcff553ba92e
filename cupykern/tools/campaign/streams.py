"""Threads call all ops on their own streams, through CuPy's default memory pool.

Every result must have the same bits as when the call ran alone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...op import Call, Op
from ...targets import Target
from .bits import Mismatches, arrays_of
from .shapes import problems
from .tally import Tally, Task, describe, find_op

THREADS, STREAMS = 8, 8  # streams per thread
_PROBLEMS = 4  # per op
_MOST_ERRORS = 3  # per thread


@dataclass(frozen=True)
class _Subject:
    op: Op
    problem: Any
    call: Call
    expected: tuple[Any, ...]

    @property
    def dtype(self) -> str:
        return str(getattr(self.problem, "dtype", ""))


def tasks(ops: Sequence[Op], count: int, seed: int, chunk: int) -> list[Task]:
    """count: calls on each of the 64 streams."""
    names = " ".join(op.name for op in ops)
    return [
        Task("streams", names, first, min(chunk, count - first), seed)
        for first in range(0, count, chunk)
    ]


def run(task: Task, target: Target) -> Tally:
    subjects = _subjects([find_op(name) for name in task.subject.split()], target, task.seeds[0])
    workers = [_Worker(number, task, target, subjects) for number in range(THREADS)]
    if target.name != "host":
        target.xp.cuda.Device().synchronize()  # the threads' inputs are complete
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(worker.work,))
        for worker in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally = Tally()
    for worker in workers:
        worker.count(tally)
    return tally


def _subjects(ops: Sequence[Op], target: Target, seed: int) -> list[_Subject]:
    """Make the calls and their expected outputs, in this thread."""
    found = []
    for op in ops:
        for i, problem in enumerate(problems(op, target, _PROBLEMS, 1000 * seed)):
            call = op.inputs(problem, seed + i, target.xp)
            expected = arrays_of(op.run(*call.args, **call.kwargs))
            found.append(_Subject(op, problem, call, expected))
    return found


@cache
def _streams(xp: Any, thread: int) -> tuple[Any, ...]:
    """Return a thread's streams, shared by all tasks: the library keeps memory per stream."""
    if xp is np:
        return (nullcontext(),)
    return tuple(xp.cuda.Stream(non_blocking=True) for _ in range(STREAMS))


class _Worker:
    """Calls of one thread, on its streams in turn."""

    def __init__(self, number: int, task: Task, target: Target, subjects: Sequence[_Subject]):
        self._number, self._task, self._target = number, task, target
        self._subjects = subjects
        self._rng = np.random.default_rng((task.seeds[0], number))
        self._mismatches = Mismatches(target.xp, len(subjects))
        self._calls = [0] * len(subjects)
        self._errors: list[tuple[_Subject, str]] = []

    def work(self) -> None:
        streams = _streams(self._target.xp, self._number)
        for number in self._rng.integers(len(self._subjects), size=STREAMS * self._task.count):
            subject, stream = self._subjects[number], streams[sum(self._calls) % len(streams)]
            self._calls[number] += 1
            try:
                with stream:
                    outputs = subject.op.run(*subject.call.args, **subject.call.kwargs)
                    self._mismatches.compare(number, arrays_of(outputs), subject.expected)
            except Exception as error:
                self._errors.append((subject, describe(error)))
                if len(self._errors) == _MOST_ERRORS:
                    return

    def count(self, tally: Tally) -> None:
        """Add this thread's calls to the tally.  Waits for the device."""
        seed = self._task.seeds[0]
        try:
            counts = self._mismatches.counts()
        except Exception as error:
            self._errors.append((self._subjects[0], describe(error)))
            counts = [0] * len(self._subjects)
        for subject, calls, wrong in zip(self._subjects, self._calls, counts, strict=True):
            tally.add(subject.op.name, subject.dtype, count=calls)
            if wrong:
                text = f"{wrong} elements differ in {calls} calls"
                tally.fail(subject.op.name, subject.dtype, seed, repr(subject.problem), text)
        for subject, text in self._errors:
            tally.fail(subject.op.name, subject.dtype, seed, repr(subject.problem), text)
