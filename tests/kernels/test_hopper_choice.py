"""Which configs Hopper's products are given, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemm_hopper_problems import OF_FP8, OF_MIXED, task
from hypothesis import given
from hypothesis import strategies as st

from cupykern import dtypes
from cupykern.gemm import gemm, hopper_choice, hopper_config, product
from cupykern.gemm.hopper_config import HopperConfig
from cupykern.gemm.product import INNER, OUTER, STRIDED
from cupykern.ops.problems.products import MatmulProblem, task_of

CONFIG = HopperConfig(128, 256, 4)


@pytest.mark.parametrize("layout", [INNER, OUTER])
def test_hopper_is_chosen_where_it_pays(layout):
    large = task(layout_a=layout, layout_b=layout)
    assert isinstance(gemm.choose_config(large, "sm_90a"), HopperConfig)
    for arch in ("sm_80", "sm_120a", "gfx942", "host"):
        assert not isinstance(gemm.choose_config(large, arch), HopperConfig)
    known = hopper_choice.CONFIGS[1:] if layout == INNER else hopper_choice.CONFIGS[:1]
    either = [gemm.configs(replace(large, plain=plain), "host") for plain in (True, False)]
    assert set(known) < {config for configs in either for config in configs}
    assert not isinstance(gemm.choose_config(task(m=16), "sm_90a"), HopperConfig)


@pytest.mark.parametrize(
    ("changes", "tile", "share_k"),
    [
        ({"b": dtypes.float8_e4m3fn}, (256, 128), False),
        ({"b": dtypes.int8, "m": 256, "layout_b": OUTER}, (128, 128), False),
        ({"b": dtypes.float8_e4m3fn, "m": 64, "n": 8192}, (64, 64), True),
        ({"b": dtypes.int8, "m": 64, "n": 8192}, (64, 64), True),
        ({"b": dtypes.float8_e4m3fn, "layout_b": OUTER, "m": 33, "n": 8192}, (64, 128), False),
        ({"b": dtypes.float8_e4m3fn, "layout_b": OUTER, "m": 32, "n": 8192}, (32, 64), True),
        ({"b": dtypes.int8, "m": 17, "n": 28672}, (32, 64), True),
        ({"b": dtypes.int8, "m": 64, "n": 28672}, (64, 64), True),
        ({"b": dtypes.int8, "m": 64, "n": 8192, "k": 2048}, (64, 64), True),
        ({"b": product.FP4, "m": 64, "n": 8192}, (64, 128), False),
        ({"a": product.FP4, "b": product.FP4, "m": 64, "n": 8192}, (64, 64), True),
        ({"a": dtypes.int8, "b": dtypes.int8, "m": 64, "n": 8192}, (64, 64), True),
        ({"a": dtypes.int8, "b": dtypes.int8, "m": 256}, (128, 64), False),
        ({"a": dtypes.float8_e4m3fn, "b": dtypes.float8_e4m3fn}, (128, 128), False),
        (
            {"a": dtypes.float8_e4m3fn, "b": dtypes.float8_e4m3fn, "m": 16, "n": 8192, "batch": 2},
            (16, 64),
            True,
        ),
    ],
)
def test_tiles_of_other_dtypes(changes, tile, share_k):
    config = gemm.choose_config(task(**changes), "sm_90a", 132)
    assert (config.tile_m, config.tile_n) == tile
    for blocks in (132, 114):  # the sums are the same
        assert gemm.choose_config(task(**changes), "sm_90a", blocks).share_k == share_k


@given(
    m=st.integers(1, 4096),
    n=st.integers(16, 20000),
    k=st.integers(256, 20000),
    b=st.sampled_from([dtypes.float16, dtypes.float8_e4m3fn, dtypes.int8, product.FP4]),
    kernel=st.sampled_from(["gemm", "dual_gemm"]),
)
def test_gpus_of_other_sizes_have_the_same_sums(m, n, k, b, kernel):
    """k is split in the same way, whatever number of multiprocessors decides about the tiles."""
    of_call = task(m=m, n=n, k=k, b=b, kernel=kernel)
    found = [hopper_choice.configs(of_call, "sm_90a", blocks)[:1] for blocks in (132, 114, 78, 20)]
    assert len({tuple((c.split_k, c.share_k, c.splits) for c in first) for first in found}) == 1


@pytest.mark.parametrize(
    ("m", "n", "blocks", "tile"),
    [
        (4096, 4096, 132, (128, 256)),  # 4 rounds instead of 6 or 8 smaller ones
        (4096, 14336, 132, (128, 176)),  # many rounds: their ends are hidden
        (1024, 2048, 132, (128, 128)),
        (768, 4096, 132, (128, 192)),  # one round
        (3072, 3072, 132, (128, 192)),
        (5120, 5120, 132, (128, 160)),
        (4096, 4096, 114, (128, 128)),
        (320, 4096, 132, (64, 192)),  # one round, 64 rows less that are not there
        (384, 4096, 132, (64, 192)),
        (512, 14336, 132, (128, 160)),
        (256, 4096, 132, (64, 128)),
        (64, 8192, 132, (64, 64)),
    ],
)
def test_tiles_that_fill_the_gpu(m, n, blocks, tile):
    config = gemm.choose_config(task(m=m, n=n), "sm_90a", blocks)
    assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize(
    ("m", "n", "k", "cols"),
    [
        (4096, 7168, 2048, 176),  # 10 rounds instead of 14
        (4096, 14336, 4096, 176),
        (8192, 8192, 8192, 192),
        (4096, 4096, 4096, 128),
        (512, 4096, 7168, 128),
        (256, 4096, 7168, 64),
    ],
)
def test_columns_of_fp8(m, n, k, cols):
    sizes = task(m=m, n=n, k=k, **OF_FP8)
    config = gemm.choose_config(sizes, "sm_90a", 132)
    assert config.tile_n == cols
    assert hopper_config.in_halves(config, sizes) == (cols > 128)
    for other in (replace(sizes, plain=False), replace(sizes, block_scales=True)):
        assert gemm.choose_config(other, "sm_90a", 132).tile_n == min(cols, 128)


def test_clusters_for_rows_that_begin_anywhere():
    """L2 reads two lines for one of theirs, and blocks that share columns ask it for fewer."""
    for m in (1024, 4096):
        config = gemm.choose_config(task(m=m, k=4104, in_lines=False), "sm_90a", 132)
        assert config == HopperConfig(128, 256, 4, cluster=2)
    for k, in_lines in ((64, True), (72, False)):
        assert task_of(MatmulProblem(64, 64, k, layout_b="F")).in_lines == in_lines


def test_tiles_where_columns_are_neighbours():
    for m, tile in ((4096, (128, 256)), (384, (64, 192)), (256, (64, 128))):
        config = gemm.choose_config(task(m=m, layout_b=OUTER), "sm_90a", 132)
        assert (config.tile_m, config.tile_n) == tile
        assert config.ping_pong == (m < 4096)


def test_ping_pong_for_what_ends_take_long():
    """It hides them beside products: of activations, and those that are not plain."""
    assert gemm.choose_config(task(activates=True), "sm_90a", 132).ping_pong
    for m, tile_n in ((4096, 128), (256, 64), (64, 64)):
        config = gemm.choose_config(task(m=m, activates=True, plain=False), "sm_90a", 132)
        assert (config.tile_m, config.tile_n, config.ping_pong) == (128, tile_n, tile_n == 128)


@pytest.mark.parametrize(
    ("changes", "tile", "splits"),
    [
        ({"m": 512, "n": 512, "k": 16384}, (128, 64), 4),
        ({"m": 512, "n": 512, "k": 16384, "layout_b": OUTER}, (128, 64), 4),
        ({"m": 1024, "n": 1024, "k": 32768}, (128, 128), 2),
        ({"m": 64, "n": 1024, "k": 4096}, (64, 64), 1),
        ({"m": 512, "n": 512, "k": 16384, "layout_a": OUTER}, (128, 256), 16),
        ({"m": 512, "n": 512, "k": 16384, "layout_a": OUTER, "layout_b": OUTER}, (128, 256), 16),
        ({"m": 24, "n": 512, "k": 8192, "layout_b": OUTER}, (128, 64), 16),
        ({"m": 512, "n": 512, "k": 16384 + 64}, None, 1),  # no parts of whole lines
        ({"m": 512, "n": 512, "k": 16384, "batch": 2}, None, 1),
        ({"m": 512, "n": 512, "k": 1024}, None, 1),  # the second launch takes longer
        ({"m": 4096, "n": 4096, "k": 16384}, None, 1),
    ],
)
def test_few_tiles_and_long_k_are_split(changes, tile, splits):
    for blocks in (132, 78):  # the sums are the same
        config = gemm.choose_config(task(**changes), "sm_90a", blocks)
        assert config.splits == splits
        assert tile in (None, (config.tile_m, config.tile_n))


_LOGITS = {"b": dtypes.int8, "kernel": "dequant_softmax"}


@pytest.mark.parametrize(
    ("config", "changes", "arch", "said"),
    [
        ({}, {}, "sm_80", "sm_80 has neither TMA nor wgmma"),
        ({}, {"a": dtypes.float32, "b": dtypes.float32}, "sm_90a", "do not multiply float32"),
        ({}, {"block_scales": True}, "sm_90a", "scales of blocks for FP8 only"),
        ({}, {"layout_a": STRIDED, "layout_b": STRIDED}, "sm_90a", "multiples of 16 bytes"),
        ({}, {"tma": False}, "sm_90a", "multiples of 16 bytes"),
        ({}, {"k": 0}, "sm_90a", "no dims of size 0"),
        ({}, {"half_sums": True}, "sm_90a", "sum in FP32"),
        ({"stages": 0}, {}, "sm_90a", "must be positive"),
        ({"cluster": 0, "split_k": True}, {}, "sm_90a", "must be positive"),
        ({"tile_n": 64, "ping_pong": True, "share_k": True}, {}, "sm_90a", "ping_pong or share_k"),
        ({"cluster": 3}, {}, "sm_90a", "a cluster of 1, 2 or 4 blocks"),
        ({"split_k": True}, {}, "sm_90a", "split_k needs a cluster"),
        ({"splits": 0}, {}, "sm_90a", "splits must be positive"),
        ({"splits": 2}, {"batch": 2}, "sm_90a", "splits are of one 16-bit product"),
        ({"splits": 4}, {"k": 4096 + 64}, "sm_90a", "is no 4 parts of whole stages"),
        ({"splits": 64}, {"m": 16384}, "sm_90a", "take more memory than pays"),
        ({"splits": 2}, {"tma": False}, "sm_90a", "multiples of 16 bytes"),
        ({"cluster": 2, "split_k": True, "stages": 2}, {}, "sm_90a", "fill more than the stages"),
        ({"share_k": True}, _LOGITS, "sm_90a", "of whole sums, without share_k"),
        ({"turned": True}, _LOGITS, "sm_90a", "turned products are not logits"),
        ({"tile_m": 256, "tile_n": 128, "cluster": 2}, _LOGITS, "sm_90a", "have no clusters"),
        ({"tile_m": 64}, {}, "sm_90a", "multiples of 128 x 8; got 64 x 256"),
        ({"tile_n": 100}, {}, "sm_90a", "multiples of 128 x 8; got 128 x 100"),
        ({"tile_n": 96}, {"layout_b": OUTER}, "sm_90a", "multiples of 128 x 64; got 128 x 96"),
        ({"tile_n": 40}, {}, "sm_90a", "multiples of 128 x 64; got 128 x 40"),
        ({"ping_pong": True}, {}, "sm_90a", "do not hold 128 x 256 sums"),
        (
            {"tile_n": 192},
            {**OF_FP8, "block_scales": True},
            "sm_90a",
            "shares columns with whole blocks",
        ),
        ({"tile_n": 192}, {**OF_FP8, "plain": False}, "sm_90a", "shares columns with whole blocks"),
        ({"tile_n": 176}, {**OF_FP8, "block_scales": True}, "sm_90a", "got 128 x 176"),
        ({"tile_n": 224}, OF_FP8, "sm_90a", "got 128 x 224"),
        ({"tile_n": 168}, OF_FP8, "sm_90a", "got 128 x 168"),
        ({"warpgroups": 3, "tile_m": 192, "tile_n": 128}, {}, "sm_90a", "three warpgroups share"),
        ({"warpgroups": 3, "tile_m": 192}, OF_FP8, "sm_90a", "three warpgroups share"),
        ({"warpgroups": 3, "tile_n": 128}, OF_FP8, "sm_90a", "multiples of"),
        ({"tile_m": 256}, OF_FP8, "sm_90a", "do not hold 256 x 256 sums"),
        ({"tile_n": 320}, OF_FP8, "sm_90a", "do not hold 128 x 320 sums"),
        ({"share_k": True, "tile_n": 64}, {}, "sm_90a", "tiles of at most 64 x 64"),
        ({}, OF_MIXED, "sm_90a", "64 columns per warpgroup"),
        ({"tile_n": 128, "ping_pong": True}, OF_MIXED, "sm_90a", "no ping_pong"),
        ({"stages": 1}, {}, "sm_90a", "at least 2"),
        ({"stages": 5}, {}, "sm_90a", "bytes of shared memory are more than"),
    ],
)
def test_refusals(config, changes, arch, said):
    reason = gemm.refusal(replace(CONFIG, **config), task(**changes), arch)
    assert reason is not None and said in reason
