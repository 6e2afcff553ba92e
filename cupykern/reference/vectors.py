"""Vector operands of matrix products, like numpy.matmul: a 1-D a is a row, a 1-D b a column."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from ..numerics import namespace
from ..op import Bound

_ARRAYS = tuple(name for name in Bound._fields if name != "axis")
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_vectors(function: Function) -> Function:
    """Extend a reference or a bound of matrices a and b to vectors.

    The result lacks the axis of a vector.  Other array arguments broadcast to the result.
    """

    @functools.wraps(function)
    def wrapped(a: Any, b: Any, *, reference: Any = None, **options: Any) -> Any:
        given = options if reference is None else {**options, "reference": reference}
        if 1 not in (a.ndim, b.ndim):
            return function(a, b, **given)
        # The axes of the matrix product that the result lacks.
        dims = (-2,) * (a.ndim == 1) + (-1,) * (b.ndim == 1)
        x, y = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
        batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        shape = _without(dims, (*batch, x.shape[-2], y.shape[-1]))

        def lift(value: Any) -> Any:
            if not getattr(value, "ndim", 0):  # None or a scalar
                return value
            return _with(dims, namespace(value).broadcast_to(value, shape))

        for name in ("bias", "residual"):
            if name in given:
                given[name] = lift(given[name])
        if given.get("operands") is not None:
            given["operands"] = {name: lift(z) for name, z in given["operands"].items()}
        if reference is not None:
            given["reference"] = tuple(_with(dims, z) for z in reference)
        found = function(x, y, **given)
        if reference is None:
            return tuple(z.reshape(_without(dims, z.shape)) for z in found)
        return tuple(_bound(dims, z, of.shape) for z, of in zip(found, reference, strict=True))

    return cast(Function, wrapped)


def _with(dims: tuple[int, ...], x: Any) -> Any:
    return x[..., None, :] if dims == (-2,) else x[(..., *[None] * len(dims))]


def _without(dims: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for dim, n in zip(range(-len(shape), 0), shape, strict=True) if dim not in dims)


def _bound(dims: tuple[int, ...], bound: Bound, shape: tuple[int, ...]) -> Bound:
    """Return the Bound of a result of this shape from the Bound of the matrix product.

    In a complex product with a column, real and imaginary parts join the preceding axis.
    """
    whole: tuple[int, ...] = bound.elementwise.shape  # type: ignore[union-attr]  # an array
    is_complex = math.prod(whole) == 2 * math.prod(shape) > 0
    if is_complex:
        shape = (*shape[:-1], 2 * (shape[-1] if shape else 1))

    def of_result(x: Any) -> Any:
        if not getattr(x, "ndim", 0):
            return x
        return namespace(x).broadcast_to(x, whole).reshape(shape)

    def moved(axis: int) -> int:
        return min(axis + sum(axis <= dim for dim in dims), -1)

    axes = (bound.axis,) if isinstance(bound.axis, int) else bound.axis
    found = bound._replace(**{name: of_result(getattr(bound, name)) for name in _ARRAYS})
    return found._replace(axis=tuple({moved(axis) for axis in axes} if shape else ()))
