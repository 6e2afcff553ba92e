"""Give tasks to workers, merge their tallies, and write the record while they run."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...op import Op
from ...targets import Target
from .. import records
from ..stored import to_json
from .parts import Part
from .tally import COLUMNS, Tally, Task
from .workers import Worker, end, failed, ready

_POLL = 1.0  # seconds
_WRITE_EVERY = 3.0
_GIVES_UP = 8  # broken tasks without a good one: the part itself is at fault


@dataclass
class Progress:
    """A part's tasks and their results.

    wanted: tasks at the start.  last_seed: the last seed of every subject's cases.
    """

    part: Part
    queue: deque[Task]
    wanted: int
    last_seed: int | None
    tally: Tally = field(default_factory=Tally)
    finished: int = 0
    broken: int = 0
    running: int = 0
    begun: float | None = None
    ended: float | None = None
    told: bool = False

    @classmethod
    def of(cls, part: Part, tasks: Sequence[Task]) -> Progress:
        last = max((task.seeds[-1] for task in tasks), default=None)
        return cls(part, deque(tasks), len(tasks), last)

    @property
    def done(self) -> bool:
        return not self.queue and not self.running

    @property
    def state(self) -> str:
        if self.finished == self.wanted:
            return "finished"
        return "not begun" if self.begun is None else "cut"

    @property
    def seconds(self) -> float:
        if self.begun is None:
            return 0.0
        return (self.ended or time.monotonic()) - self.begun

    def can_begin(self, seconds: float) -> bool:
        if self.begun is not None and self.seconds > self.part.share * seconds:
            self.queue.clear()
        return bool(self.queue) and self.running < self.part.at_once

    def begin(self) -> Task:
        self.begun = self.begun or time.monotonic()
        self.running += 1
        return self.queue.popleft()

    def end(self, tally: Tally) -> None:
        self.tally.merge(tally)
        self.running -= 1
        self.finished += 1
        self.broken += tally.broken
        self.ended = time.monotonic()
        if self.broken == self.finished == _GIVES_UP and self.queue:
            self.queue.clear()
            self.tally.note(f"given up: the first {_GIVES_UP} tasks all broke")

    def document(self) -> dict[str, Any]:
        return {
            "part": self.part.name,
            "state": self.state,
            "tasks": self.wanted,
            "tasks_finished": self.finished,
            "last_seed": self.last_seed,
            "seconds": round(self.seconds, 1),
            "done": self.tally.done,
            "failed": self.tally.failed,
            **self.tally.document(),
        }


class Campaign:
    """Run parts and keep the record."""

    def __init__(
        self, parts: Sequence[Part], ops: Sequence[Op], target: Target, seed: int, path: Path | None
    ):
        self.progress = [Progress.of(part, part.tasks_on(target, ops, seed)) for part in parts]
        self._target, self._path, self._seed = target, path, seed
        self._begun, self._written = time.monotonic(), 0.0
        self._header = {**records.header("campaign", target), "seed": seed}
        self._workers: list[Worker] = []

    @property
    def failed(self) -> int:
        return sum(progress.tally.failed for progress in self.progress)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def run(
        self,
        jobs: int,
        seconds: float,
        tell: Callable[[Progress], None] = lambda progress: None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run until all tasks are done or `seconds` have passed.

        tell: called with each Progress that has ended.  tick: called about once a second.
        Running tasks are lost then; finished ones are on record, on KeyboardInterrupt too.
        """
        try:
            while self.seconds < seconds:
                for progress in self.progress:
                    if progress.done and not progress.told:
                        progress.told = True
                        tell(progress)
                if not self._assign(jobs, seconds):
                    break
                for worker in ready(self._workers, _POLL):
                    self._take(worker)
                self._end_hung()
                self._write_now_and_then()
                tick()
        finally:
            end(self._workers)
            self._write()
            for progress in self.progress:
                if not progress.told:
                    tell(progress)

    def _assign(self, jobs: int, seconds: float) -> bool:
        """Give tasks to idle workers.  Return False if no worker has a task."""
        idle = [worker for worker in self._workers if worker.task is None]
        while idle or len(self._workers) < jobs:
            able = next((p for p in self.progress if p.can_begin(seconds)), None)
            if able is None:
                break
            if not idle:
                idle.append(Worker(self._target.name))
                self._workers.append(idle[-1])
            idle.pop().give(able.begin())
        return any(worker.task is not None for worker in self._workers)

    def _take(self, worker: Worker) -> None:
        task = worker.task
        tally = worker.take()
        self._of(task).end(tally)
        if tally.context_lost:
            self._drop(worker)

    def _end_hung(self) -> None:
        for worker in list(self._workers):
            if worker.task is None:
                continue
            progress = self._of(worker.task)
            if time.monotonic() - worker.since > progress.part.task_seconds:
                tally = Tally()
                failed(tally, worker.task, f"no answer in {progress.part.task_seconds:g} s")
                progress.end(tally)
                self._drop(worker)

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        end([worker])

    def _of(self, task: Task | None) -> Progress:
        return next(p for p in self.progress if task is not None and p.part.name == task.part)

    def _write_now_and_then(self) -> None:
        if self.seconds - self._written > _WRITE_EVERY:
            self._write()

    def _write(self) -> None:
        self._written = self.seconds
        if self._path is not None:
            whole = self._path.with_name(self._path.name + ".new")
            whole.write_text(to_json(self.document()), encoding="utf-8")
            os.replace(whole, self._path)

    def document(self) -> dict[str, Any]:
        return {
            **self._header,
            "seconds": round(self.seconds, 1),
            "complete": all(progress.state == "finished" for progress in self.progress),
            "failed": self.failed,
            "row_columns": COLUMNS,
            "parts": [progress.document() for progress in self.progress],
        }
