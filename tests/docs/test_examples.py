"""The examples that compare with the array library run, and cupykern's errors are not larger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def rows_of(name: str, *args: str) -> list[list[str]]:
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *args],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return [line.split() for line in found.stdout.splitlines()]


@pytest.mark.parametrize("name", ["nearest_neighbours", "residual"])
def test_errors_are_at_most_those_of_multiply_adds(name):
    rows = {row[0]: row for row in rows_of(name)[2:]}
    assert float(rows["float32"][2]) <= 1.01 * float(rows["fma"][2])


def test_precisions_err_at_most_like_multiply_adds():
    """rms errors of each kind of inputs; fewer bits err more where parts hold the numbers."""
    rows = rows_of("precisions", "--size", "128")
    kinds = [i for i, row in enumerate(rows) if row[-1] == "cubed"]
    assert len(kinds) == 4
    for first in kinds:
        rms = {row[0]: float(row[2]) for row in rows[first + 2 : first + 10]}
        for name in ("numpy", "float32", "fp16x3", "bf16x9", "bf16x6"):
            assert rms[name] <= 1.1 * rms["fma"]
        assert rows[first][0] == "badly_scaled," or rms["bf16x6"] < rms["bf16x3"] < rms["tf32"]
