"""Variant -> loaded kernel: compiled at first use, then one dictionary look-up."""

from __future__ import annotations

import os
import threading

from kernels_cu import Variant

from .targets import Kernel, Target

_kernels: dict[tuple[Target, Variant], Kernel] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # a thread that compiles stays behind


def get_kernel(target: Target, variant: Variant) -> Kernel:
    """The kernel of `variant` on `target`.  Raises targets.CompileError."""
    key = (target, variant)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:  # threads that ask at once compile once
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = target.compile(variant)
    return kernel


def clear() -> None:
    """Forget the kernels in memory; the disk caches are the targets'."""
    with _lock:
        _kernels.clear()
