"""What `cupykern bench` does around the protocol: peers, progress, the table and the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..peers import Peer, all_peers
from ..targets import Target
from . import baseline, doctor, protocol, results
from .bench import Settings, Task, host_times, run
from .tables import number, one_line, print_table, progress, to_json
from .timing import clock_of


def find_peers(names: Sequence[str], target: str) -> list[Peer]:
    """The named peers that can be measured here; says on stderr which cannot.

    "all": every one.  Raises click.UsageError for unknown names, and for the host target.
    """
    known = all_peers()
    for name in names:
        if name != "all" and name not in known:
            raise click.UsageError(f"unknown peer {name!r}; peers are all, {', '.join(known)}")
    if names and target == "host":
        raise click.UsageError("--against needs a GPU: peers are not measured on the host target")
    peers = []
    for name in known if "all" in names else dict.fromkeys(names):
        reason = known[name].missing()
        if reason is None:
            peers.append(known[name])
        else:
            click.echo(f"peer {name}: {reason}", err=True)
    return peers


@dataclass(frozen=True)
class Outputs:
    """Files to write, and what to compare with; None: not asked for."""

    json: str | None = None
    csv: str | None = None
    plot: str | None = None
    baseline: dict[tuple[Any, ...], dict[str, Any]] | None = None
    repeats: int = 1


def bench(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    peers: Sequence[Peer],
    outputs: Outputs,
) -> int:
    """Bench, print and write; returns the exit code.  On Ctrl-C the rows so far are written."""
    runs: dict[int, list[results.Row]] = {}
    host_time_us: dict[str, dict[str, float]] = {}
    state: dict[str, Any] = {"before": doctor.gpu_state(target)}
    interrupted = False
    state["other_processes"] = others = protocol.other_processes(target)
    for process in others:
        click.echo(f"warning: {process} is on the GPU too: its work disturbs these times", err=True)
    try:
        clock = clock_of(target)
        ops = {task.op.name: task.op for task in tasks}.values()
        host_time_us = host_times(ops, target, clock, settings.seed)
        with (
            progress(len(tasks) * outputs.repeats, "bench") as advance,
            protocol.Monitor(target) as monitor,
        ):
            for _ in range(outputs.repeats):  # the rows in turns, so that each sees every drift
                for i, row in enumerate(run(tasks, target, clock, settings, peers, monitor)):
                    runs.setdefault(i, []).append(row)
                    advance(f"{row.op} {'x'.join(map(str, row.shape))} {row.dtype}")
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:  # also of a run that something else ended
        rows = [results.merged(same) for same in runs.values()]
        if rows or not interrupted:
            _print(rows, target, host_time_us)
        state["after"] = doctor.gpu_state(target)
        if outputs.json is not None:
            document = results.document(
                rows, target, settings.record(target), host_time_us, state, interrupted
            )
            Path(outputs.json).write_text(to_json(document), encoding="utf-8")
        if outputs.csv is not None:
            results.write_csv(rows, outputs.csv)
    if outputs.plot is not None:
        from .plot import plot_rows

        plot_rows(rows, outputs.plot)
    worse = outputs.baseline is not None and _print_verdicts(rows, outputs.baseline)
    return 1 if worse or not all(row.ok for row in rows) else 0


def _print_verdicts(
    rows: Sequence[results.Row], before: dict[tuple[Any, ...], dict[str, Any]]
) -> bool:
    """Print a verdict for each row; whether one is a regression."""
    found = baseline.verdicts(rows, before)
    print_table(
        ("op", "shape", "dtype", "time now / before", "spread of a run", "p", "verdict"),
        (
            (
                *(row.op, "x".join(map(str, row.shape)), row.dtype),
                "-" if verdict.change is None else f"{1 + verdict.change:.4f}",
                "-" if verdict.spread is None else f"{100 * verdict.spread:.2f}%",
                number(verdict.p),
                verdict.word,
            )
            for row, verdict in zip(rows, found, strict=True)
        ),
        "keep: faster; reject: slower, or wrong; noise: neither, by at least "
        f"{100 * baseline.SMALLEST:g}% and beyond the spread",
    )
    return any(verdict.word == "reject" for verdict in found)


def _print(
    rows: Sequence[results.Row], target: Target, host_time_us: dict[str, dict[str, float]]
) -> None:
    device = doctor.machine(target)["device"]
    title = f"{target.name} ({target.arch}): {device}"
    if target.name == "host":
        title = f"host emulation: times are not GPU times.  {device}"
    print_table(results.COLUMNS, results.table_rows(rows), title)
    for row in rows:
        for result in row.results:
            shape = "x".join(map(str, row.shape))
            if result.note is not None:
                note = one_line(result.note)
                click.echo(f"{row.op} {shape} {row.dtype} {result.name}: {note}")
            if result.parts_us is not None:
                parts = ", ".join(f"{name} {number(us)}" for name, us in result.parts_us.items())
                click.echo(f"{row.op} {shape} {row.dtype} {result.name}, us: {parts}")
        if row.clocks is not None and row.clocks["fell"]:
            click.echo(
                f"{row.op} {'x'.join(map(str, row.shape))} {row.dtype}: the clocks fell to "
                f"{row.clocks['sm_mhz']:.0f} MHz of {row.clocks['best_sm_mhz']:.0f} "
                f"({row.clocks['temperature_c']:.0f} C, {row.clocks['power_w']:.0f} W)"
            )
    for op, times in host_time_us.items():
        figures = ", ".join(f"{name} {number(us)}" for name, us in times.items())
        click.echo(f"host time of a warm call of {op}, us: {figures}")
