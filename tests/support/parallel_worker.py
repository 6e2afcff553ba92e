"""One rank of the MPI job that runs the checks: `mpiexec -n 3 python parallel_worker.py OUT`.

Rank 0 writes what failed, as JSON: {check: text of the failures, or ""}.  With `nccl` after OUT
those of ON_GPUS, over NCCL on a GPU for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI
from on_gpu import OnGpu
from parallel_checks import CHECKS, ON_GPUS, attention, linear, moe, norms, vocabulary

import cupykern
from cupykern import parallel
from cupykern.tools.ranks.world import World


def main() -> None:
    world, results = MPI.COMM_WORLD, {}
    checks, communicator = _over_nccl() if sys.argv[2:] == ["nccl"] else _over_mpi()
    for name, check in checks.items():
        failure, begin = "", time.monotonic()
        try:
            check(communicator())
        except BaseException:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        meeting = world.Ibarrier()
        while not meeting.Test():
            time.sleep(1e-3)  # a blocking call would keep a core busy
        failures = world.gather(failure)
        if world.rank == 0:
            results[name] = "\n".join(filter(None, failures))
            print(f"{time.monotonic() - begin:.2f} s {name} {results[name]}", flush=True)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
    world.Barrier()
    sys.stdout.flush()
    os._exit(0)  # what checks let fail is not waited for


Checks = tuple[dict[str, Callable[[Any], None]], Callable[[], parallel.Communicator]]


def _over_mpi() -> Checks:
    return CHECKS, lambda: parallel.MpiCommunicator(MPI.COMM_WORLD, timeout=20)


def _over_nccl() -> Checks:
    for module in (linear, norms, attention, vocabulary, moe):
        for name, of in (("parallel", parallel), ("cupykern", cupykern)):
            if hasattr(module, name):
                setattr(module, name, OnGpu(of))
    comm = World.of("cuda", timeout=60).comm
    return {name: CHECKS[name] for name in ON_GPUS}, lambda: comm


if __name__ == "__main__":
    main()
