"""The printed form of an expression: its C++, its reference and its error bound."""

from __future__ import annotations

from collections.abc import Sequence

from . import cpp, cpp_attention
from .tree import REAL, Node

_ERRORS = {  # error of a real operation t; e(x) is the error of an argument and u = 2^-24
    "add": "e({0}) + e({1}) + u |{t}|",
    "subtract": "e({0}) + e({1}) + u |{t}|",
    "multiply": "|{0}| e({1}) + |{1}| e({0}) + e({0}) e({1}) + u |{t}|",
    "divide": "(e({0}) + |{t}| e({1})) / (|{1}| - e({1})) + u |{t}|; any where e({1}) >= |{1}|",
    "negative": "e({0})",
    "abs": "e({0})",
    "exp": "exp({0} + e) e({0}) + (4 + 1.25 |{0}|) u |{t}|",
    "exp2": "log(2) exp2({0} + e) e({0}) + 4 u |{t}|",
    "log": "e({0}) / ({0} - e) + 2 u |{t}|; any where e({0}) >= |{0}|",
    "log2": "1.45 e({0}) / ({0} - e) + 4 u |{t}|; any where e({0}) >= |{0}|",
    "sqrt": "min(e({0}) / sqrt({0} - e), sqrt(2 e({0}))) + 2 u |{t}|; any where {0} < e({0})",
    "rsqrt": "({0} - e)^-1.5 e({0}) / 2 + 4 u |{t}|; any where {0} <= e({0})",
    "tanh": "e({0}) + 8 u |{t}|",
    "erf": "1.13 e({0}) + 4 u |{t}|",
    "sigmoid": "e({0}) / 4 + (14 + 2.5 max(-{0}, 0)) u |{t}|",
    "gelu": "1.13 e({0}) + 3 u (|{0}| + e({0})) + 2 u |{t}|",
    "gelu_tanh": "1.13 e({0}) + (19 + 10 max(-p, 0)) u |{t}|, p = 1.596 {0} + 0.0714 {0}^3",
    "sin": "e({0}) + 4 u |{t}|; any where |{0}| > 2^16",
    "cos": "e({0}) + 4 u |{t}|; any where |{0}| > 2^16",
    "floor": "0; 1 or more where an integer is within e({0}) of {0}",
    "float16": "0; a gap of FP16 or more where e({0}) may round to the next",
    "bfloat16": "0; a gap of BF16 or more where e({0}) may round to the next",
    "minimum": "max(e({0}), e({1}))",
    "maximum": "max(e({0}), e({1}))",
    "where": "e of the one chosen; either where {0} is within its error",
    "row_max": "max of e({0}) over the columns that may be the largest",
    "row_sum": "sum of e({0}) + d u sum of |{0}|, of columns added in d levels",
    "real": "u |{0}| beyond 2^24",
}
_SIGNS = {
    "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//",
    "modulo": "%", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!=", "and": "&",
    "or": "|",
}  # fmt: skip


def text(nodes: Sequence[Node], names: Sequence[str], scope: str, roots: Sequence[int] = ()) -> str:
    """The C++ for numbers or indexed arrays as operands, the reference and the error bound, line by
    line."""
    operands = ", ".join(f"x{k} = {name}" for k, name in enumerate(names)) or "none"
    return (
        f"operands: {operands}\n\nC++:\n{_code(nodes, names, scope, roots)}\nReference, in FP64:\n"
        + "\n".join(reference(nodes, names, roots))
        + "\n\nError, beside 2^-126 of what FP32 flushes:\n"
        + "\n".join(errors(nodes, names, scope))
    )


def _code(nodes: Sequence[Node], names: Sequence[str], scope: str, roots: Sequence[int]) -> str:
    if scope in ("epilogue", "gate"):
        more = ["float"] * (len(roots) - 1)
        return cpp.source(nodes, [cpp.OperandCode()] * len(names), scope, roots, more)
    arrays = {node.value for node in nodes if node.op == "load"}
    operands = (
        cpp_attention.FormulaOperand(k, "float" if str(k) in arrays else None)
        for k in range(len(names))
    )
    code = cpp_attention.Code(tuple(nodes), tuple(operands))
    is_score = scope == "score"
    return cpp_attention.source(code if is_score else None, None if is_score else code)


def reference(nodes: Sequence[Node], names: Sequence[str], roots: Sequence[int] = ()) -> list[str]:
    """A Python line `t = ...` for every operation."""
    values = _values(nodes, names)
    return [
        f"    {values[n]} = "
        + _written(node, [values[arg] for arg in node.args], _loaded(node, names))
        for n, node in enumerate(nodes)
        if node.args
    ] + [f"    result = {', '.join(values[root] for root in roots or (-1,))}"]


_GIVEN = {
    "epilogue": ["    e(acc): the product's"],
    "gate": ["    e(acc1), e(acc2): the products'"],
    "score": ["    e(s): the scaled score's"],
}


def errors(nodes: Sequence[Node], names: Sequence[str], scope: str) -> list[str]:
    """A line `e(t) <= ...` for every operation on reals."""
    values = _values(nodes, names)
    found = list(_GIVEN.get(scope, []))
    for n, node in enumerate(nodes):
        if node.kind == REAL and node.op in _ERRORS:
            args = [values[arg] for arg in node.args]
            found.append(f"    e({values[n]}) <= {_ERRORS[node.op].format(*args, t=values[n])}")
    return found


def _loaded(node: Node, names: Sequence[str]) -> str:
    return names[int(node.value)] if node.op == "load" else ""


def _values(nodes: Sequence[Node], names: Sequence[str]) -> list[str]:
    values = []
    for n, node in enumerate(nodes):
        value = f"t{n}"
        if node.op == "literal":
            value = f"{node.number!r}"
        elif not node.args:
            value = node.value if node.op == "name" else names[int(node.value)]
        values.append(value)
    return values


def _written(node: Node, args: list[str], value: str) -> str:
    """The operation as Python text.  value: the name of the operand of a load."""
    if node.op in _SIGNS:
        return f"{args[0]} {_SIGNS[node.op]} {args[1]}"
    if node.op in ("negative", "not"):
        return f"{'-' if node.op == 'negative' else '~'}{args[0]}"
    if node.op == "load":
        return f"{value}[{', '.join(args)}]"
    return args[0] if node.op == "real" else f"{node.op}({', '.join(args)})"
