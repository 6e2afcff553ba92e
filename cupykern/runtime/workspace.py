"""Workspace of launches: partial results, and counters that are zero before and after a launch.

Launches of one stream run in order and share the stream's workspace.  A graph can run at any time,
so its launches have their own workspace as long as the process lives.  Its counters are zeroed
before the capture if an uncaptured call came first.  Otherwise a memset in the graph zeroes them at
every replay, and the kernels around the memset cannot overlap.
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
# All memory that is kept.  Tests replace each of these.
of_streams: dict[_Key, tuple[Array | None, Array]] = {}  # partial results, counters
of_grids: dict[_Key, Array] = {}  # by stream, for launches with a grid barrier
of_graphs: list[tuple[Array, ...]] = []
_SPARE, _LINE = 2**16, 32  # counters; counters per L2 line
of_devices: dict[int, tuple[Array, int]] = {}  # by device: zeros for graphs, number taken
_taking = threading.Lock()


def take(target: Target, num_bytes: int, num_counters: int) -> tuple[Array | None, Array | None]:
    """(num_bytes of uninitialised uint8, num_counters uint32 zeros) for one launch; (None, None)
    if both numbers are 0.

    The launch must leave the counters zero, and run on the current stream of `target`'s device,
    which must be current.
    """
    if num_bytes == num_counters == 0:
        return None, None
    if target.name == "host":
        # Results of an earlier call could hide a fault.
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
    """Release the workspace of all streams and devices; graphs keep theirs."""
    for kept in (of_streams, of_grids, of_devices):
        kept.clear()


def take_counters(target: Target, num_counters: int) -> Array:
    """The counters of `take`, without partial results."""
    if target.name != "host":
        key = _stream(target)
        kept = None if key is None else of_streams.get(key)
        if kept is not None and num_counters <= kept[1].size:
            return kept[1]
    return cast(Array, take(target, 0, num_counters)[1])


MOST_BLOCKS = 4096  # of a launch with a grid barrier; platform/grid.cuh: GridBarrier
GRID_WORDS = 4 + MOST_BLOCKS // 32  # 32-bit words of a GridBarrier


def take_for_grid(target: Target, num_bytes: int) -> Array:
    """uint32 memory for one launch: a GridBarrier, then num_bytes of uninitialised memory.

    The launch must run on the current stream of `target`'s device, which must be current.
    """
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
    """The key of the current stream's workspace; None while the stream is captured."""
    cuda = target.xp.cuda
    stream = cuda.get_current_stream().ptr
    if stream == 0:
        return target.device_id
    if stream not in _NEVER_CAPTURED and cuda.runtime.streamIsCapturing(stream):
        return None
    thread = threading.get_ident() if stream == _PER_THREAD_STREAM else None
    return target.device_id, stream, thread


def _make_spare(target: Target) -> None:
    """Allocate zeros for graphs, once per device, while the current stream is not captured.

    Graphs run on any stream, so the zeros must be complete on return.  Their own stream avoids
    waiting for anything else.
    """
    if target.device_id not in of_devices:
        with target.xp.cuda.Stream(non_blocking=True) as stream:
            made = target.xp.zeros(_SPARE, np.uint32)
            stream.synchronize()
        with _taking:
            of_devices.setdefault(target.device_id, (made, 0))


def _spare_counters(target: Target, count: int) -> Array:
    """Zeroed counters that no other launch uses."""
    with _taking:
        spare, begin = of_devices.get(target.device_id, (None, 0))
        if spare is not None and begin + count <= spare.size:
            of_devices[target.device_id] = spare, begin + -(-count // _LINE) * _LINE
            return spare[begin : begin + count]
    return target.xp.zeros(count, np.uint32)
