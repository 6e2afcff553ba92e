"""Attention in FP64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..expression import Expression, read
from ..numerics import as_float64, namespace
from ..typing import Array, Factor, Namespace
from .accumulation import product
from .cache_scales import Caches, CacheScales
from .expression import Environment, evaluate, operand

_CHUNK = 2**24  # scores in memory at a time
_LOST = 2.0**-20  # smaller probabilities may round to 0 in FP16


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    causal_align: str | None = None,
    mask: Any = None,
    input_pos: int | None = None,
    scale: Factor | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    return_row_stats: bool = False,
    **more: Any,
) -> tuple[Any, ...]:
    """Return softmax(score(scale * q k^T) + bias) v over the unmasked keys, in FP64.

    >>> q = k = np.zeros((1, 1, 2, 8), np.float16)  # all scores are 0
    >>> v = np.array([1, 3], np.float16).reshape(1, 1, 2, 1)
    >>> out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    >>> out.ravel().tolist()  # query 0 sees key 0, query 1 both keys
    [1.0, 2.0]
    >>> bool(np.allclose(np.exp(lse), [1, 2]))
    True

    Arguments as for `cupykern.attention`.  The result is (out[, lse][, row_max, row_sum]): out has
    q's shape with v's last dim, the others are (B, H, Sq).  A score of -inf counts as masked.  A
    row without keys gives zeros; its largest score, sum and log-sum-exp are -inf, 0 and -inf.  The
    largest score ignores NaN.  A sink is a score without a key.
    """
    options = ScoreOptions.of(more)
    problem = Problem.of(q, k, v, causal, causal_align, mask, input_pos, scale, layout, options)

    def rows(part: Rows) -> tuple[Any, ...]:
        out = problem.times_v(part) / part.divisor
        return out, part.top[..., 0], part.sum[..., 0]

    with np.errstate(all="ignore"):
        out, top, total = problem.by_rows(rows)
        if not k.size:
            top, total = problem.of_no_keys(top, total)
        lse = top + problem.xp.log(total)
    return outputs(problem.restore(out), top, total, lse, return_lse, return_row_stats)


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array | None = None,
    **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return `attention` of each sequence: (out (rows, H, Dv)[, lse (H, rows)]).

    Sequence i has the rows from cu_seqlens[i] to cu_seqlens[i + 1] - 1 of (rows, H, D) arrays.
    Without cu_seqlens_k its keys are those in its pages.

    >>> q = k = np.zeros((3, 1, 8), np.float16)
    >>> v = np.array([1, 3, 7], np.float16).reshape(3, 1, 1)
    >>> cu = np.array([0, 2, 3], np.int32)  # sequences of 2 and 1 tokens
    >>> reference.attention_varlen(q, k, v, cu, cu)[0].ravel().tolist()
    [2.0, 2.0, 7.0]
    """
    keys = keys_of_sequences(q, k, v, cu_seqlens_k, options)
    options = of_sequences(options)
    parts = [
        attention(*sequence[:3], layout="bshd", **of_sequence(options, i))
        for i, sequence in enumerate(sequences(q, cu_seqlens_q, keys))
    ]
    xp = namespace(q)
    if not parts:
        none = (q[None], *(xp.zeros((1, 0, q.shape[1], x.shape[-1])) for x in (k, v)))
        options = {**options, "alibi_slopes": None}
        return concatenated(xp, [attention(*none, layout="bshd", **options)])
    return concatenated(xp, parts)


def of_sequences(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `attention` from those of attention_varlen."""
    unused = (
        "max_seqlen_q",
        "max_seqlen_k",
        "block_table",
        "seq_lens_k",
        "layout",
        "k_scale",
        "v_scale",
        "out",
        "config",
    )
    options = {name: value for name, value in options.items() if name not in unused}
    return {"causal_align": "bottom_right", **options}


def of_sequence(options: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the options of sequence i: it takes its row of 2-D alibi_slopes."""
    options = {**options, "element": i}
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.ndim < 2 else {**options, "alibi_slopes": slopes[i]}


def sequences(
    q: Array, cu_q: Any, keys: Iterator[tuple[Any, Any, CacheScales | None]]
) -> Iterator[tuple[Any, Any, Any, CacheScales | None]]:
    """Yield (q, k, v), (1, length, H, D), of each sequence, and the scales of 8-bit caches."""
    for (first, end), (k, v, scales) in zip(itertools.pairwise(cu_q.tolist()), keys, strict=True):
        yield q[None, first:end], k[None], v[None], scales


def keys_of_sequences(
    q: Array, k: Array, v: Array, cu_k: Any, options: Mapping[str, Any]
) -> Iterator[tuple[Any, Any, CacheScales | None]]:
    """Yield (k, v, scales) of each sequence from attention_varlen's arguments.

    k and v: (length, Hkv, D).  8-bit caches are multiplied by their scales.
    """
    if cu_k is not None:
        for first, end in itertools.pairwise(cu_k.tolist()):
            yield k[first:end], v[first:end], None
        return
    layout, most = options.get("layout", "hnd"), options.get("max_seqlen_k")
    caches = Caches.of(q.dtype, k, v, layout, options.get("k_scale"), options.get("v_scale"))
    for pages, length in zip(options["block_table"], options["seq_lens_k"].tolist(), strict=True):
        length = max(length, 0) if most is None else min(max(length, 0), most)

        def pick(x: Array, pages: Any = pages) -> Array:
            return of_pages(x, pages)

        own_k, own_v, scales = caches.sequence(pick, length)
        yield own_k[0].swapaxes(0, 1), own_v[0].swapaxes(0, 1), scales


def of_pages(cache: Array, pages: Any) -> Array:
    """Return the keys (Hkv, max_pages * page, D) of `pages`, a row of a block table.

    cache: (num_pages, Hkv, page, D).
    """
    count, heads, page, dim = cache.shape
    table = namespace(cache).clip(namespace(cache).asarray(pages), 0, max(count - 1, 0))
    table = table if count else table[:0]
    return cache[table].swapaxes(0, 1).reshape(heads, table.size * page, dim)


def concatenated(xp: Namespace, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the outputs (rows, H, Dv) and statistics (H, rows) of all sequences."""
    return tuple(
        xp.concatenate([x[0] for x in xs], axis=0 if i == 0 else 1)
        for i, xs in enumerate(zip(*parts, strict=True))
    )


def outputs(
    out: Any, top: Any, total: Any, lse: Any, with_lse: bool, with_stats: bool
) -> tuple[Any, ...]:
    return (out, *((lse,) if with_lse else ()), *((top, total) if with_stats else ()))


def named(outputs: tuple[Any, ...], with_lse: bool, with_stats: bool) -> tuple[Any, ...]:
    """Return (out, row_max, row_sum, lse) from `outputs`; None for absent ones."""
    rest = list(outputs[1:])
    lse = rest.pop(0) if with_lse else None
    return (outputs[0], *(rest if with_stats else (None, None)), lse)


class ScoreOptions(NamedTuple):
    """Options of `attention` that change scores."""

    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    seq_lens: Any = None
    score: Any = None
    operands: Any = None
    element: int | None = None  # for a batch of one: its index in the call's batch

    @classmethod
    def of(cls, options: dict[str, Any]) -> ScoreOptions:
        return cls(*map(options.get, cls._fields))


class Rows(NamedTuple):
    """Some rows of scores: (B, Hkv, G, rows, Sk).  Row statistics have size 1 along the last axis.

    product: scale * q k^T.  capped: after the soft cap.  formed: after the score formula.
    alibi: the ALiBi term that is subtracted, or 0.
    score: after ALiBi and a bias.  weights: exp(score - top), 0 for masked keys.
    sink: the weight of the sink.
    divisor: the sum, or 1 for an empty row.  finite_top: top, or 0 where it is not finite.
    """

    first: int
    product: Array
    capped: Any
    formed: Any
    alibi: Any
    score: Any
    keep: Any
    top: Array
    finite_top: Any
    weights: Array
    sink: Any
    sum: Any
    divisor: Any


@dataclass(frozen=True)
class Problem:
    """FP64 operands: q (B, Hkv, G, Sq, D), k and v (B, Hkv, 1, Sk, D or Dv), H = Hkv * G."""

    xp: Namespace
    q: Array
    k: Array
    v: Array
    mask: Any  # broadcasts to (B, H, Sq, Sk), bool or FP64; or None
    offset: Any  # query i is at position i + offset, a number or (B, 1, 1, 1, 1)
    window: tuple[int, int]  # keys from position - left to position + right; -1: unlimited
    lengths: Any  # number of keys per batch element, (B, 1, 1, 1, 1), or None
    softcap: float | None
    slopes: Any  # (B or 1, Hkv, G, 1, 1), or None
    sinks: Any  # (1, Hkv, G, 1, 1), or None
    scale: float
    layout: str
    formula: Expression | None  # of the score
    mask_formula: Expression | None
    operands: Mapping[str, Any]
    element: int

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, causal: bool, causal_align: str | None, mask: Any,
        input_pos: int | None, scale: Factor | None, layout: str, options: ScoreOptions,
    ) -> Problem:  # fmt: skip
        xp = namespace(q)
        q, k, v = (as_float64(x) for x in (q, k, v))
        if layout == "bshd":
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        groups = q.shape[1] // max(k.shape[1], 1)
        q = q.reshape(q.shape[0], k.shape[1], groups, *q.shape[2:])
        left, right = options.window or (-1, -1)
        window, slopes, sinks = (left, 0 if causal else right), options.alibi_slopes, options.sinks
        sq, sk, lengths = q.shape[3], k.shape[2], options.seq_lens
        is_formula = isinstance(mask, (str, Expression)) or callable(mask)
        score = read(options.score, "score") if options.score is not None else None
        masked = read(mask, "mask") if is_formula else None
        of_positions = [x for x in (score, masked) if x is not None and x.uses("i")]
        positions_matter = window != (-1, -1) or slopes is not None or bool(of_positions)
        if positions_matter and causal_align is None and input_pos is None and sq != sk:
            raise ValueError(f"{sq} queries and {sk} keys need causal_align or input_pos")
        keys: Any = sk
        if lengths is not None:
            lengths = xp.clip(xp.asarray(lengths), 0, sk).astype(np.int64).reshape(-1, 1, 1, 1, 1)
            keys = lengths
        offset = (input_pos or 0) + (keys - sq if causal_align == "bottom_right" else 0)
        if slopes is not None:
            batch = slopes.shape[0] if slopes.ndim == 2 else 1
            slopes = as_float64(slopes).reshape(batch, k.shape[1], groups, 1, 1)
        if sinks is not None:
            sinks = as_float64(sinks).reshape(1, k.shape[1], groups, 1, 1)
        operands = {name: operand(q, x) for name, x in (options.operands or {}).items()}
        mask = None if masked else mask
        if mask is not None:
            mask = mask if hasattr(mask, "dtype") else mask.to_dense(xp)
            mask = mask if mask.dtype == np.bool_ else as_float64(mask)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        softcap = None if options.softcap is None else float(options.softcap)
        return cls(
            xp, q, k[:, :, None], v[:, :, None], mask, offset, window, lengths, softcap, slopes,
            sinks, scale, layout, score, masked, operands, options.element or 0,
        )  # fmt: skip

    @property
    def has_options(self) -> bool:
        """Whether scores have a soft cap, ALiBi slopes or a formula."""
        options = self.softcap, self.slopes, self.formula
        return any(x is not None for x in options)

    def of_no_keys(self, top: Array, total: Array) -> tuple[Array, Array]:
        """Return (largest scores, sums) of rows without keys; `by_rows` gives zeros for them."""
        if self.sinks is None or not top.size:
            return top - np.inf, total
        return top + self.sinks.reshape(1, -1, 1), total + 1.0

    def restore(self, out: Array) -> Any:
        """Return an output (B, H, Sq, Dv) in the call's layout."""
        return out.transpose(0, 2, 1, 3) if self.layout == "bshd" else out

    def by_rows(
        self, rows: Callable[[Rows], tuple[Any, ...]], matrices: int = 1, vectors: int = 2
    ) -> tuple[Any, ...]:
        """Return `rows` of all rows: `matrices` (B, H, Sq, Dv), then `vectors` (B, H, Sq)."""
        b, h_kv, groups, sq, _ = self.q.shape
        sk, step = self.k.shape[3], max(1, _CHUNK // max(1, b * h_kv * groups * self.k.shape[3]))
        if 0 in (b, h_kv, groups, sq, sk):
            shape, xp = (b, h_kv * groups, sq), self.xp
            empty = [xp.zeros((*shape, self.v.shape[-1]))] * matrices
            return *empty, *([xp.zeros(shape)] * vectors)
        parts = [rows(self._rows(i, min(i + step, sq))) for i in range(0, sq, step)]
        merged: list[Any] = []
        for xs in zip(*parts, strict=True):
            vector = len(merged) >= matrices
            x = self.xp.concatenate(xs, axis=3)
            merged.append(x.reshape(b, h_kv * groups, sq, *(() if vector else x.shape[-1:])))
        return tuple(merged)

    def _rows(self, first: int, end: int) -> Rows:
        xp = self.xp
        scaled = score = self.scale * product(self.q[:, :, :, first:end], self.k.swapaxes(-1, -2))
        if self.softcap is not None:
            score = self.softcap * xp.tanh(score / self.softcap)
        capped, alibi = score, 0.0
        if self.formula is not None:
            given = self.environment(self.formula, first, end, capped)
            score = xp.broadcast_to(evaluate(self.formula.nodes, given)[-1], score.shape) + 0.0
        formed = score
        positions = self.offset + xp.arange(first, end)[:, None]
        distance = positions - xp.arange(score.shape[-1])[None]
        if self.slopes is not None:
            alibi = self.slopes * xp.abs(distance)
            score = score - alibi
        shape = (self.q.shape[0], -1, *score.shape[3:])
        keep = xp.ones(score.shape, bool)
        if self.mask is not None:
            whole = (self.q.shape[0], self.q.shape[1] * self.q.shape[2], self.q.shape[3], shape[-1])
            mask = xp.broadcast_to(self.mask, whole)[:, :, first:end].reshape(score.shape)
            if mask.dtype == np.bool_:
                keep = keep & mask
            else:
                score = score + mask
                keep = keep & (mask != -np.inf)
        if self.mask_formula is not None:
            given = self.environment(self.mask_formula, first, end, capped)
            keep = keep & evaluate(self.mask_formula.nodes, given)[-1]
        left, right = self.window
        if left >= 0:
            keep = keep & (distance <= left)
        if right >= 0:
            keep = keep & (-distance <= right)
        if self.lengths is not None:
            keep = keep & (xp.arange(shape[-1]) < self.lengths)
        keep = keep & (score != -np.inf)
        top = xp.max(xp.where(keep & ~xp.isnan(score), score, -np.inf), axis=-1, keepdims=True)
        if self.sinks is not None:
            top = xp.maximum(top, self.sinks)
        finite_top = xp.where(xp.isfinite(top), top, 0.0)
        origin = xp.where(top == -np.inf, 0.0, top)
        weights = xp.where(keep, xp.exp(xp.where(keep, score, 0.0) - origin), 0.0)
        sink = 0.0 if self.sinks is None else xp.exp(self.sinks - origin)
        total = xp.sum(weights, axis=-1, keepdims=True) + sink
        empty = ~xp.any(keep, axis=-1, keepdims=True)
        divisor = xp.where(empty, 1.0, total)
        return Rows(
            first,
            scaled,
            capped,
            formed,
            alibi,
            score,
            keep,
            top,
            finite_top,
            weights,
            sink,
            total,
            divisor,
        )

    def environment(self, formula: Expression, first: int, end: int, capped: Any) -> Environment:
        """Return the names and operands of a formula for rows first to end of the scores."""
        xp, (b, h_kv, groups, *_) = self.xp, self.q.shape
        heads = xp.arange(h_kv * groups, dtype=np.int64).reshape(1, h_kv, groups, 1, 1)
        names = {
            "s": capped,
            "b": self.element + xp.arange(b, dtype=np.int64).reshape(-1, 1, 1, 1, 1),
            "h": heads,
            "hkv": heads // groups,
            "i": (self.offset + xp.arange(first, end)[:, None]).astype(np.int64),
            "j": xp.arange(self.k.shape[3], dtype=np.int64),
        }
        return Environment(xp, names, [self.operands[name] for name in formula.names])

    def multiply(self, weights: Array, v: Array) -> Any:
        return product(weights, v)

    def times_v(self, part: Rows) -> Any:
        """Return weights @ v, in which masked keys' NaN and infinities have no effect."""
        xp, v = self.xp, self.v
        out = product(part.weights, xp.where(xp.isfinite(v), v, 0.0))  # NaN where a weight is NaN
        if not bool(xp.isfinite(v).all()):
            used = part.weights != 0
            for x, where, row in (
                *((np.inf, v == np.inf, used), (-np.inf, v == -np.inf, used)),
                (np.nan, xp.isnan(v), part.keep),
            ):
                met = product(row.astype(np.float64), where.astype(np.float64))
                out = out + xp.where(met > 0, x, 0.0)
        return out

    def lost_infinities(self, part: Rows) -> Any:
        """Return where a kernel may give NaN for an infinity of V: its probability may round to 0
        in FP16."""
        small = part.keep & (part.weights < _LOST)
        infinite = self.xp.isinf(self.v).astype(np.float64)
        return product(small.astype(np.float64), infinite) > 0
