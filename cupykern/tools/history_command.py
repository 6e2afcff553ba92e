"""`check --history`: results must not depend on earlier calls."""

from __future__ import annotations

from collections.abc import Iterator

import click

from kernels_cu import Variant

from ..op import Op, RandomDraw
from ..targets import Target
from ..tuning.compile_ahead import compile_ahead
from . import records
from .history import Call, Machine, draw_sequence, names_of, run_sequences, variants_of
from .options import write_json
from .tables import progress

_MOST_SEEN_AHEAD = 4000  # calls whose variants are compiled before


def check_history(
    ops: list[Op], where: Target, sequences: int, seed: int, jobs: int, json_path: str | None
) -> int:
    """Run sequences of calls; the exit code."""
    machine, names, large = Machine(where), names_of(ops), where.name != "host"
    with progress(None, "compile") as advance:
        ahead = _variants(machine, names, sequences, seed, large)
        for variant, *_ in compile_ahead(where, ahead, jobs):
            advance(variant.kernel)
    calls, failures = 0, []
    with progress(sequences, "history") as advance:
        for run in run_sequences(machine, names, sequences, seed, large):
            calls += run.calls
            for _ in range(run.sequences):
                advance("")
            if run.failure is not None:
                failures.append(str(run.failure))
                click.echo(f"{run.failure}\n")
    refused = machine.num_refused
    click.echo(
        f"{where.name} ({where.arch}), seed {seed}: {sequences} sequences of {calls} calls, "
        f"{machine.num_alone} different ones, {refused} of them refused; {len(failures)} failures"
    )
    found = {
        "seed": seed,
        "functions": list(names),
        "sequences": sequences,
        "calls": calls,
        "different": machine.num_alone,
        "refused": refused,
        "failures": failures,
    }
    write_json(json_path, {**records.header("history", where), **found})
    return 1 if failures else 0


def _variants(
    machine: Machine, names: tuple[str, ...], sequences: int, seed: int, large: bool
) -> Iterator[Variant]:
    """Of the first calls, each variant once."""
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
