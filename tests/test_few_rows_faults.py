"""Planted faults in stages of each warp's own and in tiles of 8 rows, each of which a check must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planted import Fault, caught_by, first_failure
from test_few_rows import EIGHT, SIXTEEN, check_problem_of

FAULTS = {
    "a stage is read before all lanes have it": Fault(
        "parts/mainloop.cuh",
        "if constexpr (kOwnStages) sync_warp();",
        "if constexpr (kOwnStages) {}",
        "k along lines",
    ),
    "all warps take the same k": Fault(
        "parts/mainloop.cuh",
        "if constexpr (kOwnStages) first_k += warp.k * kStageK;",
        "",
        "k along lines",
    ),
    "all warps load into the same stages": Fault(
        "parts/gemm_tile.cuh",
        "storage.stages[kOwnStages ? warp.k : 0]",
        "storage.stages[0]",
        "k along lines",
    ),
    "chunks of the first lines only": Fault(
        "parts/stage_loader.cuh",
        "first < Tile::kLines; first += kAtOnce, from += next_line) {",
        "first < kAtOnce; first += kAtOnce, from += next_line) {",
        "k along lines",
    ),
    "places of a line are those of the lane's first one": Fault(
        "parts/stage_loader.cuh",
        "tile.chunks[(place ^ Tile::swizzle(first)) + first * kChunks];",
        "tile.chunks[place + first * kChunks];",
        "n along lines",
    ),
    "k that ends within a stage is copied whole": Fault(
        "parts/stage_loader.cuh",
        "if (num_k == kStageK && outer >= kOuterSize) {",
        "if (outer >= kOuterSize) {",
        "k along lines",
    ),
    "rows of another tile are stored": Fault(
        "parts/gemm_tile.cuh",
        "clamp_to(rows, kTileM) * kRuns",
        "clamp_to(rows, kSumRows) * kRuns",
        "two tiles of rows",
    ),
    "sums are added before all warps have theirs there": Fault(
        "parts/gemm_tile.cuh",
        "    sync_block();\n    constexpr int kRuns = kTileN / kRun;",
        "    constexpr int kRuns = kTileN / kRun;",
        "k along lines",
    ),
    "splits of another warp's": Fault(
        "parts/gemm_tile.cuh",
        "split = warp.k; split < params.splits; split += kGridK",
        "split = warp.k; split < params.splits; ++split",
        "splits",
    ),
    "blocks' scales once for many stages": Fault(
        "parts/mainloop.cuh", "kOwnStages || end % kPromoteK == 0", "end % kPromoteK == 0", "blocks"
    ),
}


def _check(m, n, k, dtype_b, layout_b, config, scales="none", dtype="float16"):
    return lambda: check_problem_of(m, n, k, dtype, dtype_b, layout_b, config, scales)


CHECKS = {
    "k along lines": _check(8, 40, 336, "float8_e4m3fn", "F", EIGHT),
    "n along lines": _check(5, 48, 336, "float8_e4m3fn", "C", SIXTEEN),
    "two tiles of rows": _check(11, 32, 64, "float8_e4m3fn", "F", EIGHT),
    "splits": _check(5, 40, 1040, "float8_e4m3fn", "F", replace(EIGHT, splits=5)),
    "blocks": _check(16, 32, 1024, "float8_e4m3fn", "F", SIXTEEN, "blocks", "float8_e4m3fn"),
}


def _problems():
    return ()


def test_nothing_fails_without_a_fault():
    assert first_failure(_problems, CHECKS) is None


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    fault = FAULTS[name]
    # Memory that is overwritten may end the process first.
    assert caught_by(fault, tmp_path_factory, _problems, CHECKS) in (fault.caught, "a crash")
