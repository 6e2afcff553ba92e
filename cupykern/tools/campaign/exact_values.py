"""Operands and scales whose products are integers that FP32 holds exactly."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ... import dtypes, nvfp4
from ...nvfp4 import GROUP, NvFp4
from ...op import RandomDraw
from ...ops.checks.scales import scale_shapes
from ...ops.problems.products import NVFP4, with_layout

FP8 = ("float8_e4m3fn", "float8_e5m2")
FP8_LARGEST = 64  # |a b|: 2^13 / 128
_LARGEST = {  # the format represents every integer up to this one
    "float16": 2**11,
    "bfloat16": 2**8,
    "float32": 2**24,
    "float8_e4m3fn": 2**4,
    "float8_e5m2": 2**3,
    "int8": 127,
}
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0)
_E2M1_LARGEST = 24  # 6 times a group scale and a global scale, each 1 or 2
_FACTORS = (1.0, 1.0, -1.0, 2.0, -2.0)


class Operand(NamedTuple):
    """array: the op's argument.  exact: its values in FP64, (..., M, K) or (..., K, N)."""

    array: Any
    exact: np.ndarray


class Values(NamedTuple):
    """The integers of an operand: multiples of `unit` up to most * unit."""

    most: int
    kind: str
    unit: int = 1


def integers(rng: Any, shape: tuple[int, ...], values: Values) -> np.ndarray:
    """Return FP64 integers.

    kind: "signed", "positive", or "largest" (all of the largest magnitude, one sign per row).
    """
    if values.kind == "largest":
        signs = rng.choice((-1, 1), (*shape[:-1], 1)) if shape else 1
        x = np.broadcast_to(values.most * signs, shape)
    else:
        x = rng.integers(0 if values.kind == "positive" else -values.most, values.most + 1, shape)
    return np.asarray(x * values.unit, np.float64)


def draw_values(
    draw: RandomDraw, names: tuple[str, str], k: int, limit: int, units: tuple[int, int] = (1, 1)
) -> tuple[Values, Values]:
    """Draw values of a and b such that K times the largest product is at most `limit` units."""
    budget = max(1, limit // max(k, 1))
    if set(names) <= set(FP8):
        budget = min(budget, FP8_LARGEST)
    kind = draw.choice(("signed", "signed", "positive", "largest"))
    largest = [_largest(name, unit) for name, unit in zip(names, units, strict=True)]
    if names[1] == NVFP4:
        most_a = min(largest[0], max(1, budget // _E2M1_LARGEST))
    else:
        most_a = min(largest[0], budget)
    if names[0] != NVFP4:
        choices = (1, 2, 7, 8, math.isqrt(budget), most_a)
        most_a = draw.choice([most for most in choices if most <= most_a])
    most_b = min(largest[1], max(1, budget // most_a))
    return Values(most_a, kind, units[0]), Values(most_b, kind, units[1])


def _largest(name: str, unit: int) -> int:
    """Return the largest multiple of `unit`, a power of two, counted in units.

    Most FP formats absorb the unit in the exponent; float16 and int8 divide their limit by it.
    """
    if name == NVFP4:
        return _E2M1_LARGEST
    return _LARGEST[name] // unit if name in ("float16", "int8") else _LARGEST[name]


def operand(
    name: str, shape: tuple[int, ...], values: Values, layout: str, rng: Any, xp: Any
) -> Operand:
    """Make an operand of a dtype's name; an NvFp4's rows are the last but one dim of `shape`."""
    if name == NVFP4:
        return _nvfp4_operand(shape, values.unit, layout, rng, xp)
    exact = integers(rng, shape, values)
    return Operand(with_layout(exact.astype(dtypes.NAMES[name]), layout, xp), exact)


def transposed(x: Operand) -> Operand:
    """Return an NvFp4 of N rows as the (K, N) matrix that it represents."""
    return Operand(x.array, x.exact.swapaxes(-1, -2))


def _nvfp4_operand(shape: tuple[int, ...], unit: int, layout: str, rng: Any, xp: Any) -> Operand:
    codes = rng.choice(_E2M1, shape) * rng.choice((-1, 1), shape)
    scale = unit * rng.choice((1.0, 2.0), (*shape[:-1], shape[-1] // GROUP))
    factor = float(rng.choice((1.0, 2.0)))
    packed: Any = nvfp4.pack_e2m1(codes)
    data = with_layout(packed, "C" if layout == "F" else layout, xp)
    in_memory = xp.asarray(scale.astype(dtypes.float8_e4m3fn).view(np.uint8))
    array = NvFp4(
        data, in_memory.view(dtypes.float8_e4m3fn),
        global_scale=factor if rng.integers(2) else xp.asarray(factor, np.float32),
    )  # fmt: skip
    exact = codes * np.repeat(scale, GROUP, -1) * factor
    return Operand(array.to("blocked") if rng.integers(2) else array, exact)


class Scale(NamedTuple):
    """argument: the op's argument.  exact: its values, broadcastable to the operand."""

    argument: Any
    exact: np.ndarray


def draw_scales(
    recipe: str, batch: tuple[int, ...], m: int, n: int, k: int, rng: Any, xp: Any
) -> tuple[Scale, Scale]:
    """Draw scales of a (..., M, K) and b (K, N): powers of two up to 2, with either sign.

    recipe: one of problems.scaled.SCALES.
    """
    if recipe == "none":
        return Scale(None, np.ones(())), Scale(None, np.ones(()))
    if recipe == "numbers":
        number_a, number_b = (float(rng.choice(_FACTORS)) for _ in range(2))
        return Scale(number_a, np.asarray(number_a)), Scale(number_b, np.asarray(number_b))
    shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), (1, 1))
    if recipe != "tensor":
        shapes = scale_shapes(m, n, k, recipe.startswith("blocks"))
        shapes = (*batch, *shapes[0]), shapes[1]
    a, b = (rng.choice(_FACTORS, shape) for shape in shapes)
    given_a, given_b = (xp.asarray(x, np.float32) for x in (a, b))
    if recipe.startswith("blocks"):
        a = np.repeat(a, 128, -1)[..., :k]
        b = np.repeat(np.repeat(b, 128, -1), 128, -2)[:k, :n]
    if recipe == "blocks of b":
        return Scale(None, np.ones(())), Scale(given_b, b)
    return Scale(given_a, a), Scale(given_b, b)
