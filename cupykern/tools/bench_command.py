"""`cupykern bench` around the protocol: peers, progress, the table and the files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ..peers import Peer, all_peers
from ..targets import Target
from ..tuning import protocol
from ..tuning.compile_ahead import compile_ahead
from ..tuning.timing import Clock, clock_of
from . import baseline, doctor, results
from .bench import Settings, Task, host_seconds, host_times, run, variants
from .stored import to_json
from .suite import summary
from .suite.choice import Suite
from .tables import number, one_line, print_table, progress

_SHORT_S = 5


def find_peers(
    names: Sequence[str], target: str, known: dict[str, Peer] | None = None
) -> list[Peer]:
    """Return the named peers that are available; report the missing ones on stderr.

    "all": every peer of `known`, by default the peers of ops.  Raises click.UsageError for unknown
    names, and for the host target.
    """
    known = all_peers() if known is None else known
    for name in names:
        if name != "all" and name not in known:
            raise click.UsageError(f"unknown library {name!r}; known are all, {', '.join(known)}")
    if names and target == "host":
        raise click.UsageError(
            "--against needs a GPU: libraries are not measured on the host target"
        )
    peers = []
    for name in known if "all" in names else dict.fromkeys(names):
        reason = known[name].missing()
        if reason is None:
            peers.append(known[name])
        else:
            click.echo(f"library {name}: {reason}", err=True)
    return peers


@dataclass(frozen=True)
class Baseline:
    """An earlier benchmark: its file's name, and the rows of baseline.load."""

    path: str
    rows: dict[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Outputs:
    """Files to write and the baseline to compare with; None: not requested.

    repeats: runs of all rows; with a baseline the maximum, and None for the default looks.
    suite: the suite of the rows; its summary replaces the table of all rows.
    """

    json: str | None = None
    csv: str | None = None
    plot: str | None = None
    baseline: Baseline | None = None
    repeats: int | None = None
    suite: Suite | None = None


def bench(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    peers: Sequence[Peer],
    outputs: Outputs,
) -> int:
    """Bench, print and write; return the exit code.  On Ctrl-C, write the rows so far."""
    runs: list[list[results.Row]] = [[] for _ in tasks]
    found: list[baseline.Verdict] | None = None
    host_time_us: dict[str, dict[str, float]] = {}
    state: dict[str, Any] = {"before": doctor.gpu_state(target)}
    interrupted = False
    state["other_processes"] = others = protocol.other_processes(target)
    for process in others:
        click.echo(f"warning: {process} is on the GPU too: its work disturbs these times", err=True)
    try:
        _compile(tasks, target, settings, outputs.repeats or 1)
        clock = clock_of(target)
        ops = {task.op.name: task.op for task in tasks}.values()
        host_time_us = host_times(ops, target, clock, settings.seed)
        with protocol.Monitor(target) as monitor:
            for now in _passes(tasks, target, clock, settings, peers, monitor, outputs, runs):
                found = now
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:  # also after an error or Ctrl-C
        rows = [results.merged(same) for same in runs if same]
        if rows and outputs.suite is not None:
            _print_suite(outputs.suite, rows, target, len(tasks))
        elif rows:
            print_rows(rows, target, host_time_us)
        state["after"] = doctor.gpu_state(target)
        if outputs.json is not None:
            document = results.document(
                rows, target, settings.record(target), host_time_us, state, interrupted
            )
            if outputs.suite is not None:
                document |= _of_suite(outputs.suite, rows)
            if outputs.baseline is not None:
                document |= _comparison(outputs.baseline, found)
            Path(outputs.json).write_text(to_json(document), encoding="utf-8")
        if outputs.csv is not None:
            results.write_csv(rows, outputs.csv)
    if outputs.plot is not None:
        from .plot import plot_rows

        if not plot_rows(rows, outputs.plot):
            click.echo(f"{outputs.plot}: there is nothing to draw", err=True)
    worse = found is not None and _print_verdicts(rows, found)
    return 1 if worse or not all(row.ok for row in rows) else 0


def _compile(tasks: Sequence[Task], target: Target, settings: Settings, repeats: int) -> None:
    """Compile the tasks' variants in parallel; the row of a variant that fails reports it."""
    todo, jobs = variants(tasks, target), os.cpu_count() or 1
    if target.name == "host":
        compiling, rows = host_seconds(tasks, len(todo), jobs, settings)
        seconds = compiling + repeats * rows
        if seconds > _SHORT_S:
            click.echo(
                f"{len(tasks)} rows: about {seconds:.0f} s on {jobs} idle cores, of which the "
                f"first run compiles {len(todo)} kernels for {compiling:.0f} s",
                err=True,
            )
    with progress(len(todo), "compile") as advance:
        for variant, *_ in compile_ahead(target, todo, jobs):
            advance(variant.kernel)


def _passes(
    tasks: Sequence[Task],
    target: Target,
    clock: Clock,
    settings: Settings,
    peers: Sequence[Peer],
    monitor: protocol.Monitor,
    outputs: Outputs,
    runs: list[list[results.Row]],
) -> Iterator[list[baseline.Verdict]]:
    """Run the rows in turns, so that all rows see the same drift, and append them to `runs`.

    With a baseline, yield the verdicts at each look and go on with the undecided rows.
    """
    compared = outputs.baseline
    at = (outputs.repeats or 1,) if compared is None else baseline.looks(outputs.repeats)
    open_rows = list(range(len(tasks)))
    place = random.Random(settings.seed) if at[-1] > 1 else None
    for begin, end in zip((0, *at), at, strict=False):
        with progress((end - begin) * len(open_rows), "bench") as advance:
            for _ in range(begin, end):
                todo = [tasks[i] for i in open_rows]
                fresh = run(todo, target, clock, settings, peers, monitor, place)
                for i, row in zip(open_rows, fresh, strict=True):
                    runs[i].append(row)
                    advance(f"{row.op} {'x'.join(map(str, row.shape))} {row.dtype}")
        if compared is not None:
            rows = [results.merged(same) for same in runs]
            verdicts = baseline.verdicts(rows, compared.rows, len(at), target.name == "host")
            yield verdicts
            open_rows = [i for i in open_rows if not verdicts[i].decided]
            if not open_rows:
                return


def _of_suite(suite: Suite, rows: Sequence[results.Row]) -> dict[str, Any]:
    """Return the additional fields of a suite's document."""
    lines = summary.lines(asdict(row) for row in rows)
    return {
        "kind": "suite",
        "suite": {**asdict(suite), "behind_by": summary.BEHIND},
        "summary": [asdict(line) for line in lines],
    }


def _comparison(compared: Baseline, found: Sequence[baseline.Verdict] | None) -> dict[str, Any]:
    """Return the additional fields of a comparison's document.

    found: None if no look was reached.
    """
    return {
        "kind": "comparison",
        "baseline": compared.path,
        "limits": {
            "false_alarms": baseline.FALSE_ALARMS,
            "margin": baseline.MARGIN,
            "found": baseline.FOUND,
        },
        "verdicts": None if found is None else [asdict(verdict) for verdict in found],
    }


def _print_verdicts(rows: Sequence[results.Row], found: Sequence[baseline.Verdict]) -> bool:
    """Print a verdict for each row; return whether any row is rejected."""
    print_table(
        ("op", "shape", "dtype", "runs", "time now / before", "spread of a run", "p",
         "would reject from", "verdict"),
        (
            (
                *(row.op, "x".join(map(str, row.shape)), row.dtype),
                "-" if verdict.runs is None else f"{verdict.runs[0]} / {verdict.runs[1]}",
                "-" if verdict.change is None else f"{1 + verdict.change:.4f}",
                "-" if verdict.spread is None else f"{100 * verdict.spread:.2f}%",
                number(verdict.p),
                "-" if verdict.seen is None else f"{100 * verdict.seen:.1f}%",
                verdict.word if verdict.decided else f"{verdict.word} (undecided)",
            )
            for row, verdict in zip(rows, found, strict=True)
        ),
        f"keep: faster, reject: slower, by more than {100 * baseline.MARGIN:g}% and beyond the "
        f"spread; or wrong.  noise: neither",
    )  # fmt: skip
    few = [verdict.runs[1] for verdict in found if not verdict.decided and verdict.runs]
    if few and min(few) < baseline.LOOKS[1]:
        click.echo(
            f"the baseline has {min(few)} runs of a row: measure it with --repeats "
            f"{baseline.LOOKS[2]} to decide about smaller changes"
        )
    return any(verdict.word == "reject" for verdict in found)


def _print_suite(suite: Suite, rows: Sequence[results.Row], target: Target, num_tasks: int) -> None:
    """Print a line per op and dtype, the slowest rows, and the reasons for wrong results."""
    lines = summary.lines(asdict(row) for row in rows)
    measured = f"{len(rows)} rows" if len(rows) == num_tasks else f"{len(rows)} of {num_tasks} rows"
    title = f"suite {suite.name}, seed {suite.seed}, {measured}.  {title_of(target)}"
    print_table(summary.HEAD, map(summary.cells, lines), title)
    for line in lines:
        if line.furthest:
            behind = "; ".join(map(str, line.furthest))
            click.echo(f"{line.op} {line.dtype}, furthest behind: {behind}")
    for row in rows:
        if not row.ok:
            shape, note = "x".join(map(str, row.shape)), row.results[0].note or "is wrong"
            click.echo(f"{row.op} {shape} {row.dtype}: {one_line(note)}")


def title_of(target: Target) -> str:
    device = doctor.machine(target)["device"]
    if target.name == "host":
        return f"host emulation: times are not GPU times, but CPU times.  {device}"
    return f"{target.name} ({target.arch}): {device}"


def print_notes(rows: Sequence[results.Row]) -> None:
    """Print why results failed, one line each."""
    for row in rows:
        for result in row.results:
            if result.note is not None:
                click.echo(f"{row.problem}, {result.name}: {one_line(result.note)}")


def print_rows(
    rows: Sequence[results.Row], target: Target, host_time_us: dict[str, dict[str, float]]
) -> None:
    columns: tuple[str, ...] = results.COLUMNS
    cells = list(results.table_rows(rows))
    if (
        target.name == "host"
    ):  # no peers, and times of little meaning: the rest is in --json and --csv
        kept = [columns.index(name) for name in results.HOST_COLUMNS]
        columns = results.HOST_COLUMNS
        cells = [tuple(row[i] for i in kept) for row in cells]
    print_table(columns, cells, title_of(target))
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
        figures = ", ".join(
            f"{name} {number(us) if isinstance(us, float) else us}" for name, us in times.items()
        )
        click.echo(f"host time of a warm call of {op}, us: {figures}")
