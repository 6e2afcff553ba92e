"""Jobs of 2, 3 and 4 ranks, of MPI and of NCCL one each, whose results all tests of a run share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from filelock import FileLock
from mpi_jobs import SUPPORT, mpiexec, run


@pytest.fixture(scope="session")
def checked(tmp_path_factory) -> Callable[..., dict[str, str]]:
    """checked(ranks, *options): what failed of each check on so many ranks; options: of
    parallel_worker.py."""
    mpiexec()
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # that of all workers

    def results(ranks: int, *options: str) -> dict[str, str]:
        path = folder / f"{'-'.join(('parallel', str(ranks), *options))}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                done = run(ranks, str(SUPPORT / "parallel_worker.py"), str(path), *options)
                if not path.exists():
                    path.write_text(json.dumps({"": done.stdout + done.stderr}), encoding="utf-8")
        found = json.loads(path.read_text(encoding="utf-8"))
        assert "" not in found, found[""]
        return found

    return results
