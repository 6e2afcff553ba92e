"""Compiling kernels before they are needed, many at once: for sweeps and for check."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread

from .. import check, targets
from ..kernels import Variant
from ..op import Op, RandomDraw, as_tuple
from ..runtime import jit
from ..targets import CompileError, Target

_MAX_PROCESSES = 16


def variants_of_cases(
    ops: Iterable[Op], target: Target, cases: int, seed: int
) -> Iterator[Variant]:
    """What check.run_cases of the same arguments will launch, each once.

    Not quite all, where a call's further way depends on results.
    """
    known: dict[Variant, int] = {}
    for op in ops:
        with jit.recording() as variants:
            for case_seed in range(seed, seed + cases):
                problem = op.draw_problem(RandomDraw(case_seed))
                try:
                    call = op.inputs(problem, case_seed, target.xp)
                    outputs = as_tuple(op.run(*call.args, **call.kwargs))
                    if check.accepts_out(op) and "out" not in call.kwargs:
                        check.guarded_run(op, call, outputs[0])
                except Exception:  # it is the check that says so
                    continue
        new = variants.keys() - known.keys()
        known |= variants
        yield from (variant for variant in variants if variant in new)


def compile_ahead(
    target: Target, variants: Iterable[Variant], jobs: int
) -> Iterator[tuple[Variant, float, str | None]]:
    """Compile into the disk cache, `jobs` at once: (variant, seconds, error or None), as they end.

    The first ones are under way while `variants` finds the next.
    """
    if isinstance(variants, Sequence):
        if not variants:
            return
        # Two for each at least: a process on a GPU takes seconds to start.
        jobs = min(jobs, (len(variants) + 1) // 2)
    if target.name != "host":
        jobs = min(jobs, _MAX_PROCESSES)  # each takes half a gigabyte of the GPU
    with _pool(target, jobs) as pool:
        here = isinstance(pool, ThreadPoolExecutor)
        where = target if here else target.name
        try:
            tasks = {pool.submit(_compile, where, variant): variant for variant in variants}
            for task in as_completed(tasks):
                yield tasks[task], *task.result()
        except BaseException:  # Ctrl-C, also while variants are found: what has not begun does not
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pool(target: Target, jobs: int) -> AbstractContextManager[Executor]:
    # The host's compiler is a process of its own.  And a library call starts none: they would run
    # the caller's main module again.
    if target.name == "host" or jobs == 1:
        return ThreadPoolExecutor(jobs)
    return processes(jobs)


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """A pool of processes: NVRTC compiles one program at a time in a process.

    An exception in the block, Ctrl-C too, ends them at once, and so does the end of this process.
    """
    context = get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, context, initializer=_end_with, initargs=(theirs,))
    with theirs, ours, pool:
        try:
            yield pool
        except BaseException:
            ours.close()
            raise


def _end_with(parent: Connection) -> None:
    """In a process of the pool: end, with the compilers that it started, when `parent` is closed.

    Signals for this process are left to its parent, which closes it.
    """
    os.setpgrp()  # what a terminal's Ctrl-C ends
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)

    def wait() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, daemon=True).start()


def _compile(target: Target | str, variant: Variant) -> tuple[float, str | None]:
    start = time.perf_counter()
    try:
        (targets.get(target) if isinstance(target, str) else target).compile(variant)
    except CompileError as error:
        return time.perf_counter() - start, str(error)
    return time.perf_counter() - start, None
