"""What the library asks of a namespace, numpy or CuPy, is there in CuPy, with these arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import cupykern

FILES = sorted(Path(cupykern.__file__).parent.rglob("*.py"))


def calls(source: str) -> Iterator[tuple[ast.Call, list[str]]]:
    """Those of a function of `xp`, of whatever object, with the function's path in it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        names, x = [], node.func
        while isinstance(x, ast.Attribute):
            names.insert(0, x.attr)
            x = x.value
        names = [x.id, *names] if isinstance(x, ast.Name) else names
        if "xp" in names[:-1]:
            yield node, names[names.index("xp") + 1 :]


def refusal(cupy, call: ast.Call, names: list[str]) -> str | None:
    """Why CuPy does not take the call; None: it does, or does not tell."""
    function = cupy
    for name in names:
        if not hasattr(function, name):
            return "there is no such function"
        function = getattr(function, name)
    try:
        signature = inspect.signature(function)
    except ValueError:  # ufuncs
        return None
    given = () if any(isinstance(x, ast.Starred) for x in call.args) else call.args
    try:
        signature.bind_partial(*given, **{x.arg: x.value for x in call.keywords if x.arg})
    except TypeError as error:
        return str(error)
    return None


def test_calls_of_a_namespace_are_legal_in_cupy():
    cupy = pytest.importorskip("cupy")
    found = {
        f"{file.name}:{call.lineno} {'.'.join(names)}": refusal(cupy, call, names)
        for file in FILES
        for call, names in calls(file.read_text())
    }
    assert len(found) > 500
    assert not {place: why for place, why in found.items() if why}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("xp.max(x, initial=0.0)", "initial"),
        ("self.problem.xp.max(x, -1, None, True, 0.0)", "too many"),
        ("target.xp.nanargmax2(x)", "no such function"),
        ("xp.max(x, axis=-1)", None),
        ("xp.linalg.norm(*x, ord=2)", None),
    ],
)
def test_calls_that_cupy_refuses_are_found(source, why):
    cupy = pytest.importorskip("cupy")
    ((call, names),) = calls(source)
    found = refusal(cupy, call, names)
    assert found is None if why is None else why in (found or "")
