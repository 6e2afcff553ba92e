"""Lines of the sources are at most 100 columns long, where ruff does not look."""

from __future__ import annotations

import ast
import re
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


def test_checks_of_configs_are_short():
    """A function that says why a config or a task is refused has at most 15 branches."""
    checks = [
        (function, f"{path.relative_to(ROOT)}: {function.name}")
        for path in (ROOT / "cupykern").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and re.search("refusal|unfit|validate", function.name)
    ]
    assert len(checks) > 30
    assert not [name for function, name in checks if _branches(function) > 15]


def _branches(function: ast.FunctionDef) -> int:
    nodes = list(ast.walk(function))
    tests = sum(isinstance(node, (ast.If, ast.IfExp)) for node in nodes)
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return tests + operators + sum(len(x.ifs) for x in nodes if isinstance(x, ast.comprehension))
