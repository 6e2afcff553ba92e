"""The store of tuned configs: a JSON file in the cache directory, and the package's own rows.

The file's name contains the version of its format, so that different versions of cupykern can share
a directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .. import cache as disk_cache
from ..environment import cache_dir
from ..kernels import file_text

_VERSION = 1
_NAME = f"tuned-{_VERSION}.json"
BUILT_IN = Path(__file__).parents[1] / "tuned.json"
_FIELDS = ("config", "digest")  # required in every row, as strings
_lock = threading.Lock()
_reinit = _lock._at_fork_reinit  # type: ignore[attr-defined]  # CPython's own, not in typeshed
os.register_at_fork(after_in_child=_reinit)
_loaded: tuple[Path, dict[str, dict[str, Any]]] | None = None


def path() -> Path:
    return _path(cache_dir())


@cache
def _path(folder: Path) -> Path:
    return folder / _NAME


def find(key: str) -> dict[str, Any] | None:
    """The row of a key (choice.Request.key) or None, from the file as this process read it."""
    return rows().get(key)


def rows() -> dict[str, dict[str, Any]]:
    """All rows by key, read once."""
    global _loaded
    place = path()
    known = _loaded
    if known is None or known[0] != place:
        with _lock:
            known = _loaded = place, _read(place)
    return known[1]


def reload() -> None:
    """Read the file again at the next look-up."""
    global _loaded
    _loaded = None


def put(new: Mapping[str, dict[str, Any]]) -> None:
    """Add rows, replacing those with the same keys.  Processes can do so concurrently.

    Raises OSError.
    """
    _change(lambda known: {**known, **new})


def forget(op: str | None = None) -> int:
    """Remove the rows of an op, or all rows; return how many were removed.  Raises OSError."""
    before = 0

    def remaining(known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        nonlocal before
        kept = {} if op is None else {k: row for k, row in known.items() if row.get("op") != op}
        before = len(known) - len(kept)
        return kept

    _change(remaining)
    return before


def _change(
    change: Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]],
) -> None:
    import filelock

    place = disk_cache.folder() / _NAME
    with filelock.FileLock(str(place) + ".lock"):
        write(place, change(_read(place)))
    reload()


def write(place: Path, all_rows: Mapping[str, dict[str, Any]]) -> None:
    """Replace the file atomically by one with these rows.  Raises OSError."""
    text = json.dumps({"version": _VERSION, "rows": dict(sorted(all_rows.items()))}, indent=1)
    descriptor, scratch = tempfile.mkstemp(dir=place.parent, prefix=place.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(scratch, 0o644)
        os.replace(scratch, place)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def _read(place: Path) -> dict[str, dict[str, Any]]:
    """The file's rows.

    An invalid file is renamed, and a file that another user could have written is not read, both
    with a warning.
    """
    try:
        text = disk_cache.read(place)
    except FileNotFoundError:
        return {}
    except OSError as error:
        disk_cache.warn_once(str(error))
        return {}
    try:
        return _parse(text)
    except ValueError as error:
        aside = place.with_name(f"{place.name}.broken-{hashlib.sha256(text).hexdigest()[:8]}")
        try:
            os.replace(place, aside)
            done = f"it is now {aside}"
        except OSError:
            done = "it is ignored"
        warnings.warn(
            f"{place} holds no tuned configs ({error}): {done}", RuntimeWarning, stacklevel=2
        )
        return {}


def _parse(text: bytes) -> dict[str, dict[str, Any]]:
    document = json.loads(text.decode())
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError(f"not a file of version {_VERSION}")
    found = document.get("rows")
    if not isinstance(found, dict) or not all(
        isinstance(row, dict) and all(isinstance(row.get(name), str) for name in _FIELDS)
        for row in found.values()
    ):
        raise ValueError("its rows are not complete")
    return found


@cache
def built_in() -> dict[str, dict[str, Any]]:
    """The package's own rows; `cupykern tune --built-in` writes them from sweeps.

    They match the package's kernels, so their digests are not checked.
    """
    return _parse(BUILT_IN.read_bytes()) if BUILT_IN.exists() else {}


@cache
def digest(target: str, kernels: tuple[tuple[str, str], ...]) -> str:
    """Digest of the sources of kernels, (name, text or "" for a file), and of their platform."""
    found = hashlib.sha256(file_text(f"platform/{target}.cuh").encode())
    for name, text in kernels:
        found.update((text or file_text(f"{name}.cu")).encode())
    return found.hexdigest()[:16]
