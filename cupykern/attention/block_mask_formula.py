"""Classify the blocks of a mask formula: by interval arithmetic, else by their elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..expression import Expression
from ..expression.interval import UNKNOWN, Interval, evaluate
from ..expression.tree import Node
from ..reference.expression import Environment
from ..reference.expression import evaluate as evaluate_elements

_AT_ONCE = 64  # blocks whose elements are computed together


class Sizes(NamedTuple):
    """The sizes of a mask.  first: the position of query 0."""

    batch: int
    heads: int
    seq_len_q: int
    seq_len_k: int
    q_block: int
    kv_block: int
    first: int

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        rows, cols = -(-self.seq_len_q // self.q_block), -(-self.seq_len_k // self.kv_block)
        return self.batch, self.heads, rows, cols


class Blocks(NamedTuple):
    """The blocks of a mask.

    full: bool (B, H, Q, K), the blocks that interval arithmetic shows to be full.
    where: (P, 4), the (b, h, row, column) of each block that it shows neither full nor empty.
    keep: bool (P, q_block, kv_block), the elements of these blocks.
    """

    keep: np.ndarray
    where: np.ndarray
    full: np.ndarray


def blocks_of(formula: Expression, operands: Mapping[str, Any], sizes: Sizes) -> Blocks:
    """The blocks of a mask formula.  operands: NumPy FP64 arrays or numbers, by name."""
    s = sizes
    numbers = [operands[n] if np.ndim(operands[n]) == 0 else None for n in formula.names]
    arrays = [np.asarray(operands[name]) for name in formula.names]

    def load(node: Node, indices: Any) -> Interval:
        """The interval of a loaded element where every index is a single value; else UNKNOWN."""
        known = np.asarray(True)
        for index in indices:
            known = known & (index.lo == index.hi)
        if not known.any():
            return UNKNOWN
        array = arrays[int(node.value)]
        at = (np.clip(x.lo, 0, n - 1) for x, n in zip(indices, array.shape, strict=True))
        found = array[tuple(np.where(known, x, 0).astype(np.int64) for x in at)]
        return Interval(*(np.where(known & ~np.isnan(found), found, end) for end in UNKNOWN))

    def ends(size: int, block: int, first: int = 0) -> Interval:
        start = np.arange(0, size, block, dtype=np.float64)
        return Interval(start + first, np.minimum(start + block, size) - 1 + first)

    def dims(x: Interval, *shape: int) -> Interval:
        return Interval(x.lo.reshape(shape), x.hi.reshape(shape))

    b, h = (np.arange(n, dtype=np.float64) for n in (s.batch, s.heads))
    names = {
        "b": dims(Interval(b, b), -1, 1, 1, 1),
        "h": dims(Interval(h, h), -1, 1, 1),
        "i": dims(ends(s.seq_len_q, s.q_block, s.first), -1, 1),
        "j": ends(s.seq_len_k, s.kv_block),
    }
    found = evaluate(formula.nodes, names, load, numbers)[-1]
    full, possible = (np.broadcast_to(x > 0, s.blocks) for x in found)
    where = np.argwhere(possible & ~full)
    keep = np.zeros((len(where), s.q_block, s.kv_block), bool)
    for begin in range(0, len(where), _AT_ONCE):
        some = where[begin : begin + _AT_ONCE]
        keep[begin : begin + len(some)] = _elements(formula, arrays, s, some)
    return Blocks(keep, where, full)


def _elements(formula: Expression, operands: Any, sizes: Sizes, where: np.ndarray) -> np.ndarray:
    """The elements of the blocks `where`: bool (n, q_block, kv_block), False beyond the last query
    or key."""
    b, h, row, col = (x.reshape(-1, 1, 1) for x in where.T)
    i = row * sizes.q_block + np.arange(sizes.q_block)[:, None]
    j = col * sizes.kv_block + np.arange(sizes.kv_block)
    given = Environment(np, {"b": b, "h": h, "i": i + sizes.first, "j": j}, operands)
    with np.errstate(all="ignore"):
        kept = evaluate_elements(formula.nodes, given)[-1]
    return kept & (i < sizes.seq_len_q) & (j < sizes.seq_len_k)
