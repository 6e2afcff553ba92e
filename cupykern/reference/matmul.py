"""matmul and scaled_mm in FP64, and bounds of the kernels' errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

import numpy as np

from .. import dtypes
from ..numerics import as_float64, namespace
from ..nvfp4 import NvFp4
from ..op import Bound
from ..typing import Array, Factor
from .accumulation import PROMOTED_K, Products, product, products_of
from .activations import activate
from .approximate import FLOOR, Approximate
from .epilogue import epilogue_bound
from .expression import expression
from .expression_error import expression_bound
from .vectors import takes_vectors


@takes_vectors
def matmul(
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: SupportsFloat = 1.0,
    out_dtype: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """Return activation(alpha * (a @ b) + bias) + residual, or `epilogue`'s results, in FP64.

    >>> a = np.array([[1, 2], [3, -4]], np.float16)
    >>> (c,) = reference.matmul(a, a, bias=np.float16([1, 1]), activation="relu")
    >>> c.tolist()
    [[8.0, 0.0], [0.0, 23.0]]
    """
    xp = namespace(a)
    _check_real(a, b, "complex_matmul")
    with np.errstate(all="ignore"):
        y = float(alpha) * product(as_float64(a), as_float64(b))
        if epilogue is not None:
            return expression(y, epilogue, operands, out_dtype)
        if bias is not None:
            y = y + as_float64(bias)
        y = activate(xp, y, activation)
        if residual is not None:
            y = y + as_float64(residual)
    return (y,)


@takes_vectors
def matmul_bound(
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    residual: Array | None = None,
    alpha: SupportsFloat = 1.0,
    out_dtype: Any = None,
    out: Array | None = None,
    accumulate: str = "float32",
    precision: str = "float32",
    config: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds: the accumulation error through the epilogue, plus the last rounding.

    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.standard_normal((2, 32, 32)).astype(np.float16)
    >>> exact = reference.matmul(a, b)
    >>> (bound,) = reference.matmul_bound(a, b, out_dtype="float32", reference=exact)
    >>> error = abs(cupykern.matmul(a, b, out_dtype="float32") - exact[0])
    >>> bool((error <= bound.elementwise).all())
    True
    >>> bool((error**2).mean() < 4 * (bound.rms**2).mean())  # rms: the error that is expected
    True
    """
    plain = bias is None and residual is None and activation is None and float(alpha) == 1.0
    plain = plain and epilogue is None
    out_dtype = stored_as(out_dtype, dtypes.of_product(a.dtype, b.dtype, plain))
    half = accumulate == "float16"
    products = Products(a.dtype, b.dtype, half_accumulators=half, precision=precision)
    _check_real(a, b, "complex_matmul_bound")
    with np.errstate(all="ignore"):
        value = products.of(as_float64(a), as_float64(b))
        if products.exact and out_dtype != dtypes.int32:
            value = value.rounded()
        value = of_repeated(value.scaled(float(alpha)).times_number(float(alpha)), a, b)
        if epilogue is not None:
            return expression_bound(value, epilogue, operands, out_dtype, reference)
        return (epilogue_bound(value, bias, activation, residual, out_dtype, reference[0]),)


def scaled_mm(
    a: Array,
    b: Array,
    scale_a: Factor | None = None,
    scale_b: Factor | None = None,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """Return activation((scale_a * a) @ (scale_b * b) + bias), or `epilogue`'s results, in FP64.

    >>> a, b = np.array([[10, -20]], np.int8), np.array([[1], [3]], np.int8)
    >>> (c,) = reference.scaled_mm(a, b, 0.5, 0.25)
    >>> c.tolist()  # 0.5 * 0.25 * -50
    [[-6.25]]
    """
    xp = operand_namespace(a)
    with np.errstate(all="ignore"):
        y = exact_product(a, b, scale_a, scale_b)
        if epilogue is not None:
            return expression(y, epilogue, operands, out_dtype)
        if bias is not None:
            y = y + as_float64(bias)
        return (activate(xp, y, activation),)


def scaled_mm_bound(
    a: Array,
    b: Array,
    scale_a: Factor | None = None,
    scale_b: Factor | None = None,
    *,
    bias: Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    out: Array | None = None,
    config: Any = None,
    epilogue: Any = None,
    operands: Mapping[str, Any] | None = None,
    reference: tuple[Any, ...],
) -> tuple[Bound, ...]:
    """Return the Bounds: the scaled product's error through the epilogue, plus one rounding.

    >>> a, scale_a = cupykern.quantize(np.ones((2, 128), np.float32), "e4m3", granularity="row")
    >>> exact = reference.scaled_mm(a, a.T, scale_a, scale_a.T)
    >>> (bound,) = reference.scaled_mm_bound(a, a.T, scale_a, scale_a.T, reference=exact)
    >>> c = cupykern.scaled_mm(a, a.T, scale_a, scale_a.T)
    >>> bool((abs(c.astype(float) - exact[0]) <= bound.elementwise).all())
    True
    """
    dtype_a, dtype_b = operand_dtype(a), operand_dtype(b)
    plain = all(x is None for x in (scale_a, scale_b, bias, activation, epilogue))
    out_dtype = stored_as(out_dtype, dtypes.of_product(dtype_a, dtype_b, plain))
    with np.errstate(all="ignore"):
        value = scaled_product(a, b, scale_a, scale_b, out_dtype == dtypes.int32)
        if epilogue is not None:
            return expression_bound(value, epilogue, operands, out_dtype, reference)
        return (epilogue_bound(value, bias, activation, None, out_dtype, reference[0]),)


def _check_real(a: Array, b: Array, instead: str) -> None:
    if "c" in (a.dtype.kind, b.dtype.kind):
        raise TypeError(f"complex products have a reference of their own: reference.{instead}")


def stored_as(out_dtype: Any, default: np.dtype) -> Any:
    """Return the dtype of the result, or a tuple of dtypes for a tuple; None: `default`."""
    if isinstance(out_dtype, tuple):
        return tuple(stored_as(dtype, default) for dtype in out_dtype)
    return default if out_dtype is None else dtypes.NAMES.get(out_dtype, out_dtype)


def exact_product(a: Array, b: Array, scale_a: Factor | None, scale_b: Factor | None) -> Any:
    """Return (scale_a * a) @ (scale_b * b) in FP64.

    Scales multiply sums, as in kernels: an infinite one of a block whose elements have both signs
    gives an infinity, not a NaN.
    """
    x, y, factor = operands(a, b, scale_a, scale_b)
    if by_block(scale_a, scale_b, y.shape[-1]) and not all(map(_is_finite, (scale_a, scale_b))):
        x, y, _ = operands(a, b, None, None)
        return _product_of_blocks(x, y, scale_a, scale_b)
    return product(x, y) * factor


def _product_of_blocks(a: Array, b: Array, scale_a: Any, scale_b: Any) -> Any:
    """Return the sum of the products of blocks along K, each times its scales."""
    xp, (k, n) = namespace(a), b.shape[-2:]

    def of_block(scale: Any, axis: int, block: int) -> Any:
        if getattr(scale, "ndim", 0) < 2 or scale.shape[axis] == 1:
            return 1.0 if scale is None else xp.asarray(scale, np.float64)
        return as_float64(xp.take(scale, xp.asarray([block]), axis))

    total: Any = 0.0
    for block, first in enumerate(range(0, k, PROMOTED_K)):
        part = slice(first, first + PROMOTED_K)
        scale = of_block(scale_b, -2, block)
        if getattr(scale, "ndim", 0) >= 2 and scale.shape[-1] not in (1, n):
            scale = xp.repeat(scale, PROMOTED_K, -1)[..., :n]
        scale = of_block(scale_a, -1, block) * scale
        total = total + product(a[..., part], b[..., part, :]) * scale
    return total


def _is_finite(scale: Any) -> bool:
    return scale is None or bool(np.isfinite(scale).all())


def scaled_product(
    a: Array,
    b: Array,
    scale_a: Factor | None,
    scale_b: Factor | None,
    whole: bool = False,
    precision: str = "float32",
) -> Approximate:
    """Return (scale_a * a) @ (scale_b * b) with the kernels' errors.

    whole: the result stays int32 (int8 operands).  precision: of products of FP32 operands.
    """
    x, y, factor = operands(a, b, scale_a, scale_b)
    blocks = by_block(scale_a, scale_b, y.shape[-1])
    kinds = operand_dtype(a), operand_dtype(b)
    products = Products(*kinds, by_block=blocks, precision=precision)
    value = products.of(x, y)
    if blocks:
        # Subnormal operands and a subnormal block factor scale_a * scale_b may be flushed.
        xp, stored = namespace(x), operands(a, b, None, None)[:2]
        sizes = [xp.nan_to_num(xp.abs(z), posinf=0.0) for z in stored]
        scale = max(1.0, _largest(scale_a)) * max(1.0, _largest(scale_b))
        floor = value.floor * scale + FLOOR * product(*sizes)
        # Operands that are subnormal only without their scales.
        scaled = [xp.nan_to_num(xp.abs(z), posinf=0.0) for z in (x, y)]
        grown = [(z < FLOOR) & (of >= FLOOR) for z, of in zip(sizes, scaled, strict=True)]
        value = value._replace(floor=floor + products_of(*scaled, *grown))
        return of_repeated(value, a, b)
    if products.exact and not whole:
        value = value.rounded()
    scales = [
        z.global_scale if isinstance(z, NvFp4) else scale
        for z, scale in ((a, scale_a), (b, scale_b))
    ]
    numbers = [float(x) for x in scales if x is not None and not _is_array(x)]
    value = value.scaled(factor).times_number(math.prod(numbers))
    return of_repeated(value.rounded(sum(map(_is_array, scales))), a, b)


def of_repeated(value: Approximate, *operands: Any) -> Approximate:
    """Mark errors as shared along axes where broadcast or single operands repeat products."""
    arrays = [x.data if isinstance(x, NvFp4) else x for x in operands]
    a, b = (
        [n == 1 or step == 0 for n, step in zip(x.shape, x.strides, strict=True)] for x in arrays
    )
    batch = itertools.zip_longest(reversed(a[:-2]), reversed(b[:-2]), fillvalue=True)
    equal = (b[-1], a[-2], *(of_a and of_b for of_a, of_b in batch))  # starting at the last axis
    sizes = reversed(value.exact.shape)
    axes = tuple(
        -1 - i for i, (same, n) in enumerate(zip(equal, sizes, strict=True)) if same and n > 1
    )
    return value._replace(shared=value.square, axes=axes) if axes else value


def _is_array(scale: Factor | None) -> bool:
    return hasattr(scale, "dtype") and not isinstance(scale, np.generic)


def _largest(scale: Any) -> float:
    """Return the largest finite |scale| of a number or an array."""
    if scale is None or not getattr(scale, "size", 1):
        return 0.0
    if not _is_array(scale):
        return abs(float(scale))
    xp = namespace(scale)
    return float(xp.max(xp.where(xp.isfinite(scale), xp.abs(scale), 0)))


def by_block(scale_a: Factor | None, scale_b: Factor | None, n: int) -> bool:
    """Return whether there are block scales, for blocks of PROMOTED_K along K."""

    def shape(scale: Any) -> tuple[int, ...]:
        return scale.shape[-2:] if getattr(scale, "ndim", 0) >= 2 else (1, 1)

    (_, a_k), (b_k, b_n) = shape(scale_a), shape(scale_b)
    return a_k != 1 or b_k != 1 or b_n not in (1, n)


def operand_namespace(x: Array) -> Any:
    return namespace(x.data if isinstance(x, NvFp4) else x)


def operand_dtype(x: Array) -> np.dtype:
    return dtypes.float4_e2m1fn if isinstance(x, NvFp4) else x.dtype


def operands(
    a: Array, b: Array, scale_a: Factor | None, scale_b: Factor | None
) -> tuple[Any, Any, Any]:
    """Return (a, b, a factor of their product) in FP64; a and b include block scales."""
    xp = operand_namespace(a)
    a = a.dequantize() if isinstance(a, NvFp4) else as_float64(a)
    b = b.dequantize().swapaxes(-1, -2) if isinstance(b, NvFp4) else as_float64(b)
    k, n = a.shape[-1], b.shape[-1]
    of_a, of_b = (1.0 if x is None else xp.asarray(x, np.float64) for x in (scale_a, scale_b))
    if not by_block(scale_a, scale_b, n):
        return a, b, of_a * of_b

    def expand(scale: Any, axis: int, size: int) -> Any:
        """Return block scales repeated to `size`; others unchanged."""
        if getattr(scale, "ndim", 0) < 2 or scale.shape[axis] in (1, size):
            return scale
        whole = [slice(None)] * scale.ndim
        whole[axis] = slice(size)
        return xp.repeat(scale, PROMOTED_K, axis)[tuple(whole)]

    return a * expand(of_a, -1, k), b * expand(expand(of_b, -2, k), -1, n), 1.0
