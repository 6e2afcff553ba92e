"""Rates of architectures by data sheets, for heuristics where nothing was measured."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """Peak rates of a chip.

    fma, mma: multiply-adds per cycle and multiprocessor (limits.multiprocessors), of FP32, and of
        FP16 tensor cores with FP32 accumulators.  mhz: the boost clock.  dram: GB/s.
    """

    fma: int
    mma: int
    mhz: int
    dram: int


_RATES = {
    "sm_80": Rates(64, 1024, 1410, 2039),  # A100 SXM, 80 GB
    # GeForce: half of the rate with FP16 accumulators.
    "sm_86": Rates(128, 256, 1695, 936),  # RTX 3090
    "sm_89": Rates(128, 256, 2520, 1008),  # RTX 4090
    "sm_120a": Rates(128, 256, 2407, 1792),  # RTX 5090
    # B200.  No data sheet gives the rate of mma.sync: this is the A100's.
    "sm_100a": Rates(128, 1024, 1965, 8000),
    "gfx942": Rates(128, 1024, 2100, 5300),  # MI300X
    # Per two compute units.
    "gfx1100": Rates(256, 512, 2500, 960),  # RX 7900 XTX
    "gfx1151": Rates(256, 512, 2900, 256),  # Radeon 8060S
    "gfx1201": Rates(256, 1024, 2970, 640),  # RX 9070 XT
}


def rates(arch: str) -> Rates | None:
    """The rates of a common chip of `arch`; None: unknown."""
    return _RATES.get(arch)
