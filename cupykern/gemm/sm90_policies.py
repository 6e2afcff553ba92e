"""How the warpgroups and blocks of Hopper's GEMM kernels share work.

The Python half of kernels_cu/gemm/policies.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Cooperative:
    """Each of one to four consumer warpgroups has a slice of the rows of every tile."""

    warpgroups: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::Cooperative<{self.warpgroups}>"


@dataclass(frozen=True)
class PingPong:
    """Each of two warpgroups has every second tile: one's epilogue runs beside the other's
    mainloop."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::PingPong"


@dataclass(frozen=True)
class SlicedK:
    """Each of two warpgroups has every second stage of a tile; their accumulators are added."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::SlicedK"


@dataclass(frozen=True)
class Multicast:
    """The blocks of a cluster have tiles with the same columns of the accumulators.  Each loads a
    slice of these columns' operand and multicasts it.  Multicast(1): no cluster."""

    size: int = 1

    @property
    def cpp(self) -> str:
        return f"gemm::Cluster<{self.size}>"


@dataclass(frozen=True)
class SplitK:
    """The blocks of a cluster have one tile, each a range of k; they exchange accumulators on the
    chip."""

    size: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::SplitK<{self.size}>"


COOPERATIVE, NO_CLUSTER = Cooperative(), Multicast()
