"""Policies by which the warpgroups and blocks of Hopper's GEMM kernels share work.

The Python half of kernels_cu/gemm/policies.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Cooperative:
    """One to four consumer warpgroups each compute a slice of the rows of every tile."""

    warpgroups: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::Cooperative<{self.warpgroups}>"


@dataclass(frozen=True)
class PingPong:
    """Two warpgroups alternate tiles: one's epilogue overlaps the other's mainloop."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::PingPong"


@dataclass(frozen=True)
class SlicedK:
    """Two warpgroups alternate stages of one tile; their accumulators are added."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::SlicedK"


@dataclass(frozen=True)
class Multicast:
    """The tiles of a cluster's blocks share the columns of the accumulators.  Each block loads a
    slice of these columns' operand and multicasts it.  Multicast(1): no cluster."""

    size: int = 1

    @property
    def cpp(self) -> str:
        return f"gemm::Cluster<{self.size}>"


@dataclass(frozen=True)
class SplitK:
    """The blocks of a cluster share one tile, each with a range of k.  They exchange accumulators
    through distributed shared memory."""

    size: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::SplitK<{self.size}>"


COOPERATIVE, NO_CLUSTER = Cooperative(), Multicast()
