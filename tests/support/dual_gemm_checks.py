"""Checks of dual_gemm_silu that its tests and planted faults share."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern.numerics import as_float64


def to_numpy(x) -> np.ndarray:
    x = as_float64(x)
    return x if isinstance(x, np.ndarray) else x.get()


def check_fp16_policy(target) -> None:
    """Every operation of the policy "fp16" is rounded to FP16, where 2^-22 of the power, which an
    exponential may be off by, does not show."""
    half = lambda v: np.asarray(v, np.float32).astype(np.float16).astype(np.float32)  # noqa: E731
    x = half(np.random.default_rng(5).uniform(-8, 8, 2048))
    factor = np.float32(1 + 2.0**-10)
    exact = np.exp2(half(np.float32(-1.44269504) * x).astype(np.float64))
    power, other = (half(exact * (1 + off)) for off in (-(2.0**-22), 2.0**-22))
    sigmoid = half(1 / half(1 + power))
    expected = half(half(x * sigmoid) * factor)
    eye = target.xp.asarray(np.eye(1, 8, dtype=np.float16))
    pad = np.zeros((7, x.size), np.float16)
    b1, b2 = (
        target.xp.asarray(np.concatenate([row[None].astype(np.float16), pad]))
        for row in (x, np.full_like(x, factor))
    )
    y = cupykern.dual_gemm_silu(eye, b1, b2, policy="fp16", out_dtype="float32")
    known = power == other
    assert known.mean() > 0.99
    np.testing.assert_array_equal(to_numpy(y)[0][known], expected[known])
