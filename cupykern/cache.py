"""The directory in which compiled host kernels, and tuned configs, are kept."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

TUNED_NAME = "tuned.json"


def cache_dir() -> Path:
    """$CUPYKERN_CACHE_DIR, else $XDG_CACHE_HOME/cupykern, else ~/.cache/cupykern."""
    names = "CUPYKERN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"
    return _cache_dir(*map(os.environ.get, names))


@cache  # every new plan asks for it
def _cache_dir(own: str | None, base: str | None, home: str | None) -> Path:
    if own:
        return Path(own)
    return Path(base) / "cupykern" if base else Path("~/.cache/cupykern").expanduser()


def size() -> int:
    """Bytes in the cache."""
    total = 0
    for folder, _, names in os.walk(cache_dir()):
        for name in names:
            with suppress(OSError):  # another process removed it
                total += os.path.getsize(os.path.join(folder, name))
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
