"""The header of every tool's JSON: kind, date, version, target and machine.

kinds: "bench", "comparison" (bench --baseline), "suite" (bench --suite), "model"
(bench --model), "parallel" (bench --parallel), "sweep", "tune", "profile", "check", "campaign",
"sensitivity" (check --sensitivity), "history" (check --history).
"""

from __future__ import annotations

import datetime
from typing import Any

from .. import __version__
from ..targets import Target
from . import doctor


def header(kind: str, target: Target) -> dict[str, Any]:
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "target": target.name,
        "arch": target.arch,
        "machine": doctor.machine(target),
    }
