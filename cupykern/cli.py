"""The command: `cupykern` and `python cli.py` are the same."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kernels_cu import source_text

from . import OPS, __version__, targets
from .op import Op
from .options import (
    DEFAULT_ARCHS,
    TARGETS,
    Failure,
    Group,
    Shape,
    dtypes_option,
    json_option,
    ops_argument,
    parse_archs,
    parse_dtypes,
    parse_names,
    parse_op,
    parse_output,
    parse_shapes,
    shapes_option,
    target_option,
    write_json,
)
from .tables import number, one_line, print_table, progress


def main(args: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 (failure), 2 (wrong usage), 130 (Ctrl-C)."""
    try:
        result = cli.main(args, prog_name="cupykern", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        message = " ".join(error.format_message().split())
        prefix = "" if error.exit_code == 130 else "error: "
        click.echo(f"{prefix}{message}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:  # the reader, `head` say, has had enough
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


# --- check -------------------------------------------------------------------------------------

_SHOWN_FAILURES = 10


@cli.command()
@ops_argument
@target_option
@click.option("--cases", type=click.IntRange(1), default=100, show_default=True, help="Per op.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--policies", is_flag=True, help="Compare dual_gemm_silu's policies instead.")
@json_option
def check(
    ops: list[Op],
    target: str | None,
    cases: int,
    seed: int,
    policies: bool,
    json_path: str | None,
) -> int:
    """Compare random cases with FP64, elementwise, within each op's derived error bound.

    Case i is drawn from SEED + i alone.  Exits with 1 on a violation, and says how to reproduce it.
    With --policies: what each policy of dual_gemm_silu loses at K = 7168, on the same sums.

    \b
    Example: cupykern check softmax --target host --cases 200
    """
    from . import check as checks

    where = targets.get(target)
    if policies:
        if [op.name for op in ops] != ["dual_gemm_silu"]:
            raise click.UsageError("--policies is for dual_gemm_silu alone")
        return _check_policies(where, seed, json_path)
    done = []
    with progress(len(ops) * cases, "check") as advance:
        for case in checks.run_cases(ops, where, cases, seed):
            done.append(case)
            advance(case.op)
    summaries = checks.summarize(done)
    print_table(
        ("op", "dtype", "cases", "failed", "error/bound", "rms/expected"),
        (
            (
                *(summary.op, summary.dtype, summary.cases, summary.failed),
                *(
                    number(getattr(summary.worst, figure, None))
                    for figure in ("error_over_bound", "rms_ratio")
                ),
            )
            for summary in summaries
        ),
        f"{where.name} ({where.arch}), seed {seed}: the worst of all cases; "
        f"limits: error/bound 1, rms/expected {checks.RMS_LIMIT:g}",
    )
    failures = [case for case in done if case.error is not None]
    for case in failures[:_SHOWN_FAILURES]:
        click.echo(
            f"{case.op}, seed {case.seed}: {one_line(case.error or '')}\n  {case.problem}\n"
            f"  {case.reproduce(where.name)}"
        )
    if len(failures) > _SHOWN_FAILURES:
        click.echo(f"... and {len(failures) - _SHOWN_FAILURES} more (--json has them all)")
    write_json(json_path, checks.document(done, where, seed))
    return 1 if failures else 0


def _check_policies(where: targets.Target, seed: int, json_path: str | None) -> int:
    from . import policies

    rows = list(policies.compare(where, seed))
    heads = (
        "inputs",
        "policy",
        "max_abs",
        "ulps",
        "outside",
        "error/bound",
        "registers",
        "occupancy",
    )
    print_table(
        heads,
        (
            (
                *(row.problem, row.policy, number(row.max_abs), number(row.ulps)),
                *(f"{row.outside:.4%}", number(row.error_over_bound)),
                "-" if row.registers is None else row.registers,
                "-" if row.occupancy is None else f"{row.occupancy:.0%}",
            )
            for row in rows
        ),
        f"{where.name} ({where.arch}), K = {policies.K}, seed {seed}, the same sums for each policy; outside: "
        f"of rtol = atol = {policies.TOLERANCE:g} of FP64 rounded to FP16; registers: {rows[0].arch}",
    )
    write_json(json_path, [asdict(row) for row in rows])
    return 1 if any(row.error_over_bound > 1 for row in rows) else 0


# --- bench -------------------------------------------------------------------------------------


@cli.command()
@ops_argument
@target_option
@shapes_option
@dtypes_option
@click.option("--against", callback=parse_names, help="Peers, with commas, or all.  Default: none.")
@json_option
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False), callback=parse_output,
              help="Write a line per result.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), callback=parse_output,
              help="Draw the speeds into this PNG or SVG (needs matplotlib).")  # fmt: skip
@click.option("--rep-ms", type=click.FloatRange(0), default=100, show_default=True,
              help="Timed ms of the op's own time per row.")  # fmt: skip
@click.option("--warmup-ms", type=click.FloatRange(0), default=25, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs.")
@click.option("--wait", is_flag=True, help="Wait for another benchmark's end.")
def bench(
    ops: list[Op],
    target: str | None,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
    against: tuple[str, ...] | None,
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    rep_ms: float,
    warmup_ms: float,
    seed: int,
    wait: bool,
) -> int:
    """Time ops side by side with a plain copy of the same bytes, and with peers.

    Every result is verified against FP64 before and after it is timed; L2 is flushed before every
    run; times are medians with 20% and 80% quantiles.  Exits with 1 if a result is wrong.

    \b
    Example: cupykern bench softmax --shapes "4096,4096;32768,1024" --dtype float16 --against torch
    """
    from . import bench as protocol
    from .bench_command import bench as run
    from .bench_command import find_peers

    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise Failure("--plot needs matplotlib: pip install 'cupykern[bench]'")
    settings = protocol.Settings(warmup_ms, rep_ms, seed)
    where = targets.get(target)
    tasks = _tasks(ops, where.name, shapes, dtype_names)
    peers = find_peers(against or (), where.name)
    with protocol.lock(wait):
        return run(tasks, where, settings, peers, json_path, csv_path, plot_path)


def _tasks(
    ops: list[Op],
    target: str,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
) -> list[Any]:
    from .bench import tasks

    try:
        return tasks(ops, target, shapes, dtype_names)
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None


# --- what there is -----------------------------------------------------------------------------


@cli.command("list")
@json_option
def list_(json_path: str | None) -> int:
    """List ops, dtypes, targets and the config that each op's first bench shape gets.

    \b
    Example: cupykern list
    """
    here = targets.available()
    rows = []
    for op in OPS:
        for target, arch in DEFAULT_ARCHS.items():
            try:
                problem = op.bench_problem(op.bench_shapes(target)[0], op.dtypes[0])
                configs = op.configs(problem, arch)
            except NotImplementedError as error:
                configs = (error,)
            rows.append(
                {
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
            )
    print_table(
        ("op", "dtypes", "target", "runs here", "variants", "configs", "default config"),
        (
            (
                *(row["op"], ", ".join(row["dtypes"]), f"{row['target']} ({row['arch']})"),
                *("yes" if row["available"] else "no", row["variants"], row["configs"]),
                f"{row['config']} for {row['problem']}",
            )
            for row in rows
        ),
    )
    write_json(json_path, rows)
    return 0


@cli.command()
def doctor() -> int:
    """Say what this machine has, and what is missing for what.

    Exits with 0 if some target works here, else with 1.

    \b
    Example: cupykern doctor
    """
    from . import doctor as doctors

    print_table(
        ("", "found", "without it"),
        (
            (finding.thing, finding.found or "missing", "" if finding.found else finding.needed_for)
            for finding in doctors.find_all()
        ),
    )
    here = targets.available()
    click.echo(f"targets that work here: {', '.join(here) or 'none'}")
    return 0 if here else 1


@cli.command()
@click.option("--clear", is_flag=True, help="Remove the compiled kernels.")
def cache(clear: bool) -> int:
    """Show where compiled host kernels are kept and how large that is; --clear removes them.

    Kernels for GPUs are in CuPy's own cache, which stays as it is.

    \b
    Example: cupykern cache --clear
    """
    from . import cache as caches

    size = caches.size()
    if clear:
        caches.clear()
    click.echo(f"{caches.cache_dir()}: {size / 2**20:.1f} MiB{', removed' if clear else ''}")
    return 0


# --- kernels -----------------------------------------------------------------------------------


@cli.command("compile")
@ops_argument
@click.option("--arch", "archs", callback=parse_archs, help="Names, with commas.  Default: all.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="all cores")
@json_option
def compile_(ops: list[Op], archs: tuple[str, ...], jobs: int, json_path: str | None) -> int:
    """Compile every variant for GPUs that need not be here; show registers, spills, shared memory.

    Exits with 1 if one does not compile, or spills although it is tuned.

    \b
    Example: cupykern compile softmax --arch sm_90a,gfx942
    """
    from . import gate

    todo = gate.tasks(ops, archs)
    rows = []
    with progress(len(todo), "compile") as advance:
        for row in gate.compile_all(todo, jobs):
            rows.append(row)
            advance(f"{row.variant.kernel}, {row.arch}")
    failures = [gate.failure(row) for row in rows]
    print_table(
        ("variant", "arch", "registers", "SGPRs", "spills", "shared", "seconds", "result"),
        (
            (
                *(row.variant, row.arch),
                *(
                    "-" if figure is None else figure
                    for figure in (row.registers, row.sgprs, row.spill_bytes, row.shared_bytes)
                ),
                *(f"{row.seconds:.2f}", one_line(failure or row.skipped or "ok")),
            )
            for row, failure in zip(rows, failures, strict=True)
        ),
    )
    failed = sum(failure is not None for failure in failures)
    skipped = sum(row.skipped is not None for row in rows)
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
@click.option("--dtype", "dtype_names", callback=parse_dtypes, help="Default: the op's first.")
@click.option("--arch", help="Default: sm_90a, gfx942 or host, by target.")
def source(
    op: Op,
    target: str,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
    arch: str | None,
) -> int:
    """Print the self-contained source that is compiled for a problem.

    \b
    Example: cupykern source softmax --shape 4096,4096 --dtype bfloat16 --target host
    """
    arch = arch or DEFAULT_ARCHS[target]
    task = _tasks([op], target, shapes, dtype_names or op.dtypes[:1])[0]
    try:
        config = op.configs(task.problem, arch)[0]
    except (ValueError, IndexError):
        raise click.UsageError(f"{op.name} has no config for {task.problem} on {arch}") from None
    click.echo(source_text(op.variant(task.problem, config), target), nl=False)
    return 0


# --- README's tables ---------------------------------------------------------------------------


@cli.command()
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit with 1 if it would.")
@click.option("--readme", type=click.Path(dir_okay=False), default="README.md", show_default=True)
@click.option("--results", type=click.Path(file_okay=False), default="results", show_default=True)
def report(only_check: bool, readme: str, results: str) -> int:
    """Write README's tables from the results of `bench --json` in a folder.

    \b
    Example: cupykern report --check
    """
    from . import report as reports

    path = Path(readme)
    try:
        text, wanted = reports.report(path, Path(results))
    except ValueError as error:
        raise Failure(f"{readme}: {error}") from None
    if text == wanted:
        return 0
    if only_check:
        raise Failure(f"{readme} differs from {results}: run `cupykern report`")
    path.write_text(wanted, encoding="utf-8")
    click.echo(f"{readme} written")
    return 0
