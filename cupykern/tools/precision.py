"""Error distributions in units in the last place, with the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..check import ulp_errors
from ..numerics import to_numpy
from ..op import Bound, Op
from .tables import number, print_table

QUANTILES = (0.5, 0.9, 0.99, 0.999)
_POLICIES = ("policy", "qk_accumulate", "accumulate", "compensated", "algorithm")
_MAX_SAMPLE = 4096  # elements kept per output, always including the worst one


_Key = tuple[str, str, str, str]  # op, dtype, policy, output


@dataclass(frozen=True)
class Row:
    """Errors of one op, input dtype, policy and output dtype, in ulps of the output.

    quantiles: of |error| at QUANTILES.  worst: the largest.  half: the share up to half an ulp,
    which rounding alone can cause.  bound: the median of the derived bound.  error_over_bound: the
    largest.
    """

    op: str
    dtype: str
    policy: str
    output: str
    elements: int
    quantiles: tuple[float, ...]
    worst: float
    half: float
    bound: float
    error_over_bound: float


class Collector:
    """Collects the errors of checked problems; an Observer for check.run_cases."""

    def __init__(self, seed: int = 0):
        self._rng = np.random.default_rng(seed)
        self._found: dict[_Key, list[tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(
        self,
        op: Op,
        problem: Any,
        outputs: Sequence[Any],
        references: Sequence[Any],
        bounds: Sequence[Bound],
    ) -> None:
        policy = policy_of(problem)
        dtype = str(getattr(problem, "dtype", ""))
        for output, reference, bound in zip(outputs, references, bounds, strict=True):
            if output.dtype.kind in "iub" or not output.size:
                continue
            errors, limits = (to_numpy(part) for part in ulp_errors(output, reference, bound))
            if errors.size > _MAX_SAMPLE:
                kept = self._rng.choice(errors.size, _MAX_SAMPLE, replace=False)
                kept[0] = np.argmax(errors)
                errors, limits = errors[kept], limits[kept]
            key = op.name, dtype, policy, str(output.dtype)
            self._found.setdefault(key, []).append((errors, limits))

    def rows(self) -> list[Row]:
        """Return the rows in the order of the ops, then by dtypes and policies."""
        ops = list(dict.fromkeys(op for op, *_ in self._found))
        keys = sorted(self._found, key=lambda key: (ops.index(key[0]), *key[1:]))
        return [row for key in keys if (row := _row(key, self._found[key])).elements]


def _row(key: _Key, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Row:
    op, dtype, policy, output = key
    errors, limits = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not errors.size:
        return Row(op, dtype, policy, output, 0, (0.0,) * len(QUANTILES), 0.0, 1.0, 0.0, 0.0)
    with np.errstate(all="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / limits)
    return Row(
        op,
        dtype,
        policy,
        output,
        elements=errors.size,
        quantiles=tuple(float(q) for q in np.quantile(errors, QUANTILES)),
        worst=float(errors.max()),
        half=float(np.mean(errors <= 0.5)),
        bound=float(np.median(limits)),
        error_over_bound=float(ratios.max()),
    )


def policy_of(problem: Any) -> str:
    """Return the problem's options that affect accuracy, like "policy=fp16", or ""."""
    found = ((name, getattr(problem, name, None)) for name in _POLICIES)
    return ", ".join(f"{name}={value}" for name, value in found if value not in (None, False))


def show(rows: Sequence[Row]) -> None:
    print_table(
        ("op", "dtype", "policy", "output", "elements", *(f"{100 * q:g}%" for q in QUANTILES),
         "worst", "up to 0.5 ulp", "bound, median", "error/bound"),
        (
            (
                *(row.op, row.dtype, row.policy or "-", row.output, row.elements),
                *(number(quantile) for quantile in row.quantiles),
                number(row.worst),
                f"{100 * row.half:.1f}%",
                number(row.bound),
                number(row.error_over_bound),
            )
            for row in rows
        ),
        "errors in units of the output's last place",
    )  # fmt: skip
