""" "Add an op" of docs/kernels.md: in a copy of the package its five places make an op."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupykern import targets

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(?:py|cpp)\n(?:#|//) ([\w/]+\.\w+)(.*?)^```$", re.DOTALL | re.MULTILINE)


def places() -> dict[str, str]:
    """The files of the page's section, by their paths."""
    page = (ROOT / "docs/kernels.md").read_text()
    (section,) = re.findall(r"^## Add an op$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return {match[1]: match[2] for match in _BLOCK.finditer(section)}


def insert(path: Path, marker: str, line: str) -> None:
    """Before the first line that begins with `marker`."""
    text = path.read_text()
    assert f"\n{marker}" in text
    path.write_text(text.replace(f"\n{marker}", f"\n{line}\n{marker}", 1))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Of the package, with the op."""
    try:
        targets.host_compiler.find_compiler()
    except ValueError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("copy")
    for name in ("cupykern", "kernels_cu"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "cli.py", folder)
    files = places()
    export = files.pop("cupykern/__init__.py")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert not path.exists()
        path.write_text(text if path.suffix == ".py" else f"// {name}{text}")
    insert(folder / "cupykern/ops/__init__.py", "    softmax,\n", "    scale_shift,")
    insert(folder / "cupykern/ops/__init__.py", "    softmax.OP,", "    scale_shift.OP,")
    insert(folder / "cupykern/__init__.py", "softmax = ", export.strip())
    insert(folder / "cupykern/__init__.py", '    "softmax",', '    "scale_shift",')
    return folder


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_the_five_places():
    assert list(places()) == [
        "cupykern/reference/scale_shift.py",
        "kernels_cu/scale_shift.cu",
        "cupykern/ops/scale_shift.py",
        "cupykern/__init__.py",
        "tests/ops/test_scale_shift.py",
    ]


def test_it_is_listed(copy):
    assert re.search(r"^\W*scale_shift\b", run(copy, "cli.py", "list"), re.MULTILINE)


def test_type_checkers_know_it(copy):
    run(copy, "-m", "cupykern.tools.stubs")
    assert "def scale_shift(x: np.ndarray" in (copy / "cupykern/__init__.pyi").read_text().replace(
        "(\n    ", "("
    )


def test_it_is_checked(copy):
    printed = run(copy, "cli.py", "check", "scale_shift", "--target", "host", "--cases", "40")
    assert "scale_shift" in printed


def test_a_wrong_kernel_is_found(copy):
    """The checks are of the op's own reference."""
    path = copy / "kernels_cu/scale_shift.cu"
    text = path.read_text()
    path.write_text(text.replace("* scale + shift", "* scale - shift"))
    try:
        with pytest.raises(AssertionError, match="scale_shift"):
            run(copy, "cli.py", "check", "scale_shift", "--target", "host", "--cases", "40")
    finally:
        path.write_text(text)


def test_it_is_benchmarked(copy, tmp_path):
    file = tmp_path / "bench.json"
    run(
        *(copy, "cli.py", "bench", "scale_shift", "--target", "host", "--shapes", "64,1000"),
        *("--dtype", "float32", "--rep-ms", "1", "--warmup-ms", "0", "--json", str(file)),
    )
    assert "scale_shift" in json.dumps(json.loads(file.read_text()))


def test_its_own_tests_pass(copy):
    printed = run(
        copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_scale_shift.py"
    )
    assert "2 passed" in printed
