"""Digests of machine code: they show whether a source change affects what the GPU runs.

A rename, a move or a type annotation must not change a digest.  A file has one line per variant and
architecture, in the order of gate.tasks: architecture, kernel, digest (offline.code_digest),
registers per thread, bytes of local memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from . import gate

_HEADER = "# architecture, kernel, digest of the machine code, registers of a thread, local bytes\n"


def write(path: Path, rows: Iterable[gate.Row]) -> None:
    """Write the rows that compiled."""
    lines = (
        f"{row.arch} {row.variant.kernel} {row.code} {row.registers} {row.local_bytes}\n"
        for row in rows
        if row.code is not None
    )
    path.write_text(_HEADER + "".join(lines))


def compare(path: Path, rows: Iterable[gate.Row]) -> list[gate.Row]:
    """Return `rows`, with an error for each whose machine code is not in the file `path`.

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
