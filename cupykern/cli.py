"""The command line: `cupykern`, `python -m cupykern` and `python cli.py` are the same."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from . import OPS, __version__, targets
from .kernels import source_text
from .op import Op
from .tools import (
    commands_campaign,
    commands_measure,
    commands_reproduce,
    commands_startup,
    commands_tune,
)
from .tools.options import (
    ARCHS_OF,
    DEFAULT_ARCHS,
    TARGETS,
    Group,
    Shape,
    bench_tasks,
    json_option,
    ops_argument,
    parse_archs,
    parse_dtypes,
    parse_names,
    parse_op,
    parse_shapes,
    write_json,
)
from .tools.tables import one_line, print_table, progress


def main(args: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 (failure), 2 (wrong usage), 130 (Ctrl-C)."""
    try:
        result = cli.main(
            args, prog_name="cupykern", standalone_mode=False, obj=list(args or sys.argv[1:])
        )
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        prefix = "" if error.exit_code == 130 else "error: "
        click.echo(f"{prefix}{message}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:  # the reader, `head` say, has closed the pipe
        sys.stdout = None
        return 1


@click.group(
    cls=Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="cupykern")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Fused GPU kernels for CuPy and numpy arrays: check, measure and inspect them.

    Each command has --help with an example.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _module in (
    commands_measure,
    commands_campaign,
    commands_tune,
    commands_startup,
    commands_reproduce,
):
    for _command in _module.COMMANDS:
        cli.add_command(_command)


# --- ops, machine and cache --------------------------------------------------------------------


@cli.command("list")
@ops_argument
@json_option
def list_(ops: list[Op], json_path: str | None) -> int:
    """List ops with their dtypes, variants and configs.

    With OP: one row per target, with the default config for the op's first bench shape.

    \b
    Example: cupykern list softmax
    """
    here = targets.available()
    rows = [_listed(op, target, here) for op in ops for target in DEFAULT_ARCHS]
    if len(ops) == len(OPS):
        per_op = [rows[i : i + len(DEFAULT_ARCHS)] for i in range(0, len(rows), len(DEFAULT_ARCHS))]
        print_table(
            ("op", "dtypes", "variants", "configs"),
            (
                (
                    *(of_op[0]["op"], ", ".join(of_op[0]["dtypes"])),
                    *(
                        " / ".join(str(row[name]) for row in of_op)
                        for name in ("variants", "configs")
                    ),
                )
                for of_op in per_op
            ),
        )
        archs = ", ".join(f"{target} ({arch})" for target, arch in DEFAULT_ARCHS.items())
        click.echo(f"variants and configs: of {archs}")
    else:
        print_table(
            ("op", "target", "variants", "configs", "default config"),
            (
                (
                    *(row["op"], f"{row['target']} ({row['arch']})", row["variants"]),
                    *(row["configs"], f"{row['config']} for {row['problem']}"),
                )
                for row in rows
            ),
        )
    click.echo(f"targets that work here: {', '.join(here) or 'none'}")
    write_json(json_path, rows)
    return 0


def _listed(op: Op, target: str, here: Sequence[str]) -> dict[str, Any]:
    arch = DEFAULT_ARCHS[target]
    configs: tuple[Any, ...]
    try:
        problem = op.bench_problem(op.bench_shapes(target)[0], op.dtypes[0])
        configs = op.configs(problem, arch)
    except NotImplementedError as error:
        configs = (error,)
    return {
        "op": op.name,
        "dtypes": list(op.dtypes),
        "target": target,
        "arch": arch,
        "available": target in here,
        "variants": len(op.variants(arch)),
        "problem": str(problem),
        "configs": len(configs),
        "config": str(configs[0]),
    }


@cli.command()
def doctor() -> int:
    """Show what this machine has and what to install.

    Exits with 0 if at least one target works here, else with 1.

    \b
    Example: cupykern doctor
    """
    from .tools import doctor as doctors

    findings = doctors.find_all()
    print_table(("", "found"), ((found.thing, found.found or "missing") for found in findings))
    for missing in (found for found in findings if found.found is None and found.needed_for):
        click.echo(f"missing {missing}")
    here = targets.available()
    click.echo(f"targets that work here: {', '.join(here) or 'none'}")
    return 0 if here else 1


_SHOWN = 10  # of the names that --clear leaves


@cli.command()
@click.option("--clear", is_flag=True, help="Remove the compiled kernels.")
def cache(clear: bool) -> int:
    """Show or clear the cache of compiled host kernels.

    Shows its directory and size.  --clear removes only files that cupykern compiled, and lists
    what it leaves.  Kernels for GPUs are in CuPy's own cache, which is not touched.

    \b
    Example: cupykern cache --clear
    """
    from . import cache as caches
    from . import environment

    size = caches.size()
    if not clear:
        click.echo(f"{environment.cache_dir()}: {size / 2**20:.1f} MiB")
        return 0
    left = caches.clear()
    removed = (size - caches.size()) / 2**20
    click.echo(f"{environment.cache_dir()}: {removed:.1f} MiB removed")
    for why, names in left.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        click.echo(f"left: {', '.join(names[:_SHOWN])}{more} ({why})")
    return 0


# --- kernels -----------------------------------------------------------------------------------


@cli.command("compile")
@ops_argument
@click.option("--arch", "archs", callback=parse_archs, help="Names, with commas.  Default: all.")
@click.option("--only-failures", is_flag=True, help="In the table.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="all cores")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Compile only what this file lacks; note there what passes.  Default: compile all.",
)
@click.option(
    "--again",
    type=click.FloatRange(min=0),
    default=0,
    show_default=True,
    metavar="MINUTES",
    help="Then compile some of what the record has, in random order, for so long.",
)
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    default=math.inf,
    metavar="MINUTES",
    help="Begin no more after so long, and say how many variants the record still lacks.",
)
@click.option("--kernels", callback=parse_names, help="Files' names, with commas.  Default: all.")
@click.option(
    "--codes",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write digests of the machine code to this file.",
)
@click.option(
    "--same-codes",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fail where the machine code is not in this file, of --codes.",
)
@json_option
def compile_(
    ops: list[Op],
    archs: tuple[str, ...],
    kernels: tuple[str, ...] | None,
    codes: Path | None,
    same_codes: Path | None,
    only_failures: bool,
    jobs: int,
    record: Path | None,
    again: float,
    within: float,
    json_path: str | None,
) -> int:
    """Compile every variant, without needing the GPUs.

    Shows registers, local and shared memory.  Local memory is slow: spilled registers, and arrays
    that are indexed at run time.  Exits with 1 if a variant does not compile, if a tuned one uses
    local memory, or if the compiler warns.

    \b
    Example: cupykern compile softmax --arch sm_90a,gfx942
    """
    from .tools import gate, gate_record, machine_code

    if (again or within < math.inf) and record is None:
        raise click.UsageError("--again and --within need --record")
    todo = gate.tasks(ops, archs)
    if kernels is not None:
        todo = [task for task in todo if task[0].kernel in kernels]
    compiled: Iterator[gate.Row]
    if record is None:
        compiled = gate.compile_all(todo, jobs)
    else:
        everything = gate.tasks(OPS, archs)
        compiled = gate_record.compile_new(todo, everything, record, jobs, 60 * again, 60 * within)
    rows = []
    with progress(len(todo), "compile") as advance:
        for row in compiled:
            rows.append(row)
            advance(f"{row.variant.kernel}, {row.arch}")
    if record is not None and (missing := gate_record.missing(todo, record)):
        click.echo(f"{record} lacks {missing} of {len(todo)} variants: compile --record {record}")
    if codes is not None:
        machine_code.write(codes, rows)
    if same_codes is not None:
        rows = machine_code.compare(same_codes, rows)
    failures = [gate.failure(row) for row in rows]
    shown = [
        (
            *(str(row.variant), row.arch),
            *(
                "-" if figure is None else str(figure)
                for figure in (row.registers, row.sgprs, row.local_bytes, row.shared_bytes)
            ),
            *(f"{row.seconds:.2f}", one_line(failure or row.skipped or "ok")),
        )
        for row, failure in zip(rows, failures, strict=True)
        if failure or not only_failures
    ]
    if shown or not only_failures:
        columns = ("variant", "arch", "registers", "SGPRs", "local", "shared", "seconds", "result")
        print_table(columns, shown)
    compilers = {row.arch: row.compiler for row in rows if row.compiler is not None}
    click.echo(f"compiled by {', '.join(dict.fromkeys(compilers.values())) or 'nothing'}")
    failed = sum(failure is not None for failure in failures)
    skipped = sum(row.skipped is not None for row in rows)
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        seconds[row.variant.kernel] += row.seconds
    most = (
        f"{kernel} {spent:.0f}" for kernel, spent in nlargest(3, seconds.items(), key=itemgetter(1))
    )
    click.echo(
        f"{sum(seconds.values()):.0f} s of all jobs, of which {', '.join(most) or 'nothing'}"
    )
    if record is not None:
        click.echo(f"{len(todo) - len(rows)} on record, not compiled")
    click.echo(f"{len(rows)} variants, {failed} failed, {skipped} skipped")
    write_json(
        json_path,
        [
            {**asdict(row), "variant": str(row.variant), "failure": failure}
            for row, failure in zip(rows, failures, strict=True)
        ],
    )
    return 1 if failed else 0


@cli.command()
@click.argument("op", callback=parse_op)
@click.option("--target", type=click.Choice(TARGETS), default="cuda", show_default=True)
@click.option("--shape", "shapes", callback=parse_shapes, help="Default: the first bench shape.")
@click.option("--cols", type=click.IntRange(0), help="The shape's last size.")
@click.option("--dtype", "dtype_names", callback=parse_dtypes, help="Default: the op's first.")
@click.option("--arch", help="Default: sm_90a, gfx942 or host, by target.")
def source(
    op: Op,
    target: str,
    shapes: list[Shape] | None,
    cols: int | None,
    dtype_names: tuple[str, ...] | None,
    arch: str | None,
) -> int:
    """Print the self-contained source that is compiled for a problem.

    \b
    Example: cupykern source softmax --shape 4096,4096 --dtype bfloat16 --target host
    """
    arch = arch or DEFAULT_ARCHS[target]
    if arch not in ARCHS_OF[target]:
        known = ", ".join(ARCHS_OF[target])
        raise click.UsageError(f"unknown arch {arch!r}; those of {target} are {known}")
    if cols is not None:
        shapes = [(*(shapes or op.bench_shapes(target))[0][:-1], cols)]
    task = bench_tasks([op], target, shapes, dtype_names or op.dtypes[:1])[0]
    try:
        config = op.configs(task.problem, arch)[0]
    except (ValueError, IndexError):
        raise click.UsageError(f"{op.name} has no config for {task.problem} on {arch}") from None
    click.echo(source_text(op.variant(task.problem, config), target), nl=False)
    return 0
