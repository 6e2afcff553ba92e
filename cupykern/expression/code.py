"""The C++ of formulas as part of a variant."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from ..kernels import Variant


@dataclass(frozen=True)
class FormulaCode:
    """The C++ of an expression and its operands' types, by which kernels with it differ.

    reduces_rows: whether there are results that are reductions of rows.
    """

    text: str
    reduces_rows: bool = False

    def __str__(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    __repr__ = __str__

    def variant(self, plain: Variant, kernel: str) -> Variant:
        """`plain`'s of kernels_cu/<kernel>.cu, which has the expression."""
        return replace(plain, kernel=kernel, text=f'{self.text}#include "{kernel}.cu"\n')
