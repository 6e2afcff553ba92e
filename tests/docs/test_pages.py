"""The examples of README and of every page of docs run as they stand."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupykern
from cupykern.peers import all_peers

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks(page: str) -> list[str]:
    """The Python blocks of a page; each starts at its own line, so that errors name it."""
    text = (ROOT / page).read_text()
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in _BLOCK.finditer(text)]


def _needs_gpu(block: str) -> bool:
    return block.lstrip().startswith("# GPU")


PAGES = [str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.md"))]
TESTED_ELSEWHERE = {"docs/guide/interop.md"}  # tests/interop, by what is installed
RUN = [
    page
    for page in PAGES
    if page not in TESTED_ELSEWHERE and any(not _needs_gpu(block) for block in _blocks(page))
]
ON_GPU = [page for page in PAGES if any(_needs_gpu(block) for block in _blocks(page))]


def test_every_peer_has_a_line():
    page = (DOCS / "reference" / "measuring.md").read_text()
    section = page.split("## Other libraries")[1].split("## ")[0]
    named = {name for line in section.splitlines() if line.startswith("| `")
             for name in re.findall("`([^`]+)`", line.split("|")[1])}  # fmt: skip
    assert named == set(all_peers())


def test_there_are_examples():
    for folder, least in (("docs/guide/", 6), ("docs/recipes/", 6)):
        assert sum(page.startswith(folder) for page in RUN) >= least
    assert {"docs/index.md", "docs/kernels.md"} <= set(RUN) and len(ON_GPU) >= 4


@pytest.mark.parametrize("page", RUN)
def test_examples_of_a_page_run_on_the_host(page):
    """In one namespace, on the host target."""
    namespace = {"__name__": "example"}
    for block in _blocks(page):
        if not _needs_gpu(block):
            exec(compile(block, page, "exec"), namespace)


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", RUN)
def test_examples_of_a_page_run_on_the_host_as_users_compile(page, tmp_path):
    """Optimized, which may contract a * b + c to one rounding."""
    script = tmp_path / "page.py"
    script.write_text("\n".join(block for block in _blocks(page) if not _needs_gpu(block)))
    names = {k: v for k, v in os.environ.items() if k != "CUPYKERN_HOST_OPTIMIZE"}
    environment = {**names, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("page", ON_GPU)
def test_examples_for_a_gpu(page):
    for block in _blocks(page):
        if _needs_gpu(block):
            exec(compile(block, page, "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", ON_GPU)
def test_examples_for_a_gpu_without_one(page):
    """They compile; what they import and each dotted name (cupy.cuda.Stream) exist."""
    pytest.importorskip("cupy")
    for block in _blocks(page):
        if _needs_gpu(block):
            unknown = _unknown_names(ast.parse(block))
            assert not unknown, f"{page}: {unknown}"


def _unknown_names(tree: ast.Module) -> list[str]:
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name] = importlib.import_module(alias.name)
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not _is_known(node, modules)
    ]


def _is_known(node: ast.Attribute, modules: dict[str, Any]) -> bool:
    """True too of what is no attribute of a module, such as a method."""
    names: list[str] = []
    part: ast.expr = node
    while isinstance(part, ast.Attribute):
        names.insert(0, part.attr)
        part = part.value
    if not isinstance(part, ast.Name) or part.id not in modules:
        return True
    found = modules[part.id]
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_unknown_names_are_found():
    tree = ast.parse("import cupykern\ncupykern.softmin(x.y)\ncupykern.softmax(z).sum()")
    assert _unknown_names(tree) == ["cupykern.softmin"]


def test_readme_example_with_numpy():
    """README's calls, made for CuPy arrays, take numpy's."""
    (first,) = (block for block in _blocks("README.md") if "linspace" in block)
    exec(
        compile(first.replace("import cupy\n", "\n"), "README.md", "exec"),
        {"cupy": np, "cupykern": cupykern},
    )


def test_environment_variables_are_all_told():
    told = (DOCS / "guide" / "running.md").read_text()
    used = {
        name
        for path in (ROOT / "cupykern").rglob("*.py")
        for name in re.findall(r"\bCUPY(?:KERN)?_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert used and not [name for name in used if f"`{name}`" not in told]


_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", *PAGES])
def test_links_to_files(page):
    """Sphinx checks those between pages; these are also of README, and of files outside docs."""
    here = (ROOT / page).parent
    links = [found[1] for found in _LINK.finditer((ROOT / page).read_text())]
    missing = [link for link in links if "://" not in link and not (here / link).exists()]
    assert not missing
