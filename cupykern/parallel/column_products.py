"""Column-parallel products: the columns of the weights are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

import cupykern
from cupykern import arrays
from cupykern.numerics import namespace
from cupykern.ops.checks.products import check_addend
from cupykern.ops.checks.scales import check_quantized

from ..typing import Activation, Array, DTypeLike, Factor, Precision
from .agreement import Facts, agreed
from .collectives import consecutive, contiguous, gather, length
from .communicator import Communicator
from .product_facts import (
    check_gated,
    check_operands,
    check_policy,
    check_scaled,
    check_ways,
    column_facts,
    is_number,
    rows_of,
)


def column_parallel_matmul(
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
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array:
    """`matmul` with b's columns split over ranks: activation(alpha * (a @ b) + bias) + residual.

    >>> comm = parallel.SelfCommunicator()
    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> parallel.column_parallel_matmul(comm, a, a).tolist()
    [[7.0, 10.0], [15.0, 22.0]]

    a: (M, K).
    b: (K, N_rank), this rank's columns; N_rank may differ between ranks.
    bias, residual: for this rank's columns and all rows, (N_rank,) and (M, N_rank).
    activation, alpha, out_dtype, precision: as for `matmul`.
    input: "replicated": a is the same on all ranks; "rows": a holds this rank's rows.  The rows are
        gathered while products of the rows that have arrived are computed.
    output: "columns": the result is (M, N_rank); "replicated": (M, N), the columns of all ranks in
        rank order.

    With input="rows" this rank's rows of a are sent to every other rank, with output="replicated"
    its columns of the result.

    Raises TypeError, ValueError and NotImplementedError, the same on all ranks, and
    CommunicationError.  Error bound: `reference.matmul_bound`.
    """

    def facts() -> Facts:
        check_ways(input, output)
        plain = bias is None and residual is None
        check_operands(
            comm, a, b, out_dtype=out_dtype, activation=activation, precision=precision,
            alpha=alpha, plain=plain,
        )  # fmt: skip
        rows = rows_of(residual) if input == "rows" else a.shape[0]
        check_addend("residual", residual, a, (rows, b.shape[1]))
        check_addend("bias", bias, a, (1, b.shape[1]))
        options = (activation, alpha, out_dtype, precision)
        return column_facts(a, b, options, input, output, {"bias": bias, "residual": residual})

    with agreed(comm, "column_parallel_matmul", facts) as own:
        added = _of_all_rows(residual, int(own[:, 0].sum()) if input == "rows" else a.shape[0], b)

        def product(rows: slice, a: Array) -> Any:
            return cupykern.matmul(
                a, b, bias=bias, activation=activation,
                residual=None if added is None else added[rows], alpha=alpha,
                out_dtype=out_dtype, precision=precision,
            )  # fmt: skip

        return _by_columns(comm, (a,), product, own, input, output)


def column_parallel_scaled_mm(
    comm: Communicator,
    a: Array,
    b: Array,
    scale_a: Factor | None = None,
    scale_b: Factor | None = None,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array:
    """`scaled_mm` with b's columns split over ranks: activation((scale_a a) @ (scale_b b) + bias).

    >>> a, scale_a = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> b, scale_b = cupykern.quantize(np.ones((128, 3), np.float32), "e4m3", granularity="column")
    >>> comm = parallel.SelfCommunicator()
    >>> parallel.column_parallel_scaled_mm(comm, a, b, scale_a, scale_b)[0].tolist()
    [128.0, 128.0, 128.0]

    a, b, bias, input, output: as for `column_parallel_matmul`, with the dtypes of `scaled_mm` (not
        NvFp4).
    scale_a: a number, (M, 1) or (M, ceil(K / 128)); with input="rows" for this rank's rows.
    scale_b: a number, or as `scaled_mm` takes it for this rank's columns.
    activation, out_dtype: as for `scaled_mm`.

    Raises the errors of `column_parallel_matmul`.  Error bound: `reference.scaled_mm_bound`.
    """

    def facts() -> Facts:
        check_ways(input, output)
        plain = bias is None and scale_a is None and scale_b is None
        check_operands(comm, a, b, out_dtype=out_dtype, activation=activation, plain=plain)
        check_quantized(b.dtype)
        check_scaled(a, scale_a, {"b": (b, scale_b)})
        check_addend("bias", bias, a, (1, b.shape[1]))
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        return column_facts(a, b, (activation, out_dtype), input, output, {"bias": bias}, scales)

    def product(rows: slice, a: Array, scale: Factor | None = scale_a) -> Any:
        return cupykern.scaled_mm(
            a, b, scale, scale_b, bias=bias, activation=activation, out_dtype=out_dtype
        )

    given = (a,) if is_number(scale_a) else (a, scale_a)
    with agreed(comm, "column_parallel_scaled_mm", facts) as own:
        return _by_columns(comm, given, product, own, input, output)


def column_parallel_dual_gemm_silu(
    comm: Communicator,
    a: Array,
    b1: Array,
    b2: Array,
    *,
    scale_a: Factor | None = None,
    scale_b1: Factor | None = None,
    scale_b2: Factor | None = None,
    policy: Literal["fp32", "hybrid", "fp16"] = "fp32",
    out_dtype: DTypeLike | None = None,
    input: Literal["replicated", "rows"] = "replicated",
    output: Literal["columns", "replicated"] = "columns",
) -> Array:
    """`dual_gemm_silu` with the columns of b1 and b2 split over ranks: silu(a @ b1) * (a @ b2).

    >>> a = np.ones((2, 3), np.float16)
    >>> b = np.ones((3, 4), np.float16)
    >>> parallel.column_parallel_dual_gemm_silu(parallel.SelfCommunicator(), a, b, b).shape
    (2, 4)

    a, input, output: as for `column_parallel_matmul`.
    b1, b2: (K, N_rank), this rank's columns.
    scale_a, scale_b1, scale_b2, policy, out_dtype: as for `dual_gemm_silu`, for this rank's
        columns; with input="rows" scale_a is for this rank's rows.

    Raises the errors of `column_parallel_matmul`.  Error bound: `reference.dual_gemm_silu_bound`.
    """

    def facts() -> Facts:
        check_ways(input, output)
        for name, b in (("b1", b1), ("b2", b2)):
            check_operands(comm, a, b, name)
        check_gated(b1, b2)
        scales = {"scale_a": scale_a, "scale_b1": scale_b1, "scale_b2": scale_b2}
        check_policy(policy, a, b1, out_dtype, scales)
        check_scaled(a, scale_a, {"b1": (b1, scale_b1), "b2": (b2, scale_b2)})
        return column_facts(a, b1, (policy, out_dtype), input, output, {}, scales)

    def product(rows: slice, a: Array, scale: Factor | None = scale_a) -> Any:
        return cupykern.dual_gemm_silu(
            a, b1, b2, scale_a=scale, scale_b1=scale_b1, scale_b2=scale_b2, policy=policy,
            out_dtype=out_dtype,
        )  # fmt: skip

    given = (a,) if is_number(scale_a) else (a, scale_a)
    with agreed(comm, "column_parallel_dual_gemm_silu", facts) as own:
        return _by_columns(comm, given, product, own, input, output)


def _of_all_rows(residual: Any, rows: int, b: Any) -> Any:
    """The residual broadcast to all ranks' rows.  Raises ValueError, the same on all ranks."""
    if residual is None:
        return None
    if rows_of(residual) not in (1, rows):
        raise ValueError(
            f"residual must have the {rows} rows of all ranks, or 1; got {rows_of(residual)}"
        )
    shape = rows, b.shape[1]
    return residual if residual.shape == shape else namespace(b).broadcast_to(residual, shape)


def _by_columns(
    comm: Communicator,
    given: Sequence[Any],
    product: Callable[..., Any],
    own: np.ndarray,
    input: str,
    output: str,
) -> Any:
    """given: arrays with one row per row of the result.  product(rows, *given): the product of
    these rows."""
    counts, columns = own.T.tolist()
    parts = consecutive(counts)
    if input == "replicated" or comm.size == 1:
        y = product(slice(None), *given)
    else:
        y = _of_arriving_rows(comm, given, product, parts)
    if output == "columns" or comm.size == 1:
        return y
    found = gather(comm, y, [(len(y), n) for n in columns])
    return namespace(y).concatenate(found, axis=1)


def _of_arriving_rows(
    comm: Communicator,
    given: Sequence[Any],
    product: Callable[..., Any],
    parts: Sequence[slice],
) -> Any:
    """The product of all ranks' rows: this rank's first, then those of rank - 1, rank - 2, ..."""
    given, (rank, size), rows = [contiguous(x) for x in given], (comm.rank, comm.size), parts
    xp, steps = namespace(given[0]), []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        shapes = [(length(rows[source]), *x.shape[1:]) for x in given]
        buffers = [arrays.empty_of(xp, s, x.dtype) for s, x in zip(shapes, given, strict=True)]
        sends, receives = [(to, x) for x in given], [(source, x) for x in buffers]
        steps.append((source, buffers, comm.exchange(sends, receives)))
    first = product(rows[rank], *given)
    whole = arrays.empty_of(xp, (rows[-1].stop, first.shape[1]), first.dtype)
    arrays.assign(whole[rows[rank]], first)
    for source, buffers, pending in steps:
        pending.wait()
        found = product(rows[source], *buffers)
        arrays.assign(whole[rows[source]], found)
    return whole
