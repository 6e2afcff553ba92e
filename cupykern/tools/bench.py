"""The benchmark protocol: verified before and after, side by side, cold cache, event timing."""

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

_SPACER_STEP, _SPACER_STEPS = (
    2**21,
    128,
)  # bytes (a GPU's page) and how many of them, less one, at most


@dataclass(frozen=True)
class Settings:
    """How long to time (ms of the op's own time per row) and the seed of the inputs."""

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
    """What one row benches."""

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
    """All rows of a benchmark.  Raises ValueError or TypeError where an op refuses one."""
    return [
        Task(op, shape, dtype, op.bench_problem(shape, dtype))
        for op in ops
        for shape in shapes or op.bench_shapes(target)
        for dtype in dtypes or op.dtypes
    ]


def first_tasks(ops: Iterable[Op], target: str) -> list[Task]:
    """A row for each op: of its first shape and dtype."""
    found = []
    for op in ops:
        found += tasks([op], target, op.bench_shapes(target)[:1], op.dtypes[:1])
    return found


_COMPILE_S = 0.7  # of a core, for one host kernel
_VERIFY_S_PER_BYTE = 2e-7  # of the FP64 references and the bounds


def host_seconds(
    all_tasks: Sequence[Task], compiles: int, jobs: int, settings: Settings
) -> tuple[float, float]:
    """About how long one run of a host benchmark's rows takes: (compiling, the rows)."""
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
    """Verify, time and verify again; what fails is noted in its Result.

    monitor: of the GPU's clocks, entered.  Our own function is not timed if it is wrong; a peer is,
    and shown with its error.  Raises UnavailableError and MemoryError (the problem does not fit).
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
    """A row without results.  What mostly reads is compared with a plain read."""
    work = task.op.work(task.problem)
    plain = "copy" if 4 * work.bytes_written >= work.bytes_read else "read"
    return Row(task.op.name, task.shape, task.dtype, repr(task.problem), *work, plain)


class _PeerContender(Contender):
    """A peer's function, whose outputs may be arrays of another library."""

    def __init__(self, name: str, function: Function, xp: Any):
        super().__init__(name, function)
        self._xp = xp

    def outputs(self) -> tuple[Any, ...]:
        return tuple(to_array(output, self._xp) for output in super().outputs())


def peer_contender(peer: Peer, op: str, call: Call, verifier: Comparer, xp: Any) -> Contender:
    """A peer, run once (so that it is compiled) and compared; without figures if that failed."""
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
    except Exception as error:  # whatever other libraries raise
        failed.result.note = f"{type(error).__name__}: {error}"
        return failed


def _peer_parts(
    peer: Peer, op: Op, call: Call, result: Result
) -> list[tuple[Result, str, Function]]:
    """The steps of a peer, each run once; none where they cannot be taken apart."""
    try:
        parts = peer.parts(op.name, call)
        for step in parts.values():
            step()
    except Exception:  # whatever other libraries raise: the peer as a whole did run
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

    place: draws how much memory to keep from each task, so that its arrays lie elsewhere every
        time.
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
    """Give back what CuPy and torch keep of a GPU's memory: neither asks the other for it."""
    target.xp.get_default_memory_pool().free_all_blocks()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def variants(all_tasks: Iterable[Task], target: Target) -> list[Variant]:
    """What a benchmark of these tasks will launch, each once; not quite all where a call's further
    way depends on results."""
    problems = {(task.op.name, repr(task.problem)): (task.op, task.problem) for task in all_tasks}
    if target.name != "host":  # host_times
        for op in {op.name: op for op, _ in problems.values()}.values():
            problems[op.name, ""] = op, tiny_problem(op, target.name)
    launched = _first_of_host if target.name == "host" else _recorded
    found: dict[Variant, None] = {}
    for op, problem in problems.values():
        try:
            found |= dict.fromkeys(launched(op, problem, target))
        except Exception:  # the row says so
            continue
    return list(found)


def _first_of_host(op: Op, problem: Any, target: Target) -> tuple[Variant, ...]:
    """Of the config that the op chooses by itself."""
    return (op.variant(problem, op.configs(problem, target.arch)[0]),)


def _recorded(op: Op, problem: Any, target: Target) -> tuple[Variant, ...]:
    """Of a call that launches nothing: with arrays of the GPU, which take milliseconds to make,
    where numpy's would take seconds."""
    with jit.recording() as recorded:
        call = op.inputs(problem, 0, target.xp)
        op.run(*call.args, **call.kwargs)
    del call
    free_memory(target)
    return tuple(recorded)


def tiny_problem(op: Op, target: str) -> Any:
    """Of the first bench row on a target, with sizes up to 128 where that is a row of the op."""
    shape = op.bench_shapes(target)[0]
    try:
        return op.bench_problem(tuple(min(n, 128) for n in shape), op.dtypes[0])
    except (ValueError, NotImplementedError):
        return op.bench_problem(shape, op.dtypes[0])


def host_times(ops: Iterable[Op], target: Target, clock: Any, seed: int) -> dict[str, Any]:
    """GpuClock.host_times of the ops, with a tiny problem each; {} on the host target."""
    times: dict[str, Any] = {}
    for op in ops if target.name != "host" else ():
        call = op.inputs(tiny_problem(op, target.name), seed, target.xp)
        run = functools.partial(op.run, *call.args, **call.kwargs)
        times[op.name] = clock.host_times(run, as_tuple(run())[0])
    return times
