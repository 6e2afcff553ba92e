"""Checks of attention that several kernels and planted faults share."""

from __future__ import annotations

import numpy as np

from cupykern import attention, dtypes, inputs


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
