"""Planted faults in FP32 products by 16-bit parts on the portable mainloop, each of which a check
must catch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from planted import Fault, fault_tests
from products import MATMUL, compare
from split_float32_checks import TILE, portable

from cupykern.inputs import values
from cupykern.precisions import AnyParts, Bf16x6, Fp16x3

MAINLOOP, PARTS = "gemm/mainloop_parts.cuh", "gemm/tile_parts.cuh"
FLAGGED = "gemm/flagged.cuh"
FAULTS = {
    "no barrier between stages": Fault(
        MAINLOOP,
        "sync_block();  // this stage has arrived",
        "// this stage has arrived",
        "parts",
    ),
    "a stage too early": Fault(
        MAINLOOP, "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "parts"
    ),
    "the stages' memory used too early": Fault(
        MAINLOOP, "sync_block();  // the stages' memory is free", "", "parts"
    ),
    "the first part twice": Fault(MAINLOOP, "source.data) + part_step;", "source.data);", "parts"),
    "small products of another scale": Fault(
        MAINLOOP, "x *= FloatParts::kUnit;", "x *= 2.0f * FloatParts::kUnit;", "parts"
    ),
    "the largest product among the small ones": Fault(
        MAINLOOP, "(i + j > 0 && i + j <=", "(i + j <=", "parts"
    ),
    "a small product too few": Fault(
        MAINLOOP, "i + j <= FloatParts::kOrder", "i + j < FloatParts::kOrder", "six products"
    ),
    "accumulators that are promoted are not added": Fault(
        MAINLOOP, "+= scale * products[m][n]", "= scale * products[m][n]", "parts"
    ),
    "scales of the first block of k": Fault(
        MAINLOOP, "a.scales[k / kSplitK] *", "a.scales[0] *", "scales"
    ),
    "scales of the first rows": Fault(
        PARTS, "+ work.row / gemm::kSplitMn * of_a.row", "", "scales"
    ),
    "scales of the first columns": Fault(
        PARTS, "+ work.col / gemm::kSplitMn * of_b.col", "", "scales"
    ),
    "one matrix's scales": Fault(PARTS, "scales_b + offset(kScaleB)", "scales_b", "batch"),
    "splits from the same k": Fault(
        PARTS, "work.split * tile.k_per_split", "0 * tile.k_per_split", "splits"
    ),
    "tiles are flagged by both operands": Fault(
        FLAGGED, "scales_a[k] < 0 || scales_b[k] < 0", "scales_a[k] < 0 && scales_b[k] < 0",
        "infinities",
    ),
}  # fmt: skip


def check(parts: AnyParts, a: np.ndarray, b: np.ndarray, splits: int = 1) -> None:
    config = portable(parts, replace(TILE, splits=splits))
    comparison = compare(MATMUL, a, b, precision=parts.name, config=config)
    assert comparison.ok, comparison


def of_sizes(m: int, n: int, k: int, *batch: int) -> list[np.ndarray]:
    shapes = (*batch, m, k), (*batch, k, n)
    kinds = ("normal", "uniform")
    return [values(x, s, np.dtype(np.float32), 1) for x, s in zip(kinds, shapes, strict=True)]


def check_scales() -> None:
    """Blocks of 128 rows or columns and 64 of k that are of different sizes."""
    a, b = of_sizes(140, 150, 200)
    for x, axis in ((a, 0), (b, 1)):
        step = np.arange(x.shape[axis]) // 128 * 9
        x *= np.float32(2.0) ** (step[:, None] if axis == 0 else step)
    a *= np.float32(2.0) ** -(np.arange(200) // 64 * 7)
    check(Fp16x3(), a, b)


def check_batch() -> None:
    a, b = of_sizes(20, 40, 100, 3)
    check(Fp16x3(), a, b * np.float32([1, 2**9, 2**-9])[:, None, None])


def check_infinities() -> None:
    a, b = of_sizes(20, 40, 200)
    a[3, 5] = np.inf
    check(Fp16x3(), a, b)


CHECKS = {
    "parts": lambda: check(Fp16x3(), *of_sizes(40, 70, 200)),
    "six products": lambda: check(Bf16x6(), *of_sizes(20, 40, 200)),
    "splits": lambda: check(Fp16x3(), *of_sizes(20, 40, 600), splits=3),
    "scales": check_scales,
    "batch": check_batch,
    "infinities": check_infinities,
}

test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS, every=5
)
