"""The rows of a suite: a seeded sample of its shapes that fit into memory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...op import Op, Work
from ..bench import Task
from .models import Model, by_suite
from .shapes import RANDOM, Entry, entries, random_entries, token_counts

ALL = "models"
ROWS = {"cuda": 12, "hip": 12, "host": 1}  # of each op and dtype
_RANDOM = re.compile(r"random:(\d{1,9}):([1-9]\d{0,4})")
_EPILOGUE = {"bias", "relu", "gelu", "gelu_tanh", "silu"}  # options of products that make no group
# Of an 80 GB GPU.  The reference takes 16 bytes for each 8-bit number that it reads (its value and
# its magnitude in FP64), and each of up to 8 implementations keeps its output.
_MEMORY = 64e9
_HOST_BYTES, _HOST_FLOPS = 2**22, 2**25  # the host target emulates: about a second a row
_MOST_DRAWN = 10000
_MOST_EXPONENT = {"host": 9}  # of 2: random sizes


@dataclass(frozen=True)
class Suite:
    """name: "models", a model's, or "random:SEED:COUNT".  rows: of each op and dtype, at most.

    seed: which of the shapes.  A random suite has its own seed and count.
    """

    name: str
    rows: int
    seed: int


def suite(name: str, rows: int | None, seed: int, target: str) -> Suite:
    """rows: None for the default.  Raises ValueError for a name that is none."""
    if drawn := _RANDOM.fullmatch(name):
        return Suite(name, int(drawn[2]), int(drawn[1]))
    if name != ALL and name not in by_suite():
        raise ValueError(
            f"unknown suite {name!r}; suites are {ALL}, {', '.join(by_suite())}, random:SEED:COUNT"
        )
    return Suite(name, ROWS[target] if rows is None else rows, seed)


def group(dtype: str) -> str:
    """The dtype that a row is counted under: without the epilogue of a product."""
    name, _, text = dtype.partition(":")
    kept = [option for option in text.split("+") if option and option not in _EPILOGUE]
    return ":".join((name, *(["+".join(kept)] if kept else [])))


def fits(work: Work, target: str) -> bool:
    """Whether a row can be verified and timed: beside peers on 80 GB, or in 1 s on the host."""
    if target == "host":
        return work.bytes_read + work.bytes_written <= _HOST_BYTES and work.flops <= _HOST_FLOPS
    return 16 * work.bytes_read + 8 * work.bytes_written <= _MEMORY


def tasks(chosen: Suite, ops: Iterable[Op], target: str) -> list[Task]:
    """The rows in a seeded order that mixes ops: an interrupted run has measured a sample too.

    Which rows a group has depends on the suite, the seed and the target alone, and a larger `rows`
    adds to them.
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
    """The candidates of each op and dtype, in the order in which they are taken."""
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
    """A random number of the entry: it does not depend on what else there is."""
    return hashlib.sha256(f"{seed} {entry}".encode()).hexdigest()
