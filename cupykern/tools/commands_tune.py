"""The commands that search for the best configs: sweep, tune, profile, fit."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import click

from .. import targets
from ..op import Op
from .options import (
    Failure,
    Shape,
    bench_tasks,
    dtypes_option,
    json_option,
    parse_dtypes,
    parse_ms,
    parse_op,
    parse_op_or_none,
    parse_output,
    parse_shapes,
    shapes_option,
    target_option,
    write_json,
)


def _parse_grid(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> dict[str, tuple[Any, ...]]:
    """Parse "stages=2,3;fp8=True" into {"stages": (2, 3), "fp8": (True,)}.

    "cluster=SplitK(2)" sets a field to that object.  Raises click.UsageError.
    """
    grid = {}
    for part in filter(None, (part.strip() for part in (text or "").split(";"))):
        name, equals, values = part.partition("=")
        try:
            found = tuple(map(_value, _elements(values))) if equals and values else ()
        except (ValueError, SyntaxError):
            found = ()
        if not found or not name.strip().isidentifier():
            raise click.UsageError(
                f"{param.opts[0]} must be fields of the op's configs with values, as "
                f'"stages=2,3,4;tile_k=32,64"; got {part!r}'
            )
        grid[name.strip()] = found
    return grid


def _elements(values: str) -> list[ast.expr]:
    parsed = ast.parse(f"({values},)", mode="eval").body
    return parsed.elts if isinstance(parsed, ast.Tuple) else [parsed]


def _value(node: ast.expr) -> Any:
    """Return a literal, or a Made for a call like SplitK(2)."""
    from ..tuning.sweep import Made

    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return Made(node.func.id, tuple(map(ast.literal_eval, node.args)))
    return ast.literal_eval(node)


def _parse_sizes(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = [word.strip() for word in text.split(",") if word.strip()]
    if not sizes or not all(word.isdigit() for word in sizes):
        raise click.UsageError(f'{param.opts[0]} must be as "4096,8192"; got {text!r}')
    return tuple(map(int, sizes))


def _tasks(
    op: Op,
    target: str,
    shapes: list[Shape] | None,
    sizes: tuple[int, ...] | None,
    dtype_names: tuple[str, ...] | None,
) -> list[Any]:
    """Return the problems of a sweep.  sizes: shapes with equal dims.  Raises UsageError."""
    dims = len(op.bench_shapes(target)[0])
    wanted = [*(shapes or ()), *((size,) * dims for size in sizes or ())]
    return bench_tasks([op], target, wanted or [*op.bench_shapes(target)[:1]], dtype_names)


op_argument = click.argument("op", callback=parse_op)
sizes_option = click.option(
    "--sizes", callback=_parse_sizes, help='Shapes whose dims are all alike, as "4096,8192".'
)
rep_option = click.option(
    "--rep-ms", type=float, callback=parse_ms, default=25, show_default=True,
    help="Timed ms of each config; the best get four times as much.",
)  # fmt: skip
jobs_option = click.option(
    "--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="all cores",
    help="How many configs to compile at once.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs."
)
wait_option = click.option("--wait", is_flag=True, help="Wait for another benchmark's end.")


@click.command()
@op_argument
@target_option
@shapes_option
@sizes_option
@dtypes_option
@click.option("--configs", "grid", callback=_parse_grid,
              help='Also with these fields replaced: "stages=2,3;cluster=SplitK(2)".')  # fmt: skip
@click.option("--top", type=click.IntRange(1), default=5, show_default=True,
              help="How many of the best to time again, in turns, and to print.")  # fmt: skip
@click.option("--trace", type=click.Path(dir_okay=False), callback=parse_output,
              help="Where each result goes at once.  Default: sweep-OP.jsonl here.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with the trace that is there.")
@json_option
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False), callback=parse_output,
              help="Write a line per config.")  # fmt: skip
@rep_option
@jobs_option
@seed_option
@click.option("--timeout", type=click.FloatRange(1), default=300, show_default=True,
              help="Seconds without a result after which a config is given up.")  # fmt: skip
@click.option("--in-process", is_flag=True,
              help="Start no process: a crash ends the sweep (--resume goes on).")  # fmt: skip
@wait_option
@click.pass_context
def sweep(
    ctx: click.Context,
    op: Op,
    target: str | None,
    shapes: list[Shape] | None,
    sizes: tuple[int, ...] | None,
    dtype_names: tuple[str, ...] | None,
    grid: dict[str, tuple[Any, ...]],
    top: int,
    trace: str | None,
    resume: bool,
    json_path: str | None,
    csv_path: str | None,
    rep_ms: float,
    jobs: int,
    seed: int,
    timeout: float,
    in_process: bool,
    wait: bool,
) -> int:
    """Time every config of an op on some problems and rank them.

    A config sets a kernel's tiles, threads and stages.  Each config is compiled, verified against
    FP64 and timed in turns with the op's default; the best are then timed again, all in turns.  A
    config that does not compile, is wrong or crashes gets a row with the reason.  Every result is
    written to the trace at once: after Ctrl-C, --resume goes on.  Without --shapes and --sizes the
    op's first bench shape is used.

    \b
    Example: cupykern sweep matmul --sizes 4096,8192 --dtype float16 --configs "stages=2,3,4"
    """
    from ..tuning.protocol import lock
    from ..tuning.sweep import Settings
    from . import sweep_command

    path = Path(trace or f"sweep-{op.name}.jsonl")
    if not in_process:
        if path.exists() and not resume:
            raise Failure(f"{path} exists: go on with it (--resume) or remove it")
        return sweep_command.guard(ctx.obj[1:], path, timeout)
    where = targets.get(target)
    settings = Settings(rep_ms=rep_ms, top=top, seed=seed, jobs=jobs)
    tasks = _tasks(op, where.name, shapes, sizes, dtype_names)
    with lock(wait):
        opened = sweep_command.open_trace(path, where, settings, resume)
        return sweep_command.run(tasks, where, settings, grid, opened, (json_path, csv_path))


@click.command()
@click.argument("op", required=False, callback=parse_op_or_none)
@target_option
@shapes_option
@sizes_option
@dtypes_option
@rep_option
@jobs_option
@seed_option
@click.option("--list", "show", is_flag=True, help="Only print what is kept.")
@click.option("--forget", is_flag=True, help="Remove what is kept for OP, or all.")
@click.option("--built-in", "sweeps", multiple=True, type=click.Path(exists=True, dir_okay=False),
              help="Rewrite the package's own choices from these sweeps.")  # fmt: skip
@json_option
@wait_option
def tune(
    op: Op | None,
    target: str | None,
    shapes: list[Shape] | None,
    sizes: tuple[int, ...] | None,
    dtype_names: tuple[str, ...] | None,
    rep_ms: float,
    jobs: int,
    seed: int,
    show: bool,
    forget: bool,
    sweeps: tuple[str, ...],
    json_path: str | None,
    wait: bool,
) -> int:
    """Find the fastest configs on this machine, for later calls.

    The configs are kept in a file of your cache directory.  A later call of the op with the same
    dtypes and about the same sizes uses them, until the kernels' source changes.
    CUPYKERN_TUNE=0 ignores the file; CUPYKERN_TUNE=1 tunes missing problems at their first call.
    Without --shapes and --sizes the op's first bench shape is used.

    \b
    Example: cupykern tune softmax --shapes "4096,4096;32768,1024" --dtype float16
    """
    from . import tune_command

    if sweeps:
        return tune_command.write_built_in(map(Path, sweeps))
    if show or forget:
        return tune_command.show(op) if show else tune_command.forget(op)
    if op is None:
        raise click.UsageError("which op?  Or --list, --forget or --built-in")
    where = targets.get(target)
    tasks = _tasks(op, where.name, shapes, sizes, dtype_names)
    return tune_command.run(tasks, where, rep_ms, jobs, seed, wait, json_path)


@click.command()
@op_argument
@target_option
@click.option("--shape", "shapes", callback=parse_shapes, help="Default: the first bench shape.")
@click.option("--dtype", "dtype_names", callback=parse_dtypes, help="Default: the op's first.")
@click.option("--config", type=click.IntRange(1),
              help="Number of the config in `cupykern sweep`.  Default: the op's.")  # fmt: skip
@seed_option
@click.option("--read", "recorded", type=click.Path(exists=True, dir_okay=False),
              help="Show the output of `ncu --csv --page raw --print-units base`.")  # fmt: skip
@json_option
def profile(
    op: Op,
    target: str | None,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
    config: int | None,
    seed: int,
    recorded: str | None,
    json_path: str | None,
) -> int:
    """Show what limits a kernel, from the hardware's counters.

    Runs Nsight Compute (or rocprofv3 on AMD) on one launch.  Prints the achieved share of the
    throughput of memory and tensor cores, the number of resident warps, their stall reasons, and
    bank conflicts in shared memory.  If the profiler is missing, says how to install it.

    \b
    Example: cupykern profile softmax --shape 4096,4096 --dtype float16
    """
    from . import profile as profiles
    from . import records

    if recorded is not None:
        try:
            found = profiles.parse_ncu(Path(recorded).read_text(encoding="utf-8"))
        except ValueError as error:
            raise Failure(f"{recorded}: {error}") from None
        profiles.show(found)
        request = {"op": op.name}
        write_json(json_path, profiles.document({"kind": "profile"}, request, found))
        return 0
    where = targets.get(target)
    shape = (shapes or [op.bench_shapes(where.name)[0]])[0]
    dtype = (dtype_names or op.dtypes)[0]
    task = bench_tasks([op], where.name, [shape], (dtype,))[0]
    configs = op.configs(task.problem, where.arch)
    if config is not None and config > len(configs):
        raise click.UsageError(f"--config must be at most {len(configs)}; got {config}")
    chosen = configs[(config or 1) - 1]
    variant = op.variant(task.problem, chosen)
    header = records.header("profile", where)
    path = Path(json_path) if json_path else None
    call: dict[str, Any] = {
        "op": op.name,
        "shape": list(shape),
        "dtype": dtype,
        "config": repr(chosen),
    }
    try:
        name = None if config is None else repr(chosen)
        found = profiles.run(where.name, variant.kernel, op.name, shape, dtype, seed, name)
    except targets.UnavailableError as error:
        call["unavailable"] = str(error)
        write_json(json_path, profiles.document(header, call, [], path))
        raise
    profiles.show(found)
    write_json(json_path, profiles.document(header, call, found, path))
    return 0


@click.command()
@click.argument("sweeps", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--write", "written", type=click.Path(dir_okay=False), callback=parse_output,
              help="Write the file of the architecture with the fitted times.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Of the choice of held-out shapes.")  # fmt: skip
@click.option("--only", "names", default="", metavar="NAMES",
              help="With commas: fit only times whose names begin so, beside the others as they "
              "are.")  # fmt: skip
def fit(sweeps: tuple[str, ...], written: str | None, seed: int, names: str) -> int:
    """Fit the time models of GEMM configs to the results in SWEEPS.

    Prints each constant before and after the fit, and how well both predict the times of a
    quarter of the shapes, which are held out.  The numbers are those of cupykern/tuned/sm_90a.json.

    \b
    Example: cupykern fit results/sweep_matmul.json --write cupykern/tuned/sm_90a.json
    Example: cupykern fit results/sweep_matmul.json --only "16-bit[16],16-bit[17]"
    """
    from . import fit_command

    only = tuple(filter(None, names.split(",")))
    return fit_command.run(tuple(map(Path, sweeps)), seed, Path(written) if written else None, only)


COMMANDS = (sweep, tune, profile, fit)
