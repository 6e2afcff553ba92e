"""`cupykern bench --parallel` on each rank: measure the rows; rank 0 prints and writes them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ... import targets
from ...targets import Target
from ...tuning import protocol
from ...tuning.contender import OURS
from .. import doctor, results
from ..bench import Settings, free_memory
from ..bench_command import print_notes, title_of
from ..model import config as configs
from ..model.random_weights import random_decoder
from ..model_command import CONTEXT, LAYERS, small
from ..stored import to_json
from ..tables import number, print_table
from .cases import Mlp, Problem, Ring
from .decode import Decode
from .measure import ALONE, RanksPeer, Session, measure
from .world import World

STEPS = ("mlp", "attention", "decode")
PEERS = ("torch",)


@dataclass(frozen=True)
class Sizes:
    """mlp: (tokens, hidden, inner).  attention: (tokens, heads, KV heads, head dim).

    batches, context, layers: of a model's decode step.
    """

    mlp: Sequence[tuple[int, int, int]]
    attention: Sequence[tuple[int, int, int, int]]
    batches: Sequence[int]
    context: int
    layers: int


GPU = Sizes(
    [(tokens, 8192, 28672) for tokens in (1, 512, 4096)],
    [(1 << 17, 32, 8, 128)],
    (1, 16),
    CONTEXT,
    LAYERS,
)
HOST = Sizes([(3, 64, 96)], [(64, 4, 2, 32)], (2,), 12, 1)


@dataclass(frozen=True)
class RanksRun:
    """The requested steps and sizes; None: the target's default."""

    steps: tuple[str, ...]
    model: str = "llama3-8b"
    batches: tuple[int, ...] | None = None
    context: int | None = None
    layers: int | None = None


def bench_parallel(
    asked: RanksRun,
    target_name: str | None,
    settings: Settings,
    against: Sequence[str],
    json_path: str | None,
    wait: bool,
) -> int:
    """Bench on all ranks of the MPI job; rank 0 prints and writes.

    Returns the exit code, the same on all ranks.  An error of one rank ends the job.
    """
    steps = STEPS if "all" in asked.steps else asked.steps
    for name in steps:
        if name not in STEPS:
            raise click.UsageError(f"--parallel: unknown step {name!r}; all, {', '.join(STEPS)}")
    for name in against:
        if name not in ("all", *PEERS):
            raise click.UsageError(f"unknown library {name!r}; known are all, {', '.join(PEERS)}")
    world = World.of(target_name)
    target = targets.get(target_name)
    host = target.name == "host"
    if against and host:
        raise click.UsageError("--against needs a GPU: peers are not measured on the host target")
    try:
        config = configs.public(asked.model, asked.layers or (HOST if host else GPU).layers)
    except ValueError as error:
        raise click.UsageError(f"--model: {error}") from None
    try:
        with protocol.lock(wait) if world.rank == 0 else nullcontext():
            ok = _bench(world, target, asked, steps, config, settings, bool(against), json_path)
            return 0 if world.shared(ok) else 1
    except BaseException:
        if world.size == 1:
            raise
        traceback.print_exc()  # the other ranks would wait for this one forever
        world.mpi.Abort(1)
        raise


def _bench(
    world: World,
    target: Target,
    asked: RanksRun,
    steps: Sequence[str],
    config: configs.ModelConfig,
    settings: Settings,
    beside_torch: bool,
    json_path: str | None,
) -> bool:
    peers: list[RanksPeer] = []
    torch = _torch(world) if beside_torch else None
    if torch is not None:
        peers.append(torch)
    session = Session(world, target, settings, peers)
    state: dict[str, Any] = {
        "before": doctor.gpu_state(target),
        "other_processes": protocol.other_processes(target),
    }
    rows: list[results.Row] = []
    for op, problem in _problems(asked, steps, config, target, settings.seed):
        rows.append(measure(session, op, problem))
        if world.rank == 0:
            click.echo(f"{op} {'x'.join(map(str, problem.size))} is measured", err=True)
        del problem
        if target.name != "host":
            free_memory(target)
    if torch is not None:
        torch.close()
    state["after"] = doctor.gpu_state(target)
    if world.rank == 0:
        _print(rows, world, target, session)
        if json_path is not None:
            document = results.document(rows, target, settings.record(target), {}, state)
            of_ranks = {"ranks": world.size, "graphs": session.graphs, "model": asked.model}
            document |= {"kind": "parallel", "parallel": of_ranks}
            Path(json_path).write_text(to_json(document), encoding="utf-8")
    return all(row.ok for row in rows)


def _torch(world: World) -> Any:
    """Return a TorchPeer, or None if a rank lacks PyTorch."""
    from ...peers.base import Peer

    missing = Peer("torch", "torch", lambda op, call: None).missing()
    if not world.all(missing is None):
        if world.rank == 0:
            click.echo(f"peer torch: {missing or 'missing on another rank'}", err=True)
        return None
    from .torch_peer import TorchPeer

    return TorchPeer(world)


def _problems(
    asked: RanksRun,
    steps: Sequence[str],
    config: configs.ModelConfig,
    target: Target,
    seed: int,
) -> Iterator[tuple[str, Problem]]:
    """Yield one problem after the other: each takes much of a GPU's memory."""
    sizes = HOST if target.name == "host" else GPU
    if "mlp" in steps:
        for mlp in sizes.mlp:
            yield "mlp", Mlp(mlp, seed, target.xp)
    if "attention" in steps:
        for ring in sizes.attention:
            yield "ring_attention", Ring(ring, seed, target.xp)
    if "decode" in steps:
        config = small(config) if target.name == "host" else config
        decoder = random_decoder(config, "bfloat16", "16bit", target.name, seed)
        for batch in asked.batches or sizes.batches:
            context = asked.context or sizes.context
            yield f"{asked.model} decode", Decode(decoder, batch, context, target, seed)


def _print(rows: Sequence[results.Row], world: World, target: Target, session: Session) -> None:
    lines = []
    for row in rows:
        by_name = {result.name: result for result in row.results}
        for name in [name for name in by_name if not name.endswith(ALONE)]:
            result, alone = by_name[name], by_name[name + ALONE]
            efficiency = "-"
            if result.median_us and alone.median_us:
                efficiency = f"{alone.median_us / (world.size * result.median_us):.3f}"
            lines.append(
                (
                    *(row.op, "x".join(map(str, row.shape)), name, number(alone.median_us, 4)),
                    *(number(result.median_us, 4), efficiency),
                    number(row.bytes_sent / 1e6, 4) if row.bytes_sent and name == OURS else "-",
                    *(number(alone.error_over_bound), number(result.error_over_bound)),
                    "yes" if result.verified and alone.verified else "NO",
                )
            )
    how = "CUDA graphs" if session.graphs else "no CUDA graphs"
    print_table(
        (
            *("step", "shape", "by", "1 rank us", f"{world.size} ranks us", "efficiency"),
            *("MB sent", "error/bound: 1 rank", f"{world.size} ranks", "verified"),
        ),
        lines,
        f"{world.size} ranks, {how}; efficiency: time on 1 rank / ({world.size} x time on "
        f"{world.size}).  {title_of(target)}",
    )
    print_notes(rows)
