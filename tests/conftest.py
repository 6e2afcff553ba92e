"""Which targets the tests run on: `pytest --target host|cuda|hip|all`, default all that are here.

`--exhaustive` adds what is left out to save time: tests over every code of a format, the other warp
size of tests that take the two in turn, cases of tests that take every second to sixth, and hypothesis'
examples.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

# Before numpy is imported.  FP64 products of tests are small, and the threads of several test processes
# that wait for each other take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the tests' time goes into compiling kernels for problems that are small.
os.environ.setdefault("CUPYKERN_HOST_OPTIMIZE", "0")

import pytest
from hopper_kernels import skip_unless_hopper
from hypothesis import HealthCheck, settings

from cupykern import targets
from cupykern.targets import host

settings.register_profile(
    "repository",
    deadline=None,
    derandomize=True,
    max_examples=25,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("exhaustive", settings.get_profile("repository"), max_examples=200)
settings.load_profile("repository")

os.environ["CUPYKERN_TUNE"] = "0"  # what somebody tuned on this machine is nothing for the tests

_HOST = {
    "host32": {"warp_size": 32},
    "host64": {"warp_size": 64},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", choices=("host", "cuda", "hip", "all"), default="all")
    parser.addoption("--exhaustive", action="store_true", help="also what takes minutes per test")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A process for each core, if pytest-xdist is here and no `-n` says otherwise; one process where
    there is a GPU, whose memory and time the tests would share."""
    option = config.option
    no_say = getattr(option, "numprocesses", 0) is None and option.dist == "no"
    if no_say and not (option.usepdb or "PYTEST_XDIST_WORKER" in os.environ) and _gpu() is None:
        option.numprocesses = os.cpu_count()
        option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("exhaustive"):
        settings.load_profile("exhaustive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("exhaustive"):
        return
    cases: dict[str, dict[Any, int]] = defaultdict(dict)
    left_out = [item for item in items if _is_left_out(item, cases[item.nodeid.partition("[")[0]])]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def _is_left_out(item: pytest.Item, cases: dict[Any, int]) -> bool:
    """By the markers exhaustive, in_turn and thinned.  cases: the test's own, numbered as they come."""
    callspec = getattr(item, "callspec", None)
    indices = dict(callspec.indices) if callspec else {}
    indices.pop("target", None)
    number = cases.setdefault(tuple(indices.items()), len(cases))
    thinned = item.get_closest_marker("thinned")
    if "exhaustive" in item.keywords or (thinned and number % thinned.args[0]):
        return True
    target = callspec.params.get("target") if callspec else None
    in_turn = "in_turn" in item.keywords and target in _HOST
    return in_turn and target != list(_HOST)[sum(indices.values()) % len(_HOST)]


def _gpu() -> targets.Target | None:
    try:
        gpu = targets.get()
    except targets.UnavailableError:
        return None
    return None if gpu.name == "host" else gpu


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("target")
    names = list(_HOST) if wanted in ("host", "all") else []
    if wanted in ("cuda", "hip") or (wanted == "all" and _gpu() is not None):
        names.append("gpu")
    metafunc.parametrize("target", names, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest):
    """A Target; for the host also the settings under which numpy arrays then run."""
    if request.param == "gpu":
        wanted = request.config.getoption("target")
        yield targets.get(None if wanted == "all" else wanted)
        return
    with host.use(**_HOST[request.param]) as here:
        yield here


@pytest.fixture
def hopper(request: pytest.FixtureRequest) -> None:
    """Skips a test's targets that have not Hopper's words."""
    if "target" in request.fixturenames:
        skip_unless_hopper(request.getfixturevalue("target"))


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test is to do all that it can (--exhaustive)."""
    return request.config.getoption("exhaustive")


@pytest.fixture
def gpu(request: pytest.FixtureRequest):
    """The GPU's Target; the test is skipped without one."""
    here = _gpu()
    if here is None or request.config.getoption("target") == "host":
        pytest.skip("no GPU")
    return here
