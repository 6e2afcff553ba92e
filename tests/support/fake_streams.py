"""Streams of the fake GPU, which note what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Stream:
    """`waits`: the handles of the streams that it was made to wait for."""

    def __init__(self, gpu: Any, ptr: int):
        self.gpu, self.ptr, self.waits = gpu, ptr, []

    def __enter__(self):
        self.before, self.gpu.stream = self.gpu.stream, self

    def __exit__(self, *error):
        self.gpu.stream = self.before

    def record(self, event):
        event.stream = self
        return event

    def wait_event(self, event):
        self.waits.append(event.stream.ptr)

    def is_capturing(self):
        return False


class Event:
    def __init__(self, **options):
        self.done = False

    def synchronize(self):
        self.done = True


def fake_streams(monkeypatch: Any, gpu: Any) -> None:
    """`gpu.stream` is CuPy's current stream."""
    cuda, gpu.stream = gpu.xp.cuda, Stream(gpu, 0)
    monkeypatch.setattr(cuda, "get_current_stream", lambda: gpu.stream)
    monkeypatch.setattr(cuda, "Event", Event)

    def from_external(stream):
        return Stream(gpu, stream.__cuda_stream__()[1])

    streams = SimpleNamespace(from_external=from_external, null=Stream(gpu, 0))
    monkeypatch.setattr(cuda, "Stream", streams)


def launch_of(gpu: Any, call: Callable[[], Any]) -> tuple[Any, Any]:
    """(the result, the only launch of a call)."""
    gpu.launches.clear()
    y = call()
    (launch,) = gpu.launches
    return y, launch
