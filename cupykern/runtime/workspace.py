"""Memory that launches leave as they found it: partial results, and counters that are zero.

Launches of one stream follow each other, so they share what that stream has.  What a graph launches
may run at any time: it has memory of its own for as long as the process lives.  Its counters are
zero before the capture, if a call outside of one came before: a graph would else set them to zero
again in every launch, and the kernels around that could not overlap.
"""

from __future__ import annotations

import threading
from typing import cast

import numpy as np

from ..targets import Target
from ..typing import Array

MOST_KEPT = 2**23  # bytes of partial results that a stream keeps
_NEVER_CAPTURED = (0, 1)  # the default stream
_PER_THREAD_STREAM = 2  # CUDA's and HIP's handle: every thread's own stream
_Key = int | tuple[int, int, int | None]  # of a stream
# All memory that is kept.  Tests put their own in the place of each.
of_streams: dict[_Key, tuple[Array | None, Array]] = {}  # partial results, counters
of_grids: dict[_Key, Array] = {}  # of streams too, for launches with a grid barrier
of_graphs: list[tuple[Array, ...]] = []
_SPARE, _LINE = 2**16, 32  # counters; those of a line of L2
of_devices: dict[int, tuple[Array, int]] = {}  # zeros for graphs, how many are taken
_taking = threading.Lock()


def take(target: Target, num_bytes: int, num_counters: int) -> tuple[Array | None, Array | None]:
    """(num_bytes of anything, num_counters uint32 zeros that the launch sets back to zero) for one
    launch on the current stream of the current device, `target`'s; None for nothing."""
    if num_bytes == num_counters == 0:
        return None, None
    if target.name == "host":
        # What an earlier call left there would hide a fault.
        return np.full(num_bytes, 0xFF, np.uint8), np.zeros(num_counters, np.uint32)
    key = _stream(target)
    if key is None:
        made = target.xp.empty(num_bytes, np.uint8), _spare_counters(target, num_counters)
        of_graphs.append(made)
        return made
    partials: Array | None
    counters: Array | None
    partials, counters = of_streams.get(key, (None, None))
    if counters is None or counters.size < num_counters:
        counters = target.xp.zeros(max(num_counters, 4096), np.uint32)
        of_streams[key] = partials, counters
        _make_spare(target)
    if num_bytes > MOST_KEPT:
        return target.xp.empty(num_bytes, np.uint8), counters
    if partials is None or partials.size < num_bytes:
        partials = target.xp.empty(num_bytes, np.uint8)
        of_streams[key] = partials, counters
    return partials, counters


def forget() -> None:
    """Let go of what streams and devices keep; graphs keep theirs."""
    for kept in (of_streams, of_grids, of_devices):
        kept.clear()


def take_counters(target: Target, num_counters: int) -> Array:
    """`take`'s, without bytes."""
    if target.name != "host":
        key = _stream(target)
        kept = None if key is None else of_streams.get(key)
        if kept is not None and num_counters <= kept[1].size:
            return kept[1]
    return cast(Array, take(target, 0, num_counters)[1])


MOST_BLOCKS = 4096  # of a launch with a grid barrier; platform/grid.cuh: GridBarrier
GRID_WORDS = 4 + MOST_BLOCKS // 32  # of take_for_grid, before what is of anything


def take_for_grid(target: Target, num_bytes: int) -> Array:
    """uint32: a GridBarrier and num_bytes of anything, for one launch on the current stream of the
    current device, `target`'s."""
    if target.name == "host":
        return _make_for_grid(target, num_bytes)
    key = _stream(target)
    if key is None:
        made = _make_for_grid(target, num_bytes)
        of_graphs.append((made,))
        return made
    kept = of_grids.get(key)
    if kept is None or kept.nbytes < 4 * GRID_WORDS + num_bytes:
        kept = of_grids[key] = _make_for_grid(target, num_bytes)
    return kept


def _make_for_grid(target: Target, num_bytes: int) -> Array:
    made = target.xp.zeros(GRID_WORDS + -(-num_bytes // 4), np.uint32)
    if target.name == "host":
        made[GRID_WORDS:] = 0xFFFFFFFF
    return made


def _stream(target: Target) -> _Key | None:
    """The current stream, as what is kept for it is found; None while it is captured."""
    cuda = target.xp.cuda
    stream = cuda.get_current_stream().ptr
    if stream == 0:
        return target.device_id
    if stream not in _NEVER_CAPTURED and cuda.runtime.streamIsCapturing(stream):
        return None
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else None
    return target.device_id, stream, thread


def _make_spare(target: Target) -> None:
    """While the current stream is not captured, once for each device.

    Graphs run on any stream, so the zeros must be there; they have a stream of their own, so that
    nothing is waited for but them.
    """
    if target.device_id not in of_devices:
        with target.xp.cuda.Stream(non_blocking=True) as stream:
            made = target.xp.zeros(_SPARE, np.uint32)
            stream.synchronize()
        with _taking:
            of_devices.setdefault(target.device_id, (made, 0))


def _spare_counters(target: Target, count: int) -> Array:
    """Zeros that no other launch has."""
    with _taking:
        spare, begin = of_devices.get(target.device_id, (None, 0))
        if spare is not None and begin + count <= spare.size:
            of_devices[target.device_id] = spare, begin + -(-count // _LINE) * _LINE
            return spare[begin : begin + count]
    return target.xp.zeros(count, np.uint32)
