"""A mixture of experts in FP64, and the bound of `expert_parallel_moe`'s error."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ...op import Bound
from ...typing import Array
from ..accumulation import product
from ..dual_gemm import dual_gemm_silu, dual_gemm_silu_bound
from ..matmul import matmul, matmul_bound
from ..rounding import stored


def expert_parallel_moe(
    x: Array, experts: Array, gates: Array, w_gate: Array, w_up: Array, w_down: Array
) -> tuple[Any]:
    """Return the output of all ranks' tokens, by the experts of all ranks, in FP64.

    >>> x, w = np.ones((1, 2), np.float16), np.float16([[[0.5, 0], [0.5, 0]]])
    >>> experts, gates = np.array([[0]]), np.float32([[2]])
    >>> (y,) = reference.parallel.expert_parallel_moe(x, experts, gates, w, w, w)
    >>> bool(np.isclose(y, [[1 / (1 + np.exp(-1)), 0]]).all())  # 2 * 0.5 * silu(1) * 1
    True
    """
    xp, total = namespace(x), as_float64(x) * 0
    for e in range(len(w_gate)):
        rows, share = _rows(experts, gates, e)
        (inner,) = dual_gemm_silu(x[rows], w_gate[e], w_up[e])
        y = product(inner, as_float64(w_down[e]))
        xp.add.at(total, rows, share[:, None] * y)
    return (total,)


def _rows(experts: Array, gates: Array, e: int) -> tuple[Any, Any]:
    """Return (tokens, gates) of an expert."""
    token, place = (experts == e).nonzero()
    return token, as_float64(gates[token, place])


def expert_parallel_moe_bound(
    x: Array,
    experts: Array,
    gates: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    reference: tuple[Any],
) -> tuple[Bound]:
    """Return the Bound of the output.

    The error of the inner result (`dual_gemm_silu_bound`) times |w_down|, plus that of the second
    product with its rounding (`matmul_bound`), is multiplied by the gates.  Then k products and
    k - 1 sums follow in FP32, each with an error of at most u times the sum of the absolute values,
    and one rounding.

    >>> x, w = np.ones((3, 8), np.float16), np.ones((2, 8, 8), np.float16) / 8
    >>> experts, gates = np.array([[0], [1], [0]]), np.ones((3, 1), np.float32)
    >>> call = x, experts, gates, w, w, w
    >>> exact = reference.parallel.expert_parallel_moe(*call)
    >>> (bound,) = reference.parallel.expert_parallel_moe_bound(*call, reference=exact)
    >>> y = parallel.expert_parallel_moe(parallel.SelfCommunicator(), *call)
    >>> bool((abs(y - exact[0]) <= bound.elementwise).all())
    True
    """
    xp = namespace(x)
    worst, size, square = (as_float64(x) * 0 for _ in range(3))
    with np.errstate(all="ignore"):
        for e in range(len(w_gate)):
            rows, share = _rows(experts, gates, e)
            given = x[rows], w_gate[e], w_up[e]
            inner = dual_gemm_silu(*given)
            (of_inner,) = dual_gemm_silu_bound(*given, reference=inner)
            rounded = inner[0].astype(x.dtype)
            y = matmul(rounded, w_down[e])
            (own,) = matmul_bound(rounded, w_down[e], reference=y)  # at nearly equal inputs
            weight = abs(as_float64(w_down[e]))
            moved = product(of_inner.elementwise + 0 * inner[0], weight)
            xp.add.at(worst, rows, abs(share)[:, None] * (own.elementwise + 1.01 * moved))
            expected = own.rms**2 + product((of_inner.rms + 0 * inner[0]) ** 2, weight**2)
            xp.add.at(square, rows, share[:, None] ** 2 * expected)
            xp.add.at(size, rows, abs(share)[:, None] * (abs(y[0]) + moved + own.elementwise))
        worst = worst + 2 * experts.shape[1] * UNIT_ROUNDOFF_32 * size
        floor = 2.0**-126 * 2 * experts.shape[1]
        rms = xp.sqrt(square)
        return (stored(reference[0], x.dtype, worst, rms, floor=floor, bias=np.inf),)
