"""How tensor cores add products, in numpy: bit for bit what they give (arXiv 2511.10909)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Adder(NamedTuple):
    """`depth` products and an accumulator are truncated to `bits` fractional bits of the largest
    exponent and added exactly; the accumulator keeps `fraction` fractional bits."""

    depth: int
    bits: int
    fraction: int


HOPPER = {"half": Adder(16, 25, 23), "bf16": Adder(16, 25, 23)} | dict.fromkeys(
    ("e4m3", "e5m2"), Adder(32, 13, 13)
)
_LEAST_EXPONENTS = {"half": -14, "bf16": -126, "e4m3": -6, "e5m2": -14}
_NONE = -1000


def _exponents(x: np.ndarray, least: int) -> np.ndarray:
    return np.where(x == 0, _NONE, np.maximum(np.frexp(x)[1] - 1, least))


def product(a: np.ndarray, b: np.ndarray, types: tuple[str, str]) -> np.ndarray:
    """a (m, k) times b (n, k) transposed, both FP64, as Hopper's tensor cores add k in order."""
    adder = HOPPER[types[0]]
    total = np.zeros((len(a), len(b)))
    for first in range(0, a.shape[1], adder.depth):
        x, y = (z[:, first : first + adder.depth] for z in (a, b))
        exponents = _exponents(x, _LEAST_EXPONENTS[types[0]])[:, None]
        exponents = exponents + _exponents(y, _LEAST_EXPONENTS[types[1]])
        largest = np.maximum(exponents.max(-1), _exponents(total, -126))
        unit = np.exp2(np.maximum(largest, -400) - adder.bits)
        addends = np.concatenate([x[:, None] * y, total[..., None]], -1)
        total = np.trunc(addends / unit[..., None]).sum(-1) * unit
        significand, exponent = np.frexp(total)
        kept = 2.0 ** (adder.fraction + 1)
        total = np.ldexp(np.trunc(significand * kept) / kept, exponent)
    return total
