"""scaled_mm: products of quantized matrices, scaled by tensor, by row and column, or by block."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arguments, dtypes, plans
from ..arrays import address_of
from ..targets import of_array
from . import matmul, product
from .gemm import BLOCK, AnyConfig
from .nvfp4 import NvFp4

QUANTIZED = (dtypes.float8_e4m3fn, dtypes.float8_e5m2, dtypes.int8, product.FP4)


def scaled_mm(
    a: Any,
    b: Any,
    scale_a: Any = None,
    scale_b: Any = None,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    out: Any = None,
    config: AnyConfig | None = None,
) -> Any:
    """activation((scale_a * a) @ (scale_b * b) + bias)

    a: (..., M, K), b: (..., K, N), batches broadcast.  Both FP8 (float8_e4m3fn, float8_e5m2), both
        int8, or a float16 or bfloat16 and b FP8 or int8, which is converted inside the kernel.  Or an
        NvFp4 with an NvFp4 or with float16 or bfloat16 on either side: its numbers, exact in FP16 and
        BF16, are decoded inside the kernel (on Hopper, where it has tiles enough: an NvFp4 a, and b for
        many rows, in memory before, two bytes a number), its global scale is part of the epilogue.
    scale_a, scale_b: what a stored number is multiplied with; None: 1.  A finite number; or a float32
        array of one element, (..., M, 1) of rows and (..., 1, N) of columns; or, for blocks of 128 of k
        (and 128 columns of b), (..., M, ceil(K / 128)) and (..., ceil(K / 128), ceil(N / 128)).  Blocks
        go with blocks or None.  An NvFp4 has its own, and the other operand no blocks.
    bias, activation, out_dtype, out, config: as for `matmul`.  out_dtype None: a's for float16 and
        bfloat16, bfloat16 for FP8, float32 for int8 and NvFp4, but int32 for int8 without scales, bias
        and activation.

    Sums in FP32, int8 exactly in int32 (blocks: each block); the scales and the epilogue in FP32, one
    rounding at the end.  Layouts and copies as for `matmul`; arrays of scales may have any strides.  Of an
    NvFp4, data whose rows do not begin at multiples of 8 bytes, and arrays with a step between bytes of a
    row, are copied.

    Raises TypeError (types, dtypes), ValueError (shapes, overlap, scales, config, devices).  Error
    bound: `reference.scaled_mm_bound`.
    """
    if isinstance(a, NvFp4) or isinstance(b, NvFp4):
        arrays, numbers = arrays_and_numbers(a=(a, scale_a), b=(b, scale_b))
        names, given = (*arrays, "bias"), (*arrays.values(), bias)
        key, known, _ = plans.find(
            "scaled_mm", given, (*names, *numbers, activation, out_dtype, config), out
        )
    else:
        names, given = ("a", "b", "bias", "scale_a", "scale_b"), (a, b, bias, scale_a, scale_b)
        key, known, _ = _find(*given, activation, out_dtype, config, out)
    if known is not None:
        return matmul.launch_known(known, given, out)
    if isinstance(a, NvFp4) and not isinstance(b, NvFp4):
        return _transposed(a, b, scale_a, scale_b, bias, activation, out_dtype, out, config)
    target = arguments.target_of("a", a.data if isinstance(a, NvFp4) else a)
    x = read_operand("a", a, scale_a, a)
    y = read_operand("b", b, scale_b, a)
    if y.dtype not in QUANTIZED:
        raise TypeError(
            f"b must be float8_e4m3fn, float8_e5m2, int8 or NvFp4; got {y.dtype} (matmul takes others)"
        )
    alpha = product_of_scales(x, y)
    # By what is given, not by its value: it decides about the result's dtype.
    plain = all(x is None for x in (scale_a, scale_b, bias, activation))
    out_dtype = matmul.result_dtype(x.dtype, y.dtype, out_dtype, plain)
    batch, m, n = matmul.check_shapes(x, y)
    shape = (*batch, m, n)
    bias = matmul.check_addend("bias", bias, x.array, shape)
    matmul.check_activation(activation)
    blocks = check_scales((x, y), batch, m, n)
    operands = {"bias": bias, **x.arrays("a"), **y.arrays("b")}
    return matmul.run(
        target,
        {"a": operands.pop("a"), **operands},
        shape,
        out_dtype,
        out,
        config,
        key if same_memory((a, x), (b, y)) else None,
        names,
        alpha=alpha,
        activation=activation,
        block_scales=blocks,
        k=x.shape[-1],
        blocked=blocked_groups({"groups_a": x, "groups_b": y}),
    )


_find = plans.finder("scaled_mm", arrays=3, either=2, options=3)


def arrays_and_numbers(**operands: tuple[Any, Any]) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Of operands and their scales: the arrays, by the names of product.ARRAYS, and all that is none, in
    an order of its own; None in place of what is an array."""
    arrays: dict[str, Any] = {}
    numbers: list[Any] = []
    for name, (x, scale) in operands.items():
        groups = None
        if isinstance(x, NvFp4):
            numbers += [scale, x.layout]  # an array of scales, which it must not have, is no key
            x, groups, scale = x.data, x.scale, x.global_scale
        arrays[name] = x
        if groups is not None:
            arrays[f"groups_{name}"] = groups
        is_number = scale is None or isinstance(scale, (int, float))
        arrays[f"scale_{name}"] = None if is_number else scale
        numbers.append(scale if is_number else None)
    return arrays, tuple(numbers)


def same_memory(*operands: tuple[Any, ReadOperand]) -> bool:
    """Whether what was read of operands lies where they do; otherwise it was copied."""
    return all(
        address_of(x.data) == address_of(read.array)
        and address_of(x.scale) == address_of(read.groups)
        for x, read in operands
        if isinstance(x, NvFp4)
    )


def _transposed(
    a: NvFp4,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    activation: Any,
    out_dtype: Any,
    out: Any,
    config: Any,
) -> Any:
    """a NvFp4, b float16 or bfloat16: by the kernels for a's and b's places exchanged."""
    arguments.same_place("b", b, a.data, "a")
    if b.dtype not in product.FLOAT16S:
        raise TypeError(f"b must be NvFp4, float16 or bfloat16 where a is NvFp4; got {b.dtype}")
    if b.ndim < 2:
        raise ValueError(f"b must have at least 2 dims; got shape {b.shape}")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a's columns must be b's rows; got shapes {a.shape} and {b.shape}")

    def turn(x: Any) -> Any:
        return x.swapaxes(-1, -2) if hasattr(x, "ndim") and x.ndim >= 2 else x

    if bias is not None and getattr(bias, "ndim", 0) == 1:
        bias = bias[None]
    y = scaled_mm(
        turn(b), a, turn(scale_b), scale_a, bias=turn(bias), activation=activation,
        out_dtype="float32" if out_dtype is None else out_dtype, out=turn(out), config=config,
    )  # fmt: skip
    return turn(y) if out is None else out


class ReadOperand(NamedTuple):
    """An operand of a scaled product, read from its argument.

    array: (..., M, K) or (..., K, N); of NvFp4 its bytes, K / 2 of them.  shape: with K numbers.
    number, scale: what it is multiplied with, of which one is 1 or None.  groups: NvFp4's scales,
    (..., rows, K / 16) or, blocked, (..., 1, all of them).
    """

    name: str
    array: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    number: float
    scale: Any
    groups: Any = None
    blocked: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def arrays(self, name: str) -> dict[str, Any]:
        """By the names of product.ARRAYS."""
        scale = self.scale
        if scale is not None and scale.size == 1:
            scale = scale.reshape(1, 1)
        suffix = name if len(name) == 1 else f"b{name[1:]}"
        return {name: self.array, f"scale_{suffix}": scale, f"groups_{suffix}": self.groups}


def read_operand(name: str, x: Any, scale: Any, a: Any) -> ReadOperand:
    """An operand; `a` is the product's first one, whose place all share.  Raises TypeError, ValueError."""
    first = a.data if isinstance(a, NvFp4) else a
    if not isinstance(x, NvFp4):
        arguments.same_place(name, x, first, "a")
        dtypes.resolve(x.dtype, f"{name}'s dtype", matmul.INPUTS)
        return ReadOperand(name, x, x.dtype, x.shape, *_scale(f"scale_{name}", scale, first))
    arguments.same_place(name, x.data, first, "a")
    if scale is not None:
        raise ValueError(f"scale_{name} must be None: {name} is NvFp4, which has its scales")
    matmul.check_depth(x.shape[-1])  # before a copy
    xp = of_array(first).xp
    data, groups = x.data, x.scale
    if not _walks(data, 8):
        data = xp.array(data, order="C")
    if not _walks(groups, 1):
        groups = xp.array(groups.view(np.uint8), order="C").view(groups.dtype)
    blocked = x.layout == "blocked"
    if blocked:
        groups = groups.reshape(*groups.shape[:-1], 1, groups.shape[-1])
    shape = x.shape
    if name != "a":
        data, shape = data.swapaxes(-1, -2), (*shape[:-2], shape[-1], shape[-2])
    factor = _scale(f"{name}'s global_scale", x.global_scale, first)
    return ReadOperand(name, data, product.FP4, shape, *factor, groups, blocked)


def _walks(x: Any, alignment: int) -> bool:
    """Whether rows are contiguous and begin at multiples of `alignment` bytes."""
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        return False
    steps = (s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1)
    return not any(s % alignment for s in (address_of(x), *steps))


def product_of_scales(a: ReadOperand, b: ReadOperand) -> float:
    """Of those that are numbers.  Raises ValueError if FP32 cannot hold it."""
    return arguments.checked_float(f"scale_{a.name} * scale_{b.name}", a.number * b.number)


def check_scales(operands: tuple[ReadOperand, ...], batch: tuple[int, ...], m: int, n: int) -> bool:
    """Whether arrays of scales are of blocks; operands: a and all that it is multiplied with.

    Raises ValueError for shapes that do not fit."""
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


def _scale(name: str, scale: Any, a: Any) -> tuple[float, Any]:
    """`scale` as a number and an array, of which the other is 1 or None.  Raises TypeError, ValueError."""
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


def by_block(scale_a: Any, scale_b: Any, m: int, n: int, k: int) -> bool:
    """Whether arrays of scales are for blocks, by their shapes.

    Where one block is all of k, (M, 1) means the same either way.
    """
    blocks_k, blocks_n = -(-k // BLOCK), -(-n // BLOCK)
    if scale_a is not None and scale_a.ndim >= 2 and scale_a.shape[-2:] == (m, blocks_k) != (m, 1):
        return True
    if scale_b is None or scale_b.ndim < 2 or scale_b.size == 1:
        return False
    return scale_b.shape[-2:] == (blocks_k, blocks_n) != (1, n)


def scale_shapes(m: int, n: int, k: int, blocks: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of one matrix's scales, of rows and columns or of blocks."""
    if not blocks:
        return (m, 1), (1, n)
    return (m, -(-k // BLOCK)), (-(-k // BLOCK), -(-n // BLOCK))


def _check_scale_shape(
    name: str, scale: Any, batch: tuple[int, ...], wanted: tuple[int, int]
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
