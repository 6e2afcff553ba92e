"""complex64 products in complex128, and bounds of the kernels' errors; kernels multiply real
matrices.

With real and imaginary parts interleaved, a @ b is a @ B.  B has the block [[x, y], [-y, x]] for
each element x + iy of b.  So each part is a sum of 2 K real products, with the error of that sum.
This takes 4 real multiplications.  With 3, the error is not bounded relative to the part itself
(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 23.2.4).
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import numpy as np

from .. import dtypes
from ..numerics import as_float64, as_real, namespace
from ..op import Bound
from ..typing import Array
from .accumulation import Products
from .epilogue import epilogue_bound
from .matmul import matmul, of_repeated
from .vectors import takes_vectors


@takes_vectors
def complex_matmul(a: Array, b: Array, **options: Any) -> tuple[Any]:
    """Return alpha * (a @ b) + bias + residual in complex128.

    >>> a = np.array([[1 + 2j]], np.complex64)
    >>> reference.complex_matmul(a, a)[0].tolist()
    [[(-3+4j)]]
    """
    (y,) = matmul(as_real(a), embedded(b), **real_addends(b, options))
    return (y.view(np.complex128),)


@takes_vectors
def complex_matmul_bound(
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    residual: Array | None = None,
    alpha: SupportsFloat = 1.0,
    out: Array | None = None,
    precision: str = "float32",
    config: Any = None,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound of real and imaginary parts, interleaved along the last axis.

    >>> a = np.array([[1 + 2j, 3j], [0.1, 1]], np.complex64)
    >>> exact = reference.complex_matmul(a, a)
    >>> (bound,) = reference.complex_matmul_bound(a, a, reference=exact)
    >>> bound.elementwise.shape  # real part, imaginary part, ... of (2, 2) numbers
    (2, 4)
    >>> error = cupykern.matmul(a, a) - exact[0]
    >>> bool((abs(error.view(np.float64)) <= bound.elementwise).all())
    True
    """
    addends = real_addends(b, {"bias": bias, "residual": residual})
    products = Products(dtypes.float32, dtypes.float32, precision=precision)
    with np.errstate(all="ignore"):
        value = products.of(as_float64(as_real(a)), embedded(b))
        value = of_repeated(value.scaled(float(alpha)).times_number(float(alpha)), a, b)
        y = as_real(reference[0])
        return (
            epilogue_bound(value, addends["bias"], None, addends["residual"], dtypes.float32, y),
        )


def embedded(b: Array) -> Any:
    """Return B, FP64 (..., 2 K, 2 N), for complex b (..., K, N)."""
    xp, (k, n) = namespace(b), b.shape[-2:]
    parts = as_float64(as_real(b)).reshape(*b.shape, 2)
    turned = xp.stack((-parts[..., 1], parts[..., 0]), axis=-1)
    blocks = xp.stack((parts, turned), axis=-3)  # (..., K, 2, N, 2)
    return blocks.reshape(*b.shape[:-2], 2 * k, 2 * n)


def real_addends(b: Array, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with bias and residual as interleaved real and imaginary parts of all
    columns."""
    xp, found = namespace(b), dict(options)
    for name in ("bias", "residual"):
        if (x := found.get(name)) is not None:
            found[name] = as_real(xp.broadcast_to(x, (*x.shape[:-1], b.shape[-1])))
    return found
