"""How long a config of decode attention takes: what `chunks_per_block` is chosen by.

Blocks run in rounds of as many as an SM holds at once.  A round takes as long as DRAM needs for its
keys and values, or as the longest block needs alone, whichever is longer; near each other both
count, as in a norm of the order below.  The constants are an H200's, on every device.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import tuned

_C = tuned.constants("sm_90a", "decode_attention")
_ORDER = 2.09  # of the norm, fitted too


class Blocks(NamedTuple):
    """Of a launch: `number` blocks, of which `resident` run at once.

    longest: keys of the longest block.  read: bytes that one reads from DRAM, on average.
    merges: of partial results through memory, one after the other.  dim: of padded heads.  is_8bit:
    of the caches.
    """

    number: int
    resident: int
    longest: int
    read: float
    merges: int
    dim: int
    is_8bit: bool = False


def estimate_us(blocks: Blocks) -> float:
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
