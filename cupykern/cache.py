"""The cache directory: its contents, the check of who can write to it, and the fallback.

    host/<40 hex digits>.so     compiled host kernels (targets/host_compiler.py)
    host/tmp-<pid>-<random>/    scratch files of a compile; `sweep` removes abandoned ones
    tuned-<version>.json        tuned configs (runtime/store.py), with a .lock
    cupykern-bench.lock         the benchmark lock (tuning/protocol.py)

A shared object runs with the rights of the process that loads it.  So directories are made with
mode 0700, and nothing is read from a directory or a file that belongs to another user or that other
users can write.  A process that cannot use the cache directory compiles in a directory of its own
(`private_folder`) and warns once.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .environment import cache_dir

HOST = "host"
BENCH_LOCK = "cupykern-bench.lock"

_KERNEL = re.compile(r"[0-9a-f]{40}\.so")
_SCRATCH = re.compile(r"tmp-(\d+)-\w{8}|tmp\w{8}")  # names of earlier versions lack the pid
_SCRATCH_FILE = re.compile(r"kernel\.(cpp|so)[.\w]*")  # and the linker's temporary files
_PRIVATE = re.compile(r"cupykern-(\d+)-\w{8}")
_OF_A_COMPILE = re.compile(rf"{_KERNEL.pattern}|{_SCRATCH.pattern}|zig")  # in a private directory
_TUNED = re.compile(r"tuned(-\d+)?\.json[-.\w]*")
_ABANDONED_S = 3600


# --- reading and access checks -----------------------------------------------------------------


def folder(*parts: str) -> Path:
    """The directory cache_dir()/parts, created if it is missing.

    Raises PermissionError if another user could have written to it or to a parent up to
    cache_dir(), and OSError if it cannot be created.
    """
    place = cache_dir()
    _make(place)
    for part in parts:
        place = place / part
        _make(place)
    return place


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises FileNotFoundError, PermissionError if another user could have written the file or changed
    its directory, and OSError unless it is a regular file.
    """
    check_private(path.parent)
    # Opening a FIFO would block until it has a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        _check_private(path, found)
        return file.read()


def check_private(path: Path) -> None:
    """Raise PermissionError if another user could have written `path`, OSError if it is missing."""
    _check_private(path, os.stat(path))


def _check_private(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (id {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(
            f"{path} can be written by other users (mode {mode:o}; chmod go-w mends it)"
        )


def _make(place: Path) -> None:
    missing = []
    for path in (place, *place.parents):
        if os.path.lexists(path):
            break
        missing.append(path)
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is not a directory")
    check_private(place)


# --- the fallback ------------------------------------------------------------------------------

_private: dict[int, Path] = {}  # by pid: a forked process makes its own


def private_folder() -> Path:
    """A temporary directory of this process, removed at its exit.  Raises OSError."""
    pid = os.getpid()
    made = _private.get(pid)
    if made is None or not made.is_dir():
        sweep(Path(tempfile.gettempdir()), _PRIVATE, _remove_abandoned)
        made = _private[pid] = Path(tempfile.mkdtemp(prefix=f"cupykern-{pid}-"))
        atexit.register(_remove_private, pid, made)
    return made


def _remove_abandoned(made: Path) -> None:
    """Remove a private directory if it holds only a compile's files.

    A directory of the user can have a matching name.
    """
    if all(_OF_A_COMPILE.fullmatch(entry.name) for entry in _entries(made)):
        shutil.rmtree(made)


def _remove_private(pid: int, made: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(made, ignore_errors=True)


_warned: set[Path] = set()


def warn_once(reason: str) -> None:
    """Warn, once per process, that the cache directory or a file in it is not used."""
    place = cache_dir()
    if place not in _warned:
        _warned.add(place)
        named = reason if str(place) in reason else f"{place}: {reason}"
        warnings.warn(f"cupykern does without its cache: {named}", RuntimeWarning, stacklevel=3)


# --- scratch directories -------------------------------------------------------------------------


@contextmanager
def scratch(place: Path) -> Iterator[Path]:
    """Within the block, a new directory in `place` for scratch files.  Raises OSError."""
    sweep(place)
    made = tempfile.mkdtemp(prefix=f"tmp-{os.getpid()}-", dir=place)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def sweep(
    place: Path,
    names: re.Pattern[str] = _SCRATCH,
    remove: Callable[[Path], None] | None = None,
    min_age_s: float = _ABANDONED_S,
) -> None:
    """Remove the directories in `place` that match `names` and whose process was killed.

    remove: removes one of them; None: removes a compile's files, and the directory if then empty.
    min_age_s: the least time since the last change, for names with a pid; others: an hour.
        Processes of other machines or containers that share `place` cannot be seen.
    """
    for entry in _entries(place):
        match = names.fullmatch(entry.name)
        if match is None or not _is_own(entry, stat.S_ISDIR):
            continue
        with suppress(OSError):  # another process removed it
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            old = age >= (min_age_s if match[1] else _ABANDONED_S)
            if old and _process_of(entry.name) is None:
                (remove or _remove_scratch)(Path(entry.path))


def _process_of(name: str) -> int | None:
    """The pid in the name of a scratch or private directory, if that process is running."""
    match = _SCRATCH.fullmatch(name) or _PRIVATE.fullmatch(name)
    pid = int(match[1]) if match and match[1] else None
    try:
        if pid:
            os.kill(pid, 0)
            return pid
    except (ProcessLookupError, OverflowError):
        pass
    except PermissionError:  # another user's process has the pid now
        pass
    return None


def _remove_scratch(place: Path) -> None:
    """Remove a compile's files, and the directory if it is then empty."""
    for entry in _entries(place):
        if _SCRATCH_FILE.fullmatch(entry.name) and _is_own(entry, stat.S_ISREG):
            with suppress(OSError):
                os.unlink(entry.path)
    with suppress(OSError):
        place.rmdir()


def _entries(place: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory, sorted by name; [] if the directory cannot be read."""
    try:
        with os.scandir(place) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []


def _is_own(entry: os.DirEntry[str], kind: Callable[[int], bool]) -> bool:
    """Whether `entry` is of `kind` (stat.S_ISREG, say), not a symlink, and owned by this user."""
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:  # another process removed it
        return False
    return kind(found.st_mode) and found.st_uid == os.geteuid()


# --- cupykern cache ------------------------------------------------------------------------------


def size() -> int:
    """The total size of cupykern's files, in bytes."""
    host = cache_dir() / HOST
    found = [entry for entry in _entries(cache_dir()) if _TUNED.fullmatch(entry.name)]
    for entry in _entries(host):
        if _KERNEL.fullmatch(entry.name):
            found.append(entry)
        elif _SCRATCH.fullmatch(entry.name):
            found += _entries(host / entry.name)
    total = 0
    for entry in found:
        with suppress(OSError):  # another process removed it
            total += entry.stat(follow_symlinks=False).st_size
    return total


def clear() -> dict[str, list[str]]:
    """Remove the compiled kernels; those already loaded stay loaded.

    Returns the names left in the directory, by the reason why they are left.
    """
    host = cache_dir() / HOST
    if not host.is_symlink():
        sweep(host, min_age_s=0)
        for entry in _entries(host):
            if _KERNEL.fullmatch(entry.name) and _is_own(entry, stat.S_ISREG):
                with suppress(OSError):
                    os.unlink(entry.path)
    with suppress(OSError):  # it is not empty
        host.rmdir()
    left = defaultdict(list)
    for entry in _entries(cache_dir()):
        inside = [f"{HOST}/{x.name}" for x in _entries(host)] if entry.name == HOST else []
        for name in inside or [entry.name]:
            left[_why_left(name)].append(name)
    return dict(left)


def _why_left(name: str) -> str:
    if _SCRATCH.fullmatch(name.removeprefix(f"{HOST}/")):
        return "being compiled"
    if _TUNED.fullmatch(name):
        return "tuned configs"
    return "a lock" if name == BENCH_LOCK else "not made by cupykern"
