"""FP32 errors of an expression, by running error analysis of its tree.

A forward pass gives the largest errors: each operation's rounding, plus its arguments' errors times
the largest slope within them.  The bound ends where an argument's error reaches a pole or FP32
overflows.  Where the error reaches a jump, the bound includes both sides.  A backward pass gives
the expected errors: the square of each rounding times the square of the result's slope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..expression import Expression, read
from ..expression.tree import BOOLEAN, INTEGER, REAL, REDUCTIONS, Node
from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace
from ..op import Bound
from ..typing import Array, Namespace
from .approximate import FLOOR, Approximate
from .expression import RANGES, Environment, each, evaluate, operand, rounded_to
from .expression_functions import FUNCTIONS, at_zero
from .expression_rows import Terms, reduced
from .rounding import inexact_rms, over_normal, rounding_rms

U = UNIT_ROUNDOFF_32
_MOST = finfo("float32").max
_CASTS = {"float16": dtypes.float16, "bfloat16": dtypes.bfloat16}


class Error(NamedTuple):
    """The error of one node.

    worst, floor: see Approximate.  free: where the bound ends.
    unsure: where a boolean may differ, or a jump may be taken; no error is expected there.
    square: the expected square of the node's own rounding.
    """

    worst: Any
    floor: Any
    free: Any
    unsure: Any
    square: Any

    @property
    def size(self) -> Any:
        return self.worst + self.floor


def expression_bound(
    acc: Approximate,
    epilogue: Any,
    operands: Mapping[str, Any] | None,
    out_dtype: Any,
    reference: tuple[Array, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the results of a formula of a product.

    out_dtype: the dtype of the results, or a tuple with one per result.
    """
    return bound_of_products({"acc": acc}, read(epilogue), operands, out_dtype, reference)


def gate_bound(
    acc1: Approximate,
    acc2: Approximate,
    epilogue: Any,
    operands: Mapping[str, Any] | None,
    out_dtype: Any,
    reference: tuple[Array, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the results of a formula of two products, like expression_bound."""
    products = {"acc1": acc1, "acc2": acc2}
    return bound_of_products(products, read(epilogue, "gate"), operands, out_dtype, reference)


def bound_of_products(
    products: Mapping[str, Approximate],
    formula: Expression,
    operands: Mapping[str, Any] | None,
    out_dtype: Any,
    reference: tuple[Array, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of the results of a formula of products by name."""
    exact = {name: acc.exact for name, acc in products.items()}
    acc = next(iter(exact.values()))
    shape = acc.shape
    given = [operand(acc, (operands or {})[name]) for name in formula.names]
    kinds = each(out_dtype, len(reference))
    with np.errstate(all="ignore"):
        nodes, environment = formula.nodes, Environment.of_products(exact, given)
        values, errors = propagate_all(nodes, environment, products)
        axes = tuple({axis for acc in products.values() for axis in acc.axes})
        # Separate the formula's roundings from the errors that come from the products.
        exact_products = {name: acc._replace(square=0.0) for name, acc in products.items()}
        _, roundings = propagate_all(nodes, environment, exact_products)
        of_products = [
            (_of_product(nodes, environment, values, formula.results, name, acc), acc)
            for name, acc in products.items()
        ]

        def bound(i: int, dtype: Any) -> Bound:
            root = formula.results[i]
            square = _expected(environment.xp, nodes, values, roundings, root)
            shared: Any = 0.0
            for squares, acc in of_products:
                square = square + squares[i]
                shared = shared + squares[i] * acc.shared_part
            reduction = formula.reductions[i]
            if reduction is not None:
                terms = _terms(environment.xp, values[root], errors[root], square, shape)
                return _of_rows(environment.xp, reduction, terms, axes, reference[i])
            dtype = np.dtype(dtypes.NAMES.get(dtype, dtype))
            found = _bound(errors[root], square, shared, axes, dtype, reference[i])
            if dtype in RANGES:
                found = _saturated(found, values[root], errors[root], dtype)
            return found

        return tuple(bound(i, dtype) for i, dtype in enumerate(kinds))


def _of_product(
    nodes: Sequence[Node],
    given: Environment,
    values: Sequence[Any],
    results: Sequence[int],
    name: str,
    acc: Approximate,
) -> list[Any]:
    """Return the expected squares of the results' errors from the errors of product `name`."""
    xp = given.xp
    rms, worst = xp.sqrt(acc.square) + xp.zeros_like(acc.exact), acc.worst + acc.floor
    if not bool((rms > 0).any()):
        return [rms] * len(results)

    def change(e: Any) -> list[Any]:
        off = evaluate(nodes, given._replace(names={**given.names, name: acc.exact + e}))
        return [xp.where(rms > 0, off[n] - values[n], 0.0) for n in results]

    return [square for _, square in over_normal(change, rms, worst)]


def _bound(
    error: Error,
    square: Any,
    shared: Any,
    axes: tuple[int, ...],
    dtype: np.dtype,
    reference: Array,
) -> Bound:
    """Return the Bound of a result stored as `dtype`.

    square: the expected square of its error.  shared: the part common to all elements along `axes`.
    """
    xp, shape = namespace(reference), reference.shape
    worst, floor = (xp.broadcast_to(z, shape) for z in (error.worst, error.floor))
    free, unsure = (xp.broadcast_to(z, shape) for z in (error.free, error.unsure))
    known = xp.isfinite(square) & xp.isfinite(reference) & ~free & ~unsure
    shared = xp.broadcast_to(xp.where(known, xp.maximum(shared, 0.0), 0.0), shape) if axes else 0.0
    # A literal's error is exact; a result's error is at least its rounding.
    square = xp.maximum(square, inexact_rms(reference) ** 2)
    square = xp.broadcast_to(xp.where(known, square, 0.0), shape)
    y = Approximate(reference, worst, floor, square, math.inf, shared, axes)
    bound = y.stored(reference, dtype)
    known = xp.broadcast_to(known, shape)
    return bound._replace(
        elementwise=xp.where(free, math.inf, bound.elementwise),
        rms=xp.where(known, bound.rms, 0.0),
        free=free,
    )


def _terms(xp: Namespace, values: Any, error: Error, square: Any, shape: tuple[int, ...]) -> Terms:
    """Return the terms of a row reduction, broadcast to `shape`."""
    of_error = error.worst, error.floor, error.free, error.unsure
    found = Terms(values, *of_error, xp.where(xp.isfinite(square), square, 0.0))
    return Terms(*(xp.broadcast_to(x, shape) for x in found))


def _of_rows(
    xp: Namespace, reduction: str, terms: Terms, axes: tuple[int, ...], reference: Array
) -> Bound:
    """Return the Bound of a row reduction in FP32."""
    rows = reduced(xp, reduction, terms)
    error = Error(rows.worst, rows.floor, rows.free, rows.unsure, rows.square)
    # The part of the errors common to all rows is not derived: assume all of it.
    return _bound(error, rows.square, rows.square, axes, dtypes.float32, reference)


def _saturated(bound: Bound, y: Any, error: Error, dtype: np.dtype) -> Bound:
    """Return the Bound of a saturated result; y is its value before saturation.

    There is no error where y saturates with certainty.
    """
    xp, (low, high), size = namespace(bound.elementwise), RANGES[dtype], error.size
    beyond = (y - size >= high) | (y + size <= low)
    return bound._replace(
        elementwise=xp.where(beyond & ~bound.free, 0.0, bound.elementwise),
        rms=xp.where((y - size < low) | (y + size > high) | xp.isnan(y), 0.0, bound.rms),
    )


def propagate(
    nodes: Sequence[Node], given: Environment, inexact: Mapping[str, Approximate]
) -> tuple[Error, Any]:
    """Return (error, expected square) of the last node; inexact: the names with errors."""
    values, errors = propagate_all(nodes, given, inexact)
    return errors[-1], _expected(given.xp, nodes, values, errors, len(nodes) - 1)


def propagate_all(
    nodes: Sequence[Node], given: Environment, inexact: Mapping[str, Approximate]
) -> tuple[list[Any], list[Error]]:
    """Return (values, errors) of all nodes."""
    xp, values = given.xp, evaluate(nodes, given)
    zero, no = xp.asarray(0.0), xp.asarray(False)
    none = Error(zero, zero, no, no, zero)
    errors: list[Error] = []
    for node, y in zip(nodes, values, strict=True):
        args = [(values[arg], errors[arg]) for arg in node.args]
        errors.append(_finite(xp, node, y, _error(xp, none, node, y, args, inexact)))
    return values, errors


Argument = tuple[Any, Error]


def _error(
    xp: Namespace,
    none: Error,
    node: Node,
    y: Any,
    args: Sequence[Argument],
    inexact: Mapping[str, Approximate],
) -> Error:
    """Return the error of a node with value y; none: an Error of zeros."""
    if node.op == "name" and node.value in inexact:
        x = inexact[node.value]
        return none._replace(worst=x.worst, floor=x.floor, square=x.square)
    if node.op in ("operand", "load"):  # subnormals may be flushed to zero
        return none._replace(floor=xp.where(xp.abs(y) < FLOOR, xp.abs(y), 0.0))
    if node.kind == BOOLEAN:
        return none._replace(unsure=_unsure(xp, node, args))
    if node.kind == INTEGER:
        return none
    if node.op == "literal":
        off = none.worst + abs(float(np.float32(node.number)) - node.number)
        return none._replace(worst=off, square=off**2)
    if node.op == "real":
        return _rounded(xp, y, none, xp.where(xp.abs(y) > 2.0**24, U, 0.0))
    if node.op == "where":
        return _chosen(xp, none, *args)
    before = none
    for _, error in args:
        before = before._replace(free=before.free | error.free, unsure=before.unsure | error.unsure)
    if node.op in REDUCTIONS:  # the error of the terms
        return args[0][1]._replace(square=none.square)
    if node.op in ("minimum", "maximum"):
        worst, floor = _extreme(xp, node.op, args)
        return before._replace(worst=worst, floor=floor)
    (a, of_a), (b, of_b) = args[0], args[-1]
    if node.op == "floor":
        step = _farther(xp, y, xp.floor(a - of_a.size), xp.floor(a + of_a.size))
        return before._replace(worst=step, unsure=before.unsure | (step > 0))
    if node.op in _CASTS:
        ends = (rounded_to(xp, x, _CASTS[node.op]) for x in (a - of_a.size, a + of_a.size))
        step = _farther(xp, y, *ends)
        known = xp.isfinite(step) | ~xp.isfinite(a)
        return before._replace(
            worst=xp.where(known, step, 0.0),
            floor=none.floor + (FLOOR if node.op == "bfloat16" else 0.0),
            free=before.free | ~known,  # one end overflows
            unsure=before.unsure | (step > 0),
        )
    if node.op in ("add", "subtract"):
        before = before._replace(worst=of_a.worst + of_b.worst, floor=of_a.floor + of_b.floor)
        return _rounded(xp, y, before, U)
    if node.op == "multiply":
        size_a, size_b = xp.abs(a), xp.abs(b)
        zeros = (xp.isinf(a) & at_zero(xp, b, of_b.size)) | (
            xp.isinf(b) & at_zero(xp, a, of_a.size)
        )
        before = before._replace(
            worst=size_a * of_b.worst + size_b * of_a.worst + of_a.size * of_b.size,
            floor=size_a * of_b.floor + size_b * of_a.floor,
            free=before.free | zeros,
        )
        return _rounded(xp, y, before, U)
    if node.op == "divide":
        least = xp.abs(b) - of_b.size
        before = before._replace(
            worst=(of_a.worst + xp.abs(y) * of_b.worst) / least,
            floor=(of_a.floor + xp.abs(y) * of_b.floor) / least,
            free=before.free | (xp.abs(b) <= of_b.size),  # also at 0, whose sign is unknown
        )
        return _rounded(xp, y, before, U)
    f = FUNCTIONS[node.op]
    steepest = xp.where(of_a.size > 0, f.steepest(xp, a, y, of_a.size), 0.0)
    before = before._replace(
        worst=steepest * of_a.worst,
        floor=steepest * of_a.floor,
        free=before.free | f.ends(xp, a, of_a.size),
    )
    if node.op in ("abs", "negative"):
        return before
    rounded = _rounded(xp, y, before, f.relative(xp, a, of_a.size), f.rms(xp, a))
    own = f.absolute(xp, xp.abs(a) + of_a.size)
    return rounded._replace(worst=rounded.worst + own * (1 + 2.0**-20))


def _rounded(xp: Namespace, y: Any, before: Error, relative: Any, rms: Any = None) -> Error:
    """Return the errors `before` plus the rounding of y.  rms: relative; None: one rounding."""
    if rms is None:
        own = xp.where(before.worst > 0, rounding_rms(y), inexact_rms(y))
    else:
        own = xp.maximum(rms * xp.abs(y), inexact_rms(y))
    own_worst = relative * (xp.abs(y) + before.size) * (1 + 2.0**-20)
    floor = before.floor + 2 * FLOOR * (relative > 0)
    return before._replace(worst=before.worst + own_worst, floor=floor, square=own**2)


def _finite(xp: Namespace, node: Node, y: Any, error: Error) -> Error:
    """Clear the error where y is not finite; end the bound where FP32 overflows."""
    if node.kind != REAL:
        return error
    finite = xp.isfinite(y)
    overflows = finite & ~(xp.abs(y) + error.size < _MOST)
    free = error.free | overflows
    worst, floor, square = (
        xp.where(finite, z, 0.0) for z in (error.worst, error.floor, error.square)
    )
    return Error(worst, floor, free, error.unsure, square)


def _unsure(xp: Namespace, node: Node, args: Sequence[Argument]) -> Any:
    """Return where a boolean may differ."""
    if node.op == "where":
        (chosen, of_choice), (x, of_x), (z, of_z) = args
        either = (x != z) | of_x.unsure | of_z.unsure
        return xp.where(chosen, of_x.unsure, of_z.unsure) | (of_choice.unsure & either)
    (a, of_a), (b, of_b) = args[0], args[-1]
    if node.op in ("isnan", "not"):
        return of_a.free if node.op == "isnan" else of_a.unsure
    if node.op in ("and", "or"):
        # A certain False decides `and`; a certain True decides `or`.
        decides_a, decides_b = (~x if node.op == "and" else x for x in (a, b))
        return (of_a.unsure & ~(decides_b & ~of_b.unsure)) | (
            of_b.unsure & ~(decides_a & ~of_a.unsure)
        )
    reach = of_a.size + of_b.size
    return of_a.free | of_b.free | ((xp.abs(a - b) <= reach) & (reach > 0))


def _chosen(xp: Namespace, none: Error, condition: Argument, a: Argument, b: Argument) -> Error:
    (chosen, of_choice), (x, of_x), (z, of_z) = condition, a, b

    def pick(first: Any, second: Any) -> Any:
        return xp.where(chosen, first, second)

    unsure = of_choice.unsure
    apart = xp.where((x == z) | (xp.isnan(x) & xp.isnan(z)), 0.0, xp.abs(x - z))
    other = xp.where(unsure, apart + pick(of_z.size, of_x.size), 0.0)
    free = pick(of_x.free, of_z.free) | (unsure & (of_x.free | of_z.free | ~xp.isfinite(apart)))
    return Error(
        xp.maximum(pick(of_x.worst, of_z.worst), other),
        pick(of_x.floor, of_z.floor),
        free,
        unsure | pick(of_x.unsure, of_z.unsure),
        none.square,
    )


def _extreme(xp: Namespace, op: str, args: Sequence[Argument]) -> tuple[Any, Any]:
    """Return (worst, floor) of minimum and maximum."""
    (a, of_a), (b, of_b) = args
    if op == "minimum":
        a, b = -a, -b
    first, second = a - of_a.size > b + of_b.size, b - of_b.size > a + of_a.size

    def pick(x: Any, z: Any) -> Any:
        return xp.where(first, x, xp.where(second, z, xp.maximum(x, z)))

    return pick(of_a.worst, of_b.worst), pick(of_a.floor, of_b.floor)


def _farther(xp: Namespace, y: Any, low: Any, high: Any) -> Any:
    return xp.maximum(
        xp.where(low == y, 0.0, xp.abs(y - low)), xp.where(high == y, 0.0, xp.abs(high - y))
    )


# --- expected errors ----------------------------------------------------------------------------


def _expected(
    xp: Namespace,
    nodes: Sequence[Node],
    values: Sequence[Any],
    errors: Sequence[Error],
    root: int,
) -> Any:
    """Return the expected square of the error of the node `root`."""
    slopes = [xp.asarray(0.0)] * len(nodes)  # derivatives of the root by each node
    slopes[root] = slopes[root] + 1.0
    total: Any = 0.0
    for n in reversed(range(root + 1)):
        node, slope = nodes[n], slopes[n]
        total = total + xp.where(slope == 0, 0.0, slope**2 * errors[n].square)
        if node.kind != REAL or node.op == "real":
            continue
        args = [values[arg] for arg in node.args]
        for arg, own in zip(node.args, _slopes(xp, node, values[n], args), strict=True):
            slopes[arg] = slopes[arg] + xp.where(slope == 0, 0.0, slope * own)
    return total


def _slopes(xp: Namespace, node: Node, y: Any, args: Sequence[Any]) -> list[Any]:
    """Return the derivatives of one operation by its arguments."""
    op = node.op
    if op in REDUCTIONS:
        return [1.0]
    if op in ("add", "subtract"):
        return [1.0, 1.0 if op == "add" else -1.0]
    if op == "multiply":
        return [args[1], args[0]]
    if op == "divide":
        return [1 / args[1], -y / args[1]]
    if op in ("minimum", "maximum"):
        first = args[0] > args[1] if op == "maximum" else args[0] < args[1]
        return [xp.where(first, 1.0, 0.0), xp.where(first, 0.0, 1.0)]
    if op == "where":
        return [xp.asarray(0.0), xp.where(args[0], 1.0, 0.0), xp.where(args[0], 0.0, 1.0)]
    if op == "floor" or op in _CASTS:
        return [0.0]
    if op == "load":
        return [0.0] * len(args)
    return [FUNCTIONS[op].slope(xp, args[0], y)] if args else []
