"""FP32 products by 16-bit parts on tensor cores: every part scheme, and tiles it is not for."""

from __future__ import annotations

import needs
import numpy as np
import pytest
from products import random
from split_float32_checks import (
    FP16X3,
    check_bound,
    check_eleven_bits,
    check_epilogue,
    check_exponents,
    check_flagged,
    check_integers,
    check_one_chunk,
    check_scales,
    operands,
)

import cupykern
from cupykern import dtypes
from cupykern.gemm import gemm
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import K_MAJOR
from cupykern.gemm.sm90_policies import NO_CLUSTER, Multicast, SplitK
from cupykern.gemm.split_float32 import SplitFloat32
from cupykern.numerics import to_numpy
from cupykern.precisions import SPLITS, Bf16x6, Fp16x3
from cupykern.reference.accumulation import worst_of_parts

FLOAT32 = np.dtype(np.float32)


@needs.hopper
@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layouts", ["CF", "CC", "FC", "FF"])
def test_every_layout_is_within_the_bound(target, parts, layouts):
    check_bound(target, parts, layout_a=layouts[0], layout_b=layouts[1])


@needs.hopper
@pytest.mark.parametrize("parts", [Fp16x3(), Bf16x6()])
@pytest.mark.parametrize("cluster", [Multicast(2), SplitK(2)])
def test_every_cluster_is_within_the_bound(target, parts, cluster):
    check_bound(target, parts, cluster, k=512)


@needs.hopper
def test_misaligned_rows_are_within_the_bound(target):
    check_bound(target, Fp16x3(), m=131, n=133, k=201, layout_b="C")


@needs.hopper
def test_long_sums_of_one_sign_are_promoted(target):
    check_one_chunk(target)


@needs.hopper
def test_tiles_that_parts_cannot_stand_for_are_multiply_adds(target):
    check_flagged(target)


@needs.hopper
def test_exponents_far_apart_lose_nothing(target):
    check_exponents(target)


@needs.hopper
def test_integers_are_exact(target):
    check_integers(target)


@needs.hopper
def test_tf32_has_eleven_bits(target):
    check_eleven_bits(target)


@needs.hopper
def test_powers_of_two_leave_the_significands(target):
    check_scales(target)


@needs.hopper
def test_epilogues_are_within_the_bound(target):
    check_epilogue(target)


@needs.hopper
@pytest.mark.parametrize("kind", ["normal", "same_sign"])
@pytest.mark.parametrize("k", [128, 512])
def test_errors_are_smaller_than_those_of_sequential_sums(target, kind, k):
    a, b = operands(target, kind, 128, 128, k)
    y = to_numpy(cupykern.matmul(a, b, config=FP16X3))
    x, z = to_numpy(a), to_numpy(b)
    exact, sizes = x.astype(np.float64) @ z, abs(x.astype(np.float64)) @ abs(z)
    sums = np.zeros((128, 128), np.float32)
    for i in range(k):
        sums += x[:, i : i + 1] * z[i]
    own, sequential = (np.sqrt(np.mean(((s - exact) / sizes) ** 2)) for s in (y, sums))
    assert own < sequential


def test_bounds_of_float32s_parts_are_float32s():
    for parts in SPLITS.values():
        for k in (128, 130, 1000, 10**5, 10**7):
            within = worst_of_parts(parts, k) <= (k + 2) * 2.0**-24
            assert within or not parts.is_float32


def test_large_products_are_computed_by_parts_on_hopper():
    task = GemmTask(1, 4096, 4096, 4096, FLOAT32, FLOAT32, K_MAJOR, K_MAJOR)
    chosen = gemm.choose_config(task, "sm_90a", 132)
    assert isinstance(chosen, SplitFloat32) and chosen.config.parts == Fp16x3()
    assert chosen.config.cluster in (NO_CLUSTER, Multicast(2))
    for other in ("sm_80", "sm_100a", "gfx942", "host"):
        assert not isinstance(gemm.choose_config(task, other), SplitFloat32)


@pytest.mark.parametrize("name", ["fma", *SPLITS])
def test_named_precisions_are_kept(name):
    task = GemmTask(1, 4096, 4096, 4096, FLOAT32, FLOAT32, K_MAJOR, K_MAJOR, precision=name)
    for config in gemm.configs(task, "sm_90a"):
        assert (config.config.parts.name if isinstance(config, SplitFloat32) else "fma") == name


def test_illegal_precisions_are_refused(target):
    a, b = (random(target, shape, "float32", 1) for shape in ((8, 16), (16, 8)))
    for wrong in ("tf64", None, 3):
        with pytest.raises(ValueError, match="precision must be one of"):
            cupykern.matmul(a, b, precision=wrong)
    half = a.astype(dtypes.float16)
    with pytest.raises(ValueError, match="of float32 operands; got float16"):
        cupykern.matmul(half, half.T, precision="fma")
    with pytest.raises(ValueError, match='"fma" is not "fp16x3"'):
        cupykern.matmul(a, b, precision="fma", config=FP16X3)
