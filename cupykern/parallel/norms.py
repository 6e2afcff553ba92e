"""Norms of rows split over ranks, and of sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

import cupykern
from cupykern import arguments, dtypes, ops
from cupykern.numerics import finfo

from ..typing import Array, Factor, Results
from .agreement import Facts, agreed, described
from .collectives import (
    FLOATS,
    add_rows,
    check_float,
    consecutive,
    gather_rows,
    length,
    rows_to_add,
    shares,
)
from .communicator import Communicator


def sequence_parallel_rms_norm(
    comm: Communicator,
    x: Array,
    weight: Array | None = None,
    *,
    eps: Factor | None = None,
    residual: Array | None = None,
    output: Literal["rows", "replicated"] = "rows",
) -> Results:
    """`rms_norm` of this rank's rows.

    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)
    >>> print(parallel.sequence_parallel_rms_norm(parallel.SelfCommunicator(), x).round(3))
    [[ 1.2 -1.6  0.   0. ]]

    x, residual: (rows, n), this rank's rows; their number may differ between ranks.
    weight, eps: as for `rms_norm`, the same on all ranks.
    output: "rows": y of this rank's rows; "replicated": y of all ranks' rows in rank order.

    Returns y, with a residual (y, x + residual for this rank's rows).  Sends nothing, with
    output="replicated" y to every other rank.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Error bound:
    `reference.rms_norm_bound`.
    """
    options = {"eps": eps, "residual": residual}
    return _of_rows(
        comm, "sequence_parallel_rms_norm", cupykern.rms_norm, (x, weight), options, output
    )


def sequence_parallel_layer_norm(
    comm: Communicator,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Factor | None = 1e-5,
    residual: Array | None = None,
    output: Literal["rows", "replicated"] = "rows",
) -> Results:
    """`layer_norm` of this rank's rows.

    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    >>> print(parallel.sequence_parallel_layer_norm(parallel.SelfCommunicator(), x).round(3))
    [[-1.342 -0.447  0.447  1.342]]

    bias, eps: as for `layer_norm`.  Other arguments, results and errors are those of
    `sequence_parallel_rms_norm`.
    """
    options = {"eps": eps, "residual": residual}
    given = (x, weight, bias)
    return _of_rows(
        comm, "sequence_parallel_layer_norm", cupykern.layer_norm, given, options, output
    )


def all_reduce_rms_norm(
    comm: Communicator,
    x: Array,
    weight: Array | None = None,
    *,
    eps: Factor | None = None,
    residual: Array | None = None,
    output: Literal["replicated", "rows"] = "replicated",
) -> Results:
    """`rms_norm` of the sum of all ranks' x and a residual, in one call.

    >>> x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32)
    >>> comm = parallel.SelfCommunicator()
    >>> y, s = parallel.all_reduce_rms_norm(comm, x, residual=x)  # s = x + residual
    >>> print(y.round(3), s[0, 0])
    [[ 1.2 -1.6  0.   0. ]] 6.0

    x: (M, n), float16, bfloat16 or float32, this rank's addend: the product of its part of K, most
        accurate as float32 (`matmul(..., out_dtype="float32")`).
    weight: as for `rms_norm`, the same on all ranks.
    eps: as for `rms_norm`; None: the machine epsilon of the result's dtype.
    residual: (M, n), float16, bfloat16 or float32, the same on all ranks; with output="rows" this
        rank's rows.  The results have its dtype, without a residual x's.
    output: "replicated": all rows on all ranks; "rows": this rank's share (`shares`).

    Each rank sums its share of the rows in FP32 in rank order, adds the residual, normalises the
    unrounded sum and rounds once; with "replicated" the rows are then gathered.  Returns y, with a
    residual (y, sum).  Sends 4 n (size - 1) / size bytes per row, and with "replicated" the same
    share of y, and of the sum, in the results' dtype.

    Raises TypeError and ValueError, the same on all ranks, and CommunicationError.  Error bound:
    `reference.parallel.all_reduce_norm_bound`.
    """
    norm = cupykern.rms_norm
    return _of_sums(comm, "all_reduce_rms_norm", norm, x, (weight,), eps, residual, output)


def all_reduce_layer_norm(
    comm: Communicator,
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: Factor | None = 1e-5,
    residual: Array | None = None,
    output: Literal["replicated", "rows"] = "replicated",
) -> Results:
    """`layer_norm` of the sum of all ranks' x and a residual, in one call.

    >>> x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    >>> print(parallel.all_reduce_layer_norm(parallel.SelfCommunicator(), x).round(3))
    [[-1.342 -0.447  0.447  1.342]]

    bias, eps: as for `layer_norm`.  Other arguments, results and errors are those of
    `all_reduce_rms_norm`.
    """
    norm, given = cupykern.layer_norm, (weight, bias)
    return _of_sums(comm, "all_reduce_layer_norm", norm, x, given, eps, residual, output)


def _of_rows(
    comm: Communicator,
    function: str,
    norm: Callable[..., Any],
    given: tuple[Any, ...],
    options: dict[str, Any],
    output: str,
) -> Any:
    x, residual = given[0], options["residual"]

    def facts() -> Facts:
        arguments.check_choice("output", output, ("rows", "replicated"))
        check_float(comm, "x", x, 2)
        _check(norm, given, options["eps"], residual)
        same = _described(given, residual, 0) | {"options": repr((options["eps"], output))}
        return Facts(same, (x.shape[0],))

    with agreed(comm, function, facts) as own:
        found = norm(*given, **options)
        if output == "rows":
            return found
        parts = consecutive(own[:, 0].tolist())
        if residual is None:
            return gather_rows(comm, found, parts)
        return gather_rows(comm, found[0], parts), found[1]


def _of_sums(
    comm: Communicator,
    function: str,
    norm: Callable[..., Any],
    x: Array,
    given: tuple[Any, ...],
    eps: Factor | None,
    residual: Array | None,
    output: str,
) -> Any:
    def facts() -> Facts:
        arguments.check_choice("output", output, ("replicated", "rows"))
        check_float(comm, "x", x, 2)
        _check(norm, (x, *given), eps, None)
        if residual is not None:
            arguments.same_place("residual", residual, x)
            dtypes.resolve(residual.dtype, "residual's dtype", FLOATS)
            part = shares(x.shape[0], comm.size)[comm.rank]
            rows = length(part) if output == "rows" else x.shape[0]
            if residual.shape != (rows, x.shape[1]):
                wanted = (rows, x.shape[1])
                raise ValueError(f"residual must have shape {wanted}; got {residual.shape}")
        free = [0] if output == "rows" else []
        same = {"x": described(x), **_described((None, *given), residual, *free)}
        return Facts(same | {"options": repr((eps, output))})

    with agreed(comm, function, facts):
        parts = rows_to_add(comm, x.shape[0], x.shape[1], output == "replicated")
        total = add_rows(comm, parts, x)
        dtype = x.dtype if residual is None else residual.dtype
        options = {"eps": finfo(dtype).eps if eps is None else eps, "dtype": dtype}
        if residual is None:
            found: tuple[Any, ...] = (norm(total, *given, **options),)
        else:
            added = residual if output == "rows" else residual[parts[comm.rank]]
            y, total = norm(total, *given, residual=added.astype(np.float32), **options)
            found = y, total.astype(dtype)
        if output == "replicated":
            found = tuple(gather_rows(comm, one, parts) for one in found)
        return found if residual is not None else found[0]


def _check(norm: Callable[..., Any], given: tuple[Any, ...], eps: Any, residual: Any) -> None:
    """Check what the norm does.  given: x, weight and, for `layer_norm`, bias.

    Raises TypeError, ValueError and NotImplementedError.
    """
    x, weight, bias = (*given, None)[:3]
    options = norm is cupykern.layer_norm, False, False, None
    ops.norm.check(x, weight, bias, eps, residual, options, None)


def _described(given: tuple[Any, ...], residual: Array | None, *free: int) -> dict[str, str]:
    same = {
        name: described(x, *(free if name == "x" else ()))
        for name, x in zip(("x", "weight", "bias"), given, strict=False)
        if name != "x" or x is not None
    }
    return same | {"residual": described(residual, *free)}
