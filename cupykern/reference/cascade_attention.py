"""cascade_attention in FP64, and bounds of the kernels' errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..op import Bound
from ..typing import Array, Factor
from .decode_attention import decode_attention, decode_attention_bound
from .merge_attention import merge_attention
from .partial_attention import Partial
from .rounding import stored


def cascade_attention(
    q: Array,
    shared_k: Array,
    shared_v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    layout: str = "hnd",
    scale: Factor | None = None,
    softcap: Factor | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    **own: Any,
) -> tuple[Any, ...]:
    """Return softmax(scale * q k^T) v in FP64, and with return_lse its log-sum-exp.

    The softmax covers the shared keys and the visible keys of the query's own sequence.

    >>> q, shared = np.ones((2, 1, 1, 8), np.float16), np.ones((1, 1, 16, 8), np.float16)
    >>> own = np.full((2, 1, 16, 8), 3, np.float16)
    >>> out, = cupykern.reference.cascade_attention(q, shared, shared, np.ones_like(own), own)
    >>> float(out[0, 0, 0, 0])  # the mean of 16 values of 1 and 16 of 3
    2.0
    """
    options = _options(layout, scale, softcap)
    shared = decode_attention(_as_rows(q), shared_k, shared_v, causal=False, **options)
    with np.errstate(all="ignore"):
        found = merge_attention(
            *(_of_sequences(x, q) for x in shared),
            *decode_attention(q, k_cache, v_cache, **options, **own),
        )
    return found if return_lse else found[:1]


def cascade_attention_bound(
    q: Array,
    shared_k: Array,
    shared_v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    layout: str = "hnd",
    scale: Factor | None = None,
    softcap: Factor | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    reference: tuple[Any, ...],
    **own: Any,
) -> tuple[Bound, ...]:
    """Return the Bounds of both partial results, rounded to q's dtype, carried through the merge.

    >>> q, shared = np.ones((2, 1, 1, 8), np.float16), np.ones((1, 1, 16, 8), np.float16)
    >>> own = np.full((2, 1, 16, 8), 3, np.float16)
    >>> args = q, shared, shared, np.ones_like(own), own
    >>> exact = cupykern.reference.cascade_attention(*args)
    >>> bound, = cupykern.reference.cascade_attention_bound(*args, reference=exact)
    >>> error = abs(cupykern.cascade_attention(*args) - exact[0])
    >>> bool((error <= bound.elementwise).all())
    True

    The shared keys take decode_attention's bound.  It also covers `attention`, which computes many
    rows and merges fewer sums.  A merge weights both results by shares p: O = p_1 O_1 + p_2 O_2.
    With errors e_i of O_i and d_i of their log-sum-exps, the error of O is, to first order,
    p_1 e_1 + p_2 e_2 + p_1 p_2 |O_1 - O_2| (d_1 + d_2), and that of the log-sum-exp is
    p_1 d_1 + p_2 d_2.  The merge's own errors (`merge_attention_bound`) and the last rounding are
    added.
    """
    options = _options(layout, scale, softcap)
    calls: tuple[tuple[tuple[Array, ...], dict[str, Any]], ...] = (
        ((_as_rows(q), shared_k, shared_v), {"causal": False, **options}),
        ((q, k_cache, v_cache), {**options, **own}),
    )
    parts = []
    with np.errstate(all="ignore"):
        for args, kwargs in calls:
            exact = decode_attention(*args, **kwargs)
            bounds = decode_attention_bound(*args, **kwargs, reference=exact)
            parts.append(Partial.of(exact, bounds))
        shared = parts[0].map(*(lambda x: _of_sequences(x, q),) * 2)
        found = shared.merged(parts[1], "bhsd")
        of_out = stored(reference[0], q.dtype, found.out_error, found.out_rms, bias=np.inf)
    bounds = of_out, Bound(found.lse_error, found.lse_rms)
    return bounds if return_lse else bounds[:1]


def _options(layout: str, scale: Factor | None, softcap: Factor | None) -> dict[str, Any]:
    return {"layout": layout, "scale": scale, "softcap": softcap, "return_lse": True}


def _as_rows(q: Array) -> Array:
    """Return the queries of all sequences as rows of one sequence."""
    batch, heads, count, dim = q.shape
    return q.swapaxes(0, 1).reshape(1, heads, batch * count, dim)


def _of_sequences(x: Any, q: Array) -> Any:
    """Return the results of `_as_rows` (1, H, B Sq, ...) as (B, H, Sq, ...)."""
    batch, heads, count, _ = q.shape
    return x.reshape(heads, batch, count, *x.shape[3:]).swapaxes(0, 1)
