"""The environment of new processes that import this package."""

from __future__ import annotations

import os
from pathlib import Path


def environment(**added: str) -> dict[str, str]:
    """This process's environment, in which Python finds this package, and `added`."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **added}
