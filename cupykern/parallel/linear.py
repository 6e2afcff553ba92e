"""Products whose weights are split over ranks: by columns, or by rows (of k)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import cupykern
from cupykern import arguments, arrays, dtypes
from cupykern.numerics import namespace
from cupykern.ops.checks.products import (
    check_activation,
    check_addend,
    check_precision,
    result_dtype,
)

from .agreement import Facts, agreed, described
from .collectives import (
    FLOATS,
    consecutive,
    contiguous,
    gather,
    gather_rows,
    length,
    reduce_rows,
    shares,
)
from .communicator import Communicator

_LEAST_ROWS = 128
"""Rows of a step of a product that overlaps with messages: those of a tile.  Of fewer rows the
product is one, and messages follow it."""


def column_parallel_matmul(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    precision: str = "float32",
    input: str = "replicated",
    output: str = "columns",
) -> Any:
    """`matmul` of a and the ranks' columns of b: activation(alpha * (a @ b) + bias) + residual.

    >>> comm = parallel.SelfCommunicator()
    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> parallel.column_parallel_matmul(comm, a, a).tolist()
    [[7.0, 10.0], [15.0, 22.0]]

    a: (M, K), the same on all ranks; with input="rows" each rank has some rows, which are gathered
        while products of those that have arrived are computed.
    b: (K, N_rank), this rank's columns; their number may differ.
    bias, residual: of this rank's columns, (N_rank,) and (M, N_rank), all rows.
    activation, alpha, out_dtype, precision: as for `matmul`.
    output: "columns": the result is (M, N_rank); "replicated": (M, N), gathered, the columns of
        rank 0 first.

    Each rank's columns are those of `matmul`, bit for bit where its number of rows is computed at
    once (input="replicated").  Sends a's own rows to each other rank with input="rows", and the own
    columns with output="replicated".

    Raises TypeError, ValueError and NotImplementedError, the same on all ranks, and
    CommunicationError.  Error bound: `reference.matmul_bound`.
    """

    def facts() -> Facts:
        _check_operands(
            comm, a, b, out_dtype=out_dtype, activation=activation, precision=precision, alpha=alpha
        )
        shape = (a.shape[0], b.shape[1])
        if input == "replicated":
            check_addend("residual", residual, a, shape)
        check_addend("bias", bias, a, (1, b.shape[1]))
        options = (activation, alpha, out_dtype, precision)
        return _column_facts(a, b, options, input, output, {"bias": bias, "residual": residual})

    def product(rows: slice, a: Any) -> Any:
        added = None if residual is None else residual[rows]
        return cupykern.matmul(
            a, b, bias=bias, activation=activation, residual=added, alpha=alpha,
            out_dtype=out_dtype, precision=precision,
        )  # fmt: skip

    with agreed(comm, "column_parallel_matmul", facts) as own:
        return _by_columns(comm, (a,), product, own, input, output)


def column_parallel_scaled_mm(
    comm: Communicator,
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    input: str = "replicated",
    output: str = "columns",
) -> Any:
    """`scaled_mm` of a and the ranks' columns of b: activation((scale_a a) @ (scale_b b) + bias).

    >>> a, scale_a = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> b, scale_b = cupykern.quantize(np.ones((128, 3), np.float32), "e4m3", granularity="column")
    >>> comm = parallel.SelfCommunicator()
    >>> parallel.column_parallel_scaled_mm(comm, a, b, scale_a, scale_b)[0].tolist()
    [128.0, 128.0, 128.0]

    a, b, bias, input, output: as for `column_parallel_matmul`, of `scaled_mm`'s dtypes (not NvFp4).
    scale_a: a number, (M, 1) or (M, ceil(K / 128)): with input="rows" of this rank's rows.
    scale_b: a number, or as `scaled_mm` takes it for this rank's columns.
    activation, out_dtype: as for `scaled_mm`.

    Raises as `column_parallel_matmul`.  Error bound: `reference.scaled_mm_bound`.
    """

    def facts() -> Facts:
        _check_operands(comm, a, b, out_dtype=out_dtype, activation=activation)
        check_addend("bias", bias, a, (1, b.shape[1]))
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        return _column_facts(a, b, (activation, out_dtype), input, output, {"bias": bias}, scales)

    def product(rows: slice, a: Any, scale: Any = scale_a) -> Any:
        return cupykern.scaled_mm(
            a, b, scale, scale_b, bias=bias, activation=activation, out_dtype=out_dtype
        )

    given = (a,) if _is_number(scale_a) else (a, scale_a)
    with agreed(comm, "column_parallel_scaled_mm", facts) as own:
        return _by_columns(comm, given, product, own, input, output)


def column_parallel_dual_gemm_silu(
    comm: Communicator,
    a: Any,
    b1: Any,
    b2: Any,
    *,
    scale_a: Any = None,
    scale_b1: Any = None,
    scale_b2: Any = None,
    policy: str = "fp32",
    out_dtype: Any = None,
    input: str = "replicated",
    output: str = "columns",
) -> Any:
    """`dual_gemm_silu` of a and the ranks' columns of b1 and b2: silu(a @ b1) * (a @ b2).

    >>> a = np.ones((2, 3), np.float16)
    >>> b = np.ones((3, 4), np.float16)
    >>> parallel.column_parallel_dual_gemm_silu(parallel.SelfCommunicator(), a, b, b).shape
    (2, 4)

    a, input, output: as for `column_parallel_matmul`.
    b1, b2: (K, N_rank), this rank's columns.
    scale_a, scale_b1, scale_b2, policy, out_dtype: as for `dual_gemm_silu`, of this rank's columns.

    Raises as `column_parallel_matmul`.  Error bound: `reference.dual_gemm_silu_bound`.
    """

    def facts() -> Facts:
        for name, b in (("b1", b1), ("b2", b2)):
            _check_operands(comm, a, b, name, out_dtype=out_dtype)
        if b1.shape != b2.shape:
            raise ValueError(f"b2 must have b1's shape {b1.shape}; got {b2.shape}")
        scales = {"scale_a": scale_a, "scale_b1": scale_b1, "scale_b2": scale_b2}
        return _column_facts(a, b1, (policy, out_dtype), input, output, {}, scales)

    def product(rows: slice, a: Any, scale: Any = scale_a) -> Any:
        return cupykern.dual_gemm_silu(
            a, b1, b2, scale_a=scale, scale_b1=scale_b1, scale_b2=scale_b2, policy=policy,
            out_dtype=out_dtype,
        )  # fmt: skip

    given = (a,) if _is_number(scale_a) else (a, scale_a)
    with agreed(comm, "column_parallel_dual_gemm_silu", facts) as own:
        return _by_columns(comm, given, product, own, input, output)


def row_parallel_matmul(
    comm: Communicator,
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    precision: str = "float32",
    output: str = "replicated",
) -> Any:
    """`matmul` whose k is split over ranks: activation(alpha * sum(a @ b) + bias) + residual.

    >>> comm = parallel.SelfCommunicator()
    >>> a = np.array([[1, 2], [3, 4]], np.float16)
    >>> parallel.row_parallel_matmul(comm, a, a, bias=np.ones(2, np.float16)).tolist()
    [[8.0, 11.0], [16.0, 23.0]]

    a: (M, K_rank), this rank's columns, as column-parallel products give them.
    b: (K_rank, N), this rank's rows; K_rank may differ.
    bias: (N,), the same on all ranks; added once.
    residual: the same on all ranks, (M, N), added once; with output="rows" of this rank's rows.
    activation, alpha, precision: as for `matmul`.  out_dtype: float16, bfloat16 or float32; None:
        a's if it is one of these, else bfloat16 (FP8) or float32.
    output: "replicated": all rows on all ranks; "rows": this rank's share of them (`shares`), for
        norms and residuals that are split by rows.

    The ranks' products are FP32; they are sent to the rank whose rows they are, while the next ones
    are computed, and added in the order of ranks, whatever arrives first: the result's bits depend
    on the arguments alone.  Then the activation and the residual follow, with one rounding.  Sends
    4 N (size - 1) / size bytes a row; "replicated" as much again of the result's dtype.

    Raises TypeError, ValueError and NotImplementedError, the same on all ranks, and
    CommunicationError.  Error bound: `reference.parallel.row_parallel_matmul_bound`.
    """
    product = partial(_product, a, b, alpha=alpha, precision=precision)
    addends = {"bias": bias, "residual": residual}
    options = {"activation": activation, "alpha": alpha, "precision": precision}

    def facts() -> Facts:
        return _row_facts(comm, a, {"b": b}, addends, {}, out_dtype, output, **options)

    with agreed(comm, "row_parallel_matmul", facts):
        total, parts = _sum_of_products(comm, a, b, bias, product)
        added = _own_rows(residual, parts[comm.rank], output)
        y = _finish(total, activation, added, _out_dtype(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


def row_parallel_scaled_mm(
    comm: Communicator,
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    out_dtype: Any = None,
    output: str = "replicated",
) -> Any:
    """`scaled_mm` whose k is split over ranks: activation(sum((scale_a a) @ (scale_b b)) + bias) +
    residual.

    >>> a, scale_a = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> b, scale_b = cupykern.quantize(np.ones((128, 3), np.float32), "e4m3", granularity="column")
    >>> comm = parallel.SelfCommunicator()
    >>> parallel.row_parallel_scaled_mm(comm, a, b, scale_a, scale_b)[0].tolist()
    [128.0, 128.0, 128.0]

    a, b, bias, residual, activation, out_dtype, output: as for `row_parallel_matmul`, of
        `scaled_mm`'s dtypes (not NvFp4).
    scale_a, scale_b: as `scaled_mm` takes them for this rank's a and b: ranks may have scales of
        their own.

    Raises as `row_parallel_matmul`.  Error bound:
    `reference.parallel.row_parallel_scaled_mm_bound`.
    """

    def product(rows: slice, bias: Any) -> Any:
        scale = scale_a if _is_number(scale_a) or len(scale_a) == 1 else scale_a[rows]
        return cupykern.scaled_mm(a[rows], b, scale, scale_b, bias=bias, out_dtype=np.float32)

    addends = {"bias": bias, "residual": residual}
    scales = {"scale_a": scale_a, "scale_b": scale_b}

    def facts() -> Facts:
        return _row_facts(
            comm, a, {"b": b}, addends, scales, out_dtype, output, activation=activation
        )

    with agreed(comm, "row_parallel_scaled_mm", facts):
        total, parts = _sum_of_products(comm, a, b, bias, product)
        added = _own_rows(residual, parts[comm.rank], output)
        y = _finish(total, activation, added, _out_dtype(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


def row_parallel_dual_gemm_silu(
    comm: Communicator,
    a: Any,
    b1: Any,
    b2: Any,
    *,
    out_dtype: Any = None,
    precision: str = "float32",
    output: str = "replicated",
) -> Any:
    """silu(sum(a @ b1)) * sum(a @ b2), k split over ranks.

    >>> a = np.ones((2, 3), np.float16)
    >>> b = np.ones((3, 4), np.float16)
    >>> parallel.row_parallel_dual_gemm_silu(parallel.SelfCommunicator(), a, b, b).shape
    (2, 4)

    a: (M, K_rank), b1, b2: (K_rank, N), this rank's part of k, of `matmul`'s dtypes.
    out_dtype, precision, output: as for `row_parallel_matmul`.

    Both sums are needed before SiLU, so that this sends twice what `row_parallel_matmul` does:
    where b1 and b2 can be split by columns, `column_parallel_dual_gemm_silu` sends nothing.

    Raises as `row_parallel_matmul`.  Error bound:
    `reference.parallel.row_parallel_dual_gemm_silu_bound`.
    """

    def facts() -> Facts:
        factors = {"b1": b1, "b2": b2}
        found = _row_facts(comm, a, factors, {}, {}, out_dtype, output, precision=precision)
        if b1.shape != b2.shape:
            raise ValueError(f"b2 must have b1's shape {b1.shape}; got {b2.shape}")
        return found

    def product(rows: slice, bias: Any) -> Any:
        both = arrays.empty_of(namespace(a), (2, length(rows), b1.shape[1]), dtypes.float32)
        for i, b in enumerate((b1, b2)):
            cupykern.matmul(a[rows], b, out_dtype=np.float32, precision=precision, out=both[i])
        return contiguous(both.swapaxes(0, 1))

    with agreed(comm, "row_parallel_dual_gemm_silu", facts):
        total, parts = _sum_of_products(comm, a, b1, None, product)
        d1, d2 = total[:, 0], total[:, 1]
        gate = _finish(d1, "silu", None, dtypes.float32)
        y = _formula(total, "gate * d2", {"gate": gate, "d2": d2}, _out_dtype(a, out_dtype))
        return gather_rows(comm, y, parts) if output == "replicated" else y


# --- by columns ----------------------------------------------------------------------------------


def _by_columns(
    comm: Communicator,
    given: Sequence[Any],
    product: Callable[..., Any],
    own: np.ndarray,
    input: str,
    output: str,
) -> Any:
    """given: the arrays whose rows are those of the result.  product(rows, *their rows)."""
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
    """The product of all ranks' rows: this rank's own first, then in the order of arrival that the
    ranks' numbers give."""
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


# --- by rows -------------------------------------------------------------------------------------


def _sum_of_products(
    comm: Communicator, a: Any, b: Any, bias: Any, product: Callable[[slice, Any], Any]
) -> tuple[Any, tuple[slice, ...]]:
    """(this rank's rows of the sum of all ranks' products, the rows of each rank).  Rank 0 adds the
    bias to its product."""
    parts, m = shares(a.shape[0], comm.size), a.shape[0]
    mine = bias if comm.rank == 0 else None
    if m >= _LEAST_ROWS * comm.size:
        return reduce_rows(comm, parts, lambda rows: contiguous(product(rows, mine))), parts
    whole = contiguous(product(slice(0, m), mine))
    return reduce_rows(comm, parts, lambda rows: whole[rows]), parts


def _product(a: Any, b: Any, rows: slice, bias: Any, *, alpha: Any, precision: str) -> Any:
    return cupykern.matmul(
        a[rows], b, bias=bias, alpha=alpha, out_dtype=np.float32, precision=precision
    )


def _own_rows(residual: Any, rows: slice, output: str) -> Any:
    return residual if residual is None or output == "rows" else residual[rows]


def _finish(total: Any, activation: str | None, residual: Any, out_dtype: Any) -> Any:
    """The epilogue of an FP32 product that is there: of a product of no k, to which it is added."""
    if activation is None and residual is None and out_dtype == np.float32:
        return total
    options = {"bias": total, "activation": activation, "residual": residual}
    return cupykern.matmul(*_no_product(total), out_dtype=out_dtype, **options)


def _formula(total: Any, formula: str, operands: dict[str, Any], out_dtype: Any) -> Any:
    return cupykern.matmul(
        *_no_product(total), out_dtype=out_dtype, epilogue=formula, operands=operands
    )


def _no_product(total: Any) -> tuple[Any, Any]:
    empty = arrays.maker(namespace(total))
    return (
        empty((total.shape[0], 0), dtypes.float32),
        empty((0, total.shape[-1]), dtypes.float32),
    )


def _out_dtype(a: Any, out_dtype: Any) -> np.dtype:
    if out_dtype is not None:
        return dtypes.resolve(out_dtype, "out_dtype", FLOATS)
    return dtypes.of_product(a.dtype, a.dtype, False)


# --- checks --------------------------------------------------------------------------------------


def _check_operands(
    comm: Communicator,
    a: Any,
    b: Any,
    name: str = "b",
    *,
    out_dtype: Any = None,
    activation: Any = None,
    precision: Any = "float32",
    alpha: Any = 1.0,
) -> None:
    """Raises TypeError, ValueError, NotImplementedError."""
    target = arguments.target_of("a", a)
    arguments.same_place(name, b, a, "a")
    for of, x in (("a", a), (name, b)):
        comm.check_array(of, x)
        if x.ndim != 2:
            raise ValueError(f"{of} must have 2 dims; got shape {x.shape}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a's columns must be {name}'s rows; got shapes {a.shape} and {b.shape}")
    result_dtype(a.dtype, b.dtype, out_dtype, plain=True)
    check_activation(activation)
    check_precision(precision, a.dtype, b.dtype, target)
    arguments.finite_float("alpha", alpha, 1.0)


def _is_number(scale: Any) -> bool:
    """Whether it is the same for all rows, or None."""
    return getattr(scale, "ndim", 0) < 2


def _check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _column_facts(
    a: Any,
    b: Any,
    options: tuple[Any, ...],
    input: str,
    output: str,
    addends: Mapping[str, Any],
    scales: Mapping[str, Any] | None = None,
) -> Facts:
    _check_option("input", input, ("replicated", "rows"))
    _check_option("output", output, ("columns", "replicated"))
    by_rows = input == "rows"
    same = {"a": described(a, *([0] if by_rows else [])), "b": described(b, 1)}
    for name, x in addends.items():
        same[name] = described(x, -1)
    scale_a = (scales or {}).get("scale_a")
    if by_rows and not _is_number(scale_a) and scale_a.shape[0] != a.shape[0]:
        raise ValueError(f"scale_a must have a's {a.shape[0]} rows; got shape {scale_a.shape}")
    for name, x in (scales or {}).items():
        axis = 0 if name == "scale_a" else 1
        same[name] = _scale(x, *([axis] if by_rows or axis else []))
    same["options"] = repr((*options, input, output))
    return Facts(same, (a.shape[0], b.shape[1]))


def _row_facts(
    comm: Communicator,
    a: Any,
    factors: Mapping[str, Any],
    addends: Mapping[str, Any],
    scales: Mapping[str, Any],
    out_dtype: Any,
    output: str,
    **options: Any,
) -> Facts:
    _check_option("output", output, ("replicated", "rows"))
    for name, b in factors.items():
        _check_operands(comm, a, b, name, **options)
    _out_dtype(a, out_dtype)
    same = {"a": described(a, 1), **{name: described(b, 0) for name, b in factors.items()}}
    m, n = a.shape[0], next(iter(factors.values())).shape[1]
    rows = length(shares(m, comm.size)[comm.rank]) if output == "rows" else m
    check_addend("bias", addends.get("bias"), a, (1, n))
    residual = addends.get("residual")
    if residual is not None:
        check_addend("residual", residual, a, (rows, n))
        if residual.shape != (rows, n):
            raise ValueError(f"residual must have shape {(rows, n)}; got {residual.shape}")
    same |= {"bias": described(addends.get("bias"))}
    same |= {"residual": described(residual, *([0] if output == "rows" else []))}
    same |= {name: _scale(x, 1 if name == "scale_a" else 0) for name, x in scales.items()}
    same["options"] = repr((*options.values(), out_dtype, output))
    return Facts(same)


def _scale(x: Any, *free: int) -> str:
    """Numbers may differ from rank to rank as arrays' elements may."""
    if _is_number(x):
        return "None" if x is None else "a number"
    return described(x, *free)
