"""CUPYKERN_TEST_MINUTES (tests/conftest.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEST = "test_a_functions_relative_error_holds_wherever_its_argument_may_be"
FILE = "tests/ops/test_expressions.py"


@pytest.mark.parametrize(("minutes", "one"), [("0", True), ("60", False)])
def test_only_first_cases_run_after_the_minutes(minutes, one):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-q", f"{FILE}::{TEST}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CUPYKERN_TEST_MINUTES": minutes},
    )
    passed, skipped = (
        int((re.findall(rf"(\d+) {what}", done.stdout) or [0])[-1])
        for what in ("passed", "skipped")
    )
    assert done.returncode == 0, done.stdout
    assert passed + skipped > 10 and (passed == 1) == one and (skipped == 0) != one
