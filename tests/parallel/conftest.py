"""MPI jobs of 2, 3 and 4 ranks, one each, whose results all tests of a run share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from filelock import FileLock

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def mpiexec() -> str:
    """Where it is; skips where MPI is missing."""
    pytest.importorskip("mpi4py", reason="mpi4py is missing: pip install -e '.[parallel]'")
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    found = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if found is None:
        pytest.skip("mpiexec is missing: pip install -e '.[parallel]'")
    return found


def run(ranks: int, *command: str, timeout: float = 240.0, options: tuple[str, ...] = ()):
    """An MPI job of this Python."""
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [mpiexec(), *options, "-n", str(ranks), sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="session")
def checked(tmp_path_factory):
    """checked(ranks): what failed of each check on so many ranks."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # that of all workers

    def results(ranks: int) -> dict[str, str]:
        path = folder / f"parallel-{ranks}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                done = run(ranks, str(SUPPORT / "parallel_worker.py"), str(path))
                if not path.exists():
                    path.write_text(json.dumps({"": done.stdout + done.stderr}), encoding="utf-8")
        found = json.loads(path.read_text(encoding="utf-8"))
        assert "" not in found, found[""]
        return found

    return results
