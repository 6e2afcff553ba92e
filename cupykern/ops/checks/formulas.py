"""Epilogue formulas of products and their operands: read from arguments and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import arguments, dtypes
from ...arrays import transposed_addend
from ...expression import Expression, read
from ...expression.cpp import OF_INTEGER_ARRAYS
from ...expression.expression import reductions
from ...expression.parse import is_operand_name
from ...expression.tree import Node, of_first, transposed
from ...gemm.product import NARROW, OPERANDS, Formula
from ...numerics import namespace
from ...typing import Array, FormulaLike, ResultDTypes

DTYPES = (
    *(dtypes.float16, dtypes.bfloat16, dtypes.float32),
    *(dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.int8),
)
OPERAND_DTYPES = *DTYPES, *OF_INTEGER_ARRAYS
"""Dtypes of formula operands; they are converted to FP32."""


class ReadFormula(NamedTuple):
    """An expression with its operands.

    key: what plans.find needs besides the arrays.  arrays: as given, in the order of first use.
    numbers: values in the order of `names`, None for an array.  scope, roots: see Expression.
    """

    key: tuple[Any, ...]
    arrays: tuple[Any, ...]
    nodes: tuple[Node, ...] = ()
    names: tuple[str, ...] = ()
    numbers: tuple[float | None, ...] = ()
    scope: str = "epilogue"
    roots: tuple[int, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for launch.run."""
        if not self.nodes:
            return {}
        operands = *self.numbers, *(None for _ in self.roots[1:])
        return {"formula": Formula(self.nodes, operands, self.scope, self.roots)}

    @property
    def result_dtypes(self) -> tuple[np.dtype, ...]:
        """The result dtypes that only a formula allows."""
        return NARROW if self.nodes else ()

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays' names in product.OPERANDS."""
        named = zip(OPERANDS, self.numbers, strict=False)
        return tuple(name for name, number in named if number is None)

    @property
    def reduces_rows(self) -> bool:
        """Whether any result is a row reduction."""
        return any(reductions(self.nodes, self.roots))

    def given(self) -> tuple[Expression, dict[str, Any]]:
        """(epilogue, operands), the arguments of `matmul` that give this formula."""
        arrays = iter(self.arrays)
        operands = {
            name: next(arrays) if number is None else number
            for name, number in zip(self.names, self.numbers, strict=True)
        }
        return Expression(self.nodes, self.names, self.scope, self.roots), operands

    def transposed(self) -> tuple[Expression | None, dict[str, Any] | None]:
        """(epilogue, operands) for the transposed product."""
        if not self.nodes:
            return None, None
        _, given = self.given()
        operands = {
            name: transposed_addend(x) if number is None else x
            for (name, x), number in zip(given.items(), self.numbers, strict=True)
        }
        return Expression(transposed(self.nodes), self.names, roots=self.roots), operands

    def with_second(self, product: Array) -> ReadFormula:
        """The gate as the epilogue of the first product, with the second product as an operand."""
        return self._replace(
            arrays=(*self.arrays, product),
            nodes=of_first(self.nodes, len(self.names)),
            names=(*self.names, "acc2"),
            numbers=(*self.numbers, None),
            scope="epilogue",
        )

    def broadcast(self, a: Array, shape: tuple[int, ...]) -> dict[str, Array]:
        """The arrays, broadcast to `shape`, by their names in product.OPERANDS.

        Raises TypeError and ValueError.
        """
        named = (n for n, number in zip(self.names, self.numbers, strict=True) if number is None)
        return {
            x_name: _broadcast(f"operands[{name!r}]", x, a, shape)
            for x_name, name, x in zip(self.array_names, named, self.arrays, strict=True)
        }

    def check_alone(self, **others: Any) -> None:
        """Raise ValueError if another epilogue argument is given beside the formula."""
        for name, value in others.items():
            if self.nodes and value is not None:
                raise ValueError(f"{name} must be None beside epilogue, which is a formula of it")


NO_FORMULA = ReadFormula((), ())


def each_dtype(formula: ReadFormula, out_dtype: ResultDTypes) -> tuple[Any, ...]:
    """The out_dtype of each result; row reductions are float32.

    Raises TypeError and ValueError.
    """
    count = max(1, len(formula.roots))
    rows = reductions(formula.nodes, formula.roots) or (None,)
    if not isinstance(out_dtype, tuple):
        return tuple("float32" if reduction else out_dtype for reduction in rows)
    if len(out_dtype) != count:
        raise ValueError(
            f"out_dtype must be a dtype, or one for each of the formula's results, which are "
            f"{count}; got {len(out_dtype)}"
        )
    for reduction, dtype in zip(rows, out_dtype, strict=True):
        if reduction and dtype is not None:
            dtypes.resolve(dtype, f"out_dtype of {reduction}(...)", (dtypes.float32,))
    return tuple(
        "float32" if reduction else dtype for reduction, dtype in zip(rows, out_dtype, strict=True)
    )


def read_formula(
    epilogue: FormulaLike | None, operands: Any, a: Array, scope: str = "epilogue"
) -> ReadFormula:
    """Read a formula and its operands.

    Raises SyntaxError, NameError, TypeError and ValueError.
    """
    if epilogue is None:
        raise ValueError("operands are those of epilogue, which is None")
    expression = read(epilogue, scope)
    given = {} if operands is None else operands
    if not isinstance(given, dict):
        raise TypeError(f"operands must be a dict; got {type(operands).__name__}")
    if given.keys() != set(expression.names):
        _check_names(given, scope)
        expression.check_names(given)
        unused = ", ".join(repr(name) for name in given if name not in expression.names)
        raise ValueError(f"the epilogue does not name {unused}, which operands has")
    most = len(OPERANDS) - (scope == "gate") - len(expression.roots[1:])  # with_second
    if len(given) > most:
        beside = f" beside {len(expression.roots)} results" if expression.roots else ""
        raise ValueError(f"operands must be at most {most}{beside}; got {len(given)}")
    values = [given[name] for name in expression.names]
    numbers = tuple(
        arguments.number_of(f"operands[{name!r}]", x) if arguments.is_number(x, a) else None
        for name, x in zip(expression.names, values, strict=True)
    )
    arrays = tuple(x for x, number in zip(values, numbers, strict=True) if number is None)
    key = expression.digest, *numbers
    return ReadFormula(
        key, arrays, expression.nodes, expression.names, numbers, scope, expression.roots
    )


def _check_names(given: dict[Any, Any], scope: str) -> None:
    for name in given:
        if not is_operand_name(name, scope):
            raise ValueError(f"operands must have names that are free; got {name!r}")


def _broadcast(name: str, x: Array, a: Array, shape: tuple[int, ...]) -> Array:
    arguments.same_place(name, x, a, "a")
    if x.dtype not in OPERAND_DTYPES:
        allowed = ", ".join(str(dtype) for dtype in OPERAND_DTYPES)
        raise TypeError(f"{name}'s dtype must be one of {allowed}; got {x.dtype}")
    try:
        return namespace(a).broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {shape}; got shape {x.shape}") from None
