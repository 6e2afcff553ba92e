"""C++ of a tree: the struct Expression, which kernels_cu/expression/apply.cuh applies.

The C++ contains no user text: operands are named x0, x1, ..., and all numbers are reformatted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .tree import BOOLEAN, INTEGER, REAL, REDUCTIONS, SCOPES, Node

MAX_OPERANDS = 8  # expression/operand.cuh: kMaxOperands
OF_INTEGER_ARRAYS = {
    np.dtype(np.int32): "int32_t",
    np.dtype(np.int64): "int64_t",
    np.dtype(np.bool_): "uint8_t",
}
"""C++ element types that to_float does not convert."""
_TYPES = {REAL: "float", INTEGER: "int64_t", BOOLEAN: "bool"}
OF_REALS = {
    "add": "{0} + {1}",
    "subtract": "{0} - {1}",
    "multiply": "{0} * {1}",
    "divide": "{0} / {1}",
    "negative": "-{0}",
    "abs": "magnitude({0})",
    "exp": "exp_of({0})",
    "exp2": "exp2_approx({0})",
    "log": "log_accurate({0})",
    "log2": "log_accurate({0}) * kLog2E",
    "sqrt": "square_root({0})",
    "rsqrt": "reciprocal_square_root({0})",
    "tanh": "tanh_accurate({0})",
    "erf": "erf_accurate({0})",
    "sigmoid": "sigmoid({0})",
    "gelu": "gelu({0})",
    "gelu_tanh": "gelu_tanh({0})",
    "sin": "sine({0})",
    "cos": "cosine({0})",
    "floor": "whole_below({0})",
    "float16": "to_float(from_float<half>({0}))",
    "bfloat16": "to_float(from_float<bf16>({0}))",
    **dict.fromkeys(REDUCTIONS, "{0}"),  # reduced by RowResults
}
ROWS = {"row_max": "RowMax", "row_sum": "RowSum"}  # expression/row_results.cuh
OF_INTEGERS = {  # arithmetic wraps, like numpy's
    "add": "wrap(uint64_t({0}) + uint64_t({1}))",
    "subtract": "wrap(uint64_t({0}) - uint64_t({1}))",
    "multiply": "wrap(uint64_t({0}) * uint64_t({1}))",
    "negative": "wrap(-uint64_t({0}))",
    "floor_divide": "floor_divide({0}, {1})",
    "modulo": "floor_modulo({0}, {1})",
    "abs": "({0} < 0 ? wrap(-uint64_t({0})) : {0})",
}
OF_BOTH = {
    "minimum": "smaller_of({0}, {1})",
    "maximum": "larger_of({0}, {1})",
    "where": "{0} ? {1} : {2}",
    "real": "float({0})",
    "isnan": "{0} != {0}",
    "less": "{0} < {1}",
    "less_equal": "{0} <= {1}",
    "equal": "{0} == {1}",
    "not_equal": "{0} != {1}",
    "and": "{0} && {1}",
    "or": "{0} || {1}",
    "not": "!{0}",
}


class OperandCode(NamedTuple):
    """How an operand is read.

    cpp: the C++ type of its elements; None for a number.
    rows, cols: whether it varies along rows and columns.
    """

    cpp: str | None = None
    rows: bool = False
    cols: bool = False


def source(
    nodes: Sequence[Node],
    operands: Sequence[OperandCode],
    scope: str = "epilogue",
    roots: Sequence[int] = (),
    more: Sequence[str] = (),
    narrow: str = "void",
) -> str:
    """The struct Expression, with its includes.

    scope: "epilogue" or "gate".  roots: the result nodes if there are several.  more: the C++ types
    of results after the first, which take the slots after the operands; for reductions FP32
    partials.  narrow: the C++ type of an 8-bit first result, else void.
    """
    products = ", ".join(f"float {x}" for x, kind in SCOPES[scope].names.items() if kind == REAL)
    first = len(operands) - 1
    body = [f"        const float x{k} = x.template get<{k}>();" for k in range(len(operands))]
    values: list[str] = []
    for node in nodes:
        code = _code(node, [values[arg] for arg in node.args])
        if node.args:
            name = f"t{len(values)}"
            body.append(f"        const {_TYPES[node.kind]} {name} = {code};")
            code = name
        values.append(code)
    stores: list[str] = []
    rows: list[str] = []
    for k, t in enumerate(more, 1):
        if nodes[roots[k]].op in REDUCTIONS:
            kind = ROWS[nodes[roots[k]].op]
            rows.append(f"RowResult<{kind}, {len(rows)}, {k}, {first + k}>")
        else:
            stores.append(f"        f.template store<{t}>({k}, {first + k});")
    lines = (
        '#include "expression/math.cuh"',
        '#include "expression/operand.cuh"',
        '#include "expression/row_results.cuh"',
        "struct Expression {",
        f"    using Operands = OperandList<{', '.join(map(_operand, operands))}>;",
        "    // f.store<type>(which, number) of the matrices after the first result.",
        "    template <class F> DEVICE static void for_each_more(const F& f) {",
        *stores,
        "    }",
        f"    using Rows = RowResults<{', '.join(rows)}>;  // reductions of columns",
        f"    static constexpr int kResults = {len(more) + 1};",
        f"    using Narrow = {narrow};  // the first result's type, if it is of 8 bits",
        "    template <class X>",
        f"    DEVICE static void of(const X& x, {products}, int64_t i, int64_t j, int64_t b,",
        "                          float (&results)[kResults]) {",
        *body,
        *(f"        results[{k}] = {values[n]};" for k, n in enumerate(roots or (len(nodes) - 1,))),
        "    }",
        "};",
    )
    return "\n".join(lines) + "\n"


def _operand(operand: OperandCode) -> str:
    if operand.cpp is None:
        return "NumberOperand"
    rows, cols = (str(varies).lower() for varies in (operand.rows, operand.cols))
    return f"ArrayOperand<{operand.cpp}, {rows}, {cols}>"


def _code(node: Node, args: list[str]) -> str:
    if node.op == "literal":
        if node.kind == INTEGER:
            return f"int64_t({node.value}ll)"
        return f"({float(np.float32(node.number)).hex()}f)"
    if node.op == "name":
        return node.value
    if node.op == "operand":
        return f"x{node.value}"
    table = OF_BOTH if node.op in OF_BOTH else OF_REALS
    if node.op not in OF_BOTH and node.kind == INTEGER:
        table = OF_INTEGERS
    return table[node.op].format(*args)
