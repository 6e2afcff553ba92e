"""Packed launches: what the driver gets, and which launches are packed."""

from __future__ import annotations

import ctypes
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import fake_gpu

from cupykern import targets
from cupykern.targets.repeated import Repeated, pack, places_of

cupy = pytest.importorskip("cupy")


@pytest.fixture
def fake(monkeypatch, no_gpu):
    with fake_gpu(monkeypatch) as made:
        yield made


@pytest.fixture
def driver(monkeypatch):
    """The launches that CUDA's driver gets, and how often a thread asked for its context."""
    noted = SimpleNamespace(launches=[], contexts=0)

    def context():
        noted.contexts += 1

    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", lambda *a: noted.launches.append(a))
    monkeypatch.setattr(cupy.cuda.runtime, "memGetInfo", context)
    return noted


def parameters(address: int, sizes: list[int]) -> list[bytes]:
    """What the driver reads of kernel_params."""
    places = (ctypes.c_uint64 * len(sizes)).from_address(address)
    return [ctypes.string_at(at, size) for at, size in zip(places, sizes, strict=True)]


def test_the_driver_gets_what_the_arguments_were(fake, driver):
    x, y = fake.array((4,), "float32"), fake.array((4,), "uint8")
    struct = np.arange(40, dtype=np.uint8)
    args = (
        x, None, y.data + 3, np.int64(-7), np.float32(0.5),
        targets.base.launch_argument(targets.base.by_value(struct)),
        targets.base.by_value(struct[:24]),
    )  # fmt: skip
    kernel = SimpleNamespace(ptr=99)
    launch = pack(kernel, 0, (5, 128, 1024), args)
    expected = [np.uint64(x.data.ptr), np.uint64(0), np.uint64(y.data.ptr + 3), *args[3:5]]
    wanted = [n.tobytes() for n in expected] + [struct.tobytes(), struct[:24].tobytes()]
    del args, struct, x, y
    for _ in range(2):
        launch()
    made = driver.launches
    assert len(made) == 2
    sizes, (stream, address, *last) = made[1][:8], made[1][8:]
    assert sizes == (99, 5, 1, 1, 128, 1, 1, 1024) and stream == 0
    assert last == [0]
    assert parameters(address, [len(n) for n in wanted]) == wanted


def test_it_goes_to_the_current_stream(fake, driver, monkeypatch):
    stream = SimpleNamespace(ptr=7)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    launch = pack(SimpleNamespace(ptr=1), 0, (1, 32, 0), (None,))
    launch()
    stream.ptr = 8
    launch()
    assert [made[8] for made in driver.launches] == [7, 8]


def test_every_thread_has_a_context_first(fake, driver):
    launch = pack(SimpleNamespace(ptr=1), 5, (1, 32, 0), (None,))
    for _ in range(2):
        thread = Thread(target=lambda: (launch(), launch()))
        thread.start()
        thread.join()
    assert driver.contexts == 2 and len(driver.launches) == 4


class Kernel:
    """Notes launches, plain and packed."""

    def __init__(self):
        self.made = []

    def __call__(self, grid, args, shared_bytes=0):
        self.made.append(("plain", grid, args, shared_bytes))

    def pack(self, grid, args, shared_bytes):
        return lambda: self.made.append(("packed", grid, args, shared_bytes))


def test_what_comes_again_is_packed(fake):
    kernel, asked = Kernel(), []
    repeated = Repeated(kernel, 3, 64, lambda *given: asked.append(given) or ("made", *given))
    for places in ((1, None), (1, None), (2, None), (1, None), (1, None), (2, None)):
        repeated.launch_at(places, places[0])
    kinds = [made[0] for made in kernel.made]
    assert kinds == ["plain", "packed", "plain", "packed", "packed", "packed"]
    assert [made[2] for made in kernel.made] == [("made", n) for n in (1, 1, 2, 1, 1, 2)]
    assert asked == [(1,), (1,), (2,), (2,)]  # twice for each
    assert all(made[1] == 3 and made[3] == 64 for made in kernel.made)


def test_what_has_no_places_is_not_packed():
    kernel = Kernel()
    repeated = Repeated(kernel, 1, 0, lambda *given: given)
    for _ in range(3):
        repeated.launch((np.zeros(3), None))
    assert [made[0] for made in kernel.made] == ["plain"] * 3


def test_kernels_that_cannot_pack_launch_plainly(fake):
    launches = []
    repeated = Repeated(lambda *launch: launches.append(launch), 1, 0, lambda *given: given)
    for _ in range(3):
        repeated.launch_at((1,), "given")
    assert launches == [(1, ("given",), 0)] * 3


def test_not_all_is_kept_forever(fake, monkeypatch):
    monkeypatch.setattr("cupykern.targets.repeated.MOST_PACKED", 4)
    repeated = Repeated(Kernel(), 1, 0, lambda *given: given)
    for n in range(20):
        repeated.launch_at((n,), n)
        assert len(repeated._known) <= 4


def test_arrays_say_where_they_are(fake):
    kernel = Kernel()
    repeated = Repeated(kernel, 1, 0, lambda arrays: arrays)
    x, y = fake.array((4,), "float16"), fake.array((4,), "float16")
    for arrays in ((x, None), (y, None), (x[:], None), (x, None), (x, y)):
        repeated.launch(arrays)
    assert [made[0] for made in kernel.made] == ["plain", "plain", "packed", "packed", "plain"]
    assert kernel.made[3][2][0].data.ptr == x.data.ptr


def test_places_are_addresses_or_none(fake):
    x = fake.array((4,), "float16")
    assert places_of((x, None, x[1:])) == (x.data.ptr, None, x.data.ptr + 2)
