"""Communicator: the ranks that compute together, over MPI, NCCL or alone.

All that moves is bytes from one rank to another: `exchange`.  Nothing is added up on the way, so
that sums are made here, in FP32 and in the order of ranks (collectives.py).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from cupykern.typing import Array

Message = tuple[int, Any]
"""(the other rank, a C-contiguous array that is sent or filled)."""

TIMEOUT = 30.0  # seconds


class CommunicationError(RuntimeError):
    """A rank did not answer in time, or a call failed halfway: the communicator is of no more use.

    >>> error = parallel.CommunicationError("no answer in 30 s", [2])
    >>> error.ranks
    (2,)

    ranks: those that did not answer.
    """

    def __init__(self, message: str, ranks: Iterable[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


class Tables(dict[bytes, np.ndarray]):
    """What all ranks gave in calls that they agreed on: the last MOST of them."""

    MOST = 4096

    def __setitem__(self, call: bytes, own: np.ndarray) -> None:
        self.pop(call, None)
        super().__setitem__(call, own)
        if len(self) > self.MOST:
            del self[next(iter(self))]


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Until all arrays can be used: by the caller (numpy), by the current stream (cupy).

        Raises CommunicationError after the communicator's time limit (numpy).
        """


class Communicator(ABC):
    """The ranks of a program; MpiCommunicator, NcclCommunicator and SelfCommunicator are some.

    >>> comm = parallel.SelfCommunicator()
    >>> isinstance(comm, parallel.Communicator), comm.rank, comm.size
    (True, 0, 1)

    rank: of this process, in [0, size).
    timeout: in seconds, of waiting for another rank.
    """

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT):
        if not timeout > 0:
            raise ValueError(f"timeout must be positive; got {timeout}")
        self.rank, self.size, self.timeout = rank, size, float(timeout)
        self.exchanges = 0  # calls of `exchange` so far
        self.bytes_sent = 0  # in them
        self.tables = Tables()
        self._failure: str | None = None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send and to receive; all ranks do so with matching messages.

        Two ranks that both send in one call both receive in it.  Empty arrays are not sent.
        Arrays must not change, nor be read if they are received, before `Pending.wait`.
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
        """Every rank's `data`, of `sizes` bytes; waits for all ranks.  Raises
        CommunicationError."""

    @abstractmethod
    def check_array(self, name: str, x: Array) -> None:
        """Raise TypeError or NotImplementedError for arrays that this communicator cannot move."""

    @abstractmethod
    def split(self, color: int, key: int = 0) -> Communicator:
        """A communicator of the ranks with the same color, in the order of key, then of rank."""

    @property
    def agrees(self) -> bool:
        """Whether calls can be compared now: not while a CUDA graph is captured."""
        return self.size > 1

    def check(self) -> None:
        """Raise CommunicationError if an earlier call has failed."""
        if self._failure is not None:
            raise CommunicationError(f"the communicator is broken: {self._failure}")

    def fail(self, why: str) -> None:
        """Let all later calls raise: messages of a call that failed may still be under way."""
        self._failure = self._failure or why

    def missing(self, ranks: Iterable[int]) -> CommunicationError:
        """The error of ranks that did not answer; the communicator is broken from now on."""
        late = sorted(set(ranks))
        names = ", ".join(map(str, late))
        what = f"rank{'s' * (len(late) > 1)} {names} did not answer within {self.timeout:g} s"
        self.fail(what)
        return CommunicationError(f"{what} (waiting: rank {self.rank} of {self.size})", late)


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class SelfCommunicator(Communicator):
    """One rank: every function of `cupykern.parallel` computes what its op does.

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
        """Any array."""

    def split(self, color: int, key: int = 0) -> SelfCommunicator:
        return SelfCommunicator()


class Deadline:
    """Polls: without a pause at first, then with pauses, since cores may be shared by ranks."""

    def __init__(self, seconds: float):
        self._begin = time.monotonic()
        self._end = self._begin + seconds

    def passed(self) -> bool:
        """Whether time is up; else it pauses."""
        now = time.monotonic()
        if now - self._begin > 2e-4:
            time.sleep(min(1e-3, (now - self._begin) / 10))
        return now > self._end


def bytes_of(x: Array) -> Any:
    """The memory of a C-contiguous array as uint8: no communicator knows BF16 or FP8."""
    return x.reshape(-1).view(np.uint8)
