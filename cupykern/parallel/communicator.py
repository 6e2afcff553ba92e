"""Communicator: the interface to the ranks that compute together, over MPI, NCCL or alone.

`exchange` is point-to-point and moves only bytes.  No reduction of MPI or NCCL is used: sums are
computed in collectives.py, in FP32 and in rank order.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np

from cupykern.typing import Array

Message = tuple[int, Any]
"""(the other rank, a C-contiguous array that is sent or filled)."""

TIMEOUT = 30.0  # seconds


class CommunicationError(RuntimeError):
    """A rank did not answer in time, or a call failed halfway; the communicator is unusable.

    >>> error = parallel.CommunicationError("no answer in 30 s", [2])
    >>> error.ranks
    (2,)

    ranks: the ranks that did not answer.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class Tables(dict[bytes, np.ndarray]):
    """All ranks' integers of the last MOST calls on which they agreed, by this rank's packet."""

    MOST = 4096

    def __setitem__(self, call: bytes, own: np.ndarray) -> None:
        self.pop(call, None)
        super().__setitem__(call, own)
        if len(self) > self.MOST:
            del self[next(iter(self))]


class Pending(Protocol):
    """Pending messages of one exchange."""

    def wait(self) -> None:
        """Wait until arrays can be used, by the caller (numpy) or by the current stream (cupy).

        Raises CommunicationError after the communicator's time limit (numpy).
        """


class Communicator(ABC):
    """Base class of MpiCommunicator, NcclCommunicator and SelfCommunicator: a group of ranks.

    >>> comm = parallel.SelfCommunicator()
    >>> isinstance(comm, parallel.Communicator), comm.rank, comm.size
    (True, 0, 1)

    rank: this process's rank, in [0, size).
    size: number of ranks.
    timeout: longest wait for another rank, in seconds.
    """

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT):
        self.rank, self.size, self.timeout = rank, size, _seconds(timeout)
        self.exchanges = 0  # calls of `exchange` so far
        self.bytes_sent = 0  # by `exchange` so far
        self.tables = Tables()
        self._failure: str | None = None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin sends and receives; the messages of all ranks must match.

        Two ranks that send to each other in one call also receive in it.  Empty arrays are not
        sent.  Before `Pending.wait`, arrays must not be modified, and received ones not be read.
        """
        self.check()
        self.exchanges += 1
        full = [[(rank, x) for rank, x in messages if x.size] for messages in (sends, receives)]
        self.bytes_sent += sum(x.nbytes for _, x in full[0])
        return self._exchange(*full)

    @abstractmethod
    def _exchange(self, sends: list[Message], receives: list[Message]) -> Pending: ...

    @abstractmethod
    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """The `data` of all ranks, of `sizes` bytes; blocks until all have arrived.

        Raises CommunicationError.
        """

    @abstractmethod
    def check_array(self, name: str, x: Array) -> None:
        """Raise TypeError or NotImplementedError for arrays that this communicator cannot move."""

    @abstractmethod
    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same color, ordered by key, then by rank."""

    @property
    def agrees(self) -> bool:
        """Whether ranks can compare calls now: False for one rank and during graph capture."""
        return self.size > 1

    def check(self) -> None:
        """Raise CommunicationError if an earlier call has failed."""
        if self._failure is not None:
            raise CommunicationError(f"the communicator is broken: {self._failure}")

    def fail(self, why: str) -> None:
        """Make all later calls raise, because messages of the failed call may still be pending."""
        self._failure = self._failure or why

    def missing(self, ranks: Iterable[int]) -> CommunicationError:
        """The error for ranks that did not answer; marks the communicator as broken."""
        late = sorted(set(ranks))
        names = ", ".join(map(str, late))
        what = f"rank{'s' * (len(late) > 1)} {names} did not answer within {self.timeout:g} s"
        self.fail(what)
        return CommunicationError(f"{what} (waiting: rank {self.rank} of {self.size})", late)


def _seconds(timeout: Any) -> float:
    """Raises TypeError and ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds; got {type(timeout).__name__}")
    seconds = float(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout must be positive; got {timeout}")
    return seconds


class _Done:
    def wait(self) -> None:
        """Return at once: no message is pending."""


class SelfCommunicator(Communicator):
    """A single rank: functions of `cupykern.parallel` compute the same as their ops.

    >>> comm = parallel.SelfCommunicator()
    >>> comm.rank, comm.size
    (0, 1)
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _exchange(self, sends: list[Message], receives: list[Message]) -> Pending:
        return _Done()

    def gather_bytes(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        return [data]

    def check_array(self, name: str, x: Array) -> None:
        """Accept any array."""

    def split(self, color: int, key: int = 0) -> SelfCommunicator:
        return SelfCommunicator()


class Deadline:
    """A deadline for polling loops: polls without sleeping at first, then sleeps between polls,
    because ranks may share cores."""

    def __init__(self, seconds: float):
        self._begin = time.monotonic()
        self._end = self._begin + seconds

    def passed(self) -> bool:
        """Whether the time is up; may sleep up to 1 ms before it returns."""
        now = time.monotonic()
        if now - self._begin > 2e-4:
            time.sleep(min(1e-3, (now - self._begin) / 10))
        return now > self._end


def bytes_of(x: Array) -> Any:
    """A C-contiguous array viewed as uint8, as MPI has no BF16 or FP8 types."""
    return x.reshape(-1).view(np.uint8)
