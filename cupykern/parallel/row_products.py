"""Row-parallel products: K, the rows of the weights, is split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

import cupykern
from cupykern import arrays, dtypes
from cupykern.numerics import namespace

from ..typing import Activation, Array, DTypeLike, Factor, Precision
from .agreement import Facts, agreed
from .collectives import add_rows, contiguous, gather_rows, length, reduce_rows, rows_to_add
from .communicator import Communicator
from .product_facts import check_gated, is_number, result_of, row_facts

_LEAST_ROWS = 1024
"""Least rows per rank to overlap products with messages, as each step reads all weights.  With
fewer rows one product runs first, then one exchange."""


def row_parallel_matmul(
    comm: Communicator,
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    residual: Array | None = None,
    alpha: Factor | None = 1.0,
    out_dtype: DTypeLike | None = None,
    precision: Precision = "float32",
    output: Literal["replicated", "rows"] = "replicated",
) -> Array:
    """`matmul` with K split over ranks: activation(alpha * sum(a @ b) + bias) + residual.

    >>> comm = parallel.SelfCommunicator()
    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> parallel.row_parallel_matmul(comm, a, a, bias=np.ones(2, np.float16)).tolist()
    [[8.0, 11.0], [16.0, 23.0]]

    a: (M, K_rank), this rank's columns, as column-parallel products return them.
    b: (K_rank, N), this rank's rows; K_rank may differ between ranks.
    bias: (N,), the same on all ranks; added once.
    residual: (M, N), the same on all ranks; added once.  With output="rows" this rank's rows.
    activation, alpha, precision: as for `matmul`.
    out_dtype: float16, bfloat16 or float32; None: a's if it is one of these, bfloat16 for FP8, else
        float32.
    output: "replicated": all rows on all ranks; "rows": this rank's share of the rows (`shares`),
        for norms and residuals split by rows.

    The ranks' products are FP32.  Each part is sent to the rank that owns its rows while the next
    part is computed.  Parts are summed in rank order, not in order of arrival, so that bits depend
    only on the arguments.  Activation and residual follow, with one rounding.  Sends
    4 N (size - 1) / size bytes per row; "replicated" also itemsize N (size - 1) / size bytes of the
    result, or, for few rows, only 4 N (size - 1) bytes per row in one exchange.

    Raises TypeError, ValueError and NotImplementedError, the same on all ranks, and
    CommunicationError.  Error bound: `reference.parallel.row_parallel_matmul_bound`.
    """
    product = partial(_product, a, b, alpha=alpha, precision=precision)
    addends = {"bias": bias, "residual": residual}
    options = {"activation": activation, "alpha": alpha, "precision": precision}

    def facts() -> Facts:
        return row_facts(comm, a, {"b": b}, addends, {}, out_dtype, output, **options)

    with agreed(comm, "row_parallel_matmul", facts):
        total, parts = _sum_of_products(comm, a, b, bias, product, output)
        added = _own_rows(residual, parts[comm.rank], output)
        y = _finish(total, activation, added, result_of(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


def row_parallel_scaled_mm(
    comm: Communicator,
    a: Array,
    b: Array,
    scale_a: Factor | None = None,
    scale_b: Factor | None = None,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    residual: Array | None = None,
    out_dtype: DTypeLike | None = None,
    output: Literal["replicated", "rows"] = "replicated",
) -> Array:
    """`scaled_mm` with K split over ranks: activation(sum((scale_a a) @ (scale_b b)) + bias) +
    residual.

    >>> a, scale_a = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> b, scale_b = cupykern.quantize(np.ones((128, 3), np.float32), "e4m3", granularity="column")
    >>> comm = parallel.SelfCommunicator()
    >>> parallel.row_parallel_scaled_mm(comm, a, b, scale_a, scale_b)[0].tolist()
    [128.0, 128.0, 128.0]

    a, b, bias, residual, activation, out_dtype, output: as for `row_parallel_matmul`, with the
        dtypes of `scaled_mm` (not NvFp4).
    scale_a, scale_b: as `scaled_mm` takes them for this rank's a and b; their values may differ
        between ranks.

    Raises the errors of `row_parallel_matmul`.  Error bound:
    `reference.parallel.row_parallel_scaled_mm_bound`.
    """

    of_rows: Any = scale_a  # where it is no number

    def product(rows: slice, bias: Array | None) -> Any:
        scale = scale_a if is_number(scale_a) or len(of_rows) == 1 else of_rows[rows]
        return cupykern.scaled_mm(a[rows], b, scale, scale_b, bias=bias, out_dtype=np.float32)

    addends = {"bias": bias, "residual": residual}
    scales = {"scale_a": scale_a, "scale_b": scale_b}

    def facts() -> Facts:
        return row_facts(
            comm, a, {"b": b}, addends, scales, out_dtype, output, activation=activation
        )

    with agreed(comm, "row_parallel_scaled_mm", facts):
        total, parts = _sum_of_products(comm, a, b, bias, product, output)
        added = _own_rows(residual, parts[comm.rank], output)
        y = _finish(total, activation, added, result_of(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


def row_parallel_dual_gemm_silu(
    comm: Communicator,
    a: Array,
    b1: Array,
    b2: Array,
    *,
    out_dtype: DTypeLike | None = None,
    precision: Precision = "float32",
    output: Literal["replicated", "rows"] = "replicated",
) -> Array:
    """silu(sum(a @ b1)) * sum(a @ b2), with K split over ranks.

    >>> a = np.ones((2, 3), np.float16)
    >>> b = np.ones((3, 4), np.float16)
    >>> parallel.row_parallel_dual_gemm_silu(parallel.SelfCommunicator(), a, b, b).shape
    (2, 4)

    a: (M, K_rank), b1, b2: (K_rank, N), this rank's part of K, with the dtypes of `matmul`; b1 and
        b2 of one dtype.
    out_dtype, precision, output: as for `row_parallel_matmul`.

    SiLU needs both sums, so that twice the FP32 data of `row_parallel_matmul` are sent.  If b1 and
    b2 can be split by columns instead, `column_parallel_dual_gemm_silu` sends nothing.

    Raises the errors of `row_parallel_matmul`.  Error bound:
    `reference.parallel.row_parallel_dual_gemm_silu_bound`.
    """

    def facts() -> Facts:
        factors = {"b1": b1, "b2": b2}
        found = row_facts(comm, a, factors, {}, {}, out_dtype, output, precision=precision)
        check_gated(b1, b2)
        return found

    def product(rows: slice, bias: Array | None) -> Any:
        both = arrays.empty_of(namespace(a), (2, length(rows), b1.shape[1]), dtypes.float32)
        for i, b in enumerate((b1, b2)):
            cupykern.matmul(a[rows], b, out_dtype=np.float32, precision=precision, out=both[i])
        return contiguous(both.swapaxes(0, 1))

    with agreed(comm, "row_parallel_dual_gemm_silu", facts):
        total, parts = _sum_of_products(comm, a, b1, None, product, output, 2)
        d1, d2 = total[:, 0], total[:, 1]
        gate = _finish(d1, "silu", None, dtypes.float32)
        y = _formula(total, "gate * d2", {"gate": gate, "d2": d2}, result_of(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


def _sum_of_products(
    comm: Communicator,
    a: Array,
    b: Array,
    bias: Array | None,
    product: Callable[[slice, Any], Any],
    output: str,
    products: int = 1,
) -> tuple[Any, tuple[slice, ...]]:
    """(this rank's rows of the sum of all ranks' products, the rows of each rank).  Rank 0 adds the
    bias in its product."""
    m, mine = a.shape[0], bias if comm.rank == 0 else None
    parts = rows_to_add(comm, m, products * b.shape[1], output == "replicated")
    if m >= _LEAST_ROWS * comm.size and parts[0] != parts[-1]:
        return reduce_rows(comm, parts, lambda rows: contiguous(product(rows, mine))), parts
    whole = contiguous(product(slice(0, m), mine))
    return add_rows(comm, parts, whole), parts


def _product(
    a: Array,
    b: Array,
    rows: slice,
    bias: Array | None,
    *,
    alpha: Factor | None,
    precision: Precision,
) -> Any:
    return cupykern.matmul(
        a[rows], b, bias=bias, alpha=alpha, out_dtype=np.float32, precision=precision
    )


def _own_rows(residual: Array | None, rows: slice, output: str) -> Any:
    return residual if residual is None or output == "rows" else residual[rows]


def _finish(
    total: Array, activation: str | None, residual: Array | None, out_dtype: DTypeLike | None
) -> Any:
    """Apply the epilogue to a finished FP32 product, as the bias of a product with K = 0."""
    if activation is None and residual is None and out_dtype == np.float32:
        return total
    options: dict[str, Any] = {"bias": total, "activation": activation, "residual": residual}
    return cupykern.matmul(*_no_product(total), out_dtype=out_dtype, **options)


def _formula(
    total: Array, formula: str, operands: dict[str, Any], out_dtype: DTypeLike | None
) -> Any:
    return cupykern.matmul(
        *_no_product(total), out_dtype=out_dtype, epilogue=formula, operands=operands
    )


def _no_product(total: Array) -> tuple[Any, Any]:
    empty = arrays.maker(namespace(total))
    return (
        empty((total.shape[0], 0), dtypes.float32),
        empty((0, total.shape[-1]), dtypes.float32),
    )
