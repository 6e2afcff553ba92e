"""Cache: keys and values of a batch of sequences, contiguous or in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import empty, targets
from ...numerics import namespace
from .config import ModelConfig


@dataclass
class Cache:
    """Keys and values of all layers, and how far each sequence is.

    keys, values: an array for each layer: (B, Hkv, room, D), or with pages
        (num_pages, page, Hkv, D).
    counters: int32 (2, B) on the device: the position of each sequence's newest token, and the
        number of its tokens, one more.  -1 and 0: there is no sequence.
    active: int32 (B,) on the device: 1 of the sequences that a decode step lengthens, else 0.
    block_table: int32 (B, max_pages) on the device; None: contiguous.
    """

    keys: list[Any]
    values: list[Any]
    counters: Any
    active: Any
    block_table: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Of `rope_and_cache`, `decode_attention` and `attention_varlen`."""
        if self.block_table is None:
            return {}
        return {"block_table": self.block_table, "layout": "nhd"}

    @property
    def room(self) -> int:
        """The most tokens of a sequence."""
        if self.block_table is None:
            return self.keys[0].shape[2]
        return self.block_table.shape[1] * self.keys[0].shape[1]

    @property
    def nbytes_per_token(self) -> int:
        """Of the keys and values of one token, in all layers."""
        first = self.keys[0]
        heads = first.shape[2 if self.block_table is not None else 1]
        return 2 * len(self.keys) * heads * first.shape[3] * first.itemsize

    def sequence(self, i: int) -> Cache:
        """Of sequence i alone; it shares the memory."""
        part: dict[str, Any] = {
            "counters": self.counters[:, i : i + 1],
            "active": self.active[i : i + 1],
        }
        if self.block_table is not None:
            return replace(self, block_table=self.block_table[i : i + 1], **part)
        keys, values = ([x[i : i + 1] for x in of] for of in (self.keys, self.values))
        return replace(self, keys=keys, values=values, **part)

    def set_lengths(self, lengths: Any, active: Any = None) -> None:
        """lengths: int32 (B,) of either side: the tokens of each sequence that are in the cache.
        active: by default those that have some."""
        xp = namespace(self.counters)
        lengths = xp.asarray(lengths, np.int32)
        self.counters[1] = lengths
        self.counters[0] = lengths - np.int32(1)
        self.active[...] = lengths > 0 if active is None else xp.asarray(active)


def contiguous(
    config: ModelConfig, batch: int, room: int, dtype: Any, target: str | None = None
) -> Cache:
    """An empty cache for `room` tokens of each sequence."""
    return _new(config, (batch, config.kv_heads, room, config.head_dim), batch, dtype, target)


def paged(
    config: ModelConfig,
    batch: int,
    pages: int,
    dtype: Any,
    target: str | None = None,
    *,
    page: int = 64,
    room: int,
) -> Cache:
    """`pages` pages of `page` tokens that `batch` sequences of up to `room` tokens share; the table
    has none of them yet (-1)."""
    found = _new(config, (pages, page, config.kv_heads, config.head_dim), batch, dtype, target)
    table = targets.get(target).xp.full((batch, -(-room // page)), -1, np.int32)
    return replace(found, block_table=table)


def _new(
    config: ModelConfig, shape: tuple[int, ...], batch: int, dtype: Any, target: str | None
) -> Cache:
    xp, layers = targets.get(target).xp, len(config.kinds)
    keys, values = ([empty(shape, dtype, target) for _ in range(layers)] for _ in range(2))
    counters = xp.zeros((2, batch), np.int32)
    counters[0] = -1
    return Cache(keys, values, counters, xp.zeros(batch, np.int32))
