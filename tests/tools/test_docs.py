"""The examples of README and docs run as they stand."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

import cupykern

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks(page: str) -> list[str]:
    """The Python blocks of a page; each starts at its own line, so that errors name it."""
    text = (ROOT / page).read_text()
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", ["docs/users.md", "docs/kernels.md"])
def test_examples(page):
    """In one namespace; those that begin with "# GPU" where there is one."""
    blocks = [block for block in _blocks(page) if not block.lstrip().startswith("# GPU")]
    assert len(blocks) >= 3
    namespace = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "decode_attention", "BlockMask"])
def test_examples_of_docstrings(name):
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (found,) = finder.find(getattr(cupykern, name), name, globs={"np": np, "cupykern": cupykern})
    assert found.examples and not runner.run(found).failed


@pytest.mark.gpu
def test_examples_for_a_gpu():
    for block in _blocks("docs/users.md"):
        if block.lstrip().startswith("# GPU"):
            exec(compile(block, "docs/users.md", "exec"), {"cupykern": cupykern})


def test_readme_example_with_numpy():
    """README's calls, made for CuPy arrays, take numpy's."""
    import cupykern

    (first,) = (block for block in _blocks("README.md") if "linspace" in block)
    exec(
        compile(first.replace("import cupy\n", "\n"), "README.md", "exec"),
        {"cupy": np, "cupykern": cupykern},
    )


def test_environment_variables_are_all_told():
    told = (ROOT / "docs/users.md").read_text()
    used = {
        name
        for path in (ROOT / "cupykern").rglob("*.py")
        for name in re.findall(r"\bCUPY(?:KERN)?_[A-Z_]+[A-Z]\b", path.read_text())
    }
    assert used and not [name for name in used if f"`{name}`" not in told]
