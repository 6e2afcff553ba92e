"""The header of every tool's JSON: kind, date, version, target and machine."""

from __future__ import annotations

import datetime
from typing import Any

from .. import __version__
from ..targets import Target
from . import doctor

KINDS = frozenset(
    (
        *("bench", "sweep", "tune", "profile", "check", "campaign"),
        *("comparison", "suite", "model", "parallel"),  # bench --baseline, --suite, --model ...
        *("sensitivity", "history"),  # check --sensitivity, --history
        "startup",
    )
)


def header(kind: str, target: Target) -> dict[str, Any]:
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "target": target.name,
        "arch": target.arch,
        "machine": doctor.machine(target),
    }
