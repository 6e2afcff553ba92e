"""What attention is asked for, without its arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cache_scales import KvScales
from .formulas import Formulas

HEAD_DIMS = (64, 128, 256)  # what the portable kernel pads head sizes to in shared memory
NO_MASK, BOOL_MASK, BIAS_MASK, BLOCK_MASK = range(4)  # attention/mask.cuh: MaskKind

GENERAL_MODE = 3  # in place of mask_mode's: scores have options, with any mask

_SMALLEST_SCALE = 2.0**-64  # by which sinks are divided


def prescales(kind: int, scale: float | None) -> bool:
    """Whether scores are scaled before the largest is found: the sign of the scale matters there, a
    bias is added after it, and a sink over a tiny scale may overflow.  scale: None, the default, is
    positive."""
    return kind == BIAS_MASK or (scale is not None and scale < _SMALLEST_SCALE)


def mask_mode(kind: int, scale: float | None) -> int:
    """kMaskMode of attention_hopper.cu: 2 for blocks, 1 for arrays and for scores that are scaled
    before the softmax, else 0; attention.cu tells only 0 from the others."""
    if kind == BLOCK_MASK:
        return 2
    return int(kind != NO_MASK or prescales(kind, scale))


def padded_head_dim(head_dim: int, head_dim_v: int) -> int:
    """The size that the portable kernel pads heads to in shared memory."""
    return next(size for size in HEAD_DIMS if max(head_dim, head_dim_v) <= size)


class MaskPlace(NamedTuple):
    """A mask without its arrays.  An array: strides in elements, of (B, H, Sq, Sk).  Blocks: the
    logarithms of their sizes, how many there are along the keys, and the strides of b and h in rows
    of blocks."""

    kind: int = NO_MASK
    dtype: np.dtype | None = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    blocks: tuple[int, int, int] = (0, 0, 0)
    block_strides: tuple[int, int] = (0, 0)
    causal_offset: int = 0


class ScoreOptions(NamedTuple):
    """Options of a score without their arrays.

    left, right: of a window: keys from i + offset - left to i + offset + right; -1: any.
    softcap: 0: none.  slopes: strides of alibi_slopes, of the batch and the head; None: none.
    sinks: whether there are any.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: tuple[int, int] | None = None
    sinks: bool = False


class PagePlace(NamedTuple):
    """Pages of keys and values: how many there are, keys of one, and the stride of the block table
    from a sequence to the next, in elements."""

    number: int
    size: int
    table_stride: int


class AttentionTask(NamedTuple):
    """A call without its arrays.  Strides, in elements: of the batch (or 0), the head and the row.

    totals: (rows of q, rows of k) of varlen sequences, whose sq and sk are the longest; else None.
    offset: causal queries i keep keys j <= i + offset; None: not causal.  bottom_right: of varlen
    sequences, where each has an offset of its own, and of lengths.  General tasks have an offset
    always; whether they are causal is in options.right.
    options: what a general variant does.  lengths: of a padded batch, whose sk is the most.
    formulas: of the score and the mask.
    pages: of varlen queries over paged caches, whose k and v have the stride of a page in place of
    the batch's, and sk the most keys of a sequence.
    codes, scales: of pages of 8 bits.
    """

    dtype: np.dtype
    batch: int
    heads: int
    kv_heads: int
    sq: int
    sk: int
    head_dim: int
    head_dim_v: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    out: tuple[int, int, int]
    scale: float
    offset: int | None
    mask: MaskPlace = MaskPlace()
    totals: tuple[int, int] | None = None
    bottom_right: bool = False
    half_scores: bool = False
    naive: bool = False
    options: ScoreOptions = ScoreOptions()
    lengths: bool = False
    formulas: Formulas | None = None
    pages: PagePlace | None = None
    codes: np.dtype | None = None
    scales: KvScales | None = None

    @property
    def general(self) -> bool:
        """Whether it needs a general variant (attention/score.cuh: GeneralScore).  Paged
        variants that scale scores before the softmax, and those of 8 bits, are general ones."""
        has_options = self.lengths or self.options != ScoreOptions() or self.codes is not None
        scales = self.pages is not None and prescales(self.mask.kind, self.scale)
        return has_options or scales or self.formulas is not None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Of q and k, of v and out."""
        return self.head_dim, self.head_dim_v

    @property
    def mode(self) -> int:
        return mask_mode(self.mask.kind, self.scale)

    @property
    def prescale(self) -> bool:
        options = self.options
        of_options = options.softcap != 0 or options.slopes is not None
        of_options = of_options or (self.formulas is not None and self.formulas.score)
        return of_options or prescales(self.mask.kind, self.scale)
