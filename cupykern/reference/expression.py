"""Evaluation of expressions in FP64, with numpy or CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..expression import Expression, read
from ..expression.tree import INTEGER, REDUCTIONS, Node
from ..numerics import as_float64, finfo, gap, namespace
from ..typing import Array, Namespace
from .activations import ACTIVATIONS, erf, sigmoid
from .expression_rows import reduce_rows

RANGES = {
    dtypes.float8_e4m3fn: (-448.0, 448.0),
    dtypes.float8_e5m2: (-57344.0, 57344.0),
    dtypes.int8: (-128.0, 127.0),
}
"""The ranges that results of formulas saturate to."""


def rounded_to(xp: Namespace, x: Any, dtype: np.dtype) -> Any:
    """Return x (FP64) rounded to nearest even in `dtype`."""
    spacing = gap(x, dtype)
    y = xp.rint(x / spacing) * spacing
    y = xp.where(xp.abs(y) > finfo(dtype).max, xp.copysign(math.inf, x), y)
    return xp.where(xp.isfinite(x), y, x)


_REALS_OF_XP = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor", "isnan")
_OF_XP = {
    **{name: name for name in (*_REALS_OF_XP, "add", "subtract", "multiply", "divide", "abs")},
    **{name: name for name in ("floor_divide", "negative", "minimum", "maximum", "where")},
    **{name: name for name in ("less", "less_equal", "equal", "not_equal")},
    "modulo": "remainder",
    "and": "logical_and",
    "or": "logical_or",
    "not": "logical_not",
}
_OTHERS: dict[str, Callable[[Namespace, Any], Any]] = {
    "real": lambda xp, x: x.astype(np.float64),
    **dict.fromkeys(REDUCTIONS, lambda xp, x: x),  # of the terms; see reduce_rows
    "rsqrt": lambda xp, x: 1 / xp.sqrt(x),
    "sigmoid": sigmoid,
    "erf": erf,
    **{name: ACTIVATIONS[name].value for name in ("gelu", "gelu_tanh")},
    "float16": lambda xp, x: rounded_to(xp, x, dtypes.float16),
    "bfloat16": lambda xp, x: rounded_to(xp, x, dtypes.bfloat16),
}


def saturated(x: Array, dtype: Any) -> Any:
    """Return x (FP64) saturated to the range of an 8-bit `dtype`; NaN becomes 0 in int8."""
    xp, dtype = namespace(x), np.dtype(dtypes.NAMES.get(dtype, dtype))
    if dtype not in RANGES:
        return x
    y = xp.clip(x, *RANGES[dtype])
    return xp.where(xp.isnan(y), 0.0, y) if dtype == dtypes.int8 else y


def expression(
    acc: Array, epilogue: Any, operands: Mapping[str, Any] | None, out_dtype: Any = None
) -> tuple[Any, ...]:
    """Return the results of a formula of the product `acc` in FP64, saturated to `out_dtype`."""
    return of_products({"acc": acc}, read(epilogue), operands, out_dtype)


def gate(
    acc1: Array,
    acc2: Array,
    epilogue: Any,
    operands: Mapping[str, Any] | None,
    out_dtype: Any = None,
) -> tuple[Any, ...]:
    """Return the results of a formula of two products, like `expression`."""
    return of_products({"acc1": acc1, "acc2": acc2}, read(epilogue, "gate"), operands, out_dtype)


def of_products(
    products: Mapping[str, Array],
    formula: Expression,
    operands: Mapping[str, Any] | None,
    out_dtype: Any,
) -> tuple[Any, ...]:
    """Return the results of a formula of FP64 products by name.

    out_dtype: one dtype, or a tuple with one per result.
    """
    acc = next(iter(products.values()))
    given = [operand(acc, (operands or {})[name]) for name in formula.names]
    with np.errstate(all="ignore"):
        values = evaluate(formula.nodes, Environment.of_products(products, given))
    xp = namespace(acc)
    kinds = each(out_dtype, len(formula.results))

    def result(n: int, reduction: str | None, kind: Any) -> Any:
        y = xp.broadcast_to(values[n], acc.shape) + 0.0
        with np.errstate(all="ignore"):
            return saturated(y, kind) if reduction is None else reduce_rows(xp, reduction, y)

    return tuple(map(result, formula.results, formula.reductions, kinds))


def each(out_dtype: Any, count: int) -> tuple[Any, ...]:
    """Return the dtypes of `count` results: a tuple, or one dtype repeated."""
    return out_dtype if isinstance(out_dtype, tuple) else (out_dtype,) * count


def operand(acc: Array, x: Any) -> Any:
    """Return an operand in FP64; integers and scalars are rounded to FP32 first."""
    xp = namespace(acc)
    if hasattr(x, "dtype") and x.ndim:
        return as_float64(x.astype(np.float32) if x.dtype.kind in "ib" else x)
    return xp.asarray(as_float64(x) if hasattr(x, "strides") else x, np.float32).astype(np.float64)


class Environment(NamedTuple):
    """Values of a tree's leaves: names (FP64 or int64) and operands (FP64)."""

    xp: Namespace
    names: Mapping[str, Any]
    operands: Sequence[Any]

    @classmethod
    def of_products(cls, products: Mapping[str, Array], operands: Sequence[Array]) -> Environment:
        """Take FP64 products (..., M, N) by name; operands broadcast to them."""
        acc = next(iter(products.values()))
        xp = namespace(acc)
        *batch, m, n = acc.shape
        matrices = xp.arange(math.prod(batch), dtype=np.int64).reshape(*batch, 1, 1)
        i, j = xp.arange(m, dtype=np.int64)[:, None], xp.arange(n, dtype=np.int64)
        return cls(xp, {**products, "i": i, "j": j, "b": matrices}, operands)


def evaluate(nodes: Sequence[Node], given: Environment) -> list[Any]:
    """Return the value of every node."""
    xp = given.xp
    values: list[Any] = []
    for node in nodes:
        args = [values[arg] for arg in node.args]
        if node.op in _OF_XP:
            value = getattr(xp, _OF_XP[node.op])(*args)
        elif node.op in _OTHERS:
            value = _OTHERS[node.op](xp, *args)
        else:
            value = _leaf(node, args, given)
        values.append(xp.asarray(value))
    return values


def _leaf(node: Node, args: Sequence[Any], given: Environment) -> Any:
    xp = given.xp
    if node.op == "literal":
        return xp.asarray(node.number, np.int64 if node.kind == INTEGER else np.float64)
    if node.op == "name":
        return given.names[node.value]
    array = given.operands[int(node.value)]
    if node.op == "operand":
        return array
    last = (size - 1 for size in array.shape)  # indices are clamped
    return array[tuple(xp.clip(arg, 0, size) for arg, size in zip(args, last, strict=True))]
