"""How long a config of decode attention takes: what `chunks_per_block` is chosen by.

Blocks run in rounds of as many as an SM holds at once.  A round takes as long as DRAM needs for its
keys and values, or as the longest block needs alone, whichever is longer; near each other both
count, as in a norm of the order below.  The constants are an H200's, on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import tuned

if TYPE_CHECKING:
    from .decode_config import DecodeConfig, DecodeTask

_C = tuned.constants("sm_90a", "decode_attention")
_ORDER = 2.8  # of the norm, fitted too


def estimate_us(task: DecodeTask, config: DecodeConfig, num_sms: int) -> float:
    """Of sequences of `max_keys` keys each, on a device with `num_sms` SMs."""
    t, c = task, config
    size, count = t.chunks_of_longest(c)
    splits = -(-count // c.chunks_per_block)
    row_tiles = max(1, -(-t.rows // c.tile_m))  # find their keys in L2
    blocks = t.batch * t.num_kv_heads * row_tiles * splits
    width = t.padded_dim / 128
    longest = min(c.chunks_per_block * size, t.max_keys)
    alone = longest * _line(_C["key"], width) + _line(_C["start"], width)
    read = t.max_keys / splits * t.cache_itemsize * (t.dim + t.dim_v) / row_tiles / _C["bandwidth"]

    def round_us(num_blocks: int) -> float:
        return ((num_blocks * read) ** _ORDER + alone**_ORDER) ** (1 / _ORDER)

    rounds, rest = divmod(blocks, c.blocks_per_sm * num_sms)
    us = _line(_C["launch"], width) + rounds * round_us(c.blocks_per_sm * num_sms)
    us += round_us(rest) if rest else 0.0
    return us + c.merges(count) * _C["merge"]


def _line(of_widths: tuple[float, float], width: float) -> float:
    at_zero, slope = of_widths
    return at_zero + slope * width
