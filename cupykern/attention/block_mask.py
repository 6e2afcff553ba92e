"""BlockMask: a block-sparse mask of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from .. import arguments, dtypes, targets
from ..expression import Expression, read
from ..expression.parse import is_operand_name
from ..interop.foreign import takes_foreign
from ..numerics import namespace
from ..reference.expression import operand
from ..typing import AnyArray, Array, FormulaLike, Namespace, Operands
from .block_mask_formula import Blocks, Sizes, blocks_of
from .formulas import Ranges, check_indices

MASKED, CAUSAL, FULL, PARTIAL = range(4)  # attention/mask.cuh: BlockType
SIZES = (64, 128)


class BlockMask:
    """A mask of `attention` in blocks of queries by keys: masked, causal, full or partial.

    >>> keep = np.tril(np.ones((256, 256), bool))  # True = keep, (Sq, Sk)
    >>> mask = cupykern.BlockMask.from_dense(keep)  # blocks of 128 x 128
    >>> mask.block_mask_types[0, 0].tolist()
    [[1, 0], [2, 1]]
    >>> q = np.ones((1, 2, 256, 64), np.float16)
    >>> cupykern.attention(q, q, q, mask=mask).shape
    (1, 2, 256, 64)

    Masked blocks are skipped: neither loaded nor computed.  `from_dense` classifies a bool array,
    `from_expression` a formula; `causal`, `document` and `interleaved` make the usual masks.  The
    constructor takes the arrays.

    Attributes.  B and H are 1 or those of the call; Q = ceil(seq_len_q / q_block) and
    K = ceil(seq_len_k / kv_block); q_block and kv_block are 64 or 128.  The arrays are all NumPy
    or all CuPy arrays, even if another library's arrays were given:

    block_mask_types: uint8 (B, H, Q, K).  0: masked, 1: causal, 2: full, 3: partial.  In a causal
        block query i keeps keys j <= i + causal_offset, i and j counted from the sequence's start.
    kv_num_blocks: int32 (B, H, Q), the number of unmasked blocks in each row of blocks.
    kv_indices: int32 (B, H, Q, K), their indices in ascending order; the rest is undefined.
    partial_tiles: bool (P, q_block, kv_block), True = keep.
    partial_indices: int32 (B, H, Q, K), the index of a partial block's tile; otherwise undefined.

    The design follows FlexAttention's BlockMask (Dong et al., arXiv:2412.05496).
    """

    seq_len_q: int
    seq_len_k: int
    q_block: int
    kv_block: int
    causal_offset: int
    block_mask_types: Array
    partial_indices: Array
    partial_tiles: Array
    kv_num_blocks: Array
    kv_indices: Array

    @takes_foreign
    def __init__(
        self,
        block_mask_types: AnyArray,
        partial_indices: AnyArray,
        partial_tiles: AnyArray,
        seq_len_q: int,
        seq_len_k: int,
        q_block: int,
        kv_block: int,
        causal_offset: int = 0,
    ):
        """Make a mask from its arrays; kv_num_blocks and kv_indices follow from block_mask_types.

        block_mask_types: uint8 (B, H, Q, K).  partial_indices: int32 of the same shape.
        partial_tiles: bool (P, q_block, kv_block).  See the class for these sizes.

        The contents of NumPy arrays are checked.  Those of CuPy arrays are not read: unknown types,
        and partial blocks without tiles, become masked; tile indices are clamped.

        Raises TypeError (dtypes, kinds of arrays) and ValueError (shapes, block sizes, contents).
        """
        seq_len_q, seq_len_k, q_block, kv_block, causal_offset = _sizes(
            seq_len_q, seq_len_k, q_block, kv_block, causal_offset=causal_offset
        )
        block_mask_types = cast(Array, block_mask_types)  # here they are native
        partial_indices, partial_tiles = cast(Array, partial_indices), cast(Array, partial_tiles)
        for name, x in (
            ("block_mask_types", block_mask_types),
            ("partial_indices", partial_indices),
            ("partial_tiles", partial_tiles),
        ):
            arguments.target_of(name, x)
        shape = block_mask_types.shape
        wanted = -(-seq_len_q // q_block), -(-seq_len_k // kv_block)
        if len(shape) != 4 or shape[2:] != wanted:
            raise ValueError(
                f"block_mask_types must be (B, H, {wanted[0]}, {wanted[1]}); got {shape}"
            )
        tiles = partial_tiles.shape[:1]
        for name, x, dtype, right in (
            ("block_mask_types", block_mask_types, np.uint8, shape),
            ("partial_indices", partial_indices, np.int32, shape),
            ("partial_tiles", partial_tiles, np.bool_, (*tiles, q_block, kv_block)),
        ):
            arguments.same_place(name, x, block_mask_types, "block_mask_types")
            if x.dtype != dtype:
                raise TypeError(f"{name} must be {np.dtype(dtype)}; got {x.dtype}")
            if x.shape != right:
                raise ValueError(f"{name} must have shape {right}; got {x.shape}")
        xp = namespace(block_mask_types)
        count = len(partial_tiles)
        partial = block_mask_types == PARTIAL
        known = (block_mask_types < PARTIAL) | (partial if count else False)
        numbers = xp.clip(partial_indices, 0, max(count - 1, 0))
        if xp is np and not known.all():
            raise ValueError("block_mask_types must be 0 to 3, and 3 only where there are tiles")
        if xp is np and (numbers != partial_indices)[partial].any():
            raise ValueError(f"partial_indices must be 0 to {count - 1} where blocks are partial")
        block_mask_types = xp.where(known, block_mask_types, MASKED).astype(np.uint8)
        partial_indices = numbers.astype(np.int32)
        types = xp.ascontiguousarray(block_mask_types)
        masked = types == MASKED
        numbers = xp.broadcast_to(xp.arange(shape[3], dtype=np.int32), shape)
        # Unmasked blocks in order, masked blocks last.
        order = xp.sort(xp.where(masked, numbers + shape[3], numbers), axis=-1)
        vars(self).update(
            seq_len_q=seq_len_q,
            seq_len_k=seq_len_k,
            q_block=q_block,
            kv_block=kv_block,
            causal_offset=causal_offset,
            block_mask_types=types,
            partial_indices=xp.ascontiguousarray(partial_indices),
            partial_tiles=xp.ascontiguousarray(partial_tiles),
            kv_num_blocks=xp.sum(~masked, axis=-1, dtype=np.int32),
            kv_indices=xp.ascontiguousarray(order % max(shape[3], 1)).astype(np.int32),
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a BlockMask cannot be changed: make another one for another {name}")

    def arrays(self) -> tuple[Array | int, ...]:
        """The values of all attributes, arrays and numbers, in the order of assignment."""
        return tuple(vars(self).values())

    @property
    def batch_shape(self) -> tuple[int, int]:
        batch, heads, *_ = self.block_mask_types.shape
        return batch, heads

    @property
    def sizes(self) -> tuple[int, ...]:
        """(seq_len_q, seq_len_k, q_block, kv_block, causal_offset): all attributes but arrays."""
        return self.seq_len_q, self.seq_len_k, self.q_block, self.kv_block, self.causal_offset

    @property
    def num_blocks(self) -> int:
        """Number of unmasked blocks.  Synchronises."""
        return int(self.kv_num_blocks.sum())

    def __repr__(self) -> str:
        b, h = self.batch_shape
        return (
            f"BlockMask({b}x{h}x{self.seq_len_q}x{self.seq_len_k} in blocks of "
            f"{self.q_block}x{self.kv_block})"
        )

    @classmethod
    @takes_foreign
    def from_dense(cls, mask: AnyArray, q_block: int = 128, kv_block: int = 128) -> BlockMask:
        """Classify the blocks of a dense mask.

        >>> keep = np.tril(np.ones((256, 256), bool))
        >>> keep[200, 0] = False
        >>> cupykern.BlockMask.from_dense(keep).block_mask_types[0, 0].tolist()  # 3: partial
        [[1, 0], [3, 1]]

        mask: bool (Sq, Sk) or (B, H, Sq, Sk), True = keep.  q_block, kv_block: 64 or 128.

        A block that keeps exactly the keys j <= i becomes causal; other mixed blocks become
        partial.  The host reads the blocks' types, which synchronises.

        Raises TypeError (not bool) and ValueError (shape, block sizes).
        """
        mask = cast(Array, mask)
        arguments.target_of("mask", mask)
        if mask.dtype != np.bool_:
            raise TypeError(f"mask must have dtype bool (True = keep); got {mask.dtype}")
        if mask.ndim not in (2, 4):
            raise ValueError(f"mask must be (Sq, Sk) or (B, H, Sq, Sk); got shape {mask.shape}")
        xp = namespace(mask)
        mask = mask if mask.ndim == 4 else mask[None, None]
        sq, sk = mask.shape[2:]
        rows = lambda first, end: mask[:, :, first:end]  # noqa: E731
        return _classify(xp, rows, mask.shape[:2], sq, sk, q_block, kv_block)

    @classmethod
    def causal(
        cls,
        seq_len_q: int,
        seq_len_k: int,
        *,
        causal_offset: int = 0,
        q_block: int = 128,
        kv_block: int = 128,
        target: str | None = None,
    ) -> BlockMask:
        """A mask in which query i keeps keys j <= i + causal_offset.

        >>> mask = cupykern.BlockMask.causal(256, 256, target="host")
        >>> mask.block_mask_types[0, 0].tolist()
        [[1, 0], [2, 1]]

        causal_offset: an integer; seq_len_k - seq_len_q aligns the last query with the last key.
        target: "cuda", "hip", "host", or None for the GPU if there is one.

        Raises TypeError, ValueError and targets.UnavailableError.
        """
        seq_len_q, seq_len_k, q_block, kv_block, causal_offset = _sizes(
            seq_len_q, seq_len_k, q_block, kv_block, causal_offset=causal_offset
        )
        first_row, last_row = _block_ends(seq_len_q, q_block)
        first_col, last_col = _block_ends(seq_len_k, kv_block)
        types = np.full((len(first_row), len(first_col)), CAUSAL, np.uint8)
        types[last_col[None] <= first_row[:, None] + causal_offset] = FULL
        types[first_col[None] > last_row[:, None] + causal_offset] = MASKED
        return _of_types(types, target, seq_len_q, seq_len_k, q_block, kv_block, causal_offset)

    @classmethod
    def from_expression(
        cls,
        mask: FormulaLike,
        seq_len_q: int,
        seq_len_k: int,
        *,
        operands: Operands | None = None,
        batch: int = 1,
        heads: int = 1,
        input_pos: int = 0,
        q_block: int = 128,
        kv_block: int = 128,
        target: str | None = None,
    ) -> BlockMask:
        """Classify the blocks of a formula such as "(j <= i) & (i - j < 1024)".

        >>> mask = cupykern.BlockMask.from_expression("j <= i", 256, 256, target="host")
        >>> mask.block_mask_types[0, 0].tolist()
        [[1, 0], [2, 1]]

        mask: see `expression`, kind "mask"; query i is at position i + input_pos.
        operands: by name, numbers and arrays with one dim per index; the host reads them.
        batch, heads: sizes of the mask, for formulas of b and h.
        target: see `causal`; None: the target of the operands, if there are arrays.

        Blocks that interval arithmetic shows to be empty or full cost nothing more; the elements of
        the others are computed in FP64.  `attention(mask="...")` needs no blocks in memory.

        Raises SyntaxError, NameError, TypeError, ValueError and targets.UnavailableError.
        """
        others = {"batch": batch, "heads": heads, "input_pos": input_pos}
        seq_len_q, seq_len_k, q_block, kv_block, batch, heads, input_pos = _sizes(
            seq_len_q, seq_len_k, q_block, kv_block, **others
        )
        if min(batch, heads) < 1:
            raise ValueError(f"batch and heads must be positive; got {batch} and {heads}")
        if input_pos < 0:
            raise ValueError(f"input_pos must not be negative; got {input_pos}")
        formula, given = read(mask, "mask"), operands or {}
        _check_operands(formula, given)
        values: list[Any] = list(given.values())
        arrays = [x for x in values if hasattr(x, "dtype") and x.ndim]
        xp = targets.get(target).xp if target or not arrays else namespace(arrays[0])
        on_host = {
            name: operand(np.zeros(0), x.get() if hasattr(x, "get") else x)
            for name, x in given.items()
        }
        sizes = Sizes(batch, heads, seq_len_q, seq_len_k, q_block, kv_block, input_pos)
        there = {name: x for name, x in on_host.items() if x.ndim}
        ranges = Ranges(batch, heads, heads, seq_len_q + input_pos, seq_len_k)
        check_indices(formula, there, ranges)
        found = blocks_of(formula, on_host, sizes)
        types = np.where(found.full, FULL, MASKED).astype(np.uint8)
        of_rest, partial = _types_of(found, sizes)
        types[tuple(found.where.T)] = of_rest
        indices = np.zeros(types.shape, np.int32)
        indices[tuple(found.where[partial].T)] = np.arange(partial.sum())
        sizes_of_it = seq_len_q, seq_len_k, q_block, kv_block, input_pos
        tiles = found.keep[partial]
        return cls(xp.asarray(types), xp.asarray(indices), xp.asarray(tiles), *sizes_of_it)

    @classmethod
    @takes_foreign
    def document(
        cls,
        document_ids: AnyArray,
        *,
        causal: bool = False,
        q_block: int = 128,
        kv_block: int = 128,
    ) -> BlockMask:
        """A mask in which query i keeps key j of the same document; if causal, only with j <= i.

        >>> ids = np.repeat([0, 1], 128)  # two documents of 128 tokens
        >>> cupykern.BlockMask.document(ids).block_mask_types[0, 0].tolist()
        [[2, 0], [0, 2]]

        document_ids: integers (S,) or (B, S), the document of each position.  The mask is made on
            their target.

        The host reads the blocks' types, which synchronises.
        Raises TypeError (not integers) and ValueError (shape, block sizes).
        """
        document_ids = cast(Array, document_ids)
        arguments.target_of("document_ids", document_ids)
        arguments.check_flags(causal=causal)
        xp = namespace(document_ids)
        if document_ids.dtype.kind not in "iu":
            raise TypeError(f"document_ids must be integers; got {document_ids.dtype}")
        if document_ids.ndim not in (1, 2):
            raise ValueError(f"document_ids must be (S,) or (B, S); got {document_ids.shape}")
        ids = document_ids if document_ids.ndim == 2 else document_ids[None]
        batch, size = ids.shape
        positions = xp.arange(size)

        def rows(first: int, end: int) -> Array:
            keep = ids[:, None, first:end, None] == ids[:, None, None, :]
            if causal:
                keep = keep & (positions[None] <= positions[first:end, None])
            return keep

        return _classify(xp, rows, (batch, 1), size, size, q_block, kv_block)

    @classmethod
    def interleaved(
        cls,
        seq_len_q: int,
        seq_len_k: int,
        stride: int = 2,
        *,
        causal: bool = False,
        q_block: int = 128,
        kv_block: int = 128,
        target: str | None = None,
    ) -> BlockMask:
        """A mask of blocks (i, j) with i - j a multiple of `stride`; if causal, only keys j <= i.

        >>> mask = cupykern.BlockMask.interleaved(512, 512, stride=2, target="host")
        >>> mask.block_mask_types[0, 0].tolist()
        [[2, 0, 2, 0], [0, 2, 0, 2], [2, 0, 2, 0], [0, 2, 0, 2]]

        stride: a positive integer.  target: see `causal`.

        Raises TypeError, ValueError and targets.UnavailableError.
        """
        (stride,) = arguments.integers(stride=stride)
        arguments.check_flags(causal=causal)
        if stride < 1:
            raise ValueError(f"stride must be positive; got {stride}")
        whole = cls.causal(
            seq_len_q, seq_len_k, q_block=q_block, kv_block=kv_block, target="host"
        ).block_mask_types[0, 0]
        types = whole if causal else np.full_like(whole, FULL)
        i, j = np.indices(types.shape)
        types = np.where((i - j) % stride == 0, types, np.uint8(MASKED))
        return _of_types(types, target, seq_len_q, seq_len_k, q_block, kv_block)

    def to_dense(self, xp: Namespace | None = None) -> Array:
        """The mask as a bool array (B, H, Sq, Sk), True = keep, of `xp` (None: its own namespace).

        >>> cupykern.BlockMask.causal(128, 128, target="host").to_dense()[0, 0, 1, :3].tolist()
        [True, True, False]
        """
        xp = namespace(self.block_mask_types) if xp is None else xp
        types = self.block_mask_types[..., None, None]
        rows = xp.arange(types.shape[2] * self.q_block).reshape(-1, 1, self.q_block, 1)
        cols = xp.arange(types.shape[3] * self.kv_block).reshape(1, -1, 1, self.kv_block)
        keep = (types == FULL) | ((types == CAUSAL) & (cols <= rows + self.causal_offset))
        if len(self.partial_tiles):
            numbers = xp.where(self.block_mask_types == PARTIAL, self.partial_indices, 0)
            keep = keep | ((types == PARTIAL) & self.partial_tiles[numbers])
        b, h, q, k = self.block_mask_types.shape
        keep = keep.swapaxes(3, 4).reshape(b, h, q * self.q_block, k * self.kv_block)
        return keep[:, :, : self.seq_len_q, : self.seq_len_k]


def _types_of(found: Blocks, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """(types of the blocks `found.where`, which of them are partial)."""
    s, (_, _, row, col) = sizes, found.where.T.reshape(4, -1, 1, 1)
    i = row * s.q_block + np.arange(s.q_block)[:, None]
    j = col * s.kv_block + np.arange(s.kv_block)
    here = (i < s.seq_len_q) & (j < s.seq_len_k)
    full, causal = (
        (found.keep == pattern).all(axis=(1, 2)) for pattern in (here, here & (j <= i + s.first))
    )
    types = np.where(full, FULL, np.where(causal, CAUSAL, PARTIAL))
    types = np.where(found.keep.any(axis=(1, 2)), types, MASKED)
    return types, types == PARTIAL


def _sizes(seq_len_q: Any, seq_len_k: Any, q_block: Any, kv_block: Any, **others: Any) -> Any:
    """All arguments as Python ints.  Raises TypeError and ValueError."""
    of_mask = {"seq_len_q": seq_len_q, "seq_len_k": seq_len_k}
    found = arguments.integers(**of_mask, q_block=q_block, kv_block=kv_block, **others)
    if found[2] not in SIZES or found[3] not in SIZES:
        raise ValueError(f"q_block and kv_block must be 64 or 128; got {found[2]} and {found[3]}")
    if min(found[:2]) < 0:
        raise ValueError(f"lengths must not be negative; got {found[0]} and {found[1]}")
    return found


def _check_operands(formula: Expression, given: Operands) -> None:
    """Check that operands are finite numbers or real arrays whose names the formula uses, like
    `attention`'s.  Raises TypeError and ValueError."""
    if not isinstance(given, dict):
        raise TypeError(f"operands must be a dict; got {type(given).__name__}")
    for name in given:
        if not is_operand_name(name, "mask"):
            raise ValueError(f"operands must have names that are free; got {name!r}")
    formula.check_names(given)
    for name, x in given.items():
        if name not in formula.names:
            raise ValueError(f"the mask does not name {name!r}, which operands has")
        if arguments.is_number(x, np.zeros(0, np.float32)):
            arguments.number_of(f"operands[{name!r}]", x)
        elif x.dtype.kind not in "biuf" and x.dtype != dtypes.bfloat16:
            raise TypeError(f"operands[{name!r}] must be of real numbers; got {x.dtype}")


def _block_ends(size: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and last position of each block."""
    first = np.arange(0, size, block)
    return first, np.minimum(first + block, size) - 1


def _of_types(types: np.ndarray, target: str | None, *sizes: int) -> BlockMask:
    """A mask without partial blocks, from types (Q, K)."""
    xp = targets.get(target).xp
    types = xp.asarray(types[None, None])
    tiles = xp.zeros((0, *sizes[2:4]), bool)
    return BlockMask(types, xp.zeros(types.shape, np.int32), tiles, *sizes)


def _classify(
    xp: Namespace,
    rows: Callable[[int, int], Array],
    batch_shape: tuple[int, ...],
    sq: int,
    sk: int,
    q_block: int,
    kv_block: int,
) -> BlockMask:
    """Classify the mask whose rows [i, j) are `rows(i, j)`, bool (B, H, j - i, Sk)."""
    sq, sk, q_block, kv_block = _sizes(sq, sk, q_block, kv_block)
    num_q, num_k = -(-sq // q_block), -(-sk // kv_block)
    shape = (*batch_shape, num_q, num_k)
    types, indices, tiles, count = np.zeros(shape, np.uint8), np.zeros(shape, np.int32), [], 0
    cols = xp.arange(num_k * kv_block).reshape(num_k, 1, kv_block)
    exists = cols < sk
    for i in range(num_q):
        first, end = i * q_block, min((i + 1) * q_block, sq)
        strip = xp.zeros((*batch_shape, q_block, num_k * kv_block), bool)
        strip[:, :, : end - first, :sk] = rows(first, end)
        blocks = strip.reshape(*batch_shape, q_block, num_k, kv_block).swapaxes(2, 3)
        numbers = xp.arange(first, first + q_block)[:, None]
        here = exists & (numbers < sq)
        kept = blocks.any(axis=(3, 4))
        full = (blocks == here).all(axis=(3, 4))
        causal = (blocks == (here & (cols <= numbers))).all(axis=(3, 4))
        found = xp.where(kept, xp.where(full, FULL, xp.where(causal, CAUSAL, PARTIAL)), MASKED)
        found = found if isinstance(found, np.ndarray) else found.get()
        types[:, :, i] = found
        places = np.argwhere(found == PARTIAL)
        if len(places):
            b, h, k = places.T
            indices[b, h, i, k] = count + np.arange(len(places))
            count += len(places)
            tiles.append(blocks[tuple(xp.asarray(x) for x in (b, h, k))])
    partial = xp.concatenate(tiles) if tiles else xp.zeros((0, q_block, kv_block), bool)
    return BlockMask(xp.asarray(types), xp.asarray(indices), partial, sq, sk, q_block, kv_block)
