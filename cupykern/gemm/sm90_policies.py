"""Policies by which the warpgroups and blocks of Hopper's GEMM kernels share work.

The Python half of kernels_cu/gemm/policies.cuh.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from ..arguments import config_class


@config_class
class Cooperative:
    """One to four consumer warpgroups each compute a slice of the rows of every tile."""

    warpgroups: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::Cooperative<{self.warpgroups}>"


@config_class
class PingPong:
    """Two warpgroups alternate tiles: one's epilogue overlaps the other's mainloop."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::PingPong"


@config_class
class SlicedK:
    """Two warpgroups alternate stages of one tile; their accumulators are added."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::SlicedK"


@config_class
class Multicast:
    """The tiles of a cluster's blocks share the columns of the accumulators.  Each block loads a
    slice of these columns' operand and multicasts it.  Multicast(1): no cluster."""

    size: int = 1

    @property
    def cpp(self) -> str:
        return f"gemm::Cluster<{self.size}>"


@config_class
class SplitK:
    """The blocks of a cluster share one tile, each with a range of k.  They exchange accumulators
    through distributed shared memory."""

    size: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::SplitK<{self.size}>"


class Scheduler(NamedTuple):
    """Which tiles, and which range of k, a block computes: the C++ type and its file."""

    name: str
    file: str


COOPERATIVE, NO_CLUSTER = Cooperative(), Multicast()
PERSISTENT = Scheduler("PersistentScheduler", "gemm/scheduler.cuh")
SPLIT_K = Scheduler("SplitKScheduler", "gemm/scheduler_split_k.cuh")
