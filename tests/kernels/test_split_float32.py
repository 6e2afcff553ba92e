"""FP32 products by 16-bit parts on tensor cores: every part scheme, and tiles it is not for."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import needs
import numpy as np
import pytest
from products import MATMUL, compare, random
from split_float32_checks import (
    FP16X3,
    TILE,
    by_hopper,
    check_bound,
    check_eleven_bits,
    check_epilogue,
    check_exponents,
    check_flagged,
    check_integers,
    check_one_chunk,
    check_scales,
    mixed_operands,
    operands,
    portable,
)

import cupykern
from cupykern import dtypes, inputs
from cupykern.gemm import gemm
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.parts_config import PartsGemmConfig
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.product import K_MAJOR, MN_MAJOR, STRIDED
from cupykern.gemm.sm90_policies import NO_CLUSTER, Multicast, SplitK
from cupykern.gemm.split_float32 import SplitFloat32, flushes_parts
from cupykern.numerics import to_numpy
from cupykern.ops.checks.products import check_precision
from cupykern.precisions import PRECISIONS, SPLITS, Bf16x6, Fp16x3
from cupykern.reference.accumulation import worst_of_parts
from cupykern.targets.limits import device
from cupykern.tools.options import ARCHS

FLOAT32 = np.dtype(np.float32)


both_ways = pytest.mark.parametrize("way", [pytest.param(by_hopper, marks=needs.hopper), portable])


@both_ways
@pytest.mark.thinned(2)
@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layouts", ["CF", "CC", "FC", "FF"])
def test_every_layout_is_within_the_bound(target, way, parts, layouts):
    check_bound(target, way(parts), layout_a=layouts[0], layout_b=layouts[1])


@needs.hopper
@pytest.mark.parametrize("parts", [Fp16x3(), Bf16x6()])
@pytest.mark.parametrize("cluster", [Multicast(2), SplitK(2)])
def test_every_cluster_is_within_the_bound(target, parts, cluster):
    check_bound(target, by_hopper(parts, cluster=cluster), k=512)


@needs.host
@pytest.mark.thinned(2)
@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(
    "tile",
    [
        GemmConfig(128, 128, 32, 2, 4, stages=2),
        GemmConfig(128, 128, 32, 2, 4, stages=4, finish_rounds=2),
        GemmConfig(64, 128, 32, 2, 2, stages=3),
        replace(TILE, splits=3),
    ],
)
def test_every_tile_is_within_the_bound(target, parts, tile):
    if parts.count < 3 or tile.stages < 4:  # more than fit into shared memory
        check_bound(target, portable(parts, tile), k=450)


@both_ways
def test_misaligned_rows_are_within_the_bound(target, way):
    check_bound(target, way(Fp16x3()), m=131, n=133, k=201, layout_b="C")


@both_ways
def test_long_sums_of_one_sign_are_promoted(target, way):
    check_one_chunk(target, way)


@both_ways
def test_tiles_that_parts_cannot_stand_for_are_multiply_adds(target, way):
    check_flagged(target, way)


@both_ways
def test_exponents_far_apart_lose_nothing(target, way):
    check_exponents(target, way)


@both_ways
def test_integers_are_exact(target, way):
    check_integers(target, way)


def test_tf32_has_eleven_bits(target):
    check_eleven_bits(target)


@both_ways
def test_powers_of_two_leave_the_significands(target, way):
    check_scales(target, way)


@both_ways
def test_epilogues_are_within_the_bound(target, way):
    check_epilogue(target, way)


@both_ways
@pytest.mark.parametrize("kind", ["normal", "same_sign"])
@pytest.mark.parametrize("k", [128, 512])
def test_errors_are_smaller_than_those_of_sequential_sums(target, way, kind, k):
    a, b = operands(target, kind, 128, 128, k)
    y = to_numpy(cupykern.matmul(a, b, config=way(Fp16x3())))
    x, z = to_numpy(a), to_numpy(b)
    exact, sizes = x.astype(np.float64) @ z, abs(x.astype(np.float64)) @ abs(z)
    sums = np.zeros((128, 128), np.float32)
    for i in range(k):
        sums += x[:, i : i + 1] * z[i]
    own, sequential = (np.sqrt(np.mean(((s - exact) / sizes) ** 2)) for s in (y, sums))
    assert own < sequential


MIXED = [("float32", "float16"), ("bfloat16", "float32"), ("float32", "bfloat16")]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kinds", MIXED, ids=" ".join)
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_16_bit_operand_is_within_the_bound(target, kinds, name):
    a, b = mixed_operands(target, kinds, 140, 150, 200)
    assert compare(MATMUL, a, b, precision=name).ok


def test_a_16_bit_operand_is_one_part():
    f16, bf16 = dtypes.float16, dtypes.bfloat16
    assert Fp16x3().of(FLOAT32, f16) == Fp16x3(2, 1) and Fp16x3().of(bf16, FLOAT32).products == 2
    assert Bf16x6().of(bf16, FLOAT32) == Bf16x6(1, 3)
    assert Bf16x6().of(f16, FLOAT32) == Bf16x6()  # of 11 bits, more than a BF16 number
    for a, b in ((FLOAT32, f16), (bf16, FLOAT32)):
        parts = Fp16x3().of(a, b)
        assert not parts.dropped
        assert worst_of_parts(parts, 512, a, b) < worst_of_parts(Fp16x3(), 512)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx942"])
def test_large_products_with_a_16_bit_operand_are_two_of_parts(arch):
    task = _task(4096, 4096, 4096, stored_b=dtypes.float16)
    chosen = gemm.choose_config(task, arch)
    assert isinstance(chosen, SplitFloat32) and chosen.config.parts == Fp16x3(2, 1)
    assert chosen.refusal(replace(task, stored_b=FLOAT32), device(arch)) is not None


def test_infinities_of_a_16_bit_operand_are_float32s(target):
    a, b = mixed_operands(target, ("float32", "float16"), 140, 150, 200)
    b[3, 5], b[150, 140] = np.inf, np.nan
    assert compare(MATMUL, a, b, precision="fp16x3").ok


def test_epilogues_formulas_and_batches_take_16_bit_operands(target):
    xp = target.xp
    a = inputs.values("normal", (3, 1, 20, 130), FLOAT32, 1)
    b = inputs.values("normal", (2, 130, 30), dtypes.bfloat16, 2)
    a, b = (inputs.with_layout(x, "C", xp) for x in (a, b))
    for options in (
        {"activation": "gelu", "alpha": -0.5, "out_dtype": "bfloat16"},
        {"epilogue": "maximum(acc, 0) * s", "operands": {"s": 0.5}},
    ):
        for precision in ("float32", "fp16x3"):
            assert compare(MATMUL, a, b, precision=precision, **options).ok


@pytest.mark.parametrize("order", ["a b", "b a"])
def test_tf32x3_is_fp16x3(target, order):
    a, b = operands(target, "normal", 70, 70, 200)
    a, b = (a, b) if order == "a b" else (b.T, a.T)
    y = [to_numpy(cupykern.matmul(a, b, precision=name)) for name in ("tf32x3", "fp16x3")]
    np.testing.assert_array_equal(*y)
    assert compare(MATMUL, a, b, precision="tf32x3").ok


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("m, n", [(1, 70), (16, 130), (70, 1)])
def test_named_precisions_of_few_rows_are_within_the_bound(target, name, m, n):
    a, b = operands(target, "normal", m, n, 300)
    assert compare(MATMUL, a, b, precision=name).ok


def test_bounds_of_float32s_parts_are_float32s():
    for parts in SPLITS.values():
        for k in (128, 130, 1000, 10**5, 10**7):
            within = worst_of_parts(parts, k) <= (k + 2) * 2.0**-24
            assert within or not parts.is_float32


def _task(m: int, n: int, k: int, **options: Any) -> GemmTask:
    return GemmTask(1, m, n, k, FLOAT32, FLOAT32, K_MAJOR, K_MAJOR, **options)


def test_large_products_are_computed_by_parts_on_hopper():
    chosen = gemm.choose_config(_task(4096, 4096, 4096), "sm_90a", 132)
    assert isinstance(chosen, SplitFloat32) and chosen.config.parts == Fp16x3()
    assert chosen.config.cluster in (NO_CLUSTER, Multicast(2))


@pytest.mark.parametrize("arch", [arch for arch in (*ARCHS, "host") if arch != "sm_90a"])
def test_elsewhere_they_are_where_tensor_cores_are_fast_enough(arch):
    """Three products of FP16 parts beside one multiply-add, by the data sheets' rates."""
    chosen = gemm.choose_config(_task(4096, 4096, 4096), arch)
    pays = arch in ("sm_80", "sm_100a", "gfx942", "gfx1201")
    assert isinstance(chosen, SplitFloat32) == pays
    if isinstance(chosen, SplitFloat32):
        assert chosen.config.parts == Fp16x3() and isinstance(chosen.config, PartsGemmConfig)


@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_or_columns_are_multiply_adds(arch):
    for few, many, k in itertools.product((1, 2, 8, 16), (64, 4096, 30000), (128, 1024, 16384)):
        for task in (_task(few, many, k), _task(many, few, k)):
            for layouts in ({}, {"layout_a": MN_MAJOR}, {"layout_b": STRIDED}):
                chosen = gemm.choose_config(replace(task, **layouts), arch)
                assert not isinstance(chosen, SplitFloat32)


@pytest.mark.parametrize("arch", ARCHS)
def test_named_precisions_are_by_parts_on_every_architecture(arch):
    for name, m in itertools.product(SPLITS, (1, 64, 4096)):
        if flushes_parts(SPLITS[name], arch):
            continue
        chosen = gemm.choose_config(_task(m, 4096, 1024, precision=name), arch)
        assert isinstance(chosen, SplitFloat32) and chosen.config.parts.name == name


@pytest.mark.parametrize("name", ["fma", *SPLITS])
def test_named_precisions_are_kept(name):
    for config in gemm.configs(_task(4096, 4096, 4096, precision=name), "sm_90a"):
        assert (config.config.parts.name if isinstance(config, SplitFloat32) else "fma") == name


def test_fp16_parts_are_refused_where_subnormal_ones_are_flushed():
    on_mi200 = SimpleNamespace(arch="gfx90a")
    for name in ("tf32", "fp16x3", "tf32x3"):
        with pytest.raises(NotImplementedError, match="gfx90a flushes FP16 parts"):
            check_precision(name, FLOAT32, FLOAT32, on_mi200)
    assert check_precision("bf16x6", FLOAT32, FLOAT32, on_mi200) == "bf16x6"


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
