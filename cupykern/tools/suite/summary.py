"""Compare a suite's times with the fastest peer's: a line per op and dtype."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import stored
from ..tables import number
from .choice import group

BEHIND = (0.02, 0.03, 0.10)
_FURTHEST = 3


@dataclass(frozen=True)
class Behind:
    """A row and its fastest peer.

    ratio: the peer's time over ours; less than 1 if we are slower.
    """

    shape: tuple[int, ...]
    dtype: str
    peer: str
    ratio: float

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {self.peer} {self.ratio:.3f}"


@dataclass(frozen=True)
class Line:
    """The rows of an op and dtype that were timed beside a peer.

    alone: other rows, which no peer ran.  wrong: rows of both kinds with unverified results.
    speedup: geometric mean of the fastest peers' times over ours; None without rows.
    behind: for each of BEHIND, the share of rows that are slower by at least this fraction: the
        peer takes at most 1 - BEHIND of our time.
    furthest: the slowest rows relative to the peer, slowest first.
    ratios: the fastest peer's time over ours, for all rows beside a peer, ascending.
    """

    op: str
    dtype: str
    rows: int
    alone: int
    wrong: int
    speedup: float | None
    behind: tuple[float, ...] | None
    furthest: tuple[Behind, ...]
    ratios: tuple[float, ...]


def fastest_peer(row: dict[str, Any]) -> tuple[str, float] | None:
    """Return (name, time over ours) of the fastest peer; None if we or no peer were timed.

    row: of a benchmark's document.
    """
    ours = row["results"][0] if row["results"] else None
    if ours is None or not ours["median_us"]:
        return None
    timed = stored.peer_times(row)
    return (min(timed)[1], min(timed)[0] / ours["median_us"]) if timed else None


def lines(rows: Iterable[dict[str, Any]]) -> list[Line]:
    """Return the lines in the order of cupykern.OPS, then by dtype."""
    from ... import OPS

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["op"], group(row["dtype"])), []).append(row)
    places = {op.name: i for i, op in enumerate(OPS)}
    order = sorted(groups, key=lambda key: (places.get(key[0], len(places)), key[1]))
    return [_line(*key, groups[key]) for key in order]


def _line(op: str, dtype: str, rows: Sequence[dict[str, Any]]) -> Line:
    beside = sorted(_beside(rows), key=lambda row: row.ratio)
    ratios = [row.ratio for row in beside]
    return Line(
        op,
        dtype,
        rows=len(beside),
        alone=len(rows) - len(beside),
        wrong=sum(not (row["results"] and row["results"][0]["verified"]) for row in rows),
        speedup=statistics.geometric_mean(ratios) if ratios else None,
        behind=tuple(share_behind(ratios, by) for by in BEHIND) if ratios else None,
        furthest=tuple(row for row in beside[:_FURTHEST] if row.ratio < 1),
        ratios=tuple(ratios),
    )


def _beside(rows: Iterable[dict[str, Any]]) -> Iterator[Behind]:
    for row in rows:
        found = fastest_peer(row)
        if found is not None:
            yield Behind(tuple(row["shape"]), row["dtype"], *found)


def share_behind(ratios: Sequence[float], by: float) -> float:
    """Return the share of ratios (peer's time over ours) that are at most 1 - by."""
    return sum(ratio <= 1 - by for ratio in ratios) / len(ratios)


HEAD = (
    *("op", "dtype", "rows", "without a peer", "wrong", "peer / ours"),
    *(f"behind by {by:.0%}" for by in BEHIND),
)


def cells(line: Line) -> tuple[str, ...]:
    """Return a line's cells, in the order of HEAD."""
    shares = ["-"] * len(BEHIND) if line.behind is None else [f"{x:.0%}" for x in line.behind]
    counts = map(str, (line.rows, line.alone, line.wrong))
    return line.op, line.dtype, *counts, number(line.speedup), *shares
