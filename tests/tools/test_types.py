"""Types: Array has what both kinds of arrays have; the type checker has few exceptions."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Protocol

import numpy as np
import pytest

from cupykern.tools import stubs
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


@pytest.mark.parametrize("package", stubs.PATHS)
def test_stubs_are_those_of_the_functions(package):
    # To write them: python -m cupykern.tools.stubs
    assert stubs.PATHS[package].read_text() == stubs.stub(package)


def _public_functions(package: str) -> Iterator[tuple[str, FunctionType]]:
    """Of the package, with the methods of its classes that hold arrays."""
    module = import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, FunctionType):
            yield name, value
        if isinstance(value, type) and hasattr(value, "arrays"):
            for method, given in vars(value).items():
                function = getattr(given, "__func__", given)
                if isinstance(function, FunctionType) and not method.startswith("_"):
                    yield f"{name}.{method}", function


NO_ARRAYS = {  # what is typed Any: it may be of any kind
    "asarray": {"x"},
    "tune": {"op", "inputs", "options"},
}


@pytest.mark.parametrize("package", ["cupykern", "cupykern.parallel", "cupykern.dask"])
def test_public_functions_say_what_arrays_they_take_and_give(package):
    if package == "cupykern.dask":
        pytest.importorskip("dask")
    found = [
        (of, name)
        for of, function in _public_functions(package)
        for name, annotation in (
            *((p.name, p.annotation) for p in inspect.signature(function).parameters.values()),
            ("return", inspect.signature(function).return_annotation),
        )
        if annotation == "Any" and name not in NO_ARRAYS.get(of, ())
    ]
    assert found == []
