"""Build trees from Python expression syntax; unsupported syntax raises SyntaxError."""

from __future__ import annotations

import ast
import keyword
import unicodedata
from typing import NamedTuple

from .tree import FUNCTIONS, SCOPES, Builder, IllegalError, Node, Scope

MAX_LENGTH = 4096
_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "modulo",
    ast.BitAnd: "and",
    ast.BitOr: "or",
}
_COMPARE: dict[type[ast.AST], str] = {
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
}
_INSTEAD: dict[type[ast.AST], str] = {
    ast.BoolOp: "write & and | with parentheses in place of 'and' and 'or'",
    ast.Not: "write ~ in place of 'not'",
    ast.Pow: "write x * x in place of x ** 2",
}


class Place(NamedTuple):
    """A position in the text, as SyntaxError takes it; columns count from 1."""

    line: int
    column: int
    text: str
    end_line: int
    end_column: int


def parse(
    text: str, scope: Scope = SCOPES["epilogue"]
) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[int, ...], dict[str, Place]]:
    """(nodes, operand names, result nodes, place of each name's first use).  The first three are
    those of Builder.finish; a tuple gives several results.  Raises SyntaxError."""
    text = text.strip()
    if len(text) > MAX_LENGTH:
        raise SyntaxError(f"an expression has at most {MAX_LENGTH} characters; got {len(text)}")
    try:
        tree = ast.parse(text, "<expression>", mode="eval")
        reader = _Reader(text, scope)
        results = tree.body.elts if isinstance(tree.body, ast.Tuple) else [tree.body]
        found = [reader.read(result) for result in results]
        with reader.at(tree.body):
            nodes, names, roots = reader.builder.finish(*found)
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"the expression cannot be read: {error}") from None
    return nodes, names, roots, reader.places


def is_operand_name(name: object, scope: str) -> bool:
    """Whether `name` can be an operand's name in a formula of kind `scope`."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return False
    if unicodedata.normalize("NFKC", name) != name:  # Python's parser normalizes names to NFKC
        return False
    return name not in SCOPES[scope].names and name not in FUNCTIONS


class _Reader:
    def __init__(self, text: str, scope: Scope) -> None:
        self.builder = Builder(scope)
        self.places: dict[str, Place] = {}
        self._lines = text.splitlines() or [""]

    def at(self, node: ast.expr) -> _At:
        return _At(self, node)

    def place(self, node: ast.expr) -> Place:
        def column(line: int | None, offset: int | None) -> int:  # ast offsets count UTF-8 bytes
            return len(self._lines[(line or 1) - 1].encode()[: offset or 0].decode()) + 1

        end_line = node.end_lineno or node.lineno
        return Place(
            *(node.lineno, column(node.lineno, node.col_offset), self._lines[node.lineno - 1]),
            *(end_line, column(end_line, node.end_col_offset)),
        )

    def fail(self, node: ast.expr, reason: str) -> SyntaxError:
        return SyntaxError(reason, ("<expression>", *self.place(node)))

    def read(self, node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            with self.at(node):
                return self.builder.literal(node.value)
        if isinstance(node, ast.Name):
            if node.id in FUNCTIONS:
                raise self.fail(node, f"{node.id} is a function: write {node.id}(...)")
            self.places.setdefault(node.id, self.place(node))
            return self.builder.name(node.id)
        if isinstance(node, ast.Subscript):
            return self._load(node)
        if isinstance(node, ast.Call):
            return self._apply(node, self._function(node), *node.args)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._apply(node, _BINARY[type(node.op)], node.left, node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._apply(node, "negative", node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self._apply(node, "not", node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self.read(node.operand)
        if isinstance(node, ast.IfExp):
            return self._apply(node, "where", node.test, node.body, node.orelse)
        if isinstance(node, ast.Compare) and all(type(op) in _COMPARE for op in node.ops):
            return self._compare(node)
        operation = getattr(node, "op", node)
        instead = _INSTEAD.get(type(node), _INSTEAD.get(type(operation)))
        kind = type(operation if isinstance(node, (ast.BinOp, ast.UnaryOp)) else node).__name__
        raise self.fail(node, instead or f"{kind} is not part of an expression")

    def _apply(self, node: ast.expr, op: str, *args: ast.expr) -> int:
        indices = [self.read(arg) for arg in args]
        with self.at(node):
            return self.builder.apply(op, *indices)

    def _load(self, node: ast.Subscript) -> int:
        if not isinstance(node.value, ast.Name) or node.value.id in FUNCTIONS:
            raise self.fail(node.value, "only operands, by name, have indices")
        name = node.value.id
        self.places.setdefault(name, self.place(node.value))
        given = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        indices = tuple(self.read(index) for index in given)
        with self.at(node):
            return self.builder.load(name, indices)

    def _function(self, node: ast.Call) -> str:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in FUNCTIONS:
            known = ", ".join(FUNCTIONS)
            raise self.fail(node.func, f"{name or 'this'} is not a function; there are {known}")
        if node.keywords:
            raise self.fail(node, f"{name} takes no keywords")
        return name

    def _compare(self, node: ast.Compare) -> int:
        args = [self.read(x) for x in (node.left, *node.comparators)]
        with self.at(node):
            found = [
                self.builder.apply(_COMPARE[type(op)], first, second)
                for op, first, second in zip(node.ops, args, args[1:], strict=False)
            ]
            whole = found[0]
            for one in found[1:]:
                whole = self.builder.apply("and", whole, one)
            return whole


class _At:
    """Context that turns an IllegalError into a SyntaxError at `node`."""

    def __init__(self, reader: _Reader, node: ast.expr) -> None:
        self._reader, self._node = reader, node

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, IllegalError):
            raise self._reader.fail(self._node, str(error)) from None
