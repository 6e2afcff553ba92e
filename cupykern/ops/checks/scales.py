"""Operands of scaled products and their scales: read from arguments and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import arguments, dtypes
from ...gemm import product
from ...gemm.product import BLOCK
from ...nvfp4 import NvFp4
from ...targets import address_of, of_array
from ...typing import Array
from .products import INPUTS, OF_DOUBLE, check_depth

QUANTIZED = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.int8, product.FP4)


def arrays_and_numbers(**operands: tuple[Any, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Split operands and their scales for plans.find, which takes arrays and other values apart.

    operands: name -> (operand, scale).  Returns the arrays by the names of product.ARRAYS, and the
    other values in a fixed order, with None in place of arrays.
    """
    arrays: dict[str, Any] = {}
    numbers: list[Any] = []
    for name, (x, scale) in operands.items():
        groups = None
        if isinstance(x, NvFp4):
            numbers += [scale, x.layout]  # scale must be None; an array prevents a key
            x, groups, scale = x.data, x.scale, x.global_scale
        arrays[name] = x
        if groups is not None:
            arrays[f"groups_{name}"] = groups
        is_number = scale is None or isinstance(scale, (int, float))
        arrays[f"scale_{name}"] = None if is_number else scale
        numbers.append(scale if is_number else None)
    return arrays, tuple(numbers)


def same_memory(*operands: tuple[Array | NvFp4, ReadOperand]) -> bool:
    """Whether the NvFp4 operands were read in place, not copied."""
    return all(
        address_of(x.data) == address_of(read.array)
        and address_of(x.scale) == address_of(read.groups)
        for x, read in operands
        if isinstance(x, NvFp4) and read.groups is not None
    )


class ReadOperand(NamedTuple):
    """An operand of a scaled product, read from its argument.

    array: (..., M, K) or (..., K, N); for NvFp4 its bytes, K / 2 per row.
    shape: the operand's shape in elements, K also for NvFp4.
    number, scale: the factor as a number or an array; the unused one is 1 or None.
    groups: the scales of NvFp4, (..., rows, K / 16) or, blocked, (..., 1, number of scales).
    """

    name: str
    array: Array
    dtype: np.dtype
    shape: tuple[int, ...]
    number: float
    scale: Array | None
    groups: Array | None = None
    blocked: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def arrays(self, name: str) -> dict[str, Any]:
        """The arrays by the names of product.ARRAYS, for the operand `name`."""
        scale = self.scale
        if scale is not None and scale.size == 1:
            scale = scale.reshape(1, 1)
        suffix = name if len(name) == 1 else f"b{name[1:]}"
        return {name: self.array, f"scale_{suffix}": scale, f"groups_{suffix}": self.groups}


def read_operand(name: str, x: Array | NvFp4, scale: Any, a: Array | NvFp4) -> ReadOperand:
    """Read an operand.  a: the product's first operand; all must be on its device.

    Raises TypeError and ValueError.
    """
    first = a.data if isinstance(a, NvFp4) else a
    if not isinstance(x, NvFp4):
        arguments.same_place(name, x, first, "a")
        dtypes.resolve(x.dtype, f"{name}'s dtype", INPUTS, OF_DOUBLE)
        return ReadOperand(name, x, x.dtype, x.shape, *_scale(f"scale_{name}", scale, first))
    arguments.same_place(name, x.data, first, "a")
    if scale is not None:
        raise ValueError(f"scale_{name} must be None: {name} is NvFp4, which has its scales")
    check_depth(x.shape[-1])  # before a copy
    xp = of_array(first).xp
    data, groups = x.data, x.scale
    if not _has_aligned_rows(data, 8):
        data = xp.array(data, order="C")
    if not _has_aligned_rows(groups, 1):
        groups = xp.array(groups.view(np.uint8), order="C").view(groups.dtype)
    blocked = x.layout == "blocked"
    if blocked:
        groups = groups.reshape(*groups.shape[:-1], 1, groups.shape[-1])
    shape = x.shape
    if name != "a":
        data, shape = data.swapaxes(-1, -2), (*shape[:-2], shape[-1], shape[-2])
    factor = _scale(f"{name}'s global_scale", x.global_scale, first)
    return ReadOperand(name, data, product.FP4, shape, *factor, groups, blocked)


def _has_aligned_rows(x: Array, alignment: int) -> bool:
    """Whether rows are contiguous and begin at multiples of `alignment` bytes."""
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        return False
    steps = (s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1)
    return not any(s % alignment for s in (address_of(x), *steps))


def check_quantized(b: np.dtype) -> None:
    """Raise TypeError unless b's dtype is one of `scaled_mm`'s."""
    if b not in QUANTIZED:
        raise TypeError(
            f"b must be float8_e4m3fn, float8_e5m2, int8 or NvFp4; got {b} (matmul takes others)"
        )


def check_pair(a: np.dtype, b: np.dtype) -> None:
    """Raise TypeError unless `scaled_mm` multiplies these dtypes."""
    check_quantized(b)
    try:
        product.compute_dtype(a, b)
    except TypeError:
        raise TypeError(
            "a and b must both be FP8, int8 or NvFp4, or a float16 or bfloat16 and b FP8, int8 or "
            f"NvFp4; got {a} and {b}"
        ) from None


def product_of_scales(a: ReadOperand, b: ReadOperand) -> float:
    """The product of the scales that are numbers.  Raises ValueError if FP32 cannot hold it."""
    return arguments.checked_float(f"scale_{a.name} * scale_{b.name}", a.number * b.number)


def check_scales(operands: tuple[ReadOperand, ...], batch: tuple[int, ...], m: int, n: int) -> bool:
    """Whether the scale arrays are block scales.  operands: a and its right-hand operands.

    Raises ValueError for shapes that do not fit.
    """
    a, *others = operands
    k = a.shape[-1]
    blocks = any(by_block(a.scale, b.scale, m, n, k) for b in others)
    if blocks and any(x.groups is not None for x in operands):
        raise ValueError("NvFp4 operands go with scales by tensor, row or column")
    of_a, of_b = scale_shapes(m, n, k, blocks)
    for x, wanted in ((a, of_a), *((b, of_b) for b in others)):
        _check_scale_shape(f"scale_{x.name}", x.scale, batch, wanted)
    return blocks


def blocked_groups(operands: dict[str, ReadOperand]) -> tuple[str, ...]:
    return tuple(name for name, x in operands.items() if x.blocked)


def _scale(name: str, scale: Any, a: Array) -> tuple[float, Array | None]:
    """(number, array) of a scale; the unused one is 1 or None.

    Raises TypeError and ValueError.
    """
    if scale is None:
        return 1.0, None
    if arguments.is_number(scale, a):
        return arguments.finite_float(name, scale, 1.0), None
    arguments.same_place(name, scale, a, "a")
    if scale.dtype != dtypes.float32:
        raise TypeError(
            f"{name} must be a number or a float32 array; got an array of {scale.dtype}"
        )
    return 1.0, scale


def by_block(scale_a: Array | None, scale_b: Array | None, m: int, n: int, k: int) -> bool:
    """Whether scale arrays have the shapes of block scales.

    If one block covers all of K, (M, 1) is read as a scale per row; the product is the same.
    """
    blocks_k, blocks_n = -(-k // BLOCK), -(-n // BLOCK)
    if scale_a is not None and scale_a.ndim >= 2 and scale_a.shape[-2:] == (m, blocks_k) != (m, 1):
        return True
    if scale_b is None or scale_b.ndim < 2 or scale_b.size == 1:
        return False
    return scale_b.shape[-2:] == (blocks_k, blocks_n) != (1, n)


def scale_shapes(m: int, n: int, k: int, blocks: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of a's and b's scales without batch dims: by row and column, or by block."""
    if not blocks:
        return (m, 1), (1, n)
    return (m, -(-k // BLOCK)), (-(-k // BLOCK), -(-n // BLOCK))


def _check_scale_shape(
    name: str, scale: Array | None, batch: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    if scale is None or scale.size == 1:
        return
    fits = scale.ndim >= 2 and scale.shape[-2:] == wanted
    try:
        if fits and np.broadcast_shapes(scale.shape[:-2], batch) == batch:
            return
    except ValueError:
        pass
    raise ValueError(
        f"{name} must have one element or shape (..., {wanted[0]}, {wanted[1]}); got {scale.shape}"
    )
