"""Digests of machine code: whether a change of the source changes what the GPU runs.

A rename, a move or a type must not.  A file has one line for each variant and architecture, in the
order of gate.tasks: architecture, kernel, digest (offline.code_digest), registers of a thread,
bytes of local memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from . import gate

_HEADER = "# architecture, kernel, digest of the machine code, registers of a thread, local bytes\n"


def write(path: Path, rows: Iterable[gate.Row]) -> None:
    """Those that compiled."""
    lines = (
        f"{row.arch} {row.variant.kernel} {row.code} {row.registers} {row.local_bytes}\n"
        for row in rows
        if row.code is not None
    )
    path.write_text(_HEADER + "".join(lines))


def compare(path: Path, rows: Iterable[gate.Row]) -> list[gate.Row]:
    """`rows`, with an error in each whose machine code the file `path` does not have.

    Raises OSError.
    """
    known: dict[tuple[str, str], set[str]] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            arch, kernel, code = line.split()[:3]
            known.setdefault((arch, kernel), set()).add(code)
    return [_compared(row, known.get((row.arch, row.variant.kernel), set())) for row in rows]


def _compared(row: gate.Row, known: set[str]) -> gate.Row:
    if row.code is None or row.error is not None or row.code in known:
        return row
    return replace(row, error=f"machine code {row.code} is not among {len(known)} known")
