"""Estimate the time of a decode-attention config, to choose `chunks_per_block`.

Blocks run in waves of resident blocks.  A wave takes the DRAM time of its keys and values or the
time of its longest block alone, whichever is longer.  If the two are close, both count: they are
combined by a norm of order `_ORDER`.  The constants were fitted on an H200 and apply to every
device.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import tuned

_C = tuned.constants("sm_90a", "decode_attention")
_ORDER = 2.09  # order of the norm, also fitted


class Blocks(NamedTuple):
    """The blocks of a launch: `number` in all, of which `resident` run at once.

    longest: keys of the longest block.  read: bytes that a block reads from DRAM, on average.
    merges: sequential merges of partial results through memory.  dim: padded head size.
    is_8bit: caches are 8-bit.
    """

    number: int
    resident: int
    longest: int
    read: float
    merges: int
    dim: int
    is_8bit: bool = False


def estimate_us(blocks: Blocks) -> float:
    """Estimated time of a launch in us, the merges of partial results included."""
    width = blocks.dim / 128
    key = _C["key_8bit" if blocks.is_8bit else "key"]
    alone = blocks.longest * _line(key, width) + _line(_C["start"], width)

    def round_us(count: int) -> float:
        dram = count * blocks.read / _C["bandwidth"]
        return (dram**_ORDER + alone**_ORDER) ** (1 / _ORDER)

    rounds, rest = divmod(blocks.number, blocks.resident)
    us = _line(_C["launch"], width) + rounds * round_us(blocks.resident)
    us += round_us(rest) if rest else 0.0
    return us + blocks.merges * _C["merge"]


def _line(of_widths: tuple[float, float], width: float) -> float:
    at_zero, slope = of_widths
    return at_zero + slope * width
