"""AttentionTask: a call of attention or attention_varlen without its arrays."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from .cache_scales import KvScales
from .formulas import Formulas

HEAD_DIMS = (64, 128, 256)  # padded head sizes of the portable kernel in shared memory
NO_MASK, BOOL_MASK, BIAS_MASK, BLOCK_MASK = range(4)  # attention/mask.cuh: MaskKind

_SMALLEST_SCALE = 2.0**-64  # the smallest scale that is folded into the exponent


def prescales(kind: int, scale: float | None) -> bool:
    """Whether scores are scaled before the row maximum is found.

    Otherwise the scale is folded into the exponent.  That is wrong for a negative scale, which
    turns the maximum into the minimum, and for a bias, which is added after scaling; and a sink
    divided by a tiny scale can overflow.  scale: None stands for the default, which is positive.
    """
    return kind == BIAS_MASK or (scale is not None and scale < _SMALLEST_SCALE)


class Scores(Enum):
    """What a portable variant does to scores; each does what those before it do."""

    PLAIN = 0
    MASKED = 1  # any mask; scaled before the row maximum is found; accumulated in FP16
    GENERAL = 2  # options

    @staticmethod
    def of(is_general: bool, mask: int, scale: float | None, half: bool = False) -> Scores:
        """mask: its kind.  half: scores are accumulated in FP16."""
        if is_general:
            return Scores.GENERAL
        masked = mask != NO_MASK or prescales(mask, scale) or half
        return Scores.MASKED if masked else Scores.PLAIN


class MaskType(Enum):
    """The mask of a Hopper variant, by its C++ type."""

    NONE = "NoMask"
    ARRAY = "ArrayMask"  # also for scores that are scaled before the row maximum is found
    BLOCKS = "BlockMask<false>"
    UNIFORM_BLOCKS = "BlockMask<true>"  # of 128 queries and 128 keys
    FORMULA = "FormulaMask"

    @staticmethod
    def of(kind: int, scale: float | None, blocks: tuple[int, int]) -> MaskType:
        """kind: the mask's.  blocks: (queries, keys) of a block mask's block."""
        if kind == BLOCK_MASK:
            return MaskType.UNIFORM_BLOCKS if blocks == (128, 128) else MaskType.BLOCKS
        masked = kind != NO_MASK or prescales(kind, scale)
        return MaskType.ARRAY if masked else MaskType.NONE

    @property
    def has_blocks(self) -> bool:
        return self in (MaskType.BLOCKS, MaskType.UNIFORM_BLOCKS)

    @property
    def empties_tiles(self) -> bool:
        """Whether tiles of queries differ in their number of keys, so that blocks take them by a
        counter."""
        return self.has_blocks or self is MaskType.FORMULA


class SequencesType(Enum):
    """The sequences of a Hopper variant, by their C++ type."""

    BATCHED = "Batched"  # of one length
    VARLEN = "Varlen"
    PAGED = "Paged"  # varlen queries over paged caches


def padded_head_dim(head_dim: int, head_dim_v: int) -> int:
    """The head size after padding in the portable kernel's shared memory."""
    return next(size for size in HEAD_DIMS if max(head_dim, head_dim_v) <= size)


class MaskPlace(NamedTuple):
    """A mask without its arrays.

    kind: NO_MASK, BOOL_MASK, BIAS_MASK or BLOCK_MASK.
    dtype, strides: of a mask array (B, H, Sq, Sk), strides in elements.
    blocks: of a block mask, (log2 of q_block, log2 of kv_block, blocks along the keys).
    block_strides: strides of b and h, in rows of blocks.  causal_offset: see BlockMask.
    """

    kind: int = NO_MASK
    dtype: np.dtype | None = None
    strides: tuple[int, ...] = (0, 0, 0, 0)
    blocks: tuple[int, int, int] = (0, 0, 0)
    block_strides: tuple[int, int] = (0, 0)
    causal_offset: int = 0


class ScoreOptions(NamedTuple):
    """Options of a score without their arrays.

    left, right: the window, keys from i + offset - left to i + offset + right; -1: unbounded.
    softcap: 0: none.  slopes: strides of alibi_slopes along batch and head; None: none.
    sinks: whether there are sinks.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: tuple[int, int] | None = None
    sinks: bool = False


class PagePlace(NamedTuple):
    """Pages of keys and values.

    number: pages.  size: keys per page.  table_stride: row stride of the block table, in elements.
    """

    number: int
    size: int
    table_stride: int


class AttentionTask(NamedTuple):
    """A call without its arrays.

    q, k, v, out: strides of the batch (or 0), the head and the row, in elements.
    totals: (rows of q, rows of k) of varlen sequences, whose sq and sk are the longest; else None.
    offset: causal query i keeps keys j <= i + offset; None: not causal.  General tasks always have
        an offset; options.right says whether they are causal.
    bottom_right: each varlen or padded sequence has its own offset.
    options: options of general variants.
    lengths: whether a padded batch has lengths; sk is then the longest.
    formulas: expressions of the score and the mask.
    pages: varlen queries attend to paged caches; k and v have a page stride in place of the batch
        stride, and sk is the most keys of a sequence.
    codes, scales: dtype and scales of 8-bit pages.
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
        """Whether the task needs a general variant (attention/score.cuh: GeneralScore).  So do
        paged tasks that scale scores before the softmax, and 8-bit pages."""
        has_options = self.lengths or self.options != ScoreOptions() or self.codes is not None
        scales = self.pages is not None and prescales(self.mask.kind, self.scale)
        return has_options or scales or self.formulas is not None

    @property
    def head_dims(self) -> tuple[int, int]:
        """(head size of q and k, of v and out)."""
        return self.head_dim, self.head_dim_v

    @property
    def scores(self) -> Scores:
        return Scores.of(self.general, self.mask.kind, self.scale, self.half_scores)

    @property
    def prescale(self) -> bool:
        options = self.options
        of_options = options.softcap != 0 or options.slopes is not None
        of_options = of_options or (self.formulas is not None and self.formulas.score)
        return of_options or prescales(self.mask.kind, self.scale)
