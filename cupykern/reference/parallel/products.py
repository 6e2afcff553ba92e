"""Matrix products with K split over ranks in FP64, and bounds of the errors of their sums.

Arguments that differ between ranks are sequences with one item per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from ... import dtypes
from ...numerics import as_float64, namespace
from ...op import Bound
from ...typing import Array
from ..accumulation import Products, product
from ..activations import activate
from ..approximate import Approximate
from ..dual_gemm import times
from ..epilogue import activated, epilogue_bound
from ..matmul import exact_product, scaled_product


def sum_in_order(values: Iterable[Approximate]) -> Approximate:
    """Return the FP32 sum of FP32 values, added in sequence.

    With e_r the error of value r and S_r the exact sum of values 0 to r, the sum's error is at most
    e_0 + sum over r >= 1 of (e_r + u |S_r|), to first order.
    """
    return reduce(_plus, values)


def _plus(a: Approximate, b: Approximate) -> Approximate:
    total = Approximate(*(x + y for x, y in zip(a, b, strict=True)))
    square = total.square + 2 * a.known * b.known
    return total._replace(square=square, axes=tuple({*a.axes, *b.axes})).rounded()


def all_reduce(x: Sequence[Array], **_: Any) -> tuple[Any]:
    """Return the sum of all ranks' x in FP64.

    >>> ranks = [np.float16([1, 2]), np.float16([0.5, 4])]
    >>> reference.parallel.all_reduce(ranks)[0].tolist()
    [1.5, 6.0]
    """
    return (sum(as_float64(part) for part in x),)


def all_reduce_bound(
    x: Sequence[Array], *, dtype: Any = None, reference: tuple[Any]
) -> tuple[Bound]:
    """Return the Bound: FP32 additions in rank order, and a rounding to the result's dtype.

    >>> ranks = [np.float32([0.1, 2]), np.float32([0.2, 1e9])]
    >>> exact = reference.parallel.all_reduce(ranks)
    >>> (bound,) = reference.parallel.all_reduce_bound(ranks, reference=exact)
    >>> bool((abs(ranks[0] + ranks[1] - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        total = sum_in_order(of_numbers(as_float64(part)) for part in x)
        result = x[0].dtype if dtype is None else np.dtype(dtypes.NAMES.get(dtype, dtype))
        return (total.stored(reference[0], result),)


def reduce_scatter_bound(x: Sequence[Array], *, reference: tuple[Any]) -> tuple[Bound]:
    """Return the Bound of all_reduce in FP32, without the last rounding, for all rows.

    >>> ranks = [np.float16([[0.1, 2]]), np.float16([[0.2, 3000]])]
    >>> exact = reference.parallel.all_reduce(ranks)
    >>> (bound,) = reference.parallel.reduce_scatter_bound(ranks, reference=exact)
    >>> total = ranks[0].astype(np.float32) + ranks[1]
    >>> bool((abs(total - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        total = sum_in_order(of_numbers(as_float64(part)) for part in x)
        return (total.stored(reference[0], dtypes.float32),)


def of_numbers(x: Any) -> Approximate:
    """Return x without errors."""
    zeros = namespace(x).zeros_like(x)
    return Approximate(x, zeros, zeros, zeros, zeros)


def row_parallel_matmul(
    a: Sequence[Array],
    b: Sequence[Array],
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: float = 1.0,
    **_: Any,
) -> tuple[Any]:
    """Return activation(alpha * sum(a @ b) + bias) + residual in FP64.

    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> left, right = [a[:, :1], a[:, 1:]], [a[:1], a[1:]]  # of two ranks, a part of k each
    >>> reference.parallel.row_parallel_matmul(left, right, bias=np.ones(2))[0].tolist()
    [[8.0, 11.0], [16.0, 23.0]]
    """
    with np.errstate(all="ignore"):
        parts = zip(a, b, strict=True)
        total = float(alpha) * sum(product(as_float64(x), as_float64(y)) for x, y in parts)
        return (_epilogue(total, bias, activation, residual),)


def row_parallel_matmul_bound(
    a: Sequence[Array],
    b: Sequence[Array],
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: float = 1.0,
    out_dtype: Any = None,
    precision: str = "float32",
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound: errors of the ranks' products, of the bias added by rank 0, of the sums in
    rank order (`sum_in_order`), and of the epilogue.

    >>> a = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float16)
    >>> exact = reference.parallel.row_parallel_matmul([a], [a])
    >>> (bound,) = reference.parallel.row_parallel_matmul_bound([a], [a], reference=exact)
    >>> c = parallel.row_parallel_matmul(parallel.SelfCommunicator(), a, a)
    >>> bool((abs(c - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        values = [
            _of_rank(x, y, float(alpha), precision, bias if rank == 0 else None)
            for rank, (x, y) in enumerate(zip(a, b, strict=True))
        ]
        dtype = _result(a[0], out_dtype)
        return (
            epilogue_bound(sum_in_order(values), None, activation, residual, dtype, reference[0]),
        )


def _of_rank(
    a: Array, b: Array, alpha: float, precision: str, bias: Array | None = None
) -> Approximate:
    products = Products(a.dtype, b.dtype, precision=precision)
    value = products.of(as_float64(a), as_float64(b))
    if products.exact:
        value = value.rounded()
    value = value.scaled(alpha).times_number(alpha)
    return value if bias is None else value.plus(bias)


def row_parallel_scaled_mm(
    a: Sequence[Array],
    b: Sequence[Array],
    scale_a: Sequence[Any],
    scale_b: Sequence[Any],
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    **_: Any,
) -> tuple[Any]:
    """Return activation(sum((scale_a * a) @ (scale_b * b)) + bias) + residual in FP64.

    >>> a, b = np.array([[10, -20]], np.int8), np.array([[1], [3]], np.int8)
    >>> ranks = 2 * [a], 2 * [b], [0.5, 1.0], [0.25, 0.5]  # each rank has its own scales
    >>> reference.parallel.row_parallel_scaled_mm(*ranks)[0].tolist()
    [[-31.25]]
    """
    with np.errstate(all="ignore"):
        total = sum(map(exact_product, a, b, scale_a, scale_b))
        return (_epilogue(total, bias, activation, residual),)


def row_parallel_scaled_mm_bound(
    a: Sequence[Array],
    b: Sequence[Array],
    scale_a: Sequence[Any],
    scale_b: Sequence[Any],
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    out_dtype: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound, like `row_parallel_matmul_bound`.

    >>> a, scale = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> ranks = [a], [a.T], [scale], [scale.T]
    >>> exact = reference.parallel.row_parallel_scaled_mm(*ranks)
    >>> (bound,) = reference.parallel.row_parallel_scaled_mm_bound(*ranks, reference=exact)
    >>> comm = parallel.SelfCommunicator()
    >>> c = parallel.row_parallel_scaled_mm(comm, a, a.T, scale, scale.T)
    >>> bool((abs(c.astype(float) - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        values = list(map(scaled_product, a, b, scale_a, scale_b))
        if bias is not None:
            values[0] = values[0].plus(bias)
        dtype = _result(a[0], out_dtype)
        return (
            epilogue_bound(sum_in_order(values), None, activation, residual, dtype, reference[0]),
        )


def row_parallel_dual_gemm_silu(
    a: Sequence[Array], b1: Sequence[Array], b2: Sequence[Array], **_: Any
) -> tuple[Any]:
    """Return silu(sum(a @ b1)) * sum(a @ b2) in FP64.

    >>> a, gate, up = np.float16([[1]]), np.float16([[0.5]]), np.float16([[1.5]])
    >>> (y,) = reference.parallel.row_parallel_dual_gemm_silu(2 * [a], 2 * [gate], 2 * [up])
    >>> bool(np.isclose(y, 3 / (1 + np.exp(-1))).all())  # silu(0.5 + 0.5) * (1.5 + 1.5)
    True
    """
    (d1,), (d2,) = row_parallel_matmul(a, b1), row_parallel_matmul(a, b2)
    with np.errstate(all="ignore"):
        return (activate(namespace(d1), d1, "silu") * d2,)


def row_parallel_dual_gemm_silu_bound(
    a: Sequence[Array],
    b1: Sequence[Array],
    b2: Sequence[Array],
    *,
    out_dtype: Any = None,
    precision: str = "float32",
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound.

    Both sums have the errors of `row_parallel_matmul_bound`.  SiLU of the first and the product
    with the second are FP32 (see `dual_gemm_silu_bound`).

    >>> a = np.array([[1.0, 2.0]], np.float16)
    >>> gate, up = np.eye(2, dtype=np.float16), np.ones((2, 2), np.float16)
    >>> exact = reference.parallel.row_parallel_dual_gemm_silu([a], [gate], [up])
    >>> (bound,) = reference.parallel.row_parallel_dual_gemm_silu_bound(
    ...     [a], [gate], [up], reference=exact
    ... )
    >>> y = parallel.row_parallel_dual_gemm_silu(parallel.SelfCommunicator(), a, gate, up)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True
    """
    with np.errstate(all="ignore"):
        d1, d2 = (
            sum_in_order(_of_rank(x, y, 1.0, precision) for x, y in zip(a, b, strict=True))
            for b in (b1, b2)
        )
        y = times(activated(d1, "silu"), d2, reference[0]).rounded()
        return (y.stored(reference[0], _result(a[0], out_dtype)),)


def _epilogue(total: Any, bias: Any, activation: str | None, residual: Any) -> Any:
    if bias is not None:
        total = total + as_float64(bias)
    total = activate(namespace(total), total, activation)
    return total if residual is None else total + as_float64(residual)


def _result(a: Array, out_dtype: Any) -> np.dtype:
    if out_dtype is None:
        return dtypes.of_product(a.dtype, a.dtype, False)
    return np.dtype(dtypes.NAMES.get(out_dtype, out_dtype))
