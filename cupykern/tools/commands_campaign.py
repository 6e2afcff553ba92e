"""The command that runs the campaign."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from .. import OPS, targets
from .options import json_option, target_option
from .tables import number, one_line

_MOST_JOBS = 16  # each takes half a gigabyte of GPU memory
_SHOWN_FAILURES = 5  # per part
_LINE_S = 10.0
PARTS = ("sanitizers", "large", "streams", "repeats", "bad_calls", "products", "cases")


@click.command()
@target_option
@click.option("--only", multiple=True, type=click.Choice(PARTS), metavar="PART",
              help=f"Of {', '.join(PARTS)}; may be given again.  Default: all.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=min(os.cpu_count() or 1, _MOST_JOBS),
              show_default="all cores, at most 16", help="Processes.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=540,
              show_default=True, help="Then it ends, and what was done is on record.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@json_option
def campaign(
    target: str | None,
    only: tuple[str, ...],
    jobs: int,
    seconds: float,
    seed: int,
    json_path: str | None,
) -> int:
    """Run many seeded checks of all ops, in several processes.

    \b
    cases       random calls against FP64, like check
    products    integer products, which are exact
    repeats     repeated calls give the same bits, in any order and on any stream
    streams     threads on their own streams get these bits too
    large       arrays of more than 2^31 elements
    bad_calls   illegal arguments raise typed errors and leave memory untouched
    sanitizers  compute-sanitizer's four tools over each kernel

    On the host target each part has few checks.  The JSON is written while the campaign runs.
    Exits with 1 if anything failed.

    \b
    Example: cupykern campaign --seconds 540 --json results/campaign.json
    """
    from .campaign.parts import PARTS as ALL
    from .campaign.runner import Campaign

    where = targets.get(target)
    chosen = [part for part in ALL if part.name in (only or PARTS)]
    path = None if json_path is None else Path(json_path)
    run = Campaign(chosen, OPS, where, seed, path)
    lines = _Lines(run)
    try:
        run.run(jobs, seconds, _tell, lines)
    finally:
        click.echo(_verdict(run))
    return 1 if run.failed else 0


class _Lines:
    """Prints each part's progress to stderr from time to time."""

    def __init__(self, run: Any):
        self._run, self._last = run, time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last < _LINE_S:
            return
        self._last = time.monotonic()
        parts = ", ".join(
            f"{p.part.name} {p.finished}/{p.wanted}"
            for p in self._run.progress
            if p.begun is not None and not p.done
        )
        click.echo(f"{self._run.seconds:.0f} s: {parts}; {self._run.failed} failed", err=True)


def _tell(progress: Any) -> None:
    tally = progress.tally
    line = f"{progress.part.name}: {progress.state}, {tally.done} done, {tally.failed} failed"
    for figure, name in (
        *(("error_over_bound", "error/bound"), ("rms_ratio", "rms/expected")),
        ("bias_ratio", "bias/limit"),
    ):
        worst = [getattr(row, figure) for row in tally.rows.values()]
        worst = [ratio for ratio in worst if ratio is not None]
        if worst:
            line += f", {name} {number(max(worst))}"
    click.echo(f"{line}, {progress.seconds:.0f} s")
    for note in tally.notes:
        click.echo(f"  {note}")
    for failure in tally.failures[:_SHOWN_FAILURES]:
        where = f"{failure['op']} {failure['dtype']}, seed {failure['seed']}"
        click.echo(f"  {where}: {one_line(failure['error'])}\n    {failure['problem']}")
    if tally.failed > _SHOWN_FAILURES:
        click.echo(f"  ... of {tally.failed} failures")


def _verdict(run: Any) -> str:
    done = sum(progress.tally.done for progress in run.progress)
    cut = [p.part.name for p in run.progress if p.state != "finished"]
    ending = f"; not finished: {', '.join(cut)}" if cut else ""
    return f"campaign: {run.failed} of {done} checks failed in {run.seconds:.0f} s{ending}"


COMMANDS = (campaign,)
