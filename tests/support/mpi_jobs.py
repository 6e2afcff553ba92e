"""MPI jobs of this Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent


def mpiexec() -> str:
    """Where it is; skips where MPI is missing."""
    pytest.importorskip("mpi4py", reason="mpi4py is missing: pip install -e '.[parallel]'")
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    found = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if found is None:
        pytest.skip("mpiexec is missing: pip install -e '.[parallel]'")
    return found


def run(ranks: int, *command: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """A job of so many ranks."""
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [mpiexec(), "-n", str(ranks), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )
