"""Launches that overlap: what waits for the previous kernel, and what the driver is told."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

import cupykern
from cupykern import OPS, kernels
from cupykern.kernels import Variant
from cupykern.targets import host, launches
from cupykern.targets.host import HostKernelError

# --- kernels -----------------------------------------------------------------------------------


def test_every_kernel_waits():
    variants = {v.kernel: v for op in OPS for v in op.variants("sm_90a")}
    for path in kernels.ROOT.glob("*.cu"):
        variant = variants.get(path.stem) or Variant(path.stem, (), (), 128)
        assert kernels.overlaps(variant), path.name


def run(body: str, **settings: bool) -> np.ndarray:
    """What a kernel of 64 threads makes of y = 0 with x = 1, 2, ..."""
    text = f"KERNEL void probe(const float* x, float* y) {{ const int i = threadIdx.x; {body} }}"
    variant = Variant("probe", (), (), 64, text=text)
    x, y = np.arange(1, 129, dtype=np.float32), np.zeros(128, np.float32)
    with host.use(**settings) as target:
        target.compile(variant)(2, (x, y))
    assert (x == np.arange(1, 129)).all()
    return y


PLACE = "const int at = int(blockIdx.x) * 64 + i;"
WAIT = "\nwait_for_previous_grid();\n"


@pytest.mark.parametrize("late", [False, True])
def test_what_the_previous_kernel_wrote_is_there_after_the_wait(late):
    y = run(f"{PLACE} {WAIT} y[at] = 2 * x[at];", late_producer=late)
    assert (y == 2 * np.arange(1, 129)).all()


def test_a_read_before_the_wait_is_seen():
    body = f"{PLACE} const float early = x[at]; {WAIT} y[at] = early;"
    assert (run(body) == np.arange(1, 129)).all()
    assert np.isnan(run(body, late_producer=True)).all()  # in both blocks


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"if (i == 3) y[5] = 1; {WAIT}", "wrote to global memory before wait_for_previous_grid"),
        (f"if (i < 32) return; {WAIT}", "the thread ended without wait_for_previous_grid"),
        (f"sync_block(); {WAIT} {WAIT}", "wait_for_previous_grid twice"),
    ],
)
def test_a_broken_rule_is_an_error(body, message):
    with pytest.raises(HostKernelError, match=message):
        run(body, late_producer=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"if (i == 0) return; {WAIT}", "the thread ended without"),
        (
            f"SHARED(float, s, [64]); copy_async<4>(&s[i], x + i); {WAIT} copy_async_wait<0>();",
            "an access to global memory before",
        ),
    ],
)
def test_without_a_late_producer_too(body, message):
    with pytest.raises(HostKernelError, match=f"{message} wait_for_previous_grid"):
        run(body)


def test_kernels_that_do_not_wait_are_no_part_of_it():
    text = "KERNEL void probe(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }"
    assert not kernels.overlaps(Variant("probe", (), (), 64, text=text))
    y = run("y[i] = x[i];", late_producer=True)
    assert (y[:64] == np.arange(1, 65)).all()


# --- launches ----------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch):
    """What cuLaunchKernelEx gets: streams, sizes and attributes."""
    made = []

    def launch(address, function, arguments, extra):
        config = launches.LaunchConfig.from_address(address)
        kept = (launches.Attribute * config.num_attributes).from_address(config.attributes)
        attributes = {a.id: tuple(a.value[:3]) for a in kept}
        sizes = config.grid[0], config.block[0], config.shared_bytes
        made.append((function, arguments, config.stream, sizes, attributes))
        return 0

    class Function:  # takes argtypes, as ctypes' functions do
        __call__ = staticmethod(launch)

    monkeypatch.setattr(launches, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=Function()))
    return made


SERIALIZATION, CLUSTER = {6: (1, 0, 0)}, {4: (3, 1, 1)}  # cuda.h: CUlaunchAttributeID


@pytest.mark.parametrize(("size", "cluster"), [(1, {}), (3, CLUSTER)])
def test_the_driver_is_told_what_may_overlap(driver, size, cluster):
    launch = launches.launcher(99, (6, 128, 1024), size, True)
    launch(7, 1000)
    with cupykern.overlap_launches(False):
        launch(7, 1000)
        with cupykern.overlap_launches(True):
            launch(7, 2000)
    launch(0, 1000)
    assert [made[4] for made in driver] == [
        SERIALIZATION | cluster,
        cluster,
        *2 * [SERIALIZATION | cluster],
    ]
    assert [made[:3] for made in driver] == [
        (99, 1000, 7),
        (99, 1000, 7),
        (99, 2000, 7),
        (99, 1000, None),
    ]
    assert {made[3] for made in driver} == {(6, 128, 1024)}


def test_a_kernel_that_does_not_wait_never_overlaps(driver):
    with cupykern.overlap_launches(True):
        launches.launcher(99, (6, 128, 0), 3, False)(7, 1000)
    assert driver[0][4] == CLUSTER


def test_off_by_the_environment(driver, monkeypatch):
    monkeypatch.setenv("CUPYKERN_OVERLAP", "0")
    launch = launches.launcher(99, (6, 128, 0), 1, True)
    launch(7, 1000)
    with cupykern.overlap_launches(True):
        launch(7, 1000)
    assert [made[4] for made in driver] == [{}, SERIALIZATION]


def test_overlap_launches_takes_a_bool():
    with (
        pytest.raises(TypeError, match="enabled must be a bool; got int"),
        cupykern.overlap_launches(1),
    ):
        pass


def test_structs_are_those_of_the_driver():
    assert ctypes.sizeof(launches.Attribute) == 72
    assert ctypes.sizeof(launches.LaunchConfig) == 56
