"""How the warpgroups and blocks of Hopper's GEMM kernels share work.

The Python half of kernels_cu/gemm/policies.cuh.
"""

from __future__ import annotations

from typing import ClassVar

from ..config_class import config_class


@config_class
class Cooperative:
    """Each of one to four consumer warpgroups has a slice of the rows of every tile."""

    warpgroups: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::Cooperative<{self.warpgroups}>"


@config_class
class PingPong:
    """Each of two warpgroups has every second tile: one's epilogue runs beside the other's
    mainloop."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::PingPong"


@config_class
class SlicedK:
    """Each of two warpgroups has every second stage of a tile; their accumulators are added."""

    warpgroups: ClassVar[int] = 2
    cpp: ClassVar[str] = "gemm::SlicedK"


@config_class
class Multicast:
    """The blocks of a cluster have tiles with the same columns of the accumulators.  Each loads a
    slice of these columns' operand and multicasts it.  Multicast(1): no cluster."""

    size: int = 1

    @property
    def cpp(self) -> str:
        return f"gemm::Cluster<{self.size}>"


@config_class
class SplitK:
    """The blocks of a cluster have one tile, each a range of k; they exchange accumulators on the
    chip."""

    size: int = 2

    @property
    def cpp(self) -> str:
        return f"gemm::SplitK<{self.size}>"


COOPERATIVE, NO_CLUSTER = Cooperative(), Multicast()
