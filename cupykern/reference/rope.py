"""rope_and_cache in FP64, and bounds of the kernel's errors.

Norms have rms_norm's errors.  Like the kernel, the reference computes FP64 angles from FP32
frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ..op import Bound
from ..typing import Array
from .elementary import (
    SINE_COSINE_BIAS,
    SINE_COSINE_ERROR,
    SINE_COSINE_PER_ANGLE,
    SINE_COSINE_RMS,
    SINE_COSINE_RMS_PER_ANGLE,
)
from .norm import YErrors, rms_norm_errors
from .quantize import LARGEST, codes_bound, divide, scale_bound, scale_of
from .rounding import ROUNDING, rounding_rms, stored

_U = UNIT_ROUNDOFF_32
_FLUSHED = 2.0**-126


def rope_and_cache(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Return (q, k) rotated; with caches (q, k_cache, v_cache[, k_scale][, v_scale]).

    >>> q = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
    >>> rotated, _ = reference.rope_and_cache(
    ...     q, q, q, np.int32([2]), inv_freq=np.float32([0.5])
    ... )
    >>> bool(np.allclose(rotated, [np.cos(1), np.sin(1)]))  # by position * inv_freq = 1
    True

    Only scales per token are outputs.  Values in 8-bit caches are divided by their scale and
    saturated, but not rounded.
    """
    o = _Options.of(q, positions, k_cache, **options)
    with np.errstate(all="ignore"):
        heads = _heads(q, k, v, o)
        if k_cache is None or v_cache is None:
            return heads[0].y, heads[1].y
        found = [heads[0].y]
        scales = []
        for cache, head, scale in zip((k_cache, v_cache), heads[1:], o.scales, strict=True):
            of_token = _scale(head.y, scale, cache.dtype, o)
            values = head.y if of_token is None else _codes(head.y, of_token, cache.dtype)
            found.append(o.written(as_float64(cache), values))
            if o.per_token(scale):
                scales.append(o.written(as_float64(scale), of_token[..., 0]))
    return (*found, *scales)


def rope_and_cache_bound(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    k_cache: Array | None = None,
    v_cache: Array | None = None,
    *,
    reference: tuple[Any, ...],
    **options: Any,
) -> tuple[Bound, ...]:
    """Return the Bounds of the outputs.

    The norm's errors (rms_norm_bound) are rotated.  Cosines and sines have absolute errors
    (elementary.SINE_COSINE_ERROR), and one more rounding for attention_factor; those of a table are
    exact.  The products with them and the sum are rounded.  Slots of other tokens, and values
    copied in the cache's format, have no error.

    >>> x = np.random.default_rng(0).standard_normal((1, 3, 2, 8)).astype(np.float32)
    >>> inv_freq, _ = cupykern.rope_inv_freq(8, 10000.0, target="host")
    >>> call, positions = {"inv_freq": inv_freq}, np.arange(3, dtype=np.int32)
    >>> exact = reference.rope_and_cache(x, x, x, positions, **call)
    >>> bounds = reference.rope_and_cache_bound(x, x, x, positions, **call, reference=exact)
    >>> q, k = cupykern.rope_and_cache(x, x, x, positions, **call)
    >>> bool((abs(q - exact[0]) <= bounds[0].elementwise).all())
    True
    """
    o = _Options.of(q, positions, k_cache, **options)
    with np.errstate(all="ignore"):
        heads = _heads(q, k, v, o)
        bounds = [heads[0].stored(q.dtype)]
        if k_cache is None or v_cache is None:
            return (*bounds, heads[1].stored(k.dtype))
        scales = []
        for cache, head, scale in zip((k_cache, v_cache), heads[1:], o.scales, strict=True):
            of_token = _scale(head.y, scale, cache.dtype, o)
            if of_token is None:
                found = head.stored(cache.dtype)
            else:
                found, of_scale = head.stored_codes(of_token, cache.dtype, o.per_token(scale))
                if o.per_token(scale):
                    scales.append(o.written_bound(of_scale, scale, axis=0))
            bounds.append(o.written_bound(found, cache))
    return (*bounds, *scales)


class _Options(NamedTuple):
    """The options of a call, and the `places` of its `tokens` in a cache."""

    angles: Array  # (B, S, 1, R); 0 with a table
    table: Array | None  # cosines and sines (B, S, 1, 2 R)
    num_angles: int  # number of different angles
    interleaved: bool
    attention_factor: float
    weights: tuple[Array | None, Array | None]
    eps: float
    scales: tuple[Any, Any]
    swaps: bool  # heads before slots
    tokens: tuple[Array, Array]
    places: tuple[Array, Array]

    @classmethod
    def of(
        cls,
        q: Array,
        positions: Array,
        k_cache: Array | None,
        *,
        inv_freq: Array | None = None,
        cos_sin: Array | None = None,
        interleaved: bool = False,
        attention_factor: float = 1.0,
        q_weight: Array | None = None,
        k_weight: Array | None = None,
        eps: float = 1e-6,
        block_table: Array | None = None,
        layout: str = "hnd",
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        config: Any = None,
    ) -> _Options:
        xp = namespace(positions)
        positions = xp.broadcast_to(positions.astype(np.int64), q.shape[:2])
        table = None
        if cos_sin is not None:
            rows = xp.clip(positions, 0, cos_sin.shape[0] - 1)
            table = as_float64(cos_sin)[rows][:, :, None]
            angles = xp.zeros((*positions.shape, 1, cos_sin.shape[1] // 2))
        elif inv_freq is not None:
            angles = positions[..., None, None] * inv_freq.astype(np.float64)
        tokens = places = (xp.zeros(0, np.int64),) * 2
        swaps = layout == "hnd"
        if k_cache is not None and positions.size:
            tokens, places = _places(positions, k_cache.shape, block_table, swaps)
        num_angles = max(1, int(xp.unique(positions).size)) * angles.shape[-1]
        return cls(
            angles, table, num_angles, interleaved, float(np.float32(attention_factor)),
            (q_weight, k_weight), float(np.float32(eps)), (k_scale, v_scale), swaps, tokens, places,
        )  # fmt: skip

    def written(self, cache: Array, values: Array) -> Array:
        """Return a copy of a cache with the tokens' values (B, S, heads, ...) in their slots."""
        cache = cache.copy()
        by_slot = cache.swapaxes(1, 2) if self.swaps else cache
        by_slot[self.places] = values[self.tokens]
        return cache

    def written_bound(self, bound: Bound, cache: Array, axis: int = -1) -> Bound:
        """Return the Bound of a cache; slots of other tokens have no error."""
        xp, shape = namespace(cache), cast(Array, bound.elementwise).shape

        def written(part: Any) -> Array:
            return self.written(xp.zeros(cache.shape), part + xp.zeros(shape))

        worst, rms, shared, bias, common = map(written, (*bound[:4], bound.common))
        return Bound(worst, rms, shared, bias, axis, common)

    @staticmethod
    def per_token(scale: Any) -> bool:
        return getattr(scale, "ndim", 0) == 3


def _places(
    positions: Array, shape: tuple[int, ...], table: Array | None, swaps: bool
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (batch, token) of the written tokens, and their (batch or page, slot)."""
    xp = namespace(positions)
    slots = shape[2 if swaps else 1]
    room = slots if table is None else slots * table.shape[1]
    batch, token = xp.nonzero((positions >= 0) & (positions < room))
    slot = positions[batch, token]
    if table is None:
        return (batch, token), (batch, slot)
    page = table[batch, slot // max(slots, 1)].astype(np.int64)
    there = (page >= 0) & (page < shape[0])
    batch, token, slot, page = (x[there] for x in (batch, token, slot, page))
    return (batch, token), (page, slot % max(slots, 1))


class _Head(NamedTuple):
    """Values of heads in FP64, and their errors before the last rounding.

    exact: a cache of their format takes a bitwise copy.
    """

    y: Array
    errors: YErrors
    exact: bool = False

    def stored(self, dtype: np.dtype) -> Bound:
        if self.exact:
            return _no_errors(self.y)
        e = self.errors
        return stored(
            self.y, dtype, e.worst, e.rms, floor=e.floor, shared=e.shared, bias=e.bias,
            common=e.common,
        )  # fmt: skip

    def stored_codes(self, scale: Array, dtype: np.dtype, per_token: bool) -> tuple[Bound, Bound]:
        """Return the Bounds of the codes, and of the scales (B, S, heads)."""
        xp = namespace(self.y)
        e, nothing = self.errors, xp.zeros(self.y.shape)
        finite = xp.isfinite(self.y)
        worst, rms, floor = (
            xp.where(finite, part + nothing, 0.0) for part in (e.worst, e.rms, e.floor)
        )
        of_scale = _no_errors(scale)
        if per_token:
            most = _largest(worst), _largest(rms), _largest(floor)
            of_scale = scale_bound(scale, _largest(self.y), *most, dtype)
        codes = _codes(self.y, scale, dtype)
        bound = codes_bound(codes, scale, of_scale, worst, rms, floor, dtype)
        worst, rms, _, bias = (x + xp.zeros(scale.shape) for x in of_scale[:4])
        return bound, Bound(worst[..., 0], rms[..., 0], bias=bias[..., 0])


def _no_errors(y: Array) -> Bound:
    nothing = namespace(y).zeros(y.shape)
    return Bound(nothing, nothing, bias=0.0)


def _largest(y: Array) -> Array:
    """Return the largest magnitude of each head vector; NaN propagates."""
    return namespace(y).max(abs(y), axis=-1, keepdims=True)


def _scale(y: Array, scale: Any, dtype: np.dtype, o: _Options) -> Any:
    """Return the scales (B, S, heads, 1) of values y (B, S, heads, D); None for 16- and 32-bit
    caches."""
    if dtype not in LARGEST:
        return None
    if o.per_token(scale):
        return scale_of(_largest(y), dtype)
    scale = 1.0 if scale is None else scale
    number = scale.astype(np.float64) if hasattr(scale, "astype") else float(np.float32(scale))
    return namespace(y).zeros((*y.shape[:3], 1)) + namespace(y).reshape(
        namespace(y).asarray(number), (-1, 1)
    )


def _codes(y: Array, scale: Array, dtype: np.dtype) -> Array:
    limit = LARGEST[dtype]
    least = -128.0 if dtype == dtypes.int8 else -limit
    return namespace(y).clip(divide(y, scale, dtype), least, limit)


def _heads(q: Array, k: Array, v: Array, o: _Options) -> tuple[_Head, ...]:
    found = [_rotated(x, weight, o) for x, weight in zip((q, k), o.weights, strict=True)]
    return (*found, _Head(as_float64(v), _as_given(v), exact=True))


def _as_given(x: Array) -> YErrors:
    """Return the errors of inputs: only the flush of FP32 subnormals."""
    nothing = namespace(x).zeros(x.shape)
    return YErrors(nothing, nothing, _flushed(x), nothing, nothing, nothing)


def _flushed(x: Array) -> float:
    return 0.0 if x.dtype == dtypes.float16 else _FLUSHED


def _rotated(x: Array, weight: Array | None, o: _Options) -> _Head:
    xp = namespace(x)
    if weight is not None:
        y, errors = rms_norm_errors(x, weight, o.eps)
        # The norm's last rounding is not the result's; add it here.
        rms = xp.sqrt(errors.rms**2 + rounding_rms(y) ** 2)
        errors = errors._replace(worst=errors.worst + _U * abs(y), rms=rms)
    else:
        y, errors = as_float64(x), _as_given(x)
    worst, rms, floor, shared, bias, common = (part + xp.zeros(y.shape) for part in errors[:6])
    rotation = _Rotation.of(o)
    a, b = _pairs(y, o)
    size = xp.sqrt(a**2 + b**2)
    sizes = abs(a) + abs(b)
    result_a, result_b = rotation.of_pairs(a, b)
    rounded = rounding_rms(a * rotation.cosine) ** 2 + rounding_rms(b * rotation.sine) ** 2
    rounded_b = rounding_rms(b * rotation.cosine) ** 2 + rounding_rms(a * rotation.sine) ** 2

    def both(part: Array, join: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
        """Join |cosine| times the part of one element and |sine| times that of the other."""
        of_a, of_b = _pairs(part, o)
        c, s = abs(rotation.cosine), abs(rotation.sine)
        return join(c * of_a, s * of_b), join(c * of_b, s * of_a)

    def plus(a: Array, b: Array) -> Array:
        return a + b

    def root(a: Array, b: Array) -> Array:
        return xp.sqrt(a**2 + b**2)

    worsts = [
        part * (1 + 2 * _U)
        + rotation.error * sizes
        + _U * (2 * rotation.largest * sizes + abs(y_part))
        for part, y_part in zip(both(worst, plus), (result_a, result_b), strict=True)
    ]
    narrowed = x.dtype != dtypes.float32  # for FP32 the sum's rounding is the result's
    angle_rms = rotation.rms * size
    rmss = [
        xp.sqrt(part**2 + angle_rms**2 + products + narrowed * rounding_rms(y_part) ** 2)
        for part, products, y_part in zip(
            both(rms, root), (rounded, rounded_b), (result_a, result_b), strict=True
        )
    ]
    of_table = 0.0 if o.table is None else _FLUSHED * sizes
    floors = [part + 3 * _FLUSHED + of_table for part in both(floor, plus)]
    of_angle = rotation.bias * sizes
    biases = [part + of_angle for part in both(bias, plus)]
    alike = angle_rms / math.sqrt(o.num_angles)
    commons = [root(part, alike) for part in both(common, root)]
    parts = zip(
        (y, worst, rms, floor, shared, bias, common),
        ((result_a, result_b), worsts, rmss, floors, both(shared, root), biases, commons),
        strict=True,
    )
    rotated, *found = (_joined(part, pairs, o) for part, pairs in parts)
    return _Head(rotated, YErrors(*found))


class _Rotation(NamedTuple):
    """Cosines and sines times attention_factor, and the kernel's errors of them.

    error, rms, bias: the largest error, root mean square, and largest |mean|.
    largest: an upper bound of |cosine| and |sine| of a pair.
    """

    cosine: Array
    sine: Array
    largest: Array | float
    error: Array
    rms: Array
    bias: float

    @classmethod
    def of(cls, o: _Options) -> _Rotation:
        xp, f = namespace(o.angles), o.attention_factor
        factor = float(f != 1)
        if o.table is not None:
            half = o.table.shape[-1] // 2
            cosine, sine = f * o.table[..., :half], f * o.table[..., half:]
            largest = xp.maximum(abs(cosine), abs(sine))
            rms = factor * ROUNDING * largest
            return cls(cosine, sine, largest, factor * _U * largest, rms, 0.0)
        error = SINE_COSINE_ERROR * _U + SINE_COSINE_PER_ANGLE * abs(o.angles)
        rms = SINE_COSINE_RMS * _U + SINE_COSINE_RMS_PER_ANGLE * abs(o.angles)
        return cls(
            f * xp.cos(o.angles),
            f * xp.sin(o.angles),
            abs(f),
            abs(f) * (error + factor * _U * (1 + error)),
            abs(f) * (rms + factor * ROUNDING),
            abs(f) * SINE_COSINE_BIAS * _U,
        )

    def of_pairs(self, a: Array, b: Array) -> tuple[Array, Array]:
        return a * self.cosine - b * self.sine, b * self.cosine + a * self.sine


def _parts(o: _Options) -> tuple[slice, slice]:
    """Return slices of the first and the second elements of rotated pairs."""
    half = o.angles.shape[-1]
    if o.interleaved:
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def _pairs(y: Array, o: _Options) -> tuple[Array, Array]:
    first, second = _parts(o)
    return y[..., first], y[..., second]


def _joined(y: Array, pairs: Sequence[Array], o: _Options) -> Array:
    """Return a copy of y with its pairs replaced."""
    y = y.copy()
    for part, numbers in zip(_parts(o), pairs, strict=True):
        y[..., part] = numbers
    return y
