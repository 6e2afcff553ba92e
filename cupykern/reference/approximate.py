"""FP64 values with the errors that FP32 operations accumulate in them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, as_float64, namespace
from ..op import Bound
from ..typing import Array, Factor
from .rounding import inexact_rms, rounding_rms, stored

FLOOR = 2.0**-126  # the largest loss by flushing an FP32 subnormal


class Approximate(NamedTuple):
    """A value in FP64, and the error of its FP32 computation.

    exact: the FP64 value.
    worst: the largest error, without `floor`.
    floor: the largest error that flushed subnormals add.
    square: the expected square of the error.
    bias: the largest |mean| of the error.
    shared: the part of `square` that is common to all elements along `axes`.
    known: the part of the error computed from the operands, included in `square`; its mean need not
        be zero.
    """

    exact: Any
    worst: Any
    floor: Any
    square: Any
    bias: Factor
    shared: Factor = 0.0
    axes: tuple[int, ...] = ()
    known: Any = 0.0

    @property
    def shared_part(self) -> Any:
        """`shared` divided by `square`; 0 where `square` is 0."""
        xp = namespace(self.exact)
        return xp.where(self.square > 0, self.shared / self.square, 0.0)

    def scaled(self, factor: Any) -> Approximate:
        """Return the product with an exact factor, without a rounding."""
        size = abs(factor)
        return Approximate(
            self.exact * factor, self.worst * size, self.floor * size, self.square * size**2,
            self.bias * size, self.shared * size**2, self.axes, self.known * factor,
        )  # fmt: skip

    def rounded(self, count: int = 1) -> Approximate:
        """Return the value with `count` more FP32 roundings; `exact` stays the same."""
        xp = namespace(self.exact)
        if count == 0:
            return self
        own = xp.where(self.square > 0, rounding_rms(self.exact), inexact_rms(self.exact))
        return self._replace(
            worst=self.worst
            + count * UNIT_ROUNDOFF_32 * (xp.abs(self.exact) + self.worst) * (1 + 2.0**-20),
            floor=self.floor + count * FLOOR,
            square=self.square + count * own**2,
        )

    def times_number(self, number: float) -> Approximate:
        """Add the errors of a factor that `exact` already includes: its own rounding to FP32 and
        the rounding of the product.

        Products of integers with one factor have errors in a pattern, whose mean is not zero.
        """
        significand, rounded = math.frexp(number)[0], float(np.float32(number))
        if abs(significand) in (0.0, 0.5) and rounded == number:
            return self
        error = abs(rounded / number - 1)
        size = namespace(self.exact).abs(self.exact) * error
        return self._replace(
            worst=self.worst + size,
            square=self.square + size**2,
            bias=self.bias + size + rounding_rms(self.exact) / 2,
        ).rounded()

    def plus(self, addend: Any) -> Approximate:
        """Return the FP32 sum with an exact addend."""
        return self._replace(exact=self.exact + as_float64(addend)).rounded()

    def stored(self, reference: Array, dtype: np.dtype) -> Bound:
        """Return the Bound of the value stored as `dtype`; FP32 is not rounded again."""
        xp, rms, floor = namespace(reference), namespace(reference).sqrt(self.square), self.floor
        shared = xp.sqrt(self.shared) if self.axes else 0.0
        if dtype != dtypes.float32:
            return stored(
                reference, dtype, self.worst, rms, floor=floor + 4 * FLOOR, shared=shared,
                bias=self.bias, axis=self.axes, known=self.known,
            )  # fmt: skip
        floor = floor + 4 * FLOOR
        rms = xp.where(floor > rms, 0.0, xp.hypot(rms, floor))
        worst, bias = self.worst + floor, self.bias + floor
        return Bound(worst, rms, shared, bias, self.axes, known=self.known)
