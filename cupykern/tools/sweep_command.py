"""`cupykern sweep` around sweeps: the trace, a process that can crash, the ranking."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..targets import Target, product_name
from ..tuning import protocol
from ..tuning.sweep import ContextLost, Settings, subject, sweep
from ..tuning.timing import Clock, clock_of
from ..tuning.trials import Trial, by_problem, ranking, short_names
from . import records
from .bench import Task
from .options import Failure
from .processes import environment
from .stored import to_json
from .tables import number, one_line, print_table, progress
from .trace import Trace, document, under_way

_COMPILING = 10  # times the timeout, while no config runs
_ENDING = 3.0  # s
CONTEXT_LOST = 75  # exit code: the remaining configs need a new process


def open_trace(path: Path, target: Target, settings: Settings, resume: bool) -> Trace:
    """Return a new trace, or the one to resume.  Raises Failure."""
    device = product_name(target)
    if resume and path.exists():
        try:
            trace = Trace.load(path)
        except ValueError as error:
            raise Failure(str(error)) from None
        found = trace.header.get("target"), trace.header.get("machine", {}).get("device")
        if found != (target.name, device):
            raise Failure(f"{path} was measured on {found[1]} ({found[0]}), this is {device}")
        return trace
    header = {**records.header("sweep", target), "settings": asdict(settings)}
    try:
        return Trace.new(path, header)
    except FileExistsError:
        raise Failure(f"{path} exists: go on with it (--resume) or remove it") from None


def run(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    grid: dict[str, tuple[Any, ...]],
    trace: Trace,
    outputs: tuple[str | None, str | None],
) -> int:
    """Sweep, print and write (JSON, CSV); return the exit code.  Ctrl-C keeps finished trials."""
    try:
        _sweep(tasks, target, settings, grid, trace)
    except ContextLost as error:
        click.echo(f"the GPU's context is lost: {one_line(str(error))}", err=True)
        return CONTEXT_LOST
    finally:
        _write(trace, *outputs)
    show(trace.trials, settings.top, target)
    return 0 if any(trial.verified for trial in trace.trials) else 1


def _sweep(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    grid: dict[str, tuple[Any, ...]],
    trace: Trace,
) -> None:
    for process in protocol.other_processes(target):
        click.echo(f"warning: {process} is on the GPU too: its work disturbs these times", err=True)
    clock = clock_of(target)
    with protocol.Monitor(target) as monitor:
        _sweep_all(tasks, target, settings, grid, trace, clock, monitor)


def _sweep_all(
    tasks: Sequence[Task],
    target: Target,
    settings: Settings,
    grid: dict[str, tuple[Any, ...]],
    trace: Trace,
    clock: Clock,
    monitor: protocol.Monitor,
) -> None:
    for task in tasks:
        try:
            swept = subject(
                task.op, task.shape, task.dtype, task.problem, target, settings.seed, grid
            )
        except (ValueError, NotImplementedError) as error:
            raise Failure(f"{task.op.name}: {error}") from None
        length = len(swept.candidates)
        label = f"{task.op.name} {'x'.join(map(str, task.shape))} {task.dtype}"
        known = [trial for trial in trace.trials if trial.digest == swept.digest]
        with progress(length, label) as advance:
            for trial in sweep(swept, clock, settings, known, trace.start, monitor):
                trace.add(trial)
                if not trial.final:
                    advance(_outcome(trial))
        if target.name != "host":
            del swept
            target.xp.get_default_memory_pool().free_all_blocks()


def _outcome(trial: Trial) -> str:
    return f"{number(trial.median_us)} us" if trial.reason is None else "failed"


def _write(trace: Trace, json_path: str | None, csv_path: str | None) -> None:
    if json_path is not None:
        text = to_json(document(trace.header, trace.trials))
        Path(json_path).write_text(text, encoding="utf-8")
    if csv_path is not None:
        with open(csv_path, "w", newline="", encoding="utf-8") as file:
            names = list(asdict(trace.trials[0])) if trace.trials else ["op"]
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(asdict(trial) for trial in trace.trials)


def show(trials: Sequence[Trial], top: int, target: Target) -> None:
    """Print the best configs of each problem, and why others failed."""
    where = f"{target.name} ({target.arch}): {product_name(target)}"
    if target.name == "host":
        where = f"host emulation: times are not GPU times, but CPU times.  {where}"
    for name, group in by_problem(trials):
        ranked = ranking(group)
        right = [trial for trial in ranked if trial.reason is None]
        names = short_names([trial.config for trial in ranked])
        best = min((t.median_us for t in right if t.median_us), default=None)
        print_table(
            ("config", "median us", "q20", "q80", "% of the best", "default / this", "registers",
             "local", "shared", "error/bound"),
            (
                (
                    f"{names[trial.config]}{' (default)' if trial.default else ''}",
                    number(trial.median_us, 4),
                    number(trial.q20_us, 4),
                    number(trial.q80_us, 4),
                    "-" if best is None or not trial.median_us
                    else f"{100 * best / trial.median_us:.1f}",
                    "-" if not trial.ratio else f"{1 / trial.ratio:.3f}x",
                    *(
                        "-" if figure is None else figure
                        for figure in (trial.registers, trial.local_bytes, trial.shared_bytes)
                    ),
                    number(trial.error_over_bound),
                )
                for trial in right[:top]
            ),
            f"{' '.join(name)}: the best {min(top, len(right))} of {len(ranked)}.  {where}",
        )  # fmt: skip
        for clocks, together in _by_clocks(right[:top]):
            who = "all of these" if len(together) > 1 else names[together[0].config]
            click.echo(
                f"{who}: the clocks fell to {clocks['sm_mhz']:.0f} of {clocks['best_sm_mhz']:.0f} "
                f"MHz ({clocks['power_w']:.0f} W)"
                + (": timed in turns, so that they compare" if len(together) > 1 else "")
            )
        for trial in ranked:
            if trial.reason is not None:
                click.echo(f"{names[trial.config]}: {one_line(trial.reason)}")


def _by_clocks(trials: Sequence[Trial]) -> list[tuple[dict[str, Any], list[Trial]]]:
    """Group trials whose clocks fell by their clocks: finalists are timed together."""
    found: list[tuple[dict[str, Any], list[Trial]]] = []
    for trial in trials:
        if trial.clocks is None or not trial.clocks["fell"]:
            continue
        same = next((group for clocks, group in found if clocks == trial.clocks), None)
        if same is None:
            found.append((trial.clocks, [trial]))
        else:
            same.append(trial)
    return found


def guard(args: Sequence[str], path: Path, timeout: float) -> int:
    """Run `cupykern sweep ARGS` in a separate process, and restart it with --resume when it fails.

    It fails by a crash, a lost GPU context, or no progress for `timeout` seconds.
    Returns the last exit code.
    """
    program = "import sys; from cupykern.cli import main; sys.exit(main(sys.argv[1:]))"
    again: tuple[str, ...] = ()
    while True:
        command = [sys.executable, "-c", program, "sweep", *args, "--in-process", *again]
        child = subprocess.Popen(command, env=environment())
        reason = _wait(child, path, timeout)
        if reason is None:
            return child.returncode
        if not path.exists():
            return 1
        if child.returncode != CONTEXT_LOST and not Trace.load(path).crashed(reason):
            click.echo(f"the sweep ended before its first config: {reason}", err=True)
            return 1
        click.echo(f"{reason}; going on in a new process", err=True)
        again = ("--resume",)


def _wait(child: subprocess.Popen[bytes], path: Path, timeout: float) -> str | None:
    """Wait for the process; return why it failed, or None."""
    begun = time.time()
    try:
        while child.poll() is None:
            time.sleep(0.05)
            silent = time.time() - max(begun, path.stat().st_mtime if path.exists() else 0)
            # All configs are compiled before the first one runs.
            if silent > timeout and (under_way(path) or silent > _COMPILING * timeout):
                child.kill()
                child.wait()
                return f"no answer in {timeout:g} s"
    except KeyboardInterrupt:
        try:
            child.wait(_ENDING)  # the child got the Ctrl-C too, and reports it
        except subprocess.TimeoutExpired:  # only this process got it
            child.send_signal(signal.SIGINT)
            child.wait()
        return None
    if child.returncode < 0:
        return f"the process was ended by signal {-child.returncode}"
    return "the GPU's context was lost" if child.returncode == CONTEXT_LOST else None
