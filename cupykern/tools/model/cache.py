"""Cache: keys and values of a batch of sequences, contiguous or in pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, empty, targets
from ...numerics import namespace
from .config import ModelConfig

FORMATS = ("16bit", "e4m3", "int8")
"""Of keys and values: as the activations are, or of 8 bits with a scale for each token and head."""


def dtype_of(name: str, activations: Any) -> np.dtype:
    """The dtype of a cache in a format of FORMATS."""
    return dtypes.QUANTIZED.get(name, np.dtype(activations))


@dataclass
class Cache:
    """Keys and values of all layers, and how far each sequence is.

    keys, values: an array for each layer: (B, Hkv, room, D), or with pages
        (num_pages, page, Hkv, D).
    counters: int32 (2, B) on the device: the position of each sequence's newest token, and the
        number of its tokens, one more.  -1 and 0: there is no sequence.
    active: int32 (B,) on the device: 1 of the sequences that a decode step lengthens, else 0.
    block_table: int32 (B, max_pages) on the device; None: contiguous.
    scales: of 8 bits, those of keys and of values for each layer, float32, a number for each token
        and head: of the shape of keys without D.  `rope_and_cache` fills them.
    """

    keys: list[Any]
    values: list[Any]
    counters: Any
    active: Any
    block_table: Any = None
    scales: list[tuple[Any, Any]] | None = None

    def options(self, number: int) -> dict[str, Any]:
        """Of `rope_and_cache`, `decode_attention` and `attention_varlen` in layer `number`."""
        found: dict[str, Any] = {}
        if self.block_table is not None:
            found |= {"block_table": self.block_table, "layout": "nhd"}
        if self.scales is not None:
            found |= zip(("k_scale", "v_scale"), self.scales[number], strict=True)
        return found

    @property
    def room(self) -> int:
        """The most tokens of a sequence."""
        if self.block_table is None:
            return self.keys[0].shape[2]
        return self.block_table.shape[1] * self.keys[0].shape[1]

    @property
    def nbytes_per_token(self) -> int:
        """Of the keys and values of one token and of their scales, in all layers."""
        first = self.keys[0]
        heads = first.shape[2 if self.block_table is not None else 1]
        of_scale = 0 if self.scales is None else self.scales[0][0].itemsize
        return 2 * len(self.keys) * heads * (first.shape[3] * first.itemsize + of_scale)

    def sequence(self, i: int) -> Cache:
        """Of sequence i alone; it shares the memory."""
        part: dict[str, Any] = {
            "counters": self.counters[:, i : i + 1],
            "active": self.active[i : i + 1],
        }
        if self.block_table is not None:
            return replace(self, block_table=self.block_table[i : i + 1], **part)
        keys, values = ([x[i : i + 1] for x in of] for of in (self.keys, self.values))
        if self.scales is not None:
            part["scales"] = [(k[i : i + 1], v[i : i + 1]) for k, v in self.scales]
        return replace(self, keys=keys, values=values, **part)

    def as_pages(self) -> Cache:
        """A contiguous cache with a page for each sequence; it shares the memory."""
        xp, part = namespace(self.keys[0]), {}
        if self.scales is not None:
            part["scales"] = [(k.swapaxes(1, 2), v.swapaxes(1, 2)) for k, v in self.scales]
        keys, values = ([x.swapaxes(1, 2) for x in of] for of in (self.keys, self.values))
        table = xp.arange(len(keys[0]), dtype=np.int32)[:, None]
        return replace(self, keys=keys, values=values, block_table=table, **part)

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
    """An empty cache for `room` tokens of each sequence.

    dtype: that of the activations, or float8_e4m3fn or int8: then it has scales.
    """
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
    has none of them yet (-1).  dtype: as for `contiguous`."""
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
    found = Cache(keys, values, counters, xp.zeros(batch, np.int32))
    if keys and keys[0].itemsize == 1:
        pairs = [[empty(shape[:3], "float32", target) for _ in "kv"] for _ in range(layers)]
        found.scales = [(k, v) for k, v in pairs]
    return found
