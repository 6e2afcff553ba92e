"""The layout of the rows of strided arrays that a row op reduces.

The Python half of kernels_cu/rows/tile.cuh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..arrays import steps_of
from ..targets import address_of
from ..typing import Array

VECTOR_BYTES = 16
MAX_OUTER_DIMS = 6  # rows/tile.cuh: kMaxOuterDims


class Operand(NamedTuple):
    """An array in a layout: byte strides (`steps_of`), address modulo 64, and itemsize."""

    strides: tuple[int, ...]
    offset: int
    itemsize: int


def operand(array: Array) -> Operand:
    """The Operand of `array`."""
    address = address_of(array)
    return Operand(steps_of(array), address % 64, array.dtype.itemsize)


def contiguous_operand(shape: Sequence[int], itemsize: int) -> Operand:
    """The Operand of a new C-contiguous array."""
    strides = [itemsize]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return Operand(tuple(strides[::-1]), 0, itemsize)


@dataclass(frozen=True)
class RowLayout:
    """The rows of several operands of one shape.

    outer: (size, strides of each operand) of the merged dims other than the row's, innermost first.
        Strides are in elements.
    vectors: the operands can be read and written in aligned vectors along the row.
    max_head: the most elements of a row's first aligned vector that precede the row.
    lanes_across_rows: x's rows are closer together than the elements of a row.
    even: rows are at one stride, and each consists of aligned vectors without a rest.
    width: elements of the widest vectors, of up to VECTOR_BYTES, for which rows are even; 0: none.
    contiguous: in every operand that is accessed in vectors, rows follow each other without gaps.
    """

    num_rows: int
    num_cols: int
    outer: tuple[tuple[int, tuple[int, ...]], ...]
    col_strides: tuple[int, ...]
    vectors: bool
    max_head: int
    lanes_across_rows: bool
    even: bool
    contiguous: bool
    width: int

    def for_options(self) -> RowLayout:
        """The layout for a call with options that the kernels of contiguous rows lack."""
        return replace(self, contiguous=False)

    def fill(self, struct: np.ndarray) -> None:
        """struct: a zeroed RowLayout of rows/tile.cuh."""
        struct["num_rows"], struct["num_cols"] = self.num_rows, self.num_cols
        struct["num_outer_dims"] = len(self.outer)
        for d, (size, strides) in enumerate(self.outer):
            struct["outer_sizes"][d] = size
            struct["outer_strides"][d] = strides
        struct["col_strides"] = self.col_strides


def row_layout(
    shape: Sequence[int], axis: int, operands: Sequence[Operand], vectored: Sequence[int]
) -> RowLayout | None:
    """The layout of `operands` (x first), all of `shape`.

    None if no kernel supports them: a stride or an offset is not a multiple of the itemsize, or
    more than MAX_OUTER_DIMS dims remain after merging.
    axis: the dim along which rows are reduced.
    vectored: indices of the operands that are accessed in the same vectors as x (y and a residual,
        not a mask).
    """
    if any(step % op.itemsize for op in operands for step in (op.offset, *op.strides)):
        return None
    num_cols = shape[axis]
    # A single column gets stride 1, so that vectors can be used.
    col_strides = tuple(1 if num_cols == 1 else op.strides[axis] // op.itemsize for op in operands)
    dims = [
        (size, tuple(op.strides[d] // op.itemsize for op in operands))
        for d, size in enumerate(shape)
        if d != axis and size != 1
    ]
    dims.sort(key=lambda dim: abs(dim[1][0]))
    outer: list[tuple[int, tuple[int, ...]]] = []
    for size, strides in dims:
        if outer and all(
            stride == inner * outer[-1][0]
            for stride, inner in zip(strides, outer[-1][1], strict=True)
        ):
            outer[-1] = (outer[-1][0] * size, outer[-1][1])
        else:
            outer.append((size, strides))
    if len(outer) > MAX_OUTER_DIMS:
        return None
    num_rows = 1
    for size, _ in dims:
        num_rows *= size

    # x's rows can start anywhere in a vector; those of the other operands must start at the same
    # position.
    width = VECTOR_BYTES // operands[0].itemsize
    starts = [op.offset // op.itemsize for op in operands]
    vectors = all(
        col_strides[i] == 1
        and (starts[i] - starts[0]) % width == 0
        and all((strides[i] - strides[0]) % width == 0 for _, strides in outer)
        for i in (0, *vectored)
    )
    aligned = starts[0] % width == 0 and all(strides[0] % width == 0 for _, strides in outer)
    across = not vectors and bool(outer) and abs(outer[0][1][0]) < abs(col_strides[0])
    max_head = 0 if aligned or not vectors else width - 1
    widths = [1 << n for n in range(width.bit_length() - 1, -1, -1)]
    walked = (0, *vectored)
    even_width = 0
    if len(outer) <= 1 and all(col_strides[i] == 1 for i in walked):
        multiples = [num_cols, *(starts[i] for i in walked)]
        multiples += [strides[i] for _, strides in outer for i in walked]
        even_width = next(n for n in widths if not any(size % n for size in multiples))
    even = even_width == width
    contiguous = vectors and all(
        len(outer) <= 1 and strides[i] == num_cols for _, strides in outer for i in (0, *vectored)
    )
    return RowLayout(
        num_rows,
        num_cols,
        tuple(outer),
        col_strides,
        vectors,
        max_head,
        across,
        even,
        contiguous,
        even_width,
    )
