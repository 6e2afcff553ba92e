"""Attention in FP64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..numerics import as_float64, namespace
from ..typing import Array, Factor, Namespace
from .accumulation import product

_CHUNK = 2**24  # scores that are held at once


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
    **_: Any,
) -> tuple[Any, ...]:
    """softmax(scale * q k^T + bias, over the keys that are kept) v in FP64.

    A score of -inf counts as masked; a row with no key gives zeros, and -inf, 0, -inf as its
    largest score, sum and log-sum-exp.  The largest score is that of those that are numbers.
    """
    problem = Problem.of(q, k, v, causal, causal_align, mask, input_pos, scale, layout)

    def rows(part: Rows) -> tuple[Any, ...]:
        out = problem.times_v(part.weights) / part.divisor
        return out, part.top[..., 0], part.sum[..., 0]

    with np.errstate(all="ignore"):
        out, top, total = problem.by_rows(rows)
        if not k.size:
            top = top - np.inf
        lse = top + problem.xp.log(total)
    return outputs(problem.restore(out), top, total, lse, return_lse, return_row_stats)


def attention_varlen(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, **options: Any
) -> tuple[Any, ...]:
    """`attention` of each sequence: rows cu_seqlens[i] to cu_seqlens[i + 1] of (rows, H, D)."""
    parts = [
        attention(*sequence, layout="bshd", **of_sequences(options))
        for sequence in sequences(q, k, v, cu_seqlens_q, cu_seqlens_k)
    ]
    xp = namespace(q)
    if not parts:
        return concatenated(
            xp, [attention(q[None], k[None], v[None], layout="bshd", **of_sequences(options))]
        )
    return concatenated(xp, parts)


def of_sequences(options: dict[str, Any]) -> dict[str, Any]:
    unused = ("max_seqlen_q", "max_seqlen_k", "out", "config")
    options = {name: value for name, value in options.items() if name not in unused}
    return {"causal_align": "bottom_right", **options}


def sequences(q: Array, k: Array, v: Array, cu_q: Any, cu_k: Any) -> Iterator[tuple[Any, Any, Any]]:
    cu_q, cu_k = (x.tolist() for x in (cu_q, cu_k))
    for i in range(len(cu_q) - 1):
        keys = slice(cu_k[i], cu_k[i + 1])
        yield q[None, cu_q[i] : cu_q[i + 1]], k[None, keys], v[None, keys]


def concatenated(xp: Namespace, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Outputs (rows, H, Dv) and statistics (H, rows) of all sequences."""
    return tuple(
        xp.concatenate([x[0] for x in xs], axis=0 if i == 0 else 1)
        for i, xs in enumerate(zip(*parts, strict=True))
    )


def outputs(
    out: Any, top: Any, total: Any, lse: Any, with_lse: bool, with_stats: bool
) -> tuple[Any, ...]:
    return (out, *((lse,) if with_lse else ()), *((top, total) if with_stats else ()))


def named(outputs: tuple[Any, ...], with_lse: bool, with_stats: bool) -> tuple[Any, ...]:
    """(out, row_max, row_sum, lse) of `outputs`; None where absent."""
    rest = list(outputs[1:])
    lse = rest.pop(0) if with_lse else None
    return (outputs[0], *(rest if with_stats else (None, None)), lse)


class Rows(NamedTuple):
    """Some rows of scores: (B, Hkv, G, rows, Sk); what has no keys axis keeps it with size 1.

    product: scale * q k^T.  score: that and a bias.  weights: exp(score - top), 0 where nothing is
        kept.
    divisor: the sum, or 1 of an empty row.  finite_top: top, or 0 where it is not finite.
    """

    first: int
    product: Array
    score: Any
    keep: Any
    top: Array
    finite_top: Any
    weights: Array
    sum: Any
    divisor: Any


@dataclass(frozen=True)
class Problem:
    """FP64 operands: q (B, Hkv, G, Sq, D), k and v (B, Hkv, 1, Sk, D or Dv), H = Hkv * G."""

    xp: Namespace
    q: Array
    k: Array
    v: Array
    mask: Any  # broadcasts to (B, H, Sq, Sk), bool or FP64; None
    limit: int | None  # row i keeps keys j <= i + limit
    scale: float
    layout: str

    @classmethod
    def of(
        cls, q: Array, k: Array, v: Array, causal: bool, causal_align: str | None, mask: Any,
        input_pos: int | None, scale: Factor | None, layout: str,
    ) -> Problem:  # fmt: skip
        xp = namespace(q)
        q, k, v = (as_float64(x) for x in (q, k, v))
        if layout == "bshd":
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        groups = q.shape[1] // max(k.shape[1], 1)
        q = q.reshape(q.shape[0], k.shape[1], groups, *q.shape[2:])
        limit = None
        if causal:
            sq, sk = q.shape[3], k.shape[2]
            if causal_align is None and input_pos is None and sq != sk:
                raise ValueError(f"{sq} queries and {sk} keys need causal_align or input_pos")
            limit = (input_pos or 0) + (sk - sq if causal_align == "bottom_right" else 0)
        if mask is not None:
            mask = mask if hasattr(mask, "dtype") else mask.to_dense(xp)
            mask = mask if mask.dtype == np.bool_ else as_float64(mask)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        return cls(xp, q, k[:, :, None], v[:, :, None], mask, limit, scale, layout)

    def restore(self, out: Array) -> Any:
        """(B, H, Sq, Dv) in the call's layout."""
        return out.transpose(0, 2, 1, 3) if self.layout == "bshd" else out

    def by_rows(
        self, rows: Callable[[Rows], tuple[Any, ...]], matrices: int = 1, vectors: int = 2
    ) -> tuple[Any, ...]:
        """The outputs of `rows` for all rows: matrices (B, H, Sq, Dv), then vectors (B, H, Sq)."""
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
        if self.limit is not None:
            i, j = xp.arange(first, end)[:, None], xp.arange(shape[-1])[None]
            keep = keep & (j <= i + self.limit)
        keep = keep & (score != -np.inf)
        top = xp.max(xp.where(keep & ~xp.isnan(score), score, -np.inf), axis=-1, keepdims=True)
        finite_top = xp.where(xp.isfinite(top), top, 0.0)
        origin = xp.where(top == -np.inf, 0.0, top)
        weights = xp.where(keep, xp.exp(xp.where(keep, score, 0.0) - origin), 0.0)
        total = xp.sum(weights, axis=-1, keepdims=True)
        empty = ~xp.any(keep, axis=-1, keepdims=True)
        divisor = xp.where(empty, 1.0, total)
        return Rows(first, scaled, score, keep, top, finite_top, weights, total, divisor)

    def multiply(self, weights: Array, v: Array) -> Any:
        return product(weights, v)

    def times_v(self, weights: Array) -> Any:
        """weights @ v, in which what has no weight anywhere in a row's keep does not matter."""
        finite = self.xp.where(self.xp.isfinite(self.v), self.v, 0.0)
        out = product(weights, finite)
        if not bool(self.xp.isfinite(self.v).all()):
            used = (weights != 0).astype(np.float64)  # NaN weights count
            bad = product(used, (~self.xp.isfinite(self.v)).astype(np.float64))
            out = self.xp.where(bad > 0, np.nan, out)
        return out
