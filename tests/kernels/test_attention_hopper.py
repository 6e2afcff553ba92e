"""Attention by TMA and wgmma: the same results, and what it does not take."""

from __future__ import annotations

import itertools

import needs
import numpy as np
import pytest
from attention_checks import (
    check_bias_over_nan,
    check_far_distances,
    check_far_scores,
    check_lowest_biases,
)
from attention_hopper_checks import PROBLEMS, STATS, check_scores_that_grow, compare, hopper

import cupykern
from cupykern import BlockMask, dtypes
from cupykern.attention import attention_hopper, attention_plan
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.attention.attention_task import AttentionTask
from cupykern.ops.attention import OP
from cupykern.ops.problems.attention import AttentionProblem
from cupykern.targets import host
from cupykern.targets.limits import device


@needs.hopper
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16])
@pytest.mark.parametrize("checked", [check_far_scores, check_far_distances, check_lowest_biases])
def test_scores_may_have_any_size(target, checked, dtype):
    checked(target.xp, dtype, config=AttentionHopperConfig(128, 64))


@needs.hopper
@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_results_are_within_the_bound_under_every_schedule(target, number, exhaustive):
    problem = PROBLEMS[number]
    schedules = (None,)
    if target.name == "host":
        schedules = ("fifo", "lifo", "sticky:1", "sticky:2")
        schedules = schedules if exhaustive else schedules[number % 4 :][:1]
    for schedule in schedules:
        with host.use(schedule=schedule or "fifo") as used:
            comparison = compare(used if schedule else target, problem, hopper(problem))
            assert comparison.ok, (schedule, comparison)


@needs.hopper
@pytest.mark.parametrize(
    "head_dim, config",
    [
        (64, AttentionHopperConfig(192, 96, 3)),
        (128, AttentionHopperConfig(128, 128)),
        (256, AttentionHopperConfig(128, 80)),
        (80, AttentionHopperConfig(128, 112)),
    ],
)
def test_every_config_is_within_the_bound(target, head_dim, config):
    problem = AttentionProblem(
        1, 2, 1, 150, 300, head_dim, head_dim - 8, causal=True, input_pos=0, lse=True
    )
    comparison = compare(target, problem, config)
    assert comparison.ok, comparison


def test_a_bias_of_minus_infinity_hides_any_key():
    with host.use():
        check_bias_over_nan(70, 200, 64, config=AttentionHopperConfig(128, 128))


@needs.hopper
def test_the_largest_score_grows_from_tile_to_tile(target):
    check_scores_that_grow(target)


@needs.hopper
def test_causal_tiles_are_shared_out(target):
    """Each once, to the block that has the least to do; more tiles than blocks."""
    problem = AttentionProblem(1, 2, 2, 650, 650, 16, 16, causal=True, lse=True)
    assert compare(target, problem, AttentionHopperConfig(128, 128)).ok
    strides = (2 * 650 * 16, 650 * 16, 16)
    task = AttentionTask(np.dtype(np.float16), 1, 2, 2, 650, 650, 16, 16, *(strides,) * 4, 0.25, 0)
    config = AttentionHopperConfig(128, 128)
    assert attention_hopper.schedule(task, config, np.arange(4), 4) is None
    order = attention_plan.order_of_tiles(10, 15, 4)
    assert len(order) == 150
    task = task._replace(sq=1800, sk=1800)
    made = attention_hopper.schedule(task, config, order, 8)
    assert sorted(made[made >= 0]) == list(range(150)) and (made[-1] == -1).all()
    work = [(order[own[own >= 0]] + 2.5).sum() for own in made.T]
    assert max(work) < 1.05 * min(work)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "tokens", "dim"),
    [
        *((4, 16, 16, 4096, 128), (1, 16, 16, 16384, 128), (4, 8, 8, 4096, 256)),
        *((1, 32, 8, 16384, 128), (2, 14, 2, 3000, 128), (1, 40, 8, 4096, 128)),
        *((1, 24, 24, 4608, 128), (16, 16, 16, 1024, 128), (2, 37, 37, 4096, 64)),
    ],
)
def test_blocks_have_as_much_to_do(batch, heads, kv_heads, tokens, dim):
    """Sections of heads, whose long tiles come first, end with no few long tiles."""
    config = AttentionHopperConfig(128, 80 if dim == 256 else 128)
    strides = (heads * tokens * dim, tokens * dim, dim)
    shape = batch, heads, kv_heads, tokens, tokens, dim, dim
    task = AttentionTask(np.dtype(np.float16), *shape, *(strides,) * 4, 0.25, 0)
    tiles = -(-tokens // config.tile_m)
    per_section = attention_plan.heads_per_section(task)
    order = attention_plan.order_of_tiles(batch * heads, tiles, per_section)
    made = attention_hopper.schedule(task, config, order, 132)
    costs = np.ceil((order + 1) * config.tile_m / config.tile_n) + 1.5
    work = np.array([costs[own[own >= 0]].sum() for own in made.T])
    assert work.max() < 1.05 * work.mean()
    assert per_section % (heads // kv_heads) == 0


def test_nan_of_v_in_skipped_blocks_and_beyond_the_end():
    """TMA reads zeros beyond the end; a warpgroup multiplies no block that it does not keep."""
    q, k, v = (np.ones((1, 1, n, 64), np.float16) for n in (128, 190, 256))
    v[:, :, 64:128] = np.nan
    keep = np.ones((128, 190), bool)
    keep[64:, 64:128] = False  # the other warpgroup keeps these keys
    mask = BlockMask.from_dense(keep, 64, 64)
    config = AttentionHopperConfig(128, 64, 3)
    y = cupykern.attention(q, k, v[:, :, :190], mask=mask, config=config)
    assert np.isnan(y[0, 0, :64]).all() and (y[0, 0, 64:] == 1).all()


def packed(lengths, v=None, **kwargs):
    cu = np.cumsum((0, *lengths), dtype=np.int32)
    rows, rng = int(cu[-1]), np.random.default_rng(3)
    q, k = (rng.standard_normal((rows, 1, 64)).astype(np.float16) for _ in range(2))
    v = rng.standard_normal((rows, 1, 64)).astype(np.float16) if v is None else v
    kwargs = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths), **kwargs}
    config = AttentionHopperConfig(128, 128)
    return cu, v, cupykern.attention_varlen(q, k, v, cu, cu, config=config, **kwargs)


def test_other_sequences_do_not_reach_one():
    """Beyond a sequence's end zeros are read, not the next one's NaN, and nothing is written."""
    v = np.ones((200, 1, 64), np.float16)
    v[70:140] = np.nan
    _, _, y = packed((70, 70, 60), v)
    assert (y[:70] == 1).all() and np.isnan(y[70:140]).all() and (y[140:] == 1).all()


def test_lengths_that_a_kernel_clamps():
    """Sequences no longer than max_seqlen, which the host does not check of arrays on a device."""
    cu, v, _ = packed((150, 40))
    q = np.zeros((190, 1, 64), np.float16)
    out = np.full((190, 1, 64), 7, np.float16)
    with pytest.raises(ValueError, match="longer than 100"):
        cupykern.attention_varlen(q, q, v, cu, cu, max_seqlen_q=100, max_seqlen_k=100)
    strides = (0, 64, 64)
    task = AttentionTask(
        q.dtype, 2, 1, 1, 100, 100, 64, 64, *(strides,) * 4, 0.125, None, totals=(190, 190)
    )
    config = AttentionHopperConfig(128, 128)
    plan = attention_plan.attention_plan(host.current(), task, config)
    plan.launch(np, (q, q, v, out, *(None,) * 8, cu, cu))
    means = v[:100].astype(np.float64).mean(0), v[150:].astype(np.float64).mean(0)
    assert np.abs(out[:100] - means[0]).max() < 1e-3 and np.abs(out[150:] - means[1]).max() < 1e-3
    assert (out[100:150] == 7).all()


@pytest.mark.parametrize("count", (1, 5, 384))
def test_every_tile_is_taken_once(count, monkeypatch):
    """And the counter is zero again."""
    taken = []

    def take(*args):
        taken.append(np.zeros(1, np.uint32))
        return None, taken[-1]

    monkeypatch.setattr(attention_hopper.workspace, "take", take)
    lengths = [1 + 97 * i % 130 for i in range(count)]
    cu, v, y = packed(lengths, scale=1e-18)
    means = [v[a:b].astype(np.float64).mean(0) for a, b in itertools.pairwise(cu)]
    assert np.abs(y - np.repeat(means, lengths, 0)).max() < 2e-3
    mask = BlockMask.causal(500, 300, target="host")
    x = np.ones((1, 3, 500, 64), np.float16)
    cupykern.attention(
        x, x[:, :, :300], x[:, :, :300], mask=mask, config=AttentionHopperConfig(128, 128)
    )
    assert len(taken) == 2 and not any(x.any() for x in taken)


def test_more_sequences_than_it_orders():
    lengths = (1,) * (attention_hopper.MOST_SEQUENCES + 1)
    with pytest.raises(ValueError, match="sequences"):
        packed(lengths)


@pytest.mark.parametrize(
    "config, options, says",
    [
        (AttentionHopperConfig(100, 128), {}, "tile_m"),
        (AttentionHopperConfig(128, 100), {}, "tile_n"),
        (AttentionHopperConfig(128, 128, 9), {}, "stages"),
        (AttentionHopperConfig(192, 256), {}, "accumulators"),
        (AttentionHopperConfig(128, 128), {"qk_accumulate": "float16"}, "FP16 accumulators"),
        (
            AttentionHopperConfig(128, 128),
            {"mask": BlockMask.from_dense(np.ones((70, 90), bool), 64, 128)},
            "one block",
        ),
        (
            AttentionHopperConfig(128, 64),
            {"mask": BlockMask.from_dense(np.ones((70, 90), bool), 64, 64), "scale": -0.3},
            "scales below",
        ),
    ],
)
def test_what_it_does_not_take(config, options, says):
    q, k, v = (np.ones((1, 1, n, 64), np.float16) for n in (70, 90, 90))
    with pytest.raises(ValueError, match=says):
        cupykern.attention(q, k, v, config=config, **options)


def test_only_positive_strides():
    q, k, v = (np.ones((1, 2, n, 64), np.float16) for n in (70, 90, 90))
    with pytest.raises(ValueError, match="positive strides"):
        cupykern.attention(q[:, ::-1], k, v, config=AttentionHopperConfig(128, 128))


@needs.hopper
@pytest.mark.parametrize("mask", [None, "bool", "bias", "block"])
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.5])
def test_what_is_chosen_on_hopper_fits(mask, scale, target):
    """The kernels of some masks find the largest score before it is scaled."""
    problem = AttentionProblem(1, 2, 1, 130, 200, 64, 64, scale=scale, mask=mask, **STATS)
    for config in OP.configs(problem, "sm_90a"):
        assert compare(target, problem, config).ok, config


@pytest.mark.parametrize(
    "head_dims, dims",
    [
        ((1, 64), (64, 64)),
        ((72, 80), (80, 128)),
        ((88, 40), (96, 128)),
        ((100, 97), (112, 128)),
        ((80, 128), (80, 128)),
        ((113, 128), (128, 128)),
        ((129, 8), (192, 128)),
        ((192, 129), (256, 256)),
        ((256, 256), (256, 256)),
    ],
)
def test_what_head_sizes_are_padded_to(head_dims, dims):
    assert attention_hopper.padded(*head_dims) == dims


def test_every_head_size_has_a_config():
    for dims in attention_hopper.HEAD_DIMS:
        for kind in attention_hopper.KINDS:
            for config in attention_hopper.configs(dims, kind):
                assert attention_hopper.refusal(config, dims, "sm_90a") is None


@pytest.mark.parametrize(
    ("heads", "tokens", "offset", "tile_m"),
    [
        (96 * 16, 197, None, 128),  # 256 rows instead of 384
        (32, 577, None, 192),  # a tile for each SM but four
        (16, 2048, None, 128),  # both in two rounds
        (32, 8192, None, 192),
        (480, 1024, None, 192),  # 22 rounds instead of 30
        (480, 1024, 0, 128),  # fewer of its tiles' keys are hidden
        (32, 8192, 0, 192),
    ],
)
def test_tiles_of_heads_of_64_fill_the_device(heads, tokens, offset, tile_m):
    queries = attention_hopper.Queries(132, heads, tokens, tokens, offset)
    dims = attention_hopper.HeadDims(64, 64)
    first, second = attention_hopper.configs(dims, attention_hopper.Kind(), queries)
    assert (first.tile_m, {first.tile_m, second.tile_m}) == (tile_m, {128, 192})


@pytest.mark.parametrize(
    ("sms", "batch", "sq", "sk", "offset", "tile_m"),
    [
        (132, 1, 577, 577, None, 192),
        (114, 1, 577, 577, None, 128),  # an SXM5's tiles, in a second round
        (132, 4, 577, 577, None, 128),
        (132, 1, 1024, 8192, 0, 128),
        (132, 1, 1024, 8192, 7168, 192),  # the last queries, which see nearly all keys
    ],
)
def test_tiles_are_chosen_by_the_task_and_the_device(sms, batch, sq, sk, offset, tile_m):
    strides = (64 * 32 * sq, 64 * sq, 64), (64 * 32 * sk, 64 * sk, 64)
    sizes, operands = (batch, 32, 32, sq, sk, 64, 64), (strides[i] for i in (0, 1, 1, 0))
    task = AttentionTask(np.dtype(np.float16), *sizes, *operands, 0.125, offset)
    first, *_ = attention_plan.FAMILY.configs(task, device("sm_90a", sms))
    assert first == AttentionHopperConfig(tile_m, 128, 3)


@pytest.mark.parametrize("offset", [None, 0, -5])
@pytest.mark.parametrize("sizes", [(0, 64, 64), (2, 0, 64), (2, 64, 0), (10**6, 10**7, 2**30)])
def test_tiles_of_tasks_of_any_size_are_chosen(sizes, offset):
    for sms in (1, 132):
        queries, dims = (
            attention_hopper.Queries(sms, *sizes, offset),
            attention_hopper.HeadDims(64, 64),
        )
        assert len(attention_hopper.configs(dims, attention_hopper.Kind(), queries)) == 2


def test_other_chips_have_none():
    dims = attention_hopper.padded(64, 64)
    assert "not sm_80" in attention_hopper.refusal(AttentionHopperConfig(128, 128), dims, "sm_80")
