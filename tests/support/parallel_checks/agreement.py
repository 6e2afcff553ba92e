"""Ranks that disagree, that fail, that do not come.  Each function is a check, on every rank."""

from __future__ import annotations

import time
from itertools import zip_longest

import numpy as np

from cupykern import parallel

from .common import numbers, raises


def other_shapes_raise_the_same_error(comm):
    a, b = numbers(1, 4 + (comm.rank == 1), 8), numbers(2, 8, 3)
    message = raises(ValueError, lambda: parallel.row_parallel_matmul(comm, a, b))
    others = ", ".join(str(r) for r in range(comm.size) if r != 1)
    s = "s" if comm.size > 2 else ""
    assert message == (
        "row_parallel_matmul: a must be the same on all ranks; got "
        f"float16 (4, *) (rank{s} {others}), float16 (5, *) (rank 1)"
    ), message
    same_on_all_ranks(comm, message)


def same_on_all_ranks(comm, message):
    """And the communicator is as good as before."""
    text = message.encode()
    sizes = comm.gather_bytes(len(text).to_bytes(8, "big"), [8] * comm.size)
    said = comm.gather_bytes(text, [int.from_bytes(size, "big") for size in sizes])
    for lines in zip_longest(*(one.decode().splitlines() for one in said)):
        assert len(set(lines)) == 1, lines


def other_dtypes_options_and_functions_raise_the_same_error(comm):
    a, b, last = numbers(1, 4, 8), numbers(2, 8, 3), comm.rank == comm.size - 1
    half = a.astype(np.float32) if last else a
    for call, part in (
        (lambda: parallel.all_reduce(comm, half), "all_reduce: x must be"),
        (
            lambda: parallel.row_parallel_matmul(comm, a, b, alpha=2.0 if last else 1.0),
            "row_parallel_matmul: options must be",
        ),
        (
            lambda: parallel.row_parallel_matmul(comm, a, b, bias=b[0] if last else None),
            "row_parallel_matmul: bias must be the same on all ranks; got None (rank",
        ),
        (
            lambda: (parallel.all_reduce if last else parallel.all_gather)(comm, a),
            "all ranks must call the same function; got all_gather (rank",
        ),
    ):
        message = raises(ValueError, call)
        assert message.startswith(part), message
        same_on_all_ranks(comm, message)


def a_wrong_argument_of_one_rank_raises_on_all(comm):
    good = numbers(1, 4, 8), numbers(2, 8, 3)
    for wrong, kind, part in (
        ((good[0], good[1][:5]), ValueError, "rank 1: a's columns must be b's rows"),
        ((good[0].tolist(), good[1]), TypeError, "rank 1: a must be a cupy or numpy array"),
    ):
        given = wrong if comm.rank == 1 else good
        message = raises(kind, lambda given=given: parallel.row_parallel_matmul(comm, *given))
        assert message.startswith(f"row_parallel_matmul: {part}"), message
        same_on_all_ranks(comm, message)


def an_argument_that_is_wrong_everywhere_leaves_the_communicator_good(comm):
    a, b = numbers(1, 4, 8), numbers(2, 8, 3)
    call = parallel.row_parallel_matmul
    raises(ValueError, lambda: call(comm, a, b, activation="swish"))
    raises(TypeError, lambda: call(comm, a, b, out_dtype="int8"))
    raises(ValueError, lambda: call(comm, a, b, output="columns"))
    assert call(comm, a, b).shape == (4, 3)


def a_rank_that_does_not_come_ends_the_others(comm):
    """Within the time limit; later calls raise at once."""
    if comm.rank == comm.size - 1:
        time.sleep(1.5)
        return
    comm.timeout, begin = 0.5, time.monotonic()
    message = raises(
        parallel.CommunicationError, lambda: parallel.all_reduce(comm, numbers(1, 2, 2))
    )
    assert f"rank {comm.size - 1} did not answer within 0.5 s" in message, message
    assert message.startswith("all_reduce: "), message
    assert time.monotonic() - begin < 1.4
    message = raises(
        parallel.CommunicationError, lambda: parallel.all_reduce(comm, numbers(1, 2, 2))
    )
    assert "the communicator is broken" in message, message


def a_rank_that_fails_halfway_ends_the_others(comm):
    """At once, and its later calls send nothing that others might take for data."""
    begin = time.monotonic()
    if comm.rank == comm.size - 1:

        def fail(sends, receives):
            raise MemoryError("no memory")

        comm._exchange = fail
        raises(MemoryError, lambda: parallel.all_reduce(comm, numbers(1, 9, 2)))
        del comm._exchange
    else:
        message = raises(
            parallel.CommunicationError, lambda: parallel.all_reduce(comm, numbers(1, 9, 2))
        )
        assert "MemoryError('no memory')" in message, message
        assert time.monotonic() - begin < 2
    message = raises(
        parallel.CommunicationError, lambda: parallel.all_reduce(comm, numbers(1, 9, 2))
    )
    assert "the communicator is broken" in message, message


def arguments_that_are_wrong_together_raise_on_all(comm):
    """On one rank, whose part of K or whose scales may differ from the others'."""
    last, limit = comm.rank == comm.size - 1, (2**31 - 1) // 128**2
    k, scale = (limit + 1, 1e30) if last else (8, 1.0)
    a, b = np.ones((1, k), np.int8), np.ones((k, 1), np.int8)
    few = a[:, :8], b[:8]
    for call, part in (
        (lambda: parallel.row_parallel_matmul(comm, a, b), f"are exact up to K = {limit}; got"),
        (lambda: parallel.row_parallel_scaled_mm(comm, *few, scale, scale), "scale_a * scale_b"),
    ):
        message = raises(ValueError, call)
        assert f"rank {comm.size - 1}: " in message and part in message, message
        same_on_all_ranks(comm, message)


def wrong_communicators_are_refused(comm):
    message = raises(TypeError, lambda: parallel.MpiCommunicator("world"))
    assert "comm must be an mpi4py.MPI.Intracomm; got builtins.str" in message, message
    for other in (comm._comm, None):  # mpi4py's own
        message = raises(TypeError, lambda other=other: parallel.all_reduce(other, numbers(1, 2)))
        assert message.startswith("all_reduce: comm must be an MpiCommunicator, "), message
    for wrong, kind in (("a", TypeError), (None, TypeError), (True, TypeError), (0, ValueError)):
        raises(kind, lambda wrong=wrong: parallel.MpiCommunicator(comm._comm, timeout=wrong))


def parts_are_of_integers(comm):
    for function in (parallel.shares, parallel.zigzag):
        for wrong, kind in (
            (1.5, TypeError),
            ("3", TypeError),
            (True, TypeError),
            (-1, ValueError),
        ):
            raises(kind, lambda function=function, wrong=wrong: function(wrong, 2))
        raises(ValueError, lambda function=function: function(3, 0))
        assert function(np.int64(4), 2) == function(4, 2)
