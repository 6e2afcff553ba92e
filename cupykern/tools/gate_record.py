"""The record of the compile gate: the sources that have passed it, and with which compiler.

Compiling everything takes 25 to 50 minutes on one core, but a change leaves most variants' sources
as they were.  The record is a text file that lists, for each architecture and kernel, the variants
that passed by their registers, so that its diff shows how a change affects these.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..kernels import Variant, source_text
from ..targets import offline
from . import gate

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Increase this when gate.failure becomes stricter: everything is then compiled again.  sm_90a has 2
# since the gate refuses serialised wgmma (C7517).
_ASKED = {"sm_90a": 2}
_SECONDS = 20.0  # between writes of the record
_BYTES = 3  # of a digest: an architecture has fewer than 200 variants per kernel
_HEADER = "# Architecture and kernel; registers, digests of its variants' source and compiler.\n"


class Key(NamedTuple):
    """digest: of all inputs of a variant's code on `arch`, and of the gate's requirements."""

    arch: str
    kernel: str
    digest: str


@cache
def key(variant: Variant, arch: str) -> Key:
    """Return the key of a variant.  Raises UnavailableError without a compiler for `arch`."""
    text = _digest(variant, "hip" if arch.startswith("gfx") else "cuda")
    told = (_ASKED.get(arch, 1), gate.compiler(arch), offline.options(arch), variant.tuned, text)
    digest = hashlib.sha256(repr(told).encode()).digest()[:_BYTES]
    return Key(arch, variant.kernel, base64.urlsafe_b64encode(digest).decode())


@cache
def _digest(variant: Variant, target: str) -> str:
    return hashlib.sha256(code_of(source_text(variant, target)).encode()).hexdigest()


def code_of(text: str) -> str:
    """Return a source without comments, #line directives and line breaks between tokens."""
    text = _STRING_OR_COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    text = text.replace("\\\n", " ")
    code: list[str] = []
    for line in text.splitlines():
        words = " ".join(line.split())
        if words.startswith("#"):  # a directive ends with its line
            if not words.startswith("#line "):
                code += ["\n", words, "\n"]
        elif words:
            code += [words, " "]
    return "".join(code)


def compile_new(
    todo: Sequence[tuple[Variant, str]],
    current: Iterable[tuple[Variant, str]],
    path: Path,
    jobs: int,
    again: float = 0,
    within: float = math.inf,
) -> Iterator[gate.Row]:
    """Compile tasks of `todo` that the record `path` lacks, NVIDIA's first; yield a Row for each.

    Then compile recorded tasks in random order for `again` seconds; a changed register count is an
    error.  Everything stops after `within` seconds.

    The record is written from time to time and at the end.  It gains what passed, and loses what
    failed and what is not in `current`; architectures that `current` lacks stay unchanged.
    Raises UnavailableError and OSError.
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
    """Return the number of tasks in `todo` that the record lacks."""
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
    """Read the record; empty if there is no file."""
    record: dict[Key, int] = {}
    arch, kernel = "", ""
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        first, *others = line.split()
        if first.isdigit():  # no architecture's name is a number
            record |= {Key(arch, kernel, digest): int(first) for digest in others}
        else:
            arch, (kernel,) = first, others
    return record


def _write(path: Path, record: dict[Key, int]) -> None:
    lines = [_HEADER]
    for (arch, kernel), keys in itertools.groupby(sorted(record), key=lambda of: of[:2]):
        digests: dict[int, list[str]] = defaultdict(list)
        for of in keys:
            digests[record[of]].append(of.digest)
        lines.append(f"{arch} {kernel}\n")
        lines += (f"{n} {' '.join(digests[n])}\n" for n in sorted(digests))
    whole = path.with_name(f"{path.name}.new")
    whole.write_text("".join(lines))
    whole.replace(path)
