"""A planted slowdown: an op whose rows of a benchmark do more work than they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cupykern.op import Op, Work


def slowed(op: Op, share: float) -> Op:
    """`op`, whose benchmark of a shape runs its kernel on 1 + `share` times the first dim, and
    counts the work of the shape itself.

    Every result is right, and verified; only the time gives it away.
    """
    real: dict[str, Any] = {}

    def bench_problem(shape: tuple[int, ...], dtype: str) -> Any:
        more = op.bench_problem((round(shape[0] * (1 + share)), *shape[1:]), dtype)
        real[repr(more)] = op.bench_problem(shape, dtype)
        return more

    def work(problem: Any) -> Work:
        return op.work(real[repr(problem)])

    return replace(op, bench_problem=bench_problem, work=work)
