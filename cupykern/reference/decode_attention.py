"""decode_attention in FP64, and how far the kernels may be from it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, as_float64, finfo, namespace
from ..op import Bound
from .elementary import EXP2_ULPS, LOG_ULPS
from .matmul import MMA_DEPTH, MMA_ERROR, product

_FLOOR = 2.0**-126  # what FP32 loses below its smallest normal number
_SHIFT = 14  # decode_attention.cu: FP16 weights are 2^_SHIFT larger
_LARGEST_CHUNKS, _SMALLEST_TILE = 64, 16


def decode_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    causal: bool = True,
    scale: Any = None,
    return_lse: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """softmax(scale * q @ k^T) @ v, and the log of the sum of exp(scores), in FP64."""
    xp = namespace(q)
    with np.errstate(all="ignore"):
        p = _parts(q, k_cache, v_cache, seq_lens, block_table, causal, scale)
        out = product(p.weights, p.v).reshape(*q.shape[:3], v_cache.shape[3])
        lse = (p.top + xp.log(p.sums))[..., 0].reshape(q.shape[:3])
    return (out, lse) if return_lse else (out,)


class _Parts(NamedTuple):
    """By (batch, KV head, row, key); a row is a query head and a query.

    weights: of the softmax, 0 where no key is seen.  top: the largest score, sums: of exp(score - top)
    (0 of no key).
    """

    q: Any
    k: Any
    v: Any
    scores: Any
    seen: Any
    weights: Any
    top: Any
    sums: Any
    scale: float


def _parts(
    q: Any, k_cache: Any, v_cache: Any, seq_lens: Any, block_table: Any, causal: bool, scale: Any
) -> _Parts:
    xp = namespace(q)
    batch, heads, queries, dim = q.shape
    k, v = _gather(k_cache, block_table), _gather(v_cache, block_table)
    kv_heads, num_keys = k.shape[1:3]
    lens = xp.full(batch, num_keys) if seq_lens is None else xp.asarray(seq_lens)
    lens = xp.clip(lens, 0, num_keys)
    keys = xp.arange(num_keys)
    there = (keys < lens[:, None])[:, None, :, None]
    # What lies behind the end may be anything.
    k, v = (xp.where(there, as_float64(x), 0.0) for x in (k, v))
    rows = heads // max(kv_heads, 1) * queries
    q = as_float64(q).reshape(batch, kv_heads, rows, dim)
    scale = 1 / math.sqrt(dim) if scale is None else float(scale)
    scores = scale * product(q, xp.swapaxes(k, -1, -2))
    query = xp.arange(rows) % max(queries, 1)
    ends = lens[:, None] - (queries - 1 - query if causal else 0 * query)
    seen = (keys < ends[:, None, :, None]) & xp.ones(scores.shape, bool)
    if num_keys:
        top = xp.max(xp.where(seen, scores, -np.inf), axis=-1, keepdims=True)
    else:
        top = xp.full((*scores.shape[:-1], 1), -np.inf)
    empty = ~xp.any(seen, axis=-1, keepdims=True)
    weights = xp.where(seen, xp.exp(scores - xp.where(empty, 0.0, top)), 0.0)
    sums = xp.sum(weights, axis=-1, keepdims=True)
    weights = weights / xp.where(empty, 1.0, sums)
    return _Parts(q, k, v, scores, seen, weights, top, sums, scale)


def _gather(cache: Any, block_table: Any) -> Any:
    """A cache as (batch, KV heads, keys, dim)."""
    if block_table is None:
        return cache
    xp = namespace(cache)
    table = xp.asarray(block_table)
    _, heads, page, dim = cache.shape
    if not cache.shape[0]:
        return cache.reshape(table.shape[0] if page * heads == 0 else 0, heads, 0, dim)
    pages = cache[xp.clip(table, 0, cache.shape[0] - 1)]
    batch, max_pages = table.shape
    return xp.swapaxes(pages, 1, 2).reshape(batch, heads, max_pages * page, dim)


def decode_attention_bound(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seq_lens: Any = None,
    block_table: Any = None,
    causal: bool = True,
    scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    config: Any = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Elementwise: the errors of scores, exponentials and weights carried into the weighted sum, the
    sums' own, one rounding.

    A weight exp(s - max) with an error e of its exponent is wrong by e relatively, to first order, and
    so is each term of both sums (as for softmax: Blanchard, Higham, Higham, IMA J. Numer. Anal. 41,
    2021); r / (1 - r) for the higher orders.
    """
    xp, u = namespace(q), UNIT_ROUNDOFF_32
    info = finfo(q.dtype)
    with np.errstate(all="ignore"):
        p = _parts(q, k_cache, v_cache, seq_lens, block_table, causal, scale)
        exponent, exponent_rms = _exponent_error(xp, p)
        num_keys = p.k.shape[2]
        tiles = -(-num_keys // _SMALLEST_TILE)
        # A sum is rescaled with every tile of a chunk, by a rounded exponential, and once more at the
        # end; a thread adds up to 32 weights of a tile, then tiles, 8 threads and chunks.
        rescaling = tiles * (2 * EXP2_ULPS + 2) * u + (2 * EXP2_ULPS + 3) * u
        weight = xp.sum(p.weights * exponent, -1, keepdims=True)
        weight_sum = (32 + tiles + 3 + _LARGEST_CHUNKS) * u + rescaling + weight
        exp2_error = 2 * EXP2_ULPS * u

        absolute = product(p.weights, xp.abs(p.v))
        blocks = -(-num_keys // MMA_DEPTH)
        relative = (
            info.unit_roundoff
            + exp2_error
            + rescaling
            + MMA_ERROR * (blocks + 2)
            + 3 * u
            + weight_sum
        )
        # Weights of FP16 are subnormal, and rounded to multiples of 2^-24, far below the largest;
        # the sum of all is at least 1.
        floor = 2.0 ** (-25 - _SHIFT) if q.dtype == dtypes.float16 else _FLOOR
        sums = xp.where(p.sums == 0, 1.0, p.sums)
        lost = (2 * floor + _FLOOR) * xp.sum(xp.abs(p.v), axis=2)[:, :, None] / sums
        worst = product(p.weights * exponent, xp.abs(p.v)) + absolute * relative
        worst = worst / (
            1 - xp.minimum(xp.max(exponent, -1, initial=0.0)[..., None] + relative, 0.5)
        )
        y = xp.abs(reference[0]).reshape(worst.shape)
        worst = worst + lost
        worst = worst + info.unit_roundoff * (y + worst) + info.underflow_error + 2 * _FLOOR

        squares = product(p.weights**2, p.v**2)
        rms = (
            (info.unit_roundoff**2 / 3 + (2 * u) ** 2) * squares
            + product((p.weights * exponent_rms) ** 2, p.v**2)
            + y**2 * xp.sum((p.weights * exponent_rms) ** 2, -1, keepdims=True)
            + (u * (blocks + 4)) ** 2 * (squares + y**2)
            + (info.unit_roundoff * y) ** 2 / 3
        )
        rms = xp.sqrt(rms) + lost + info.underflow_error / math.sqrt(3)
        bounds = [Bound(worst.reshape(reference[0].shape), rms.reshape(reference[0].shape))]
        if return_lse:
            bounds.append(_lse_bound(xp, p, weight_sum, weight, reference[1]))
    return tuple(bounds)


def _exponent_error(xp: Any, p: _Parts) -> tuple[Any, Any]:
    """(worst, rms) absolute error of a weight's exponent score - max, by row and key, 0 where not seen.

    The product's sum in a tensor core, two roundings of a score with its scale, that of the scale with
    log2 e, and one of the difference, which is of a tile's own largest score and the shift.
    """
    u = UNIT_ROUNDOFF_32
    size, blocks = abs(p.scale), -(-p.k.shape[-1] // MMA_DEPTH)
    magnitude = size * product(xp.abs(p.q), xp.swapaxes(xp.abs(p.k), -1, -2))
    finite = xp.where(xp.isfinite(p.scores) & p.seen, xp.abs(p.scores), 0.0)
    lowest = xp.max(finite, -1, keepdims=True, initial=0.0)
    distance = finite + lowest + _SHIFT * math.log(2)
    flushed = size * _FLOOR * (2 * p.k.shape[-1] + xp.sum(xp.abs(p.q), -1, keepdims=True))
    flushed = flushed + size * _FLOOR * xp.sum(xp.abs(p.k), -1)[:, :, None]
    worst = magnitude * MMA_ERROR * blocks + u * (3 * finite + distance) + flushed
    squares = product(p.q**2, xp.swapaxes(p.k**2, -1, -2)) * size**2
    rms = u * xp.sqrt(blocks**2 * (squares + finite**2) + finite**2 + distance**2) + flushed
    return xp.where(p.seen, worst, 0.0), xp.where(p.seen, rms, 0.0)


def _lse_bound(xp: Any, p: _Parts, weight_sum: Any, weight: Any, reference: Any) -> Bound:
    """Absolute: the sum's relative error; the exponent's product with log 2, the logarithm and their
    sum rounded."""
    u = UNIT_ROUNDOFF_32
    top = xp.where(xp.isfinite(p.top), xp.abs(p.top), 0.0) + _SHIFT * math.log(2)
    log_sum = xp.abs(xp.log(xp.where(p.sums == 0, 1.0, p.sums))) + _SHIFT * math.log(2)
    rounding = 2 * u * top + 2 * LOG_ULPS * u * log_sum + u * (top + log_sum)
    exp2_error = 2 * EXP2_ULPS * u
    worst = (weight_sum + exp2_error) / (1 - weight_sum) + rounding
    rms = weight + (2 * EXP2_ULPS + 2) * u + rounding
    return Bound(worst.reshape(reference.shape), rms.reshape(reference.shape))
