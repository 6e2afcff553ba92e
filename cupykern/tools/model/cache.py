"""Cache: keys and values of a batch of sequences, contiguous or paged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import dtypes, empty, targets
from ...numerics import namespace
from .config import ModelConfig

FORMATS = ("16bit", "e4m3", "int8")
"""Cache formats: the activations' dtype, or 8 bits with a scale per token and head."""


def dtype_of(name: str, activations: Any) -> np.dtype:
    """Return the dtype of a cache format, one of FORMATS."""
    return dtypes.QUANTIZED.get(name, np.dtype(activations))


@dataclass
class Cache:
    """Keys and values of all layers, and the length of each sequence.

    keys, values: an array per layer: (B, Hkv, room, D), or with pages (num_pages, page, Hkv, D).
    counters: int32 (2, B) on the device: the position of each sequence's newest token, and its
        number of tokens, which is one more.  -1 and 0 mark an empty slot.
    active: int32 (B,) on the device: 1 for sequences that a decode step extends, else 0.
    block_table: int32 (B, max_pages) on the device; None: contiguous.
    scales: of 8-bit formats: per layer the scales of keys and of values, float32, one per token
        and head, in the shape of keys without D.  `rope_and_cache` fills them.
    """

    keys: list[Any]
    values: list[Any]
    counters: Any
    active: Any
    block_table: Any = None
    scales: list[tuple[Any, Any]] | None = None

    def options(self, number: int) -> dict[str, Any]:
        """Options for `rope_and_cache`, `decode_attention` and `attention_varlen` in a layer."""
        found: dict[str, Any] = {}
        if self.block_table is not None:
            found |= {"block_table": self.block_table, "layout": "nhd"}
        if self.scales is not None:
            found |= zip(("k_scale", "v_scale"), self.scales[number], strict=True)
        return found

    @property
    def room(self) -> int:
        """Maximum number of tokens per sequence."""
        if self.block_table is None:
            return self.keys[0].shape[2]
        return self.block_table.shape[1] * self.keys[0].shape[1]

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token's keys and values and their scales, in all layers."""
        first = self.keys[0]
        heads = first.shape[2 if self.block_table is not None else 1]
        of_scale = 0 if self.scales is None else self.scales[0][0].itemsize
        return 2 * len(self.keys) * heads * (first.shape[3] * first.itemsize + of_scale)

    def sequence(self, i: int) -> Cache:
        """Return the cache of sequence i alone; it shares the memory."""
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
        """View a contiguous cache as one page per sequence; it shares the memory."""
        xp, part = namespace(self.keys[0]), {}
        if self.scales is not None:
            part["scales"] = [(k.swapaxes(1, 2), v.swapaxes(1, 2)) for k, v in self.scales]
        keys, values = ([x.swapaxes(1, 2) for x in of] for of in (self.keys, self.values))
        table = xp.arange(len(keys[0]), dtype=np.int32)[:, None]
        return replace(self, keys=keys, values=values, block_table=table, **part)

    def set_lengths(self, lengths: Any, active: Any = None) -> None:
        """Set the sequences' lengths.

        lengths: int32 (B,), on the host or the device: each sequence's tokens in the cache.
        active: by default 1 for non-empty sequences.
        """
        xp = namespace(self.counters)
        lengths = xp.asarray(lengths, np.int32)
        self.counters[1] = lengths
        self.counters[0] = lengths - np.int32(1)
        self.active[...] = lengths > 0 if active is None else xp.asarray(active)


def contiguous(
    config: ModelConfig, batch: int, room: int, dtype: Any, target: str | None = None
) -> Cache:
    """Make an empty cache for `room` tokens per sequence.

    dtype: of the activations, or float8_e4m3fn or int8; the 8-bit formats have scales.
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
    """Make a cache of `pages` pages of `page` tokens, shared by `batch` sequences.

    A sequence has up to `room` tokens.  The block table is empty (-1).  dtype: see `contiguous`.
    """
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
