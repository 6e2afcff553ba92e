"""A copy of the package that a section of docs/kernels.md adds something to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cupykern.targets import host_compiler

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(
    r"^```(?:py|cpp)\n(?:#|//) ([\w/]+\.\w+)([^\n]*\n.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(section: str) -> dict[str, str]:
    """The page's files or lines of the section, by their paths; each begins behind the path."""
    page = (ROOT / "docs/kernels.md").read_text()
    (text,) = re.findall(rf"^## {section}$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return {match[1]: match[2] for match in _BLOCK.finditer(text)}


def copied(folder: Path, names: Iterable[str]) -> Path:
    """Folders and files of the repository, copied into `folder`; skips where no compiler is."""
    try:
        host_compiler.find_compiler()
    except ValueError as error:
        pytest.skip(str(error))
    for name in names:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder)
        else:
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    return folder


def insert(path: Path, marker: str, line: str) -> None:
    """Before the first line that begins with `marker`."""
    text = path.read_text()
    assert f"\n{marker}" in text
    path.write_text(text.replace(f"\n{marker}", f"\n{line}\n{marker}", 1))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(folder.parent)))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
