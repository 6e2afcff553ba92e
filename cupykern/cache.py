"""The directory in which compiled host kernels are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cache_dir() -> Path:
    """$CUPYKERN_CACHE_DIR, else $XDG_CACHE_HOME/cupykern, else ~/.cache/cupykern."""
    if own := os.environ.get("CUPYKERN_CACHE_DIR"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "cupykern"
    return Path("~/.cache/cupykern").expanduser()


def size() -> int:
    """Bytes in the cache."""
    total = 0
    for path in cache_dir().rglob("*"):
        try:
            if path.is_file():
                total += path.stat().st_size
        except OSError:  # another process removed it
            pass
    return total


def clear() -> None:
    """Remove the cache; kernels that are loaded stay so."""
    shutil.rmtree(cache_dir(), ignore_errors=True)
