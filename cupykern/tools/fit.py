"""Fit the times of the GEMM model (cupykern/tuned/<arch>.json) to sweeps.

The model (gemm/sm90_heuristic.py: estimate) is linear in its times where memory does not bind; a
launch adds a constant.  The fit minimises squared relative errors, with a weak pull to the old
values, so that a time that no sweep determines stays.  Samples that memory binds by the old times
say nothing about a tile's and are left out.  Held-out shapes judge the fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from .. import dtypes, tuned
from ..gemm import sm90_heuristic
from ..gemm.decode_first import DecodeFirst
from ..gemm.gemm_task import GemmTask
from ..gemm.split_plan import SplitConfig, SplitKWorkspace
from ..targets.limits import multiprocessors
from ..tuning.trials import Trial

FITTED = ("activation", "split_launch", "split_element", "decode", "decode_element")
BESIDES = " besides"  # suffix for a tile's tile_us
COLD = " cold"  # suffix for its cold_us
_FIELDS = {"us": "", "tile_us": BESIDES, "cold_us": COLD}
LAUNCH = "launch"  # us, the same for every config: not in the file
_WEAK = 1e-3  # weight of an old value; a measurement has 1
_HELD_OUT = 0.25  # of the shapes
_Sample = TypeVar("_Sample", bound="HasTask")


class HasTask(Protocol):
    """A sample of any model."""

    @property
    def task(self) -> GemmTask: ...


@dataclass(frozen=True)
class Sample:
    """The median time of a call with the config of a tile."""

    task: GemmTask
    tile: sm90_heuristic.Tile
    splits: int
    us: float

    def parts(self, names: Sequence[str]) -> list[int]:
        """Return the indices in `names` of the times that the prediction uses."""
        rows = tuple(row for row, _ in self.tile.rows)
        return [i for i, x in enumerate(names) if "[" not in x or x.startswith(rows)]

    def predict(
        self, times: Mapping[str, float], blocks: int, constants: Mapping[str, Any] | None = None
    ) -> float:
        """Return the model's time.  constants: model_constants(times), if already computed."""
        tile = self.tile

        def of_rows(after: str) -> float:
            return sum(share * times[f"{row}{after}"] for row, share in tile.rows)

        besides = None if tile.tile_us is None else of_rows(BESIDES)
        cold = of_rows(COLD) if tile.cold_us else 0.0
        tile = replace(tile, us=of_rows(""), tile_us=besides, cold_us=cold)
        constants = constants or model_constants(times)
        modelled = sm90_heuristic.estimate(tile, self.task, blocks, self.splits, constants)
        return times[LAUNCH] + modelled


@dataclass(frozen=True)
class Quality:
    """Quality on held-out shapes.

    median_error, max_error: absolute relative errors.  mean_loss, max_loss: relative extra time of
    the chosen config (with the least estimate for a shape) over the best config.
    """

    num_shapes: int
    median_error: float
    max_error: float
    mean_loss: float
    max_loss: float


@dataclass(frozen=True)
class Fit:
    """times: all times of the model, by name.  counts: samples that determine each time."""

    times: dict[str, float]
    counts: dict[str, int]
    before: Quality
    after: Quality


def present_times(arch: str = sm90_heuristic.ARCH) -> dict[str, float]:
    """Return the file's times, by name; 0 for a launch.

    Names are for example "activation", "decode.gemm", "16-bit[0]".
    """
    found = {LAUNCH: 0.0}
    for name in FITTED:
        value = tuned.constants(arch, "gemm")[name]
        found |= (
            {f"{name}.{key}": x for key, x in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    for name, entry in tuned.load(arch)["gemm_tiles"].items():
        for i, tile in enumerate(entry["tiles"]):
            found |= {f"{name}[{i}]{_FIELDS[x]}": tile[x] for x in _FIELDS if x in tile}
    return found


def model_constants(times: Mapping[str, float]) -> dict[str, Any]:
    """Return the constants for sm90_heuristic.estimate."""
    return {**tuned.constants(sm90_heuristic.ARCH, "gemm"), **_nested(times)}


def _linear(times: Mapping[str, float]) -> dict[str, Any]:
    """Return the constants of the model without the bound by memory, which is not linear."""
    return {**model_constants(times), "memory_bytes": float("inf")}


def _without_memory_bound(
    found: Iterable[Sample], times: Mapping[str, float], blocks: int
) -> Iterator[tuple[Sample, float]]:
    """Yield the samples that memory does not bind, and what its reads add to their predictions."""
    constants, linear = model_constants(times), _linear(times)
    for sample in found:
        config, task = sample.tile.config, sample.task
        if isinstance(config, DecodeFirst):
            task = task.decoded
        elif sample.splits > 1:
            task = SplitKWorkspace(cast(SplitConfig, config), sample.splits).split(task)
        unbound = sample.predict(times, blocks, linear)
        added = sample.predict(times, blocks, constants) - unbound
        hidden = constants["memory_exposed"] * sm90_heuristic.read_us(task, constants)
        if added <= 1.05 * hidden:
            yield sample, added


def _nested(times: Mapping[str, float]) -> dict[str, Any]:
    """{"decode.gemm": 2.5} -> {"decode": {"gemm": 2.5}}"""
    made: dict[str, Any] = {}
    for name, value in times.items():
        head, _, rest = name.partition(".")
        if rest:
            made.setdefault(head, {})[rest] = value
        else:
            made[name] = value
    return made


def samples(trials: Iterable[Trial]) -> list[Sample]:
    """Return samples of verified GEMM trials without a formula, if a tile has their config."""
    found = []
    for task, config, us in product_times(trials):
        for tile, splits in _by_config(sm90_heuristic.tiles_of(task)).get(config, ()):
            if sm90_heuristic.has_epilogue(tile, task, splits):
                found.append(Sample(task, tile, splits, us))
    return found


def product_times(trials: Iterable[Trial]) -> Iterator[tuple[GemmTask, str, float]]:
    """Yield (task, config as text, us) of verified GEMM trials without a formula."""
    for trial in trials:
        key, us = trial.key or "", trial.median_us
        is_gemm = key.startswith("gemm ") and "formula=None" in key and len(trial.shape) == 3
        if us and trial.verified and is_gemm:
            yield task_of_key(key, trial.shape), trial.config, us


@cache
def _by_config(tiles: tuple[sm90_heuristic.Tile, ...]) -> dict[str, list[tuple[Any, int]]]:
    """Return (tile, splits) by the repr of their config, which trials contain."""
    found: dict[str, list[tuple[Any, int]]] = {}
    for tile in tiles:
        found.setdefault(repr(tile.config), []).append((tile, 1))
        if isinstance(tile.config, SplitConfig):
            for splits in tuned.constants(sm90_heuristic.ARCH, "gemm")["splits"]:
                config = SplitKWorkspace(tile.config, splits)
                found.setdefault(repr(config), []).append((tile, splits))
    return found


def task_of_key(key: str, shape: tuple[int, ...]) -> GemmTask:
    """Return the GemmTask of a choice.Request.key, which has no formula.

    The key's sizes are rounded; (M, N, K) of `shape` replace them.
    """
    words = dict(word.split("=", 1) for word in key.split(" on ")[0].split() if "=" in word)
    values: dict[str, Any] = dict(zip("mnk", shape, strict=True))
    for field in fields(GemmTask):
        if field.name not in (*values, "formula"):
            word = words[field.name]
            kinds: dict[str, Any] = {
                "np.dtype": dtypes.NAMES.__getitem__,
                "bool": "True".__eq__,
                "int": int,
            }
            values[field.name] = kinds.get(str(field.type), str)(word)
    return GemmTask(**values)


def held_out(found: Sequence[_Sample], seed: int) -> tuple[list[_Sample], list[_Sample]]:
    """Return the samples to fit to, and those of a random quarter of the shapes, which judge.

    Raises ValueError if fewer than 4 shapes are left to fit or to judge.
    """
    shapes = sorted({_shape(s.task) for s in found})
    picked = np.random.default_rng(seed).permutation(len(shapes))
    judged = {shapes[i] for i in picked[: round(_HELD_OUT * len(shapes))]}
    if min(len(judged), len(shapes) - len(judged)) < 4:
        raise ValueError(f"too few shapes to fit and to judge: {len(shapes)}")
    seen = [s for s in found if _shape(s.task) not in judged]
    return seen, [s for s in found if _shape(s.task) in judged]


def _shape(task: GemmTask) -> tuple[int, int, int]:
    return task.m, task.n, task.k


def fit(found: Sequence[Sample], seed: int = 0, only: Sequence[str] = ()) -> Fit:
    """Fit to all shapes except a random quarter.

    only: fit the launch and the times whose names begin with one of these ("16-bit[3]"), beside the
        present ones; else all.

    Raises ValueError if fewer than 4 shapes are left to fit or to judge, or for an unknown name.
    """
    blocks, old = multiprocessors(sm90_heuristic.ARCH), present_times()
    for start in only:
        if not any(name.startswith(start) for name in old):
            raise ValueError(f"no time is called {start}...; names are {', '.join(old)}")
    seen, unseen = held_out(found, seed)
    names = list(old)
    free = np.array([not only or x == LAUNCH or x.startswith(tuple(only)) for x in names])
    zero = dict.fromkeys(names, 0.0)
    units = [(unit, blocks, _linear(unit)) for x in names for unit in [{**zero, x: 1.0}]]
    kept = list(_without_memory_bound(seen, old, blocks))
    seen, reads = [s for s, _ in kept], np.array([added for _, added in kept])
    parts = np.zeros((len(seen), len(names)))
    for part, sample in zip(parts, seen, strict=True):
        for i in sample.parts(names):
            part[i] = sample.predict(*units[i])
    scale = np.array([old[name] or 1.0 for name in names])  # times in units of their old values
    measured = np.array([s.us for s in seen])
    present = np.array(list(old.values()))
    rest = 1 - (reads + parts[:, ~free] @ present[~free]) / measured  # `free` make up the rest
    rows = np.concatenate([parts * scale / measured[:, None], _WEAK * np.eye(len(names))])
    wanted = np.concatenate([rest, _WEAK * (present != 0)])
    solved = present.copy()
    solved[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0] * scale[free]
    used = (parts != 0).sum(0) * free
    counts = {name: int(count) for name, count in zip(names, used, strict=True)}
    times = {
        name: float(time) if counts[name] else old[name]
        for name, time in zip(names, solved, strict=True)
    }
    launch = {**old, LAUNCH: times[LAUNCH]}
    return Fit(times, counts, quality(unseen, launch, blocks), quality(unseen, times, blocks))


def quality(found: Sequence[Sample], times: Mapping[str, float], blocks: int) -> Quality:
    """Return how well `times` predict samples and choose between the samples of a task."""
    constants = model_constants(times)
    return quality_of((s.task, s.predict(times, blocks, constants), s.us) for s in found)


def quality_of(found: Iterable[tuple[GemmTask, float, float]]) -> Quality:
    """Return the quality of predictions: (task, predicted us, measured us)."""
    errors, losses = [], []
    by_task: dict[GemmTask, list[tuple[float, float]]] = {}
    for task, predicted, us in found:
        errors.append(abs(predicted / us - 1))
        by_task.setdefault(task, []).append((predicted, us))
    for pairs in by_task.values():
        losses.append(min(pairs)[1] / min(us for _, us in pairs) - 1)
    of_errors = float(np.median(errors)), max(errors)
    return Quality(len(by_task), *of_errors, float(np.mean(losses)), max(losses))


def updated(document: dict[str, Any], times: Mapping[str, float], measured: str) -> dict[str, Any]:
    """Return `document`, a tuned file, with these times rounded to three digits.

    measured: the note for changed times.
    """
    document = json.loads(json.dumps(document))
    old = present_times(document["arch"])
    changed = {name: time for name, time in times.items() if time != old[name]}
    rounded = {name: float(f"{time:.3g}") for name, time in changed.items()}
    for name, entry in document["gemm"].items():
        own = {k: v for k, v in rounded.items() if k.partition(".")[0] == name}
        for full, time in own.items():
            if isinstance(entry["value"], dict):
                entry["value"][full.partition(".")[2]] = time
            else:
                entry["value"] = time
            entry["measured"] = measured
    for name, entry in document["gemm_tiles"].items():
        for i, tile in enumerate(entry["tiles"]):
            for field, end in _FIELDS.items():
                if f"{name}[{i}]{end}" in rounded:
                    tile[field], entry["measured"] = rounded[f"{name}[{i}]{end}"], measured
    return document


def text(value: Any, indent: int = 0) -> str:
    """Format JSON with a line for every number and every tile."""
    inner, end = "\n" + " " * (indent + 1), "\n" + " " * indent
    if isinstance(value, dict) and not {"value", "config"} & value.keys():
        lines = (f"{json.dumps(k)}: {text(v, indent + 1)}" for k, v in value.items())
        return "{" + inner + f",{inner}".join(lines) + end + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + inner + f",{inner}".join(text(x, indent + 1) for x in value) + end + "]"
    return json.dumps(value)
