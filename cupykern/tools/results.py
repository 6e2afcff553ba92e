"""A benchmark's results: records, the printed table, JSON and CSV."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..targets import Target
from ..tuning.contender import ERRORS, Result
from . import records
from .tables import number


@dataclass
class Row:
    """One op on one shape and dtype; results[0] is ours, then the peers.

    clocks: of the GPU during timing (protocol.summarize_clocks), if known.
    repeats: our median_us and plain_us of each run of the row, if it had several (baseline.py).
    bytes_sent: for a step on several ranks, the maximum that one rank sends.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    problem: str
    bytes_read: int
    bytes_written: int
    flops: int
    plain: str  # "copy" or "read"
    plain_us: float | None = None
    results: list[Result] = field(default_factory=list)
    clocks: dict[str, Any] | None = None
    repeats: list[dict[str, float | None]] = field(default_factory=list)
    bytes_sent: int | None = None

    @property
    def ok(self) -> bool:
        return self.results[0].verified


_TIMES = ("median_us", "q20_us", "q80_us", "gbps", "tflops", "speed_percent")


def merged(runs: Sequence[Row]) -> Row:
    """Merge several runs of one row: medians of times, the worst of errors and clocks."""
    first = runs[0]
    if len(runs) == 1:
        return first
    by_name = [{result.name: result for result in run.results} for run in runs]
    clocks = [run.clocks for run in runs if run.clocks is not None]
    return replace(
        first,
        plain_us=_median([run.plain_us for run in runs]),
        results=[
            _merged([results[result.name] for results in by_name if result.name in results])
            for result in first.results
        ],
        clocks=next((c for c in clocks if c["fell"]), clocks[0] if clocks else None),
        repeats=[{"median_us": run.results[0].median_us, "plain_us": run.plain_us} for run in runs],
    )


def _merged(results: Sequence[Result]) -> Result:
    figures: dict[str, Any] = {
        **{name: _median([getattr(result, name) for result in results]) for name in _TIMES},
        **{
            name: max((v for r in results if (v := getattr(r, name)) is not None), default=None)
            for name in ERRORS
        },
    }
    return replace(
        results[0],
        runs=sum(result.runs for result in results),
        verified=all(result.verified for result in results),
        note=next((result.note for result in results if result.note is not None), None),
        **figures,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


COLUMNS = (
    "op", "shape", "dtype", "by", "median us", "q20", "q80", "speed", "% of plain", "time / ours",
    "error/bound", "max abs", "max rel", "ulps", "rel L2", "verified",
)  # fmt: skip
HOST_COLUMNS = ("op", "shape", "dtype", "median us", "error/bound", "max abs", "verified")


def table_rows(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of COLUMNS for each result."""
    for row in rows:
        ours = row.results[0]
        for result in row.results:
            if result.tflops is not None:
                speed = f"{number(result.tflops)} TFLOP/s"
            else:
                speed = "-" if result.gbps is None else f"{number(result.gbps, 4)} GB/s"
            versus = "-"
            if result is not ours and result.median_us and ours.median_us:
                versus = f"{result.median_us / ours.median_us:.2f}x"
            percent = "-" if result.speed_percent is None else f"{result.speed_percent:.1f}"
            yield (
                row.op,
                "x".join(map(str, row.shape)),
                row.dtype,
                result.name,
                number(result.median_us, 4),
                number(result.q20_us, 4),
                number(result.q80_us, 4),
                speed,
                f"{percent} ({row.plain})" if percent != "-" else percent,
                versus,
                number(result.error_over_bound),
                number(result.max_abs),
                number(result.max_rel),
                number(result.ulps),
                number(result.relative_l2),
                "yes" if result.verified else "NO",
            )


def document(
    rows: Sequence[Row],
    target: Target,
    settings: dict[str, Any],
    host_time_us: dict[str, Any],
    gpu_state: dict[str, Any],
    interrupted: bool = False,
) -> dict[str, Any]:
    """Return the complete record of a run, for results/*.json."""
    return {
        **records.header("bench", target),
        "gpu_state": gpu_state,
        "settings": settings,
        "interrupted": interrupted,
        "host_time_us": host_time_us,
        "rows": [asdict(row) for row in rows],
    }


def write_csv(rows: Iterable[Row], path: str) -> None:
    """Write one line per result."""
    lines = [
        {
            "op": row.op,
            "shape": "x".join(map(str, row.shape)),
            "dtype": row.dtype,
            "plain": row.plain,
            **asdict(result),
        }
        for row in rows
        for result in row.results
    ]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, lines[0].keys() if lines else ("op",))
        writer.writeheader()
        writer.writerows(lines)
