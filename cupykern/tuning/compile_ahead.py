"""Compile kernels before they are needed, in parallel: for sweeps and for check."""

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
    """Yield the variants that check.run_cases launches for the same arguments, each once.

    The list can be incomplete if a call's launches depend on results.
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
                except Exception:  # the check reports it
                    continue
        new = variants.keys() - known.keys()
        known |= variants
        yield from (variant for variant in variants if variant in new)


def compile_ahead(
    target: Target, variants: Iterable[Variant], jobs: int
) -> Iterator[tuple[Variant, float, str | None]]:
    """Compile into the disk cache, `jobs` at once; yield (variant, seconds, error or None).

    Results come as they finish.  Compilation starts while `variants` still yields variants.
    """
    if isinstance(variants, Sequence):
        if not variants:
            return
        # At least two per process: a process on a GPU takes seconds to start.
        jobs = min(jobs, (len(variants) + 1) // 2)
    if target.name != "host":
        jobs = min(jobs, _MAX_PROCESSES)  # each takes half a gigabyte of GPU memory
    with _pool(target, jobs) as pool:
        here = isinstance(pool, ThreadPoolExecutor)
        where = target if here else target.name
        try:
            tasks = {pool.submit(_compile, where, variant): variant for variant in variants}
            for task in as_completed(tasks):
                yield tasks[task], *task.result()
        except BaseException:  # Ctrl-C, also while variants are yielded: cancel pending tasks
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _pool(target: Target, jobs: int) -> AbstractContextManager[Executor]:
    # The host compiler is a separate process.  And a library call (jobs == 1) starts no processes,
    # because they would run the caller's main module again.
    if target.name == "host" or jobs == 1:
        return ThreadPoolExecutor(jobs)
    return processes(jobs)


@contextmanager
def processes(jobs: int) -> Iterator[Executor]:
    """Yield a process pool: NVRTC compiles one program at a time per process.

    An exception in the block, including Ctrl-C, kills the processes at once, and so does the end of
    this process.
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
    """Run in a pool process: kill it and the compilers it started when `parent` is closed.

    The process ignores signals; its parent handles them and closes `parent`.
    """
    os.setpgrp()  # a separate group: a terminal's Ctrl-C signals only the parent's
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
