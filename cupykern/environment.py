"""The environment variables that cupykern reads: one function each.

An empty value counts as unset.  A wrong value raises ValueError, whose message begins with the
variable's name.  CUPYKERN_TUNE is read by runtime/choice.py, which refuses an empty value.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from functools import cache
from pathlib import Path


def host_warp_size() -> int:
    """CUPYKERN_HOST_WARP_SIZE: threads per warp on the host target."""
    return int(_one_of("CUPYKERN_HOST_WARP_SIZE", "32", "64"))


def host_schedule() -> str:
    """CUPYKERN_HOST_SCHEDULE: which thread of the host target runs next."""
    text = os.environ.get("CUPYKERN_HOST_SCHEDULE") or "fifo"
    if not re.fullmatch(r"fifo|lifo|sticky:[0-9]+", text):
        raise ValueError(
            f"CUPYKERN_HOST_SCHEDULE must be fifo, lifo or sticky:<seed>; got {text!r}"
        )
    return text


def host_sanitizer() -> str | None:
    """CUPYKERN_HOST_SANITIZER: the sanitizer that host kernels are built with; None: none."""
    return _one_of("CUPYKERN_HOST_SANITIZER", "", "address", "thread") or None


def host_optimization() -> str:
    """CUPYKERN_HOST_OPTIMIZE: the optimization level of host kernels."""
    return _one_of("CUPYKERN_HOST_OPTIMIZE", "2", "1", "0")


def cuda_checked() -> bool:
    """CUPYKERN_CUDA_CHECKED: whether kernels are compiled for compute-sanitizer's racecheck."""
    return _one_of("CUPYKERN_CUDA_CHECKED", "0", "1") == "1"


def overlaps() -> bool:
    """CUPYKERN_OVERLAP: whether a kernel may start before the stream's previous kernel ends."""
    return _one_of("CUPYKERN_OVERLAP", "1", "0") == "1"


def compiler_command() -> tuple[str, ...]:
    """CXX, split as a shell splits it; () if it is unset."""
    text = os.environ.get("CXX", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"CXX must be a command; got {text!r}: {error}") from None


def cache_dir() -> Path:
    """CUPYKERN_CACHE_DIR, else XDG_CACHE_HOME/cupykern, else ~/.cache/cupykern.

    Without a home directory (HOME unset, no passwd entry): cupykern-<user id> in the directory for
    temporary files.
    """
    names = "CUPYKERN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"
    return _cache_dir(*map(os.environ.get, names))


@cache  # every new plan reads it
def _cache_dir(own: str | None, base: str | None, home: str | None) -> Path:
    if own:
        return Path(own).absolute()
    if base:
        return Path(base).absolute() / "cupykern"
    try:
        return Path("~/.cache/cupykern").expanduser().absolute()
    except RuntimeError:  # no home directory
        return Path(tempfile.gettempdir()).absolute() / f"cupykern-{os.geteuid()}"


def check() -> None:
    """Raise ValueError if a variable has a wrong value."""
    for read in (
        host_warp_size,
        host_schedule,
        host_sanitizer,
        host_optimization,
        cuda_checked,
        overlaps,
        compiler_command,
    ):
        read()


def _one_of(name: str, default: str, *others: str) -> str:
    text = os.environ.get(name) or default
    if text not in (default, *others):
        allowed = ", ".join(sorted(filter(None, (default, *others))))
        raise ValueError(f"{name} must be {' or '.join(allowed.rsplit(', ', 1))}; got {text!r}")
    return text
