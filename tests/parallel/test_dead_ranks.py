"""Ranks that are killed end the others with an error, within the time limit."""

from __future__ import annotations

import time

import needs
import pytest
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


NCCL_SCRIPT = """
import os, signal, sys, time
import cupy
from mpi4py import MPI
from cupykern import parallel
from cupykern.tools.ranks.world import World

world = World.of("cuda", timeout=5)
comm, when, control = world.comm, sys.argv[1], sys.argv[2]
if control == "nccl":
    comm._control = None

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

x = cupy.ones((64, 64), cupy.float32)
for i in range(20):
    y = parallel.all_reduce(comm, x)
assert (y.get() == comm.size).all()
if comm.rank == 1 and when == "between":
    die()
if comm.rank == 1:
    comm.exchange = die  # after both ranks agreed to the call
begin = time.monotonic()
try:
    while True:
        parallel.all_reduce(comm, x)
except parallel.CommunicationError as error:
    print(f"rank {comm.rank}: {error} after {time.monotonic() - begin:.0f} s", flush=True)
    os._exit(3)  # MPI_Finalize would wait for rank 1
"""


@pytest.mark.gpu
@needs.gpus(2)
@pytest.mark.parametrize("when", ["between", "halfway"])
@pytest.mark.parametrize("control", ["mpi", "nccl"])
def test_a_killed_rank_ends_the_others_over_nccl(tmp_path, when, control):
    """Between calls or within one, arguments being compared on the host or by NCCL."""
    script = tmp_path / "script.py"
    script.write_text(NCCL_SCRIPT)
    done = run(2, "-c", PARENT, f"{script} {when} {control}", timeout=90)
    assert "rank 0: all_reduce: " in done.stdout, done.stdout + done.stderr
    assert int(done.stdout.split(" after ")[1].split()[0]) < 30
