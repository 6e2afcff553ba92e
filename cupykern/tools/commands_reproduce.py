"""The command that repeats all measurements: reproduce."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from .. import targets
from .options import parse_names


@click.command()
@click.option("--only", "names", callback=parse_names, metavar="STEPS",
              help="With commas.  Default: all.  A wrong name lists them.")  # fmt: skip
@click.option("--results", type=click.Path(file_okay=False), default="results", show_default=True,
              help="The folder to write to.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only print the commands and about how long each is.")
def reproduce(names: tuple[str, ...] | None, results: str, dry_run: bool) -> int:
    """Measure what is in results/ again, and write the tables.

    Runs one command after another, in a checkout with a GPU: checks, benchmarks, suites, profiles,
    then `report`.  Prints each command first.  Skips steps that need more GPUs than there are.  A
    failed step does not stop the others.  The exit code is 1 if a step failed, or a step of --only
    was skipped.

    \b
    Example: cupykern reproduce --dry-run
    Example: cupykern reproduce --only softmax,matmul,report
    """
    from . import reproduce as steps_of

    try:
        steps = steps_of.chosen(names or ())
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    here = 0 if dry_run else count_gpus()
    if not dry_run:
        Path(results).mkdir(parents=True, exist_ok=True)
    failed, left_out = [], []
    for step in steps:
        if step.gpus > here and not dry_run:
            left_out.append(step.name)
            continue
        needs = f", {step.gpus} GPUs" if step.gpus > 1 else "" if step.gpus else ", no GPU"
        click.echo(f"# {step.name}: about {step.minutes} min{needs}")
        click.echo(shlex.join(step.command(results)))
        if not dry_run and steps_of.run(step, results):
            failed.append(step.name)
    if dry_run:
        minutes = sum(step.minutes for step in steps)
        click.echo(f"# {len(steps)} commands, about {minutes // 60} h {minutes % 60} min")
    for what, found in (("need more GPUs", left_out), ("failed", failed)):
        if found:
            click.echo(f"{what}: {', '.join(found)}", err=True)
    return 1 if failed or (names and left_out) else 0


def count_gpus() -> int:
    target = targets.get()
    return 0 if target.name == "host" else int(target.xp.cuda.runtime.getDeviceCount())


COMMANDS = (reproduce,)
