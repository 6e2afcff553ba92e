"""quantize: FP8 and int8 codes with scales for a tensor, its rows, columns or blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arguments, arrays, dtypes, plans
from .configs import RowConfig
from .quantize_columns import run_columns
from .quantize_rows import DTYPES, GRANULARITIES, run_rows, scale_shape
from .quantize_tiles import run_tiles

_MAX_TILE = 2**20  # elements: positions in a tile are 32-bit integers


_find = plans.finder("quantize", arrays=1, options=4)


def quantize(
    x: Any,
    dtype: Any,
    *,
    granularity: str = "tensor",
    block: tuple[int, int] = (1, 128),
    config: RowConfig | None = None,
) -> tuple[Any, Any]:
    """(values, scale) with x = values * scale, but for rounding, in a narrow format.

    x: float16, bfloat16 or float32 array of any shape and strides; "row" needs at least one dim,
        "column" and "block" two.
    dtype: "e4m3", "e5m2", "int8", or the dtype float8_e4m3fn, float8_e5m2 or int8.
    granularity: what shares a scale: everything ("tensor"), what differs only along the last axis
        ("row") or the last but one ("column"), or tiles of `block` = (rows, columns) of the last two.
    config: one of the FAMILY of quantize_rows, quantize_columns or quantize_tiles; None: the tuned or the
        measured one.

    values: of x's shape.  scale: float32 of shape (), (..., M, 1), (..., 1, N) or
    (..., ceil(M / rows), ceil(N / columns)): the group's largest magnitude over the format's largest
    number, 448, 57344 or 127; 1 where that is below 2^-126.  Values are rounded to nearest even and
    saturate.  A group with a NaN or an infinity has scale NaN and values NaN (int8: 0).

    x is read once (twice where a group is longer than a block's or cluster's shared memory).

    Raises TypeError (types, dtypes) and ValueError (dims, granularity, block, config).  Error bound:
    `reference.quantize_bound`.
    """
    key, known, _ = _find(x, dtype, granularity, block, config)
    if known is not None:
        target, code, shape, launch = known
        values, scale = arrays.empty_pair(target.xp, x, code, shape)
        launch((x, values, scale))
        return values, scale
    target = arguments.target_of("x", x)
    code = _check(x, dtype, granularity, block)
    with arguments.on_device(target):
        shape = scale_shape(x.shape, granularity, block)
        if x.size == 0:
            return arrays.empty_of(target.xp, x.shape, code), target.xp.ones(shape, np.float32)
        if granularity == "block":
            values, scale, launch = run_tiles(target, x, code, block, config)
        else:
            found = run_columns(target, x, code, config) if granularity == "column" else None
            values, scale, launch = found or run_rows(target, x, code, granularity, config)
        if x.flags.c_contiguous and arrays.in_elements(x):  # else there may have been a copy
            plans.remember(key, (target, code, scale.shape, launch))
        return values, scale


def _check(x: Any, dtype: Any, granularity: str, block: tuple[int, int]) -> np.dtype:
    """The format, if the arguments are legal."""
    dtypes.resolve(x.dtype, "x's dtype", DTYPES)
    if isinstance(dtype, str) and dtype in dtypes.QUANTIZED:
        code = dtypes.QUANTIZED[dtype]
    else:
        code = dtypes.resolve(dtype, "dtype", tuple(dtypes.QUANTIZED.values()))
    if granularity not in GRANULARITIES:
        names = ", ".join(GRANULARITIES)
        raise ValueError(f"granularity must be one of {names}; got {granularity!r}")
    needed = {"tensor": 0, "row": 1, "column": 2, "block": 2}[granularity]
    if x.ndim < needed:
        raise ValueError(f"granularity {granularity!r} needs {needed} dims; got shape {x.shape}")
    if granularity == "block":
        legal = (
            isinstance(block, tuple)
            and len(block) == 2
            and all(isinstance(size, (int, np.integer)) and size > 0 for size in block)
        )
        if not legal or block[0] * block[1] > _MAX_TILE:
            raise ValueError(
                f"block must be two positive integers of a product up to {_MAX_TILE}; got {block!r}"
            )
    return code
