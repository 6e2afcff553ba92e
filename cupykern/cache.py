"""The directory in which compiled host kernels, and tuned configs, are kept."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

TUNED_NAME = "tuned.json"


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
    """Remove the compiled kernels; those that are loaded stay so, and so do tuned configs."""
    folder = cache_dir()
    try:
        found = list(folder.iterdir())
    except OSError:
        return
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif not path.name.startswith(TUNED_NAME):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # tuned configs are there
        folder.rmdir()
