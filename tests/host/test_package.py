"""What is installed: the wheel with its kernels, and what works without CuPy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
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


_NOT_COPIED = shutil.ignore_patterns(
    *("__pycache__", ".git", ".ci-venv", ".venv", "build", "dist", ".hypothesis", ".*_cache"),
    *("*.egg-info", "results.html", "sweep-*.jsonl", "*.whl"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """The folder with the source distribution and the wheel, built from a copy: setuptools writes
    beside what it reads."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=_NOT_COPIED)
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if "Failed to establish a new connection" in done.stdout + done.stderr:
        pytest.skip("no network: setuptools cannot be had")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    return next(built.glob("*.whl"))  # by way of the source distribution


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a virtual environment with the wheel, and with what it needs from here."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    python = str(folder / "bin" / "python")
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # nor pip a checkout
    command = [sys.executable, *install, str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    # Only now: pip would find the editable cupykern there, and leave out the wheel.  Of the folders
    # in a .pth file no .pth file is read, so that Python does not find it.
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


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
        inside + path.relative_to(ROOT).as_posix()
        for name, inside in (("cupykern", ""), ("kernels_cu", "cupykern/"))
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == ours


def test_calls_on_numpy_arrays_work_without_cupy():
    done = _run(ROOT, "import sys; sys.modules['cupy'] = None\n" + ONE_CALL)
    assert " 2.0\n" in done.stdout, done.stderr


def test_the_source_distribution_has_tests_and_docs(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("cli.py", "tests/conftest.py", "docs/conf.py", "docs/index.md", "CHANGELOG.md"):
        assert name in names
    missing = [
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "docs", "examples", "kernels_cu")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".html")
    ]
    assert not [name for name in missing if name not in names]


@pytest.mark.parametrize("command", [["cupykern"], ["python", "-m", "cupykern"]])
def test_the_command_of_an_installed_wheel(command, installed, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    program, *arguments = command
    done = subprocess.run(
        [str(installed / program), *arguments, "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0 and "attention_varlen" in done.stdout, done.stderr


def test_a_call_of_an_installed_wheel(installed, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = (
        "import cupykern, importlib.util, numpy\n"
        "assert importlib.util.find_spec('kernels_cu') is None\n"
        "x = numpy.ones((2, 4), numpy.float32)\n"
        "print(cupykern.__file__, cupykern.softmax(x).sum())"
    )
    done = subprocess.run(
        [str(installed / "python"), "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    path, total = done.stdout.split()
    assert Path(path).is_relative_to(installed.parent) and total == "2.0", done.stderr
