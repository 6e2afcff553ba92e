"""Expressions as users have them: of text or a callable, and what they print."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from . import describe
from .parse import Place, parse
from .trace import trace
from .tree import REDUCTIONS, SCOPES, Node, with_addend


@dataclass(frozen=True)
class Expression:
    """A formula of an epilogue, a gate, a score or a mask, by `cupykern.expression`.

    >>> f = cupykern.expression("acc * s, maximum(acc, 0)")
    >>> f.names, f.scope, len(f.results)
    (('s',), 'epilogue', 2)
    >>> f.digest == cupykern.expression("acc * t, maximum(acc, 0)").digest
    True

    nodes: its tree; operands have numbers, in the order of their first use.
    names: the operands' names in that order.
    scope: where it stands, one of SCOPES.
    roots: of several results, their nodes; of one, which is the last node, none.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    scope: str = "epilogue"
    roots: tuple[int, ...] = ()
    places: dict[str, Place] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """Of the tree: equal ones are equal formulas, whatever their operands' names."""
        tree = [*map(tuple, self.nodes), *self.roots]
        return hashlib.sha256(repr(tree).encode()).hexdigest()

    @property
    def results(self) -> tuple[int, ...]:
        """Their nodes."""
        return self.roots or (len(self.nodes) - 1,)

    @property
    def reductions(self) -> tuple[str | None, ...]:
        """Of each result: one of REDUCTIONS, or None of a matrix."""
        return reductions(self.nodes, self.results)

    def plus(self, name: str) -> Expression:
        """Of the sum of acc, where it stands, and another operand."""
        nodes, places = with_addend(self.nodes, len(self.names))
        if len(nodes) == len(self.nodes):
            return self
        roots = tuple(places[root] for root in self.roots)
        return Expression(nodes, (*self.names, name), self.scope, roots)

    def check_names(self, known: Any) -> None:
        """Raise NameError for an operand that is not in `known`."""
        for name in self.names:
            if name not in known:
                place = self.places.get(name)
                where = f" (line {place.line}, column {place.column})" if place else ""
                there = ", ".join((*SCOPES[self.scope].names, *known))
                raise NameError(f"name {name!r}{where} is no operand; known: {there}", name=name)

    def __str__(self) -> str:
        return describe.text(self.nodes, self.names, self.scope, self.roots)


def reductions(nodes: Sequence[Node], results: Sequence[int]) -> tuple[str | None, ...]:
    """Of each of these results: one of REDUCTIONS, or None of a matrix.

    >>> f = cupykern.expression("acc, row_max(abs(acc))")
    >>> f.reductions
    (None, 'row_max')
    """
    return tuple(op if (op := nodes[n].op) in REDUCTIONS else None for n in results)


@lru_cache(maxsize=1024)
def _of_text(text: str, scope: str) -> Expression:
    nodes, names, roots, places = parse(text, SCOPES[scope])
    return Expression(nodes, names, scope, roots, places)


def read(formula: Any, scope: str = "epilogue") -> Expression:
    """Of text, a callable or an Expression.

    >>> from cupykern.expression import read
    >>> read("acc + t") is read(read("acc + t"))
    True

    Raises SyntaxError (text) and TypeError.
    """
    if isinstance(formula, Expression):
        if formula.scope != scope:
            raise TypeError(f"expected an expression of kind {scope!r}; got {formula.scope!r}")
        return formula
    if isinstance(formula, str):
        return _of_text(str(formula), scope)
    if callable(formula):
        nodes, names, roots = trace(formula, SCOPES[scope])
        return Expression(nodes, names, scope, roots)
    article = "an" if scope == "epilogue" else "a"
    raise TypeError(f"{article} {scope} is a string or a callable; got {type(formula).__name__}")


def expression(formula: str | Callable[..., Any], kind: str = "epilogue") -> Expression:
    """A formula for the epilogue of products, or for attention's scores and masks.

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
        x if condition else y (of numbers or booleans), // and % of integers by a literal; abs, exp,
        exp2, log, log2, sqrt, rsqrt, tanh, erf, sigmoid, sin, cos, floor, minimum, maximum, where,
        isnan; float, an integer or a boolean as FP32; float16, bfloat16, a number rounded to such.
        As a condition an operand is whether it is not 0.  A callable may use numpy's functions too,
        and where() in place of `if`.  Of products, a tuple is up to 4 results: "maximum(acc, 0),
        acc".  Those after the first may be row_max(...) or row_sum(...) of an expression: the
        largest value of each row, or the sum, in FP32, of shape (..., M, 1).

    kind: "epilogue", of `matmul` and `scaled_mm`; "gate", of `dual_gemm_silu`: acc1 and acc2, the
        products of b1 and b2, in place of acc; "score", for `score` of attention's ops: a formula
        of s, the scaled score, of b, h, hkv, the batch element, query head and KV head, of i, the
        query's position, and j, the key; or "mask", for `mask`: a boolean of b, h, i, j.  In these
        two, operands that are arrays have indices, which are integers: slope[h], bias[b, j],
        table[minimum(abs(i - j), 127)].

    >>> print(cupykern.expression("s - slope[h] * abs(i - j)", "score").names)
    ('slope',)

    Arithmetic is FP32, of i, j, b and integer literals int64.  sin and cos are for arguments up to
    2^16.  print(...) shows the C++, the reference and the error bound.

    Raises SyntaxError with the place and the reason, TypeError (a callable) and ValueError (kind).
    """
    if kind not in SCOPES:
        raise ValueError(f"kind must be one of {', '.join(SCOPES)}; got {kind!r}")
    return read(formula, kind)
