"""Planted faults in ClusterRows (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

import cupykern
from cupykern import check, inputs
from cupykern.op import Op
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem
from cupykern.rows.softmax_configs import ClusterRows

LOAD = "rows/load_cluster.cuh"
CLUSTER = "softmax_cluster.cu"
FUNCTOR = "rows/softmax_cluster.cuh"
FAULTS = {
    "no wait for the copies": Fault(LOAD, "copy_async_wait<0>();", ";", "one block"),
    "the elements before the first vector": Fault(
        LOAD, "if (cluster_thread < head) column = cluster_thread;", "", "places"
    ),
    "the elements behind the last vector": Fault(
        LOAD, "at >= tail && at < num_cols", "false", "one block"
    ),
    "an element behind the row": Fault(
        LOAD, "at >= tail && at < num_cols", "at >= tail && at <= num_cols", "places"
    ),
    "every block has the single elements": Fault(
        LOAD,
        "if (cluster_thread < head) column = cluster_thread;",
        "if (int(threadIdx.x) < head) column = int(threadIdx.x);",
        "places",
    ),
    "a vector that is not aligned": Fault(
        LOAD, "int(-begin % kVectorWidth)", "int(begin % kVectorWidth)", "places"
    ),
    "a vector behind the row": Fault(
        LOAD, "if (i < num_vectors) body", "if (i <= num_vectors) body", "one block"
    ),
    "a pair of vectors behind the row": Fault(
        LOAD, "i + step < num_vectors;", "i < num_vectors;", "one block"
    ),
    "a pair's first vector twice": Fault(
        LOAD, "body(at[num_threads], head", "body(at[0], head", "one block"
    ),
    "pairs overlap": Fault(LOAD, "at += 2 * num_threads;", "at += num_threads;", "one block"),
    "vectors before the row": Fault(LOAD, "if (first < 0) first += step;", "", "places"),
    "a turn more than there is room for": Fault(
        LOAD, "if (first < 0) first += step;", "if (first < 0) first = cluster_thread;", "full"
    ),
    "blocks do the same": Fault(
        LOAD, "first = cluster_thread -", "first = int(threadIdx.x) -", "cluster"
    ),
    "the first warps' statistics alone": Fault(
        LOAD, "i < count; i +=", "i < warps; i +=", "cluster"
    ),
    "too few bytes awaited": Fault(
        LOAD,
        "count * int(sizeof(Statistic))",
        "(count - 1) * int(sizeof(Statistic))",
        "cluster",
    ),
    "no wait for the others": Fault(LOAD, "full.wait(0);", "", "cluster"),
    "blocks that have not started": Fault(LOAD, "cluster_wait();", "", "cluster"),
    "no barrier between a block's warps": Fault(LOAD, "sync_block();", "", "one block"),
    "another warp's place": Fault(
        LOAD, "rank * warps + int(threadIdx.x) / kWarpSize;", "rank * warps;", "cluster"
    ),
    "the single elements not in the maximum": Fault(
        FUNCTOR, "maximum(single, -kLargestFloat)", "-kLargestFloat", "large ends"
    ),
    "the single elements not in the sum": Fault(
        FUNCTOR, "float sum = exp2_approx((single - max) * kLog2E);", "float sum = 0.0f;", "places"
    ),
    "a warp's own maximum": Fault(
        LOAD,
        "return merge.across_lanes(total, 1, kWarpSize);",
        "return {of_warp.max, merge.across_lanes(total, 1, kWarpSize).sum};",
        "shifted",
    ),
    "no logarithm of the sum": Fault(FUNCTOR, "1.0f, -log_sum)", "1.0f, 0.0f)", "one block"),
    "the stride of x for y": Fault(
        CLUSTER,
        "row * params.layout.outer_strides[0][rows::SoftmaxParams::kY]",
        "row * params.layout.outer_strides[0][rows::SoftmaxParams::kX]",
        "places",
    ),
}


def _problems() -> Iterator[tuple[str, Op, object]]:
    for op in (OP, LOG_OP):
        yield "one block", op, SoftmaxProblem((3, 6001), dtype="float16", kind="wide")
        yield "one block", op, SoftmaxProblem((3, 11_003), dtype="float32")


def _hold(op: Op, x: np.ndarray, y: np.ndarray, blocks: int, spare: int = 1) -> None:
    width = 16 // x.itemsize
    vectors = -(-x.shape[1] // (64 * blocks * width)) + spare
    config = ClusterRows(64, width, vectors, blocks)
    (cupykern.log_softmax if op is LOG_OP else cupykern.softmax)(x, out=y, config=config)
    references = op.reference(x)
    comparison = check.compare((y,), references, op.bound(x, reference=references))
    assert comparison.ok, f"{comparison}"


def _check_places() -> None:
    for offset in range(8):
        memory = inputs.values("normal", (4096,), np.dtype(np.float16), 1)
        x = memory[offset : offset + 3 * 333].reshape(3, 333)
        out = np.full(4096, 7, x.dtype)
        y = out[offset : offset + 3 * 341].reshape(3, 341)[:, :333]
        _hold(LOG_OP, x, y, 2)
        y[...] = 7
        assert (out == 7).all(), "something beside the rows"


def _check_cluster() -> None:
    """The first and the last elements are the largest ones."""
    x = inputs.values("normal", (2, 5003), np.dtype(np.float32), 1)
    x[:, :64] += 9
    x[:, -64:] += 12
    for op in (OP, LOG_OP):
        _hold(op, x, np.empty_like(x), 4)


def _check_large_ends() -> None:
    x = np.full((2, 1025), -3e38, np.float32)
    x[:, 1024] = 3e38
    _hold(OP, x, np.empty_like(x), 1)


def _check_shifted() -> None:
    """Every warp's largest number differs, below zero."""
    x = np.linspace(-900, -100, 4 * 1111, dtype=np.float32).reshape(4, 1111)
    for op in (OP, LOG_OP):
        _hold(op, x, np.empty_like(x), 2)


def _check_full() -> None:
    """The row takes all of the memory, and begins within a line."""
    memory = inputs.values("normal", (1024 + 32,), np.dtype(np.float32), 1)
    begin = next(i for i in range(32) if memory[i:].ctypes.data % 128 == 16)
    x = memory[begin : begin + 1024].reshape(1, 1024)
    _hold(OP, x, np.empty_like(x), 2, spare=0)


CHECKS = {
    "full": _check_full,
    "places": _check_places,
    "cluster": _check_cluster,
    "large ends": _check_large_ends,
    "shifted": _check_shifted,
}

test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
