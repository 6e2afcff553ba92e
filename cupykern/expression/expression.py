"""The public Expression: built from text or a callable, printable."""

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
    """A formula for an epilogue, a gate, a score or a mask; made by `cupykern.expression`.

    >>> f = cupykern.expression("acc * s, maximum(acc, 0)")
    >>> f.names, f.scope, len(f.results)
    (('s',), 'epilogue', 2)
    >>> f.digest == cupykern.expression("acc * t, maximum(acc, 0)").digest
    True

    nodes: the tree; operands are numbered in the order of their first use.
    names: the operands' names in that order.
    scope: the kind of formula, a key of SCOPES.
    roots: the result nodes if there are several; empty for one result, which is the last node.
    places: position of each name in the text, for error messages.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]
    scope: str = "epilogue"
    roots: tuple[int, ...] = ()
    places: dict[str, Place] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tree.  Formulas that differ only in operand names have equal digests."""
        tree = [*map(tuple, self.nodes), *self.roots]
        return hashlib.sha256(repr(tree).encode()).hexdigest()

    @property
    def results(self) -> tuple[int, ...]:
        """The result nodes."""
        return self.roots or (len(self.nodes) - 1,)

    @property
    def reductions(self) -> tuple[str | None, ...]:
        """For each result its reduction, one of REDUCTIONS, or None for a matrix."""
        return reductions(self.nodes, self.results)

    def uses(self, name: str) -> bool:
        """Whether the value `name`, such as the index i, is part of the expression."""
        return any(node.op == "name" and node.value == name for node in self.nodes)

    def plus(self, name: str) -> Expression:
        """The expression with acc replaced by acc + operand `name`."""
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
                said = f"name {name!r}{where} is not an operand; known: {there}"
                raise NameError(said, name=name)

    def __str__(self) -> str:
        return describe.text(self.nodes, self.names, self.scope, self.roots)


def reductions(nodes: Sequence[Node], results: Sequence[int]) -> tuple[str | None, ...]:
    """For each of these results its reduction, one of REDUCTIONS, or None for a matrix.

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
    """Read an Expression from text, a callable or an Expression.

    >>> from cupykern.expression import read
    >>> read("acc + t") is read(read("acc + t"))
    True

    Raises SyntaxError (text) and TypeError (another kind, a callable's errors).
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

    formula: an expression in Python syntax, or a callable whose parameters are names of the formula
        (operands, scope names and functions).
        Names: acc, the FP32 product with alpha and scales applied; i, j, b, the row, the column and
        the matrix index in the batch.  Other names are operands.
        Operators: + - * /, comparisons, & | ~ of booleans, x if condition else y (numbers or
        booleans), // and % of integers by an integer literal.
        Functions: abs, exp, exp2, log, log2, sqrt, rsqrt, tanh, erf, sigmoid, gelu, gelu_tanh,
        sin, cos, floor, minimum, maximum, where, isnan; float converts an integer or boolean to
        FP32; float16 and bfloat16 round a number to that format.
        An operand as a condition means operand != 0.  A callable may also use numpy functions, and
        must use where() in place of `if`.
        For products, a tuple gives up to 4 results: "maximum(acc, 0), acc".  Results after the
        first may be row_max(...) or row_sum(...) of an expression: the maximum or the sum of each
        row in FP32, of shape (..., M, 1).

    kind: the place of the formula:
        "epilogue": `matmul` and `scaled_mm`.
        "gate": `dual_gemm_silu`; acc1 and acc2, the products of b1 and b2, in place of acc.
        "score": `score` of the attention ops, a formula of s, the scaled score; b, h, hkv, the
        batch element, query head and KV head; i, the query's position; and j, the key.
        "mask": `mask` of the attention ops, a boolean of b, h, i, j.
        In "score" and "mask" array operands are indexed by integers: slope[h], bias[b, j],
        table[minimum(abs(i - j), 127)].

    >>> print(cupykern.expression("s - slope[h] * abs(i - j)", "score").names)
    ('slope',)

    Arithmetic is FP32; i, j, b, h, hkv and integer literals are int64.  sin and cos are accurate
    for arguments up to 2^16.  print(expression) shows the C++, the reference and the error bound.

    Raises SyntaxError (text, with place and reason), TypeError (callable) and ValueError (kind).
    """
    if kind not in SCOPES:
        raise ValueError(f"kind must be one of {', '.join(SCOPES)}; got {kind!r}")
    return read(formula, kind)
