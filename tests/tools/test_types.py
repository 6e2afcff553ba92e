"""Types: Array has what both kinds of arrays have; the type checker has few exceptions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from cupykern.typing import Array

ROOT = Path(__file__).parents[2]


class _Nothing(Protocol):
    pass


MEMBERS = sorted(set(vars(Array)) - set(vars(_Nothing)))


def test_array_has_the_attributes_that_kernels_need():
    assert {"shape", "dtype", "strides", "data", "reshape"} <= set(MEMBERS)


@pytest.mark.parametrize("name", MEMBERS)
def test_numpy_and_cupy_arrays_have_every_member_of_array(name):
    # mypy compares Array with numpy's stubs; CuPy has none.
    cupy = pytest.importorskip("cupy")
    assert hasattr(np.ndarray, name)
    assert hasattr(cupy.ndarray, name)


def test_every_exception_of_the_type_checker_has_a_code_and_a_reason():
    comments = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "cupykern").rglob("*.py"))
        for line in path.read_text().splitlines()
        if "# type: ignore" in line
    ]
    legal = re.compile(r"# type: ignore\[[a-z-]+\]  # \S")
    assert [comment for comment in comments if not legal.search(comment)] == []


def test_the_type_checker_leaves_out_no_module():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert [one["module"] for one in settings["overrides"] if one.get("ignore_errors")] == []
    assert "cupykern" in settings["files"] and "exclude" not in settings
