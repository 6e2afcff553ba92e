"""The benchmark protocol: verify before and after, time side by side with events, cold cache."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..kernels import Variant
from ..op import Call, Op, as_tuple
from ..peers import Peer, to_array
from ..runtime import jit
from ..targets import Target, UnavailableError
from ..tuning.contender import (
    MAX_SAMPLE,
    NO_SUCH_FUNCTION,
    OURS,
    Comparer,
    Contender,
    Result,
    Verifier,
    our_contender,
)
from ..tuning.protocol import Monitor
from ..tuning.timing import FLUSH_BYTES, Clock, Function, time_rounds
from .results import Row
from .stored import plain_of

_SPACER_STEP, _SPACER_STEPS = (
    2**21,
    128,
)  # bytes (a GPU page); at most this number of them, less one


@dataclass(frozen=True)
class Settings:
    """How long to time (ms of the op's own time per row), and the seed of the inputs."""

    warmup_ms: float = 25.0
    rep_ms: float = 100.0
    seed: int = 0

    def record(self, target: Target) -> dict[str, Any]:
        return {
            **asdict(self),
            "flush_bytes": FLUSH_BYTES if target.name != "host" else 0,
            "max_verified_elements": MAX_SAMPLE,
        }


@dataclass(frozen=True)
class Task:
    """The problem of one row."""

    op: Op
    shape: tuple[int, ...]
    dtype: str
    problem: Any


def tasks(
    ops: Iterable[Op],
    target: str,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[str] | None = None,
) -> list[Task]:
    """Return all rows of a benchmark.  Raises ValueError or TypeError for illegal problems."""
    return [
        Task(op, shape, dtype, op.bench_problem(shape, dtype))
        for op in ops
        for shape in shapes or op.bench_shapes(target)
        for dtype in dtypes or op.dtypes
    ]


def first_tasks(ops: Iterable[Op], target: str) -> list[Task]:
    """Return a row per op, with its first shape and dtype."""
    found = []
    for op in ops:
        found += tasks([op], target, op.bench_shapes(target)[:1], op.dtypes[:1])
    return found


_COMPILE_S = 0.7  # on one core, per host kernel
_VERIFY_S_PER_BYTE = 2e-7  # for FP64 references and bounds


def host_seconds(
    all_tasks: Sequence[Task], compiles: int, jobs: int, settings: Settings
) -> tuple[float, float]:
    """Estimate the time of one run of a host benchmark, in seconds: (compiling, rows)."""
    # Ours and the plain copy are timed.
    rows = len(all_tasks) * 2e-3 * (settings.warmup_ms + settings.rep_ms)
    for task in all_tasks:
        work = task.op.work(task.problem)
        rows += _VERIFY_S_PER_BYTE * (work.bytes_read + work.bytes_written)
    return compiles * _COMPILE_S / jobs, rows


def bench_task(
    task: Task,
    target: Target,
    clock: Clock,
    settings: Settings,
    peers: Sequence[Peer] = (),
    monitor: Monitor | None = None,
) -> Row:
    """Verify, time and verify again; errors are noted in the Result.

    monitor: of the GPU's clocks, entered.  A wrong result of ours is not timed; a wrong peer is
    timed and shown with its error.  Raises UnavailableError, and MemoryError if the problem does
    not fit.
    """
    op, work, row = task.op, task.op.work(task.problem), _new_row(task)
    try:
        call = op.inputs(task.problem, settings.seed, target.xp)
        verifier = Verifier(op, call, settings.seed)
        ours = our_contender(op, call, target.xp)
        row.results.append(ours.result)
        ours()
        if not ours.verify(verifier):
            return row
        contenders = [ours]
        parts: list[tuple[Result, str, Function]] = []
        for peer in peers:
            contender = peer_contender(peer, op.name, call, verifier, target.xp)
            row.results.append(contender.result)
            if contender.result.error_over_bound is not None:  # it ran
                contenders.append(contender)
                parts += _peer_parts(peer, op, call, contender.result)
        total = work.bytes_read + work.bytes_written
        plain = clock.copy(total) if row.plain == "copy" else clock.read(total)
        if ours.guarded is not None:
            ours.guarded.poison()
        start = time.monotonic()
        steps = [step for *_, step in parts]
        all_timings = time_rounds(
            clock, [*contenders, plain, *steps], settings.warmup_ms, settings.rep_ms
        )
        row.clocks = None if monitor is None else monitor.between(start, time.monotonic())
        timings, plain_timing = all_timings[: len(contenders)], all_timings[len(contenders)]
        row.plain_us = plain_timing.median
        for (result, name, _), timing in zip(
            parts, all_timings[len(contenders) + 1 :], strict=True
        ):
            result.parts_us = {**(result.parts_us or {}), name: timing.median}
        for contender, timing in zip(contenders, timings, strict=True):
            contender.result.timed(timing, work, plain_timing)
            contender.result.verified = contender.verify(verifier)
    except (UnavailableError, MemoryError):
        raise
    except Exception as error:
        if not row.results:
            row.results.append(Result(OURS))
        row.results[0].verified = False
        row.results[0].note = f"{type(error).__name__}: {error}"
    return row


def _new_row(task: Task) -> Row:
    """Make a row without results."""
    work = task.op.work(task.problem)
    plain = plain_of(work.bytes_read, work.bytes_written)
    return Row(task.op.name, task.shape, task.dtype, repr(task.problem), *work, plain)


class _PeerContender(Contender):
    """A peer's function; its outputs can be arrays of another library."""

    def __init__(self, name: str, function: Function, xp: Any):
        super().__init__(name, function)
        self._xp = xp

    def outputs(self) -> tuple[Any, ...]:
        return tuple(to_array(output, self._xp) for output in super().outputs())


def peer_contender(peer: Peer, op: str, call: Call, verifier: Comparer, xp: Any) -> Contender:
    """Run a peer once, which compiles it, and compare it; after an error it has only a note."""
    failed = Contender(peer.name, lambda: None)
    try:
        function = peer.build(op, call)
        if function is None:
            failed.result.note = NO_SUCH_FUNCTION
            return failed
        contender = _PeerContender(peer.name, function, xp)
        contender()
        contender.verify(verifier)
        return contender
    except Exception as error:  # any error of other libraries
        failed.result.note = f"{type(error).__name__}: {error}"
        return failed


def _peer_parts(
    peer: Peer, op: Op, call: Call, result: Result
) -> list[tuple[Result, str, Function]]:
    """Return the peer's steps, each run once; empty if the peer cannot be split."""
    try:
        parts = peer.parts(op.name, call)
        for step in parts.values():
            step()
    except Exception:  # any error of other libraries: the whole peer did run
        return []
    return [(result, name, step) for name, step in parts.items()]


def run(
    all_tasks: Iterable[Task],
    target: Target,
    clock: Clock,
    settings: Settings,
    peers: Sequence[Peer] = (),
    monitor: Monitor | None = None,
    place: random.Random | None = None,
) -> Iterator[Row]:
    """Bench one task after another.  Raises UnavailableError.

    place: draws the size of a memory block that is allocated before each task's arrays, so that
        their addresses differ between runs.
    """
    for task in all_tasks:
        try:
            spacer = 0 if place is None else _SPACER_STEP * place.randrange(_SPACER_STEPS)
            kept = target.xp.empty(spacer, "uint8")
            yield bench_task(task, target, clock, settings, peers, monitor)
        except MemoryError as error:
            row = _new_row(task)
            row.results.append(Result(OURS, note=f"does not fit: {error}"))
            yield row
        kept = None  # noqa: F841 - frees it
        if target.name != "host":
            free_memory(target)


def free_memory(target: Target) -> None:
    """Free the GPU memory that CuPy and torch cache: neither library can use the other's cache."""
    target.xp.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def variants(all_tasks: Iterable[Task], target: Target) -> list[Variant]:
    """Return the variants that a benchmark of these tasks launches, each once.

    The list can be incomplete if a call's launches depend on results.
    """
    problems = {(task.op.name, repr(task.problem)): (task.op, task.problem) for task in all_tasks}
    if target.name != "host":  # for host_times
        for op in {op.name: op for op, _ in problems.values()}.values():
            problems[op.name, ""] = op, tiny_problem(op, target.name)
    launched = _first_of_host if target.name == "host" else _recorded
    found: dict[Variant, None] = {}
    for op, problem in problems.values():
        try:
            found |= dict.fromkeys(launched(op, problem, target))
        except Exception:  # the row reports it
            continue
    return list(found)


def _first_of_host(op: Op, problem: Any, target: Target) -> tuple[Variant, ...]:
    """Return the variant of the op's default config."""
    return (op.variant(problem, op.configs(problem, target.arch)[0]),)


def _recorded(op: Op, problem: Any, target: Target) -> tuple[Variant, ...]:
    """Record the variants of a call without launching them.

    GPU arrays take milliseconds to make, NumPy arrays would take seconds.
    """
    with jit.recording() as recorded:
        call = op.inputs(problem, 0, target.xp)
        op.run(*call.args, **call.kwargs)
    del call
    free_memory(target)
    return tuple(recorded)


def tiny_problem(op: Op, target: str) -> Any:
    """Return the first bench problem on a target, with sizes up to 128 if the op supports it."""
    shape = op.bench_shapes(target)[0]
    try:
        return op.bench_problem(tuple(min(n, 128) for n in shape), op.dtypes[0])
    except (ValueError, NotImplementedError):
        return op.bench_problem(shape, op.dtypes[0])


def host_times(ops: Iterable[Op], target: Target, clock: Any, seed: int) -> dict[str, Any]:
    """Return GpuClock.host_times of each op, on a tiny problem; {} on the host target."""
    times: dict[str, Any] = {}
    for op in ops if target.name != "host" else ():
        call = op.inputs(tiny_problem(op, target.name), seed, target.xp)
        run = functools.partial(op.run, *call.args, **call.kwargs)
        times[op.name] = clock.host_times(run, as_tuple(run())[0])
    return times
