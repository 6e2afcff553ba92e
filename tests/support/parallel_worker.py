"""One rank of the MPI job that runs the checks: `mpiexec -n 3 python parallel_worker.py OUT`.

Rank 0 writes what failed, as JSON: {check: text of the failures, or ""}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from mpi4py import MPI
from parallel_checks import CHECKS

from cupykern import parallel


def main() -> None:
    world, results = MPI.COMM_WORLD, {}
    for name, check in CHECKS.items():
        failure, begin = "", time.monotonic()
        try:
            check(parallel.MpiCommunicator(world, timeout=20))
        except BaseException:
            failure = f"rank {world.rank}:\n{traceback.format_exc()}"
        failures = world.gather(failure)
        if world.rank == 0:
            results[name] = "\n".join(filter(None, failures))
            print(f"{time.monotonic() - begin:.2f} s {name}", flush=True)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")
    world.Barrier()
    sys.stdout.flush()
    os._exit(0)  # what checks let fail is not waited for


if __name__ == "__main__":
    main()
