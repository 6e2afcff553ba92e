"""Planted faults in skinny_gemm.cu, each of which a check must catch."""

from __future__ import annotations

from dataclasses import replace

from planted import Fault, fault_tests
from skinny_gemm_checks import (
    CONFIG,
    E4M3,
    FP32,
    FP32_4,
    MANY,
    NVFP4,
    WIDE,
    check_blocks,
    check_dual,
    check_formula,
    check_misaligned,
    check_misaligned_epilogue,
    check_problem_of,
)

FILE = "skinny_gemm.cu"
SKEW = "gemm/skinny_skew.cuh"
PARTS = "gemm/skinny.cuh"
MISALIGNED = "gemm/misaligned_tile.cuh"
FMA = "gemm/skinny_fma.cuh"
FORMULA = "skinny_gemm_expression.cu"
FAULTS = {
    "a stage is read before all lanes have it": Fault(
        PARTS, "sync_warp();  // this stage has arrived", "// this stage has arrived", "K-major b"
    ),
    "a stage too early": Fault(
        PARTS, "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "K-major b"
    ),
    "a stage is loaded over while it is read": Fault(
        PARTS, "i < kStages - 1; ++i) load_next();", "i < kStages; ++i) load_next();", "K-major b"
    ),
    "all warps take the same k": Fault(
        FILE, "first_k = warp * kDepth;", "first_k = 0;", "K-major b"
    ),
    "rows of a in others' place": Fault(PARTS, "row % kRows", "row % 4", "8 rows"),
    "of two products, the first 16 rows again": Fault(
        PARTS, "stage.a, of_a, m * 16,", "stage.a, of_a, kMatrices == 2 ? 0 : m * 16,", "dual GEMM"
    ),
    "of NVFP4 weights, the first 16 rows again": Fault(
        PARTS, "stage.a, of_a, m * 16,", "stage.a, of_a, kScaled ? 0 : m * 16,", "32 rows by NVFP4"
    ),
    "the first 16 rows again": Fault(
        PARTS, "stage.a, of_a, m * 16,", "stage.a, of_a, 0,", "32 rows"
    ),
    "the accumulators of the first 16 rows again": Fault(
        PARTS, "= acc[n][m].values[i];", "= acc[n][0].values[i];", "32 rows"
    ),
    "blocks: the totals of the first 16 rows again": Fault(
        PARTS, "product.acc[n][m] = totals[n][m];", "product.acc[n][m] = totals[n][0];",
        "blocks of 48 rows"
    ),
    "chunks of the first rows only": Fault(
        PARTS, "first < Tile::kRows;", "first < kAtOnce;", "K-major b"
    ),
    "chunks of a row are those of the lane's first one": Fault(
        PARTS, "(index ^ Tile::swizzle(first))", "index", "MN-major b"
    ),
    "k that ends within a stage is copied whole": Fault(
        PARTS, "chunk * kPerChunk < elements ? rows : 0", "rows", "K-major b"
    ),
    "rows of b past the end of k": Fault(
        PARTS, "kMnMajorB ? elements : cols,", "kMnMajorB ? kDepth : cols,", "MN-major b"
    ),
    "accumulators are added before all warps have stored theirs": Fault(
        PARTS, "    sync_block();\n", "", "K-major b"
    ),
    "a warp's accumulators are left out": Fault(
        PARTS, "for (int from = 0; from < kWarps;", "for (int from = 1; from < kWarps;", "K-major b"
    ),
    "what lies before rows of b is multiplied": Fault(
        PARTS, "b[i] = ElementB();", ";", "misaligned K-major b"
    ),
    "what lies before rows of a is multiplied": Fault(
        PARTS, "of_a.row(stage.a, row)[i] = ElementA();", ";", "misaligned K-major b"
    ),
    "rows are cleared while others read them": Fault(
        PARTS, "clear_heads(own.stages[stage], x.phases_a, x.before);\n sync_warp();",
        "clear_heads(own.stages[stage], x.phases_a, x.before);", "misaligned K-major b"
    ),
    "a does not begin where b does": Fault(
        FILE, "own_a = a + first_k - columns.before;", "own_a = a + first_k;",
        "misaligned K-major b",
    ),
    "k ends as if it began with a chunk": Fault(
        SKEW, "params.k + before,", "params.k,", "misaligned K-major b"
    ),
    "what lies behind rows is copied": Fault(
        PARTS, "first + row < own ? bytes : 0", "first + row < own ? 16 : 0", "misaligned K-major b"
    ),
    "results of other columns": Fault(
        SKEW, "skew * whole.out.col", "0 * whole.out.col", "misaligned K-major b"
    ),
    "columns of all phases": Fault(
        SKEW, "kSkews > 1 ? (n - skew + kSkews - 1) / kSkews : n;", "n;",
        "misaligned K-major b"
    ),
    "a bias of the columns beside": Fault(
        SKEW, "own.bias.col *= kSkews;", "", "bias of misaligned K-major b"
    ),
    "a residual of the columns beside": Fault(
        SKEW, "own.residual.col *= kSkews;", "", "residual of misaligned K-major b"
    ),
    "rows begin as the first one does": Fault(
        MISALIGNED, "i % Tile::kRows * step", "0", "misaligned MN-major b"
    ),
    "rows without their last chunk": Fault(
        MISALIGNED, "copy(tile, row, kChunks, rows, elements);", ";", "misaligned MN-major b"
    ),
    "what lies behind rows of a is copied": Fault(
        MISALIGNED, "clamp_to(bytes, 16) : 0", "16 : 0", "misaligned K-major b"
    ),
    "scales of the first words only": Fault(
        PARTS, "            next[i] += next_stage;\n", "", "nvfp4"
    ),
    "a row's scales in each other's place": Fault(
        PARTS, "tile.words[row][word % kRowWords];", "tile.words[row][0];", "nvfp4"
    ),
    "columns past the end are stored": Fault(
        PARTS, "clamp_to(p.n - col, kRun)", "kRun", "K-major b"
    ),
    "the bias of the first columns": Fault(
        PARTS, "p.bias_dtype, p.bias, row, col, count, bias",
        "p.bias_dtype, p.bias, row, tile_col, count, bias", "epilogues"
    ),
    "the residual before the activation": Fault(
        PARTS, "values[i] += bias[i];", "values[i] += bias[i] + residual[i];", "epilogues"
    ),
    "lanes' shares of k are not added": Fault(
        FMA, "total += shuffle_xor(total, distance(apart));", ";", "4 rows of FP32"
    ),
    "lanes add those of other columns": Fault(
        FMA, "{1, 4, 8, 2, 16, 32}", "{1, 2, 4, 8, 16, 32}", "4 rows of FP32"
    ),
    "a lane takes the same chunk again": Fault(
        FMA, "load(a[i], stage.a(row(i), chunk));", "load(a[i], stage.a(row(i), k));",
        "FP32",
    ),
    "k and columns of a vector in each other's place": Fault(
        FMA, "kMnMajorB ? b[depth][j] : b[j][depth]", "b[j][depth]", "MN-major FP32"
    ),
    "rows in others' place": Fault(
        FMA, "return m + i * kLanesM;", "return m + i;", "FP32"
    ),
    "formula: the first block's columns for all": Fault(
        PARTS, "epilogue.store(row, first_col + tile_col,", "epilogue.store(row, tile_col,",
        "formula"
    ),
    "formula: a block's first columns for all": Fault(
        PARTS, "storage.add(row, tile_col, totals)", "storage.add(row, 0, totals)", "formula"
    ),
    "formula: the second matrix": Fault(
        FORMULA, "{}, params.expression, params.expression.first_matrix}",
        "{}, params.expression, params.expression.first_matrix + 1}", "formula"
    ),
    "formula: without scales of columns": Fault(
        FORMULA, "SkinnyScales::of_epilogue(scale_b), 0", "nullptr, 0", "formula"
    ),
    "formula: NVFP4 scales of the first columns for all": Fault(
        FORMULA, "product.groups, first_col,", "product.groups, 0,", "formula of nvfp4"
    ),
    "formula: all warps take the same k": Fault(
        FORMULA, "kWarpSize * kDepth;", "kWarpSize * 0;", "formula"
    ),
    "blocks: the scales of the first stage for all": Fault(
        PARTS, "shuffle(b[i], stage % kWarpSize)", "shuffle(b[i], 0)", "blocks of weights"
    ),
    "blocks: a's scales of the stage after": Fault(
        PARTS, "++stage;\n        fetch(k);",
        "++stage;\n        fetch(k);\n        for (int m = 0; m < kRowFragments; ++m)\n"
        "            for (int i = 0; i < Fragment::kCount; ++i) of_a[m][i] = scales.a ? a[m][i] : "
        "1.0f;",
        "blocks of e4m3"
    ),
    "blocks: the scales of the first stages again": Fault(
        PARTS, "if (stage % kWarpSize == 0) fetch_b", "if (stage == 0) fetch_b", "long blocks"
    ),
    "blocks: the scales of the first columns for all": Fault(
        PARTS, "block_col * steps.col", "0", "blocks of weights"
    ),
    "blocks: the scales of the first row of a for all": Fault(
        PARTS, "of_block[row * scales.of_a.row]", "of_block[0]", "blocks of e4m3"
    ),
    "blocks: a stage's product is added to the next one": Fault(
        PARTS, "            partial.values[i] = 0;\n", "", "blocks of weights"
    ),
    "blocks: the epilogue applies the first block's scale again": Fault(
        PARTS, "return kBlockScales ? nullptr : scale;", "return scale;", "blocks of e4m3"
    ),
    "values in each other's place after the activation": Fault(
        PARTS, "values[3] = first;", "values[3] = values[0];", "epilogues"
    ),
}  # fmt: skip


def _check(*args, **options):
    return lambda: check_problem_of(*args, **options)


CHECKS = {
    "K-major b": _check(16, 40, 1104, "float16", E4M3, "F", CONFIG),
    "8 rows": _check(8, 40, 304, "float16", E4M3, "F", replace(CONFIG, rows=8)),
    "32 rows": _check(29, 40, 1104, "float16", E4M3, "F", MANY),
    "blocks of 48 rows": lambda: check_blocks("bfloat16", 48),
    "32 rows by NVFP4": _check(
        29, 40, 576, "float16", NVFP4, "F", replace(MANY, tile_k=128, warps=2, stages=2),
        kind="normal",
    ),
    "dual GEMM": lambda: check_dual(29, "blocks"),
    "nvfp4": _check(5, 40, 576, "float16", NVFP4, "F", replace(CONFIG, stages=2), kind="normal"),
    "FP32": _check(16, 40, 300, "float32", None, "F", FP32),
    "4 rows of FP32": _check(3, 40, 300, "float32", None, "F", FP32_4),
    "MN-major FP32": _check(3, 40, 300, "float32", None, "C", FP32_4),
    "MN-major b": _check(5, 80, 304, "float16", E4M3, "C", WIDE),
    "misaligned K-major b": lambda: check_misaligned(5, 300, 329, "F"),
    "bias of misaligned K-major b": lambda: check_misaligned_epilogue("bias"),
    "residual of misaligned K-major b": lambda: check_misaligned_epilogue("residual"),
    "formula": lambda: check_formula(E4M3),
    "formula of nvfp4": lambda: check_formula(NVFP4),
    "blocks of e4m3": lambda: check_blocks(E4M3, 13),
    "blocks of weights": lambda: check_blocks("bfloat16", 5),
    "long blocks": lambda: check_blocks("float16", 1, n=16, k=128 * 4 * 66),
    "misaligned MN-major b": lambda: check_misaligned(5, 81, 304, "C"),
    "epilogues": _check(
        5, 72, 64, "float16", E4M3, "F", CONFIG, bias=(72,), residual=(5, 72), activation="silu",
        kind="normal",
    ),
}  # fmt: skip


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS
)
