"""`check --history`: results must not depend on earlier calls."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from typing import NamedTuple

import click

from .. import targets
from ..kernels import Variant
from ..op import Op, RandomDraw
from ..targets import Target
from ..tuning.compile_ahead import compile_ahead
from . import records
from .history import Call, Machine, draw_sequence, names_of, run_sequences, variants_of
from .options import write_json
from .tables import Counted, progress

_MOST_SEEN_AHEAD = 4000  # calls whose variants are compiled ahead
_CHUNK = 100  # sequences per task of a process
_MOST_PROCESSES = 16  # each takes half a gigabyte of GPU memory


class _Found(NamedTuple):
    """Results of a chunk.

    different: hashes of the calls that ran alone in it; refused: those with a legal error.
    """

    sequences: int
    calls: int
    failures: tuple[str, ...]
    different: frozenset[int]
    refused: frozenset[int]


def check_history(
    ops: list[Op], where: Target, sequences: int, seed: int, jobs: int, json_path: str | None
) -> int:
    """Run sequences of calls in up to `jobs` processes; return the exit code."""
    names, large = names_of(ops), where.name != "host"
    ahead = Counted(_variants(Machine(where), names, sequences, seed, large))
    with progress(lambda: ahead.total, "compile") as advance:
        for variant, *_ in compile_ahead(where, ahead, jobs):
            advance(variant.kernel)
    calls, failures = 0, []
    different: set[int] = set()
    refused: set[int] = set()
    with progress(sequences, "history") as advance:
        for found in _chunks(where, names, sequences, seed, min(jobs, _MOST_PROCESSES)):
            calls += found.calls
            different |= found.different
            refused |= found.refused
            for _ in range(found.sequences):
                advance("")
            for failure in found.failures:
                failures.append(failure)
                click.echo(f"{failure}\n")
    click.echo(
        f"{where.name} ({where.arch}), seed {seed}: {sequences} sequences of {calls} calls, "
        f"{len(different)} different ones, {len(refused)} of them refused; {len(failures)} failures"
    )
    document = {
        "seed": seed,
        "functions": list(names),
        "sequences": sequences,
        "calls": calls,
        "different": len(different),
        "refused": len(refused),
        "failures": failures,
    }
    write_json(json_path, {**records.header("history", where), **document})
    return 1 if failures else 0


def _chunks(
    where: Target, names: tuple[str, ...], sequences: int, seed: int, jobs: int
) -> Iterator[_Found]:
    """Run all sequences in chunks; sequence i is drawn from seed + i."""
    tasks = [
        (where.name, names, min(_CHUNK, sequences - first), seed + first)
        for first in range(0, sequences, _CHUNK)
    ]
    if jobs == 1 or len(tasks) == 1 or where.name == "host":  # host settings are per process
        yield from (_run(*task) for task in tasks)
        return
    with ProcessPoolExecutor(
        min(jobs, len(tasks)),
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    ) as pool:
        try:
            for task in as_completed([pool.submit(_run, *task) for task in tasks]):
                yield task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@cache
def _machine(target: str) -> Machine:
    """Return the process's machine, which keeps the outcomes of calls that ran alone."""
    return Machine(targets.get(target))


def _run(target: str, names: tuple[str, ...], sequences: int, seed: int) -> _Found:
    machine, large = _machine(target), target != "host"
    calls, failures, known = 0, [], len(machine.outcomes())
    if machine.broken:  # by an earlier chunk, which reported it
        return _Found(0, 0, (), frozenset(), frozenset())
    for run in run_sequences(machine, names, sequences, seed, large):
        calls += run.calls
        if run.failure is not None:
            failures.append(str(run.failure))
    outcomes = {_digest(call): outcome for call, outcome in machine.outcomes()[known:]}
    refused = frozenset(h for h, outcome in outcomes.items() if outcome.error is not None)
    return _Found(sequences, calls, tuple(failures), frozenset(outcomes), refused)


def _digest(call: Call) -> int:
    """Hash a call; the hash is equal in all processes."""
    return int.from_bytes(hashlib.blake2b(repr(call).encode(), digest_size=8).digest(), "little")


def _variants(
    machine: Machine, names: tuple[str, ...], sequences: int, seed: int, large: bool
) -> Iterator[Variant]:
    """Yield the variants of the first calls, each once."""
    known: set[Variant] = set()
    seen: set[Call] = set()
    for number in range(sequences):
        for call in draw_sequence(RandomDraw(seed + number), names, large):
            if call in seen or len(seen) == _MOST_SEEN_AHEAD:
                continue
            seen.add(call)
            new = variants_of(machine, call) - known
            known |= new
            yield from sorted(new, key=str)
