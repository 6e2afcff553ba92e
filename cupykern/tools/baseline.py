"""A benchmark against an earlier one: for each row keep, reject or noise.

The same row is run several times, with the other rows in between, so that its spread holds what
drifts: clocks, temperature, where arrays lie in memory.  Rows that memory bounds are compared by their
time over the plain copy's of the same rounds, which a slower clock hits alike.

The test is Welch's for two means of log times, one-sided each way, with variances pooled where a side
has a single run; p-values as Abramowitz and Stegun 26.7.3 and 26.7.4; Bonferroni over the rows, so
that a change without effect is rejected in at most FALSE_ALARMS of all benchmarks.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import Row

FALSE_ALARMS = 0.05
SMALLEST = 0.01  # relative: less is called noise, however sure
REPEATS = 5
MEMORY_BOUND = 0.5  # the plain copy's time over ours: from here on memory bounds a row


@dataclass(frozen=True)
class Verdict:
    """change: of the time, relative; spread: one run's standard deviation, relative.

    word: "keep" (faster), "reject" (slower, or wrong now), "noise", or "new" (the baseline lacks it).
    """

    word: str
    change: float | None = None
    spread: float | None = None
    p: float | None = None


def load(path: Path, device: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a benchmark's JSON, by op, shape and dtype.

    Raises ValueError if it is no benchmark, or was measured on another device.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != "bench":
        raise ValueError(f"{path} is no benchmark's JSON")
    there = document["machine"]["device"]
    if there != device:
        raise ValueError(f"{path} was measured on {there}; this is {device}")
    return {(row["op"], tuple(row["shape"]), row["dtype"]): row for row in document["rows"]}


def verdicts(rows: Iterable[Row], baseline: dict[tuple[Any, ...], dict[str, Any]]) -> list[Verdict]:
    """One for each row."""
    rows = list(rows)
    pairs = []
    for row in rows:
        before = baseline.get((row.op, row.shape, row.dtype))
        pairs.append(None if before is None else _samples(row, before))
    tests = sum(pair is not None for pair in pairs)
    found = []
    for row, pair in zip(rows, pairs, strict=True):
        if not row.ok:
            found.append(Verdict("reject"))
        elif pair is None:
            found.append(Verdict("new"))
        else:
            found.append(judge(*pair, tests))
    return found


def _samples(row: Row, before: dict[str, Any]) -> tuple[list[float], list[float]] | None:
    """Log times of each run, (now, before); None where one was not timed."""
    old_repeats = before.get("repeats") or [
        {"median_us": before["results"][0]["median_us"], "plain_us": before["plain_us"]}
    ]
    sides = (row.repeats, old_repeats)
    if not all(sides) or any(run["median_us"] is None for side in sides for run in side):
        return None
    paired = all(
        run["plain_us"] and run["plain_us"] >= MEMORY_BOUND * run["median_us"]
        for side in sides
        for run in side
    )
    now, then = (
        [math.log(run["median_us"] / (run["plain_us"] if paired else 1.0)) for run in side]
        for side in sides
    )
    return now, then


def judge(now: Sequence[float], before: Sequence[float], tests: int = 1) -> Verdict:
    """now, before: log times of runs, at least two of now.  tests: how many rows are judged.

    Raises ValueError for too few runs.
    """
    if len(now) < 2 or not before:
        raise ValueError("a verdict needs two runs now and one before")
    change = statistics.fmean(now) - statistics.fmean(before)
    var_now = statistics.variance(now)
    if len(before) > 1:
        var_before = statistics.variance(before)
        parts = var_now / len(now), var_before / len(before)
        error2 = sum(parts)
        weights = parts[0] ** 2 / (len(now) - 1) + parts[1] ** 2 / (len(before) - 1)
        freedom = max(1, int(error2**2 / weights)) if weights else len(now) + len(before) - 2
    else:  # its spread is not known: as now
        error2, freedom = var_now * (1 / len(now) + 1), len(now) - 1
    t = abs(change) / math.sqrt(error2) if error2 else math.inf
    p = (1 - within(t, freedom)) / 2 if math.isfinite(t) else 0.0
    effect = math.expm1(change)
    sure = p * tests <= FALSE_ALARMS / 2 and abs(effect) >= SMALLEST
    word = "noise" if not sure else "reject" if change > 0 else "keep"
    return Verdict(word, effect, math.sqrt(var_now), p)


def within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution with a whole number of degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if freedom % 2 else 1.0
    for i in range(freedom % 2 + 2, freedom - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if freedom % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
