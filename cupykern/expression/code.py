"""The C++ of a formula as part of a variant."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from ..kernels import Variant


@dataclass(frozen=True)
class FormulaCode:
    """The C++ of an expression and its operands' types; part of the identity of its kernels.

    reduces_rows: whether a result is a row reduction.
    """

    text: str
    reduces_rows: bool = False

    def __str__(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    __repr__ = __str__

    def variant(self, plain: Variant, kernel: str) -> Variant:
        """The variant of kernels_cu/<kernel>.cu that applies the expression, else like `plain`."""
        return replace(plain, kernel=kernel, text=f'{self.text}#include "{kernel}.cu"\n')
