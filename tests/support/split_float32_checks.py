"""Checks of FP32 products by 16-bit parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from products import MATMUL, compare, to_numpy

import cupykern
from cupykern import dtypes, inputs
from cupykern.gemm.parts_config import PartsGemmConfig
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90PartsGemmConfig
from cupykern.gemm.split_float32 import SplitFloat32
from cupykern.precisions import SPLITS, AnyParts, Bf16x6, Fp16x3

Way = Callable[[AnyParts], SplitFloat32]
TILE = GemmConfig(64, 64, 32, 2, 2, stages=2)  # which every GPU's shared memory holds
_BOTH = Fp16x3(), Bf16x6()


def by_hopper(parts: AnyParts, **options: Any) -> SplitFloat32:
    return SplitFloat32(Sm90PartsGemmConfig(parts, **options))


def portable(parts: AnyParts, tile: GemmConfig = TILE) -> SplitFloat32:
    return SplitFloat32(PartsGemmConfig(parts, tile))


FP16X3 = by_hopper(Fp16x3())


def operands(
    target: Any, kind: str, m: int, n: int, k: int, layout_a: str = "C", layout_b: str = "F"
) -> tuple[Any, Any]:
    dtype = np.dtype(np.float32)
    a = inputs.values(kind, (m, k), dtype, 1)
    b = inputs.values(kind, (k, n), dtype, 2)
    return (
        inputs.with_layout(a, layout_a, target.xp),
        inputs.with_layout(b, layout_b, target.xp),
    )


def mixed_operands(target: Any, kinds: tuple[str, str], m: int, n: int, k: int) -> tuple[Any, Any]:
    """Of two dtypes."""
    shapes = (m, k), (k, n)
    a, b = (
        inputs.with_layout(inputs.values("normal", shape, dtypes.NAMES[name], 1), "C", target.xp)
        for name, shape in zip(kinds, shapes, strict=True)
    )
    return a, b


def check_bound(target: Any, config: SplitFloat32, **sizes: Any) -> None:
    """Tails in all three sizes, more than one tile."""
    sizes = {"m": 140, "n": 272, "k": 200} | sizes
    for kind in ("normal", "same_sign"):
        a, b = operands(target, kind, **sizes)
        name = config.config.parts.name
        comparison = compare(MATMUL, a, b, precision=name, config=config)
        assert comparison.ok, f"{name} {kind} {sizes}: {comparison}"


def check_flagged(target: Any, way: Way) -> None:
    """One number in each of three tiles: their tiles are those of multiply-adds, others not."""
    a, b = operands(target, "normal", 400, 400, 200)
    fp16x3 = way(Fp16x3())
    plain = cupykern.matmul(a, b, precision="fp16x3", config=fp16x3)
    by_fma = cupykern.matmul(a, b, precision="fma")
    a[3, 5], a[150, 130], b[199, 399] = np.inf, 1e30, np.nan
    for config in map(way, _BOTH):
        name = config.config.parts.name
        y = to_numpy(cupykern.matmul(a, b, precision=name, config=config))
        expected = to_numpy(cupykern.matmul(a, b, precision="fma"))
        np.testing.assert_array_equal(y[:256], expected[:256])
        np.testing.assert_array_equal(y[:, 384:], expected[:, 384:])
        assert np.isnan(y[:, 399]).all() and not np.isnan(y[4:, :399]).any()
    y = cupykern.matmul(a, b, precision="fp16x3", config=fp16x3)
    np.testing.assert_array_equal(to_numpy(plain)[256:, :384], to_numpy(y)[256:, :384])
    assert (to_numpy(plain) != to_numpy(by_fma)).any()


def check_exponents(target: Any, way: Way) -> None:
    """What parts cannot hold beside larger numbers of its block is multiplied by itself."""
    a, b = np.zeros((128, 256), np.float32), np.zeros((256, 128), np.float32)
    a[:, 0], a[:, 1] = 1.0, 1.2345678e-30
    b[1] = 1.0
    for config in map(way, _BOTH):
        y = cupykern.matmul(*map(target.xp.asarray, (a, b)), config=config)
        np.testing.assert_allclose(to_numpy(y), float(a[0, 1]), rtol=2.0**-22)


def check_integers(target: Any, way: Way) -> None:
    """Exact where the sums of |a b| are less than 2^24, whatever parts would drop."""
    rng = np.random.default_rng(3)
    a, b = np.zeros((150, 256), np.float32), np.zeros((256, 140), np.float32)
    a[:, 0], b[0] = rng.integers(2049, 2900, 150), rng.integers(2049, 2900, 140)
    a[:, 200], b[200] = 2**21 - 1, rng.integers(0, 4, 140)
    expected = a.astype(np.float64) @ b
    for config in map(way, _BOTH):
        y = cupykern.matmul(*map(target.xp.asarray, (a, b)), config=config)
        np.testing.assert_array_equal(to_numpy(y), expected)


def check_scales(target: Any, way: Way) -> None:
    """Powers of two leave the bits of the significands, from 2^-40 to 2^60."""
    a, b = operands(target, "normal", 130, 140, 200)
    fp16x3 = way(Fp16x3())
    y = cupykern.matmul(a, b, config=fp16x3)
    for i, j in ((-40, 40), (-30, -30), (60, 0), (20, -20)):
        scaled = cupykern.matmul(a * np.float32(2.0**i), b * np.float32(2.0**j), config=fp16x3)
        np.testing.assert_array_equal(to_numpy(scaled), to_numpy(y) * 2.0 ** (i + j))


def check_epilogue(target: Any, way: Way) -> None:
    """alpha, bias of columns, activation, residual; out of other dtypes; batches that broadcast."""
    xp, rng = target.xp, np.random.default_rng(4)
    a = xp.asarray(rng.standard_normal((3, 1, 70, 200)), np.float32)
    b = xp.asarray(rng.standard_normal((2, 200, 144)), np.float32)
    bias = xp.asarray(rng.standard_normal(144), np.float32)
    residual = xp.asarray(rng.standard_normal((3, 2, 70, 144)), np.float32)
    for options in (
        {},
        {"bias": bias, "activation": "gelu", "alpha": -0.3},
        {"bias": bias, "residual": residual},
        {"out_dtype": "bfloat16", "bias": bias},
    ):
        for config in map(way, _BOTH):
            assert compare(MATMUL, a, b, config=config, **options).ok


def check_eleven_bits(target: Any) -> None:
    """Of numbers with TF32's 11 bits "tf32" loses nothing; others it rounds to nearest."""
    dtype, xp = np.dtype(np.float32), target.xp
    short = [inputs.values("normal", s, dtype, 1).astype(np.float16) for s in ((64, 200), (200, 8))]
    a, b = (x.astype(dtype) for x in short)
    y = to_numpy(cupykern.matmul(xp.asarray(a), xp.asarray(b), precision="tf32"))
    sizes = abs(a.astype(np.float64)) @ abs(b)
    assert (abs(y - a.astype(np.float64) @ b) <= 2.0**-20 * sizes).all()
    ones = np.zeros((200, 8), dtype)
    ones[0] = 1.0
    for bits in (1, 3, 5):  # quarters of a unit in the last place of 11 bits
        a[:, 0] = 1 + bits * 2.0**-12
        y = to_numpy(cupykern.matmul(xp.asarray(a), xp.asarray(ones), precision="tf32"))
        assert (y == 1 + round(bits / 4) * 2.0**-10).all()


def check_one_chunk(target: Any, way: Way) -> None:
    """Sums of one sign: truncated without promotion, they would lose 2^-17."""
    for parts in SPLITS.values():
        check_bound(target, way(parts), k=2048, m=64, n=64)
