"""What a test may import: public names, and modules of tests/support; no other test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def imported(text: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import, in functions too; name "" for a whole module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_private(name: str) -> bool:
    return any(part[:1] == "_" and part[:2] != "__" for part in name.split("."))


def wrong_imports(text: str) -> list[str]:
    return [
        f"{module} {name}".strip()
        for module, name in imported(text)
        if is_private(module) or is_private(name) or module.startswith("test_")
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_private_name_and_no_other_test_is_imported(path):
    assert not wrong_imports(path.read_text())


def test_a_wrong_import_is_found():
    text = "from __future__ import annotations\nimport a.b, a._c\nfrom x import y\n"
    assert wrong_imports(text) == ["a._c"]
    assert wrong_imports("def f():\n    from a import _b\n    import test_c\n") == [
        "a _b",
        "test_c",
    ]
