"""Planted faults in Hopper's main loop (tests/planted.py)."""

from __future__ import annotations

import pytest
from planted import Fault, caught_by, first_failure
from test_gemm_hopper import compute

from cupykern.gemm_hopper import HopperConfig
from cupykern.matmul import MatmulProblem
from cupykern.targets import host

MAIN_LOOP = "parts/mainloop_hopper.cuh"
FAULTS = {
    "the first stage's parity": Fault(
        MAIN_LOOP, "wait(place.parity ^ 1)", "wait(place.parity)", "shared tiles"
    ),
    "the parity of the next round": Fault(
        MAIN_LOOP, "            stage = 0;\n            parity ^= 1;", "            stage = 0;", "shared tiles"
    ),
    "no wait for a stage's bytes": Fault(
        MAIN_LOOP, "        ring.full[place.stage].wait(place.parity);\n", "", "shared tiles"
    ),
    "no wait for the last sums": Fault(MAIN_LOOP, "    wgmma_wait<0>(sums);\n", "", "shared tiles"),
    "a stage released while it is multiplied": Fault(
        MAIN_LOOP, "if (i > 0) release(before);\n        before = place.stage;",
        "release(place.stage);\n        before = place.stage;", "shared tiles",
    ),
    "a stage free when one warpgroup is done": Fault(
        MAIN_LOOP, "empty[i].init(kPingPong ? 1 : kConsumers);", "empty[i].init(1);", "shared tiles"
    ),
    "the first stage of B for all": Fault(
        MAIN_LOOP, "StageB::tile(ring.b[place.stage], 0, k)", "StageB::tile(ring.b[0], 0, k)", "shared tiles"
    ),
    "sums of the tile before": Fault(MAIN_LOOP, "i > 0 || k > 0", "true", "shared tiles"),
    "turns without order": Fault(
        MAIN_LOOP, "    if (kPingPong) ring.turn[consumer ^ 1].wait((consumer ^ 1 ^ count) & 1);\n", "", "ping-pong"
    ),
    "stages of the other warpgroup's tile": Fault(
        "gemm_hopper.cu", "            place.skip((turns - 1) * num_k_tiles);\n", "", "ping-pong"
    ),
    "the turn of every tile the first": Fault(
        MAIN_LOOP, "ring.turn[0].wait(count & 1)", "ring.turn[0].wait(0)", "shared tiles"
    ),
    "the tail of k left out": Fault(
        "gemm_hopper.cu", "int num_k_tiles = int(params.num_k_tiles)", "int num_k_tiles = int(params.num_k_tiles) - 1",
        "shared tiles",
    ),
    "a box overwritten before it is stored": Fault(
        "gemm_hopper.cu", "if (lane == 0) tma_store_wait_read<1>();", "", "shared tiles"
    ),
    "every box to the same place": Fault(
        MAIN_LOOP, "tma_load(stage + i * kLineBytes, map", "tma_load(stage, map", "ping-pong"
    ),
    "a box from beside the tile": Fault(
        MAIN_LOOP, "{kOuterMajor ? outer + i : k,", "{kOuterMajor ? outer : k,", "ping-pong"
    ),
    "half of a stage's bytes expected": Fault(
        MAIN_LOOP, "arrive_expect_tx(StageA::kBytes + StageB::kBytes)", "arrive_expect_tx(StageA::kBytes)",
        "shared tiles",
    ),
    "the bias of the next column": Fault(
        "gemm_hopper.cu", "const float added = of_col(col_bias, i);", "const float added = of_col(col_bias, i ^ 1);",
        "epilogue",
    ),
    "the bias of the first rows": Fault(
        "gemm_hopper.cu", "values[i] * params.alpha + row_bias[i / 2 % 2]", "values[i] * params.alpha + row_bias[0]",
        "bias of rows",
    ),
}  # fmt: skip

PROBLEMS = {
    "shared tiles": (
        HopperConfig(128, 128, 2, lead=1),
        MatmulProblem(520, 264, 456, layout_b="F", out_dtype="bfloat16"),
    ),
    "ping-pong": (
        HopperConfig(128, 64, 3, ping_pong=True),
        MatmulProblem(520, 520, 264, layout_a="F"),
    ),
    "epilogue": (
        HopperConfig(128, 128, 2),
        MatmulProblem(136, 264, 64, bias=(264,), activation="gelu", residual=(136, 264)),
    ),
    "bias of rows": (HopperConfig(128, 128, 2), MatmulProblem(136, 264, 64, bias=(136, 1))),
}


def _check(name: str) -> None:
    if host.current().schedule != "fifo":
        return  # the first call goes through all that Hopper's main loop has
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            compute(target, PROBLEMS[name][1], PROBLEMS[name][0])


CHECKS = {name: (lambda name=name: _check(name)) for name in PROBLEMS}


def test_nothing_is_caught_where_nothing_is_planted():
    assert first_failure(tuple, CHECKS) is None


@pytest.mark.parametrize("name", FAULTS)
def test_planted(name, tmp_path_factory):
    fault = FAULTS[name]
    assert caught_by(fault, tmp_path_factory, tuple, CHECKS) == fault.caught
