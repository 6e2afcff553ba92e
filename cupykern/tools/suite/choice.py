"""The rows of a suite: a seeded sample of its shapes that fit into memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...gemm.product import ACTIVATIONS
from ...op import Op, Work
from ..bench import Task
from .models import Model, by_suite
from .shapes import RANDOM, Entry, entries, random_entries, token_counts

ALL = "models"
ROWS = {"cuda": 12, "hip": 12, "host": 1}  # per op and dtype
_RANDOM = re.compile(r"random:(\d{1,9}):([1-9]\d{0,4})")
_EPILOGUE = {"bias", *ACTIVATIONS}  # options that `group` leaves out
# Budget for an 80 GB GPU.  The reference takes 16 bytes per 8-bit element that it reads (its value
# and its magnitude in FP64), and each of up to 8 implementations keeps its output.
_MEMORY = 64e9
_HOST_BYTES, _HOST_FLOPS = 2**22, 2**25  # the host target emulates: about a second per row
_MOST_DRAWN = 10000
_MOST_EXPONENT = {"host": 9}  # of random sizes, as powers of 2


@dataclass(frozen=True)
class Suite:
    """name: "models", a model's name, or "random:SEED:COUNT".  rows: maximum per op and dtype.

    seed: selects the shapes.  A random suite's name has its own seed and count.
    """

    name: str
    rows: int
    seed: int


def suite(name: str, rows: int | None, seed: int, target: str) -> Suite:
    """Parse a suite.  rows: None for the default.  Raises ValueError for an unknown name."""
    if drawn := _RANDOM.fullmatch(name):
        return Suite(name, int(drawn[2]), int(drawn[1]))
    if name != ALL and name not in by_suite():
        raise ValueError(
            f"unknown suite {name!r}; suites are {ALL}, {', '.join(by_suite())}, random:SEED:COUNT"
        )
    return Suite(name, ROWS[target] if rows is None else rows, seed)


def group(dtype: str) -> str:
    """Return the dtype that a row is counted under: without a product's epilogue options."""
    name, _, text = dtype.partition(":")
    kept = [option for option in text.split("+") if option and option not in _EPILOGUE]
    return ":".join((name, *(["+".join(kept)] if kept else [])))


def fits(work: Work, target: str) -> bool:
    """Return whether a row can be verified and timed: with peers in 80 GB, on the host in 1 s."""
    if target == "host":
        return work.bytes_read + work.bytes_written <= _HOST_BYTES and work.flops <= _HOST_FLOPS
    return 16 * work.bytes_read + 8 * work.bytes_written <= _MEMORY


def tasks(chosen: Suite, ops: Iterable[Op], target: str) -> list[Task]:
    """Return the rows in a seeded order that mixes ops, so that an interrupted run is a sample too.

    A group's rows depend only on the suite, the seed and the target; a larger `rows` adds to them.
    """
    known = {op.name: op for op in ops}
    found: list[tuple[str, Task]] = []
    for candidates in _groups(chosen, known, target):
        taken: dict[tuple[str, str], None] = {}
        for entry in candidates:
            task = _task(entry, known[entry.op])
            key = repr(task.problem), task.dtype
            if key not in taken and fits(task.op.work(task.problem), target):
                taken[key] = None
                found.append((_rank(chosen.seed, entry), task))
            if len(taken) == chosen.rows:
                break
    return [task for _, task in sorted(found, key=lambda pair: pair[0])]


def _task(entry: Entry, op: Op) -> Task:
    problem = op.bench_problem(entry.shape, entry.dtype)
    if entry.changes:
        problem = replace(problem, **dict(entry.changes))
    return Task(op, entry.shape, entry.dtype, problem)


def _groups(chosen: Suite, known: dict[str, Op], target: str) -> Iterator[Iterable[Entry]]:
    """Yield the candidates of each op and dtype, in the order of selection."""
    if chosen.name.startswith("random:"):
        for op in (op for op in RANDOM if op in known):
            for dtype in RANDOM[op][0]:
                drawn = random_entries(op, dtype, chosen.seed, _MOST_EXPONENT.get(target, 17))
                yield (entry for _, entry in zip(range(_MOST_DRAWN), drawn, strict=False))
        return
    groups: dict[tuple[str, str], dict[Entry, None]] = {}
    for model in _models(chosen.name):
        for tokens in token_counts(model):
            for entry in entries(model, tokens):
                if entry.op in known:
                    groups.setdefault((entry.op, group(entry.dtype)), {})[entry] = None
    for candidates in groups.values():
        yield sorted(candidates, key=lambda entry: _rank(chosen.seed, entry))


def _models(name: str) -> Iterator[Model]:
    suites = by_suite()
    for key in suites if name == ALL else (name,):
        yield from suites[key]


def _rank(seed: int, entry: Entry) -> str:
    """Return a pseudorandom rank that depends only on the seed and the entry."""
    return hashlib.sha256(f"{seed} {entry}".encode()).hexdigest()
