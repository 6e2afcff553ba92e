"""NcclCommunicator: a Communicator over CuPy's NCCL, on its own CUDA stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupykern.numerics import to_numpy
from cupykern.targets import address_of, is_cupy
from cupykern.typing import Array

from .communicator import TIMEOUT, CommunicationError, Communicator, Deadline, Message, Pending

_PRIORITY = -5  # CUDA clamps it to the highest priority


class NcclCommunicator(Communicator):
    """A communicator over a cupy.cuda.nccl.NcclCommunicator or a cupyx.distributed.NCCLBackend.

    >>> from cupy.cuda import nccl  # doctest: +SKIP
    >>> raw = nccl.NcclCommunicator(size, unique_id, rank)  # doctest: +SKIP
    >>> comm = parallel.NcclCommunicator(raw)  # doctest: +SKIP

    Messages are sent on the communicator's own CUDA stream, so that they overlap with products on
    the current stream.  Before a call sends data all ranks compare arguments, which synchronises
    with the GPU.  During CUDA graph capture they cannot: the same call must have been made once
    before, and its sizes on other ranks are reused.

    control: a communicator of the same ranks, e.g. an MpiCommunicator, to compare arguments on the
        host; then no call synchronises with the GPU.
    timeout: seconds to wait for another rank's arguments; then the NCCL communicator is aborted and
        the call raises CommunicationError.  Missing data are detected by the next call or by
        `synchronize`; CuPy's own synchronize would hang.  The first call between two ranks that
        NCCL has not connected yet also hangs if one of them does not make it.

    Delete CUDA graphs that contain messages before the communicator.
    """

    def __init__(self, comm: Any, *, control: Communicator | None = None, timeout: float = TIMEOUT):
        import cupy

        raw = getattr(comm, "_comm", comm)  # where NCCLBackend keeps it
        for name in ("rank_id", "size", "send", "recv", "abort"):
            if not hasattr(raw, name):
                raise TypeError(
                    "comm must be a cupy.cuda.nccl.NcclCommunicator or a "
                    f"cupyx.distributed.NCCLBackend; got {type(comm).__qualname__}"
                )
        super().__init__(raw.rank_id(), raw.size(), timeout)
        if control is not None and not hasattr(control, "gather_bytes"):
            raise TypeError(
                "control must be a Communicator, e.g. an MpiCommunicator; got "
                f"{type(control).__qualname__}"
            )
        if control is not None and (control.rank, control.size) != (self.rank, self.size):
            raise ValueError(
                f"control must have comm's rank and size, {self.rank} of {self.size}; got "
                f"{control.rank} of {control.size}"
            )
        self._cuda, self._xp, self._comm, self._control = cupy.cuda, cupy, raw, control
        # High priority, so that messages do not queue behind the blocks of the next product.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_PRIORITY)

    @property
    def agrees(self) -> bool:
        return self.size > 1 and not self._cuda.get_current_stream().is_capturing()

    def _exchange(self, sends: list[Message], receives: list[Message]) -> Pending:
        nccl, stream = self._cuda.nccl, self._stream
        stream.wait_event(self._event(self._cuda.get_current_stream()))
        if sends or receives:
            with self._errors():
                nccl.groupStart()
                try:
                    for transfer, messages in (
                        (self._comm.send, sends),
                        (self._comm.recv, receives),
                    ):
                        for rank, x in messages:
                            transfer(address_of(x), x.nbytes, nccl.NCCL_UINT8, rank, stream.ptr)
                finally:
                    nccl.groupEnd()
        return _Event(self._cuda, self._event(stream), (sends, receives))

    def _event(self, stream: Any) -> Any:
        """An event after all work on the stream so far; during capture a node of the graph."""
        return stream.record(self._cuda.Event(disable_timing=True))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert NCCL errors, e.g. after a rank has died, to CommunicationError."""
        try:
            yield
        except self._cuda.nccl.NcclError as error:
            self.fail(f"NCCL failed: {error}")
            raise CommunicationError(f"NCCL failed on rank {self.rank}: {error}") from error

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        self.check()
        if self._control is not None:
            try:
                return self._control.gather_bytes(data, sizes)
            except CommunicationError as error:
                self.fail(str(error))
                raise
        mine = self._xp.asarray(np.frombuffer(data, np.uint8))
        found = [self._xp.empty(size, np.uint8) for size in sizes]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends, receives = (
            [(rank, mine) for rank in others],
            [(rank, found[rank]) for rank in others],
        )
        self._exchange(sends, receives).wait()
        self.synchronize()  # before the arrays' memory can be reused
        found[self.rank] = mine
        return [to_numpy(x).tobytes() for x in found]

    def fail(self, why: str) -> None:
        """Also notify the other ranks, through `control` if there is one, and abort NCCL: otherwise
        the GPU could hang, and pending messages could write to memory that has been reused."""
        if self._failure is None:
            super().fail(why)
            if self._control is not None:
                self._control.fail(why)
            self._comm.abort()

    def synchronize(self) -> None:
        """Wait until all messages so far have arrived.  Raises CommunicationError."""
        self.check()
        event, deadline = self._event(self._stream), Deadline(self.timeout)
        while not event.done:
            self._check_nccl()
            if deadline.passed():
                raise self.missing(rank for rank in range(self.size) if rank != self.rank)
        self._check_nccl()

    def _check_nccl(self) -> None:
        """Raise CommunicationError for asynchronous NCCL errors, e.g. a rank that has died."""
        with self._errors():
            self._comm.check_async_error()

    def check_array(self, name: str, x: Array) -> None:
        if not is_cupy(x):
            raise TypeError(f"{name} must be a cupy array: NCCL moves memory of GPUs")

    def split(self, color: int, key: int = 0) -> NcclCommunicator:
        nccl = self._cuda.nccl
        unique = nccl.get_unique_id()  # bytes; a tuple before CuPy 14
        mine = np.array([color, key, *unique], np.int64).tobytes()
        gathered = self.gather_bytes(mine, [len(mine)] * self.size)
        found = [np.frombuffer(x, np.int64).tolist() for x in gathered]
        members = sorted((x[1], rank) for rank, x in enumerate(found) if x[0] == color)
        ranks = [rank for _, rank in members]
        first = type(unique)(found[ranks[0]][2:])
        with self._errors():
            part = nccl.NcclCommunicator(len(ranks), first, ranks.index(self.rank))
        control = None if self._control is None else self._control.split(color, key)
        return NcclCommunicator(part, control=control, timeout=self.timeout)


class _Event:
    """A pending exchange.  arrays: kept alive until `wait`, so that their memory is not reused."""

    def __init__(self, cuda: Any, event: Any, arrays: Any):
        self._cuda, self._event, self._arrays = cuda, event, arrays

    def wait(self) -> None:
        self._cuda.get_current_stream().wait_event(self._event)
        self._arrays = None
