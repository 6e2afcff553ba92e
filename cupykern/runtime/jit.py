"""Variant -> loaded kernel: compiled at first use, then one dictionary look-up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

from ..kernels import Variant
from ..targets import Kernel, Target, Usage
from . import plans

_kernels: dict[tuple[Target, Variant], Kernel] = {}
_lock = threading.Lock()
# After fork, the thread that holds the lock while it compiles does not exist.
_reinit = _lock._at_fork_reinit  # type: ignore[attr-defined]  # CPython's own, not in typeshed
os.register_at_fork(after_in_child=_reinit)


def get_kernel(target: Target, variant: Variant) -> Kernel:
    """The kernel of `variant` on `target`.  Raises targets.CompileError."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.setdefault(variant, 0)
        return _NoKernel(recorded, variant)
    key = (target, variant)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:  # concurrent first uses compile once
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = target.compile(variant)
    noted = _noted.get()
    return kernel if noted is None else _LoggedKernel(kernel, noted)


class _NoKernel:
    usage: Usage | None = None

    def __init__(self, recorded: dict[Variant, int], variant: Variant):
        self._recorded, self._variant = recorded, variant

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        self._recorded[self._variant] += grid * self._variant.launch_sizes[0]

    def blocks_at_once(self, shared_bytes: int) -> int:
        return 1


_recorded: ContextVar[dict[Variant, int] | None] = ContextVar("cupykern_recorded", default=None)


@contextmanager
def recording() -> Iterator[dict[Variant, int]]:
    """Within the block, record the launches of this thread's calls instead of compiling and
    launching.

    The dictionary maps each variant to its number of threads over all launches.  The calls' results
    are uninitialised.  Clears all plans before and after.
    """
    variants: dict[Variant, int] = {}
    plans.clear()
    token = _recorded.set(variants)
    try:
        yield variants
    finally:
        _recorded.reset(token)
        plans.clear()  # some hold a _NoKernel


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: Kernel
    grid: int
    args: tuple[Any, ...]
    shared_bytes: int


class _LoggedKernel:
    def __init__(self, kernel: Kernel, noted: list[Launch]):
        self._kernel, self._launches = kernel, noted
        self.usage, self.blocks_at_once = kernel.usage, kernel.blocks_at_once

    def __call__(self, grid: int, args: tuple[Any, ...], shared_bytes: int = 0) -> None:
        self._launches.append(Launch(self._kernel, grid, args, shared_bytes))
        self._kernel(grid, args, shared_bytes)

    def pack(self, grid: int, args: tuple[Any, ...], shared_bytes: int) -> Callable[[], None]:
        return partial(self, grid, args, shared_bytes)


_noted: ContextVar[list[Launch] | None] = ContextVar("cupykern_noted", default=None)


@contextmanager
def logging_launches() -> Iterator[list[Launch]]:
    """Within the block, append this thread's launches, which run as usual, to the returned list.

    Clears all plans before and after.
    """
    launches: list[Launch] = []
    plans.clear()
    token = _noted.set(launches)
    try:
        yield launches
    finally:
        _noted.reset(token)
        plans.clear()  # some hold a _LoggedKernel


def clear() -> None:
    """Forget the loaded kernels; the targets' disk caches stay."""
    with _lock:
        _kernels.clear()
