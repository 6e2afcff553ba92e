"""The errors that docs/guide/caches.md states for 8-bit caches."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupykern
from cupykern import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "caches.md"
B, H, HKV, S, D = 2, 8, 2, 2048, 128
GRANULARITIES = {"one": None, "head": (0, 2, 3), "token": (3,)}
FORMATS = {"e4m3": (448, ml_dtypes.float8_e4m3fn), "int8": (127, np.int8)}
LARGE = {
    "normal": (),
    "four tokens 20 times as large": np.s_[:, :, :4],
    "two channels 20 times as large": np.s_[..., [7, 70]],
}


def rows() -> dict[str, list[float]]:
    found = re.findall(r"^\| ([a-z0-9 ]+) \| (.*%) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: [float(x.strip(" %")) / 100 for x in cells.split("|")] for name, cells in found}


def stored(x: np.ndarray, format: str, granularity: str):
    """(codes, scales as decode_attention takes them)"""
    most, dtype = FORMATS[format]
    axes = GRANULARITIES[granularity]
    scale = np.float32(np.abs(x).max(axes, keepdims=axes is not None) / most)
    codes = np.rint(x / scale) if dtype == np.int8 else x / scale
    shape = {"one": (), "head": (HKV,), "token": (B, HKV, S)}[granularity]
    return codes.astype(dtype), scale.reshape(shape) if shape else float(scale)


@pytest.mark.parametrize("name", LARGE)
def test_the_errors_of_the_table(name):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B, H, 1, D), (B, HKV, S, D), (B, HKV, S, D))
    )
    if name != "normal":
        k[LARGE[name]] *= 20
    q = q.astype(ml_dtypes.bfloat16)
    (exact,) = reference.decode_attention(q, k, v)

    def error(k, v, **scales):
        y = cupykern.decode_attention(q, k, v, **scales).astype(np.float64)
        return np.sqrt(np.square(y - exact).mean() / np.square(exact).mean())

    found = [error(k.astype(q.dtype), v.astype(q.dtype))]
    for format in FORMATS:
        for granularity in GRANULARITIES:
            (k8, k_scale), (v8, v_scale) = (stored(x, format, granularity) for x in (k, v))
            found.append(error(k8, v8, k_scale=k_scale, v_scale=v_scale))
    assert np.allclose(found, rows()[name], rtol=0.1), found
