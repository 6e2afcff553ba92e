"""Compare a benchmark with an earlier one: each row is keep, reject or noise.

A row runs repeatedly, with the other rows in between and its arrays elsewhere in memory each time.
So the spread of its runs includes the differences between two runs of one program: clocks,
temperature, array addresses.  Every row is judged after certain numbers of runs (looks); a decided
row is not run again:

    reject  slower by more than MARGIN;
    keep    faster by more than MARGIN;
    noise   neither, and no change of FOUND or more; or still undecided after the last look.

Each is a one-sided Student's t-test on the means of log times, with the pooled variance of both
sides (the same rows, measured in the same way).  p-values follow Abramowitz and Stegun 26.7.3 and
26.7.4.

If the code is unchanged and means differ by at most MARGIN between two processes, a benchmark
rejects a row with a probability of at most FALSE_ALARMS / 2.  The same limit holds for finding a
row faster.  The level of each test is this limit divided by the number of rows and the number of
looks (Bonferroni, which does not require independence).  Likewise, a row that did change by FOUND
is called noise before the last look with a probability of at most FALSE_ALARMS / 2.  This is
derived for normal log times; tests/tools/test_baseline.py checks it for heavy tails and two levels
too, if the baseline has enough runs to show them.

Memory-bound rows slow down with the memory clock, like plain copies.  On the host all rows slow
down with the machine's load, and a plain copy is a kernel too.  So the mean change of the copies,
over all such rows, is subtracted; a row's own copy alone would add its noise.
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
MARGIN = 0.01  # relative: two processes differ by about as much, for any number of runs
FOUND = 0.03
LOOKS = (6, 8, 12, 16, 24)  # runs
MEMORY_BOUND = 0.5  # plain copy's time over ours, from which a row counts as memory-bound
KINDS = ("bench", "comparison", "suite")  # of documents with rows
_LOG_MARGIN, _LOG_FOUND = math.log1p(MARGIN), math.log1p(FOUND)


@dataclass(frozen=True)
class Verdict:
    """word: "keep" (faster), "reject" (slower, or wrong), "noise", or "new" (not in the baseline).

    decided: the row needs no more runs.  change: relative change of the time.  spread: relative
    standard deviation of one run.  p: of the test for a reject or keep.  seen: the smallest
    relative slowdown that this many runs of this spread would reject.  runs: (now, before).
    """

    word: str
    decided: bool = True
    change: float | None = None
    spread: float | None = None
    p: float | None = None
    seen: float | None = None
    runs: tuple[int, int] | None = None


def load(path: Path, device: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Read the rows of a benchmark's JSON, by op, shape and dtype.

    Raises ValueError if it is not a benchmark, or was measured on another device.
    """
    document = stored.read(path)
    if not isinstance(document, dict) or document.get("kind") not in KINDS:
        raise ValueError(f"{path} is not a benchmark's JSON")
    try:
        there = document["machine"]["device"]
        rows = {(row["op"], tuple(row["shape"]), row["dtype"]): row for row in document["rows"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete benchmark's JSON: {error!r}") from None
    if there != device:
        raise ValueError(f"{path} was measured on {there}; this is {device}")
    return rows


def looks(most: int | None) -> tuple[int, ...]:
    """Return the numbers of runs after which rows are judged, up to `most` (default: LOOKS)."""
    if most is None:
        return LOOKS
    return (*(runs for runs in LOOKS if runs < most), most)


# --- all rows ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sides:
    """Log times of a row's runs now and before, ours and the plain copy's.

    like_copies: the row slows down like the copies.
    """

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
    """Judge all rows at one of `num_looks` looks.  alike: every row slows down like copies."""
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
    """Return both sides' log times, or None if one side was not timed."""
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
    """Return (mean change of the plain copies' log times, square of its standard error)."""
    if not sides:
        return 0.0, 0.0
    changes = [statistics.fmean(s.plain_now) - statistics.fmean(s.plain_before) for s in sides]
    errors2 = [_pooled(s.plain_now, s.plain_before)[0] for s in sides]
    return statistics.fmean(changes), sum(errors2) / len(sides) ** 2


# --- one row -------------------------------------------------------------------------------------


def _pooled(now: Sequence[float], before: Sequence[float]) -> tuple[float, float, int]:
    """Return (squared standard error of the difference of means, variance of a run, degrees of
    freedom)."""
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
    """Judge one row.

    now, before: log times of runs, at least two now and one before.  tests: rows times looks.
    drift, drift_error2: the change of the machine, and the square of its standard error.
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
    """Return P(T >= distance / error)."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    half = (1 - within(abs(distance) / error, freedom)) / 2
    return half if distance > 0 else 1 - half


def within(t: float, freedom: int) -> float:
    """Return P(|T| <= t) of Student's distribution with an integer number of degrees of freedom."""
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
    """Return t with P(T >= t) = p < 0.5, by bisection."""
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
