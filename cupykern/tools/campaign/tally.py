"""A worker's input, a Task, and its result, a Tally."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ... import OPS
from ...check import Comparison
from ...op import Op

MOST_FAILURES = 50  # per part, recorded with their text; all failures are counted
RATIOS = ("error_over_bound", "rms_ratio", "bias_ratio")  # of check.Comparison
COLUMNS = ("done", "failed", *RATIOS)
_LONGEST = 1500  # characters of a failure's text


@dataclass(frozen=True)
class Task:
    """Cases `first` to `first + count - 1` of a part; case i is drawn from seed + i alone.

    subject: an op's name, or another key by which the part divides its cases.
    """

    part: str
    subject: str
    first: int
    count: int
    seed: int

    @property
    def seeds(self) -> range:
        return range(self.seed + self.first, self.seed + self.first + self.count)


@dataclass
class Row:
    """Checks of one op and dtype; worst ratios are None where nothing is compared with FP64."""

    op: str
    dtype: str
    done: int = 0
    failed: int = 0
    error_over_bound: float | None = None
    rms_ratio: float | None = None
    bias_ratio: float | None = None

    def merge(self, other: Row) -> None:
        self.done += other.done
        self.failed += other.failed
        for name in RATIOS:
            ratios = [r for r in (getattr(self, name), getattr(other, name)) if r is not None]
            setattr(self, name, max(ratios, default=None))


@dataclass
class Tally:
    """Counts, failures and notes.

    context_lost: the process can no longer use its GPU.
    broken: the task ended abnormally.
    """

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    context_lost: bool = False
    broken: bool = False

    @property
    def done(self) -> int:
        return sum(row.done for row in self.rows.values())

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows.values())

    def add(
        self, op: str, dtype: str, comparison: Comparison | None = None, count: int = 1
    ) -> None:
        """Count checks that ran, passed or failed."""
        row = Row(op, dtype, count)
        if comparison is not None:
            for name in RATIOS:
                setattr(row, name, getattr(comparison, name))
        self._merge_row(row)

    def fail(
        self, op: str, dtype: str, seed: int, problem: Any, error: str, count: int = 1
    ) -> None:
        """Count failed checks, in addition to `add`."""
        self._merge_row(Row(op, dtype, 0, count))
        self._record({"op": op, "dtype": dtype, "seed": seed, "problem": str(problem)}, error)
        self.context_lost |= is_context_lost(error)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Tally) -> None:
        for row in other.rows.values():
            self._merge_row(row)
        self.failures += other.failures[: MOST_FAILURES - len(self.failures)]
        for text in other.notes:
            self.note(text)
        self.context_lost |= other.context_lost

    def document(self) -> dict[str, Any]:
        """Return the entry for the record.  rows: the COLUMNS that are set, by op and dtype."""
        rows: dict[str, dict[str, list[Any]]] = {}
        for (op, dtype), row in sorted(self.rows.items()):
            numbers = (getattr(row, name) for name in COLUMNS)
            rows.setdefault(op, {})[dtype] = [x for x in numbers if x is not None]
        return {"rows": rows, "failures": self.failures, "notes": self.notes}

    def _merge_row(self, row: Row) -> None:
        self.rows.setdefault((row.op, row.dtype), Row(row.op, row.dtype)).merge(row)

    def _record(self, where: dict[str, Any], error: str) -> None:
        if len(self.failures) < MOST_FAILURES:
            if len(error) > _LONGEST:
                error = f"{error[: _LONGEST // 3]} ... {error[-_LONGEST * 2 // 3 :]}"
            self.failures.append({**where, "error": error})


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_context_lost(error: str) -> bool:
    """Return whether the text names a CUDA error that makes the process's GPU context unusable."""
    of_cuda = ("CUDARuntimeError", "CUDADriverError", "cudaError", "CUDA_ERROR", "hipError")
    return any(name in error for name in of_cuda) and "emoryAllocation" not in error


def find_op(name: str) -> Op:
    return next(op for op in OPS if op.name == name)
