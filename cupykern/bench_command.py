"""What `cupykern bench` does around the protocol: peers, progress, the table and the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from . import doctor, results
from .bench import Settings, Task, host_times, run
from .peers import Peer, all_peers
from .tables import number, one_line, print_table, progress, to_json
from .targets import Target
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


def bench(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    peers: Sequence[Peer],
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
) -> int:
    """Bench, print and write; returns the exit code.  On Ctrl-C the rows so far are written."""
    rows: list[results.Row] = []
    host_time_us: dict[str, dict[str, float]] = {}
    state = {"before": doctor.gpu_state(target)}
    interrupted = False
    try:
        clock = clock_of(target)
        ops = {task.op.name: task.op for task in tasks}.values()
        host_time_us = host_times(ops, target, clock, settings.seed)
        with progress(len(tasks), "bench") as advance:
            for row in run(tasks, target, clock, settings, peers):
                rows.append(row)
                advance(f"{row.op} {'x'.join(map(str, row.shape))} {row.dtype}")
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:  # also of a run that something else ended
        if rows or not interrupted:
            _print(rows, target, host_time_us)
        state["after"] = doctor.gpu_state(target)
        if json_path is not None:
            document = results.document(
                rows, target, settings.record(target), host_time_us, state, interrupted
            )
            Path(json_path).write_text(to_json(document), encoding="utf-8")
        if csv_path is not None:
            results.write_csv(rows, csv_path)
    if plot_path is not None:
        from .plot import plot_rows

        plot_rows(rows, plot_path)
    return 0 if all(row.ok for row in rows) else 1


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
            if result.note is not None:
                shape = "x".join(map(str, row.shape))
                note = one_line(result.note)
                click.echo(f"{row.op} {shape} {row.dtype} {result.name}: {note}")
    for op, times in host_time_us.items():
        figures = ", ".join(f"{name} {number(us)}" for name, us in times.items())
        click.echo(f"host time of a warm call of {op}, us: {figures}")
