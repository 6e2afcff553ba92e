"""NVFP4: e2m1 numbers, two per byte, with an e4m3 scale per 16 of a row and one FP32 scale.

The format of NVIDIA's Blackwell (PTX ISA, tcgen05.mma .kind::mxf4nvf4; cuBLAS, "1D block scaling").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from . import arguments, dtypes, inputs
from .arrays import take
from .interop.foreign import native, takes_foreign
from .numerics import as_float64, namespace
from .typing import AnyArray, AnyFactor, Array, Namespace

GROUP = 16  # numbers that share a scale
Layout: TypeAlias = Literal["plain", "blocked"]
LAYOUTS = ("plain", "blocked")
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The e2m1 numbers of codes 0 to 7; codes 8 to 15 are their negatives."""

BLOCK_ROWS = 128  # rows per block of scales
_BLOCK_GROUPS, _BLOCK = 4, 512


@dataclass(frozen=True, eq=False)
class NvFp4:
    """A batch of matrices of shape (..., rows, K), K a multiple of 16, as NVFP4.

    >>> data = np.full((2, 8), 0x21, np.uint8)  # codes 1 and 2: 0.5 and 1
    >>> scale = cupykern.asarray(np.ones((2, 1), np.float32), "float8_e4m3fn", target="host")
    >>> p = cupykern.NvFp4(data, scale, "plain", 2.0)
    >>> p.shape
    (2, 16)
    >>> p.dequantize()[0, :4].tolist()
    [1.0, 2.0, 1.0, 2.0]

    data: uint8 (..., rows, K / 2): two e2m1 codes in a byte, the first one in its lower four bits.
    scale: float8_e4m3fn, (..., rows, K / 16); or, with layout "blocked", flat as
        (..., ceil(rows / 128) * ceil(K / 64) * 512), the scale of (i, j) at
        (i // 128 * ceil(K / 64) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4, padding
        zero.
    global_scale: a finite number, or a float32 array of one element.

    All arrays belong to one library, any that the ops take, and are stored as given.

    A number's value is e2m1 * scale * global_scale.  As `a` of a product the rows are M.  As `b`
    they are N: the operand is the matrix (K, N).

    Raises TypeError (types, dtypes) and ValueError (shapes, layout, devices).
    """

    data: Any
    scale: Any
    layout: Layout = "plain"
    global_scale: Any = 1.0

    def __post_init__(self) -> None:
        self.map_arrays(partial(native, "NvFp4"))._check()

    def _check(self) -> None:
        arguments.target_of("data", self.data)
        arguments.same_place("scale", self.scale, self.data, "data")
        if self.data.dtype != np.uint8:
            raise TypeError(f"data must be uint8, two codes in a byte; got {self.data.dtype}")
        if self.scale.dtype != dtypes.float8_e4m3fn:
            raise TypeError(f"scale must be float8_e4m3fn; got {self.scale.dtype}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be 'plain' or 'blocked'; got {self.layout!r}")
        if self.data.ndim < 2 or self.data.shape[-1] % (GROUP // 2):
            raise ValueError(
                f"data must have shape (..., rows, K / 2), K a multiple of 16; got "
                f"{self.data.shape}"
            )
        wanted = scale_shape(self.shape, self.layout)
        if self.scale.shape != wanted:
            raise ValueError(f"scale must have shape {wanted}; got {self.scale.shape}")
        scale = self.global_scale
        if scale is None:
            raise TypeError("global_scale must be a number or float32; got None")
        if not arguments.is_number(scale, self.data):
            arguments.same_place("global_scale", scale, self.data, "data")
            if scale.dtype != dtypes.float32:
                raise TypeError(f"global_scale must be a number or float32; got {scale.dtype}")
            if scale.size != 1:
                raise ValueError(f"global_scale must have one element; got shape {scale.shape}")
        else:
            arguments.finite_float("global_scale", scale, 1.0)

    @classmethod
    def unchecked(
        cls, data: AnyArray, scale: AnyArray, layout: str, global_scale: AnyFactor
    ) -> NvFp4:
        """Construct without checks, from arrays that are known to be valid."""
        x = object.__new__(cls)
        x.__dict__.update(data=data, scale=scale, layout=layout, global_scale=global_scale)
        return x

    def arrays(self) -> tuple[Any, Any, Any]:
        """data, scale and global_scale, which may be a number."""
        return self.data, self.scale, self.global_scale

    def map_arrays(self, function: Callable[[Any], Any]) -> NvFp4:
        """An NvFp4 of function(data), function(scale) and function(global_scale)."""
        data, scale, global_scale = map(function, self.arrays())
        return NvFp4.unchecked(data, scale, self.layout, global_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., rows, K)"""
        return (*self.data.shape[:-1], 2 * self.data.shape[-1])

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @takes_foreign
    def to(self, layout: Layout) -> NvFp4:
        """The same numbers with scales in `layout`, "plain" or "blocked"; self if unchanged.

        >>> p = cupykern.quantize_nvfp4(np.ones((2, 16), np.float32))
        >>> p.to("blocked").scale.shape  # flat, blocks of 128 x 4 scales, padded
        (512,)
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be 'plain' or 'blocked'; got {layout!r}")
        if layout == self.layout:
            return self
        *_, rows, k = self.shape
        scale = (
            blocked_scales(self.scale) if layout == "blocked" else plain_scales(self.scale, rows, k)
        )
        return replace(self, scale=scale, layout=layout)

    @takes_foreign
    def rows(self, rows: np.ndarray) -> NvFp4:
        """Select rows of one matrix; the scales are in the layout "plain"."""
        plain = self.to("plain")
        scale = take(plain.scale, rows)
        return NvFp4(plain.data[rows], scale, "plain", self.global_scale)

    @takes_foreign
    def dequantize(self) -> Array:
        """The numbers in FP64.  Launches many small kernels: for checks, not for speed.

        >>> p = cupykern.quantize_nvfp4(np.full((1, 16), 3.0, np.float32))
        >>> p.dequantize()[0, 0].round(3).item()
        3.0
        """
        xp = namespace(self.data)
        scale = as_float64(self.to("plain").scale)
        factor = self.global_scale
        factor = as_float64(factor).reshape(()) if hasattr(factor, "dtype") else float(factor)
        with np.errstate(all="ignore"):
            return unpack_e2m1(self.data).astype(np.float64) * xp.repeat(scale, GROUP, -1) * factor

    @takes_foreign
    def outputs(self) -> tuple[Array, Array, Array]:
        """(numbers in FP32, scales in the layout "plain", global scale), which checks compare."""
        xp = namespace(self.data)
        scale = xp.asarray(self.global_scale, np.float32).reshape(())
        return self.dequantize().astype(np.float32), self.to("plain").scale, scale


def scale_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """The shape of the scales of numbers of `shape`, in the layout "plain" or "blocked".

    >>> nvfp4.scale_shape((130, 64), "plain"), nvfp4.scale_shape((130, 64), "blocked")
    ((130, 4), (1024,))
    """
    *batch, rows, k = shape
    return (*batch, *((_blocked_size(rows, k),) if layout == "blocked" else (rows, k // GROUP)))


def _blocked_size(rows: int, k: int) -> int:
    return -(-rows // BLOCK_ROWS) * -(-k // (GROUP * _BLOCK_GROUPS)) * _BLOCK


def nbytes(dtype: str, k: int) -> int:
    """The bytes of k numbers of the named dtype; float4_e2m1fn: with their scales."""
    numbers = dtypes.NAMES[dtype]
    return k // 2 + k // GROUP if numbers == dtypes.float4_e2m1fn else k * numbers.itemsize


def pack_e2m1(x: Array) -> Array:
    """Round numbers (..., K), K even, to e2m1 codes, two per byte: uint8 (..., K / 2).

    >>> nvfp4.pack_e2m1(np.float32([0.5, 1, 6, -6])).tolist()  # codes 1 and 2, 7 and 15
    [33, 247]

    Rounds to nearest even.  Magnitudes above 6 saturate, infinities too; NaN gives 0.  Raises
    ValueError for an odd K.
    """
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ValueError(f"x must have an even number of columns; got shape {x.shape}")
    xp = namespace(x)
    x = as_float64(x)
    size = xp.abs(x)
    codes = (xp.signbit(x) & ~xp.isnan(x)).astype(np.uint8) << 3
    for limit, tie_goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5), (0, 1) * 4, strict=False):
        codes = codes + ((size >= limit) if tie_goes_up else (size > limit)).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_e2m1(data: Array) -> Array:
    """Decode the bytes of `pack_e2m1`, (..., K / 2), to float32 (..., K).

    >>> nvfp4.unpack_e2m1(np.uint8([33, 247])).tolist()
    [0.5, 1.0, 6.0, -6.0]
    """
    xp = namespace(data)
    numbers = xp.asarray(np.array([*NUMBERS, *(-x for x in NUMBERS)], np.float32))
    pairs = xp.stack([data & 0xF, data >> 4], axis=-1)
    return numbers[pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])]


def blocked_scales(scale: Array) -> Array:
    """Convert scales (..., rows, K / 16) to NvFp4's layout "blocked": flat, padded with zeros.

    >>> scale = cupykern.asarray(np.ones((130, 4), np.float32), "float8_e4m3fn", target="host")
    >>> nvfp4.blocked_scales(scale).shape  # two blocks of 128 x 4
    (1024,)
    """
    xp = namespace(scale)
    *batch, rows, groups = scale.shape
    tall, wide = -(-rows // BLOCK_ROWS), -(-groups // _BLOCK_GROUPS)
    padded = xp.zeros((*batch, tall * BLOCK_ROWS, wide * _BLOCK_GROUPS), np.uint8)
    padded[..., :rows, :groups] = scale.view(np.uint8)
    blocks = padded.reshape(*batch, tall, 4, 32, wide, 4)
    return _swap(xp, blocks, len(batch)).reshape(*batch, tall * wide * _BLOCK).view(scale.dtype)


def plain_scales(flat: Array, rows: int, k: int) -> Array:
    """Convert the result of `blocked_scales` back to scales (..., rows, K / 16).

    >>> scale = cupykern.asarray(np.ones((130, 4), np.float32), "float8_e4m3fn", target="host")
    >>> nvfp4.plain_scales(nvfp4.blocked_scales(scale), 130, 64).shape
    (130, 4)

    Raises ValueError if the size of `flat` does not fit rows and k.
    """
    xp = namespace(flat)
    *batch, size = flat.shape
    if size != _blocked_size(rows, k):
        raise ValueError(f"{rows} x {k} numbers have {_blocked_size(rows, k)} scales; got {size}")
    tall, wide = -(-rows // BLOCK_ROWS), -(-k // (GROUP * _BLOCK_GROUPS))
    blocks = xp.ascontiguousarray(flat.view(np.uint8)).reshape(*batch, tall, wide, 32, 4, 4)
    order = (*range(len(batch)), *(len(batch) + i for i in (0, 3, 2, 1, 4)))
    padded = blocks.transpose(order).reshape(*batch, tall * BLOCK_ROWS, wide * _BLOCK_GROUPS)
    return xp.ascontiguousarray(padded[..., :rows, : k // GROUP]).view(flat.dtype)


def _swap(xp: Namespace, blocks: Array, dims: int) -> Array:
    """Move the axes of scales into the order of blocks.

    From (block of rows, quarter, row, block of groups, group) to (block of rows, block of groups,
    row, quarter, group).
    """
    order = (*range(dims), *(dims + i for i in (0, 3, 2, 1, 4)))
    return xp.ascontiguousarray(blocks.transpose(order))


def random(kind: str, shape: tuple[int, ...], seed: int, xp: Namespace, layout: str) -> NvFp4:
    """A seeded NvFp4 of shape (..., rows, K) in the namespace `xp`.

    kind "codes": codes of 0, +-0.5, +-1 and +-1.5, scales uniform in [0, 1).  Others: any code,
    with scales that give products a variance of about 1.  layout: the bytes' memory layout
    (inputs.LAYOUTS).  The seed selects the scales' layout, and a number or array as global_scale.
    """
    rng = np.random.default_rng(seed)
    *outer, k = shape
    codes = inputs.drawn((*outer, k // 2), lambda count: rng.integers(0, 256, count, np.uint8))
    low, high, unit = 0.5, 1.5, float(2.0 ** -round(math.log2(3 * max(k, 1) ** 0.25)))
    if kind == "codes":
        codes &= 0xBB  # codes 0 to 3 of either sign
        low, high, unit = 0.0, 1.0, 1.0
    scale = inputs.drawn(
        (*outer, k // 16),
        lambda count: rng.uniform(low, high, count).astype(dtypes.float8_e4m3fn),
    )
    data = inputs.with_layout(codes, "C" if layout in ("F", "broadcast") else layout, xp)
    scale = inputs.with_layout(scale.view(np.uint8), "C", xp).view(scale.dtype)
    x = NvFp4(data, scale, global_scale=xp.asarray(unit, np.float32) if seed % 2 else unit)
    return x.to("blocked") if seed % 3 else x
