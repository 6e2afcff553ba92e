"""Expressions as users have them: of text or a callable, and what they print."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from . import describe
from .parse import Place, parse
from .trace import trace
from .tree import NAMES, Node


@dataclass(frozen=True)
class Expression:
    """A formula of an epilogue, by `cupykern.expression`.

    nodes: its tree; operands have numbers, in the order of their first use.
    names: the operands' names in that order.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    places: dict[str, Place] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """Of the tree: equal ones are equal formulas, whatever their operands' names."""
        return hashlib.sha256(repr([tuple(node) for node in self.nodes]).encode()).hexdigest()

    def check_names(self, known: Any) -> None:
        """Raise NameError for an operand that is not in `known`."""
        for name in self.names:
            if name not in known:
                place = self.places.get(name)
                where = f" (line {place.line}, column {place.column})" if place else ""
                there = ", ".join((*NAMES, *known))
                raise NameError(f"name {name!r}{where} is no operand; known: {there}", name=name)

    def __str__(self) -> str:
        return describe.text(self.nodes, self.names)


@lru_cache(maxsize=1024)
def _of_text(text: str) -> Expression:
    return Expression(*parse(text))


def read(formula: Any) -> Expression:
    """Of text, a callable or an Expression.  Raises SyntaxError (text) and TypeError."""
    if isinstance(formula, Expression):
        return formula
    if isinstance(formula, str):
        return _of_text(str(formula))
    if callable(formula):
        return Expression(*trace(formula))
    raise TypeError(f"an epilogue is a string or a callable; got {type(formula).__name__}")


def expression(formula: str | Callable[..., Any]) -> Expression:
    """A formula for the epilogue of `matmul` and `scaled_mm`, which they take as `epilogue`.

    >>> f = cupykern.expression("maximum(acc * s + t, 0)")
    >>> f.names
    ('s', 't')
    >>> f == cupykern.expression(lambda acc, s, t, maximum: maximum(acc * s + t, 0))
    True
    >>> a = np.array([[1, 2], [3, -4]], np.float16)
    >>> cupykern.matmul(a, a, epilogue=f, operands={"s": 0.5, "t": np.float32([[1], [0]])}).tolist()
    [[4.5, 0.0], [0.0, 11.0]]

    formula: an expression in Python's syntax, or a callable whose parameters are names of one.
        Names: acc, the FP32 product with alpha and scales applied; i, j, b, the row, column and
        matrix of the batch; others are operands.  + - * /, comparisons, & | ~ of booleans,
        x if condition else y, // and % of integers by a literal; abs, exp, exp2, log, log2, sqrt,
        rsqrt, tanh, erf, sigmoid, sin, cos, floor, minimum, maximum, where, isnan.  A callable may
        use numpy's functions too, and where() in place of `if`.

    Arithmetic is FP32, of i, j, b and integer literals int64.  sin and cos are for arguments up to
    2^16.  print(...) shows the C++, the reference and the error bound.

    Raises SyntaxError with the place and the reason, or TypeError of a callable.
    """
    return read(formula)
