"""Formulas of the score and the mask, without their arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..expression import Expression
from ..expression.code import FormulaCode
from ..expression.interval import Interval, evaluate

MAX_OPERANDS = 8  # expression/operand.cuh: kMaxOperands


class OperandPlace(NamedTuple):
    """An array operand: its strides in elements, and its shape."""

    strides: tuple[int, ...]
    sizes: tuple[int, ...]


class Formulas(NamedTuple):
    """The formulas of a variant and their operands.

    code: the struct Formulas.  score, mask: whether each has a formula.
    operands: numbers and arrays, the arrays in the order of their pointers.
    """

    code: FormulaCode
    score: bool
    mask: bool
    operands: tuple[float | OperandPlace, ...]

    def fill(self, params: np.ndarray) -> None:
        """params: a zeroed OperandParams."""
        for k, x in enumerate(self.operands):
            if isinstance(x, OperandPlace):
                params["strides"][k, : len(x.strides)] = x.strides
                params["sizes"][k, : len(x.sizes)] = x.sizes
            else:
                params["numbers"][k] = x

    def pointers(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's MAX_OPERANDS pointers; None for numbers and for missing operands."""
        there = iter(arrays)
        found = [next(there) if isinstance(x, OperandPlace) else None for x in self.operands]
        return (*found, *(None,) * (MAX_OPERANDS - len(found)))


class Ranges(NamedTuple):
    """The sizes of the index variables, which start at 0.

    positions: query positions.  Positions before the first key are not counted: they read the ends
        of arrays.
    """

    batch: int
    heads: int
    kv_heads: int
    positions: int
    keys: int

    def names(self) -> dict[str, Interval]:
        b, h, hkv, i, j = (Interval(0.0, max(size - 1, 0)) for size in self)
        return {"s": Interval(-np.inf, np.inf), "b": b, "h": h, "hkv": hkv, "i": i, "j": j}


def check_indices(formula: Expression, arrays: Mapping[str, Any], ranges: Ranges) -> None:
    """Check the formula's indices.  arrays: the array operands by name.

    Raises ValueError if an index can leave its array, an array has the wrong number of dims, or an
    indexed operand is not an array.
    """
    found = evaluate(formula.nodes, ranges.names())
    for node in formula.nodes:
        if node.op not in ("load", "operand"):
            continue
        name = formula.names[int(node.value)]
        there = f"operands[{name!r}]"
        if name in arrays and 0 not in ranges:  # with an empty range nothing is indexed
            _check_indices(there, [found[arg] for arg in node.args], arrays[name].shape)
        elif name not in arrays and node.op == "load":
            raise ValueError(f"{there} must be an array, as {formula.scope} indexes it")


def _check_indices(there: str, indices: Sequence[Interval], shape: tuple[int, ...]) -> None:
    if len(shape) != len(indices):
        raise ValueError(
            f"{there} must have {len(indices)} dims, as the formula indexes it; got shape {shape}"
        )
    for d, (index, size) in enumerate(zip(indices, shape, strict=True)):
        if not (index.lo >= 0 and index.hi < size):
            raise ValueError(
                f"index {d} of {there} goes from {float(index.lo):.15g} to {float(index.hi):.15g}, "
                f"but its shape is {shape}; minimum and maximum limit an index"
            )
