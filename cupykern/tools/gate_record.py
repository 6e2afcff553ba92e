"""The record of the compile gate: which sources have passed it, by which compiler.

Compiling everything takes 20 to 45 minutes of a core; of a change most variants' sources are the same as
before.  The record is a text file with a line for each variant and architecture that passed, so that what
a change does to registers is in its diff: architecture, kernel, digest, registers of a thread.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kernels_cu import Variant, source_text

from ..targets import offline
from . import gate

# Lines that no compiler sees: comments, which lines they were, nothing.
_UNSEEN = re.compile(r"^[ \t]*(//.*|#line .*)?\n", re.MULTILINE)
_ASKED = 1  # one more whenever gate.failure comes to refuse more: all is compiled again
_HEADER = "# architecture, kernel, digest of source and compiler, registers of a thread\n"


class Key(NamedTuple):
    """digest: of all that makes a variant's code on `arch`, and of what the gate asks of it."""

    arch: str
    kernel: str
    digest: str


def key(variant: Variant, arch: str) -> Key:
    """Raises UnavailableError where there is no compiler for `arch`."""
    text = _digest(variant, "hip" if arch.startswith("gfx") else "cuda")
    told = (_ASKED, gate.compiler(arch), offline.options(arch), variant.tuned, text)
    return Key(arch, variant.kernel, hashlib.sha256(repr(told).encode()).hexdigest()[:16])


@cache
def _digest(variant: Variant, target: str) -> str:
    text = _UNSEEN.sub("", source_text(variant, target))
    return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path | None) -> dict[Key, int]:
    """The registers of what is on record, by whole lines; nothing without a file.  Raises OSError."""
    if path is None or not path.exists():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {Key(*row[:3]): int(row[3]) for row in rows if len(row) == 4 and row[3].isdigit()}


def compile_new(
    todo: Sequence[tuple[Variant, str]], record: dict[Key, int], jobs: int, again: float = 0
) -> Iterator[gate.Row]:
    """A Row for each of `todo` that is not on record, then for others in random order, for `again` seconds.

    Of those it is an error that they need other registers than on record.  Raises UnavailableError.
    """
    known = [task for task in todo if key(*task) in record] if record else []
    there = set(known)
    yield from gate.compile_all([task for task in todo if task not in there], jobs)
    if not again:
        return
    end = time.monotonic() + again
    random.shuffle(known)
    with closing(gate.compile_all(known, jobs)) as rows:
        for row in rows:
            before = record[key(row.variant, row.arch)]
            if row.registers not in (None, before):
                row = replace(row, error=f"{row.registers} registers, {before} on record")
            yield row
            if time.monotonic() > end:
                return


def update(
    path: Path | None,
    record: dict[Key, int],
    rows: Iterable[gate.Row],
    current: Iterable[tuple[Variant, str]],
) -> None:
    """Write the record with what passed, without what failed and what is no longer among `current`.

    Of architectures that `current` does not have, everything stays.  Raises OSError.
    """
    if path is None:
        return
    keys = {key(*task) for task in current}
    archs = {known.arch for known in keys}
    kept = {known: n for known, n in record.items() if known.arch not in archs or known in keys}
    for row in rows:
        of_row = key(row.variant, row.arch)
        kept.pop(of_row, None)
        if gate.failure(row) is None and row.registers is not None:
            kept[of_row] = row.registers
    path.write_text(_HEADER + "".join(f"{' '.join(of)} {kept[of]}\n" for of in sorted(kept)))
