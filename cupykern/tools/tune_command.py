"""`cupykern tune` around tuning: tables, and the built-in rows of the package."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ..op import Call, Op
from ..runtime import store
from ..targets import Target
from ..tuning import protocol, winners
from ..tuning.sweep import first_request
from ..tuning.trials import Trial, short_names
from . import estimates, records
from .bench import Task
from .options import Failure, write_json
from .sweep_command import show as show_ranking
from .tables import number, print_table, progress
from .trace import read


class _Counter:
    """Advances a progress bar by every trial except final ones, which are repetitions."""

    def __init__(self, advance: Callable[[], object]):
        self._advance = advance

    def __call__(self, trial: Trial) -> None:
        if not trial.final:
            self._advance()


def run(
    tasks: Sequence[Task],
    target: Target,
    rep_ms: float,
    jobs: int,
    seed: int,
    wait: bool,
    json_path: str | None = None,
) -> int:
    """Tune the problems; return the exit code.  json_path: for kept rows and all trials."""
    settings = replace(winners.SETTINGS, rep_ms=rep_ms, jobs=jobs, seed=seed)
    failed = 0
    document = {**records.header("tune", target), "kept": {}, "trials": []}
    try:
        with protocol.lock(wait):
            for process in protocol.other_processes(target):
                click.echo(f"warning: {process} is on the GPU too", err=True)
            for task in tasks:
                call = task.op.inputs(task.problem, seed, target.xp)
                request = first_request(task.op, call)
                if request is None:
                    click.echo(f"{task.op.name} {task.problem}: asks for no config")
                    continue
                label = f"{task.op.name} {'x'.join(map(str, task.shape))} {task.dtype}"
                _say_how_long(label, task.op, call, request.configs(), target, jobs, rep_ms)
                with progress(len(request.configs()), label) as advance:
                    try:
                        ranked, best = winners.tune_request(
                            *(task.op, call, request, target, settings, task.shape, task.dtype),
                            _Counter(advance),
                        )
                    except RuntimeError as error:
                        click.echo(f"{label}: {error}")
                        failed += 1
                        continue
                document["kept"][request.key] = store.rows()[request.key]
                document["trials"] += [asdict(trial) for trial in ranked]
                show_ranking(ranked, settings.top, target)
                click.echo(f"kept: {best.config}{' (default)' if best.default else ''}")
    finally:  # also after Ctrl-C: rows stored so far stay
        write_json(json_path, document)
    return 1 if failed else 0


def _say_how_long(
    label: str,
    op: Op,
    call: Call,
    configs: Sequence[Any],
    target: Target,
    jobs: int,
    rep_ms: float,
) -> None:
    seconds, slowdowns = 0.0, []
    if target.name == "host":  # the call is compiled: first_request has run it once
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            op.run(*call.args, **call.kwargs)
            times.append(time.perf_counter() - begin)
        seconds = sorted(times)[1]
        slowdowns = estimates.slowdowns(op, call, configs)
    estimate = estimates.of_tune(len(configs), target.name, jobs, rep_ms, seconds, slowdowns)
    click.echo(f"{label}: {estimate}", err=True)


def show(op: Op | None) -> int:
    """Print the rows of the store."""
    rows = store.rows()
    names = short_names([row["config"] for row in rows.values()])
    print_table(
        ("call", "config", "us", "default / this"),
        (
            (
                key,
                names[row["config"]],
                number(row.get("median_us")),
                "-"
                if not (row.get("default_us") and row.get("median_us"))
                else f"{row['default_us'] / row['median_us']:.3f}x",
            )
            for key, row in rows.items()
            if op is None or row.get("op") == op.name
        ),
        f"{store.path()}: {len(rows)} tuned configs",
    )
    return 0


def forget(op: Op | None) -> int:
    removed = store.forget(None if op is None else op.name)
    click.echo(f"{store.path()}: {removed} tuned configs removed")
    return 0


def write_built_in(paths: Iterable[Path]) -> int:
    """Rewrite cupykern/tuned.json, the built-in tuned configs, from sweeps."""
    trials = []
    for path in paths:
        try:
            header, found = read(path)
        except ValueError as error:
            raise Failure(str(error)) from None
        if header["target"] == "host":
            raise Failure(f"{path} is host emulation: its times say nothing about a GPU")
        trials += found
    worth = winners.write_built_in(trials)
    if worth.rows:
        print_table(
            ("call", "config", "us", "default / this"),
            (
                (key, row["config"], number(row["median_us"]),
                 f"{row['default_us'] / row['median_us']:.3f}x")
                for key, row in worth.rows.items()
            ),
        )  # fmt: skip
    for count, what in (
        (
            worth.default,
            f"whose default config is the best, or less than {1 - winners.GAIN:.0%} behind",
        ),
        (worth.wrong, "whose default config is not right"),
        (worth.unasked, "that ask for no tuned config"),
    ):
        if count:
            click.echo(f"problems {what}: {count}")
    click.echo(f"{store.BUILT_IN}: {len(worth.rows)} configs")
    return 0
