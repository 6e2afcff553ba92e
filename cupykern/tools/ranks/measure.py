"""A row of `bench --parallel`, on one rank and on all; verified before and after timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ...parallel import SelfCommunicator
from ...targets import Target
from ...tuning.contender import NO_SUCH_FUNCTION, OURS, Contender
from ...tuning.timing import Clock, Function, clock_of, time_rounds
from ..bench import Settings, free_memory
from ..model.graph import Graph
from ..results import Row
from .cases import Problem, Step
from .clock import RanksClock
from .world import World

ALONE = ", 1 rank"
"""Suffix of the names of results on one rank."""


class RanksPeer(Protocol):
    """Another library's step on the same problem, or None."""

    name: str

    def step(self, problem: Problem, ranks: int) -> Function | None: ...

    def captured(self, function: Function) -> Function: ...


@dataclass
class Session:
    """State that the rows share.

    graphs: time ours as CUDA graphs; false on the host or after a failed capture.
    """

    world: World
    target: Target
    settings: Settings
    peers: list[RanksPeer]
    graphs: bool = False
    alone: Clock = field(init=False)
    together: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.graphs = self.target.name != "host"
        self.alone = clock_of(self.target)
        self.together = RanksClock(self.world, self.target)


def measure(session: Session, op: str, problem: Problem) -> Row:
    """Measure a problem; all ranks call this, and rank 0's row is the one to keep.

    Times are those of the slowest rank of each run, errors the worst of all ranks.
    """
    row = Row(op, problem.size, "bfloat16", f"{op} {problem.size}", *problem.work, "read")
    whole: list[Contender] = []
    if session.world.rank == 0:
        whole = _alone(session, problem)
    session.world.wait()
    if session.target.name != "host":
        free_memory(session.target)
    split = _together(session, problem, row)
    row.results = [one.result for one in (*split, *whole)]
    return row


def _alone(session: Session, problem: Problem) -> list[Contender]:
    step = problem.step(SelfCommunicator())
    function = Graph(step.function, session.target)
    found: list[Contender] = [_Contender(OURS + ALONE, function, session.target)]
    found += [_peer(session, peer, problem, 1, peer.name + ALONE) for peer in session.peers]
    _timed(session, session.alone, found, step, problem)
    return found


def _together(session: Session, problem: Problem, row: Row) -> list[Contender]:
    world = session.world
    step = problem.step(world.comm)
    begin = world.comm.bytes_sent
    step.function()
    row.bytes_sent = int(world.worst([world.comm.bytes_sent - begin])[0])
    function, step = captured(session, problem, step)
    found: list[Contender] = [_Contender(OURS, function, session.target)]
    for peer in session.peers:
        one = _peer(session, peer, problem, world.size, peer.name)
        if not world.all(one.result.note is None):
            one.result.note = one.result.note or "failed on another rank"
        found.append(one)
    _timed(session, session.together, found, step, problem)
    for one in found:
        result = one.result
        (result.error_over_bound,) = world.worst([result.error_over_bound or 0.0])
        result.verified = world.all(result.verified)
    return found


def captured(session: Session, problem: Problem, step: Step) -> tuple[Function, Step]:
    """Capture the step as a CUDA graph on all ranks, or on none."""
    if not session.graphs:
        return step.function, step
    function: Function | None = None
    try:
        function = Graph(step.function, session.target)
    except Exception as error:  # any NCCL error, and CUDA errors that follow it
        print(f"rank {session.world.rank}: no CUDA graph: {error!r}", flush=True)
    if session.world.all(function is not None) and function is not None:
        return function, step
    session.graphs, function = False, None  # destroy a graph before its communicator
    session.world.renew()  # a communicator is unusable after a failed call
    step = problem.step(session.world.comm)
    return step.function, step


def _peer(session: Session, peer: RanksPeer, problem: Problem, ranks: int, name: str) -> Contender:
    """Return a peer's step as a CUDA graph, or a Contender whose note says why it has none."""
    failed = Contender(name, lambda: None)
    try:
        function = peer.step(problem, ranks)
        if function is not None:
            return _Contender(name, peer.captured(function), session.target)
        failed.result.note = NO_SUCH_FUNCTION
    except Exception as error:  # any error of other libraries
        failed.result.note = f"{type(error).__name__}: {error}"
    return failed


def _timed(
    session: Session, clock: Clock, found: list[Contender], step: Step, problem: Problem
) -> None:
    """Verify and time the contenders that have no note."""
    found = [one for one in found if one.result.note is None]
    for one in found:
        one()
        one.verify(step.comparer)
    settings = session.settings
    timings = time_rounds(clock, list(found), settings.warmup_ms, settings.rep_ms)
    for one, timing in zip(found, timings, strict=True):
        one.result.timed(timing, problem.work, None)
        one.result.verified = one.verify(step.comparer)


class _Contender(Contender):
    """Converts outputs of any library to arrays of the target."""

    def __init__(self, name: str, function: Function, target: Target):
        super().__init__(name, function)
        self._xp = target.xp

    def outputs(self) -> tuple[Any, ...]:
        from ...peers import to_array

        return tuple(to_array(output, self._xp) for output in super().outputs())
