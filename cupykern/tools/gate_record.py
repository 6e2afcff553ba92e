"""The record of the compile gate: which sources have passed it, by which compiler.

Compiling everything takes 25 to 50 minutes of a core; of a change most variants' sources are the
same as before.  The record is a text file with a line for each variant and architecture that
passed, so that what a change does to registers is in its diff.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..kernels import Variant, source_text
from ..targets import offline
from . import gate

# Lines that no compiler sees: comments, which lines they were, nothing.
_UNSEEN = re.compile(r"^[ \t]*(//.*|#line .*)?\n", re.MULTILINE)
# One more whenever gate.failure comes to refuse more: all is compiled again.  Of sm_90a more was
# asked once, that no wgmma is waited for at once (C7517).
_ASKED = {"sm_90a": 2}
_SECONDS = 20.0  # between the record's writings
_BYTES = 3  # of a digest: an architecture has fewer than 200 variants of a kernel
_HEADER = "# Architecture and kernel; a variant's digest of source and compiler, registers.\n"


class Key(NamedTuple):
    """digest: of all that makes a variant's code on `arch`, and of what the gate asks of it."""

    arch: str
    kernel: str
    digest: str


@cache
def key(variant: Variant, arch: str) -> Key:
    """Raises UnavailableError where there is no compiler for `arch`."""
    text = _digest(variant, "hip" if arch.startswith("gfx") else "cuda")
    told = (_ASKED.get(arch, 1), gate.compiler(arch), offline.options(arch), variant.tuned, text)
    digest = hashlib.sha256(repr(told).encode()).digest()[:_BYTES]
    return Key(arch, variant.kernel, base64.urlsafe_b64encode(digest).decode())


@cache
def _digest(variant: Variant, target: str) -> str:
    text = _UNSEEN.sub("", source_text(variant, target))
    return hashlib.sha256(text.encode()).hexdigest()


def compile_new(
    todo: Sequence[tuple[Variant, str]],
    current: Iterable[tuple[Variant, str]],
    path: Path,
    jobs: int,
    again: float = 0,
    within: float = math.inf,
) -> Iterator[gate.Row]:
    """A Row for each of `todo` that is not on the record `path`, NVIDIA's first, until `within`
    seconds have passed, then for others in random order, for `again` seconds.  Of those it is an
    error that they need other registers than on record.

    The record is written now and then, and at the end, with what passed, without what failed and
    what is no longer among `current`; of architectures that `current` does not have, everything
    stays.  Raises UnavailableError and OSError.
    """
    record = _read(path)
    keys = {key(*task) for task in current}
    archs = {of.arch for of in keys}
    kept = {of: n for of, n in record.items() if of.arch not in archs or of in keys}
    written = time.monotonic()
    try:
        for row in _rows(todo, record, jobs, again, within):
            of_row = key(row.variant, row.arch)
            kept.pop(of_row, None)
            if gate.failure(row) is None and row.registers is not None:
                kept[of_row] = row.registers
            if time.monotonic() > written + _SECONDS:
                _write(path, kept)
                written = time.monotonic()
            yield row
    finally:
        _write(path, kept)


def missing(todo: Sequence[tuple[Variant, str]], path: Path) -> int:
    """How many of `todo` the record lacks."""
    record = _read(path)
    return sum(key(*task) not in record for task in todo)


def _rows(
    todo: Sequence[tuple[Variant, str]],
    record: dict[Key, int],
    jobs: int,
    again: float,
    within: float,
) -> Iterator[gate.Row]:
    end = time.monotonic() + within
    known = [task for task in todo if key(*task) in record]
    new = [task for task in todo if key(*task) not in record]
    new.sort(key=lambda task: task[1].startswith("gfx"))
    with closing(gate.compile_all(new, jobs)) as rows:
        for row in rows:
            yield row
            if time.monotonic() > end:
                return
    if not again:
        return
    end = min(end, time.monotonic() + again)
    random.shuffle(known)
    with closing(gate.compile_all(known, jobs)) as rows:
        for row in rows:
            before = record[key(row.variant, row.arch)]
            if row.registers not in (None, before):
                row = replace(row, error=f"{row.registers} registers, {before} on record")
            yield row
            if time.monotonic() > end:
                return


def _read(path: Path) -> dict[Key, int]:
    """Nothing without a file."""
    record: dict[Key, int] = {}
    arch, kernel = "", ""
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        first, second = line.split()
        if second.isdigit():  # no kernel's name is a number
            record[Key(arch, kernel, first)] = int(second)
        else:
            arch, kernel = first, second
    return record


def _write(path: Path, record: dict[Key, int]) -> None:
    lines = [_HEADER]
    for (arch, kernel), group in itertools.groupby(sorted(record), key=lambda of: of[:2]):
        lines += [f"{arch} {kernel}\n", *(f"{of.digest} {record[of]}\n" for of in group)]
    whole = path.with_name(f"{path.name}.new")
    whole.write_text("".join(lines))
    whole.replace(path)
