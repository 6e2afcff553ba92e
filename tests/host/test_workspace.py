"""Workspace that launches leave as they found it: shared on a stream, never with a graph."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cupykern.runtime import workspace


class Stream:
    def __init__(self, ptr: int):
        self.ptr, self.capturing, self.synchronized = ptr, False, 0

    def synchronize(self):
        self.synchronized += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@pytest.fixture
def fake(monkeypatch):
    """A target whose arrays are numpy's; `stream` is its current one."""
    monkeypatch.setattr(workspace, "of_streams", {})
    monkeypatch.setattr(workspace, "of_grids", {})
    monkeypatch.setattr(workspace, "of_graphs", [])
    monkeypatch.setattr(workspace, "of_devices", {})
    target = SimpleNamespace(name="cuda", device_id=0, stream=Stream(7), others=[])
    runtime = SimpleNamespace(streamIsCapturing=lambda ptr: target.stream.capturing)

    def make_stream(non_blocking):
        target.others.append(Stream(9))
        return target.others[-1]

    cuda = SimpleNamespace(
        get_current_stream=lambda: target.stream, runtime=runtime, Stream=make_stream
    )
    target.xp = SimpleNamespace(cuda=cuda, empty=np.empty, zeros=np.zeros)
    return target


def test_nothing_for_nothing(fake):
    assert workspace.take(fake, 0, 0) == (None, None)


def test_launches_of_a_stream_share(fake):
    partials, counters = workspace.take(fake, 100, 3)
    assert partials.nbytes >= 100 and counters.dtype == np.uint32 and not counters.any()
    again = workspace.take(fake, 50, 2)
    assert again[0] is partials and again[1] is counters
    fake.stream = Stream(8)
    assert workspace.take(fake, 100, 3)[1] is not counters
    fake.stream, fake.device_id = Stream(7), 1
    assert workspace.take(fake, 100, 3)[1] is not counters


def test_it_grows_with_the_need(fake):
    partials, counters = workspace.take(fake, 100, 3)
    more, more_counters = workspace.take(fake, 1000, counters.size + 1)
    assert more.nbytes >= 1000 and more_counters.size > counters.size
    assert workspace.take(fake, 100, 3)[0] is more


def test_much_is_not_kept(fake):
    partials, counters = workspace.take(fake, 2**24, 3)
    other, same = workspace.take(fake, 2**24, 3)
    assert other is not partials and same is counters


def test_launches_with_a_grid_barrier_share_what_is_large_enough(fake):
    first = workspace.take_for_grid(fake, 100)
    assert first.nbytes >= 628 and not first.any() and workspace.take_for_grid(fake, 50) is first
    more = workspace.take_for_grid(fake, 1000)
    assert more.nbytes >= 1528 and workspace.take_for_grid(fake, 100) is more
    fake.stream.capturing = True
    assert workspace.take_for_grid(fake, 100) is not more


def test_a_graph_has_its_own_for_good(fake):
    _, counters = workspace.take(fake, 100, 3)
    fake.stream.capturing = True
    captured = [workspace.take(fake, 100, 3) for _ in range(2)]
    assert captured[0][1] is not captured[1][1] and captured[0][1] is not counters
    assert all(any(x is y for y in workspace.of_graphs) for x in captured)
    fake.stream.capturing = False
    assert workspace.take(fake, 100, 3)[1] is counters


def test_a_graph_does_not_set_its_counters(fake, monkeypatch):
    """They were zero before the capture, on every stream; no call waits for its stream."""
    workspace.take(fake, 100, 3)
    workspace.take(fake, 100, 5000)
    assert [x.synchronized for x in (fake.stream, *fake.others)] == [0, 1]
    fake.stream.capturing, zeros = True, []
    monkeypatch.setattr(fake.xp, "zeros", lambda *args: zeros.append(args) or np.zeros(*args))
    taken = [workspace.take(fake, 100, n)[1] for n in (3, 40, 1)]
    assert not zeros and [x.size for x in taken] == [3, 40, 1]
    for x in taken:
        assert not x.any()
        x[:] = 1  # of which nobody else has a part
    assert not workspace.take(fake, 0, 5)[1].any()
    fake.device_id = 1
    assert not workspace.take(fake, 0, 5)[1].any() and len(zeros) == 1  # no call came before
    fake.device_id = 0
    taken = [workspace.take(fake, 0, 1000)[1] for _ in range(100)]
    assert len(zeros) > 1 and not any(x.any() for x in taken)  # when all are taken


def test_threads_do_not_share_their_own_streams(fake):
    from threading import Thread

    fake.stream, found = Stream(2), []
    for _ in range(2):
        thread = Thread(
            target=lambda: found.append((workspace.take(fake, 100, 3), workspace.of_streams))
        )
        thread.start()
        thread.join()
    # A thread that has ended may leave its number to the next one, and its stream with it.
    keys = list(found[0][1])
    assert all(key[:2] == (0, 2) and key[2] is not None for key in keys)


def test_the_host_finds_nothing_of_an_earlier_call(fake):
    fake.name = "host"
    partials, counters = workspace.take(fake, 16, 2)
    assert np.isnan(partials.view(np.float32)).all() and not counters.any()
    assert workspace.take(fake, 16, 2)[1] is not counters
