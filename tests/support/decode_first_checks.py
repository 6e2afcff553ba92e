"""Checks of 8-bit weights that are converted before their product."""

from __future__ import annotations

from typing import Any

import numpy as np

import cupykern
from cupykern import dtypes
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import Multicast, PingPong
from cupykern.numerics import to_numpy

CONFIG = DecodeFirst(Sm90GemmConfig(128, 128, 64, 3, PingPong(), Multicast(2)))


def weights(target: Any, name: str, shape: tuple[int, int], seed: int, stride: int) -> Any:
    """Every code but NaN, in rows `stride` elements apart."""
    codes = np.random.default_rng(seed).integers(0, 256, (shape[0], stride)).astype(np.uint8)
    if name != "int8":
        codes[codes & 0x7F == 0x7F] = 0
    return target.xp.asarray(codes).view(dtypes.NAMES[name])[:, : shape[1]]


def check_codes(target: Any, name: str, dtype: str, k_major: bool, n: int = 168) -> None:
    """Times the identity: exact.  Rows end within a chunk of 16, and have elements behind them."""
    k = 200
    b = weights(target, name, (n, k) if k_major else (k, n), 3, -(-max(n, k) // 16) * 16)
    b = b.T if k_major else b
    a = target.xp.eye(k, dtype=dtypes.NAMES[dtype])
    y = to_numpy(cupykern.scaled_mm(a, b, config=CONFIG)).astype(np.float64)
    np.testing.assert_array_equal(y, to_numpy(b).astype(np.float64))


def check_scales(target: Any) -> None:
    """Of columns, of all elements of a, and half a bias: exact numbers."""
    xp, rng = target.xp, np.random.default_rng(5)
    b = xp.asarray(rng.integers(-4, 5, (136, 64)).astype(np.int8)).T
    a = xp.asarray(rng.integers(-4, 5, (130, 64)).astype(np.float16))
    scale_b = xp.asarray(2.0 ** rng.integers(-3, 1, (1, 136)), np.float32)
    bias = xp.asarray(rng.integers(-4, 5, 136), np.float32)
    y = cupykern.scaled_mm(a, b, xp.asarray([0.5], np.float32), scale_b, bias=bias, config=CONFIG)
    of_b = to_numpy(b).astype(np.float64) * to_numpy(scale_b)
    expected = 0.5 * (to_numpy(a).astype(np.float64) @ of_b) + to_numpy(bias)
    np.testing.assert_array_equal(to_numpy(y), expected.astype(np.float16))
