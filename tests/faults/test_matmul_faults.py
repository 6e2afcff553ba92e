"""Planted faults in the products' kernel, each of which a check must catch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from planted import Fault, fault_tests
from products import check_fp8_sums_of_128

from cupykern import OPS, check, dtypes, inputs
from cupykern.gemm.gemm import GemmConfig
from cupykern.ops.problems.products import MatmulProblem, operand_values
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import host

MATMUL, SCALED = (next(op for op in OPS if op.name == name) for name in ("matmul", "scaled_mm"))

FAULTS = {
    "no barrier between stages": Fault(
        "gemm/mainloop_portable.cuh",
        "        sync_block();  // this stage has arrived",
        "        // this stage has arrived",
        "tails",
    ),
    "a stage too early": Fault(
        "gemm/mainloop_portable.cuh",
        "copy_async_wait<kStages - 2>();",
        "copy_async_wait<kStages - 1>();",
        "tails",
    ),
    "a stage is loaded over while it is read": Fault(
        "gemm/mainloop_portable.cuh",
        "for (int i = 0; i < kStages - 1; ++i) load_next();",
        "for (int i = 0; i < kStages; ++i) load_next();",
        "scales",
    ),
    "the stages' memory used too early": Fault(
        "gemm/mainloop_portable.cuh",
        "    sync_block();  // the stages' memory is free\n",
        "",
        "padded rows",
    ),
    "fragments used before they are there": Fault(
        "gemm/tile.cuh",
        "        sync_warp();\n        const int row = warp.lane / kRuns",
        "        const int row = warp.lane / kRuns",
        "tails",
    ),
    "slices added before they are there": Fault(
        "gemm/tile.cuh",
        "        sync_block();\n#pragma unroll\n        for (int f = 0; f < kFragments; ++f) "
        "{\n            if (position_of(f)",
        "#pragma unroll\n        for (int f = 0; f < kFragments; ++f) {\n            if "
        "(position_of(f)",
        "tails",
    ),
    "the first slice twice": Fault(
        "gemm/tile.cuh",
        "for (int k = 1; k < kGridK; ++k) sum",
        "for (int k = 0; k < kGridK; ++k) sum",
        "tails",
    ),
    "a row too many": Fault(
        "common/shared_tile.cuh",
        "row < num_rows ? elements",
        "row <= num_rows ? elements",
        "tails",
    ),
    "a vector's tail is not zero": Fault(
        "common/shared_tile.cuh",
        "clamp_to(num_elements - chunk * kPerChunk, kPerChunk);",
        "num_elements > chunk * kPerChunk ? kPerChunk : 0;",
        "padded rows",
    ),
    "chunks in each other's place": Fault(
        "common/shared_tile.cuh",
        "return row * kChunks + (chunk ^ swizzle(row));",
        "return row * kChunks + (chunk | swizzle(row));",
        "tails",
    ),
    "strides of rows and elements swapped": Fault(
        "common/shared_tile.cuh",
        "origin + row * row_stride + chunk * kPerChunk * element_stride;",
        "origin + row * element_stride + chunk * kPerChunk * row_stride;",
        "tails",
    ),
    "columns past the end": Fault(
        "gemm/epilogue/linear_combination.cuh",
        "const int count = params.n - col < kRun ? int(params.n - col) : kRun;",
        "const int count = kRun;",
        "tails",
    ),
    "rows past the end": Fault(
        "gemm/epilogue/linear_combination.cuh",
        "if (row >= params.m || col >= params.n) return;",
        "if (col >= params.n) return;",
        "tails",
    ),
    "a row's offset in 32 bits": Fault(
        "gemm/tile.cuh",
        "offset(kA) + work.row * params.a.strides.row, params.a.dtype)",
        "int(offset(kA) + work.row * params.a.strides.row), params.a.dtype)",
        "large offsets",
    ),
    "the batch's dims in the wrong order": Fault(
        "gemm/work_tile.cuh",
        "sum += int64_t(rest - next * size) * strides[operand][d];",
        "sum += int64_t(next) * strides[operand][d];",
        "batches",
    ),
    "the last group of tiles too high": Fault(
        "gemm/work_tile.cuh",
        "(whole ? order.rows : order.last_rows)",
        "order.rows",
        "many tiles",
    ),
    "the last split is lost": Fault(
        "gemm/tile.cuh",
        "split < params.splits; ++split",
        "split < params.splits - 1; ++split",
        "long k",
    ),
    "a split reads into the next": Fault(
        "gemm/tile.cuh",
        "last_k < params.k ? last_k : params.k, warp",
        "params.k, warp",
        "long k",
    ),
    "the activation after the residual": Fault(
        "gemm/epilogue/linear_combination.cuh",
        "if (first && params.activation != kNoActivation) {",
        "if (!first && params.activation != kNoActivation) {",
        "epilogues",
    ),
    "relu makes zero of NaN": Fault(
        "gemm/epilogue/linear_combination.cuh",
        "X(kRelu, x < 0.0f ? 0.0f : x)",
        "X(kRelu, x > 0.0f ? x : 0.0f)",
        "not a number",
    ),
    "the scale of a row on its column": Fault(
        "gemm/epilogue/linear_combination.cuh",
        "scale_a ? scale_a[row * params.scale_a_stride]",
        "scale_a ? scale_a[col * params.scale_a_stride]",
        "scales",
    ),
    "alpha left out": Fault(
        "gemm/epilogue/linear_combination.cuh", "* factor * params.alpha;", "* factor;", "epilogues"
    ),
    "a block's scale is the first one's": Fault(
        "gemm/mainloop_portable.cuh",
        "x *= a[row * a_strides.row + block * a_strides.col];",
        "x *= a[row * a_strides.row];",
        "scales",
    ),
    "columns' blocks counted from the tile": Fault(
        "gemm/mainloop_portable.cuh",
        "(first_col + col) / kScaleBlock * strides.col",
        "col / kScaleBlock * strides.col",
        "scales",
    ),
    "promoted accumulators are added again": Fault(
        "gemm/mainloop_portable.cuh",
        "                products[m][n] = {};\n",
        "",
        "scales",
    ),
    "the last block is not promoted": Fault(
        "gemm/mainloop_portable.cuh",
        "(end % kPromoteK == 0 || end >= end_k)",
        "end % kPromoteK == 0",
        "scales",
    ),
    "FP8 is promoted every 512 of k": Fault(
        "gemm/mainloop_portable.cuh",
        "end % kPromoteK == 0 ||",
        "end % (scales.a || scales.b[0] ? kPromoteK : 4 * kPromoteK) == 0 ||",
        "fp8 integers",
    ),
}


def _problems() -> Iterator[tuple[str, object, object]]:
    def product(m, n, k, dtype="float16", dtype_b=None, **options):
        return MatmulProblem(m, n, k, dtype, dtype_b, **{"kind": "same_sign", **options})

    yield "tails", MATMUL, product(17, 24, 40)
    yield "tails", MATMUL, product(70, 13, 37)
    yield "tails", MATMUL, product(24, 136, 100, "bfloat16", "float8_e4m3fn", layout_b="F")
    yield "tails", MATMUL, product(80, 144, 104, layout_a="F", layout_b="C")
    yield "strides", MATMUL, product(20, 30, 50, layout_a="sliced", layout_b="negative")
    yield "batches", MATMUL, product(5, 9, 24, batch_a=(2, 1), batch_b=(3,), residual=(2, 3, 5, 9))
    for activation in ("relu", "silu"):
        options = {"alpha": -0.5, "bias": (24,), "activation": activation, "kind": "normal"}
        yield "epilogues", MATMUL, product(20, 24, 40, residual=(20, 1), **options)
    yield "not a number", MATMUL, product(20, 24, 40, activation="relu", kind="special")
    yield "many tiles", MATMUL, product(1200, 130, 8, "bfloat16")
    for scales in ("tensor", "rows", "blocks"):
        yield "scales", SCALED, ScaledProblem(product(40, 300, 300, dtype_b="int8"), scales)
        fp8 = product(70, 40, 320, "float8_e4m3fn", "float8_e4m3fn", layout_b="F")
        yield "scales", SCALED, ScaledProblem(fp8, scales)
    yield "long k", MATMUL, product(70, 40, 1024, "float8_e4m3fn", layout_b="F")


def _check_stages() -> None:
    """Every number of buffers; warps that are far apart."""
    for dtype, stages in ((dtypes.float16, 2), (dtypes.float16, 3)):
        a, b = (
            operand_values("exact", shape, dtype, i)
            for i, shape in enumerate(((64, 320), (320, 64)))
        )
        y = MATMUL.run(
            a, b, out_dtype="float32", config=GemmConfig(64, 64, 32, 2, 2, stages=stages)
        )
        assert (y == a.astype(np.float64) @ b.astype(np.float64)).all(), "stages"


def _check_splits() -> None:
    """Splits of k, and warps that share it."""
    for dtype in (dtypes.float16, dtypes.int8):
        a = operand_values("same_sign", (20, 1000), dtype, 1)
        b = np.asfortranarray(operand_values("same_sign", (1000, 70), dtype, 2))
        a = np.pad(a, ((0, 0), (0, 24)))[:, :1000]  # rows at multiples of 16 bytes
        for config in (GemmConfig(16, 64, 128, 1, 1, 4, stages=2), GemmConfig(32, 32, 64, 2, 2)):
            for splits in (1, 3, 8):
                y = MATMUL.run(a, b, config=replace(config, splits=splits))
                references = MATMUL.reference(a, b)
                bounds = MATMUL.bound(a, b, reference=references)
                assert check.compare((y,), references, bounds).ok, (config, splits)


def _check_padded_rows() -> None:
    """Whole vectors, of which the last of a row holds what is not the operand's."""
    a = operand_values("same_sign", (20, 40), dtypes.float16, 1)[:, :37]
    b = operand_values("same_sign", (24, 40), dtypes.float16, 2)[:, :37].T
    references = MATMUL.reference(a, b)
    bounds = MATMUL.bound(a, b, reference=references)
    assert check.compare((MATMUL.run(a, b),), references, bounds).ok


def _check_large_offsets() -> None:
    stride, flags = 2**27 + 16, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = np.frombuffer(mmap.mmap(-1, 65 * stride, flags=flags), np.float16)
    a = np.lib.stride_tricks.as_strided(memory, (65, 32), (stride, 2))
    a[...] = inputs.values("same_sign", (65, 32), dtypes.float16, 1)
    b = inputs.values("same_sign", (32, 8), dtypes.float16, 2)
    references = MATMUL.reference(a, b)
    y = MATMUL.run(a, b)
    assert check.compare((y,), references, MATMUL.bound(a, b, reference=references)).ok


def _check_fp8_integers() -> None:
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        check_fp8_sums_of_128(host.current(), dtype, "float8_e4m3fn")


CHECKS = {
    "fp8 integers": _check_fp8_integers,
    "padded rows": _check_padded_rows,
    "stages": _check_stages,
    "splits": _check_splits,
    "large offsets": _check_large_offsets,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
