"""Checks of NVFP4 that its tests and planted faults share."""

from __future__ import annotations

import numpy as np

import cupykern
from cupykern.numerics import as_float64


def check_global_scales_of_one(xp):
    """Where amax / 2688 is no normal FP32 number."""
    for factor, expected in ((1 - 2.0**-18, 1.0), (1, 2.0**-126), (1 + 2.0**-18, None)):
        x = np.zeros((2, 32), np.float32)
        x[1, 3] = -2688 * 2.0**-126 * factor
        q = cupykern.quantize_nvfp4(xp.asarray(x))
        scale = float(q.global_scale)
        assert scale == (float(np.float32(2.0**-126 * factor)) if expected is None else expected)
        decoded = as_float64(q.dequantize())
        assert decoded[1, 3] == (0 if factor < 1 else -2688 * scale) and (decoded == 0).sum() >= 63
