"""Typed expression trees, stored as lists of nodes without duplicate subexpressions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

REAL, INTEGER, BOOLEAN = "real", "integer", "boolean"


class Scope(NamedTuple):
    """The rules of one kind of formula.

    names: the predefined names and their kinds.  result: REAL or BOOLEAN.  arrays: whether array
    operands are indexed, e.g. name[b, h]; otherwise they broadcast.  results: how many are allowed.
    """

    names: dict[str, str]
    result: str = REAL
    arrays: bool = False
    results: int = 1


MAX_RESULTS = 4
_ELEMENT = {"i": INTEGER, "j": INTEGER, "b": INTEGER}
_PAIR = {"b": INTEGER, "h": INTEGER, "i": INTEGER, "j": INTEGER}
SCOPES = {
    "epilogue": Scope({"acc": REAL, **_ELEMENT}, results=MAX_RESULTS),
    "gate": Scope({"acc1": REAL, "acc2": REAL, **_ELEMENT}, results=MAX_RESULTS),
    "score": Scope({"s": REAL, **_PAIR, "hkv": INTEGER}, arrays=True),
    "mask": Scope(_PAIR, BOOLEAN, arrays=True),
}
"""epilogue: the product, its row, column and matrix in the batch; gate: the same for two products.
score, mask: for attention, the scaled score, the batch element, query head, query position, key and
KV head."""

MAX_INDICES = 4

FUNCTIONS = {
    **dict.fromkeys(("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "erf"), 1),
    **dict.fromkeys(("sigmoid", "gelu", "gelu_tanh", "sin", "cos", "floor", "isnan"), 1),
    **dict.fromkeys(("float", "float16", "bfloat16"), 1),
    "minimum": 2,
    "maximum": 2,
    "where": 3,
    "row_max": 1,
    "row_sum": 1,
}
"""The number of arguments of each function.  float: convert to FP32, a boolean to 0 or 1; float16,
bfloat16: round FP32 to that format."""

REDUCTIONS = ("row_max", "row_sum")
"""Functions that must be a whole result: they reduce the columns of a row to one value."""

MAX_NODES = 256
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_FOLDED: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "modulo": operator.mod,
    "negative": operator.neg,
}
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
_LOGIC = {"and": "&", "or": "|", "not": "~"}
_KEEP_INTEGERS = ("add", "subtract", "multiply", "negative", "abs", "minimum", "maximum")


class IllegalError(Exception):
    """The reason an expression is illegal; `parse` and `trace` add the place."""


class Node(NamedTuple):
    """One operation.

    op: a function, an operation, "literal", "name", "operand", "load" (an element of an operand)
        or "real" (an integer as FP32).
    args: indices of earlier nodes, the operation's arguments; for a load its indices.
    value: of a literal, the number in decimal or hexadecimal; of a name, the name; of an operand or
        load, the operand's number.
    """

    op: str
    kind: str
    args: tuple[int, ...] = ()
    value: str = ""

    @property
    def number(self) -> int | float:
        """The value of a literal."""
        return int(self.value) if self.kind == INTEGER else float.fromhex(self.value)


class Builder:
    """Builds nodes, without duplicates."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes: list[Node] = []
        self._exact: list[bool] = []  # per node: integers, and booleans of integers only
        self._known: dict[Node, int] = {}

    def _node(self, op: str, kind: str, args: tuple[int, ...] = (), value: str = "") -> int:
        node = Node(op, kind, args, value)
        if node not in self._known:
            if len(self.nodes) >= 4 * MAX_NODES:
                raise IllegalError(f"an expression has at most {MAX_NODES} operations")
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
            exact = kind == INTEGER or (kind == BOOLEAN and all(self._exact[x] for x in args))
            self._exact.append(exact)
        return self._known[node]

    def name(self, name: str) -> int:
        """A name of the scope, or an operand."""
        return self._node("name", self.scope.names.get(name, REAL), value=name)

    def load(self, name: str, indices: tuple[int, ...]) -> int:
        """An element of the operand `name`."""
        if not self.scope.arrays:
            raise IllegalError(f"{name} has no indices: operands broadcast to the result")
        if name in self.scope.names:
            raise IllegalError(f"{name} is a number, without indices")
        if not 1 <= len(indices) <= MAX_INDICES:
            raise IllegalError(f"an array has 1 to {MAX_INDICES} indices; got {len(indices)}")
        kinds = [self.nodes[index].kind for index in indices]
        if set(kinds) != {INTEGER}:
            raise IllegalError(f"indices are integers; got {' and '.join(kinds)}")
        return self._node("load", REAL, indices, name)

    def literal(self, number: Any) -> int:
        if isinstance(number, (bool, np.bool_)) or not isinstance(
            number, (int, float, np.integer, np.floating)
        ):
            raise IllegalError(f"literals are numbers; got {number!r}")
        if isinstance(number, (int, np.integer)):
            if abs(int(number)) >= 2**63:
                raise IllegalError("an integer has 63 bits; write a larger number as 1e30")
            return self._node("literal", INTEGER, value=str(int(number)))
        x = float(number)
        if not abs(x) <= _LARGEST or 0 < abs(x) < _SMALLEST:
            raise IllegalError(f"{x} is not a normal number in FP32")
        return self._node("literal", REAL, value=x.hex())

    def real(self, index: int) -> int:
        """The node converted to FP32."""
        node = self.nodes[index]
        if node.kind == BOOLEAN:
            raise IllegalError("a boolean is not a number: write where(condition, 1, 0)")
        if node.kind == REAL:
            return index
        if node.op == "literal":
            return self.literal(float(node.number))
        return self._node("real", REAL, (index,))

    def apply(self, op: str, *args: int) -> int:
        """Apply a function or an operation to nodes.  Raises IllegalError."""
        kinds = [self.nodes[arg].kind for arg in args]
        if op in FUNCTIONS and len(args) != FUNCTIONS[op]:
            raise IllegalError(f"{op} takes {FUNCTIONS[op]} arguments; got {len(args)}")
        for arg in args:
            if (inner := self.nodes[arg].op) in REDUCTIONS:
                raise IllegalError(f"{inner}(...) is a whole result: nothing is computed of it")
        if op in REDUCTIONS and self.scope.results == 1:
            raise IllegalError(f"{op} is for results of products")
        if op in _LOGIC:
            args = tuple(map(self._condition, args))
            if any(self.nodes[arg].kind != BOOLEAN for arg in args):
                raise IllegalError(f"{_LOGIC[op]} is for booleans; got {' and '.join(kinds)}")
            return self._node(op, BOOLEAN, args)
        if op == "where":
            return self._where(*args)
        if op == "float":
            (index,) = args
            if kinds == [BOOLEAN]:
                return self._where(index, self.literal(1.0), self.literal(0.0))
            return self.real(index)
        if op in ("floor_divide", "modulo"):
            self._check_integers(op, kinds, args)
        if op in _FOLDED and all(self.nodes[arg].op == "literal" for arg in args):
            return self._folded(op, args)
        if op in _KEEP_INTEGERS:
            kind, args = self._common(args)
            return self._node(op, kind, args)
        if op in COMPARISONS:
            op, args = self._compared(op, *args)
            return self._node(op, BOOLEAN, self._common(args)[1])
        if op in ("floor_divide", "modulo"):
            return self._node(op, INTEGER, args)
        args = tuple(map(self.real, args))
        return self._node(op, BOOLEAN if op == "isnan" else REAL, args)

    def _where(self, condition: int, x: int, y: int) -> int:
        condition = self._condition(condition)
        if self.nodes[condition].kind != BOOLEAN:
            raise IllegalError(f"a condition is boolean; got {self.nodes[condition].kind}")
        if BOOLEAN in (self.nodes[x].kind, self.nodes[y].kind):
            x, y = self._condition(x), self._condition(y)
            if self.nodes[x].kind == self.nodes[y].kind:
                return self._node("where", BOOLEAN, (condition, x, y))
        # The result stays integer, which has no error, only if the condition has none.
        kind, chosen = self._common((x, y), self._exact[condition])
        return self._node("where", kind, (condition, *chosen))

    def _condition(self, index: int) -> int:
        """Convert an operand, or a `where` of operands, to `!= 0`; other nodes stay unchanged."""
        node = self.nodes[index]
        if node.op == "load" or (node.op == "name" and node.value not in self.scope.names):
            return self.apply("not_equal", index, self.literal(0))
        if node.op == "where" and node.kind == REAL:
            x, y = (self._condition(arg) for arg in node.args[1:])
            if self.nodes[x].kind == self.nodes[y].kind == BOOLEAN:
                return self._where(node.args[0], x, y)
        return index

    def _common(
        self, args: tuple[int, ...], may_be_integers: bool = True
    ) -> tuple[str, tuple[int, ...]]:
        """(kind, nodes): all integers, or all converted to FP32."""
        if may_be_integers and all(self.nodes[arg].kind == INTEGER for arg in args):
            return INTEGER, args
        return REAL, tuple(map(self.real, args))

    def _compared(self, op: str, x: int, y: int) -> tuple[str, tuple[int, int]]:
        """The comparison with less, less_equal, equal or not_equal only.  A literal comes second in
        equal and not_equal: in a traced callable Python calls the symbol's reflected method."""
        if op.startswith("greater"):
            return op.replace("greater", "less"), (y, x)
        swapped = op.endswith("equal") and op != "less_equal" and self.nodes[x].op == "literal"
        return op, (y, x) if swapped else (x, y)

    def _check_integers(self, op: str, kinds: list[str], args: tuple[int, ...]) -> None:
        sign = "//" if op == "floor_divide" else "%"
        if set(kinds) != {INTEGER}:
            raise IllegalError(f"{sign} is for integers; got {' and '.join(kinds)}")
        by = self.nodes[args[1]]
        if by.op != "literal" or by.number == 0:
            raise IllegalError(f"{sign} is by an integer literal that is not 0")

    def _folded(self, op: str, args: tuple[int, ...]) -> int:
        """Fold an operation on literals with Python's arithmetic."""
        try:
            return self.literal(_FOLDED[op](*(self.nodes[arg].number for arg in args)))
        except (ZeroDivisionError, OverflowError) as error:
            raise IllegalError(str(error)) from None

    def finish(self, *roots: int) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[int, ...]]:
        """(nodes, operand names, results): the nodes that the results `roots` need and the operand
        names, both in order of first use; the result nodes if there are several, else (), as a
        single result is the last node.  Raises IllegalError."""
        if not 1 <= len(roots) <= self.scope.results:
            most = (
                f"at most {self.scope.results} results" if self.scope.results > 1 else "one result"
            )
            raise IllegalError(f"a formula has {most} here; got {len(roots)}")
        if self.scope.result == REAL:
            roots = tuple(map(self.real, roots))
        else:
            roots = tuple(map(self._condition, roots))
            if self.nodes[roots[0]].kind != BOOLEAN:
                kind = self.nodes[roots[0]].kind
                raise IllegalError(f"a mask is boolean: write x != 0; got {kind}")
        if (first := self.nodes[roots[0]].op) in REDUCTIONS:
            raise IllegalError(f"the first result is a matrix, which {first}(...) may follow")
        order: dict[int, int] = {}
        ranks: dict[str, int] = {}
        names: list[str] = []
        found: list[Node] = []
        open_nodes = list(reversed(roots))
        while open_nodes:
            index = open_nodes[-1]
            if index in order:  # shared by several results
                open_nodes.pop()
                continue
            node = self.nodes[index]
            missing = next((arg for arg in node.args if arg not in order), None)
            if missing is not None:
                open_nodes.append(missing)
                continue
            open_nodes.pop()
            if node.op == "load" or (node.op == "name" and node.value not in self.scope.names):
                if ranks.setdefault(node.value, len(node.args)) != len(node.args):
                    raise IllegalError(f"{node.value} has the same number of indices everywhere")
                if node.value not in names:
                    names.append(node.value)
                op, number = "operand" if node.op == "name" else "load", names.index(node.value)
                node = node._replace(op=op, value=str(number))
            order[index] = len(found)
            found.append(node._replace(args=tuple(order[arg] for arg in node.args)))
        if len(found) > MAX_NODES:
            raise IllegalError(f"an expression has at most {MAX_NODES} operations")
        several = tuple(order[root] for root in roots) if len(roots) > 1 else ()
        return tuple(found), tuple(names), several


def transposed(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes for the transposed product: i and j exchanged."""
    swapped = {"i": "j", "j": "i"}
    return tuple(
        node._replace(value=swapped.get(node.value, node.value)) if node.op == "name" else node
        for node in nodes
    )


def with_addend(nodes: tuple[Node, ...], operand: int) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """(nodes with acc replaced by acc + operand, the new index of each node)."""
    found: list[Node] = []
    places: list[int] = []
    for node in nodes:
        found.append(node._replace(args=tuple(places[arg] for arg in node.args)))
        if node.op == "name" and node.value == "acc":
            n = len(found)
            found += [Node("operand", REAL, value=str(operand)), Node("add", REAL, (n - 1, n))]
        places.append(len(found) - 1)
    return tuple(found), tuple(places)


def of_first(nodes: tuple[Node, ...], second: int) -> tuple[Node, ...]:
    """A gate as the epilogue of its first product; the second product is the operand `second`."""
    acc2 = Node("operand", REAL, value=str(second))
    own = {"acc1": Node("name", REAL, value="acc"), "acc2": acc2}
    return tuple(own.get(node.value, node) if node.op == "name" else node for node in nodes)
