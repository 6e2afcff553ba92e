"""NCCL that is not there: threads as ranks, arrays of numpy, and every call noted.

What is sent arrives when its group ends, if the other rank receives as much in its own group of the
same number: other messages, or none, raise an error.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from cupykern import parallel

UINT8 = 1


class Call(NamedTuple):
    """kind: send or recv; stream: its ptr."""

    kind: str
    count: int
    dtype: int
    peer: int
    stream: int


class FakeStream:
    """notes: what it was told, in order."""

    def __init__(self, ptr: int, notes: list[Any]):
        self.ptr, self._notes, self.capturing = ptr, notes, False

    def record(self, event: FakeEvent) -> FakeEvent:
        event.stream = self.ptr
        self._notes.append(("record", self.ptr, event))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._notes.append(("wait", self.ptr, event))

    def is_capturing(self) -> bool:
        return self.capturing


class FakeEvent:
    """stream: where it was recorded.  done: False of one that never is."""

    never = False

    def __init__(self, disable_timing: bool):
        assert disable_timing
        self.stream, self.done = -1, not FakeEvent.never


class FakeNccl:
    """cupy.cuda.nccl of all threads."""

    NCCL_UINT8, NcclError = UINT8, type("NcclError", (RuntimeError,), {})

    def __init__(self) -> None:
        self.kind_of_id: type = bytes
        self._here = threading.local()
        self._boxes: dict[Any, queue.Queue[bytes]] = {}
        self._lock = threading.Lock()
        self._ids = 0

    def get_unique_id(self) -> Any:
        with self._lock:
            self._ids += 1
            return self.kind_of_id((self._ids, *[0] * 127))

    def box(self, key: Any) -> queue.Queue[bytes]:
        with self._lock:
            return self._boxes.setdefault(key, queue.Queue())

    def groupStart(self) -> None:  # noqa: N802 - NCCL's
        assert getattr(self._here, "group", None) is None, "a group in a group"
        self._here.group = []

    def groupEnd(self) -> None:  # noqa: N802
        group, self._here.group = self._here.group, None
        for _, run in sorted(group, key=lambda one: one[0] == "recv"):
            run()

    def add(self, kind: str, run: Callable[[], None]) -> None:
        self._here.group.append((kind, run))

    def NcclCommunicator(  # noqa: N802
        self, size: int, unique: Any, rank: int
    ) -> FakeCommunicator:
        assert type(unique) is self.kind_of_id
        return FakeCommunicator(self, size, unique, rank)


class FakeCommunicator:
    """Of one rank, with the methods of CuPy's."""

    def __init__(self, nccl: FakeNccl, size: int, unique: Any, rank: int):
        self._nccl, self._size, self._unique, self._rank = nccl, size, unique, rank
        self.calls: list[Call] = []
        self.aborted = False

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def check_async_error(self) -> None:
        assert not self.aborted

    def abort(self) -> None:
        self.aborted = True

    def send(self, place: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self.calls.append(Call("send", count, dtype, peer, stream))
        box = self._nccl.box((self._unique, self._rank, peer))
        self._nccl.add("send", lambda: box.put(ctypes.string_at(place, count)))

    def recv(self, place: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self.calls.append(Call("recv", count, dtype, peer, stream))
        box = self._nccl.box((self._unique, peer, self._rank))

        def run() -> None:
            data = box.get(timeout=20)
            assert len(data) == count, f"{len(data)} bytes for {count}"
            ctypes.memmove(place, data, count)

        self._nccl.add("recv", run)


@contextmanager
def fake_cupy(monkeypatch: Any) -> Iterator[FakeCupy]:
    """Within the block `cupy` is a FakeCupy, and NCCL's communicators take numpy arrays."""
    fake = FakeCupy()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "cupy", fake)
        patched.setattr(parallel.NcclCommunicator, "check_array", lambda self, name, x: None)
        yield fake


class FakeCupy:
    """The module cupy of one process: a current stream for each thread, and numpy's arrays."""

    ndarray = type("ndarray", (), {})  # what numpy's are not

    def __init__(self) -> None:
        self.nccl, self.here, self._next = FakeNccl(), threading.local(), 1
        self.cuda = SimpleNamespace(
            nccl=self.nccl,
            Stream=self._stream,
            Event=FakeEvent,
            get_current_stream=self.current,
        )
        self.asarray, self.empty = np.array, np.empty

    @property
    def notes(self) -> list[Any]:
        """Of this thread's streams."""
        if not hasattr(self.here, "notes"):
            self.here.notes = []
        return self.here.notes

    def _stream(self, non_blocking: bool, priority: int) -> FakeStream:
        assert non_blocking and priority < 0
        self._next += 1
        return FakeStream(self._next, self.notes)

    def current(self) -> FakeStream:
        if not hasattr(self.here, "stream"):
            self.here.stream = FakeStream(0, self.notes)
        return self.here.stream

    def on_ranks(self, size: int, run: Callable[[FakeCommunicator], Any]) -> list[Any]:
        """run(comm) on `size` threads."""
        unique = self.nccl.get_unique_id()
        raw = [self.nccl.NcclCommunicator(size, unique, rank) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, raw))
