"""docs/notebook.ipynb runs from top to bottom on the host target, and is stored without outputs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "docs/notebook.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_stored_without_outputs():
    for cell in NOTEBOOK["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_it_is_a_notebook():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids) and len(CODE) >= 8
    for source in CODE:
        ast.parse(source)


def test_every_cell_runs_and_its_assertions_hold(tmp_path):
    """In a process and with a store of its own; a cell's assertions are part of it."""
    pytest.importorskip("matplotlib")
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(CODE))
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    environment.pop("CUPYKERN_TUNE", None)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "largest error" in done.stdout and "'fifo': " in done.stdout
    assert "Rows(" in done.stdout  # the config that tune kept
