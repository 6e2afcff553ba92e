"""`cupykern bench --model`: the decoder, its rows, the table and the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ..peers import Peer
from ..peers.torch_model import MODEL_PEERS
from ..targets import Target
from ..tuning import protocol
from ..tuning.compile_ahead import compile_ahead
from ..tuning.contender import Result
from ..tuning.timing import clock_of
from . import doctor, results
from .bench import Settings, free_memory
from .bench_command import find_peers, print_notes, title_of
from .model import config as configs
from .model import measure
from .model.measure import Step
from .model.random_weights import random_decoder
from .model_rows import DECODE, PREFILL, tokens_per_second
from .stored import to_json
from .tables import number, print_table, progress

LAYERS, BATCHES, CONTEXT = 8, (1, 16, 64), 2048
_HOST_BATCHES, _HOST_CONTEXT, _HOST_LAYERS, _HOST_PREFILL = (1, 3), 40, 2, 24


@dataclass(frozen=True)
class ModelRun:
    """The requested run; None: the target's default.

    prefill: prompt lengths.  weights: a name of model.linear.FORMATS.  cache: of
    model.cache.FORMATS.
    """

    name: str
    batches: tuple[int, ...] | None = None
    context: int | None = None
    layers: int | None = None
    prefill: tuple[int, ...] | None = None
    weights: str = "16bit"
    dtype: str = "bfloat16"
    cache: str = "16bit"

    def on(self, target: str) -> ModelRun:
        """Fill in the target's defaults; on the host a step takes seconds."""
        host = target == "host"
        return replace(
            self,
            batches=self.batches or (_HOST_BATCHES if host else BATCHES),
            context=self.context or (_HOST_CONTEXT if host else CONTEXT),
            layers=self.layers or (_HOST_LAYERS if host else LAYERS),
            prefill=((_HOST_PREFILL,) if host else ()) if self.prefill is None else self.prefill,
        )

    @property
    def steps(self) -> list[Step]:
        sizes = [(DECODE, batch, self.context or CONTEXT) for batch in self.batches or ()]
        sizes += [(PREFILL, 1, tokens) for tokens in self.prefill or ()]
        return [Step(*size, self.cache) for size in sizes]


def small(config: configs.ModelConfig) -> configs.ModelConfig:
    """Return a model of the same kind that the host target runs in seconds."""
    group = config.heads // config.kv_heads
    return replace(
        config, vocab=256, hidden=128, intermediate=256, heads=2 * group, kv_heads=2, head_dim=32
    )


def bench_model(
    asked: ModelRun,
    target: Target,
    settings: Settings,
    against: Sequence[str],
    json_path: str | None,
) -> int:
    """Bench, print and write; return the exit code.  On Ctrl-C, write the rows so far."""
    run = asked.on(target.name)
    try:
        config = configs.public(run.name, run.layers or LAYERS)
    except ValueError as error:
        raise click.UsageError(f"--model: {error}") from None
    peers = find_peers(against, target.name, MODEL_PEERS)
    if target.name == "host":
        config = small(config)
        click.echo(
            f"host emulation: {run.name} with {run.layers} layers of {config.hidden} instead; "
            f"--batch, --context, --prefill and --layers as asked",
            err=True,
        )
    rows: list[results.Row] = []
    state: dict[str, Any] = {
        "before": doctor.gpu_state(target),
        "other_processes": protocol.other_processes(target),
    }
    interrupted = False
    try:
        for row in _rows(run, config, target, settings, peers):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        state["after"] = doctor.gpu_state(target)
        if rows:
            _print(run, rows, target)
        if rows and json_path is not None:
            document = results.document(
                rows, target, settings.record(target), {}, state, interrupted
            )
            model = {
                "name": run.name,
                "layers": run.layers,
                "weights": run.weights,
                "cache": run.cache,
            }
            document |= {"kind": "model", "model": model}
            Path(json_path).write_text(to_json(document), encoding="utf-8")
    return 0 if rows and all(row.ok for row in rows) else 1


def _rows(
    run: ModelRun,
    config: configs.ModelConfig,
    target: Target,
    settings: Settings,
    peers: Sequence[Peer],
) -> Iterator[results.Row]:
    decoder = random_decoder(config, run.dtype, run.weights, target.name, settings.seed)
    todo = measure.variants(config, decoder, run.steps, target)
    with progress(len(todo), "compile") as advance:
        for variant, *_ in compile_ahead(target, todo, os.cpu_count() or 1):
            advance(variant.kernel)
    clock = clock_of(target)
    with protocol.Monitor(target) as monitor, progress(len(run.steps), "bench") as advance:
        for step in run.steps:
            try:
                yield measure.measure(
                    decoder, step, run.name, target, clock, settings, peers, monitor
                )
            except MemoryError as error:
                yield measure.failed(run.name, step, run.dtype, f"does not fit: {error}")
            if target.name != "host":
                free_memory(target)
            advance(str(step))


def _print(run: ModelRun, rows: Sequence[results.Row], target: Target) -> None:
    lines = []
    for row in rows:
        ours = row.results[0]
        for result in row.results:
            figures = _figures(row, result, ours, target.name == "host")
            lines.append((row.op, *map(str, row.shape), result.name, *figures))
    print_table(
        (
            *("step", "batch", "tokens", "by", "median ms", "q20", "q80", "tokens/s"),
            *("floor ms", "% of floor", "time / ours", "error/limit", "verified"),
        ),
        lines,
        f"{run.layers} layers, {run.dtype}, weights {run.weights}, cache {run.cache}; floor: "
        f"weights and cache at the speed of a plain read in the same run.  {title_of(target)}",
    )
    print_notes(rows)


def _figures(row: results.Row, result: Result, ours: Result, emulated: bool) -> tuple[str, ...]:
    decode = row.op.endswith(DECODE)
    has_floor = decode and not emulated
    versus = "-"
    if result is not ours and result.median_us and ours.median_us:
        versus = f"{result.median_us / ours.median_us:.2f}x"
    share = result.speed_percent if has_floor else None
    return (
        *(number(us and us / 1e3, 4) for us in (result.median_us, result.q20_us, result.q80_us)),
        number(result.median_us and tokens_per_second(row.op, row.shape, result.median_us), 4),
        number(row.plain_us / 1e3 if has_floor and row.plain_us else None, 4),
        "-" if share is None else f"{share:.1f}",
        versus,
        number(result.error_over_bound),
        "yes" if result.verified else "NO",
    )
