"""Checks of score options that attention ops share: windows, caps, ALiBi, sinks, lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import arguments
from ...arrays import in_elements, packed, steps_of
from ...attention.attention_task import ScoreOptions
from ...targets import Target, is_cupy
from ...typing import Array, Factor

LARGEST = 2**28  # length or position: kernels add two of them and a window in 32 bits
_WIDEST = 2**29  # a window of this size reaches every key
CAUSAL = ScoreOptions(right=0)  # plain variants support it, too
_MOST = float(np.finfo(np.float32).max)
_LARGEST_CAP, _LEAST_FACTOR = 2.0**64, 2.0**-100  # leave the rest of FP32's range to scores


def check_window(window: Any, causal: bool) -> tuple[int, int]:
    """(left, right) of a window, -1: unlimited; right is 0 if causal.

    Raises TypeError and ValueError.
    """
    if window is None:
        return -1, 0 if causal else -1
    if isinstance(window, str) or not isinstance(window, Sequence):
        raise TypeError(f"window must be (left, right); got {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"window must be (left, right); got {window!r}")
    for size in window:
        if isinstance(size, (bool, np.bool_)) or not isinstance(size, (int, np.integer)):
            raise TypeError(f"window must have integers; got {type(size).__name__}")
        if size < -1:
            raise ValueError(f"window must have numbers of keys, or -1 for any; got {window!r}")
    left, right = (int(size) if size < _WIDEST else -1 for size in window)
    return left, 0 if causal else right


def check_softcap(softcap: Factor | None, scale: float) -> float:
    """The cap, 0 for None.  Raises TypeError and ValueError."""
    if softcap is None:
        return 0.0
    softcap = arguments.finite_float("softcap", softcap, 0.0)
    if softcap <= 0:
        raise ValueError(f"softcap must be positive, or None; got {softcap}")
    factor = 2 * math.log2(math.e) * abs(scale) / softcap
    if softcap > _LARGEST_CAP or factor > _MOST or 0 < factor < _LEAST_FACTOR:
        raise ValueError(
            "softcap must be at most 2^64, and 2 log2(e) scale / softcap at least 2^-100 and "
            f"finite in FP32; got {softcap} and a scale of {scale}"
        )
    return softcap


def check_head_numbers(
    name: str, x: Array | None, q: Array, shapes: tuple[tuple[int, ...], ...]
) -> tuple[Array | None, tuple[int, int] | None]:
    """Check an FP32 array of one of `shapes`, (H,) or (B, H).

    Returns (x or its contiguous copy, its batch and head strides in elements); (None, None) for
    None.  Raises TypeError and ValueError.
    """
    if x is None:
        return None, None
    arguments.same_place(name, x, q, "q")
    if x.dtype != np.float32:
        raise TypeError(f"{name} must be float32; got {x.dtype}")
    if x.shape not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}; got {x.shape}")
    if not (x.flags.c_contiguous and in_elements(x)):
        x = packed(x)
    batch, head = (0, *(step // 4 for step in steps_of(x)))[-2:]
    return x, (batch, head)


def check_options(
    q: Array, batch: int, heads: int, causal: bool, scale: float, window: Any,
    softcap: Factor | None, slopes: Array | None, sinks: Array | None,
) -> tuple[ScoreOptions, Array | None, Array | None]:  # fmt: skip
    """(options, slopes, sinks) as kernels take them.  Raises TypeError and ValueError."""
    left, right = check_window(window, causal)
    cap = check_softcap(softcap, scale)
    slopes, strides = check_head_numbers("alibi_slopes", slopes, q, ((heads,), (batch, heads)))
    sinks, _ = check_head_numbers("sinks", sinks, q, ((heads,),))
    return ScoreOptions(left, right, cap, strides, sinks is not None), slopes, sinks


def check_positions(options: ScoreOptions, *numbers: int) -> None:
    """Raises ValueError for lengths or offsets too large for a general variant."""
    if max(map(abs, numbers)) > LARGEST:
        raise ValueError(
            f"lengths and offsets must be at most {LARGEST} with {options}; got {numbers}"
        )


def check_integers(name: str, x: Array, q: Array) -> None:
    """Check that x is int32 on q's device, or a numpy array of integers of 32 or more bits.

    Raises TypeError and ValueError.
    """
    arguments.target_of(name, x)
    if is_cupy(x):
        arguments.same_place(name, x, q, "q")
        allowed = x.dtype == np.int32
    else:
        allowed = x.dtype.kind in "iu" and x.dtype.itemsize >= 4
    if not allowed:
        raise TypeError(f"{name} must have dtype int32 (in numpy also wider); got {x.dtype}")


def check_lens(
    seq_lens: Array | None, q: Array, batch: int, most: int, whose: str, name: str = "seq_lens"
) -> Any:
    """Check `seq_lens`; contents only of numpy arrays.  most: the most keys of a sequence.

    Raises TypeError and ValueError.
    """
    if seq_lens is None:
        return None
    check_integers(name, seq_lens, q)
    if seq_lens.shape != (batch,):
        raise ValueError(f"{name} must have shape {(batch,)}; got {seq_lens.shape}")
    if not is_cupy(seq_lens) and seq_lens.size:
        low, high = int(seq_lens.min()), int(seq_lens.max())
        if low < 0 or high > most:
            raise ValueError(f"{name} must be from 0 to {whose} {most} keys; got {low} to {high}")
    return seq_lens


def as_int32(target: Target, x: Any) -> Any:
    """Lengths or a block table as int32 on `target`."""
    if x is None or is_cupy(x) or (target.xp is np and x.dtype == np.int32):
        return x
    # Unused entries of a table may hold any integer.
    info = np.iinfo(np.int32)
    return target.xp.asarray(np.clip(x, info.min, info.max).astype(np.int32))
