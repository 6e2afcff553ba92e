"""Caches of plans: what a warm call looks up instead of deciding again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
