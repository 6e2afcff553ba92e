"""The examples that compare with the array library run, and cupykern's errors are not larger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["nearest_neighbours", "residual"])
def test_errors_are_at_most_those_of_multiply_adds(name):
    path = ROOT / "examples" / f"{name}.py"
    found = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    rows = {line.split()[0]: line.split() for line in found.stdout.splitlines()[2:]}
    assert float(rows["float32"][2]) <= 1.01 * float(rows["fma"][2])
