"""The winners of sweeps, as rows of the store."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..op import Call, Op
from ..runtime import choice, plans, store
from ..targets import Target
from .sweep import Candidate, Settings, Subject, sweep
from .timing import clock_of
from .trials import Trial, by_problem, ranking

GAIN = 0.98  # times the default's time: the most that a config can take to replace the default
SETTINGS = Settings(rep_ms=10.0, warmup_ms=2.0, jobs=1)


def tune_request(
    op: Op,
    call: Call,
    request: choice.Request,
    target: Target,
    settings: Settings,
    shape: tuple[int, ...] = (),
    dtype: str = "",
    each: Callable[[Trial], None] = lambda trial: None,
) -> tuple[list[Trial], Trial]:
    """Sweep the configs of a request and store the winner; return (ranking, winner).

    Raises RuntimeError if no config is right.
    """
    candidates = tuple(Candidate(c, request.variant(c)) for c in request.configs())
    subject = Subject(op, shape, dtype, call, target, candidates, request.key, request.digest)
    trials = []
    for trial in sweep(subject, clock_of(target), settings):
        trials.append(trial)
        each(trial)
    ranked = ranking(trials)
    best = winner(ranked)
    if best is None:
        raise RuntimeError(f"no config of {op.name} is right here: {ranked[0].reason}")
    store.put({request.key: row(best, ranked)})
    plans.clear()
    return ranked, best


def winner(ranked: list[Trial]) -> Trial | None:
    """Return the first of a ranking, or the default if it is about as fast; None if all failed."""
    right = [trial for trial in ranked if trial.reason is None and trial.median_us is not None]
    if not right:
        return None
    default = next((trial for trial in right if trial.default), None)
    if default is None or (right[0].ratio is not None and right[0].ratio <= GAIN):
        return right[0]
    return default


def row(best: Trial, ranked: list[Trial]) -> dict[str, Any]:
    """Return the store's row for a winner."""
    return {
        "op": best.op,
        "config": best.config,
        "digest": best.digest,
        "median_us": best.median_us,
        "default_us": best.default_us,
        "configs": len(ranked),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class Worth:
    """rows: the store's, by key.

    default, wrong, unasked: numbers of problems whose default stays, whose default is not right,
    and whose calls request no tuned config.
    """

    rows: Mapping[str, Any]
    default: int = 0
    wrong: int = 0
    unasked: int = 0


def worth_of_sweeps(trials: Iterable[Trial]) -> Worth:
    """Return the rows of problems whose default config is not the best.

    If problems share a key, the one whose winner gains most is used.
    """
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    default = wrong = unasked = 0
    for _, group in by_problem(trials):
        ranked = ranking(group)
        best = winner(ranked)
        if best is None or best.ratio is None:
            wrong += 1
        elif best.default:
            default += 1
        elif not best.key:
            unasked += 1
        elif best.key not in found or best.ratio < found[best.key][0]:
            found[best.key] = best.ratio, row(best, ranked)
    rows = {key: found_row for key, (_, found_row) in found.items()}
    return Worth(rows, default, wrong, unasked)


def write_built_in(trials: Iterable[Trial], path: Path | None = None) -> Worth:
    """Rewrite the package's built-in rows from sweeps.  Raises OSError."""
    worth = worth_of_sweeps(trials)
    store.write(path or store.BUILT_IN, worth.rows)
    store.built_in.cache_clear()
    plans.clear()
    return worth
