"""Processes that run tasks; one that crashes, hangs or loses its GPU is replaced."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process
from typing import Any

from ... import targets
from ...targets import Target
from .parts import PARTS
from .tally import Tally, Task, describe

_ENDING = 5.0  # seconds that a process has to end
_MOST_KEPT = 2**30  # bytes of CuPy's pool


def run_task(task: Task, target: Target) -> Tally:
    """Return the part's tally; an exception counts as a failure.  Waits for GPU errors."""
    part = next(part for part in PARTS if part.name == task.part)
    tally = Tally()
    try:
        tally = part.run(task, target)
        if target.name != "host" and not tally.context_lost:
            _finish(target)
    except Exception as error:
        failed(tally, task, f"{describe(error)}\n{traceback.format_exc()}")
    return tally


def _finish(target: Target) -> None:
    """Wait for the GPU and free a large memory pool for the other processes."""
    target.xp.cuda.Device().synchronize()
    pool = target.xp.get_default_memory_pool()
    if pool.total_bytes() > _MOST_KEPT:
        pool.free_all_blocks()


def failed(tally: Tally, task: Task, error: str) -> None:
    """Count a task that ended abnormally."""
    tally.broken = True
    tally.add(task.subject, "")
    tally.fail(task.subject, "", task.seeds[0], task, error)


class Worker:
    """A process and its current task."""

    def __init__(self, target: str) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, target), daemon=False)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.since = 0.0

    def give(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        with suppress(OSError):  # the process has ended; `take` reports it
            self.pipe.send(task)

    def take(self) -> Tally:
        """Return the task's tally; if the process has ended, a tally that says so."""
        task, self.task = self.task, None
        assert task is not None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_ENDING)
            tally = Tally(context_lost=True)
            failed(tally, task, f"the process ended with exit code {self.process.exitcode}")
            return tally


def end(workers: Sequence[Worker]) -> None:
    """Terminate these processes, all at once, and wait until they have ended and freed their GPU
    memory."""
    for worker in workers:
        worker.process.terminate()
    until = time.monotonic() + _ENDING
    for worker in workers:
        worker.process.join(max(until - time.monotonic(), 0.0))
    for worker in workers:
        worker.process.kill()  # does nothing if the process has ended
    for worker in workers:
        worker.process.join()
        worker.pipe.close()


def ready(workers: list[Worker], seconds: float) -> Iterator[Worker]:
    """Yield the workers that have sent a result or ended, within `seconds`."""
    busy: dict[Any, Worker] = {worker.pipe: worker for worker in workers if worker.task is not None}
    for pipe in connection.wait(list(busy), seconds):
        yield busy[pipe]


def _end_with_parent() -> None:
    """Run in a thread: a killed campaign does not end its processes, and a task takes minutes."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ENDING)
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(pipe: connection.Connection, target_name: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends what a task started
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    target = targets.get(target_name)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        tally = run_task(task, target)
        pipe.send(tally)
        if tally.context_lost:
            return
