"""Which targets the tests run on: `pytest --target host|cuda|hip|all`, default all that are here.

What a target does not have, or a machine without a GPU, is deselected, not skipped, and so are fake
GPUs on a machine with a GPU: one line at the end counts it.  A skip means that a tool is missing
here.

`--exhaustive` adds what is left out to save time: tests over every code of a format, the other warp
size of tests whose cases take the two in turn, cases of tests that take every second to eighth, and
hypothesis' examples.

CUPYKERN_TEST_MINUTES: after so long, only the first case of each test runs, and the others are
skipped: for CI on a slow machine.
"""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

# Before numpy is imported.  FP64 products of tests are small, and the threads of several test
# processes that wait for each other take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# For the processes that tests start: they import the package in half the time.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ.setdefault(
    "PYTHONPYCACHEPREFIX", str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
)
# Most of the tests' time goes into compiling kernels for problems that are small.
os.environ.setdefault("CUPYKERN_HOST_OPTIMIZE", "0")

import pytest
from hypothesis import HealthCheck, settings

from cupykern import targets
from cupykern.targets import host

pytest.register_assert_rewrite(*(x.stem for x in Path(__file__).parent.glob("support/*.py")))

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

_DESELECTED = pytest.StashKey[Counter[str]]()  # how many items, by the reason
_LEFT_OUT = "left to --exhaustive"
_SECONDS = 60 * float(os.environ.get("CUPYKERN_TEST_MINUTES", "inf"))
_BEGIN = time.monotonic()
_begun: set[str] = set()  # tests of which a case has run in this process
_HOST = {
    "host32": {"warp_size": 32},
    "host64": {"warp_size": 64},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", choices=("host", "cuda", "hip", "all"), default="all")
    parser.addoption("--exhaustive", action="store_true", help="also what takes minutes per test")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A process for each core, if pytest-xdist is here and no `-n` says otherwise; one process
    where there is a GPU, whose memory and time the tests would share."""
    option = config.option
    no_say = getattr(option, "numprocesses", 0) is None and option.dist == "no"
    if no_say and not (option.usepdb or "PYTEST_XDIST_WORKER" in os.environ) and _gpu() is None:
        option.numprocesses = os.cpu_count()
        option.dist = "worksteal"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_DESELECTED] = Counter()
    if config.getoption("exhaustive"):
        settings.load_profile("exhaustive")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known: dict[Any, dict[Any, int]] = defaultdict(dict)
    reasons = {}
    for item in items:
        left_out = _left_out(item, _places(item, known))
        reasons[item] = _without(item) or left_out
    config.stash[_DESELECTED].update(filter(None, reasons.values()))
    config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
    items[:] = [item for item in items if not reasons[item]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    name = item.nodeid.partition("[")[0]
    if name in _begun and time.monotonic() - _BEGIN > _SECONDS:
        pytest.skip("a further case, after CUPYKERN_TEST_MINUTES")
    _begun.add(name)


def pytest_collection_finish() -> None:
    """What there is now stays: garbage collections need not look through it each time."""
    gc.freeze()


def _without(item: pytest.Item) -> str | None:
    """What the item needs (tests/support/needs.py) and its target or this machine lacks."""
    target = None
    if "no_gpu" in item.fixturenames and _gpu() is not None:
        return "need a machine without a GPU"
    if _needs_gpu(item):
        target = None if item.config.getoption("target") == "host" else _gpu()
        if target is None:
            return "need a GPU"
    if (name := _target_name(item)) is not None:
        target = _target(name)
    what = _lacks(target, item.iter_markers("needs"))
    return f"need {what}" if what else None


def _needs_gpu(item: pytest.Item) -> bool:
    return "gpu" in item.fixturenames or "gpu" in item.keywords


def _target_name(item: pytest.Item) -> str | None:
    return item.callspec.params.get("target") if hasattr(item, "callspec") else None


def _left_out(item: pytest.Item, places: dict[str, int]) -> str | None:
    """By the markers exhaustive, thinned and in_turn.

    Cases are counted along the diagonals of their parameters, so that no value goes missing where
    another parameter has as many.  Host tests of several cases take the two warp sizes in turn.
    places: of the case's values in each parametrize, by parameter.
    """
    if item.config.getoption("exhaustive"):
        return None
    thinned, in_turn = map(item.get_closest_marker, ("thinned", "in_turn"))
    every = thinned.args[0] if thinned else 1
    diagonal = sum(places.values())
    if "exhaustive" in item.keywords or diagonal % every:
        return _LEFT_OUT
    target = _target_name(item)
    if target not in _HOST or not (places or in_turn):
        return None
    needs = list(item.iter_markers("needs"))
    fit = [name for name in _HOST if not _lacks(_target(name), needs)]
    turn = diagonal // every
    if in_turn and in_turn.args:
        turn = sum(places[name] for name in in_turn.args)
    return None if not fit or target == fit[turn % len(fit)] else _LEFT_OUT


def _places(item: pytest.Item, known: dict[Any, dict[Any, int]]) -> dict[str, int]:
    """Of the values among those of their parametrize, by its first parameter.

    known: those of the items before.
    """
    places = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        others = known[item.nodeid.partition("[")[0], names[0]]
        values = tuple(id(item.callspec.params[name]) for name in names)
        places[names[0]] = others.setdefault(values, len(others))
    return places


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Of several processes one at a time uses the GPU, and leaves its memory to the others."""
    gpu = _gpu() if _needs_gpu(item) or _target_name(item) == "gpu" else None
    if gpu is None or "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            gpu.xp.get_default_memory_pool().free_all_blocks()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers of pytest-xdist all collect the same: one's numbers are those of all."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = dict(session.config.stash[_DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[_DESELECTED] |= Counter(node.workeroutput.get("deselected", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash[_DESELECTED].most_common()
    if counts:
        terminalreporter.line("deselected: " + ", ".join(f"{n} {why}" for why, n in counts))


@cache
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
    needs = list(metafunc.definition.iter_markers("needs"))
    fit = [name for name in names if not _lacks(_target(name), needs)]
    metafunc.parametrize("target", fit or names, indirect=True)  # where none fits: deselected


def _target(name: str) -> targets.Target | None:
    return host.HostTarget(**_HOST[name]) if name in _HOST else _gpu()


def _lacks(target: targets.Target | None, needs: Iterable[pytest.Mark]) -> str | None:
    """The first need that the target does not meet."""
    if target is None:
        return None
    return next((what for what, has in (mark.args for mark in needs) if not has(target)), None)


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
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """Whether a test is to do all that it can (--exhaustive)."""
    return request.config.getoption("exhaustive")


@pytest.fixture(scope="session")
def no_gpu() -> None:
    """For a fake GPU in the place of CuPy's; tests that ask for it are deselected with a GPU."""


@pytest.fixture
def gpu() -> targets.Target:
    """The GPU's Target; tests that ask for it are deselected without one."""
    return targets.get()
