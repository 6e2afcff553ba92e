"""Which of an op's drawn problems are small for the host."""

from __future__ import annotations

from typing import Any

from cupykern.op import Op


def is_small(op: Op, problem: Any) -> bool:
    """False of the few that take as long as all others together."""
    work = op.work(problem)
    own = getattr(problem, "own", problem)  # of a cascade
    pairs = getattr(own, "queries", 1) * (getattr(own, "keys", 1) + getattr(problem, "shared", 0))
    return work.bytes_read + work.bytes_written <= 1 << 20 and pairs <= 4096
