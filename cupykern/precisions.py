"""The precisions of FP32 products: how numbers are split into 16-bit parts, and which products of
parts are computed.

Sources: Ootomo and Yokota, Int. J. High Perform. Comput. Appl. 36 (2022); Henry, Tang and Heinecke,
ARITH 2019.  The C++ counterpart is Parts in kernels_cu/gemm/policies.cuh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from . import dtypes
from .numerics import UNIT_ROUNDOFF_32, finfo


@dataclass(frozen=True)
class Parts:
    """A split x = sum over p of 2^(-shift p) part[p] into parts of `dtype`.

    The products of parts i of a and j of b with i + j <= order are computed.

    count_a, count_b: parts per operand.  count: parts of an FP32 operand.
    is_float32: at least as accurate as FP32 accumulation of FP32 products.
    """

    name: ClassVar[str]  # the value of matmul's `precision`
    dtype: ClassVar[np.dtype]
    count: ClassVar[int]
    shift: ClassVar[int]
    order: ClassVar[int]
    is_float32: ClassVar[bool]
    count_a: int
    count_b: int

    @property
    def unit_roundoff(self) -> float:
        """The unit roundoff of a part."""
        return float(finfo(self.dtype).unit_roundoff)

    def of(self, a: np.dtype, b: np.dtype) -> Any:
        """The split for operands of dtypes a and b."""
        return replace(self, count_a=self.count_of(a), count_b=self.count_of(b))

    def count_of(self, dtype: np.dtype) -> int:
        """The number of parts of an operand: 1 if one part holds every number of `dtype`."""
        return 1 if self.is_exact(dtype) else self.count

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether one part holds the significand of every number of `dtype`."""
        return finfo(dtype).unit_roundoff >= self.unit_roundoff

    def lost(self, dtype: np.dtype = dtypes.float32) -> float:
        """The largest relative error of splitting a number of `dtype` into normal parts."""
        return 0.0 if self.is_exact(dtype) else self.unit_roundoff**self.count

    def tolerance(self, k: int, dtype: np.dtype = dtypes.float32) -> float:
        """The allowed relative error of splitting a number of `dtype` in a product of depth k.

        The larger of twice `lost` and an eighth of the bound k u of FP32 accumulation.
        """
        return max(k / 8 * UNIT_ROUNDOFF_32, 2 * self.lost(dtype))

    def smallest(self, k: int) -> float:
        """The smallest magnitude that parts represent, in a block whose largest is 2^14.

        With FP16 the first part can be subnormal.  Tensor cores align its products as if it were
        normal, so they lose more, `aligned_loss` in all.
        """
        return 2.0**-14 * 192 / max(k, 1) if self.dtype == dtypes.float16 else 2.0**-90

    def aligned_loss(self, k: int) -> float:
        """The alignment error of a sum of k products, relative to the sum of absolute values.

        That is the worst error of two steps of reference.accumulation.TENSOR_16, 24 u each, for
        products k / 192 times as large.
        """
        return k / 4 * UNIT_ROUNDOFF_32 if self.dtype == dtypes.float16 else 0.0

    @property
    def dropped(self) -> tuple[tuple[int, int], ...]:
        """The products of parts that are not computed."""
        pairs = ((i, j) for i in range(self.count_a) for j in range(self.count_b))
        return tuple((i, j) for i, j in pairs if i + j > self.order)

    @property
    def products(self) -> int:
        """The number of products of parts that are computed."""
        return self.count_a * self.count_b - len(self.dropped)

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """The template arguments of the C++ Parts.

        The order is clamped, so that equal sets of products have equal arguments.
        """
        order = min(self.order, self.count_a + self.count_b - 2)
        return self.count_a, self.count_b, self.shift, order

    @property
    def cpp(self) -> str:
        return f"gemm::Parts<{', '.join(map(str, self.numbers))}>"


@dataclass(frozen=True)
class Tf32(Parts):
    """One FP16 part: TF32's 11 bits, rounded, at twice the speed of TF32 tensor cores, which
    truncate."""

    name, dtype, count, shift, order, is_float32 = "tf32", dtypes.float16, 1, 0, 0, False
    count_a: int = 1
    count_b: int = 1


@dataclass(frozen=True)
class Fp16x3(Parts):
    """Two FP16 parts, 22 bits; without the product of the second parts."""

    name, dtype, count, shift, order, is_float32 = "fp16x3", dtypes.float16, 2, 11, 1, True
    count_a: int = 2
    count_b: int = 2


@dataclass(frozen=True)
class Bf16x3(Parts):
    """Two BF16 parts, 16 bits; without the product of the second parts."""

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
"""TF32 and FP16 significands have 11 bits: the products of two parts are the same.  Block scales,
and FMA for numbers that FP16 cannot hold, replace TF32's exponent range."""
PRECISIONS = ("float32", "fma", *SPLITS, *_ALIASES)
FLOAT32_LEAST_K = 128
"""From this K on, the bounds of splits with is_float32 are at most FP32's, (K + 2) u."""


def canonical(precision: str) -> str:
    """Resolve an alias to its name in SPLITS; return other names unchanged."""
    return _ALIASES.get(precision, precision)
