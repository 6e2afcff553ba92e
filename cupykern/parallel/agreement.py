"""Agreement: before data transfers all ranks compare their arguments and raise the same error.

Each rank sends a digest of its call and a few integers of its own.  The arguments themselves are
exchanged, as text, only if digests differ or a rank has an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from .communicator import CommunicationError, Communicator

_DIGEST = 32  # bytes
_INTEGERS = 6
_OF_ARGUMENTS = (TypeError, ValueError, NotImplementedError)
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (*_OF_ARGUMENTS, RuntimeError)
}


class Facts(NamedTuple):
    """same: argument name -> text that must be equal on all ranks.
    own: up to 6 integers that may differ between ranks, e.g. the rows of a shard."""

    same: Mapping[str, str]
    own: Sequence[int] = ()


class _Answer(NamedTuple):
    """The function's name, its Facts.same, and (type, message) of an error or None."""

    function: str
    same: dict[str, str]
    error: list[str] | None


@contextmanager
def agreed(comm: Communicator, function: str, facts: Callable[[], Facts]) -> Iterator[np.ndarray]:
    """Context in which all ranks are in the same call; yields all ranks' own integers, (size, n).

    facts: checks this rank's arguments.  If it raises TypeError, ValueError or NotImplementedError
    on any rank, all ranks raise that error (RuntimeError for other types).  If the block fails
    after its first exchange, or with another type of error, later calls raise CommunicationError.

    Raises TypeError, ValueError, NotImplementedError and CommunicationError.
    """
    own = agree(comm, function, facts)
    begin = comm.exchanges
    try:
        yield own
    except BaseException as error:
        # Argument errors before the first exchange are raised by all ranks: nothing is pending.
        if comm.exchanges > begin or not isinstance(error, _OF_ARGUMENTS):
            comm.fail(f"{function} failed on rank {comm.rank}: {error!r}")
        raise


def agree(comm: Communicator, function: str, facts: Callable[[], Facts]) -> np.ndarray:
    """`agreed` without the block: compare arguments and return all ranks' own integers."""
    check_communicator(comm, function)
    comm.check()
    cause: Exception | None = None
    found = Facts({})
    try:
        found = facts()
    except Exception as error:
        cause = error
    if not comm.agrees and cause is not None:
        raise cause
    if comm.size == 1:
        return np.array([found.own], np.int64)
    said = None if cause is None else [_kind(cause), str(cause)]
    text = json.dumps(_Answer(function, dict(found.same), said)).encode()
    numbers = np.zeros(_INTEGERS + 1, np.int64)
    numbers[0], numbers[1 : 1 + len(found.own)] = len(text), found.own
    packet = hashlib.blake2b(text, digest_size=_DIGEST).digest() + numbers.tobytes()
    if not comm.agrees:
        return _as_before(comm, function, packet)
    try:
        packets = comm.gather_bytes(packet, [len(packet)] * comm.size)
        table = np.array([np.frombuffer(x[_DIGEST:], np.int64) for x in packets])
        if cause is None and len({x[:_DIGEST] for x in packets}) == 1:
            own = table[:, 1 : 1 + len(found.own)]
            comm.tables[packet] = own
            return own
        texts = comm.gather_bytes(text, table[:, 0].tolist())
    except CommunicationError as error:
        raise CommunicationError(f"{function}: {error}", error.ranks) from cause
    except BaseException as error:  # e.g. KeyboardInterrupt
        comm.fail(f"{function} failed on rank {comm.rank}: {error!r}")
        raise
    raise _disagreement([_Answer(*json.loads(x)) for x in texts]) from cause


def check_communicator(comm: Any, function: str) -> None:
    """Raise TypeError for what is no Communicator, e.g. mpi4py's own."""
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"{function}: comm must be an MpiCommunicator, NcclCommunicator or SelfCommunicator; "
            f"got {type(comm).__module__}.{type(comm).__qualname__}"
        )


def _as_before(comm: Communicator, function: str, packet: bytes) -> np.ndarray:
    """All ranks' integers from the last equal call outside of graph capture."""
    if packet not in comm.tables:
        raise NotImplementedError(
            f"{function}: a CUDA graph is captured, in which ranks cannot compare their arguments: "
            "make the same call once before"
        )
    return comm.tables[packet]


def _kind(error: Exception) -> str:
    return next((name for name, kind in _ERRORS.items() if isinstance(error, kind)), "RuntimeError")


def _disagreement(answers: list[_Answer]) -> Exception:
    """The error that every rank raises; it depends only on the answers."""
    for rank, answer in enumerate(answers):
        if answer.error is not None:
            kind, message = answer.error
            return _ERRORS[kind](f"{answer.function}: rank {rank}: {message}")
    functions = [answer.function for answer in answers]
    if len(set(functions)) > 1:
        return ValueError(f"all ranks must call the same function; got {by_rank(functions)}")
    for name in {name: None for answer in answers for name in answer.same}:
        given = [answer.same.get(name, "nothing") for answer in answers]
        if len(set(given)) > 1:
            return ValueError(
                f"{functions[0]}: {name} must be the same on all ranks; got {by_rank(given)}"
            )
    return CommunicationError(f"{functions[0]}: digests differ, arguments do not")


def by_rank(given: Sequence[object]) -> str:
    """The ranks' values as text: "5 (ranks 0, 2), 6 (rank 1)"."""
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(given):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} (rank{'s' * (len(of) > 1)} {', '.join(map(str, of))})"
        for value, of in ranks.items()
    )


def described(x: Any, *free: int) -> str:
    """An array's dtype and shape; dims in `free`, if it has them, may differ between ranks.
    None: "None"."""
    if x is None:
        return "None"
    shape = [str(n) for n in x.shape]
    for axis in free:
        if -x.ndim <= axis < x.ndim:
            shape[axis] = "*"
    return f"{x.dtype} ({', '.join(shape)})"
