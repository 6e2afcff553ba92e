"""Planted faults in PersistentRows (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from persistent_rows_problems import CONFIGS, OPS, problem_of
from planted import Fault, fault_tests

from cupykern import check
from cupykern.op import as_tuple

PERSISTENT = "rows/persistent.cuh"
NORM, PIPELINE = "rows/norm_persistent.cuh", "pipeline/tma_pipeline.cuh"
FAULTS = {
    "readers that do not wait for a piece": Fault(
        NORM, "pipeline.wait(at);\n#pragma", "#pragma", "rms_norm float16"
    ),
    "the second phase of a stage awaited like its first": Fault(
        PIPELINE, "phase ^= 1;", "", "rms_norm float16"
    ),
    "a stage filled while it is read": Fault(
        PERSISTENT, "barriers.tiles->producer_acquire(at);", "", "rms_norm float16"
    ),
    "a row skipped": Fault(
        PERSISTENT, "kPrefetchedRows * groups() + taken", "kPrefetchedRows * groups() + taken + 1",
        "rms_norm float16"
    ),
    "the first row again": Fault(
        PERSISTENT, "/ kClusterSize + iteration * groups()", "/ kClusterSize", "rms_norm float16"
    ),
    "a stage free when one warp is done with it": Fault(
        PERSISTENT, "kWarpSize, kConsumers / kWarpSize>;", "kWarpSize, 1>;", "layer_norm bfloat16"
    ),
    "too few bytes awaited": Fault(
        PERSISTENT, "arrive_expect_tx(kArrays * bytes);", "arrive_expect_tx(bytes);",
        "add_rms_norm float16"
    ),
    "the last vector forgotten": Fault(
        PERSISTENT, "rest < kMost ? rest : kMost;", "rest < kMost ? rest - 1 : kMost;",
        "rms_norm float32"
    ),
    "every block the first slice": Fault(
        PERSISTENT, "Slice slice{rank * kMost, 0};", "Slice slice{0, 0};", "rms_norm float32"
    ),
    "every piece the first one": Fault(
        PERSISTENT, "from[j] + slice.position(i, 0)", "from[j] + slice.position(0, 0)",
        "rms_norm float16"
    ),
    "no wait for the other warps": Fault(
        PERSISTENT, "barriers.in_block[slot].wait(phase_of(iteration));", "", "rms_norm float32"
    ),
    "no wait for the other blocks": Fault(
        PERSISTENT, "barriers.exchanged[slot_of(iteration)].wait(phase_of(iteration));", "",
        "rms_norm float32"
    ),
    "one block's part for all": Fault(
        NORM, "return partials[i]; }, counts.of_blocks", "return partials[0]; }, counts.of_blocks",
        "rms_norm float32",
    ),
    "blocks that have not started": Fault(
        PERSISTENT, "            cluster_wait();\n", "", "rms_norm float32"
    ),
    "the first weights for all": Fault(
        NORM, "columns + slice.position(i, vector)", "columns + slice.position(0, vector)",
        "rms_norm float16",
    ),
    "squares of what is not there": Fault(
        NORM, "if (!pipeline.slice.holds(i, vector)) continue;", "", "layer_norm float32"
    ),
    "a warp's mean over the row's count": Fault(
        NORM, "reduce_in_warp(mine.sum(), Sum()) * count.reciprocal",
        "reduce_in_warp(mine.sum(), Sum()) / float(2 * kVectorsPerThread * kVectorWidth * "
        "kWarpSize)",
        "layer_norm float32",
    ),
    "all parts of as many elements": Fault(
        NORM, "Count::of(float(other.count * kVectorWidth))", "Count::of(8.0f)",
        "layer_norm float32"
    ),
    "no squares between the means": Fault(
        NORM, "partial(i).squares + counts[i].count * (from_mean * from_mean)",
        "partial(i).squares",
        "layer_norm float32",
    ),
    "the row before's shift": Fault(
        NORM, "scalars.shift = -mean_of(found) * scalars.rstd;", "scalars.shift = -scalars.rstd;",
        "layer_norm float16"
    ),
    "the bias left out": Fault(
        NORM, "values[j] += biases[i][j];", "values[j] += 0.0f * biases[i][j];",
        "layer_norm float32"
    ),
    "the residual left out of the sum": Fault(
        NORM, "values[j] += b[j];", "values[j] += 0.0f * b[j];", "add_rms_norm float16"
    ),
}  # fmt: skip


def _check(name: str, dtype: str) -> None:
    """More rows than blocks have stages, the last vectors and slices not full."""
    op, config = OPS[name], CONFIGS[dtype]
    for vectors in (config.chunk // config.vector_width - 3, 40):
        problem = problem_of(op, (40, vectors * config.vector_width), dtype)
        call = op.inputs(problem, 1, np)
        references = op.reference(*call.args, **call.kwargs)
        bounds = op.bound(*call.args, **call.kwargs, reference=references)
        outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
        comparison = check.compare(outputs, references, bounds)
        assert comparison.ok, comparison


NAMES = sorted({fault.caught for fault in FAULTS.values()} | {"layer_norm bfloat16"})
CHECKS: dict[str, Callable[[], None]] = {name: partial(_check, *name.split()) for name in NAMES}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS
)
