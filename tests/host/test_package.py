"""What is installed: the wheel with its kernels, and what works without CuPy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_CALL = """
import sys
import numpy as np
import cupykern
from cupykern.cli import main

assert "cupy" not in sys.modules or sys.modules["cupy"] is None
print(cupykern.__file__, cupykern.softmax(np.zeros((2, 4), np.float32)).sum())
main(["source", "softmax", "--shape", "2,4"])
"""


def _run(cwd: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools writes beside what it reads."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("cupykern", "kernels_cu"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "Failed to establish a new connection" in done.stdout + done.stderr:
        pytest.skip("no network: setuptools cannot be had")
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))  # by way of the source distribution


def test_a_wheel_in_an_empty_directory(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    done = _run(empty, ONE_CALL, PYTHONPATH=str(site))
    assert done.stdout.startswith(f"{site / 'cupykern' / '__init__.py'} 2.0\n"), done.stderr
    assert "kernels_cu/softmax" in done.stdout
    assert not list(empty.iterdir())


def test_a_wheel_has_every_file(wheel):
    ours = {
        path.relative_to(ROOT).as_posix()
        for name in ("cupykern", "kernels_cu")
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == ours


def test_without_cupy():
    done = _run(ROOT, "import sys; sys.modules['cupy'] = None\n" + ONE_CALL)
    assert " 2.0\n" in done.stdout, done.stderr
