"""Formulas of a score and a mask, without their arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..expression.code import FormulaCode

MAX_OPERANDS = 8  # parts/formula_operands.cuh: kMaxOperands


class OperandPlace(NamedTuple):
    """An operand that is an array: its strides in elements, and its shape."""

    strides: tuple[int, ...]
    sizes: tuple[int, ...]


class Formulas(NamedTuple):
    """What variants with formulas, and their launches, differ by.

    code: the struct Formulas.  score, mask: whether there are such.
    operands: numbers, and arrays in the order of their pointers.
    """

    code: FormulaCode
    score: bool
    mask: bool
    operands: tuple[float | OperandPlace, ...]

    def fill(self, params: np.ndarray) -> None:
        """params: OperandParams, zeros."""
        for k, x in enumerate(self.operands):
            if isinstance(x, OperandPlace):
                params["strides"][k, : len(x.strides)] = x.strides
                params["sizes"][k, : len(x.sizes)] = x.sizes
            else:
                params["numbers"][k] = x

    def pointers(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The kernel's arguments; None in place of numbers, and of operands that are not there."""
        there = iter(arrays)
        found = [next(there) if isinstance(x, OperandPlace) else None for x in self.operands]
        return (*found, *(None,) * (MAX_OPERANDS - len(found)))
