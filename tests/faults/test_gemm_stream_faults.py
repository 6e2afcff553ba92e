"""Planted faults in gemm_stream.cu, each of which a check must catch."""

from __future__ import annotations

from dataclasses import replace

from gemm_stream_checks import (
    CONFIG,
    E4M3,
    NVFP4,
    WIDE,
    check_epilogue_of_lines,
    check_lines,
    check_problem_of,
)
from planted import Fault, fault_tests

FILE = "gemm_stream.cu"
COVERED = "parts/misaligned_tile.cuh"
FAULTS = {
    "a stage is read before all lanes have it": Fault(
        FILE, "sync_warp();  // this stage has arrived", "// this stage has arrived", "k along lines"
    ),
    "a stage too early": Fault(
        FILE, "copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();", "k along lines"
    ),
    "a stage is loaded over while it is read": Fault(
        FILE, "i < kStages - 1; ++i) load_next();", "i < kStages; ++i) load_next();", "k along lines"
    ),
    "all warps take the same k": Fault(
        FILE, "first_k = warp * kDepth,", "first_k = 0,", "k along lines"
    ),
    "rows of a in others' place": Fault(FILE, "line % kRows", "line % 4", "8 rows"),
    "chunks of the first lines only": Fault(
        FILE, "first < Tile::kLines;", "first < kAtOnce;", "k along lines"
    ),
    "places of a line are those of the lane's first one": Fault(
        FILE, "(index ^ Tile::swizzle(first))", "index", "n along lines"
    ),
    "k that ends within a stage is copied whole": Fault(
        FILE, "chunk * kPerChunk < elements ? lines : 0", "lines", "k along lines"
    ),
    "rows of b past the end of k": Fault(
        FILE, "kOuterMajorB ? to_load : cols,", "kOuterMajorB ? kDepth : cols,", "n along lines"
    ),
    "sums are added before all warps have theirs there": Fault(
        FILE, "    sync_block();\n", "", "k along lines"
    ),
    "a warp's sums are left out": Fault(
        FILE, "for (int from = 0; from < kWarps;", "for (int from = 1; from < kWarps;", "k along lines"
    ),
    "what lies before lines of b is multiplied": Fault(
        FILE, "b[i] = ElementB();", ";", "lines along k"
    ),
    "what lies before lines of a is multiplied": Fault(
        FILE, "of_a.line(stage.a, line)[i] = ElementA();", ";", "lines along k"
    ),
    "lines are cleared while others read them": Fault(
        FILE, "clear_heads(own.stages[stage], phases_a, before);\n sync_warp();", "clear_heads(own.stages[stage], phases_a, before);", "lines along k"
    ),
    "a does not begin where b does": Fault(
        FILE, "own_a = a + first_k - before;", "own_a = a + first_k;", "lines along k"
    ),
    "k ends as if it began with a chunk": Fault(
        FILE, "last_k = params.k + before;", "last_k = params.k;", "lines along k"
    ),
    "what lies behind lines is copied": Fault(
        FILE, "first + line < own ? bytes : 0", "first + line < own ? 16 : 0", "lines along k"
    ),
    "results of other columns": Fault(
        FILE, "part * whole.out.col", "0 * whole.out.col", "lines along k"
    ),
    "columns of all parts": Fault(
        FILE, "epilogue_params.n = (epilogue_params.n - part + kParts - 1) / kParts;", "", "lines along k"
    ),
    "a bias of the columns beside": Fault(
        FILE, "epilogue_params.bias.col *= kParts;", "", "bias of lines along k"
    ),
    "a residual of the columns beside": Fault(
        FILE, "epilogue_params.residual.col *= kParts;", "", "residual of lines along k"
    ),
    "lines begin as the first one does": Fault(
        COVERED, "i % Tile::kLines * step", "0", "lines along n"
    ),
    "lines without their last chunk": Fault(
        COVERED, "copy(tile, line, kChunks, lines, elements);", ";", "lines along n"
    ),
    "what lies behind rows of a is copied": Fault(
        COVERED, "clamp_to(bytes, 16) : 0", "16 : 0", "lines along k"
    ),
    "scales of the first words only": Fault(
        FILE, "            next[i] += next_stage;\n", "", "nvfp4"
    ),
    "a line's scales in each other's place": Fault(
        FILE, "tile.words[line][word % kLineWords];", "tile.words[line][0];", "nvfp4"
    ),
    "columns past the end are stored": Fault(
        FILE, "clamp_to(p.n - col, kRun)", "kRun", "k along lines"
    ),
    "the bias of the first columns": Fault(
        FILE, "p.bias_dtype, p.bias, row, col, count, bias", "p.bias_dtype, p.bias, row, tile_col, count, bias", "epilogues"
    ),
    "the residual before the activation": Fault(
        FILE, "* p.alpha + bias[i];", "* p.alpha + bias[i] + residual[i];", "epilogues"
    ),
    "numbers in each other's place after the activation": Fault(
        FILE, "values[3] = first;", "values[3] = values[0];", "epilogues"
    ),
}  # fmt: skip


def _check(*args, **options):
    return lambda: check_problem_of(*args, **options)


CHECKS = {
    "k along lines": _check(16, 40, 1104, "float16", E4M3, "F", CONFIG),
    "8 rows": _check(8, 40, 304, "float16", E4M3, "F", replace(CONFIG, rows=8)),
    "nvfp4": _check(5, 40, 576, "float16", NVFP4, "F", replace(CONFIG, stages=2), kind="normal"),
    "n along lines": _check(5, 80, 304, "float16", E4M3, "C", WIDE),
    "lines along k": lambda: check_lines(5, 300, 329, "F"),
    "bias of lines along k": lambda: check_epilogue_of_lines("bias"),
    "residual of lines along k": lambda: check_epilogue_of_lines("residual"),
    "lines along n": lambda: check_lines(5, 81, 304, "C"),
    "epilogues": _check(
        5, 72, 64, "float16", E4M3, "F", CONFIG, bias=(72,), residual=(5, 72), activation="silu", kind="normal",
    ),
}  # fmt: skip


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS
)
