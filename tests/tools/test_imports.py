"""Who may use a name with an underscore: the module that it is in.

No test and no other module of the package imports it, reads it as `module._name`, or names it in
`monkeypatch.setattr(module, "_name", ...)`; code in strings, for other processes, does not either.
A test imports modules of tests/support, and no other test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for part in ("cupykern", "tests") for path in (ROOT / part).rglob("*.py"))
PACKAGES = {"cupykern", "cli", *(path.stem for path in (ROOT / "tests/support").glob("*.py"))}
# Names of other libraries, which have no public ones for it.
ALLOWED = {
    "cupykern/targets/host_compiler.py": {"_ctypes"},
    "cupykern/tools/doctor.py": {"cupy._core.core assemble_cupy_compiler_options"},
}
# A planted fault stands where the code does that it replaces; here are the examples.
FREE = "tests/faults/", "tests/tools/test_imports.py"
# A named tuple's own, which are public.
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
_IN_TEXT = re.compile(r"(?:from|import) (?:cupykern|cli)\b")


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of each import, in functions too; name "" for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_private(name: str) -> bool:
    parts = set(name.split(".")) - NAMED_TUPLE
    return any(part[:1] == "_" and part[:2] != "__" for part in parts)


def wrong_imports(text: str) -> list[str]:
    return [
        f"{module} {name}".strip()
        for module, name in imported(ast.parse(text))
        if is_private(module) or is_private(name) or module.startswith("test_")
    ]


def ours(tree: ast.AST) -> set[str]:
    """The names that imports bind to what is in the repository."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").partition(".")[0] in PACKAGES:
                found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                if first in PACKAGES:
                    found.add(alias.asname or first)
    return found


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return None


def texts(tree: ast.AST) -> Iterator[str]:
    """Its strings; a value within an f-string is a 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(x.value) if isinstance(x, ast.Constant) else "0" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def wrong_uses(text: str) -> Iterator[str]:
    """Of private names of what is imported from the repository."""
    tree = ast.parse(text)
    modules = ours(tree)

    def is_ours(name: str | None) -> bool:
        return name is not None and name.partition(".")[0] in modules

    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else None
        if name is not None and is_ours(name) and is_private(node.attr):
            yield name
        elements = node.args if isinstance(node, ast.Call) else getattr(node, "elts", ())
        for before, after in pairwise(elements):
            attribute = after.value if isinstance(after, ast.Constant) else None
            if isinstance(attribute, str) and is_private(attribute) and is_ours(dotted(before)):
                yield f"{dotted(before)}.{attribute}"
    for found in texts(tree):
        if re.fullmatch(r"cupykern[\w.]+", found) and is_private(found):
            yield found
        elif _IN_TEXT.search(found) and found != text:
            try:
                yield from (*wrong_imports(found), *wrong_uses(found))
            except SyntaxError:  # prose, or a part of a program
                continue


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stay_in_their_module(path):
    text = path.read_text()
    place = path.relative_to(ROOT).as_posix()
    found = set(wrong_imports(text)) - ALLOWED.get(place, set())
    if not place.startswith(FREE):
        found |= set(wrong_uses(text))
    assert not found


def test_a_wrong_import_is_found():
    text = "from __future__ import annotations\nimport a.b, a._c\nfrom x import y\n"
    assert wrong_imports(text) == ["a._c"]
    assert wrong_imports("def f():\n    from a import _b\n    import test_c\n") == [
        "a _b",
        "test_c",
    ]


@pytest.mark.parametrize(
    "code, found",
    [
        ("workspace._kept.clear()", ["workspace._kept"]),
        ("x = cupykern.runtime.workspace._kept", ["cupykern.runtime.workspace._kept"]),
        ("patch.setattr(workspace, '_kept', {})", ["workspace._kept"]),
        ("patch.setattr(here.jit, '_lock', None)", ["here.jit._lock"]),
        ("CASES = [(workspace, '_kept')]", ["workspace._kept"]),
        ("patch.setattr('cupykern.runtime.jit._lock', None)", ["cupykern.runtime.jit._lock"]),
        ("run('from cupykern import jit\\nprint(jit._lock)')", ["jit._lock"]),
        ("run(f'from cupykern.jit import _lock; x = {x}')", ["cupykern.jit _lock"]),
        ("class A:\n    def f(self):\n        return self._x, numpy._x", []),
        ("workspace.take(x); workspace.Key._fields; workspace.__name__", []),
    ],
)
def test_a_wrong_use_is_found(code, found):
    head = "import cupykern, numpy\nfrom cupykern.runtime import workspace\nfrom .. import here\n"
    assert list(wrong_uses(head + code)) == found
