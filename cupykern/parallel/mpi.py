"""MpiCommunicator: a Communicator over mpi4py."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupykern.targets import is_cupy
from cupykern.typing import Array

from .communicator import (
    TIMEOUT,
    CommunicationError,
    Communicator,
    Deadline,
    Message,
    Pending,
    bytes_of,
)

_CONTROL, _DATA, _FAILED = 1, 2, 3  # tags


class MpiCommunicator(Communicator):
    """A communicator over a duplicate of an mpi4py communicator; all its ranks must construct it.

    >>> from mpi4py import MPI
    >>> comm = parallel.MpiCommunicator(MPI.COMM_WORLD)
    >>> comm.size == MPI.COMM_WORLD.Get_size()
    True

    comm: an mpi4py.MPI.Intracomm.
    timeout: seconds to wait for another rank; then the call raises CommunicationError.  After a
        failure the process aborts the MPI job at exit, because MPI_Finalize would hang.
    cuda_aware: whether MPI accepts GPU pointers; required for cupy arrays.
    """

    def __init__(self, comm: Any, *, timeout: float = TIMEOUT, cuda_aware: bool = False):
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(
                f"comm must be an mpi4py.MPI.Intracomm; got {type(comm).__module__}."
                f"{type(comm).__qualname__}"
            )
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout)
        self._mpi, self._comm, self._cuda_aware = MPI, comm.Dup(), cuda_aware

    def _exchange(self, sends: list[Message], receives: list[Message]) -> Pending:
        gpu = next((x for _, x in (*sends, *receives) if is_cupy(x)), None)
        if gpu is not None:
            import cupy

            cupy.cuda.get_current_stream().synchronize()  # MPI is not stream-ordered
        return self._begin(sends, receives, _DATA)

    def _begin(self, sends: list[Message], receives: list[Message], tag: int) -> _Requests:
        byte = self._mpi.BYTE
        requests = [
            (rank, begin([bytes_of(x), byte], rank, tag))
            for messages, begin in ((receives, self._comm.Irecv), (sends, self._comm.Isend))
            for rank, x in messages
        ]
        return _Requests(self, requests, (sends, receives))

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        self.check()
        mine = np.frombuffer(data, np.uint8)
        found = [np.empty(size, np.uint8) for size in sizes]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends, receives = (
            [(rank, mine) for rank in others],
            [(rank, found[rank]) for rank in others],
        )
        self._begin(sends, receives, _CONTROL).wait()
        found[self.rank] = mine
        return [x.tobytes() for x in found]

    def check_array(self, name: str, x: Array) -> None:
        if is_cupy(x) and not self._cuda_aware:
            raise NotImplementedError(
                f"{name} is a cupy array: use NcclCommunicator, or cuda_aware=True if MPI takes "
                "pointers to GPU memory"
            )

    def split(self, color: int, key: int = 0) -> MpiCommunicator:
        part = self._comm.Split(color, key)
        try:
            return MpiCommunicator(part, timeout=self.timeout, cuda_aware=self._cuda_aware)
        finally:
            part.Free()

    def fail(self, why: str) -> None:
        """Also notify the other ranks, which may be waiting for this rank."""
        if self._failure is None and self.size > 1:
            atexit.register(self._mpi.COMM_WORLD.Abort, 1)
            text = np.frombuffer(why.encode(), np.uint8)
            others = [(rank, text) for rank in range(self.size) if rank != self.rank]
            self._told = self._begin(others, [], _FAILED)  # kept alive, never waited for
        super().fail(why)

    def finish(self, requests: Sequence[tuple[int, Any]]) -> None:
        """Wait for (rank, request) pairs.  Raises CommunicationError."""
        left, deadline = [request for _, request in requests], Deadline(self.timeout)
        try:
            while not self._mpi.Request.Testall(left):
                self._check_others()
                if deadline.passed():
                    late = [rank for rank, request in requests if not request.Test()]
                    if late:
                        raise self.missing(late)
        except self._mpi.Exception as error:
            self.fail(f"MPI failed: {error}")
            raise CommunicationError(f"MPI failed on rank {self.rank}: {error}") from error

    def _check_others(self) -> None:
        """Raise CommunicationError if another rank has sent notice that it failed."""
        status, byte = self._mpi.Status(), self._mpi.BYTE
        if self._comm.Iprobe(self._mpi.ANY_SOURCE, _FAILED, status):
            text, rank = np.empty(status.Get_count(byte), np.uint8), status.Get_source()
            self._comm.Recv([text, byte], rank, _FAILED)
            why = f"rank {rank}: {text.tobytes().decode()}"
            self.fail(why)
            raise CommunicationError(why, [rank])


class _Requests:
    def __init__(self, comm: MpiCommunicator, requests: list[tuple[int, Any]], arrays: Any):
        self._comm, self._requests, self._arrays = comm, requests, arrays

    def wait(self) -> None:
        self._comm.finish(self._requests)
        self._requests, self._arrays = [], None
