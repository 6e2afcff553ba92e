"""Planted faults of attention's Hopper kernel: each must be caught by the check that is named here."""

from __future__ import annotations

import pytest
import test_attention_hopper as properties
from planted import Fault, caught_by, first_failure
from test_attention_hopper import PROBLEMS, compare, hopper

from cupykern.targets import host

FILE = "attention_hopper.cu"
NAMES = ("full", "causal", "layout", "padded", "blocks", "causal blocks", "large blocks")

FAULTS = {
    "keys of one stage alone": Fault(
        FILE, "keys_empty[to.stage].wait(to.parity ^ 1);", "keys_empty[to.stage].wait(1);", "full"
    ),
    "values are released before they are multiplied": Fault(
        FILE,
        "wgmma_wait<0>(outputs); release(storage.values_empty[before.stage]); if (grown)",
        "release(storage.values_empty[before.stage]); wgmma_wait<0>(outputs); if (grown)",
        "full",
    ),
    "scores are read too early": Fault(FILE, "wgmma_wait<1>(scores);", "wgmma_wait<2>(scores);", "full"),
    "values of the next tile": Fault(
        FILE, "follow(StagePlace(number - 1), StagePlace(number)", "follow(StagePlace(number), StagePlace(number)",
        "full",
    ),
    "the last values are left out": Fault(FILE, "last(StagePlace(number - 1)); } named", "} named", "full"),
    "products are not rescaled": Fault(FILE, "outputs[j] *= factors[j / 2 % 2];", "outputs[j] *= 1.0f;", "growing"),
    "rows of the other half are rescaled": Fault(
        FILE, "outputs[j] *= factors[j / 2 % 2];", "outputs[j] *= factors[j % 2];", "growing"
    ),
    "a tile at the end is not masked": Fault(
        FILE, "if (first_key + kTileN <= limit) return;", "return;", "causal"
    ),
    "one key too many": Fault(FILE, "lane, i) >= end) scores", "lane, i) > end) scores", "causal"),
    "queries of the first warpgroup": Fault(
        FILE, "begin_scores(storage, at.stage, warpgroup * 64, scores);",
        "begin_scores(storage, at.stage, 0, scores);", "full",
    ),
    "outputs are overwritten while they are stored": Fault(
        FILE, "arrive(); tma_store_wait_read<0>();", "arrive();", "full"
    ),
    "probabilities in another order": Fault(
        FILE, "scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]", "scores[8 * i + 2 * j + 1], scores[8 * i + 2 * j]",
        "full",
    ),
    "statistics of the other row": Fault(
        FILE, "Layout::row(lane, 2 * r); if", "Layout::row(lane, 2 - 2 * r); if", "full"
    ),
    "rows past the end have statistics": Fault(
        FILE, "if (lane % 4 == 0 && row < head.sq) {", "if (lane % 4 == 0) {", "full"
    ),
    "a partial block's tile is transposed": Fault(
        FILE, "<< params.mask.kv_shift) + i / 4 * 8;", "<< params.mask.kv_shift) + i / 4 * 4;", "blocks"
    ),
    "a masked block is computed": Fault(
        FILE, "return vote_any(block_type != kMaskedBlock);", "return true;", "blocks"
    ),
    "a skipped stage is released at once": Fault(
        FILE, "storage.keys_full[at.stage].wait(at.parity); storage.keys_empty", "storage.keys_empty",
        "blocks",
    ),
    "a block's causality is left out": Fault(
        FILE, "end = end < block_limit ? end : block_limit;", "", "blocks"
    ),
}  # fmt: skip


def _check(number: int) -> None:
    if host.current().schedule != "fifo":
        return  # the first call goes through all
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule) as target:
            assert compare(target, PROBLEMS[number], hopper(PROBLEMS[number])).ok


CHECKS = {name: (lambda number=i: _check(number)) for i, name in enumerate(NAMES)}
CHECKS["growing"] = lambda: (
    host.current().warp_size == 32
    and properties.test_the_largest_score_grows_from_tile_to_tile(host.current())
)


def test_nothing_is_caught_where_nothing_is_planted():
    assert first_failure(tuple, CHECKS) is None


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
def test_caught(name, tmp_path_factory):
    fault = FAULTS[name]
    checks = {fault.caught: CHECKS[fault.caught]}
    assert caught_by(fault, tmp_path_factory, tuple, checks) in (fault.caught, "a crash")
