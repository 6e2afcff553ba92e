"""Planted faults: one-line mutations of the kernels, each of which a check must catch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from cupykern import check, kernels, param_structs
from cupykern.op import Op
from cupykern.runtime import jit, plans
from cupykern.targets import host

SCHEDULES = (("fifo", 32), ("sticky:1", 32), ("lifo", 64))
SECONDS = 120
A_CRASH = "a crash"


class Fault(NamedTuple):
    """In `file`, `old` becomes `new`, whatever the spaces and line ends, and also after a rename.

    caught: the check that is to fail.
    """

    file: str
    old: str
    new: str
    caught: str


def changed(fault: Fault) -> str:
    """The file's text with the fault.

    Raises LookupError where the file has not the text to change.
    """
    text = (kernels.ROOT / fault.file).read_text()
    names = renamed(text, fault.old)
    if names is None:
        raise LookupError(f"{fault.file} no longer has {fault.old!r}")
    old, new = (
        _NAME.sub(lambda name: names.get(name[0], name[0]), part) for part in (fault.old, fault.new)
    )
    return _anywhere(old).sub(lambda _: new.strip(), text)


_NAME = re.compile(r"(?<!\w)[A-Za-z_]\w*")


def _anywhere(old: str) -> re.Pattern[str]:
    return re.compile(r"\s*".join(map(re.escape, "".join(old.split()))))


def renamed(text: str, old: str) -> dict[str, str] | None:
    """What the names of `old` are called in `text`; {}: as in `old`.

    The place has the shape of `old`: the same text but for names, equal names where `old` has equal
    ones.  None: no such place keeps half of the names, or several keep the most.
    """
    if _anywhere(old).search(text):
        return {}
    names = list(dict.fromkeys(_NAME.findall(old)))
    shape, seen = [], set()
    for part in re.findall(rf"{_NAME.pattern}|\S", old):
        if part not in names:
            shape += map(re.escape, part)
            continue
        group = f"n{names.index(part)}"
        shape.append(rf"\b(?P={group})\b" if part in seen else f"(?P<{group}>{_NAME.pattern})")
        seen.add(part)
    anywhere = r"\s*".join(shape)
    # Not from the middle of a.b or a::b.
    places = {match.groups() for match in re.finditer(f"(?<![.:])(?={anywhere})", text)}

    def kept(place: tuple[str, ...]) -> int:
        return sum(map(str.__eq__, place, names))

    most = max(map(kept, places), default=0)
    best = [place for place in places if kept(place) == most]
    if len(best) != 1 or 2 * most < len(names):
        return None
    return dict(zip(names, best[0], strict=True))


def _forget() -> None:
    for cached in vars(kernels).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    param_structs.struct_dtype.cache_clear()
    jit.clear()
    plans.clear()


@contextmanager
def planted(fault: Fault, tmp_path_factory: Any) -> Iterator[None]:
    """Within the block, kernels are compiled from a copy of kernels_cu with one line changed."""
    root = tmp_path_factory.mktemp("kernels") / "kernels_cu"
    shutil.copytree(kernels.ROOT, root)
    (root / fault.file).write_text(changed(fault))
    before = kernels.ROOT
    kernels.ROOT = root
    _forget()
    try:
        yield
    finally:
        kernels.ROOT = before
        _forget()


Problems = Callable[[], Iterable[tuple[str, Op, Any]]]
Checks = Mapping[str, Callable[[], None]]


def first_failure(problems: Problems, checks: Checks, wanted: str) -> str | None:
    """The name of the first check that fails, or None: the problems against their bounds, then
    functions that raise AssertionError.  The check `wanted` goes before all others: each variant
    that a fault changes is compiled again.  The others follow, since what a kernel reads or writes
    outside of its arrays is chance, and with it which check fails."""
    names = {name for name, _, _ in problems()} | set(checks)
    for chosen in ({wanted} & names, names - {wanted}):
        for schedule, warp_size in SCHEDULES if chosen else ():
            with host.use(schedule=schedule, warp_size=warp_size) as target:
                for name, holds in _all(problems, checks, target):
                    if name in chosen and not holds():
                        return name
    return None


def _all(
    problems: Problems, checks: Checks, target: host.HostTarget
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Names, and whether a problem's or a check's kernels do what they should, if asked."""
    for name, op, problem in problems():
        yield name, partial(_holds, op, problem, target)
    for name, check_all in checks.items():
        yield name, partial(_passes, check_all)


def _passes(check_all: Callable[[], None]) -> bool:
    try:
        check_all()
    except (AssertionError, host.HostKernelError):
        return False
    return True


def _holds(op: Op, problem: Any, target: host.HostTarget) -> bool:
    try:
        return check.check_problem(op, problem, 1, target.xp).ok
    except (host.HostKernelError, check.Violation):
        return False


def caught_by(fault: Fault, tmp_path_factory: Any, problems: Problems, checks: Checks) -> str:
    """The check that catches the fault; "": none.

    In a process that a wild access may kill: A_CRASH.
    """
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child() -> None:
        faulthandler.disable()  # a crash is what some faults are to cause
        try:
            with planted(fault, tmp_path_factory):
                results.put(first_failure(problems, checks, fault.caught) or "")
        except BaseException as error:
            results.put(f"{type(error).__name__}: {error}")
            raise

    process = context.Process(target=child)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        return A_CRASH  # of a kind: what was overwritten keeps the process from its end
    return A_CRASH if process.exitcode < 0 else results.get()


def fault_tests(
    faults: dict[str, Fault],
    problems: Problems = tuple,
    checks: Checks = MappingProxyType({}),
    every: int = 8,
) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """A module's three tests: each fault changes the file as it is now and names a check that there
    is; nothing fails without a fault; each fault fails a check, first of all the one that it names,
    or ends its process.  Of the faults only some (every eighth) are planted without --exhaustive:
    each compiles kernels of its own."""

    def test_faults_apply() -> None:
        names = {name for name, _, _ in problems()} | set(checks)
        for fault in faults.values():
            changed(fault)
            assert fault.caught in names, f"no check {fault.caught!r}"

    @pytest.mark.parametrize("first", range(len(SCHEDULES)))
    @pytest.mark.thinned(len(SCHEDULES))
    def test_nothing_fails_without_a_fault(first: int) -> None:
        """Each check under one of the schedules in turn; under all of them with --exhaustive."""
        for i, (schedule, warp_size) in enumerate(SCHEDULES):
            with host.use(schedule=schedule, warp_size=warp_size) as target:
                for number, (name, holds) in enumerate(_all(problems, checks, target)):
                    assert (number + first) % len(SCHEDULES) != i or holds(), name

    @pytest.mark.faults
    @pytest.mark.thinned(every)
    @pytest.mark.parametrize("name", faults)
    def test_caught(name: str, tmp_path_factory: Any) -> None:
        caught = caught_by(faults[name], tmp_path_factory, problems, checks)
        if caught not in {A_CRASH, *checks, *(name for name, _, _ in problems())}:
            pytest.fail(caught or "not caught")

    return test_faults_apply, test_nothing_fails_without_a_fault, test_caught
