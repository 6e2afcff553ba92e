"""World: the processes of an MPI job, with one GPU each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import targets
from ...parallel import Communicator, MpiCommunicator, NcclCommunicator

_TIMEOUT = 300.0  # seconds: ranks compile kernels, and can wait for rank 0's measurement
_PAUSE_S = 1e-4


@dataclass
class World:
    """mpi: mpi4py's COMM_WORLD.  comm: of all ranks; NCCL on GPUs.

    local: index of this process on its host, and of its GPU.
    """

    mpi: Any
    comm: Communicator
    local: int

    @classmethod
    def of(cls, target: str | None, timeout: float = _TIMEOUT) -> World:
        """Join this MPI job and select this process's GPU.

        target: None for the GPU if there is one.  Raises targets.UnavailableError if mpi4py, NCCL
        or a GPU for each rank is missing.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no MPI
            raise targets.UnavailableError(
                f"several ranks need MPI: pip install 'cupykern[parallel]' ({error})"
            ) from None
        mpi = MPI.COMM_WORLD
        local = mpi.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
        control = MpiCommunicator(mpi, timeout=timeout)
        if targets.get(target).xp is np:
            return cls(mpi, control, local)
        return cls(mpi, _nccl(mpi, local, control), local)

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def renew(self) -> None:
        """Replace a broken communicator by a new one of the same ranks."""
        control = MpiCommunicator(self.mpi, timeout=self.comm.timeout)
        self.comm = _nccl(self.mpi, self.local, control)

    def wait(self) -> None:
        """Wait for all ranks without the CPU load of MPI's barrier: rank 0 can be measuring."""
        request = self.mpi.Ibarrier()
        while not request.Test():
            time.sleep(_PAUSE_S)

    def worst(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over all ranks."""
        return np.max(self.mpi.allgather(list(values)), axis=0).tolist()

    def all(self, found: bool) -> bool:
        """Return whether `found` is true on all ranks."""
        return all(self.mpi.allgather(found))

    def shared(self, value: Any) -> Any:
        """Return rank 0's value."""
        return self.mpi.bcast(value)


def _nccl(mpi: Any, local: int, control: MpiCommunicator) -> NcclCommunicator:
    import cupy
    from cupy.cuda import nccl

    if not nccl.available:
        raise targets.UnavailableError(
            "several ranks on GPUs need NCCL, as of pip's nvidia-nccl-cu13"
        )
    count = cupy.cuda.runtime.getDeviceCount()
    most = max(mpi.allgather(local)) + 1
    if most > count:
        raise targets.UnavailableError(f"{most} ranks need as many GPUs; there are {count}")
    cupy.cuda.Device(local).use()
    unique = mpi.bcast(nccl.get_unique_id() if control.rank == 0 else None)
    raw = nccl.NcclCommunicator(control.size, unique, control.rank)
    return NcclCommunicator(raw, control=control, timeout=control.timeout)
