"""The commands that check and time ops: check, bench, report."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import OPS, targets
from ..op import Op
from .model.cache import FORMATS as CACHES
from .model.linear import FORMATS
from .options import (
    Failure,
    Shape,
    bench_tasks,
    dtypes_option,
    json_option,
    need_matplotlib,
    ops_argument,
    parse_counts,
    parse_ms,
    parse_names,
    parse_output,
    parse_plot,
    shapes_option,
    suite_tasks,
    target_option,
    write_json,
)
from .tables import Counted, number, one_line, print_table, progress

# --- check -------------------------------------------------------------------------------------

_SHOWN_FAILURES = 10


@click.command()
@ops_argument
@target_option
@click.option("--cases", type=click.IntRange(1), default=100, show_default=True, help="Per op.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--report", "precise", is_flag=True,
              help="Also say how the errors are distributed, in ulps.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), callback=parse_plot,
              help="Draw that distribution into this PNG or SVG (needs matplotlib).")  # fmt: skip
@click.option("--policies", is_flag=True,
              help="Instead compare dual_gemm_silu's policies, at K = 7168.")  # fmt: skip
@click.option("--history", type=click.IntRange(1), metavar="SEQUENCES",
              help="Instead run random sequences of calls: the bits of a result must not depend on "
              "the calls before it.  Sequence i is drawn from SEED + i.")  # fmt: skip
@click.option("--sensitivity", is_flag=True,
              help="Instead say how small an error of all results would be found.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default="all cores",
              help="How many kernels to compile at once.")  # fmt: skip
@json_option
def check(
    ops: list[Op],
    target: str | None,
    cases: int,
    seed: int,
    precise: bool,
    plot_path: str | None,
    policies: bool,
    history: int | None,
    sensitivity: bool,
    jobs: int,
    json_path: str | None,
) -> int:
    """Compare random cases with FP64, within derived error bounds.

    The comparison is elementwise.  Case i is drawn from SEED + i alone.  Exits with 1 on a
    violation, and prints how to reproduce it.  A unit in the last place (ulp) is the gap between
    neighbouring numbers of the result's format: rounding alone costs up to half an ulp.

    \b
    Example: cupykern check softmax --target host --cases 200
    """
    from .. import check as checks
    from ..tuning.compile_ahead import compile_ahead, variants_of_cases
    from . import estimates, precision, records

    if plot_path is not None:
        need_matplotlib("--plot")
    where = targets.get(target)
    if policies:
        if [op.name for op in ops] != ["dual_gemm_silu"]:
            raise click.UsageError("--policies is for dual_gemm_silu alone")
        return _check_policies(where, seed, json_path)
    if history is not None:
        from .history_command import check_history

        return check_history(ops, where, history, seed, jobs, json_path)
    if sensitivity:
        return _check_sensitivity(ops, where, seed, json_path)
    click.echo(f"check: {estimates.of_check(len(ops), cases, where.name, jobs)}", err=True)
    done = []
    collector = precision.Collector(seed) if precise or plot_path is not None else None
    variants = Counted(variants_of_cases(ops, where, cases, seed))
    with progress(lambda: variants.total, "compile") as advance:
        for variant, *_ in compile_ahead(where, variants, jobs):
            advance(variant.kernel)
    with progress(len(ops) * cases, "check") as advance:
        for case in checks.run_cases(ops, where, cases, seed, collector):
            done.append(case)
            advance(case.op)
    summaries = checks.summarize(done)
    print_table(
        ("op", "dtype", "cases", "failed", "error/bound", "rms/expected", "bias/limit"),
        (
            (
                *(summary.op, summary.dtype, summary.cases, summary.failed),
                *(
                    number(getattr(summary.worst, figure, None))
                    for figure in ("error_over_bound", "rms_ratio", "bias_ratio")
                ),
            )
            for summary in summaries
        ),
        f"{where.name} ({where.arch}), seed {seed}: the worst of all cases; limits: error/bound 1, "
        f"rms/expected {checks.RMS_LIMIT:g}, more for few elements, bias/limit 1",
    )
    failures = [case for case in done if case.error is not None]
    for case in failures[:_SHOWN_FAILURES]:
        click.echo(
            f"{case.op}, seed {case.seed}: {one_line(case.error or '')}\n  {case.problem}\n"
            f"  {case.reproduce(where.name)}"
        )
    if len(failures) > _SHOWN_FAILURES:
        click.echo(f"... and {len(failures) - _SHOWN_FAILURES} more (--json has them all)")
    errors = [] if collector is None else collector.rows()
    if precise:
        precision.show(errors)
    if plot_path is not None:
        from .plot import plot_precision

        if not plot_precision([asdict(row) for row in errors], plot_path):
            click.echo(f"{plot_path}: there is nothing to draw", err=True)
    found = checks.document(done, seed, errors)
    write_json(json_path, {**records.header("check", where), **found})
    return 1 if failures else 0


def _check_policies(where: targets.Target, seed: int, json_path: str | None) -> int:
    from . import policies

    rows = list(policies.compare(where, seed))
    print_table(
        (
            *("inputs", "policy", "max_abs", "ulps", "outside", "error/bound"),
            *("registers", "occupancy"),
        ),
        (
            (
                *(row.problem, row.policy, number(row.max_abs), number(row.ulps)),
                *(f"{row.outside:.4%}", number(row.error_over_bound)),
                "-" if row.registers is None else row.registers,
                "-" if row.occupancy is None else f"{row.occupancy:.0%}",
            )
            for row in rows
        ),
        f"{where.name} ({where.arch}), K = {policies.K}, seed {seed}, the same accumulators for "
        f"each policy; outside: of rtol = atol = {policies.TOLERANCE:g} of FP64 rounded to FP16; "
        f"registers: {rows[0].arch}",
    )
    write_json(json_path, [asdict(row) for row in rows])
    return 1 if any(row.error_over_bound > 1 for row in rows) else 0


def _check_sensitivity(ops: list[Op], where: targets.Target, seed: int, path: str | None) -> int:
    from . import records, sensitivity

    found = []
    with progress(len(ops), "plant") as advance:
        for op in ops:
            found += [asdict(row) for row in sensitivity.rows([op], where, seed)]
            advance(op.name)
    print_table(
        sensitivity.HEAD,
        map(sensitivity.cells, found),
        f"{where.name} ({where.arch}), seed {seed}: the smallest error that is found if all "
        f"elements have it; relative, of 8-bit results in units in the last place",
    )
    document = {**records.header("sensitivity", where), "seed": seed, "rows": found}
    write_json(path, document)
    return 0


# --- bench -------------------------------------------------------------------------------------


@click.command()
@ops_argument
@target_option
@shapes_option
@dtypes_option
@click.option("--suite", metavar="NAME",
              help="Instead shapes of a public model, of all of them (models), or random ones "
              "(random:SEED:COUNT).  A wrong name lists the models.")  # fmt: skip
@click.option(
    "--rows",
    type=click.IntRange(1),
    help="Of a suite: shapes of each op and dtype.  Default: 12; host: 1.",
)
@click.option("--model", metavar="NAME",
              help="Instead steps of layers of a public model: decoding as a CUDA graph, and "
              "prefill.  A wrong name lists the models.")  # fmt: skip
@click.option("--batch", callback=parse_counts,
              help="Of a model: sequences that decode, with commas.  Default: 1,16,64; host: "
              "1,3.")  # fmt: skip
@click.option("--context", type=click.IntRange(1),
              help="Of a model: tokens of each sequence.  Default: 2048; host: 40.")  # fmt: skip
@click.option("--prefill", callback=parse_counts,
              help="Of a model: lengths of prompts, with commas.  Default: none; host: "
              "24.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1),
              help="Of a model.  Default: 8; host: 2.")  # fmt: skip
@click.option("--weights", type=click.Choice(FORMATS),
              help="Of a model: 16bit (the default); int8 and e4m3, with a scale for each output; "
              "e4m3-blocks, of 128 x 128; fp8, likewise, and activations in FP8 too.")  # fmt: skip
@click.option("--cache", type=click.Choice(CACHES),
              help="Of a model, for keys and values: 16bit (the default); e4m3 and int8, with a "
              "scale for each token and head.")  # fmt: skip
@click.option("--parallel", callback=parse_names, metavar="STEPS",
              help="Instead steps on the ranks of mpiexec, and on one of them, with commas: mlp, "
              "attention, decode (of --model), or all.")  # fmt: skip
@click.option(
    "--all",
    "all_rows",
    is_flag=True,
    help="On the host: every shape and dtype of every op, not the first of each.",
)
@click.option("--against", callback=parse_names, help="Peers, with commas, or all.  Default: none.")
@json_option
@click.option("--csv", "csv_path", type=click.Path(dir_okay=False), callback=parse_output,
              help="Write a line per result.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), callback=parse_plot,
              help="Draw the speeds into this PNG or SVG (needs matplotlib).")  # fmt: skip
@click.option("--baseline", type=click.Path(exists=True, dir_okay=False),
              help="Compare with an earlier bench's JSON: keep, reject or noise.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(1),
              help="Runs of all rows, in turns.  Default: 1; --baseline: up to 24.")  # fmt: skip
@click.option("--rep-ms", type=float, callback=parse_ms, default=100, show_default=True,
              help="Timed ms of the op's own time per row.")  # fmt: skip
@click.option("--warmup-ms", type=float, callback=parse_ms, default=25, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Of the inputs, and of a suite's sample of its shapes.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait for another benchmark's end.")
def bench(
    ops: list[Op],
    target: str | None,
    shapes: list[Shape] | None,
    dtype_names: tuple[str, ...] | None,
    suite: str | None,
    rows: int | None,
    model: str | None,
    batch: tuple[int, ...] | None,
    context: int | None,
    prefill: tuple[int, ...] | None,
    layers: int | None,
    weights: str | None,
    cache: str | None,
    parallel: tuple[str, ...] | None,
    all_rows: bool,
    against: tuple[str, ...] | None,
    json_path: str | None,
    csv_path: str | None,
    plot_path: str | None,
    baseline: str | None,
    repeats: int | None,
    rep_ms: float,
    warmup_ms: float,
    seed: int,
    wait: bool,
) -> int:
    """Time ops beside a plain copy and other libraries.

    Without OP, all ops run; on the host only with their first shape and dtype, unless --all,
    --shapes or --dtype is given.  Every result is verified against FP64 before and after timing; L2
    is flushed before every run; times are medians with 20% and 80% quantiles.  Exits with 1 if a
    result is wrong, or with --baseline if a row got slower by more than its noise: rows run until
    that is decided.  A baseline should have several runs to compare with: measure it with
    --repeats 12.

    With --suite, prints for each op and dtype the fastest library's time over ours (a geometric
    mean), the share of shapes that are slower by 2%, 3% and 10%, and the slowest ones.  Another
    --seed selects other shapes: tune with one, judge by another.

    With --model, prints each step's time and its floor: the time to read the weights and the cache.
    Weights are random; the logits are verified against the model in FP64.  The library is
    torch.compile: its whole step compiled, and launched as a CUDA graph.

    With --parallel, under mpiexec: times of a tensor-parallel gated network, ring attention of a
    long sequence and a decode step with split weights, on all ranks and, unsplit, on one; all are
    verified.  A run takes as long as its slowest rank.  The library is torch with NCCL.

    \b
    Example: cupykern bench softmax --shapes "4096,4096;32768,1024" --dtype float16 --against torch
    Example: cupykern bench --suite models --against torch,quack --seed 1 --json suite.json
    Example: cupykern bench --model llama3-8b --batch 1,16 --prefill 512 --against torch.compile
    Example: mpiexec -n 4 cupykern bench --parallel mlp,attention --against torch
    """
    from ..tuning.protocol import lock
    from . import bench as protocol
    from .bench_command import Baseline, Outputs, find_peers
    from .bench_command import bench as run

    if plot_path is not None:
        need_matplotlib("--plot")
    settings = protocol.Settings(warmup_ms, rep_ms, seed)
    others = suite or shapes or len(ops) < len(OPS) or csv_path or plot_path or baseline or repeats
    if parallel is not None:
        from .ranks.command import RanksRun, bench_parallel

        if others or dtype_names or prefill or weights or cache:
            raise click.UsageError(
                "--parallel goes with --model, --batch, --context, --layers, --against and --json"
            )
        on_ranks = RanksRun(parallel, model or "llama3-8b", batch, context, layers)
        return bench_parallel(on_ranks, target, settings, against or (), json_path, wait)
    where = targets.get(target)
    if model is not None:
        from .model_command import ModelRun, bench_model

        if others:
            raise click.UsageError("--model goes with options of models, --against and --json")
        run_of = ModelRun(
            *(model, batch, context, layers, prefill),
            weights or "16bit", _of_model(dtype_names), cache or "16bit",
        )  # fmt: skip
        with lock(wait):
            return bench_model(run_of, where, settings, against or (), json_path)
    if any(value is not None for value in (batch, context, prefill, layers, weights, cache)):
        raise click.UsageError(
            "--batch, --context, --prefill, --layers, --weights, --cache are of a --model"
        )
    of_suite = None
    if suite is None:
        if rows is not None:
            raise click.UsageError("--rows is of a --suite")
        asked = all_rows or shapes or dtype_names or len(ops) < len(OPS)
        if where.name == "host" and not asked:
            tasks = protocol.first_tasks(ops, where.name)
        else:
            tasks = bench_tasks(ops, where.name, shapes, dtype_names)
    else:
        if shapes is not None:
            raise click.UsageError("--suite has shapes of its own: leave out --shapes")
        of_suite, tasks = suite_tasks(ops, where.name, suite, dtype_names, rows, seed)
    peers = find_peers(against or (), where.name)
    before = None
    if baseline is not None:
        if repeats == 1:
            raise click.UsageError("--baseline needs at least --repeats 2, to see the spread")
        before = Baseline(baseline, _baseline(Path(baseline), where))
    outputs = Outputs(json_path, csv_path, plot_path, before, repeats, of_suite)
    with lock(wait):
        return run(tasks, where, settings, peers, outputs)


def _of_model(names: tuple[str, ...] | None) -> str:
    """Return the dtype of a model's activations."""
    if names is None:
        return "bfloat16"
    if len(names) > 1 or names[0] not in ("float16", "bfloat16"):
        raise click.UsageError("--dtype of a model is float16 or bfloat16")
    return names[0]


def _baseline(path: Path, target: targets.Target) -> dict[tuple[Any, ...], dict[str, Any]]:
    from . import baseline

    try:
        return baseline.load(path, targets.product_name(target))
    except ValueError as error:
        raise Failure(f"--baseline: {error}") from None


# --- the tables ---------------------------------------------------------------------------------


_PAGES = "README.md", "docs/results.md"  # of a checkout


@click.command()
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit with 1 if it would.")
@click.option("--tables", multiple=True, type=click.Path(dir_okay=False),
              show_default=f"{', '.join(_PAGES)}, where they are",
              help="Pages that hold tables.")  # fmt: skip
@click.option("--results", type=click.Path(file_okay=False), default="results", show_default=True)
@click.option("--page", type=click.Path(dir_okay=False),
              show_default="docs/results.html, or results.html where there is no docs",
              help="The page with plots (needs matplotlib).")  # fmt: skip
def report(only_check: bool, tables: tuple[str, ...], results: str, page: str | None) -> int:
    """Write the tables and plots of results.

    The results are JSON files in a folder, written by `bench`, `sweep`, `tune`, `profile` and
    `check --report` with --json.  The page is one self-contained file: roofs, speed against size
    beside the libraries, errors against the bound, heat maps of sweeps, tuned calls, comparisons,
    profiles.  It needs no checkout; in a checkout the tables of README and docs are written too.

    \b
    Example: cupykern report --results measured --page measured.html
    """
    from . import page as pages
    from . import report as reports

    paths = [Path(path) for path in tables or (name for name in _PAGES if Path(name).exists())]
    place = Path(page or ("docs/results.html" if Path("docs").is_dir() else "results.html"))
    folder = Path(results)
    try:
        if not reports.are_in(folder):
            raise Failure(f"there are no results in {folder}: `cupykern bench --json` writes some")
        texts, wanted = reports.report(paths, folder) if paths else ([], [])
        reports.load(folder)
    except OSError as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise Failure(f"{', '.join(map(str, paths)) or folder}: {error}") from None
    changed = {path: new for path, old, new in zip(paths, texts, wanted, strict=True) if old != new}
    for name, picture in reports.pictures(folder).items() if paths else ():
        beside = place.parent / name
        if not beside.exists() or beside.read_text(encoding="utf-8") != picture:
            changed[beside] = picture
    if only_check and changed:
        raise Failure(f"{next(iter(changed))} differs from {results}: run `cupykern report`")
    place.parent.mkdir(parents=True, exist_ok=True)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
        click.echo(f"{path} written")
    if not only_check and not pages.is_current(place, folder):
        need_matplotlib("the page")
        place.write_text(pages.make(folder), encoding="utf-8")
        click.echo(f"{place} written")
    return 0


COMMANDS = (check, bench, report)
