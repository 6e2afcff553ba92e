"""A sweep's trace: a line of JSON per event, so that Ctrl-C or a crash loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..tuning.trials import Trial, from_record
from .stored import plain_json


class Trace:
    """A trace that is being written.

    The first line is the header, with the machine; then come "start" and "trial" lines.
    """

    def __init__(self, path: Path):
        self.path = path
        self.header: dict[str, Any] = {}
        self.trials: list[Trial] = []
        self.started: Trial | None = None

    @classmethod
    def new(cls, path: Path, header: dict[str, Any]) -> Trace:
        """Begin a trace.  Raises FileExistsError."""
        trace = cls(path)
        with path.open("x", encoding="utf-8"):
            pass
        trace.header = header
        trace._write(trace.header)
        return trace

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Resume a trace; drop an incomplete last line.  Raises OSError and ValueError."""
        trace = cls(path)
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            records = [json.loads(line) for line in whole.decode().splitlines()]
            trace.header, *events = records
            if trace.header.get("kind") != "sweep":
                raise ValueError("its first line is none of a sweep's")
            for event in events:
                trace._take(event.pop("kind"), from_record(event))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a trace of a sweep: {error}") from None
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
        return trace

    def start(self, trial: Trial) -> None:
        """Record the trial that starts now."""
        self._add("start", trial)

    def add(self, trial: Trial) -> None:
        self._add("trial", trial)

    def crashed(self, reason: str) -> bool:
        """Record that the started trial ended its process; return False if none was started."""
        if self.started is None:
            return False
        self.started.reason = reason
        self.add(self.started)
        return True

    def _add(self, kind: str, trial: Trial) -> None:
        self._take(kind, trial)
        self._write({"kind": kind, **asdict(trial)})

    def _take(self, kind: str, trial: Trial) -> None:
        if kind == "start":
            self.started = trial
        else:
            self.started = None
            self.trials.append(trial)

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain_json(record), allow_nan=False) + "\n")


def under_way(path: Path) -> bool:
    """Return whether a config is running, by the last complete line of another process's trace."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return False
    return bool(lines) and json.loads(lines[-1]).get("kind") == "start"


def document(header: dict[str, Any], trials: Iterable[Trial]) -> dict[str, Any]:
    """Return the complete record of a sweep, for results/*.json."""
    return {**header, "trials": [asdict(trial) for trial in trials]}


def read(path: Path) -> tuple[dict[str, Any], list[Trial]]:
    """Return (header, trials) of a trace or a document.  Raises OSError and ValueError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        trace = Trace.load(path)
        return trace.header, trace.trials
    if not isinstance(found, dict) or found.get("kind") != "sweep":
        raise ValueError(f"{path} is not a sweep")
    return found, [from_record(record) for record in found.get("trials", [])]
