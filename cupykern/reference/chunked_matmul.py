"""Error bound of a matrix product with K split into chunks (cupykern.dask.matmul)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate as running_sums
from typing import Any, SupportsFloat

import numpy as np

from .. import dtypes
from ..numerics import as_float64, as_real, namespace
from ..op import Bound
from ..typing import Array
from .accumulation import Products
from .approximate import Approximate
from .complex64 import embedded, real_addends
from .epilogue import epilogue_bound
from .expression_error import expression_bound
from .matmul import of_repeated, stored_as
from .vectors import takes_vectors


@takes_vectors
def chunked_matmul_bound(
    a: Array,
    b: Array,
    *,
    k_chunks: Sequence[int],
    split_every: int = 8,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: SupportsFloat = 1.0,
    out_dtype: Any = None,
    accumulate: str = "float32",
    precision: str = "float32",
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds of `cupykern.dask.matmul`.

    reference: the result of `reference.matmul` or `reference.complex_matmul` of the whole arrays.

    >>> a = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float16)
    >>> exact = reference.matmul(a, a.T)
    >>> (bound,) = reference.chunked_matmul_bound(a, a.T, k_chunks=(60, 40), reference=exact)
    >>> c = sum(
    ...     cupykern.matmul(part, part.T, out_dtype="float32") for part in (a[:, :60], a[:, 60:])
    ... ).astype(np.float16)  # as cupykern.dask.matmul adds its chunks
    >>> bool((abs(c - exact[0]) <= bound.elementwise).all())
    True

    k_chunks: the chunk sizes along K.  split_every: the argument of `cupykern.dask.matmul`.

    The product of a chunk has its own accumulation error (accumulation.py), times alpha.  Each
    addition of another product or of the bias rounds to FP32.  Its error is at most u = 2^-24 of
    the exact sum and its error so far (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    ed., section 4.2).  A product passes the additions of its chain, at most split_every, and those
    of the chains' sums.  Expected: errors are independent, except the means from the tensor cores'
    truncation, which have the sign of their sum.
    """
    dtype_a, dtype_b = a.dtype, b.dtype
    plain = bias is None and residual is None and activation is None and float(alpha) == 1.0
    plain = plain and epilogue is None
    if dtype_a == dtypes.complex64:
        options = real_addends(b, {"bias": bias, "residual": residual})
        bias, residual, plain = options["bias"], options["residual"], False
        a, b, reference = as_real(a), embedded(b), (as_real(reference[0]),)
        dtype_a = dtype_b = out_dtype = dtypes.float32
        k_chunks = [2 * size for size in k_chunks]
    out_dtype = stored_as(out_dtype, dtypes.of_product(dtype_a, dtype_b, plain))
    half = accumulate == "float16"
    products = Products(dtype_a, dtype_b, half_accumulators=half, precision=precision)
    ends = list(running_sums(k_chunks))
    with np.errstate(all="ignore"):
        values = []
        for begin, end in zip((0, *ends), ends, strict=False):
            value = products.of(as_float64(a[..., begin:end]), as_float64(b[..., begin:end, :]))
            if products.exact and out_dtype != dtypes.int32:
                value = value.rounded()
            value = value.scaled(float(alpha)).times_number(float(alpha))
            values.append(of_repeated(value, a, b))
        if out_dtype == dtypes.int32:  # products and their sums are exact
            return (epilogue_bound(values[0], None, None, None, out_dtype, reference[0]),)
        *others, last = values
        if bias is not None and others:  # the first chunk's product adds the bias
            others[0] = others[0].plus(bias)
            bias = None
        chains = [_sum(others[i : i + split_every]) for i in range(0, len(others), split_every)]
        value = _sum([_sum(chains), last]) if chains else last
        if epilogue is not None:
            return expression_bound(value, epilogue, operands, out_dtype, reference)
        return (epilogue_bound(value, bias, activation, residual, out_dtype, reference[0]),)


def _sum(values: Iterable[Approximate]) -> Approximate:
    """Return the sum from left to right, with one rounding per addition."""
    first, *others = values
    total = first
    for value in others:
        total = _added(total, value).rounded()
    return total


def _added(x: Approximate, y: Approximate) -> Approximate:
    """Return the exact sum.

    Mean errors have the signs of their values.  Those of equal sign add up.  Those of opposite sign
    are not assumed to cancel, as their sizes are estimates.
    """
    xp = namespace(x.exact)
    alike = xp.nan_to_num(xp.sign(x.exact) * xp.sign(y.exact)) > 0
    in_common = xp.where(alike, 2 * x.bias * y.bias, 0.0) + 2 * x.known * y.known
    return Approximate(
        x.exact + y.exact,
        x.worst + y.worst,
        x.floor + y.floor,
        x.square + y.square + in_common,
        x.bias + y.bias,
        known=x.known + y.known,
    )
