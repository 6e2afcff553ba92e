"""decode_attention in FP64, and bounds of the kernels' errors, from attention by sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, namespace
from ..op import Bound
from ..typing import Array, Factor
from .attention import attention, of_pages, of_sequence
from .attention_bound import P_SHIFT, attention_bound, joined
from .cache_scales import Caches, CacheScales
from .elementary import EXP2_ULPS
from .rounding import rounding_rms

_SMALLEST_TILE = 16  # keys
_WARPS = 8  # warps that share a chunk's keys, at most
_GROUP, _MOST_GROUPS = 8, 32  # chunks merged into one group; groups of a sequence


def decode_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seq_lens: Array | None = None,
    block_table: Array | None = None,
    layout: str = "hnd",
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    scale: Factor | None = None,
    return_lse: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    """Return softmax(scale * q k^T) v over the visible keys in FP64, and its log-sum-exp.

    8-bit keys and values are the stored codes times k_scale and v_scale.

    >>> q, k = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 1, 4, 8), np.float16)
    >>> v = np.array([1, 3, 7, 9], np.float16).reshape(1, 1, 4, 1)
    >>> reference.decode_attention(q, k, v, seq_lens=np.int32([2]))[0].item()  # of two keys
    2.0
    """
    options = _options(causal, scale, return_lse, more)
    sequences = _sequences(q, k_cache, v_cache, seq_lens, block_table, layout, k_scale, v_scale)
    parts = [attention(*one[:3], **of_sequence(options, b)) for b, one in enumerate(sequences)]
    return _stacked(q, v_cache, return_lse, parts)


def decode_attention_bound(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seq_lens: Array | None = None,
    block_table: Array | None = None,
    layout: str = "hnd",
    k_scale: Any = None,
    v_scale: Any = None,
    causal: bool = True,
    scale: Factor | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    config: Any = None,
    reference: tuple[Any, ...],
    **more: Any,
) -> tuple[Bound, ...]:
    """Return the Bounds of attention plus the errors of merging chunks of keys.

    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 8, 1, 64)).astype(np.float16)
    >>> k, v = rng.standard_normal((2, 2, 2, 16, 64)).astype(np.float16)
    >>> exact = reference.decode_attention(q, k, v)
    >>> (bound,) = reference.decode_attention_bound(q, k, v, reference=exact)
    >>> bool((abs(cupykern.decode_attention(q, k, v) - exact[0]) <= bound.elementwise).all())
    True

    The partial sums are rescaled by a rounded exponential at every tile of a chunk, at the merge of
    its warps, at every chunk of its group, and at the merge of groups.  Each rescaling has a
    relative error of 2 EXP2_ULPS + 2 units.  In the worst case the errors of the products and of
    their sum have opposite signs.  Warps, chunks and groups are added one after another.
    """
    all_options = _options(causal, scale, return_lse, more)
    parts = []
    sequences = _sequences(q, k_cache, v_cache, seq_lens, block_table, layout, k_scale, v_scale)
    for b, (one_q, k, v, scales) in enumerate(sequences):
        own, options = tuple(x[b : b + 1] for x in reference), of_sequence(all_options, b)
        operand = q.dtype if scales is None else dtypes.float16
        options_of_bound = {"scales": scales, "operand": operand, **options}
        bounds = attention_bound(one_q, k, v, reference=own, **options_of_bound)
        if return_lse:
            bounds = (bounds[0], _merged_lse(bounds[1], own[1], k, operand))
        absolute = attention(one_q, k, abs(v.astype(np.float64)), **options)[0]
        tiles = -(-k.shape[2] // _SMALLEST_TILE)
        factors, sums = tiles + _GROUP + 2, _WARPS + _GROUP + _MOST_GROUPS
        relative = (factors * (2 * EXP2_ULPS + 2) + sums) * UNIT_ROUNDOFF_32
        added = (relative * (absolute + abs(own[0])), relative)
        parts.append(
            tuple(
                bound._replace(elementwise=bound.elementwise + more)
                for bound, more in zip(bounds, added, strict=False)
            )
        )
    if not parts:
        none = _stacked(q, v_cache, return_lse, [])
        return tuple(Bound(x, x) for x in none)
    return joined(parts, lambda arrays: _stacked(q, v_cache, return_lse, arrays))


def _merged_lse(bound: Bound, lse: Array, k: Array, dtype: np.dtype) -> Bound:
    """Return the Bound of a log-sum-exp from the sum and the origin of merged chunks.

    FP16's shift (P_SHIFT) makes both larger.
    """
    xp = namespace(lse)
    size = math.log(k.shape[2] + 1) + P_SHIFT * math.log(2) * (dtype == np.float16)
    of_origin = rounding_rms(xp.where(xp.isfinite(lse), xp.abs(lse), 0.0) + size)
    more = xp.hypot(of_origin, rounding_rms(xp.full_like(lse, size)))
    rms = xp.hypot(bound.rms, more)
    return bound._replace(rms=xp.where(bound.rms > 0, rms, 0.0), bias=bound.bias + more)


def _options(
    causal: bool, scale: Factor | None, return_lse: bool, more: dict[str, Any]
) -> dict[str, Any]:
    options = {"causal": bool(causal), "causal_align": "bottom_right", "return_lse": return_lse}
    names = "window", "softcap", "alibi_slopes", "sinks", "score", "mask", "operands"
    options |= {name: more[name] for name in names if name in more}
    return options if scale is None else {"scale": scale, **options}


def _sequences(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    seq_lens: Array | None,
    block_table: Array | None,
    layout: str,
    k_scale: Any,
    v_scale: Any,
) -> Iterator[tuple[Any, Any, Any, CacheScales | None]]:
    """Yield (q, k, v, scales) of each sequence as a batch of one, cut to its length.

    8-bit caches are multiplied by their scales.
    """
    caches = Caches.of(q.dtype, k_cache, v_cache, layout, k_scale, v_scale)
    page = caches.arrays[0].shape[2]
    for b in range(q.shape[0]):

        def pick(x: Array, b: int = b) -> Array:
            return x[b] if block_table is None else of_pages(x, block_table[b])

        room = page if block_table is None else page * block_table.shape[1]
        length = room if seq_lens is None else min(max(int(seq_lens[b]), 0), room)
        yield (q[b : b + 1], *caches.sequence(pick, length))


def _stacked(q: Array, v: Array, return_lse: bool, parts: list[Any]) -> tuple[Any, ...]:
    """Return the outputs of all sequences as those of a batch."""
    xp = namespace(q)
    if parts:
        return tuple(xp.concatenate(xs, axis=0) for xs in zip(*parts, strict=True))
    shapes = ((*q.shape[:3], v.shape[3]), *([q.shape[:3]] if return_lse else []))
    return tuple(xp.zeros(shape) for shape in shapes)
