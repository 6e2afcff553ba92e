"""Lines of the sources are at most 100 columns long, where ruff does not look."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {".cu", ".cuh", ".h", ".cpp"}


def test_lines_of_kernels_are_short():
    """clang-format does not break comments."""
    files = [
        path
        for folder in ("kernels_cu", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in ENDINGS
    ]
    assert len(files) > 150
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert not long
