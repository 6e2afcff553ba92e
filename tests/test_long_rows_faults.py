"""Planted faults in softmax of long rows (tests/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

import cupykern
from cupykern import check, inputs
from cupykern.op import Op
from cupykern.rows.row_configs import RowConfig
from cupykern.rows.softmax import LOG_OP, OP, SoftmaxProblem

LONG = "softmax_long.cu"
FAULTS = {
    "no wait for the copies": Fault(LONG, "copy_async_wait<0>();", ";", "one block"),
    "the elements before the first vector": Fault(
        LONG, "if (first < head) column = first;", "", "places"
    ),
    "the elements behind the last vector": Fault(
        LONG, "at >= tail && at < num_cols", "false", "one block"
    ),
    "an element behind the row": Fault(
        LONG, "at >= tail && at < num_cols", "at >= tail && at <= num_cols", "places"
    ),
    "every block has the single elements": Fault(
        LONG, "if (first < head) column = first;", "if (thread < head) column = thread;", "places"
    ),
    "a vector that is not aligned": Fault(
        LONG, "behind == 0 ? 0 : kVectorWidth - behind", "behind", "places"
    ),
    "a vector behind the row": Fault(
        LONG, "i < num_vectors; i += step", "i <= num_vectors; i += step", "one block"
    ),
    "blocks do the same": Fault(
        LONG, "first = rank * num_threads + thread;", "first = thread;", "cluster"
    ),
    "the first warps' statistics alone": Fault(
        LONG, "i < count; i +=", "i < warps; i +=", "cluster"
    ),
    "too few bytes awaited": Fault(
        LONG, "count * int(sizeof(MaxSum))", "(count - 1) * int(sizeof(MaxSum))", "cluster"
    ),
    "no wait for the others": Fault(LONG, "full.wait(0);", "", "cluster"),
    "blocks that have not started": Fault(LONG, "cluster_wait();", "", "cluster"),
    "no barrier between a block's warps": Fault(LONG, "sync_block();", "", "one block"),
    "another warp's place": Fault(
        LONG, "rank * warps + int(threadIdx.x) / kWarpSize;", "rank * warps;", "cluster"
    ),
    "the single elements not in the maximum": Fault(
        LONG, "maximum(single, -kLargestFloat)", "-kLargestFloat", "large ends"
    ),
    "the single elements not in the sum": Fault(
        LONG, "float sum = exp2_approx((single - max) * kLog2E);", "float sum = 0.0f;", "places"
    ),
    "a warp's own maximum": Fault(
        LONG,
        "return merge.across_lanes(total, 1, kWarpSize);",
        "return {of_warp.max, merge.across_lanes(total, 1, kWarpSize).sum};",
        "shifted",
    ),
    "no logarithm of the sum": Fault(LONG, "distance - log_sum", "distance", "one block"),
    "the stride of x for y": Fault(
        LONG,
        "row * params.layout.outer_strides[0][kY]",
        "row * params.layout.outer_strides[0][kX]",
        "places",
    ),
}


def _problems() -> Iterator[tuple[str, Op, object]]:
    for op in (OP, LOG_OP):
        yield "one block", op, SoftmaxProblem((3, 6001), dtype="float16", kind="wide")
        yield "one block", op, SoftmaxProblem((3, 11_003), dtype="float32")


def _hold(op: Op, x: np.ndarray, y: np.ndarray, blocks: int) -> None:
    width = 16 // x.itemsize
    vectors = -(-x.shape[1] // (64 * blocks * width)) + 1
    config = RowConfig(64, 64, width, vectors, blocks, long_row=True)
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


CHECKS = {
    "places": _check_places,
    "cluster": _check_cluster,
    "large ends": _check_large_ends,
    "shifted": _check_shifted,
}

test_nothing_fails_without_a_fault, test_caught = fault_tests(FAULTS, _problems, CHECKS)
