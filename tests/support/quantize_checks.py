"""Checks of quantize that its tests and planted faults share."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern import dtypes, numerics

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


def to_numpy(x) -> np.ndarray:
    x = numerics.as_float64(x)
    return x if isinstance(x, np.ndarray) else x.get()


def groups_at_the_least_scale(xp, to, granularity, dtype):
    """(x, granularity's keywords) of which group i's largest magnitude over the format's largest
    number is a little below 2^-126, that, and a little above; all other elements are 0."""
    step = 1 + max(float(numerics.finfo(dtype).eps), 2.0**-20)
    largest = LARGEST[to] * 2.0**-126 * np.array([1 / step, 1, step])
    x = np.zeros((3, 256), dtypes.NAMES[dtype])
    x[np.arange(3), [0, 5, 255]] = -largest
    if granularity == "column":
        x = np.ascontiguousarray(x.T)
    options = {"block": (1, 256)} if granularity == "block" else {}
    return xp.asarray(x), {"granularity": granularity, **options}


def check_scales_of_one(xp, to, granularity, dtype="float32"):
    """FP32 arithmetic on GPUs has no subnormals: smaller scales would decode to zeros."""
    x, options = groups_at_the_least_scale(xp, to, granularity, dtype)
    q, scale = (to_numpy(y) for y in cupykern.quantize(x, to, **options))
    x = to_numpy(x)
    if granularity == "column":
        x, q = x.T, q.T
    largest = np.abs(x).max(axis=1)
    expected = np.float32(largest / LARGEST[to]).astype(np.float64)
    expected[0] = 1
    np.testing.assert_array_equal(scale.reshape(3), expected)
    codes = np.abs(q).max(axis=1)
    np.testing.assert_array_equal(codes, [0, LARGEST[to], LARGEST[to]])
