"""Worst-case and expected errors of the attention kernels, relative to attention in FP64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo, gap, namespace, to_numpy
from ..op import Bound
from ..typing import Array, Factor
from .accumulation import (
    HALF,
    TENSOR_16,
    Terms,
    aligned_sizes,
    expected_error,
    flushed,
    inverse_root,
    product,
    significand_bits,
)
from .approximate import FLOOR, Approximate
from .attention import (
    Problem,
    Rows,
    ScoreOptions,
    concatenated,
    keys_of_sequences,
    named,
    of_sequence,
    of_sequences,
    outputs,
    sequences,
)
from .cache_scales import CacheScales
from .elementary import (
    EXP2_BIAS,
    EXP2_RMS,
    EXP2_ULPS,
    LOG_ULPS,
    RECIPROCAL_BIAS,
    RECIPROCAL_RMS,
)
from .expression_error import propagate
from .rounding import RELATIVE_RMS, ROUNDING, rounding_rms, stored, sum_variance

_U = UNIT_ROUNDOFF_32
_LOG_2 = math.log(2)

P_ERROR = 2.0**-25
"""The largest loss of an FP16 probability below FP16's smallest normal number, relative to the
row's largest."""

LARGE_CAP = 128.0  # attention/score.cuh: kLargeCap

_NEAR = 8
"""Numbers an eighth of a gap apart have similar rounding errors (a correlation of 0.34)."""

P_SHIFT = 7
"""Kernels scale FP16 probabilities by 2^7 (online_softmax.cuh: kShift).  The expected loss below
the smallest normal number is 2^7 times smaller."""


def attention_bound(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    causal_align: str | None = None,
    mask: Array | None = None,
    input_pos: int | None = None,
    scale: Factor | None = None,
    layout: str = "bhsd",
    qk_accumulate: str = "float32",
    return_lse: bool = False,
    return_row_stats: bool = False,
    scales: CacheScales | None = None,
    operand: np.dtype | None = None,
    reference: tuple[Any, ...],
    **more: Any,
) -> tuple[Bound, ...]:
    """Return the Bounds of the outputs, to first order.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 32, 64)).astype(np.float16)
    >>> exact = reference.attention(q, k, v, causal=True)
    >>> (bound,) = reference.attention_bound(q, k, v, causal=True, reference=exact)
    >>> out = cupykern.attention(q, k, v, causal=True)
    >>> bool((abs(out - exact[0]) <= bound.elementwise).all())
    True

    A probability exp(s - c) has the relative error e.  It includes the error of the score (see
    `_scores`) and the roundings of (s - c) * log2 e, of exp2 and of the factors that rescale
    earlier sums.  c is the same for a whole row, so its error cancels in the output.
    With P the exact probabilities (their sum is 1) and u_P the unit roundoff of the operand format
    of P V:
        |error of O| <= (P e) |V| + |O| sum(P e) + (u_P + gamma) P |V| + eta_P sum |V| / row_sum
                        + u_out |O|
    gamma is the error of the sums over keys, on the tensor cores and in FP32 (see accumulation.py).

    A sink is one more probability with its own e, and without V.  A soft cap has a derivative of
    at most 1, and errors of its own: see `_capped`.

    scales: k and v are codes times these scales, in FP64.  Kernels multiply codes.  A scale adds a
        rounding of the score, the probability or the result.  The flush to zero applies to products
        of codes.  Subnormal FP16 probabilities include the scales of tokens (`ratios`).
    operand: the dtype in which queries and probabilities are multiplied, if it is not q's dtype:
        float16.  BF16 queries are rounded to it in units of their row (`_QueryUnits`).

    Expected: e also changes the row's sum, so it is weighted by V - O.  The error of rounding P to
    16 bits does not change the sum.  The errors of the sum over keys, of the row's sum and its
    reciprocal, and of the last rounding are added.
    """
    options = ScoreOptions.of(more)
    problem = Problem.of(q, k, v, causal, causal_align, mask, input_pos, scale, layout, options)
    bounds = _Bounds(problem, q.dtype, qk_accumulate == "float16", scales, operand)
    xp = problem.xp
    with np.errstate(all="ignore"):
        found = problem.by_rows(bounds.of_rows, 5, 6)
        ends, stats = ~xp.isfinite(found[0]).all(axis=-1), list(found[5:])
        worst, square, bias, shared, common = map(problem.restore, found[:5])
        if not k.size and problem.sinks is not None:
            stats = [x + bounds.of_sink_alone() for x in stats]
        out = stored(
            reference[0], q.dtype, worst * (1 + 2.0**-6), xp.sqrt(square),
            floor=4 * FLOOR, shared=shared, bias=bias, common=common,
        )  # fmt: skip
        _, top, total, lse = named(reference, return_lse, return_row_stats)
        of_top, of_sum, of_lse = (stats[i : i + 2] for i in (0, 2, 4))
        bounds_of_all = outputs(
            out,
            None if top is None else _of_stat(top, *of_top),
            None if total is None else _of_stat(total, of_sum[0] * total, of_sum[1] * total),
            None
            if lse is None
            else _of_lse(lse, of_lse[0], of_lse[1], k.shape[1 if layout == "bshd" else 2]),
            return_lse,
            return_row_stats,
        )
        if bool(xp.isinf(problem.v).any()):
            (lost,) = problem.by_rows(lambda part: (problem.lost_infinities(part),), 1, 0)
            bounds_of_all = (_with_ends(xp, out, problem.restore(lost) != 0), *bounds_of_all[1:])
        if problem.formula is None and problem.mask_formula is None:
            return bounds_of_all
        first, *others = bounds_of_all
        ends_of_out = xp.broadcast_to(problem.restore(ends[..., None]), reference[0].shape)
        return _with_ends(xp, first, ends_of_out), *(_with_ends(xp, x, ends) for x in others)


def _with_ends(xp: Any, bound: Bound, ends: Any) -> Bound:
    """Remove the bound where `ends` (beyond a pole, at a mask's jump).  Where a score's jump may be
    taken, no error is expected."""
    unknown = ends | ~xp.isfinite(bound.rms)
    return Bound(
        xp.where(ends, np.inf, bound.elementwise),
        xp.where(unknown, 0.0, bound.rms),
        xp.where(unknown, 0.0, bound.shared),
        xp.where(unknown, np.inf, bound.bias),
        common=xp.where(unknown, 0.0, bound.common),
        free=ends | bound.free,
    )


def _of_stat(y: Array, worst: Any, rms: Any) -> Bound:
    return stored(y, dtypes.float32, worst * (1 + 2.0**-6), rms, floor=FLOOR, bias=rms)


def _of_lse(lse: Array, worst: Any, rms: Any, sk: int) -> Bound:
    """Return the Bound of a log-sum-exp: its logarithm and largest score are rounded."""
    xp = namespace(lse)
    size = xp.where(xp.isfinite(lse), xp.abs(lse), 0.0)
    of_log = 2 * LOG_ULPS * _U * math.log(sk + 2)
    rms = xp.hypot(rms, ROUNDING * math.log(sk + 2))
    return _of_stat(lse, worst + of_log + 2 * _U * size, rms)


class _Exponents(NamedTuple):
    """Relative errors of the exponentials, before the rounding to 16 bits, and their mean."""

    worst: Any
    square: Any
    bias: Array


class _Probabilities(NamedTuple):
    """Errors of rounding the probabilities to 16 bits.

    rms: the expected error.  error: the error if the row's largest score is the origin of its
        exponents; kernels may keep an origin close to it.
    likeliest: the probabilities as large as the row's largest, which have its error.
    values: equal values have the same error in all rows; the imaginary part encodes the origin of
        the row's exponents.
    """

    rms: Any
    error: Any
    likeliest: Any
    values: Any

    def in_common(self, weights: Any, of_rows: Any) -> float:
        """Return the share of the rows' errors that is common to all rows.

        A row's error is the sum of its errors times `weights`; of_rows: its mean squares.
        """
        sizes, values = to_numpy(self.rms * weights).ravel(), to_numpy(self.values).ravel()
        groups = np.unique(values[sizes != 0], return_inverse=True)[1]
        of_groups = np.bincount(groups, sizes[sizes != 0]) if groups.size else sizes[:0]
        of_rows = to_numpy(of_rows)
        both = float(np.sum(of_groups**2)) - float(np.sum(of_rows))
        most = float(np.sum(np.sqrt(of_rows))) ** 2
        return math.sqrt(min(both / most, 1.0)) if both > 0 and most > 0 else 0.0


class _QueryUnits(NamedTuple):
    """BF16 queries converted to FP16 (QueryUnits of attention/decode/load_q.cuh).

    units: a power of two per row.  lost: the rounding error of each element.
    """

    units: Any
    lost: Any

    @classmethod
    def of(cls, q: Array) -> _QueryUnits:
        """Return the units of the rows of |q|."""
        xp = namespace(q)
        largest = xp.maximum(xp.max(q, axis=-1, keepdims=True), 2.0**-99)
        units = xp.ldexp(xp.ones_like(largest), xp.frexp(largest)[1] - 15)
        return cls(units, xp.abs((q / units).astype(np.float16) * units - q))


class _Bounds:
    """Errors of the rows of a problem."""

    def __init__(
        self,
        problem: Problem,
        dtype: np.dtype,
        half: bool,
        scales: CacheScales | None = None,
        operand: np.dtype | None = None,
    ):
        self.problem, self.dtype, self.half, self.scales = problem, dtype, half, scales
        self.operand = operand or dtype
        self.kv_dtype = dtype if scales is None else scales.codes
        self.bits = significand_bits(self.operand) + significand_bits(self.kv_dtype)
        self.sk = problem.k.shape[3]
        xp = problem.xp
        self.v = xp.where(xp.isfinite(problem.v), problem.v, 0.0)

    def of_rows(self, part: Rows) -> tuple[Any, ...]:
        """Return the errors of some rows.

        For the output: worst, expected square, bias, shared part, common part.  Then (worst, rms)
        of the largest score, of the sum (relative), and of the log-sum-exp without its last
        roundings.
        """
        xp = self.problem.xp
        score = self._of_kept(part, self._scores(part))
        exponents = self._exponents(part, score)
        p = xp.where(part.keep, part.weights, 0.0) / part.divisor
        p = xp.where(xp.isfinite(p), p, 0.0)
        sink, sink_square = self._sink(part)
        weighted = xp.sum(p * exponents.worst, axis=-1, keepdims=True) + sink
        output = self._output(part, p, exponents, weighted, sink_square)
        top, top_rms = self._top(part, score)
        origin = 4 * _U * xp.abs(part.finite_top)
        constant = self._gamma_sum() + (2 * EXP2_ULPS + 8) * _U
        # The origin of the exponents and its factor are rounded.
        of_sum = weighted + top + origin + constant
        of_lse = weighted + constant + origin
        own = xp.sum(p**2 * exponents.square, axis=-1, keepdims=True)
        drift = xp.sum(p * exponents.bias, axis=-1, keepdims=True) + EXP2_BIAS * _U
        own = own + self._sum_variance(p) + self._origin_rms(part) ** 2 + drift**2 + sink_square
        rms = xp.sqrt(own + top_rms**2)
        stats = (top, top_rms, of_sum, rms, of_lse, rms)
        return *output, *(x[..., 0] for x in stats)

    def _of_kept(self, part: Rows, score: Approximate) -> Approximate:
        """With formulas: clear the errors of masked keys; an uncertain mask removes the bound."""
        problem, xp = self.problem, self.problem.xp
        if problem.formula is None and problem.mask_formula is None:
            return score
        worst, floor, square = (
            xp.where(part.keep, x, 0.0) for x in (score.worst, score.floor, score.square)
        )
        if problem.mask_formula is not None:
            nodes, end = problem.mask_formula.nodes, part.first + part.score.shape[3]
            given = problem.environment(problem.mask_formula, part.first, end, part.capped)
            worst = xp.where(propagate(nodes, given, {})[0].unsure, np.inf, worst)
        return Approximate(score.exact, worst, floor, square, score.bias)

    # --- scores ----------------------------------------------------------------------------------
    def _scores(self, part: Rows) -> Approximate:
        """Return the scores of finite operands with the errors of the product, scale, soft cap,
        formula, ALiBi and bias."""
        problem, xp = self.problem, self.problem.xp
        q = problem.q[:, :, :, part.first : part.first + part.score.shape[3]]
        q, k = (xp.where(xp.isfinite(x), xp.abs(x), 0.0) for x in (q, problem.k))
        keys, depth = k.swapaxes(-1, -2), q.shape[-1]
        sizes = product(q, keys)
        total = xp.where(xp.isfinite(part.product), part.product, 0.0) / (problem.scale or 1.0)
        roots = product(inverse_root(q), inverse_root(keys))
        terms = Terms(total, sizes, product(q * q, keys * keys), depth, self.bits, roots)
        adder = HALF if self.half else TENSOR_16
        square, bias = expected_error(adder, terms, max(depth, 1))
        steps = -(-depth // adder.depth)
        lost = steps * 2.0**-23 * self.half  # two of FP16's smallest numbers per step
        floor = flushed(q, keys) + xp.zeros_like(total)
        # Codes are never subnormal in a 16-bit format.
        kv_dtype = self.dtype if self.scales is None else dtypes.int8
        if self.operand != self.dtype:
            units, of_queries = _QueryUnits.of(q)
            sizes = units * aligned_sizes(q / units, keys, self.operand, kv_dtype, sizes / units)
            lost = lost + product(of_queries, keys)
            square = square + product(of_queries**2, keys**2)
        else:
            sizes = aligned_sizes(q, keys, self.dtype, kv_dtype, sizes)
        value = Approximate(total, adder.worst * steps * sizes + lost, floor, square, bias)
        value = value.scaled(problem.scale)
        if self.scales is not None:
            floor = value.floor * xp.maximum(self.scales.k, 1.0)
            value = value._replace(floor=floor).rounded()
        if problem.softcap is not None:
            value = self._capped(part, value)
        if problem.formula is not None:
            scaled = value if problem.softcap is not None else value.rounded()
            value = self._formed(part, scaled)
        if problem.slopes is not None:
            done = problem.softcap is not None or problem.formula is not None
            value = value if done else value.rounded()
            # Distances up to 2^24 are exact in FP32.
            far = 2 * _U * xp.where(part.alibi > 2.0**24 * xp.abs(problem.slopes), part.alibi, 0.0)
            finite = xp.where(xp.isfinite(part.score), part.formed - part.alibi, 0.0)
            value = value._replace(exact=finite, worst=value.worst + xp.abs(far)).rounded()
        if problem.mask is None or problem.mask.dtype == np.bool_:
            return value
        value = value if problem.has_options else value.rounded()
        finite = xp.where(xp.isfinite(part.score), part.score, 0.0)
        return value._replace(exact=finite).rounded()

    def _formed(self, part: Rows, value: Approximate) -> Approximate:
        """Return the errors of the score formula; they are infinite where its bound ends."""
        problem, xp = self.problem, self.problem.xp
        formula = problem.formula
        assert formula is not None
        given = problem.environment(
            formula, part.first, part.first + part.score.shape[3], value.exact
        )
        error, square = propagate(formula.nodes, given, {"s": value})
        y = xp.where(xp.isfinite(part.formed), part.formed, 0.0)
        shape = part.score.shape
        worst = xp.broadcast_to(xp.where(error.free, np.inf, error.worst), shape)
        floor, square = (xp.broadcast_to(x, shape) for x in (error.floor, square))
        square = xp.where(error.unsure, np.nan, square)  # no error is expected
        return Approximate(y, worst, floor, square, 0.0)

    def _capped(self, part: Rows, value: Approximate) -> Approximate:
        """Return the soft cap c tanh(s / c) = c - 2 c r, with r = 1 / (1 + e^(2 s / c)).

        In units of 2^-24: the exponent's factor and its product are rounded.  This moves the result
        by at most 2 |y|, as x sech^2 x <= tanh x.  The exponential's error 2 EXP2_ULPS is
        multiplied by 2 r (1 - r) c, those of the sum and the reciprocal, 1 and 2, by 2 r c.  The
        result and c are rounded.

        Caps above LARGE_CAP use a Taylor polynomial for |s / c| below 2^-4, with nine roundings.
        Below FP32's smallest normal number s / c is lost.
        """
        xp, cap = self.problem.xp, self.problem.softcap or 1.0
        y = xp.where(xp.isfinite(part.capped), part.capped, 0.0)
        ratio = xp.clip((1 - y / cap) / 2, 0.0, 1.0)
        slope = 4 * ratio * (1 - ratio)  # of the cap: sech^2
        of_power, of_ratio = cap * slope / 2, 2 * cap * ratio
        small = (xp.abs(y) < 0.0623 * cap) & (cap > LARGE_CAP)  # tanh(2^-4) is 0.06242
        worst = _U * (2 * EXP2_ULPS * of_power + 3 * of_ratio + 4 * xp.abs(y)) * (1 + 2.0**-10)
        worst = xp.where(small, 10 * _U * xp.abs(y), worst)
        square = (
            (2 * ROUNDING * y) ** 2
            + (EXP2_RMS * _U * of_power) ** 2
            + (ROUNDING**2 + (RECIPROCAL_RMS * _U) ** 2) * of_ratio**2
        )
        square = value.square * slope**2 + xp.where(small, (3 * ROUNDING * y) ** 2, square)
        bias = _U * (EXP2_BIAS * of_power + RECIPROCAL_BIAS * of_ratio + 2 * xp.abs(y))
        bias = value.bias * slope + xp.where(small, 3 * _U * xp.abs(y), bias)
        floor = value.floor + (4 + 2 * max(cap, 1.0)) * FLOOR
        return Approximate(y, value.worst + worst, floor, square, bias)

    def of_sink_alone(self) -> Any:
        """Return (H, 1): the error of the statistics of rows whose only score is the sink."""
        return self._worst_of_sink(self._finite_sinks[0, ..., 0]).reshape(-1, 1)

    @property
    def _finite_sinks(self) -> Any:
        """Sinks, with 0 for non-finite ones: -inf has no weight, and other rows are NaN."""
        sinks, xp = self.problem.sinks, self.problem.xp
        return xp.where(xp.isfinite(sinks), sinks, 0.0)

    def _worst_of_sink(self, sinks: Any) -> Any:
        """Return the relative error of exp(sink - origin), with the origin computed from the sink.

        In units of 2^-24: log2(e) (twice), the factor of scores, its inverse, two products and the
        quotient are rounded: 7 |sink|.  The origin has a shift of 7 in base 2.  Two differences
        with it are rounded, and its exponential is multiplied: 8.
        """
        return (7 * self.problem.xp.abs(sinks) + 2 * EXP2_ULPS + 8) * _U

    def _sink(self, part: Rows) -> tuple[Any, Any]:
        """Return (worst error, expected square) of the sink's share of a row's sum: from its
        exponent and the exponentials that rescale it."""
        if self.problem.sinks is None:
            return 0.0, 0.0
        sinks, xp = self._finite_sinks, self.problem.xp
        share = part.sink / part.divisor
        share = xp.where(xp.isfinite(share), share, 0.0)
        distance = xp.abs(sinks - part.finite_top)
        worst = self._worst_of_sink(sinks) + 4 * distance * _U
        square = (2 * ROUNDING * sinks) ** 2 + (ROUNDING * distance) ** 2 + (EXP2_RMS * _U) ** 2
        return share * worst, share**2 * square

    def _top(self, part: Rows, score: Approximate) -> tuple[Any, Any]:
        """Return the (worst, rms) error of the largest score."""
        xp = self.problem.xp
        size = xp.abs(part.finite_top)

        def largest(x: Array) -> Any:
            return xp.max(xp.where(part.keep, x, 0.0), axis=-1, keepdims=True)

        is_top = part.weights == 1
        if self.problem.sinks is not None:  # an FP32 score may exceed a sink that is larger
            below = xp.where(part.keep, part.score, -np.inf) - part.finite_top
            is_top = is_top | (below**2 <= 16 * score.square)
        at_top = xp.where(is_top, score.square + score.floor**2, 0.0)
        worst = largest(score.worst) + 3 * _U * size + largest(score.floor) + 2 * FLOOR
        unit = abs(float(np.float32(self.problem.scale)) / (self.problem.scale or 1.0) - 1)
        if self.scales is not None:
            unit = xp.max(self._constant_error() + xp.zeros_like(self.scales.k), -1, keepdims=True)
        return worst, xp.sqrt(largest(at_top) + (ROUNDING * size) ** 2 + (unit * size) ** 2)

    def _exponents(self, part: Rows, score: Approximate) -> _Exponents:
        xp = self.problem.xp
        distance = xp.where(
            part.keep, xp.abs(xp.where(part.keep, part.score - part.finite_top, 0)), 0
        )
        distance = xp.where(xp.isfinite(distance), distance, 0.0)
        # log2 e * scale, the FMA before exp2, and the rescaling errors (twice).
        worst = score.worst + score.floor + 4 * _U * distance + (2 * EXP2_ULPS + 8) * _U
        # Roundings of the product, if it is not fused, and of the difference.
        size = xp.where(xp.isfinite(part.score), xp.abs(part.score), 0.0)
        roundings = (ROUNDING * size) ** 2 + (_LOG_2 * rounding_rms(distance / _LOG_2)) ** 2
        square = score.square + score.floor**2 + roundings + (EXP2_RMS * _U) ** 2
        return _Exponents(worst, square, self._constant_error() * distance + self._bias_of(score))

    def _bias_of(self, score: Approximate) -> Any:
        """Return the mean error of a soft cap; other mean errors are neglected."""
        return score.bias if self.problem.softcap is not None else 0.0

    def _constant_error(self) -> Any:
        """Return the relative error of scale * log2 e in FP32."""
        if self.scales is not None:
            return self.scales.constant_error(self.problem.scale)
        exact = self.problem.scale / _LOG_2
        return abs(float(np.float32(exact)) / exact - 1) if exact else 0.0

    def _origin_rms(self, part: Rows) -> Any:
        """Return the error of all exponentials from rounding the largest exponent."""
        return _LOG_2 * rounding_rms(self.problem.xp.abs(part.finite_top) / _LOG_2)

    # --- sums over keys --------------------------------------------------------------------------
    def _gamma_sum(self) -> float:
        # A lane adds at most every second key of a row; then up to 8 merges follow.
        return _U * min(self.sk, self.sk / 2 + 8)

    def _sum_variance(self, p: Array) -> Any:
        """Return the relative variance of a row's sum; a lane adds every fourth key."""
        concentration = self.problem.xp.sum(p**2, axis=-1, keepdims=True)
        return ROUNDING**2 * sum_variance(concentration, self.sk, max(16, self.sk // 4))

    def _rounding_of_p(self, part: Rows) -> _Probabilities:
        """Return the errors of rounding probabilities to 16 bits.

        FP16 scores are multiples of a gap, so probabilities take few values, and their roundings
        are similar in all rows.
        """
        xp, info = self.problem.xp, finfo(self.operand)
        shift: Any = 2.0**P_SHIFT if self.operand == dtypes.float16 else 1.0
        if self.scales is not None:
            shift = shift * self.scales.ratios
        weights = self._weights_of_half_scores(part) if self.half else part.weights
        spacing = gap(weights * shift, self.operand) / shift
        error = xp.rint(weights / spacing) * spacing - weights
        smallest = info.eps * info.min_normal / shift
        expected = xp.maximum(
            RELATIVE_RMS * info.unit_roundoff * part.weights, smallest / math.sqrt(12)
        )
        own = xp.where(part.keep, xp.stack([expected, error]), 0.0)
        own = xp.where(xp.isfinite(own), own, 0.0) / part.divisor
        near = spacing / _NEAR
        kept = xp.where(part.keep & xp.isfinite(weights), weights, 0.0)
        likeliest = kept >= xp.max(kept, axis=-1, keepdims=True) - near
        # Only rows with the same origin share these errors.
        origins = xp.rint(part.finite_top * (_NEAR / info.eps))
        values = xp.rint(kept / near) * near + 1j * origins
        return _Probabilities(own[0], own[1], likeliest & (own[0] > 0), values)

    def _weights_of_half_scores(self, part: Rows) -> Any:
        """Return part.weights for scores rounded to FP16 before scaling."""
        xp, scale = self.problem.xp, self.problem.scale or 1.0
        total = xp.where(xp.isfinite(part.product), part.product, 0.0) / scale
        spacing = gap(total, dtypes.float16)
        error, cap = (xp.rint(total / spacing) * spacing - total) * self.problem.scale, 1.0
        if self.problem.softcap is not None:
            cap = 1 - (part.capped / self.problem.softcap) ** 2
        score = part.score + error * cap
        score = xp.where(part.keep & xp.isfinite(score), score, -np.inf)
        top = xp.max(score, axis=-1, keepdims=True)
        if self.problem.sinks is not None:
            top = xp.maximum(top, self.problem.sinks)
        return xp.exp(score - xp.where(xp.isfinite(top), top, 0.0))

    def _output(
        self, part: Rows, p: Array, exponents: _Exponents, weighted: Any, sink_square: Any
    ) -> tuple[Any, ...]:
        xp, info, multiply = self.problem.xp, finfo(self.operand), self.problem.multiply
        v, v2 = self.v, self.v**2
        sizes = xp.abs(v)
        out = multiply(p, v)
        floor = flushed(p, sizes)
        subnormal = xp.sum(sizes, axis=-2, keepdims=True)  # the factor of `lost`
        if self.scales is not None:
            floor = floor * xp.maximum(2 * self.scales.largest_v, 1.0)
            subnormal = product(1 / self.scales.ratios, sizes)
        gamma_v = TENSOR_16.worst * -(-self.sk // TENSOR_16.depth)
        lost = P_ERROR if self.operand == dtypes.float16 else FLOOR
        scaled = (4 if self.scales is None else 5) * _U
        worst = (
            multiply(
                p * (exponents.worst + info.unit_roundoff + gamma_v + self._gamma_sum() + scaled),
                sizes,
            )
            + weighted * xp.abs(out)
            + lost / part.divisor * subnormal
            + floor
        )
        own = p**2 * (exponents.square + exponents.bias**2)
        rounding = self._rounding_of_p(part)
        of_p = rounding.rms**2
        terms = Terms(
            *(out, multiply(p, sizes), multiply(p**2, v2), self.sk, self.bits),
        )
        of_sum, bias = expected_error(TENSOR_16, terms, self.sk)
        of_row = self._sum_variance(p) + (RECIPROCAL_RMS * _U) ** 2 + sink_square
        sum_own = xp.sum(own, axis=-1, keepdims=True)
        difference = multiply(own, v2) - 2 * out * multiply(own, v) + out**2 * sum_own
        same = xp.where(rounding.likeliest, rounding.rms, 0.0)
        of_same = xp.maximum(multiply(same, v) ** 2, multiply(same**2, v2))
        of_rounding = of_same + multiply(of_p - same**2, v2)
        square = (
            xp.maximum(difference, 0.0)
            + of_rounding
            + of_sum
            + floor**2
            + out**2 * (of_row + (2 if self.scales is None else 3) * ROUNDING**2)
        )
        # A probability's error changes all elements of the row.  The fewer probabilities dominate,
        # the more similar are the elements' errors.  Nearly equal probabilities have the same
        # error; its mean follows the direction of their values.
        few = xp.sqrt(xp.sum(of_p**2, axis=-1, keepdims=True)) / xp.maximum(
            xp.sum(of_p, axis=-1, keepdims=True), 1e-300
        )
        common = product(xp.sign(out), v.swapaxes(-1, -2)) / max(v.shape[-1], 1)
        of_means = xp.sum(same * common, axis=-1, keepdims=True) ** 2 + xp.sum(
            (of_p - same**2) * common**2, axis=-1, keepdims=True
        )
        of_keys = xp.maximum(of_means, few * of_rounding)
        alike = xp.abs(xp.sum(rounding.error * common, axis=-1, keepdims=True))
        bias = bias + (EXP2_BIAS + RECIPROCAL_BIAS) * _U * xp.abs(out) + alike
        of_all = rounding.in_common(common, of_means) * xp.sqrt(of_rounding)
        return worst, square, bias, xp.sqrt(of_keys + out**2 * of_row), of_all


def attention_varlen_bound(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    reference: tuple[Any, ...],
    **options: Any,
) -> tuple[Bound, ...]:
    """Return `attention_bound` of every sequence.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 2, 64)).astype(np.float16)
    >>> cu = np.array([0, 2, 5], np.int32)
    >>> exact = reference.attention_varlen(q, k, v, cu, cu)
    >>> (bound,) = reference.attention_varlen_bound(q, k, v, cu, cu, reference=exact)
    >>> out = cupykern.attention_varlen(q, k, v, cu, cu, max_seqlen_q=3, max_seqlen_k=3)
    >>> bool((abs(out - exact[0]) <= bound.elementwise).all())
    True
    """
    keys = keys_of_sequences(q, k, v, cu_seqlens_k, options)
    xp, options = namespace(q), of_sequences(options)
    parts, first = [], 0
    for i, (*sequence, scales) in enumerate(sequences(q, cu_seqlens_q, keys)):
        end = first + sequence[0].shape[1]
        own = (reference[0][None, first:end], *(x[None, :, first:end] for x in reference[1:]))
        own_options = of_sequence(options, i)
        own_options |= {"layout": "bshd", "scales": scales}
        parts.append(attention_bound(*sequence, reference=own, **own_options))
        first = end
    if not parts:
        return tuple(Bound(xp.zeros_like(x), xp.zeros_like(x)) for x in reference)
    return joined(parts, lambda arrays: concatenated(xp, arrays))


def joined(
    parts: list[tuple[Bound, ...]], join: Callable[[list[Any]], tuple[Any, ...]]
) -> tuple[Bound, ...]:
    """Return the Bounds of all sequences' outputs; join concatenates lists of outputs."""

    def field(bound: Bound, name: str) -> Any:
        x = getattr(bound, name)
        return namespace(bound.rms).full_like(bound.rms, x) if isinstance(x, float | bool) else x

    fields = (
        join([tuple(field(bound, name) for bound in part) for part in parts])
        for name in ("elementwise", "rms", "shared", "bias", "common", "free")
    )
    return tuple(
        Bound(elementwise, rms, shared, bias, common=common, free=free != 0)
        for elementwise, rms, shared, bias, common, free in zip(*fields, strict=True)
    )
