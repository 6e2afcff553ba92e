"""Times of functions that all ranks call: a run's time is that of its slowest rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...targets import Target
from ...tuning.timing import Clock, Function, GpuClock, HostClock
from .world import World


class RanksClock:
    """A clock that gives all ranks the same times, so that they make the same number of rounds.

    The ranks begin a round together, on the host.  On a GPU they also begin each function together:
    they exchange a byte between the flush and the first event.
    """

    min_rounds, max_rounds = 10, 200
    is_emulation = False

    def __init__(self, world: World, target: Target):
        self._world = world
        self._clock: Clock = HostClock(target)
        if target.name != "host":
            self._clock = _GpuClock(world, target)

    def round(self, functions: Sequence[Function], number: int = 0) -> list[float]:
        self._world.wait()
        return self._world.worst(self._clock.round(functions, number))

    def copy(self, nbytes: int) -> Function:
        return self._clock.copy(nbytes)

    def read(self, nbytes: int) -> Function:
        return self._clock.read(nbytes)


class _GpuClock(GpuClock):
    def __init__(self, world: World, target: Target):
        super().__init__(target)
        self._world = world
        self._sent, self._received = (target.xp.zeros(world.size, np.uint8) for _ in range(2))

    def flush(self) -> None:
        super().flush()
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        sends, receives = (
            [(rank, x[rank : rank + 1]) for rank in others] for x in (self._sent, self._received)
        )
        self._world.comm.exchange(sends, receives).wait()
