"""Ranks that are killed end the others with an error, within the time limit."""

from __future__ import annotations

import time

from mpi_jobs import run

SCRIPT = """
import os, signal, sys, time
import numpy as np
from mpi4py import MPI
from cupykern import parallel

comm = parallel.MpiCommunicator(MPI.COMM_WORLD, timeout=2)
x = np.ones((4, 4), np.float32)
assert (parallel.all_reduce(comm, x) == comm.size).all()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    parallel.all_reduce(comm, x)
except parallel.CommunicationError as error:
    print(f"rank {comm.rank}: {error} after {time.monotonic() - begin:.0f} s", flush=True)
    time.sleep(1)  # so that all others say so too, before MPI is aborted
    sys.exit(3)
"""

PARENT = """
import os, sys, time

os.system(f"{sys.executable} {sys.argv[1]}")
time.sleep(60)  # mpiexec sees this process alone
"""


def test_a_killed_rank_ends_the_others_with_an_error(tmp_path):
    """Where mpiexec, which would end them without one, does not see it."""
    script, begin = tmp_path / "script.py", time.monotonic()
    script.write_text(SCRIPT)
    done = run(3, "-c", PARENT, str(script), timeout=60)
    assert time.monotonic() - begin < 30
    for rank in (0, 2):
        assert f"rank {rank}: all_reduce: " in done.stdout, done.stdout + done.stderr
    assert "rank 1 did not answer within 2 s" in done.stdout


def test_a_killed_rank_ends_the_job(tmp_path):
    script, begin = tmp_path / "script.py", time.monotonic()
    script.write_text(SCRIPT)
    assert run(3, str(script), timeout=60).returncode != 0
    assert time.monotonic() - begin < 30
