"""A benchmark against an earlier one: for each row keep, reject or noise.

A row is run again and again, the other rows in between and its arrays elsewhere in memory each
time, so that the spread of its runs holds what differs between two runs of one program: clocks,
temperature, the places of arrays.  After each of some numbers of runs (looks) every row is judged,
and one that is decided is run no more:

    reject  slower by more than MARGIN;
    keep    faster by more than MARGIN;
    noise   neither, and no change of FOUND or more; or still undecided after the last look.

Each is a one-sided test of Student's t for the means of log times, the variances of both sides
pooled (the same rows, measured in the same way).  p-values are as Abramowitz and Stegun 26.7.3 and
26.7.4.

Of unchanged code, whose means differ by at most MARGIN between two processes, a benchmark rejects a
row with a probability of at most FALSE_ALARMS / 2, and finds one faster with as much: the level of
each test is that by the number of rows and by the number of looks (Bonferroni, which needs no
independence).  Likewise one of the rows that did change by FOUND is called noise before the last
look with a probability of at most FALSE_ALARMS / 2.  That is derived for normal log times;
tests/tools/test_baseline.py counts that it holds with heavy tails and two levels too, if the
baseline has runs enough to show them.

What memory bounds gets slower with the memory's clock, as plain copies do; on the host everything
gets slower with what else the machine does, and a plain copy is a kernel too.  The copies' change,
its mean over all such rows, is taken off; a row's own copy alone would add its own noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import stored
from .results import Row

FALSE_ALARMS = 0.05
MARGIN = 0.01  # relative: two processes differ by about as much, whatever the number of runs
FOUND = 0.03
LOOKS = (6, 8, 12, 16, 24)  # runs
MEMORY_BOUND = 0.5  # the plain copy's time over ours: from here on memory bounds a row
KINDS = ("bench", "comparison", "suite")  # of documents with rows
_LOG_MARGIN, _LOG_FOUND = math.log1p(MARGIN), math.log1p(FOUND)


@dataclass(frozen=True)
class Verdict:
    """word: "keep" (faster), "reject" (slower, or wrong), "noise", or "new" (not in the baseline).

    decided: more runs would not be worth their time.  change: of the time, relative; spread: one
    run's standard deviation, relative; p: of a reject or keep; seen: the smallest slowdown that so
    many runs of such a spread would call a reject, relative.  runs: (now, before).
    """

    word: str
    decided: bool = True
    change: float | None = None
    spread: float | None = None
    p: float | None = None
    seen: float | None = None
    runs: tuple[int, int] | None = None


def load(path: Path, device: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The rows of a benchmark's JSON, by op, shape and dtype.

    Raises ValueError if it is no benchmark, or was measured on another device.
    """
    document = stored.read(path)
    if not isinstance(document, dict) or document.get("kind") not in KINDS:
        raise ValueError(f"{path} is no benchmark's JSON")
    try:
        there = document["machine"]["device"]
        rows = {(row["op"], tuple(row["shape"]), row["dtype"]): row for row in document["rows"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no whole benchmark's JSON: {error!r}") from None
    if there != device:
        raise ValueError(f"{path} was measured on {there}; this is {device}")
    return rows


def looks(most: int | None) -> tuple[int, ...]:
    """The numbers of runs after which rows are judged, `most` the last one (default: LOOKS's)."""
    if most is None:
        return LOOKS
    return (*(runs for runs in LOOKS if runs < most), most)


# --- all rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """Log times of a row's runs now and before, ours and the plain copy's; like_copies: what makes
    copies slower makes the row."""

    now: list[float]
    before: list[float]
    plain_now: list[float]
    plain_before: list[float]
    like_copies: bool


def verdicts(
    rows: Iterable[Row],
    baseline: dict[tuple[Any, ...], dict[str, Any]],
    num_looks: int = 1,
    alike: bool = False,
) -> list[Verdict]:
    """One for each row, at one of `num_looks` looks.  alike: every row gets slower as copies do."""
    rows = list(rows)
    sides = [_sides(row, baseline.get((row.op, row.shape, row.dtype)), alike) for row in rows]
    drift, drift_error2 = _drift([side for side in sides if side is not None and side.like_copies])
    tests = num_looks * sum(side is not None for side in sides)
    found = []
    for row, side in zip(rows, sides, strict=True):
        if not row.ok:
            found.append(Verdict("reject"))
        elif side is None:
            found.append(Verdict("new"))
        elif side.like_copies:
            found.append(judge(side.now, side.before, tests, drift, drift_error2))
        else:
            found.append(judge(side.now, side.before, tests))
    return found


def _sides(row: Row, before: dict[str, Any] | None, alike: bool) -> _Sides | None:
    """None where one side was not timed."""
    if before is None:
        return None
    old = before.get("repeats") or [
        {"median_us": before["results"][0]["median_us"], "plain_us": before["plain_us"]}
    ]
    runs: tuple[Sequence[Mapping[str, Any]], ...] = (row.repeats, old)
    if not all(runs) or any(run["median_us"] is None for side in runs for run in side):
        return None
    times = [[math.log(run["median_us"]) for run in side] for side in runs]
    plain = [[math.log(run["plain_us"]) for run in side if run["plain_us"]] for side in runs]
    whole = all(len(a) == len(b) for a, b in zip(times, plain, strict=True))
    limit = -math.inf if alike else math.log(MEMORY_BOUND)
    like_copies = whole and all(
        statistics.fmean(p) - statistics.fmean(t) >= limit
        for t, p in zip(times, plain, strict=True)
    )
    return _Sides(times[0], times[1], plain[0], plain[1], like_copies)


def _drift(sides: Sequence[_Sides]) -> tuple[float, float]:
    """(the mean change of the logs of plain copies' times, the square of its standard error)."""
    if not sides:
        return 0.0, 0.0
    changes = [statistics.fmean(s.plain_now) - statistics.fmean(s.plain_before) for s in sides]
    errors2 = [_pooled(s.plain_now, s.plain_before)[0] for s in sides]
    return statistics.fmean(changes), sum(errors2) / len(sides) ** 2


# --- one row -------------------------------------------------------------------------------------


def _pooled(now: Sequence[float], before: Sequence[float]) -> tuple[float, float, int]:
    """(squared standard error of the means' difference, a run's variance, degrees of freedom)."""
    freedom = len(now) + len(before) - 2
    squares = sum(
        (len(side) - 1) * statistics.variance(side) for side in (now, before) if len(side) > 1
    )
    variance = squares / freedom if freedom else 0.0
    return variance * (1 / len(now) + 1 / len(before)), variance, freedom


def judge(
    now: Sequence[float],
    before: Sequence[float],
    tests: int = 1,
    drift: float = 0.0,
    drift_error2: float = 0.0,
) -> Verdict:
    """now, before: log times of runs, at least two of now.  tests: rows by looks.  drift: what of
    the change is the machine's, and the square of its standard error.

    Raises ValueError for too few runs.
    """
    if len(now) < 2 or len(before) == 0:
        raise ValueError("a verdict needs two runs now and one before")
    change = statistics.fmean(now) - statistics.fmean(before) - drift
    error2, variance, freedom = _pooled(now, before)
    error = math.sqrt(error2 + drift_error2)
    level = FALSE_ALARMS / 2 / tests
    p = _tail(abs(change) - _LOG_MARGIN, error, freedom)
    if p <= level:
        word, decided = ("reject" if change > 0 else "keep"), True
    else:
        word, decided = "noise", _tail(_LOG_FOUND - abs(change), error, freedom) <= level
    return Verdict(
        *(word, decided, math.expm1(change), math.sqrt(variance), p),
        math.expm1(_LOG_MARGIN + quantile(level, freedom) * error),
        (len(now), len(before)),
    )


def _tail(distance: float, error: float, freedom: int) -> float:
    """P(T >= distance / error)."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    half = (1 - within(abs(distance) / error, freedom)) / 2
    return half if distance > 0 else 1 - half


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


def quantile(p: float, freedom: int) -> float:
    """t with P(T >= t) = p < 0.5, by bisection."""
    low, high = 0.0, 1.0
    while (1 - within(high, freedom)) / 2 > p:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if (1 - within(middle, freedom)) / 2 > p:
            low = middle
        else:
            high = middle
    return high
