"""Worst-case and expected error of a matrix product, by the unit that accumulates it.

Worst case: each step has an error relative to the sum of the absolute values so far (Blanchard,
Higham, Lopez, Mary, Pranesh, SIAM J. Sci. Comput. 42 (2020), theorem 3.2).

Expected: errors of rounding to nearest are modelled as independent, uniform within half a unit in
the last place, with mean zero (Higham and Mary, SIAM J. Sci. Comput. 41 (2019)).  Tensor cores
truncate: their errors have a mean, which adds up over the steps of a sum.  Both errors are relative
to the partial sums.  The partial sums are replaced by their averages over random orders of the k
terms, with S the sum of the terms and Q the sum of their squares:
    E[S_j^2] = j / k Q + j (j - 1) / (k (k - 1)) (S^2 - Q)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..numerics import UNIT_ROUNDOFF_32, finfo, namespace, to_numpy
from ..precisions import FLOAT32_LEAST_K, SPLITS, AnyParts, Fp16x3, canonical
from ..typing import Array
from .approximate import FLOOR, Approximate
from .rounding import RELATIVE_RMS, ROUNDING

# Means of 1 / m and 1 / m^2 over significands m in [1, 2) with uniform logarithms: the relative
# size of a unit in the last place, and its square.
_ULP = 0.5 / math.log(2)
_ULP_SQUARED = 3 * RELATIVE_RMS**2
NVFP4_UNIT = 2.0**7
"""Accumulators of BF16 x NVFP4 are scaled by its inverse (kScaledUnit in platform/nvfp4.cuh).
So the flush to zero reaches this factor higher.  The smallest FP16 products are far above it."""
_LARGEST = (16 / 9) ** 4
"""The largest product p of two uniform numbers, divided by (the mean of |p|^(-1/4))^-4."""


def product(a: Array, b: Array) -> Any:
    """Return a @ b of FP64 arrays, computed by numpy where cuBLAS is missing."""
    xp = namespace(a)
    if a.shape[-1] == 0:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return xp.zeros((*batch, a.shape[-2], b.shape[-1]))
    try:
        return xp.matmul(a, b)
    except ImportError:
        return xp.asarray(np.matmul(to_numpy(a), to_numpy(b)))


def flushed(a: Array, b: Array) -> Any:
    """Return the largest loss in a @ b of absolute values if FP32 subnormals are flushed to zero.

    Operands, products and partial sums are all subject to the flush.
    """
    lost = 2 * a.shape[-1] * FLOOR + products_of(a, b, a < FLOOR, b < FLOOR)
    return lost * (1 + 2.0**-8)  # the loss also changes the result's rounding


def products_of(a: Array, b: Array, of_a: Array, of_b: Array) -> Any:
    """Return (a * of_a) @ b + a @ (b * of_b) for absolute values a and b and masks of_a, of_b."""
    total: Any = 0.0
    if bool((of_a & (a > 0)).any()):
        total = total + product(a * of_a, b)
    if bool((of_b & (b > 0)).any()):
        total = total + product(a, b * of_b)
    return total


def aligned_sizes(a: Array, b: Array, dtype_a: np.dtype, dtype_b: np.dtype, sizes: Any) -> Any:
    """Return |a| @ |b| with the exponents that tensor cores align products to.

    a and b are absolute values; sizes is their product.  Tensor cores give a subnormal operand the
    exponent of the smallest normal number.  So its products are truncated relative to that exponent
    (measured on an H200: sums of FP16 subnormals were off by 2^-18).
    """
    xp = namespace(a)
    pairs = [
        (x, 0.0 if dtype.kind in "iu" else float(finfo(dtype).min_normal))
        for x, dtype in ((a, dtype_a), (b, dtype_b))
    ]
    if not any(bool(((x > 0) & (x < low)).any()) for x, low in pairs):
        return sizes
    return product(*(xp.where(x > 0, xp.maximum(x, low), 0.0) for x, low in pairs))


class Adder(NamedTuple):
    """A unit that adds `depth` products to an accumulator in one step.

    fraction: fractional bits of the accumulator.
    worst: the error of a step, relative to the sum of the absolute values so far.
    aligned: for a tensor core, the fractional bits, relative to the largest exponent, to which
        products and accumulator are truncated.  Their sum is exact and its result is truncated.
        None: the result is rounded to nearest.
    smallest: the smallest subnormal accumulator; 0 if subnormals are not modelled.
    """

    depth: int
    fraction: int
    worst: float
    aligned: int | None = None
    smallest: float = 0.0


FMA = Adder(1, 23, UNIT_ROUNDOFF_32)
"""FP32 multiply-adds."""

TENSOR_16 = Adder(16, 23, 24 * UNIT_ROUNDOFF_32, aligned=25)
"""FP16 and BF16.  Hopper's tensor cores keep 25 bits of 16 products (arXiv 2511.10909).  Ampere's
and Ada's keep 24 bits of 8 products, in two steps: at worst 2 (9 * 2^-24 + 2^-23).  The other
2 * 2^-24 cover partial accumulators merged across warps, splits and promotions, each over at least
16 of k.  The expected error is that of Hopper and the host.  Ampere and Ada truncate twice as
often, so their mean errors are twice as large."""

TENSOR_8 = Adder(32, 13, 34 * 2.0**-13, aligned=13)
"""FP8 on Hopper and Ada: each of 33 addends and the result loses less than 2^-13 of the largest."""

HALF = Adder(16, 10, 2 * 2.0**-10, smallest=2.0**-24)
"""FP16 accumulators of FP16 products: Hopper rounds after 16 products; the worst case truncates
after 8."""

FP64 = Adder(1, 52, 2.0**-53)
"""The accumulation of the FP64 reference."""

PARTS_K = 32
"""K extent after which partial accumulators of 16-bit parts are promoted to an FP32 sum."""

PROMOTED_K = 128
"""K extent after which FP8 and block-scaled partial accumulators are promoted to an FP32 sum."""


class Terms(NamedTuple):
    """Statistics, as FP64 arrays, of the k products that each output element sums.

    total: their sum.  sizes: the sum of their absolute values.  squares: the sum of their squares.
    significand: significand bits of a product.  roots: the sum of their inverse_root; 0: unknown.
    lost: the loss in the sum from splitting operands into parts.
    """

    total: Array
    sizes: Any
    squares: Array
    k: int
    significand: int
    roots: Any = 0.0
    lost: Any = 0.0

    def squares_of_parts(self, size: int) -> Any:
        """Return the expected sum of squares of partial sums of `size` terms in random order."""
        share = (min(size, self.k) - 1) / max(self.k - 1, 1)
        return np.maximum(self.squares + (self.total**2 - self.squares) * share, 0)


class PartialSums(NamedTuple):
    """Statistics of the accumulator after each step; each chunk of terms starts from zero.

    mean: the mean of the sum of all these accumulators.  variance: the variance of that sum.
    squares: the sum of their squares.  count: their number.
    """

    mean: Array
    variance: Array
    squares: Array
    count: float  # type: ignore[assignment]  # replaces tuple.count, which is not called

    @classmethod
    def of(cls, terms: Terms, depth: int, chunk: int) -> PartialSums:
        chunk = min(chunk, terms.k)
        steps = -(-chunk // depth)
        of_chunks, of_steps = terms.squares_of_parts(chunk), terms.squares_of_parts(depth)
        return cls(
            mean=(steps + 1) / 2 * terms.total,
            variance=steps * (steps + 1) / 12 * np.maximum(of_steps - of_chunks / steps, 0),
            squares=(steps + 1) * (of_chunks / 3 + of_steps / 6),
            count=steps * terms.k / chunk,
        )


def inverse_root(x: Array) -> Any:
    """Return |x|^(-1/4), and 0 for zeros."""
    xp = namespace(x)
    return xp.where(x != 0, abs(xp.where(x != 0, x, 1.0)) ** -0.25, 0.0)


def significand_bits(dtype: np.dtype) -> int:
    """Return the significand bits of an operand of `dtype` as the unit multiplies it."""
    if dtype == dtypes.int8:
        return 7
    if dtype == dtypes.float4_e2m1fn:
        return 6  # multiplied by an e4m3 scale
    return 1 - round(math.log2(finfo(dtype).eps))


def expected_error(adder: Adder, terms: Terms, chunk: int) -> tuple[Any, Any]:
    """Return (mean square, |mean|) of the errors of sums with one accumulator per `chunk` of k."""
    xp = namespace(terms.total)
    if terms.k == 0:
        return xp.zeros_like(terms.total), xp.zeros_like(terms.total)
    sums = PartialSums.of(terms, adder.depth, chunk)
    unit = 2.0**-adder.fraction
    if adder.aligned is None:
        square = unit**2 * _ULP_SQUARED / 12 * sums.squares
        # Subnormal sums have the gap of the smallest number; sums rounded to zero lose their value.
        lost = xp.minimum(sums.count * adder.smallest**2 / 12, sums.squares)
        one_sign = xp.where(xp.abs(terms.total) < adder.smallest, xp.sqrt(lost), 0.0)
        return square + lost, one_sign
    # The accumulator has about one bit more than its largest addend: the truncated part is a
    # multiple of `step` units in the last place.
    step = 2.0 ** (adder.fraction - adder.aligned - 1)
    cut = unit * _ULP * (1 - step) / 2  # the mean, of an accumulator of 1
    cut_square = unit**2 * _ULP_SQUARED * (1 - step) * (2 - step) / 6
    of_products, variance = _alignment_error(adder.aligned, adder.depth, terms, sums)
    bias = cut * xp.abs(sums.mean) + of_products
    own = cut**2 * sums.variance + (cut_square - cut**2) * sums.squares
    return bias**2 + own + variance, bias


def _alignment_error(aligned: int, depth: int, terms: Terms, sums: PartialSums) -> tuple[Any, Any]:
    """Return (|mean|, variance) of the error from aligning products to the largest addend.

    Each product loses up to 2^-aligned of the largest addend, half of that on average, with the
    sign of the product.  Only a product below 2^(significand - 2 - aligned) of the largest addend
    has bits to lose.  Their share is t (1 - log t), the share for products p of two uniform
    numbers, whose largest is 4 times the mean of |p|.

    A few products much larger than the rest dominate the mean of |p|, but not that of |p|^(-1/4).
    The latter gives a second estimate of the largest.  It counts if it is below half the first: the
    two are equal for uniform numbers, and their ratio is 0.77 for normal numbers.  The mean error
    is that of products of one size and sign, whose sum grows steadily.
    """
    xp = namespace(terms.total)
    unit = 2.0**-aligned
    typical = terms.sizes / terms.k
    some = xp.where(typical > 0, typical, 1.0)
    others = _LARGEST * (terms.k / xp.maximum(xp.asarray(terms.roots), 2.0**-200)) ** 4
    most = xp.minimum(4 * some, 2 * others)
    covered = 2.0 ** (aligned + 2 - terms.significand)  # the addend that truncates a product of 1
    # The largest addend is the accumulator or a product; the square of the largest product is half
    # the sum of squares in its step.
    largest = sums.squares / sums.count + depth / 2 * terms.squares / terms.k
    share = xp.sqrt(_ULP_SQUARED * largest) / (most * covered)
    share = xp.minimum(xp.maximum(share, 2.0**-64), 1.0)
    variance = terms.k * share * (1 - xp.log(share)) * unit**2 / 3 * _ULP_SQUARED * largest
    last = 2 * xp.abs(sums.mean) / sums.count
    beyond = xp.maximum(last - typical * covered, 0.0)
    cutting = beyond**2 / (2 * xp.where(last > 0, last, 1.0))  # the mean of that excess
    more_of_one_sign = xp.abs(terms.total) / some
    return unit / 2 * _ULP * more_of_one_sign * cutting, variance


def worst_of_parts(
    parts: AnyParts, k: int, a: np.dtype = dtypes.float32, b: np.dtype = dtypes.float32
) -> float:
    """Return the worst error of a sum of k products computed from parts of the operands.

    It is relative to the sum of the absolute values.  It adds up the loss in the parts, the dropped
    products, the steps of a chunk, and the FP32 sum of the chunks.  A chunk has steps for the
    products of the first parts and for the smaller products.  The latter are at most twice the unit
    roundoff of a part, relative to the former.
    """
    u, of_a, of_b = parts.unit_roundoff, parts.tolerance(k, a), parts.tolerance(k, b)
    lost = of_a + of_b + of_a * of_b + sum(u ** (i + j) for i, j in parts.dropped)
    lost += parts.aligned_loss(k)
    steps = PARTS_K // TENSOR_16.depth
    small = (parts.products - 1) * steps * TENSOR_16.worst * 2 * u
    chunks = -(-k // PARTS_K)
    return lost + (steps * TENSOR_16.worst + small) * (1 + 2 * u) + (chunks + 2) * UNIT_ROUNDOFF_32


def expected_of_parts(parts: AnyParts, terms: Terms) -> tuple[Any, Any]:
    """Return (mean square, |mean|) of the errors of sums computed from parts of the operands.

    The error has three sources: the tensor cores in each chunk, the FP32 sum of the chunks, and the
    loss in the parts.  The loss is common to all results in a row or column.  Where an operand
    repeats along k, it is also common to all terms and adds up.  So it is computed
    (`lost_in_parts`), not estimated.  Its mean does not vanish: it is Approximate's `known`.
    """
    if terms.k == 0:
        return expected_error(FMA, terms, 1)
    own = terms._replace(significand=2 * significand_bits(parts.dtype))
    square, bias = expected_error(TENSOR_16, own, PARTS_K)
    chunks = terms._replace(k=-(-terms.k // PARTS_K), squares=terms.squares_of_parts(PARTS_K))
    return square + expected_error(FMA, chunks, chunks.k)[0] + terms.lost**2, bias


def may_be_multiply_adds(parts: AnyParts, k: int, *operands: Array) -> bool:
    """Return whether a tile may contain numbers that parts cannot represent (split_float32.cu).

    The test uses the extremes of the whole FP64 matrices, which bound those of every block.
    """
    for x in operands:
        xp, sizes = namespace(x), abs(x)
        if not x.size or not bool((sizes > 0).any()):
            continue
        most, least = float(sizes.max()), float(xp.where(sizes > 0, sizes, np.inf).min())
        if not most < 2.0**77 or least < parts.smallest(k) * max(most, 2.0**-49) / 2.0**14:
            return True
        if parts.dropped and parts.shift and most > 2048 and bool((x == xp.rint(x)).all()):
            return True
    return False


def lost_in_parts(parts: AnyParts, a: Array, b: Array) -> Any:
    """Return a @ b of finite operands minus the products of parts that the kernel computes.

    a is the sum of its parts a_i and a remainder.  The loss is the remainder times b, plus each a_i
    times the remainder of b after the parts that a_i is multiplied by.
    """
    xp, bits = namespace(a), significand_bits(parts.dtype)

    def split(x: Array, count: int) -> tuple[list[Any], list[Any]]:
        """Return (the parts, the remainders before the first part and after each)."""
        found, left = [], [x]
        for _ in range(count):
            significand, exponent = xp.frexp(left[-1])
            found.append(xp.ldexp(xp.rint(xp.ldexp(significand, bits)), exponent - bits))
            left.append(left[-1] - found[-1])
        return found, left

    of_a, left_of_a = split(a, parts.count_a)
    _, left_of_b = split(b, parts.count_b)
    lost = product(left_of_a[-1], b)
    for i, part in enumerate(of_a):
        lost = lost + product(part, left_of_b[min(parts.order - i + 1, parts.count_b)])
    return lost


@dataclass(frozen=True)
class Products:
    """The accumulation of a matrix product with operands of dtypes a and b.

    half_accumulators: accumulators are FP16.  by_block: block scales multiply the partial
    accumulators of PROMOTED_K of k.  precision: the precision of products of FP32 operands.
    """

    a: np.dtype
    b: np.dtype
    half_accumulators: bool = False
    by_block: bool = False
    precision: str = "float32"

    @property
    def parts(self) -> AnyParts | None:
        """The split of FP32 operands into parts; None without a split."""
        found = (
            SPLITS.get(canonical(self.precision)) if dtypes.float32 in (self.a, self.b) else None
        )
        return None if found is None else found.of(self.a, self.b)

    def may_be_parts(self, k: int) -> AnyParts | None:
        """Return a split that may be used for depth k: "float32" allows one, but needs none."""
        open_ = self.adder is FMA and self.precision == "float32" and k >= FLOAT32_LEAST_K
        return Fp16x3().of(self.a, self.b) if open_ else self.parts

    @property
    def exact(self) -> bool:
        """Whether the accumulators are integers (int8 operands)."""
        return self.a == self.b == dtypes.int8

    @property
    def adder(self) -> Adder:
        if self.half_accumulators:
            return HALF
        if dtypes.float32 in (self.a, self.b):
            return FMA
        fp8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)
        return TENSOR_8 if self.a in fp8 and self.b in fp8 else TENSOR_16

    def of(self, a: Array, b: Array) -> Approximate:
        """Return a @ b of FP64 arrays, with the errors of the kernel's accumulation."""
        xp = namespace(a)
        k = a.shape[-1]
        total = product(a, b)
        if self.exact and not self.by_block:
            zeros = xp.zeros_like(total)
            return Approximate(total, zeros, zeros, zeros, zeros)
        mixed = self.parts is not None and may_be_multiply_adds(self.parts, k, a, b)
        a, b = (xp.where(xp.isfinite(x), x, 0.0) for x in (a, b))
        terms = self._terms(a, b)
        square, bias = self._of_blocks(a, b) if self.by_block else self._expected(terms)
        worst, known = self._relative(k), -terms.lost
        if mixed:  # a tile may use either method: take the larger errors
            bias, known = bias + abs(terms.lost), 0.0
            square, bias = map(xp.maximum, (square, bias), expected_error(FMA, terms, max(k, 1)))
            worst = max(worst, Products(self.a, self.b)._relative(k))
        a, b, sizes = xp.abs(a), xp.abs(b), terms.sizes
        floor = flushed(a, b) + xp.zeros_like(total)
        if dtypes.float4_e2m1fn in (self.a, self.b):
            floor = floor * NVFP4_UNIT
        if self.adder is not FMA:
            sizes = aligned_sizes(a, b, self.a, self.b, sizes)
        worst = sizes * worst + self._underflow(k)
        return Approximate(total, worst, floor, square, bias, known=known)

    def _terms(self, a: Array, b: Array) -> Terms:
        """Return the Terms of the product of finite arrays."""
        sizes = product(abs(a), abs(b))
        bits = significand_bits(self.a) + significand_bits(self.b)
        squares, roots = product(a * a, b * b), product(inverse_root(a), inverse_root(b))
        parts = self.may_be_parts(a.shape[-1])
        lost: Any = 0.0 if parts is None else lost_in_parts(parts, a, b)
        return Terms(product(a, b), sizes, squares, a.shape[-1], bits, roots, lost)

    def _relative(self, k: int) -> float:
        """Return the worst error of the sum, relative to the sum of the absolute values."""
        blocks, chunks = -(-k // TENSOR_16.depth), -(-k // PROMOTED_K)
        gamma = blocks * TENSOR_16.worst  # FP8 may be multiplied as FP16
        if self.exact:
            gamma = (chunks + 2) * UNIT_ROUNDOFF_32
        elif self.parts is not None:
            gamma = worst_of_parts(self.parts, k, self.a, self.b)
        elif self.adder is FMA:
            gamma = (k + 2) * UNIT_ROUNDOFF_32
        elif self.adder is TENSOR_8:
            gamma += min(-(-k // TENSOR_8.depth), PROMOTED_K // TENSOR_8.depth) * TENSOR_8.worst
        elif self.half_accumulators:
            steps = -(-k // HALF.depth)
            return math.expm1(steps * math.log1p(HALF.worst + TENSOR_16.worst))
        return gamma / (1 - gamma)

    def _underflow(self, k: int) -> float:
        """Return the loss of FP16 accumulators below their smallest normal number."""
        return (
            -(-k // HALF.depth) * 2 * finfo(dtypes.float16).underflow_error * self.half_accumulators
        )

    def _expected(self, terms: Terms) -> tuple[Any, Any]:
        """Return (mean square, |mean|) of the error."""
        if self.adder is FMA and self.precision != "fma":
            return self._expected_of_parts(terms)
        if self.adder is not TENSOR_8 or terms.k <= PROMOTED_K:
            return expected_error(self.adder, terms, max(terms.k, 1))
        square, bias = expected_error(TENSOR_8, terms, PROMOTED_K)
        chunks = terms._replace(
            k=-(-terms.k // PROMOTED_K), squares=terms.squares_of_parts(PROMOTED_K)
        )
        return square + expected_error(FMA, chunks, chunks.k)[0], bias

    def _expected_of_parts(self, terms: Terms) -> tuple[Any, Any]:
        """Return (mean square, |mean|); for "float32" the larger of both methods' errors."""
        parts = self.may_be_parts(terms.k)
        if self.parts is not None:
            return expected_of_parts(self.parts, terms)
        square, bias = expected_error(FMA, terms, max(terms.k, 1))
        if parts is None:
            return square, bias
        of_parts, mean = expected_of_parts(parts, terms)
        return np.maximum(square, of_parts), mean

    def _of_blocks(self, a: Array, b: Array) -> tuple[Any, Any]:
        """Return (mean square, |mean|) of block sums in order, times scales of either sign."""
        so_far = product(a[..., :0], b[..., :0, :])
        xp, square, bias = namespace(a), so_far, so_far
        for first in range(0, a.shape[-1], PROMOTED_K):
            block = slice(first, first + PROMOTED_K)
            terms = self._terms(a[..., block], b[..., block, :])
            if self.exact:  # the reference is not: its operands include their scales
                square = square + expected_error(FP64, terms, PROMOTED_K)[0]
            else:
                own, mean = expected_error(self.adder, terms, PROMOTED_K)
                square = square + own - mean**2
                bias = bias + xp.sign(terms.total) * mean
            so_far = so_far + terms.total
            # Roundings of the products with two scales, and of the addition.
            square = square + ROUNDING**2 * (2 * terms.total**2 + so_far**2)
        return square + bias**2, xp.abs(bias)
