"""Attention in FP64, and how far the kernels may be from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..numerics import UNIT_ROUNDOFF_32, as_float64, finfo, namespace
from ..op import Bound
from .elementary import EXP2_ULPS, LOG_ULPS
from .matmul import MMA_DEPTH, MMA_ERROR, product

_FLOOR = 2.0**-126  # what FP32 loses below its smallest normal number
_CHUNK = 2**25  # scores that are held at once

HALF_MMA_DEPTH = 8
HALF_MMA_ERROR = 2.0**-10
"""The error of adding 8 products of FP16 numbers to an FP16 sum, relative to sum |a b|: at worst the sum
is cut to FP16's 11 bits after each of them."""

P_ERROR = 2.0**-25
"""What an FP16 probability loses below FP16's smallest normal number, relative to the row's largest.  A
kernel may shift its probabilities by a power of two and lose less."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_align: str | None = None,
    mask: Any = None,
    input_pos: int | None = None,
    scale: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    return_row_stats: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    """softmax(scale * q k^T + bias, over the keys that are kept) v in FP64.

    A score of -inf counts as masked; a row with no key gives zeros, and -inf, 0, -inf as its largest
    score, sum and log-sum-exp.  The largest score is that of those that are numbers.
    """
    problem = _Problem.of(q, k, v, causal, causal_align, mask, input_pos, scale, layout)

    def rows(part: _Rows) -> tuple[Any, ...]:
        out = problem.times_v(part.weights) / part.divisor
        return out, part.top[..., 0], part.sum[..., 0]

    with np.errstate(all="ignore"):
        out, top, total = problem.by_rows(rows)
        lse = top + problem.xp.log(total)
    return _outputs(problem.restore(out), top, total, lse, return_lse, return_row_stats)


def attention_bound(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    causal_align: str | None = None,
    mask: Any = None,
    input_pos: int | None = None,
    scale: Any = None,
    layout: str = "bhsd",
    qk_accumulate: str = "float32",
    return_lse: bool = False,
    return_row_stats: bool = False,
    reference: tuple[Any, ...],
    **_: Any,
) -> tuple[Bound, ...]:
    """Elementwise bounds of the outputs, to first order.

    A probability exp(s - c) carries the relative error e of its exponent: the error of the score (see
    `_score_error`) and roundings of (s - c) * log2 e, of exp2 and of the factors that earlier sums are
    rescaled by.  c is the same for a whole row, so that its own error cancels in the output.  With P the
    exact probabilities (their sum is 1) and u_P the unit roundoff of the format that is fed to P V:
        |error of O| <= (P e) |V| + |O| sum(P e) + (u_P + gamma) P |V| + eta_P sum |V| / row_sum + u_out |O|
    gamma: of the sums over keys, on the tensor cores and in FP32 (as in reference.matmul).
    """
    problem = _Problem.of(q, k, v, causal, causal_align, mask, input_pos, scale, layout)
    xp, u, sk = problem.xp, UNIT_ROUNDOFF_32, k.shape[1 if layout == "bshd" else 2]
    info = finfo(q.dtype)
    half = q.dtype == np.float16
    gamma_v = MMA_ERROR * -(-sk // MMA_DEPTH)
    # A lane adds at most every second key of a row, then a few lanes merge.
    gamma_sum = u * min(sk, sk / 2 + 8)
    abs_v, squares_v = problem.magnitudes_v()

    def rows(part: _Rows) -> tuple[Any, ...]:
        score, score_rms = problem.score_error(part, qk_accumulate)
        distance = xp.where(
            part.keep, xp.abs(xp.where(part.keep, part.score - part.finite_top, 0)), 0
        )
        distance = xp.where(xp.isfinite(distance), distance, 0.0)
        # log2 e * scale, the FMA before exp2, and twice what rescaling adds.
        exponent = 4 * u * distance + (2 * EXP2_ULPS + 8) * u
        probability = xp.where(part.keep, part.weights, 0.0) / part.divisor
        probability = xp.where(xp.isfinite(probability), probability, 0.0)
        worst, rms = score + exponent, xp.sqrt(score_rms**2 + (exponent / 2) ** 2)
        own = xp.sum(probability * worst, axis=-1, keepdims=True)
        own_squares = xp.sum((probability * rms) ** 2, axis=-1, keepdims=True)
        out = xp.abs(problem.times_v(probability))
        u_p, eta = info.unit_roundoff, P_ERROR if half else _FLOOR
        elementwise = (
            problem.multiply(probability * (worst + u_p + gamma_v + gamma_sum + 4 * u), abs_v)
            + own * out
            + (eta + 4 * _FLOOR) / part.divisor * xp.sum(abs_v, axis=-2, keepdims=True)
        )
        squares = (
            problem.multiply((probability * rms) ** 2 + (probability * u_p) ** 2 / 3, squares_v)
            + own_squares * out**2
            + (u * -(-sk // MMA_DEPTH)) ** 2
            * (problem.multiply(probability**2, squares_v) + out**2)
            + (u**2 * (4 + math.log2(sk + 1)) ** 2) * out**2
            + (eta / part.divisor) ** 2 / 3 * xp.sum(squares_v, axis=-2, keepdims=True)
        )
        top = xp.abs(part.finite_top)
        shared = xp.max(xp.where(part.keep, score, 0.0), axis=-1, keepdims=True)
        top_error = shared + 3 * u * top + _FLOOR * problem.floor_of_scores(part)
        # The origin of the exponents is rounded, and so is what it is multiplied by.
        origin = shared + 4 * u * top
        sum_error = own + origin + gamma_sum + (2 * EXP2_ULPS + 8) * u
        stats = (top_error, sum_error, own + gamma_sum + (2 * EXP2_ULPS + 8) * u + 4 * u * top)
        return elementwise, xp.sqrt(squares), *(x[..., 0] for x in stats)

    with np.errstate(all="ignore"):
        worst, rms, top_error, sum_error, lse_error = problem.by_rows(rows, stats=3)
        worst, rms = problem.restore(worst), problem.restore(rms)
        y = xp.abs(reference[0])
        out_floor = info.underflow_error + 4 * _FLOOR
        out_bound = Bound(
            worst * (1 + 2.0**-6) + info.unit_roundoff * (y + worst) + out_floor,
            xp.sqrt(rms**2 + (info.unit_roundoff * y) ** 2 / 3) + out_floor / math.sqrt(3),
        )
        _, top, total, lse = _named(reference, return_lse, return_row_stats)

        def of_stat(absolute: Any) -> Bound:
            absolute = absolute * (1 + 2.0**-6)
            return Bound(absolute, absolute)

        log_error = 2 * LOG_ULPS * u * math.log(sk + 2)
        if lse is not None:
            rounding = 2 * u * xp.where(xp.isfinite(lse), xp.abs(lse), 0.0)
            lse_bound = of_stat(lse_error + log_error + rounding)
        else:
            lse_bound = None
        top_bound = None if top is None else of_stat(top_error)
        sum_bound = None if total is None else of_stat(sum_error * total + _FLOOR)
    return _outputs(out_bound, top_bound, sum_bound, lse_bound, return_lse, return_row_stats)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any
) -> tuple[Any, ...]:
    """`attention` of every sequence by itself: rows cu_seqlens[i] to cu_seqlens[i + 1] of (rows, H, D)."""
    parts = [
        attention(*sequence, layout="bshd", **_of_sequences(options))
        for sequence in _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k)
    ]
    xp = namespace(q)
    if not parts:
        return _packed(
            xp, [attention(q[None], k[None], v[None], layout="bshd", **_of_sequences(options))]
        )
    return _packed(xp, parts)


def attention_varlen_bound(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    reference: tuple[Any, ...],
    **options: Any,
) -> tuple[Bound, ...]:
    """`attention_bound` of every sequence by itself."""
    xp, options = namespace(q), _of_sequences(options)
    parts, first = [], 0
    for sequence in _sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        end = first + sequence[0].shape[1]
        own = (reference[0][None, first:end], *(x[None, :, first:end] for x in reference[1:]))
        parts.append(attention_bound(*sequence, layout="bshd", reference=own, **options))
        first = end
    if not parts:
        return tuple(Bound(xp.zeros_like(x), xp.zeros_like(x)) for x in reference)
    worst = _packed(xp, [tuple(bound.elementwise for bound in part) for part in parts])
    rms = _packed(xp, [tuple(bound.rms for bound in part) for part in parts])
    return tuple(map(Bound, worst, rms))


def _of_sequences(options: dict[str, Any]) -> dict[str, Any]:
    unused = ("max_seqlen_q", "max_seqlen_k", "out", "config")
    options = {name: value for name, value in options.items() if name not in unused}
    return {"causal_align": "bottom_right", **options}


def _sequences(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Iterator[tuple[Any, Any, Any]]:
    cu_q, cu_k = (x.tolist() for x in (cu_q, cu_k))
    for i in range(len(cu_q) - 1):
        keys = slice(cu_k[i], cu_k[i + 1])
        yield q[None, cu_q[i] : cu_q[i + 1]], k[None, keys], v[None, keys]


def _packed(xp: Any, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Outputs (rows, H, Dv) and statistics (H, rows) of all sequences."""
    return tuple(
        xp.concatenate([x[0] for x in xs], axis=0 if i == 0 else 1)
        for i, xs in enumerate(zip(*parts, strict=True))
    )


def _outputs(out: Any, top: Any, total: Any, lse: Any, with_lse: bool, with_stats: bool) -> tuple:
    return (out, *((lse,) if with_lse else ()), *((top, total) if with_stats else ()))


def _named(outputs: tuple[Any, ...], with_lse: bool, with_stats: bool) -> tuple:
    """(out, row_max, row_sum, lse) of `_outputs`; None where absent."""
    rest = list(outputs[1:])
    lse = rest.pop(0) if with_lse else None
    return (outputs[0], *(rest if with_stats else (None, None)), lse)


class _Rows(NamedTuple):
    """Some rows of scores: (B, Hkv, G, rows, Sk); what has no keys axis keeps it with size 1.

    weights: exp(score - top), 0 where nothing is kept.  divisor: the sum, or 1 of an empty row.
    finite_top: top, or 0 where it is not finite.
    """

    first: int
    score: Any
    keep: Any
    top: Any
    finite_top: Any
    weights: Any
    sum: Any
    divisor: Any


@dataclass(frozen=True)
class _Problem:
    """Operands in FP64: q (B, Hkv, G, Sq, D), k and v (B, Hkv, 1, Sk, D or Dv), with H = Hkv * G."""

    xp: Any
    q: Any
    k: Any
    v: Any
    mask: Any  # broadcasts to (B, H, Sq, Sk), bool or FP64; None
    limit: int | None  # row i keeps keys j <= i + limit
    scale: float
    layout: str

    @classmethod
    def of(
        cls, q: Any, k: Any, v: Any, causal: bool, causal_align: str | None, mask: Any,
        input_pos: int | None, scale: Any, layout: str,
    ) -> _Problem:  # fmt: skip
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

    def restore(self, out: Any) -> Any:
        """(B, H, Sq, Dv) in the call's layout."""
        return out.transpose(0, 2, 1, 3) if self.layout == "bshd" else out

    def by_rows(self, rows: Callable[[_Rows], tuple[Any, ...]], stats: int = 2) -> tuple[Any, ...]:
        """The outputs of `rows` for all rows: matrices (B, H, Sq, Dv), and last the `stats` vectors (B,
        H, Sq)."""
        b, h_kv, groups, sq, _ = self.q.shape
        sk, step = self.k.shape[3], max(1, _CHUNK // max(1, b * h_kv * groups * self.k.shape[3]))
        if 0 in (b, h_kv, groups, sq, sk):
            shape, xp = (b, h_kv * groups, sq), self.xp
            matrix = xp.zeros((*shape, self.v.shape[-1]))
            if stats == 2:
                return matrix, xp.full(shape, -np.inf), xp.zeros(shape)
            return matrix, matrix, *(xp.zeros(shape) for _ in range(stats))
        parts = [rows(self._rows(i, min(i + step, sq))) for i in range(0, sq, step)]
        merged = []
        for xs in zip(*parts, strict=True):
            vector = len(merged) >= len(parts[0]) - stats
            x = self.xp.concatenate(xs, axis=3)
            merged.append(x.reshape(b, h_kv * groups, sq, *(() if vector else x.shape[-1:])))
        return tuple(merged)

    def _rows(self, first: int, end: int) -> _Rows:
        xp = self.xp
        score = self.scale * product(self.q[:, :, :, first:end], self.k.swapaxes(-1, -2))
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
        return _Rows(first, score, keep, top, finite_top, weights, total, divisor)

    def multiply(self, weights: Any, v: Any) -> Any:
        return product(weights, v)

    def times_v(self, weights: Any) -> Any:
        """weights @ v, in which what has no weight anywhere in a row's keep does not matter."""
        finite = self.xp.where(self.xp.isfinite(self.v), self.v, 0.0)
        out = product(weights, finite)
        if not bool(self.xp.isfinite(self.v).all()):
            used = (weights != 0).astype(np.float64)  # NaN weights count
            bad = product(used, (~self.xp.isfinite(self.v)).astype(np.float64))
            out = self.xp.where(bad > 0, np.nan, out)
        return out

    def magnitudes_v(self) -> tuple[Any, Any]:
        """|v| and v^2, 0 where it is not finite."""
        size = self.xp.where(self.xp.isfinite(self.v), self.xp.abs(self.v), 0.0)
        return size, size**2

    def score_error(self, part: _Rows, qk_accumulate: str) -> tuple[Any, Any]:
        """(worst, rms) absolute error of each score: the sum's, and the addition of a bias."""
        xp = self.xp
        q, k = self._finite_operands(part)
        magnitude = product(q, k.swapaxes(-1, -2))
        exact = xp.where(xp.isfinite(part.score), part.score, 0.0)
        size = xp.sqrt(product(q * q, (k * k).swapaxes(-1, -2)) + (exact / (self.scale or 1)) ** 2)
        depth = q.shape[-1]
        if qk_accumulate == "float16":
            blocks = -(-depth // HALF_MMA_DEPTH)
            worst = HALF_MMA_ERROR * blocks * magnitude + blocks * 2.0**-24
            rms = 2.0**-11 * math.sqrt(blocks) * size + math.sqrt(blocks) * 2.0**-25
        else:
            blocks = -(-depth // MMA_DEPTH)
            worst = MMA_ERROR * blocks * magnitude
            rms = UNIT_ROUNDOFF_32 * blocks * size
        scale = abs(self.scale)
        added = 0.0
        if self.mask is not None and self.mask.dtype != np.bool_:
            added = 2 * UNIT_ROUNDOFF_32 * (xp.abs(exact) + scale * magnitude)
        return scale * worst + added, scale * rms + added / 2

    def floor_of_scores(self, part: _Rows) -> Any:
        """What flushed subnormals may cost a score, in units of 2^-126."""
        q, k = self._finite_operands(part)
        xp = self.xp
        keys = xp.max(xp.sum(k, axis=-1), axis=-1)[..., None, None]
        return abs(self.scale) * (2 * q.shape[-1] + xp.sum(q, axis=-1, keepdims=True) + keys) + 2

    def _finite_operands(self, part: _Rows) -> tuple[Any, Any]:
        xp = self.xp
        q = self.q[:, :, :, part.first : part.first + part.score.shape[3]]
        return tuple(xp.where(xp.isfinite(x), xp.abs(x), 0.0) for x in (q, self.k))
