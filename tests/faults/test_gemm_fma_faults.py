"""Planted faults in tiles of FP32 operands and their mainloop, each of which a check must catch."""

from __future__ import annotations

from gemm_fma_checks import (
    SMALL,
    check_batch,
    check_epilogue,
    check_far_rows,
    check_layouts,
    check_splits,
)
from planted import Fault, fault_tests

FILE, MAINLOOP = "gemm/tile_fma.cuh", "gemm/mainloop_fma.cuh"
FAULTS = {
    "a stage is read before all threads have it": Fault(
        MAINLOOP, "sync_block();  // the next stage has arrived", "// the next stage", "layouts"
    ),
    "the first stage too early": Fault(
        MAINLOOP,
        "copy_async_wait<kStages - 2>(); sync_block(); Fragments",
        "copy_async_wait<kStages - 1>(); sync_block(); Fragments",
        "layouts",
    ),
    "a stage too early": Fault(
        MAINLOOP,
        "copy_async_wait<kStages - 2>(); sync_block();  //",
        "copy_async_wait<kStages - 1>(); sync_block();  //",
        "layouts",
    ),
    "a stage is copied over while it is read": Fault(
        MAINLOOP, "next = stage;", "next = (stage + 1) % kStages;", "layouts"
    ),
    "k that ends within a stage is copied whole": Fault(
        MAINLOOP, "k + j * kThreadsK < num_k", "num_k > 0", "layouts"
    ),
    "rows past the end of the operand": Fault(
        MAINLOOP, "(row < last ? row : last) * mn_stride", "row * mn_stride", "far rows"
    ),
    "a stage begins where the one before did": Fault(
        MAINLOOP, "from[i] += kCopy == kAlongK ? kThreadsK : step;", "", "layouts"
    ),
    "threads without copies copy": Fault(
        MAINLOOP, "kThreads < kNumThreads && int(threadIdx.x) >= kThreads", "false", "few copies"
    ),
    "the fragments of the k before": Fault(
        MAINLOOP, "fragments[k % 2].multiply", "fragments[(k + 1) % 2].multiply", "layouts"
    ),
    "a thread's rows in another's place": Fault(
        MAINLOOP, "(lane >> 1 & 1) | (lane >> 3 & 2)", "(lane >> 1 & 1) | (lane >> 2 & 2)",
        "layouts",
    ),
    "the second round's accumulators are the first's": Fault(
        FILE, "const int run = first + i; Bytes<16> four;", "const int run = i; Bytes<16> four;",
        "epilogue",
    ),
    "a run's columns in another's place": Fault(
        FILE, "work.col + thread.col(run % kRunsN * kRun), values);",
        "work.col + thread.col(run % kRunsN), values);", "epilogue",
    ),
    "alpha left out": Fault(FILE, "* params.epilogue.alpha;", ";", "batch"),
    "one matrix of the batch": Fault(FILE, "a + offset(kA)", "a", "batch"),
    "all splits begin at the first k": Fault(
        FILE, "first_k = work.split * params.k_per_split", "first_k = 0", "splits"
    ),
    "the last split goes past the end": Fault(
        FILE, "num_k < params.k_per_split ? num_k : params.k_per_split", "params.k_per_split",
        "splits",
    ),
    "all splits in one place": Fault(
        FILE, "offset(kOut) + work.split * params.split_stride", "offset(kOut)", "splits"
    ),
    "columns that are no whole run": Fault(
        "reduce_split_k.cu", "(params.epilogue.n + kRun - 1) / kRun", "params.epilogue.n / kRun",
        "splits",
    ),
}  # fmt: skip

test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    checks={
        "layouts": check_layouts,
        "few copies": lambda: check_layouts(SMALL),
        "far rows": check_far_rows,
        "epilogue": check_epilogue,
        "batch": check_batch,
        "splits": check_splits,
    },
)
