"""8-bit weights that are converted to 16-bit elements before their product (DecodeFirst)."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from decode_first_checks import CONFIG, check_codes, check_scales, weights

import cupykern
from cupykern import OPS, check, dtypes
from cupykern.gemm import gemm
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import K_MAJOR
from cupykern.numerics import to_numpy

SCALED = next(op for op in OPS if op.name == "scaled_mm")
WEIGHTS = ("float8_e4m3fn", "int8")


@needs.hopper
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k_major", [True, False])
def test_every_code_is_exact(target, name, dtype, k_major):
    check_codes(target, name, dtype, k_major)


@needs.hopper
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"bias": True, "activation": "gelu"}, {"activation": "relu"}]
)
def test_scales_are_the_epilogues(target, name, options):
    """Of columns, and of all elements of a."""
    xp, rng = target.xp, np.random.default_rng(5)
    b = weights(target, name, (136, 272), 1, 272).T
    a = cupykern.asarray(rng.standard_normal((130, 272)), dtypes.NAMES["bfloat16"], target.name)
    of_columns = xp.asarray(rng.uniform(0.01, 0.02, (1, 136)), np.float32)
    options = dict(options)
    if "bias" in options:
        options["bias"] = xp.asarray(rng.standard_normal(136), np.float32)
    for scale_a in (None, 0.5, xp.asarray([-0.25], np.float32)):
        y = cupykern.scaled_mm(a, b, scale_a, of_columns, **options, config=CONFIG)
        references = SCALED.reference(a, b, scale_a, of_columns, **options)
        bounds = SCALED.bound(a, b, scale_a, of_columns, **options, reference=references)
        assert check.compare((y,), references, bounds).ok


@needs.hopper
def test_scales_are_exact(target):
    check_scales(target)


@needs.hopper
def test_nan_of_weights_stays(target):
    codes = np.full((128, 64), 0x38, np.uint8)  # 1
    codes[3, 5] = 0x7F  # NaN
    b = target.xp.asarray(codes).view(dtypes.float8_e4m3fn).T
    y = to_numpy(cupykern.scaled_mm(target.xp.ones((8, 64), np.float16), b, config=CONFIG))
    assert np.isnan(y[:, 3]).all() and (np.delete(y, 3, axis=1) == 64).all()


def test_many_rows_are_converted_first():
    task = GemmTask(1, 8192, 1280, 1280, dtypes.float16, dtypes.float8_e4m3fn, K_MAJOR, K_MAJOR)
    assert isinstance(gemm.choose_config(task, "sm_90a", 132), DecodeFirst)
    for changes in (
        {"m": 256},
        {"tma_store_epilogue": False},
        {"row_scales": True},
        {"batch": 2},
        {"b": dtypes.float8_e5m2},
    ):
        other = replace(task, **changes)
        assert not isinstance(gemm.choose_config(other, "sm_90a", 132), DecodeFirst)
