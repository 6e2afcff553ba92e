"""What a module of cupykern may import: its own layer and those below, without circles."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from layers import LAYERS, Module, circle, layer_of, read_modules, upward

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(ROOT / "cupykern")


def test_every_module_has_a_layer(modules):
    assert len(modules) > 100
    assert {layer_of(name) for name in modules} == set(range(len(LAYERS)))


def test_no_import_points_upward(modules):
    assert upward(modules) == []


def test_there_is_no_import_circle(modules):
    assert circle(modules) == []


@pytest.mark.parametrize(
    ("module", "line", "points_upward"),
    [
        ("cupykern.cache", "from .runtime import store", True),
        ("cupykern.rows.softmax_plan", "from ..ops import softmax", True),
        ("cupykern.rows.configs", "def late():\n    from .rows import row_plan", False),
        ("cupykern.public", "import cupykern.tools.bench", True),
    ],
)
def test_imports_upward_and_circles_are_seen(modules, module, line, points_upward):
    tree = ast.Module([*modules[module].tree.body, *ast.parse(line).body], [])
    planted = {**modules, module: Module(tree, False)}
    assert bool(upward(planted)) == points_upward
    assert module in circle(planted)
