"""Build trees from Python callables by calling them with symbols in place of numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .tree import COMPARISONS, FUNCTIONS, SCOPES, Builder, IllegalError, Node, Scope

_UFUNCS = {
    **{name: name for name in (*FUNCTIONS, *COMPARISONS) if name not in ("abs", "where")},
    **{name: name for name in ("add", "subtract", "multiply", "divide", "floor_divide")},
    "absolute": "abs",
    "negative": "negative",
    "remainder": "modulo",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "invert": "not",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
}
"""Operations by the name of the numpy function."""


def trace(
    function: Callable[..., Any], scope: Scope = SCOPES["epilogue"]
) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[int, ...]]:
    """(nodes, operand names, result nodes) of the value or tuple that `function` returns.

    Its parameters are names of an expression: scope names, operands and functions.  A parameter
    with a default is that number, also in a functools.partial.  Raises TypeError for unsupported
    operations.
    """
    builder = Builder(scope)
    given: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin, such as max
        raise TypeError(f"a formula's parameters have names; {function!r} has none") from None
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"a formula's parameters have names; got {parameter}")
        if parameter.default is not parameter.empty:
            continue
        if name in FUNCTIONS:
            given[name] = _Function(builder, name)
        else:
            given[name] = Symbol(builder, builder.name(name))
    result = function(**given)
    try:
        results = result if isinstance(result, tuple) else (result,)
        return builder.finish(
            *(x.index if isinstance(x, Symbol) else builder.literal(x) for x in results)
        )
    except IllegalError as error:
        raise TypeError(f"the formula returns no result: {error}") from None


class _Function:
    def __init__(self, builder: Builder, op: str) -> None:
        self._builder, self._op = builder, op

    def __call__(self, *args: Any) -> Symbol:
        return _apply(self._builder, self._op, *args)


def _apply(builder: Builder, op: str, *args: Any) -> Symbol:
    try:
        indices = [x.index if isinstance(x, Symbol) else builder.literal(x) for x in args]
        return Symbol(builder, builder.apply(op, *indices))
    except IllegalError as error:
        raise TypeError(f"{op}: {error}") from None


def _binary(op: str, reflected: bool = False) -> Any:
    def method(self: Symbol, other: Any) -> Symbol:
        args = (other, self) if reflected else (self, other)
        return _apply(self.builder, op, *args)

    return method


def _unary(op: str) -> Any:
    return lambda self: _apply(self.builder, op, self)


class Symbol:
    """A value of a traced expression."""

    __slots__ = ("builder", "index")
    __hash__ = None  # type: ignore[assignment]  # == returns a Symbol

    def __init__(self, builder: Builder, index: int) -> None:
        self.builder, self.index = builder, index

    def __bool__(self) -> bool:
        raise TypeError(
            "what a formula computes is not known here: write where(condition, x, y), & | ~"
        )

    __add__, __radd__ = _binary("add"), _binary("add", True)
    __sub__, __rsub__ = _binary("subtract"), _binary("subtract", True)
    __mul__, __rmul__ = _binary("multiply"), _binary("multiply", True)
    __truediv__, __rtruediv__ = _binary("divide"), _binary("divide", True)
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _binary("floor_divide", True)
    __mod__, __rmod__ = _binary("modulo"), _binary("modulo", True)
    __and__, __rand__ = _binary("and"), _binary("and", True)
    __or__, __ror__ = _binary("or"), _binary("or", True)
    __lt__, __le__ = _binary("less"), _binary("less_equal")
    __gt__, __ge__ = _binary("greater"), _binary("greater_equal")
    __eq__, __ne__ = _binary("equal"), _binary("not_equal")
    __neg__, __abs__, __invert__ = _unary("negative"), _unary("abs"), _unary("not")

    def __float__(self) -> float:
        raise TypeError("Python's float() is of numbers: name `float` among the parameters")

    def __pos__(self) -> Symbol:
        return self

    def __getitem__(self, indices: Any) -> Symbol:
        node = self.builder.nodes[self.index]
        if node.op != "name":
            raise TypeError("only operands have indices")
        given = indices if isinstance(indices, tuple) else (indices,)
        try:
            found = (x.index if isinstance(x, Symbol) else self.builder.literal(x) for x in given)
            return Symbol(self.builder, self.builder.load(node.value, tuple(found)))
        except IllegalError as error:
            raise TypeError(f"{node.value}[...]: {error}") from None

    __iter__ = None  # otherwise iteration would call __getitem__ endlessly

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy functions of symbols: np.exp(acc), np.maximum(acc, 0)."""
        op = _UFUNCS.get(ufunc.__name__)
        if op is None or method != "__call__" or options:
            raise TypeError(f"an expression has no numpy.{ufunc.__name__}")
        return _apply(self.builder, op, *inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function.__name__ != "where" or kwargs:
            raise TypeError(f"an expression has no numpy.{function.__name__}")
        return _apply(self.builder, "where", *args)
