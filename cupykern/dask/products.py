"""matmul for dask arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

import cupykern

from .. import dtypes
from ..expression import Expression, read
from ..gemm.product import OPERANDS
from ..ops import matmul as _matmul
from ..ops.checks.formulas import NO_FORMULA, read_formula
from ..ops.checks.vectors import Vectors, read_vectors
from ..typing import Activation, Array, Factor, FormulaLike, Precision, ResultDTypes
from .chunks import Chunks, aligned, common, item, kind, lazy, meta, rechunked, standing_for

_SUM = "the sum of other chunks"  # an operand name that cannot occur in a formula


def matmul(
    a: da.Array | Array,
    b: da.Array | Array,
    *,
    bias: da.Array | Array | None = None,
    activation: Activation | None = None,
    residual: da.Array | Array | None = None,
    alpha: Factor | None = 1.0,
    out_dtype: ResultDTypes = None,
    accumulate: Literal["float32", "float16"] = "float32",
    precision: Precision = "float32",
    epilogue: FormulaLike | None = None,
    operands: Mapping[str, da.Array | Factor] | None = None,
    split_every: int = 8,
) -> da.Array | tuple[da.Array, ...]:
    """`cupykern.matmul` for two dask arrays, or one dask array and an array of its chunks' kind.

    >>> a = da.ones((4, 100), chunks=(2, 30), dtype=np.float16)
    >>> c = cupykern.dask.matmul(a, a.T, activation="relu")
    >>> c.chunks, c[0, 0].compute().item()
    (((2, 2), (2, 2)), 100.0)

    The result has a's chunks along M and b's along N.  If the chunks of a and b differ along K or
    a batch dim, both are split at the boundaries of either.  bias, residual and arrays among
    `operands` are rechunked to the result's chunks.

    If K is one chunk, each block is one call of the plain op.  Otherwise the products of K's chunks
    are added in FP32 (exactly in int32 for int32 results, in complex64 for complex64), in a fixed
    order.  All chunks but the last form groups of split_every consecutive chunks.  Groups are
    independent tasks; within a group products are added one after another.  Then the groups' sums
    are added, and last the final chunk's product, with activation, residual and the rounding to
    out_dtype, or with the formula.  Each product is one call whose bias is the sum so far.  Error
    bound: `reference.chunked_matmul_bound`.

    split_every: at least 1.  Smaller groups run more tasks in parallel, larger ones keep fewer FP32
        sums in memory.
    bias, residual: arrays or dask arrays that broadcast to the result.
    epilogue, operands: a formula of numbers, arrays and dask arrays.  Several results are a tuple
        of dask arrays.  If K has several chunks, the sum so far takes the slot of one operand.  i,
        j and b count within a block: a formula that uses them raises NotImplementedError if the
        result has several chunks along that dim; pass np.arange as an operand instead.  row_max and
        row_sum require one chunk along N.
    activation, alpha, out_dtype, accumulate, precision: as for `cupykern.matmul`.

    CuPy cannot concatenate FP8 arrays: FP8 chunks on a GPU can be split, but not merged.
    """
    given = {"a": a, "b": b, "bias": bias, "residual": residual}
    if not (isinstance(a, da.Array) or isinstance(b, da.Array)):
        raise TypeError(f"a or b must be a dask array; got {kind(a)} and {kind(b)}")
    if isinstance(split_every, bool) or not isinstance(split_every, (int, np.integer)):
        raise TypeError(f"split_every must be an integer; got {type(split_every).__name__}")
    if split_every < 1:
        raise ValueError(f"split_every must be at least 1; got {split_every}")
    arrays: tuple[Any, ...] = tuple(lazy(name, x) for name, x in given.items())
    a, b, bias, residual = arrays
    if isinstance(operands, dict):
        operands = {name: _operand(name, x) for name, x in operands.items()}
    of_a, of_b, of_bias, of_residual = map(standing_for, arrays)
    options: dict[str, Any]
    options = {"activation": activation, "accumulate": accumulate, "precision": precision}
    if 1 in (a.ndim, b.ndim):
        vectors = read_vectors(of_a, of_b)
        named = operands
        if isinstance(operands, dict):
            named = {n: _lifted(vectors, f"operands[{n!r}]", x) for n, x in operands.items()}
        y = matmul(
            a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b,
            bias=_lifted(vectors, "bias", bias), residual=_lifted(vectors, "residual", residual),
            alpha=alpha, out_dtype=out_dtype, epilogue=epilogue, operands=named,
            split_every=split_every, **options,
        )  # fmt: skip
        if isinstance(y, tuple):
            return tuple(_dropped(vectors, x) for x in y)
        return _dropped(vectors, y)
    formula = NO_FORMULA
    if epilogue is not None or operands is not None:
        epilogue = epilogue if epilogue is None else read(epilogue)
        stands = operands
        if isinstance(operands, dict):
            stands = {n: standing_for(x) if _is_lazy(x) else x for n, x in operands.items()}
        formula = read_formula(epilogue, stands, of_a)
    checked = _matmul.check(
        *(of_a, of_b, of_bias, of_residual, alpha, out_dtype, formula, epilogue, operands),
        **options,
    )
    formula.broadcast(of_a, checked.shape)
    of_k = {"alpha": checked.alpha, "accumulate": accumulate, "precision": precision}
    kinds = checked.out_dtype, *checked.more
    last = {**of_k, "activation": activation, "out_dtype": kinds if checked.more else kinds[0]}
    end = None if epilogue is None else _Formula(epilogue, dict(operands or {}), kinds)
    return _product(arrays, of_k, last, int(split_every), end)


class _Formula(NamedTuple):
    """An epilogue formula.  operands: dask arrays and numbers by name.  kinds: result dtypes."""

    expression: Expression
    operands: dict[str, Any]
    kinds: tuple[np.dtype, ...]

    def check_chunks(self, chunks: Chunks, k_chunks: int) -> None:
        """Raises NotImplementedError and ValueError for chunks that the formula does not allow."""
        names = {node.value for node in self.expression.nodes if node.op == "name"}
        *batch, of_i, of_j = (len(sizes) > 1 for sizes in chunks)
        for name, cut in (("i", of_i), ("j", of_j), ("b", any(batch))):
            if cut and name in names:
                raise NotImplementedError(
                    f"{name} in a formula counts within a chunk, and the result is several along "
                    f"its dim: rechunk, or give an operand of np.arange in place of {name}"
                )
        if of_j and any(self.expression.reductions):
            raise NotImplementedError(
                "row_max and row_sum are of rows of one chunk, and the result is several along N: "
                "rechunk b"
            )
        most = len(OPERANDS) - len(self.kinds)
        if k_chunks > 1 and len(self.operands) > most:
            raise ValueError(
                f"operands must be at most {most} where K is several chunks; got "
                f"{len(self.operands)}"
            )


def _is_lazy(x: Any) -> bool:
    return isinstance(x, da.Array)


def _operand(name: str, x: Any) -> Any:
    """Numbers unchanged, arrays as dask arrays."""
    if not _is_lazy(x) and not getattr(x, "ndim", 0):
        return x
    x = lazy(f"operands[{name!r}]", x)
    return x if x.ndim else x.reshape(1)  # a 0-d dask array: its value is not known yet


def _lifted(vectors: Vectors, name: str, x: Any) -> Any:
    """vectors.lift for a dask array."""
    if not _is_lazy(x):
        return x
    vectors.lift(name, standing_for(x))
    return vectors.expand(da.broadcast_to(x, vectors.shape)) if x.ndim else x


def _dropped(vectors: Vectors, y: Any) -> Any:
    """y without the dims of size 1 that vectors add."""
    axes = tuple(dim + y.ndim for dim in vectors.dims)
    kept = tuple(dim for dim in range(y.ndim) if dim not in axes)
    return da.blockwise(
        partial(_without, axes=axes), kept, y, range(y.ndim), dtype=y.dtype, token="matmul-vector",
        meta=meta(y, len(kept), y.dtype), align_arrays=False,
    )  # fmt: skip


def _without(x: Any, axes: tuple[int, ...]) -> Any:
    while isinstance(x, list):  # blockwise wraps blocks along dims that the result lacks
        (x,) = x
    return x.reshape(tuple(n for dim, n in enumerate(x.shape) if dim not in axes))


def _product(
    operands: tuple[Any, ...],
    options: dict[str, Any],
    last: dict[str, Any],
    split_every: int,
    formula: _Formula | None,
) -> Any:
    """Build the graph.  operands: a, b, bias and residual.  options: of the products of K's chunks;
    last: of the last one, which applies the epilogue or the formula."""
    a, b, bias, residual = operands
    of_k, batch = common(a.chunks[-1], b.chunks[-2]), _common_batch(a, b)
    chunks = (*batch, a.chunks[-2], b.chunks[-1])
    a = rechunked(a, (*batch, a.chunks[-2], of_k))
    b = rechunked(b, (*batch, of_k, b.chunks[-1]))
    bias, residual = rechunked(bias, chunks), rechunked(residual, chunks)
    given: list[Any] = []
    finish = partial(_multiply, **last)
    out_dtypes = (last["out_dtype"],) if formula is None else formula.kinds
    told: tuple[Any, ...] = ()
    if formula is not None:
        formula.check_chunks(chunks, len(of_k))
        numbers = {n: x for n, x in formula.operands.items() if not _is_lazy(x)}
        lazies = {n: rechunked(x, chunks) for n, x in formula.operands.items() if _is_lazy(x)}
        given = list(lazies.values())
        whole = formula.expression if len(of_k) == 1 else formula.expression.plus(_SUM)
        told = whole.digest, whole.names, tuple(lazies), numbers
        finish = partial(_finish, names=tuple(lazies), numbers=numbers, epilogue=whole, **last)

    wide = out_dtypes[0] if out_dtypes[0] in (dtypes.int32, dtypes.complex64) else dtypes.float32
    step = partial(_multiply, **options, out_dtype=wide)
    token = tokenize(a, b, bias, residual, options, last, split_every, *given, *told)
    name, sums, totals = (f"matmul{kind}-{token}" for kind in ("", "-sum", "-total"))
    graph: dict[Any, Any] = {}
    for place in np.ndindex(*map(len, chunks)):

        def of_k_chunk(k: int, at: tuple[int, ...] = place) -> tuple[Any, Any]:
            *outer, i, j = at
            return _block(a, (*outer, i, k)), _block(b, (*outer, k, j))

        total = _block(bias, place)
        last_k = len(of_k) - 1
        for first in range(0, last_k, split_every):
            so_far = total if first == 0 else None
            for k in range(first, min(first + split_every, last_k)):
                graph[sums, k, *place] = (step, *of_k_chunk(k), so_far)
                so_far = sums, k, *place
            if first > 0:
                graph[totals, first, *place] = (_add, total, so_far)
                so_far = totals, first, *place
            total = so_far
        others = (_block(x, place) for x in (residual, *given))
        graph[name, *place] = (finish, *of_k_chunk(last_k), total, *others)
    depends = [x for x in (a, b, bias, residual, *given) if x is not None]
    layers = HighLevelGraph.from_collections(name, graph, dependencies=depends)
    found = da.Array(layers, name, chunks, meta=meta(a, len(chunks), out_dtypes[0]))
    if len(out_dtypes) == 1:
        return found
    dims = range(len(chunks))
    assert formula is not None
    kinds = zip(out_dtypes, formula.expression.reductions, strict=True)
    return tuple(
        da.blockwise(
            item, dims, found, dims, i, None, token=f"matmul-{i}", dtype=dtype,
            meta=meta(a, len(chunks), dtype), align_arrays=False,
            adjust_chunks={dims[-1]: 1} if reduction else None,
        )
        for i, (dtype, reduction) in enumerate(kinds)
    )  # fmt: skip


def _common_batch(a: Any, b: Any) -> Chunks:
    """The chunks of the batch dims to which a and b broadcast."""
    found = []
    for dim in range(-max(a.ndim, b.ndim), -2):
        both = [x for x in (a, b) if x.ndim >= -dim]
        wide = [x for x in both if x.shape[dim] != 1]
        found.append(common(*(x.chunks[dim] for x in wide or both)))
    return tuple(found)


def _block(x: Any, place: tuple[int, ...]) -> Any:
    """The key of x's block for the result's block at `place`; None for None."""
    if x is None:
        return None
    numbers = zip(place[len(place) - x.ndim :], x.numblocks, strict=True)
    return x.name, *(i if count > 1 else 0 for i, count in numbers)


def _multiply(a: Any, b: Any, bias: Any, residual: Any = None, **options: Any) -> Any:
    a, b, bias, residual = map(aligned, (a, b, bias, residual))
    if options["out_dtype"] == dtypes.int32:
        c = cupykern.matmul(a, b, **options)
        return c if bias is None else _add(bias, c)
    return cupykern.matmul(a, b, bias=bias, residual=residual, **options)


def _finish(
    a: Any,
    b: Any,
    total: Any,
    residual: None,
    *arrays: Any,
    names: tuple[str, ...],
    numbers: dict[str, float],
    epilogue: Expression,
    **options: Any,
) -> Any:
    """Apply the formula to a @ b + total.  names: of `arrays`."""
    operands = {**numbers, **dict(zip(names, map(aligned, arrays), strict=True))}
    if _SUM in epilogue.names:
        operands[_SUM] = aligned(total)
    return cupykern.matmul(
        *(aligned(a), aligned(b)), epilogue=epilogue, operands=operands, **options
    )


def _add(x: Any, y: Any) -> Any:
    with np.errstate(all="ignore"):
        return x + y
