"""Checks of attention that several kernels and planted faults share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cupykern import attention, attention_varlen, decode_attention, dtypes, inputs
from cupykern.attention import attention_plan
from cupykern.ops.problems.decode_attention import stored


def normal(*shape: int, dtype=dtypes.float16, kind: str = "normal") -> np.ndarray:
    return inputs.values(kind, shape, dtype, sum(shape))


def qkv(sq: int = 20, sk: int = 30, d: int = 16, h: int = 2, h_kv: int = 1, dtype=dtypes.float16):
    return normal(1, h, sq, d, dtype=dtype), *(
        normal(1, h_kv, sk, d + i, dtype=dtype) for i in (0, 8)
    )


def check_bias_over_nan(*shape: int, **options) -> None:
    """A bias of -inf hides a key whatever it is: the result is that of a key that is a number."""
    q, k, v = qkv(*shape)
    bias = normal(shape[0], shape[1]).astype(np.float32)
    bias[:, 3], bias[1::2, -1] = -np.inf, -np.inf
    for dtype in (np.float32, np.float16, dtypes.bfloat16):
        mask = bias.astype(dtype)
        expected = attention(q, k, v, mask=mask, **options)
        for value in (np.nan, np.inf, -np.inf):
            hidden = k.copy()
            hidden[:, :, 3], hidden[:, :, -1, 0] = value, value
            y = attention(q, hidden, v, mask=mask, **options)
            np.testing.assert_array_equal(y[:, :, 1::2], expected[:, :, 1::2])
            assert np.isnan(y[:, :, ::2]).all(-1).any()  # those see the last key


# Base-2 logarithms of scores, on both sides of online_softmax.cuh's kFar, of 2^24, where FP32's
# whole numbers end, and of 2^28, where an ulp leaves the range of FP16's exponents.
FAR = (8, 18, 22, 23, 24, 28, 30)


def far_scores(power: int, dtype, cache=None, sq: int = 40, sk: int = 300):
    """(q, k, v, k_scale, scores, exact results) of scores of about 2^power.

    They are exact, positive and negative by row, and grow with the key by sixteenths.  A row's
    largest is shared by several keys, and no other counts.
    """
    dim, rows, keys = 64, np.arange(sq), np.arange(sk)[:, None]
    q, unit = np.zeros((1, 2, sq, dim)), 2.0 ** (power // 2)
    q[:, :, rows, 7 * rows % dim] = np.where(rows % 2, -unit, unit) * (1 + rows / 64)
    units = (keys * (np.arange(dim) % 3 + 1) // 40 + np.arange(dim)) % 16 + 1
    k, k_scale = np.broadcast_to(units, (1, 2, sk, dim)), 2.0 ** (power - power // 2 - 4)
    if cache is None:
        k, k_scale = k * k_scale, 1.0
    v = normal(1, 2, sk, dim).astype(cache or dtype)
    q, k = q.astype(dtype), k.astype(cache or dtype)
    scores = k_scale * (q.astype(float) @ k.astype(float).swapaxes(-1, -2))
    weights = (scores == scores.max(-1, keepdims=True)).astype(float)
    return q, k, v, k_scale, scores, weights / weights.sum(-1, keepdims=True) @ v.astype(float)


def _host(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def _near(y, exact) -> None:
    error = abs(_host(y).astype(float) - exact)
    assert (error <= 2.0**-7 * abs(exact) + 2.0**-9).all(), np.nanmax(error)


def check_far_scores(xp, dtype, **options) -> None:
    """Results, and statistics beside a sink that some rows do not see.  options: of attention."""
    for power in FAR:
        q, k, v, _, scores, exact = far_scores(power, dtype)
        q, k, v = map(xp.asarray, (q, k, v))
        top, sink = scores.max(-1), -64.0
        sees, ties = top > sink, (scores == top[..., None]).sum(-1)
        largest, total = np.maximum(top, sink), np.where(sees, ties, 1)
        y, lse, row_max, row_sum = attention(
            q, k, v, scale=1.0, sinks=xp.full(2, sink, np.float32), return_lse=True,
            return_row_stats=True, **options,
        )  # fmt: skip
        _near(y, np.where(sees[..., None], exact, 0))
        np.testing.assert_allclose(_host(row_max), largest, rtol=1e-6)
        np.testing.assert_allclose(_host(lse), largest + np.log(total), rtol=1e-5)
        np.testing.assert_allclose(_host(row_sum), total, rtol=1e-3)
        y, row_max, row_sum = attention(q, k, v, scale=1.0, return_row_stats=True, **options)
        _near(y, exact)
        np.testing.assert_array_equal(_host(row_max), top)
        np.testing.assert_allclose(_host(row_sum), ties, rtol=1e-3)


def check_far_scores_of_caches(xp, dtype) -> None:
    for power in FAR:
        q, k, v, _, _, exact = far_scores(power, dtype)
        _near(decode_attention(*map(xp.asarray, (q, k, v)), causal=False, scale=1.0), exact)
        packed = (xp.asarray(np.ascontiguousarray(x[0].swapaxes(0, 1))) for x in (q, k, v))
        ends = (xp.asarray(np.array((0, x.shape[2]), np.int32)) for x in (q, k))
        y = attention_varlen(
            *packed, *ends, max_seqlen_q=q.shape[2], max_seqlen_k=k.shape[2], scale=1.0
        )
        _near(_host(y).swapaxes(0, 1)[None], exact)
        for cache in (dtypes.float8_e4m3fn, np.dtype(np.int8)):
            q, k, v, k_scale, _, exact = far_scores(power, dtype, cache)
            q, k, v = (stored(x, "C", xp) for x in (q, k, v))
            y = decode_attention(q, k, v, causal=False, scale=1.0, k_scale=k_scale, v_scale=1.0)
            _near(y, exact)


def check_rows_beside_large_scores(*shape: int, **options) -> None:
    """With a soft cap: a row's bits do not depend on the scores beside it, near the cap or not."""
    q, k, v = qkv(*shape)
    kwargs = {"softcap": 5.0, "return_lse": True, **options}
    expected = attention(q, k, v, **kwargs)
    for first in (0, 8):  # a thread may have rows 8 apart
        large = q.copy()
        large.reshape(-1, shape[2])[first::16] *= 40
        y, lse = attention(large, k, v, **kwargs)
        rows = (large == q).all(axis=-1)
        np.testing.assert_array_equal(y[rows], expected[0][rows])
        np.testing.assert_array_equal(lse[rows], expected[1][rows])
        assert (lse != expected[1]).any()


def check_far_distances(xp, dtype, **options) -> None:
    """Two halves of the keys, whose scores are apart by a few units: weights as of small scores."""
    for power, apart in ((18, -6), (20, -1), (22, -5), (23, -1), (23, -6), (24, -6), (26, -8)):
        weight = np.exp(apart) / (1 + np.exp(apart))
        for half in (slice(0, 256), slice(256, 512)):
            q, k, v = (np.zeros((1, 1, n, 64)) for n in (8, 512, 512))
            q[..., 0], q[..., 1] = 2.0 ** (power // 2), 1
            k[..., 0] = 2.0 ** (power - power // 2)
            k[:, :, half, 1], v[:, :, half] = apart, 1
            q, k, v = (xp.asarray(x.astype(dtype)) for x in (q, k, v))
            for y in (
                attention(q, k, v, scale=1.0, **options),
                decode_attention(q, k, v, scale=1.0, causal=False),
            ):
                assert (abs(_host(y).astype(float) / weight - 1) < 0.01).all(), (power, apart)


def check_lowest_biases(xp, dtype, **options) -> None:
    """Masks of the lowest finite number, as transformers has them: hidden keys have no weight, and
    all of them the same."""
    q, k, v = (normal(1, 1, n, 64, dtype=dtype) for n in (40, 300, 300))
    lowest = np.finfo(np.float32).min
    for sees in (np.arange(300) < 100, np.arange(300) >= 200, np.zeros(300, bool),
                 np.arange(300) <= np.arange(40)[:, None] + 260,
                 np.arange(300) <= np.arange(40)[:, None]):  # fmt: skip
        bias = np.where(np.broadcast_to(sees, (1, 1, 40, 300)), 0, lowest).astype(np.float32)
        scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 8
        scores = np.where(sees | ~np.any(sees, -1, keepdims=True), scores, -np.inf)
        if not np.any(sees):
            scores[:] = 0
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = weights / weights.sum(-1, keepdims=True) @ v.astype(float)
        arrays = (xp.asarray(x) for x in (q, k, v))
        y = attention(*arrays, mask=xp.asarray(bias), **options)
        assert (abs(_host(y).astype(float) - exact) < 0.02).all()
    few, keys = q[:, :, :4], np.arange(300) >= 200
    y = decode_attention(*map(xp.asarray, (few, k, v)), score="s if j >= 200 else -3e38",
                         causal=False)  # fmt: skip
    exact = attention(few, k[:, :, keys], v[:, :, keys])
    assert (abs(_host(y).astype(float) - exact.astype(float)) < 0.02).all()


@contextmanager
def bytes_of_l2(size: int) -> Iterator[None]:
    """Within the block, sections of the tile order hold keys and values of `size` bytes."""
    before = attention_plan.L2_BYTES
    attention_plan.L2_BYTES = size
    attention_plan.attention_plan.cache_clear()
    try:
        yield
    finally:
        attention_plan.L2_BYTES = before
        attention_plan.attention_plan.cache_clear()
