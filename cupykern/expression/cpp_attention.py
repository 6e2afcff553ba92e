"""C++ of score and mask formulas: the struct Formulas.  kernels_cu/attention/formula.cuh applies
both to elements, and the mask also to tiles, in interval arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .cpp import OF_BOTH, OF_INTEGERS, OF_REALS
from .interval import EXACT, Interval, evaluate
from .tree import BOOLEAN, INTEGER, REAL, SCOPES, Node

_MOST = 2**29
"""Limit of positions and keys, also beyond the end in the last tile; heads have 31 bits."""
_RANGES = {
    **dict.fromkeys(("b", "h", "hkv"), Interval(0.0, 2.0**31 - 1)),
    **dict.fromkeys(("i", "j"), Interval(-float(_MOST), float(_MOST))),
}
_PARAMETERS = "const X& x, {s}int b, int h, int hkv, int i, int j"


class FormulaOperand(NamedTuple):
    """slot: the operand's number in the kernel.  cpp: C++ element type; None for a number."""

    slot: int
    cpp: str | None = None


class Code(NamedTuple):
    """A formula's tree with its operands, in the order of their use."""

    nodes: tuple[Node, ...]
    operands: tuple[FormulaOperand, ...]


def source(
    score: Code | None, mask: Code | None, softcap: bool = False, alibi: bool = False
) -> str:
    """The struct Formulas, with its includes.  softcap, alibi: whether calls have these options.

    They are constants because each is a loop over all scores: without them a kernel compiles in
    three quarters of the time.
    """
    lines = [
        '#include "expression/interval.cuh"',
        "struct Formulas {",
        f"    static constexpr bool kScore = {_bool(score)}, kMask = {_bool(mask)};",
        f"    static constexpr bool kSoftcap = {_bool(softcap)}, kAlibi = {_bool(alibi)};",
    ]
    names = _PARAMETERS.format(s="")
    lines += _function("float", "score", _PARAMETERS.format(s="float s, "), score, _pointwise, "s")
    lines += _function("bool", "mask", names, mask, _pointwise, "true")
    ranges = "const X& x, Interval<int> b, Interval<int> h, Interval<int> i, Interval<int> j"
    lines += _function("Interval<bool>", "mask_over", ranges, mask, _over, "{true, true}")
    return "\n".join((*lines, "};")) + "\n"


def _bool(there: Code | bool | None) -> str:
    return "true" if there else "false"


def _function(
    result: str,
    name: str,
    parameters: str,
    code: Code | None,
    write: Callable[[Code], tuple[list[str], str]],
    absent: str,
) -> list[str]:
    body, value = write(code) if code else ([], absent)
    return [
        "    template <class X>",
        f"    DEVICE static {result} {name}({parameters}) {{",
        *(f"        {line}" for line in body),
        f"        return {value};",
        "    }",
    ]


def _types(nodes: Sequence[Node]) -> list[str]:
    """The C++ types of nodes; integers whose range fits 32 bits are int."""
    names = {**dict.fromkeys(SCOPES["score"].names, Interval(-np.inf, np.inf)), **_RANGES}
    found = []
    for node, at in zip(nodes, evaluate(nodes, names), strict=True):
        small = bool((at.lo >= -(2.0**31) + 1) & (at.hi <= 2.0**31 - 1))
        integer = "int" if small else "int64_t"
        found.append({REAL: "float", BOOLEAN: "bool", INTEGER: integer}[node.kind])
    return found


def _wider(types: Sequence[str]) -> str:
    return "int64_t" if "int64_t" in types else "int"


def _literal(node: Node, type_: str) -> str:
    if node.kind == INTEGER:
        return f"{type_}({node.value}ll)"
    return f"({float(np.float32(node.number)).hex()}f)"


def _pointwise(code: Code) -> tuple[list[str], str]:
    """(statements, the result)."""
    nodes, types = code.nodes, _types(code.nodes)
    body: list[str] = []
    values: list[str] = []
    for n, node in enumerate(nodes):
        args = [values[arg] for arg in node.args]
        of_args = [types[arg] for arg in node.args]
        type_ = types[n]
        if node.op == "literal":
            values.append(_literal(node, type_))
            continue
        if node.op == "name":
            values.append(node.value)
            continue
        if node.op in ("operand", "load"):
            operand = code.operands[int(node.value)]
            value = f"x.number({operand.slot})"
            if operand.cpp is not None:
                value = f"x.template load<{operand.cpp}>({', '.join((str(operand.slot), *args))})"
        elif node.kind == INTEGER and node.op != "where":
            wide = _wider((type_, *of_args))
            table = OF_BOTH if node.op in OF_BOTH else OF_INTEGERS
            if wide == "int" and node.op in OF_SMALL:
                table = OF_SMALL
            value = table[node.op].format(*(f"{wide}({arg})" for arg in args))
            value = value if wide == type_ else f"int({value})"
        else:
            table = OF_BOTH if node.op in OF_BOTH else OF_REALS
            value = table[node.op].format(*args)
        body.append(f"const {type_} t{n} = {value};")
        values.append(f"t{n}")
    return body, values[-1]


OF_SMALL = {  # for integers that do not overflow 32 bits
    **{name: OF_REALS[name] for name in ("add", "subtract", "multiply", "negative")},
    "abs": "({0} < 0 ? -{0} : {0})",
}


def _over(code: Code) -> tuple[list[str], str]:
    """(statements, the result) in interval arithmetic."""
    nodes, types = code.nodes, _types(code.nodes)
    names = {**dict.fromkeys(SCOPES["mask"].names, Interval(-np.inf, np.inf)), **_RANGES}
    known = evaluate(nodes, names)
    body: list[str] = []
    for n, node in enumerate(nodes):
        args = [f"t{arg}" for arg in node.args]
        type_ = types[n]
        if node.op == "literal":
            value = f"point({_literal(node, type_)})"
        elif node.op == "name":
            value = node.value
        elif node.op in ("operand", "load"):
            operand = code.operands[int(node.value)]
            value = f"point(x.number({operand.slot}))"
            if operand.cpp is not None:
                args = [f"converted<int64_t>({arg})" for arg in args]
                value = f"x.template over<{operand.cpp}>({', '.join((str(operand.slot), *args))})"
        elif node.kind == INTEGER and not _is_known(known[n]):
            value = "any_integer()"
        elif node.kind == REAL and node.op not in OVER:
            value = "any_real()"
        else:
            of_args = [types[arg] for arg in node.args]
            if "float" not in of_args and node.op not in ("and", "or", "not"):
                wide = _wider([t for t in (type_, *of_args) if t != "bool"])
                args = [
                    arg if t in (wide, "bool") else f"converted<{wide}>({arg})"
                    for arg, t in zip(args, of_args, strict=True)
                ]
            value = f"over_{node.op}({', '.join(args)})"
            if node.kind == INTEGER:
                value = f"converted<{type_}>({value})"
        body.append(f"const Interval<{type_}> t{n} = {value};")
    return body, f"t{len(nodes) - 1}"


OVER = ("add", "subtract", "multiply", "divide", "negative", "abs", "minimum", "maximum", "where",
        "floor", "real")  # fmt: skip


def _is_known(x: Interval) -> bool:
    return bool((x.lo > -EXACT) & (x.hi < EXACT))
