"""NcclCommunicator on an NCCL that is not there (tests/support/fake_nccl.py)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from fake_nccl import UINT8, FakeEvent, fake_cupy
from parallel_checks import attention, linear, moe, norms, vocabulary
from parallel_checks.common import raises

from cupykern import parallel

FUNCTIONS = [
    *(linear.k_is_summed_over_ranks, linear.columns_are_those_of_matmul),
    *(linear.scaled_columns_are_those_of_scaled_mm, linear.split_communicators_are_apart),
    *(norms.sums_are_normalised_unrounded, attention.results_are_those_of_the_whole_sequence),
    *(vocabulary.draws_find_their_columns, moe.results_are_those_of_all_experts),
]


@pytest.fixture
def cupy(monkeypatch):
    with fake_cupy(monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("check", FUNCTIONS, ids=lambda check: check.__name__)
def test_results_over_nccl(cupy, check):
    cupy.on_ranks(2, lambda raw: check(parallel.NcclCommunicator(raw)))


def test_ids_are_bytes_or_tuples(cupy):
    cupy.nccl.kind_of_id = tuple
    check = linear.split_communicators_are_apart
    cupy.on_ranks(3, lambda raw: check(parallel.NcclCommunicator(raw)))


def test_other_shapes_raise_the_same_error(cupy):
    def run(raw):
        comm = parallel.NcclCommunicator(raw)
        x = np.ones((2 + comm.rank, 2), np.float16)
        return raises(ValueError, lambda: parallel.all_reduce(comm, x))

    first, second = cupy.on_ranks(2, run)
    assert first == second and "float16 (2, 2) (rank 0), float16 (3, 2) (rank 1)" in first


def test_bytes_move_on_a_stream_of_their_own(cupy):
    """After what the current stream has done so far; then it waits for them."""

    def run(raw):
        comm = parallel.NcclCommunicator(raw)
        x, y = np.full((3, 5), comm.rank, np.float16), np.empty((3, 5), np.float16)
        begin = len(cupy.notes)
        pending = comm.exchange([(1 - comm.rank, x)], [(1 - comm.rank, y)])
        before = cupy.notes[begin:]
        pending.wait()
        return raw, before, cupy.notes[begin + len(before) :], y

    for rank, (raw, before, after, y) in enumerate(cupy.on_ranks(2, run)):
        kinds = [(kind, stream) for kind, stream, _ in before]
        own = before[-1][1]
        assert own != 0
        assert kinds == [("record", 0), ("wait", own), ("record", own)]
        assert before[1][2] is before[0][2]
        assert [(kind, stream) for kind, stream, _ in after] == [("wait", 0)]
        assert after[0][2] is before[2][2]
        assert {(c.count, c.dtype, c.peer, c.stream) for c in raw.calls} == {
            (30, UINT8, 1 - rank, own)
        }
        assert (y == 1 - rank).all()


def test_products_are_computed_while_others_are_sent(cupy, monkeypatch):
    """The current stream waits for messages only after its last product."""
    products = []

    def product(rows):
        products.append(len(cupy.notes))
        return np.ones((rows.stop - rows.start, 4), np.float32)

    def run(raw):
        comm = parallel.NcclCommunicator(raw)
        from cupykern.parallel.collectives import reduce_rows

        if comm.rank:
            return reduce_rows(comm, parallel.shares(6, 2), lambda rows: np.ones((3, 4), "f4"))
        reduce_rows(comm, parallel.shares(6, 2), product)
        waits = [
            i for i, (kind, stream, _) in enumerate(cupy.notes) if (kind, stream) == ("wait", 0)
        ]
        assert len(waits) == 1 and waits[0] >= products[-1]
        return None

    cupy.on_ranks(2, run)
    assert len(products) == 2


def test_a_host_communicator_compares_arguments(cupy):
    """Then the GPU is not waited for."""
    control = SimpleNamespace(rank=0, size=2, gather_bytes=lambda data, sizes: [data, data])
    raw = cupy.nccl.NcclCommunicator(2, cupy.nccl.get_unique_id(), 0)
    comm = parallel.NcclCommunicator(raw, control=control)
    assert comm.gather_bytes(b"abc", [3, 3]) == [b"abc", b"abc"]
    assert not raw.calls
    control.rank = 1
    with pytest.raises(ValueError, match="control must have comm's rank and size, 0 of 2; got 1"):
        parallel.NcclCommunicator(raw, control=control)


def test_nothing_is_compared_while_a_graph_is_captured(cupy):
    """Sizes of other ranks are those of the same call before."""

    def run(raw):
        comm = parallel.NcclCommunicator(raw)
        assert comm.agrees
        x = np.full((1 + comm.rank, 4), comm.rank, np.float32)
        assert parallel.all_gather(comm, x).shape == (3, 4)
        raw.calls.clear()
        cupy.current().capturing = True
        assert parallel.all_gather(comm, x)[:, 0].tolist() == [0, 1, 1]
        assert [call.count for call in raw.calls] == [16 * (1 + comm.rank), 16 * (2 - comm.rank)]
        other = raises(NotImplementedError, lambda: parallel.all_gather(comm, x[:, :2]))
        assert "all_gather: a CUDA graph is captured" in other
        return raises(NotImplementedError, lambda: moe_of_nothing(comm))

    assert all("no graph" in message for message in cupy.on_ranks(2, run))


def test_the_oldest_calls_are_forgotten(cupy):
    tables = parallel.SelfCommunicator().tables
    tables.MOST = 2
    for call in (b"a", b"b", b"a", b"c"):
        tables[call] = np.zeros(1)
    assert list(tables) == [b"a", b"c"]


def moe_of_nothing(comm):
    x, w = np.ones((1, 8), np.float16), np.ones((1, 8, 8), np.float16)
    experts, gates = np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32)
    return parallel.expert_parallel_moe(comm, x, experts, gates, w, w, w)


def test_a_rank_that_does_not_answer_aborts_nccl(cupy, monkeypatch):
    raw = cupy.nccl.NcclCommunicator(3, cupy.nccl.get_unique_id(), 1)
    comm = parallel.NcclCommunicator(raw, timeout=0.05)
    monkeypatch.setattr(FakeEvent, "never", True)
    with pytest.raises(parallel.CommunicationError, match="ranks 0, 2 did not answer") as raised:
        comm.synchronize()
    assert raised.value.ranks == (0, 2) and raw.aborted
    with pytest.raises(parallel.CommunicationError, match="the communicator is broken"):
        parallel.all_reduce(comm, np.ones((2, 2), np.float32))


def test_a_host_communicator_that_fails_aborts_nccl(cupy):
    """And one that fails halfway tells it."""
    told = []

    def gather_bytes(data, sizes):
        raise parallel.CommunicationError("rank 1 did not answer", [1])

    control = SimpleNamespace(rank=0, size=2, gather_bytes=gather_bytes, fail=told.append)
    raw = cupy.nccl.NcclCommunicator(2, cupy.nccl.get_unique_id(), 0)
    comm = parallel.NcclCommunicator(raw, control=control)
    x = np.ones((2, 2), np.float32)
    with pytest.raises(parallel.CommunicationError, match="all_reduce: rank 1 did not answer"):
        parallel.all_reduce(comm, x)
    assert raw.aborted and told == ["rank 1 did not answer"]
    with pytest.raises(parallel.CommunicationError, match="the communicator is broken"):
        parallel.all_reduce(comm, x)


def test_errors_of_nccl_break_the_communicator(cupy):
    """A rank that died, which NCCL may find before the time limit."""
    raw = cupy.nccl.NcclCommunicator(2, cupy.nccl.get_unique_id(), 0)
    comm = parallel.NcclCommunicator(raw)

    def remote_error():
        raise cupy.nccl.NcclError("remote process exited")

    raw.check_async_error = remote_error
    with pytest.raises(parallel.CommunicationError, match="rank 0: remote process exited"):
        comm.synchronize()
    assert raw.aborted
    with pytest.raises(parallel.CommunicationError, match="the communicator is broken"):
        comm.synchronize()


def test_a_call_that_is_interrupted_breaks_the_communicator(cupy):
    """Messages may be under way still."""

    def interrupt(data, sizes):
        raise KeyboardInterrupt

    comm = parallel.NcclCommunicator(cupy.nccl.NcclCommunicator(2, cupy.nccl.get_unique_id(), 0))
    comm.gather_bytes = interrupt
    x = np.ones((2, 2), np.float32)
    with pytest.raises(KeyboardInterrupt):
        parallel.all_reduce(comm, x)
    with pytest.raises(parallel.CommunicationError, match=r"all_reduce failed on rank 0: Keyboard"):
        parallel.all_reduce(comm, x)


def test_what_is_no_communicator_is_refused(cupy):
    with pytest.raises(TypeError, match="NCCLBackend; got str"):
        parallel.NcclCommunicator("nccl")
    raw = cupy.nccl.NcclCommunicator(2, cupy.nccl.get_unique_id(), 1)
    assert parallel.NcclCommunicator(SimpleNamespace(_comm=raw)).rank == 1
    with pytest.raises(TypeError, match="control must be a Communicator"):
        parallel.NcclCommunicator(raw, control="mpi")
    with pytest.raises(ValueError, match="timeout must be positive; got 0"):
        parallel.NcclCommunicator(raw, timeout=0)
