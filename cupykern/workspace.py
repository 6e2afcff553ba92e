"""Memory that a launch leaves as it found it: partial results, and counters that are zero in between.

Launches of one stream follow each other, so they share what that stream has.  What a graph launches may
run at any time: it has memory of its own for as long as the process lives.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .targets import Target

_MOST_KEPT = 2**23  # bytes of partial results that a stream keeps
_NEVER_CAPTURED = (0, 1)  # the default stream
_PER_THREAD_STREAM = 2  # CUDA's and HIP's handle: every thread's own stream
_kept: dict[Any, tuple[Any, Any]] = {}
_of_graphs: list[tuple[Any, Any]] = []


def take(target: Target, num_bytes: int, num_counters: int) -> tuple[Any, Any]:
    """(num_bytes of anything, num_counters uint32 zeros that the launch sets back to zero) for one
    launch on the current stream of the current device, `target`'s; None for nothing."""
    if num_bytes == num_counters == 0:
        return None, None
    if target.name == "host":
        # What an earlier call left there would hide a fault.
        return np.full(num_bytes, 0xFF, np.uint8), np.zeros(num_counters, np.uint32)
    cuda = target.xp.cuda
    stream = cuda.get_current_stream().ptr
    if stream not in _NEVER_CAPTURED and cuda.runtime.streamIsCapturing(stream):
        made = _make(target, num_bytes, num_counters)
        _of_graphs.append(made)
        return made
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else None
    key = (target.device_id, stream, thread)
    partials, counters = _kept.get(key, (None, None))
    if counters is None or counters.size < num_counters:
        counters = target.xp.zeros(max(num_counters, 4096), np.uint32)
        _kept[key] = partials, counters
    if num_bytes > _MOST_KEPT:
        return target.xp.empty(num_bytes, np.uint8), counters
    if partials is None or partials.size < num_bytes:
        partials = target.xp.empty(num_bytes, np.uint8)
        _kept[key] = partials, counters
    return partials, counters


def _make(target: Target, num_bytes: int, num_counters: int) -> tuple[Any, Any]:
    return target.xp.empty(num_bytes, np.uint8), target.xp.zeros(num_counters, np.uint32)
