"""Plans of launches, kept: what a call need not decide again, and what a warm call need not even check.

`cached` and `table` keep what follows from checked arguments.  `find` and `remember` skip the checks:
arrays of the same types, shapes and strides, at addresses alike, pass them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

MAX_PLANS = 4096
_clears: list[Callable[[], None]] = []


def cached(function: Callable[..., Any]) -> Any:
    """`function` with a cache of MAX_PLANS results that `clear` empties."""
    wrapped = lru_cache(maxsize=MAX_PLANS)(function)
    _clears.append(wrapped.cache_clear)
    return wrapped


def table() -> dict[Any, Any]:
    """A new dictionary that `clear` empties."""
    made: dict[Any, Any] = {}
    _clears.append(made.clear)
    return made


def clear() -> None:
    """Forget every plan: the next calls choose their configs anew.  Loaded kernels stay."""
    for empty in _clears:
        empty()


_ALIGNMENT = 64  # bytes, the most that a plan asks about an address
_warm = table()


def find(
    function: str, arrays: Sequence[Any], options: tuple[Any, ...], out: Any = None
) -> tuple[tuple[Any, ...] | None, Any]:
    """(key, what `remember` kept for a call like this, or None).

    arrays: the arguments that are arrays, or None where they are not given.  options: all the others.
    The key is None for calls that are not kept: those on arrays other than CuPy's (numpy's run on the
    host target, which has settings), and those with options that cannot be hashed.
    """
    if isinstance(arrays[0], np.ndarray):
        return None, None
    try:
        places = [
            None
            if x is None
            else (
                x.__class__,
                x.dtype,
                x.shape,
                x.strides,
                x.data.ptr % _ALIGNMENT,
                x.data.device_id,
            )
            for x in arrays
        ]
        if out is not None:  # whose overlaps follow from the distances
            start = out.data.ptr
            distances = [None if x is None else x.data.ptr - start for x in arrays]
            places += (out.__class__, out.dtype, out.shape, out.strides, start % _ALIGNMENT)
            places += (out.data.device_id, *distances)
        # 1, 1.0 and True are equal, but not all of them are legal everywhere.
        key = (function, options, *map(type, options), *places)
        return key, _warm.get(key)
    except (AttributeError, TypeError, ValueError):  # no CuPy arrays; ValueError: numpy's x.data
        return None, None


def recall(key: tuple[Any, ...] | None) -> Any:
    """What `remember` kept under `key`, or None."""
    return None if key is None else _warm.get(key)


def remember(key: tuple[Any, ...] | None, known: Any) -> None:
    """Keep `known` for calls whose key `find` gave; None: for none."""
    if key is not None:
        if len(_warm) >= MAX_PLANS:
            _warm.clear()
        _warm[key] = known
