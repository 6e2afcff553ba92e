"""The precisions of FP32 products: how numbers are split into 16-bit parts, and which products of
parts are computed.

Parts: Ootomo and Yokota, Int. J. High Perform. Comput. Appl. 36 (2022); Henry, Tang and Heinecke,
ARITH 2019.  The Python half of kernels_cu/gemm/policies.cuh: Parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from . import dtypes
from .numerics import UNIT_ROUNDOFF_32, finfo


@dataclass(frozen=True)
class Parts:
    """x = sum over p of 2^(-shift p) part[p], parts of `dtype`; the products of parts i of a and j
    of b with i + j <= order.

    count_a, count_b: of the operands' parts.  count: of those of an FP32 one.
    is_float32: not less accurate than FP32 sums of FP32 products.
    """

    name: ClassVar[str]  # as matmul's precision
    dtype: ClassVar[np.dtype]
    count: ClassVar[int]
    shift: ClassVar[int]
    order: ClassVar[int]
    is_float32: ClassVar[bool]
    count_a: int
    count_b: int

    @property
    def unit_roundoff(self) -> float:
        """Of a part."""
        return float(finfo(self.dtype).unit_roundoff)

    def of(self, a: np.dtype, b: np.dtype) -> Any:
        """The same of operands of these dtypes."""
        return replace(self, count_a=self.count_of(a), count_b=self.count_of(b))

    def count_of(self, dtype: np.dtype) -> int:
        """The parts of an operand: one where it holds every number of `dtype`."""
        return 1 if self.is_exact(dtype) else self.count

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether one part holds the significand of every number of `dtype`."""
        return finfo(dtype).unit_roundoff >= self.unit_roundoff

    def lost(self, dtype: np.dtype = dtypes.float32) -> float:
        """What all parts of a number of `dtype` lose at most, relative to it, if they are normal
        numbers."""
        return 0.0 if self.is_exact(dtype) else self.unit_roundoff**self.count

    def tolerance(self, k: int, dtype: np.dtype = dtypes.float32) -> float:
        """What a number of `dtype` may lose in its parts, relative to itself, in a product of depth
        k: more than they always do, and up to an eighth of what FP32 sums may."""
        return max(k / 8 * UNIT_ROUNDOFF_32, 2 * self.lost(dtype))

    def smallest(self, k: int) -> float:
        """The smallest magnitude, of a block whose largest is 2^14, that parts stand for.  Of FP16
        a first part may be subnormal: tensor cores align its products as if it were not, so they
        lose more, `aligned_loss` in all."""
        return 2.0**-14 * 192 / max(k, 1) if self.dtype == dtypes.float16 else 2.0**-90

    def aligned_loss(self, k: int) -> float:
        """Of a sum of k products, relative to that of the absolute values: TENSOR_16's two steps of
        24 units, of products k / 192 times as large."""
        return k / 4 * UNIT_ROUNDOFF_32 if self.dtype == dtypes.float16 else 0.0

    @property
    def dropped(self) -> tuple[tuple[int, int], ...]:
        """The products of parts that are not computed."""
        pairs = ((i, j) for i in range(self.count_a) for j in range(self.count_b))
        return tuple((i, j) for i, j in pairs if i + j > self.order)

    @property
    def products(self) -> int:
        """How many are computed."""
        return self.count_a * self.count_b - len(self.dropped)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What kernels know: equal for equal products."""
        order = min(self.order, self.count_a + self.count_b - 2)
        return self.count_a, self.count_b, self.shift, order

    @property
    def cpp(self) -> str:
        return f"gemm::Parts<{', '.join(map(str, self.numbers))}>"


@dataclass(frozen=True)
class Tf32(Parts):
    """One FP16 part: TF32's 11 bits, at twice the speed of TF32 tensor cores, which would truncate
    to them."""

    name, dtype, count, shift, order, is_float32 = "tf32", dtypes.float16, 1, 0, 0, False
    count_a: int = 1
    count_b: int = 1


@dataclass(frozen=True)
class Fp16x3(Parts):
    """Two FP16 parts, 22 bits; without the product of the second ones."""

    name, dtype, count, shift, order, is_float32 = "fp16x3", dtypes.float16, 2, 11, 1, True
    count_a: int = 2
    count_b: int = 2


@dataclass(frozen=True)
class Bf16x3(Parts):
    """Two BF16 parts, 16 bits; without the product of the second ones."""

    name, dtype, count, shift, order, is_float32 = "bf16x3", dtypes.bfloat16, 2, 0, 1, False
    count_a: int = 2
    count_b: int = 2


@dataclass(frozen=True)
class Bf16x6(Parts):
    """Three BF16 parts, 24 bits; products of at least 2^-16 of the largest."""

    name, dtype, count, shift, order, is_float32 = "bf16x6", dtypes.bfloat16, 3, 0, 2, True
    count_a: int = 3
    count_b: int = 3


@dataclass(frozen=True)
class Bf16x9(Parts):
    """Three BF16 parts, 24 bits; all products."""

    name, dtype, count, shift, order, is_float32 = "bf16x9", dtypes.bfloat16, 3, 0, 4, True
    count_a: int = 3
    count_b: int = 3


AnyParts = Tf32 | Fp16x3 | Bf16x3 | Bf16x6 | Bf16x9
SPLITS: dict[str, AnyParts] = {p.name: p for p in (Tf32(), Fp16x3(), Bf16x3(), Bf16x6(), Bf16x9())}
_ALIASES = {"tf32x3": "fp16x3"}
"""TF32 and FP16 numbers have 11 bits: the products of two parts are the same, and a block's scale
and the multiply-adds of what FP16 cannot hold stand for TF32's exponents."""
PRECISIONS = ("float32", "fma", *SPLITS, *_ALIASES)
FLOAT32_LEAST_K = 128
"""From this K on the bounds of the parts that are_float32 are at most FP32's, (K + 2) u."""


def canonical(precision: str) -> str:
    """The name in SPLITS of another name of the same."""
    return _ALIASES.get(precision, precision)
