"""Trials of configs: the record of one, the ranking of many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

_FIELD = re.compile(r"(\w+)=([^,()]+)")


@dataclass
class Trial:
    """One config on one problem; times in microseconds, None if not measured.

    key, digest: of the store's row for the config.  default_us: the default config's time in the
    same rounds.  local_bytes: per thread, including spills.  final: timed again, in turns with the
    other finalists.  clocks: from protocol.summarize_clocks.  reason: why it failed.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str
    config: str
    default: bool = False
    key: str | None = None
    digest: str | None = None
    variant: str | None = None
    compile_s: float | None = None
    registers: int | None = None
    local_bytes: int | None = None
    shared_bytes: int | None = None
    verified: bool = False
    error_over_bound: float | None = None
    rms_ratio: float | None = None
    median_us: float | None = None
    q20_us: float | None = None
    q80_us: float | None = None
    runs: int = 0
    default_us: float | None = None
    final: bool = False
    clocks: dict[str, Any] | None = None
    reason: str | None = None

    @property
    def name(self) -> tuple[str, ...]:
        """The trial's identity: op, shape, dtype, config and digest."""
        shape = "x".join(map(str, self.shape))
        return self.op, shape, self.dtype, self.config, self.digest or ""

    @property
    def ratio(self) -> float | None:
        """Time over the default's in the same rounds."""
        if self.median_us is None or not self.default_us:
            return None
        return self.median_us / self.default_us


def from_record(record: dict[str, Any]) -> Trial:
    """Make a Trial from a trace's line.  Raises TypeError for lines of another version."""
    known = {field.name for field in fields(Trial)}
    found = Trial(**{name: value for name, value in record.items() if name in known})
    found.shape = tuple(found.shape)
    return found


def ranking(trials: Sequence[Trial]) -> list[Trial]:
    """Rank the trials of one problem, best first, failures last.

    Finalists come first, by their last timing; others follow by their time over the default's.
    """
    latest: dict[tuple[str, ...], Trial] = {}
    for trial in trials:
        latest[trial.name] = trial

    def place(trial: Trial) -> tuple[int, float]:
        if not trial.verified or trial.median_us is None:
            return 2, 0.0
        return int(not trial.final), trial.ratio or trial.median_us

    return sorted(latest.values(), key=place)


def short_names(configs: Sequence[str]) -> dict[str, str]:
    """Shorten configs (as text) to the fields that differ among configs of their type."""
    found = {config: dict(_FIELD.findall(config)) for config in dict.fromkeys(configs)}
    kinds: dict[str, list[dict[str, str]]] = {}
    for config, values in found.items():
        kinds.setdefault(config.partition("(")[0], []).append(values)
    short = {}
    for config, values in found.items():
        kind = config.partition("(")[0]
        words = [
            f"{name}={value}"
            for name, value in values.items()
            if len({others.get(name) for others in kinds[kind]}) > 1
        ]
        if len(kinds) > 1:
            words.insert(0, kind)
        short[config] = " ".join(words) or config
    return short


def by_problem(trials: Iterable[Trial]) -> Iterator[tuple[tuple[str, ...], list[Trial]]]:
    """Yield ((op, shape, dtype), trials), in order of first appearance."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.name[:3], []).append(trial)
    yield from groups.items()
