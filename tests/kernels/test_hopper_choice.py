"""Which configs Hopper's products are given, and which are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemm_hopper_problems import CHOSEN, OF_FP8, OF_MIXED, task
from hypothesis import given
from hypothesis import strategies as st

from cupykern import dtypes
from cupykern.gemm import gemm, product, sm90_heuristic, sm90_plan
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.product import K_MAJOR, MN_MAJOR, STRIDED
from cupykern.gemm.sm90_config import Sm90Config
from cupykern.gemm.sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig
from cupykern.gemm.sm90_logits_config import Sm90LogitsConfig
from cupykern.gemm.sm90_policies import Cooperative, Multicast, PingPong, SlicedK, SplitK
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.problems.products import MatmulProblem, task_of
from cupykern.targets.limits import device

CONFIG, *_ = CONFIGS = CHOSEN
OF_BLOCKS = OF_MIXED | {"block_scales": True}


@pytest.mark.parametrize("layout", [K_MAJOR, MN_MAJOR])
def test_hopper_is_chosen_where_it_pays(layout):
    large = task(layout_a=layout, layout_b=layout)
    assert isinstance(gemm.choose_config(large, "sm_90a"), Sm90GemmConfig)
    for arch in ("sm_80", "sm_120a", "gfx942", "host"):
        assert not isinstance(gemm.choose_config(large, arch), sm90_heuristic.CONFIGS)
    rare = tuple(tile.config for tile in sm90_heuristic.table("16-bit, a MN-major"))
    known = CONFIGS[1:] if layout == K_MAJOR else rare
    epilogues = "tma_store", "activated", "residual", "floats", "general"
    either = [gemm.configs(replace(large, epilogue=x), "host") for x in epilogues]
    assert set(known) < {config for configs in either for config in configs}
    assert not isinstance(gemm.choose_config(task(m=16), "sm_90a"), sm90_heuristic.CONFIGS)


@pytest.mark.parametrize(
    ("changes", "tile", "sliced_k"),
    [
        ({"b": dtypes.float8_e4m3fn}, (256, 128), False),
        ({"b": dtypes.int8, "m": 256, "layout_b": MN_MAJOR}, (128, 128), False),
        ({"b": dtypes.float8_e4m3fn, "m": 64, "n": 8192}, (64, 64), True),
        ({"b": dtypes.int8, "m": 64, "n": 8192}, (64, 64), True),
        ({"b": dtypes.float8_e4m3fn, "layout_b": MN_MAJOR, "m": 33, "n": 8192}, (64, 64), True),
        ({"b": dtypes.float8_e4m3fn, "layout_b": MN_MAJOR, "m": 32, "n": 8192}, (32, 64), True),
        ({"b": dtypes.int8, "m": 17, "n": 28672}, (32, 64), True),
        ({"b": dtypes.int8, "m": 64, "n": 28672}, (64, 128), False),
        ({"b": dtypes.int8, "m": 64, "n": 8192, "k": 2048}, (64, 64), False),
        ({"b": product.FP4, "m": 64, "n": 8192}, (64, 128), False),
        ({"a": product.FP4, "b": product.FP4, "m": 64, "n": 8192}, (64, 128), False),
        (OF_BLOCKS | {"m": 64}, (32, 64), True),
        (OF_BLOCKS | {"m": 64, "n": 6144}, (64, 64), True),
        (OF_BLOCKS | {"m": 64, "n": 28672}, (64, 128), False),
        (OF_BLOCKS | {"m": 512}, (128, 128), False),
        (OF_BLOCKS, (176, 128), False),
        (OF_BLOCKS | {"b": dtypes.int8, "m": 64}, (64, 64), True),
        ({"a": dtypes.int8, "b": dtypes.int8, "m": 64, "n": 8192}, (64, 64), True),
        ({"a": dtypes.int8, "b": dtypes.int8, "m": 256}, (128, 64), False),
        ({"a": dtypes.float8_e4m3fn, "b": dtypes.float8_e4m3fn}, (128, 128), False),
        (
            {"a": dtypes.float8_e4m3fn, "b": dtypes.float8_e4m3fn, "m": 16, "n": 8192, "batch": 2},
            (32, 128),
            False,
        ),
    ],
)
def test_tiles_of_other_dtypes(changes, tile, sliced_k):
    config = first_launch(gemm.choose_config(task(**changes), "sm_90a", 132))
    assert (config.tile_m, config.tile_n) == tile
    for blocks in (132, 114):  # the order of accumulation is the same
        config = gemm.choose_config(task(**changes), "sm_90a", blocks)
        _, _, sliced, _ = order_of_k(config)
        assert sliced == sliced_k


@given(
    m=st.integers(1, 4096),
    n=st.integers(16, 20000),
    k=st.integers(256, 20000),
    b=st.sampled_from([dtypes.float16, dtypes.float8_e4m3fn, dtypes.int8, product.FP4]),
    kernel=st.sampled_from(["gemm", "dual_gemm"]),
    blocks=st.booleans(),
)
def test_gpus_of_other_sizes_have_the_same_sums(m, n, k, b, kernel, blocks):
    """k is split in the same way, whatever number of multiprocessors decides about the tiles."""
    of_call = task(
        m=m, n=n, k=k, b=b, kernel=kernel, block_scales=blocks and b == dtypes.float8_e4m3fn
    )
    devices = [device("sm_90a", blocks) for blocks in (132, 114, 78, 20)]
    found = [sm90_heuristic.configs(of_call, of)[:1] for of in devices]
    assert len({tuple(map(order_of_k, first)) for first in found}) == 1


def first_launch(config):
    """The config of the launch that multiplies."""
    return config.config if isinstance(config, SplitKWorkspace) else config


def order_of_k(config) -> tuple:
    """All of a config that decides in which order products are added."""
    splits = config.splits if isinstance(config, SplitKWorkspace) else 1
    inner = config if isinstance(config, Sm90Config) else config.config
    sliced = isinstance(inner.schedule, SlicedK)
    by_stages = sliced or inner.split_k > 1  # a stage decides who adds it
    return splits, inner.split_k, sliced, inner.tile_k if by_stages else 0


@pytest.mark.parametrize(
    ("m", "n", "blocks", "tile"),
    [
        (4096, 4096, 132, (128, 256)),  # 4 rounds of 132 tiles instead of 6 or 8 smaller ones
        (300, 100352, 132, (152, 128)),  # swap-AB: 304 rows instead of 384
        (4096, 14336, 132, (128, 176)),  # many rounds: their ends are hidden
        (1024, 2048, 132, (128, 128)),
        (768, 4096, 132, (192, 128)),  # one round
        (3072, 3072, 132, (192, 128)),
        (5120, 5120, 132, (160, 128)),
        (4096, 4096, 114, (128, 128)),
        (320, 4096, 132, (80, 128)),  # one round of 128 tiles, no row that is not there
        (384, 4096, 132, (96, 128)),
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
        (256, 4096, 7168, 128),  # swap-AB: 64 rows of a
    ],
)
def test_columns_of_fp8(m, n, k, cols):
    sizes = task(m=m, n=n, k=k, **OF_FP8)
    config = gemm.choose_config(sizes, "sm_90a", 132)
    assert config.tile_n == cols
    assert config.in_halves(sizes) == (cols > 128)
    general = replace(sizes, epilogue="general")
    for other in (general, replace(general, block_scales=True)):
        assert first_launch(gemm.choose_config(other, "sm_90a", 132)).tile_n == 128


@pytest.mark.parametrize(
    ("tile", "n", "tiles"),
    [
        ((128, 256), 8192, 16),
        ((128, 128), 8192, 8),
        ((128, 64), 8192, 4),
        ((64, 128), 8192, 16),
        ((176, 128), 8192, 6),  # even, so that a pair of blocks shares columns
        ((120, 128), 512, 2),  # few columns: all are in a wave anyway
        ((256, 64), 64, 2),
    ],
)
def test_a_group_has_as_many_rows_as_eight_tiles_have_columns(tile, n, tiles):
    assert sm90_plan.tiles_per_group(tile, task(n=n)) == tiles


def test_clusters_for_rows_that_begin_anywhere():
    """L2 reads two lines for one of theirs, and blocks that share columns ask it for fewer."""
    for m in (1024, 4096):
        config = gemm.choose_config(task(m=m, k=4104, aligned_128=False), "sm_90a", 132)
        assert config == Sm90GemmConfig(128, 256, 64, 4, cluster=Multicast(2))
    for k, aligned in ((64, True), (72, False)):
        assert task_of(MatmulProblem(64, 64, k, layout_b="F")).aligned_128 == aligned


def test_tiles_where_columns_are_neighbours():
    for m, tile in ((4096, (128, 256)), (384, (96, 128)), (256, (64, 128))):
        config = gemm.choose_config(task(m=m, layout_b=MN_MAJOR), "sm_90a", 132)
        assert (config.tile_m, config.tile_n) == tile
        assert isinstance(config.schedule, PingPong) == (m < 4096)


def test_residuals_take_the_tiles_of_results_stored_by_tma():
    """But for tiles in halves, and ping-pong's largest with swap_ab: no registers are left."""
    for changes in ({}, {"m": 300}, OF_FP8):
        plain = task(**changes)
        tiles, added = (
            gemm.configs(plain, "sm_90a"),
            gemm.configs(replace(plain, epilogue="residual"), "sm_90a"),
        )
        assert {*added} <= {*tiles}
        for config in {*tiles} - {*added}:
            assert isinstance(config, Sm90Config)
            assert config.in_halves(plain) or (config.swap_ab and config.tile_m > 184)


def test_ping_pong_for_slow_epilogues():
    """It hides them beside products: of activations, and those that are not plain."""
    assert isinstance(
        gemm.choose_config(task(slow_activation=True), "sm_90a", 132).schedule, PingPong
    )
    for m, tile in ((4096, (128, 128)), (256, (128, 64)), (64, (64, 64))):
        general = task(m=m, slow_activation=True, epilogue="general")
        config = first_launch(gemm.choose_config(general, "sm_90a", 132))
        assert (config.tile_m, config.tile_n) == tile
        assert isinstance(config.schedule, PingPong) == (m == 4096)


@pytest.mark.parametrize(
    ("changes", "tile", "splits"),
    [
        ({"m": 512, "n": 512, "k": 16384}, (128, 128), 8),
        ({"m": 512, "n": 512, "k": 16384, "layout_b": MN_MAJOR}, (128, 128), 8),
        ({"m": 1024, "n": 1024, "k": 32768}, (128, 128), 2),
        ({"m": 64, "n": 1024, "k": 4096}, (64, 64), 1),
        ({"m": 512, "n": 512, "k": 16384, "layout_a": MN_MAJOR}, (128, 256), 16),
        (
            {"m": 512, "n": 512, "k": 16384, "layout_a": MN_MAJOR, "layout_b": MN_MAJOR},
            (128, 256),
            16,
        ),
        ({"m": 24, "n": 512, "k": 8192, "layout_b": MN_MAJOR}, (64, 64), 16),
        ({"m": 512, "n": 512, "k": 16384 + 64}, (64, 128), 4),  # the last split has fewer stages
        ({"m": 512, "n": 512, "k": 16384, "batch": 2}, None, 1),
        ({"m": 512, "n": 512, "k": 1024}, None, 1),  # the second launch takes longer
        ({"m": 4096, "n": 4096, "k": 16384}, None, 1),
    ],
)
def test_few_tiles_and_long_k_are_split(changes, tile, splits):
    for blocks in (132, 78):  # the order of accumulation is the same
        config = gemm.choose_config(task(**changes), "sm_90a", blocks)
        if isinstance(config, SplitKWorkspace):
            assert config.splits == splits
            assert tile == (config.config.tile_m, config.config.tile_n)
        else:
            assert splits == 1 and tile in (None, (config.tile_m, config.tile_n))


_LOGITS = {"b": dtypes.int8, "kernel": "dequant_softmax"}


FP8_CONFIG = Sm90Fp8GemmConfig(128, 256, 4)
MIXED_CONFIG = Sm90MixedGemmConfig(256, 128, 64, 4)
LOGITS_CONFIG = Sm90LogitsConfig(256, 128, 64, 4)


@pytest.mark.parametrize(
    ("config", "changes", "arch", "said"),
    [
        (CONFIG, {}, "sm_80", "sm_80 has neither TMA nor wgmma"),
        (CONFIG, {"a": dtypes.float32, "b": dtypes.float32}, "sm_90a", "16-bit or int8 operands"),
        (CONFIG, OF_FP8, "sm_90a", "16-bit or int8 operands"),
        (CONFIG, OF_MIXED, "sm_90a", "16-bit or int8 operands"),
        (CONFIG, {"kernel": "dual_gemm"}, "sm_90a", "Sm90GemmConfig is for gemm; got dual_gemm"),
        (FP8_CONFIG, {}, "sm_90a", "two FP8 operands"),
        (MIXED_CONFIG, {}, "sm_90a", "a 16-bit a and an 8-bit or NVFP4 b"),
        (CONFIG, {"block_scales": True}, "sm_90a", "block scales of 8-bit weights"),
        (
            MIXED_CONFIG, OF_BLOCKS, "sm_90a", "do not hold 256 x 128 accumulators"
        ),
        (
            replace(MIXED_CONFIG, tile_m=64), OF_BLOCKS, "sm_90a",
            "a stage of the mixed-input mainloop is a block of scales; got 64"
        ),
        (CONFIG, {"layout_a": STRIDED, "layout_b": STRIDED}, "sm_90a", "multiples of 16 bytes"),
        (CONFIG, {"tma": False}, "sm_90a", "multiples of 16 bytes"),
        (CONFIG, {"k": 0}, "sm_90a", "no dims of size 0"),
        (CONFIG, {"m": 2**31 - 1}, "sm_90a", "too large for TMA's coordinates"),
        (CONFIG, {"m": 2**24, "n": 2**24, "batch": 2**8}, "sm_90a", "too many tiles"),
        (CONFIG, {"fp16_accumulate": True}, "sm_90a", "accumulate in FP32"),
        (replace(CONFIG, stages=0), {}, "sm_90a", "must be positive"),
        (replace(CONFIG, cluster=SplitK(0)), {}, "sm_90a", "must be positive"),
        (replace(CONFIG, tile_k=96), {}, "sm_90a", "tile_k must be a multiple of 64; got 96"),
        (replace(CONFIG, cluster=Multicast(3)), {}, "sm_90a", "a cluster of 1, 2 or 4 blocks"),
        (replace(CONFIG, cluster=SplitK(1)), {}, "sm_90a", "SplitK needs a cluster"),
        (
            replace(CONFIG, tile_n=128, schedule=PingPong(), cluster=SplitK(2)), {}, "sm_90a",
            "SplitK needs"
        ),
        (SplitKWorkspace(CONFIG, 0), {}, "sm_90a", "splits must be positive"),
        (SplitKWorkspace(CONFIG, 2), {"batch": 2}, "sm_90a", "is of one product"),
        (SplitKWorkspace(CONFIG, 5), {"k": 6 * 64}, "sm_90a", "the last of 5 splits of k = 384"),
        (SplitKWorkspace(CONFIG, 2), {"k": 0}, "sm_90a", "a positive k and tile_k; got k = 0"),
        (
            SplitKWorkspace(replace(CONFIG, tile_n=128, cluster=SplitK(2)), 2), {}, "sm_90a",
            "by a workspace or by the blocks of a cluster"
        ),
        (SplitKWorkspace(CONFIG, 64), {"m": 16384}, "sm_90a", "need too large a workspace"),
        (SplitKWorkspace(CONFIG, 2), {"tma": False}, "sm_90a", "multiples of 16 bytes"),
        (replace(CONFIG, cluster=SplitK(2), stages=2), {}, "sm_90a", "fill more than the stages"),
        (LOGITS_CONFIG, {}, "sm_90a", "Sm90LogitsConfig is for dequant_softmax"),
        (replace(LOGITS_CONFIG, tile_n=64), _LOGITS, "sm_90a", "multiples of 64 x 128"),
        (replace(CONFIG, tile_m=64), {}, "sm_90a", "multiples of 128 x 8; got 64 x 256"),
        (replace(CONFIG, tile_n=100), {}, "sm_90a", "multiples of 128 x 8; got 128 x 100"),
        (
            replace(CONFIG, tile_n=96), {"layout_b": MN_MAJOR}, "sm_90a",
            "multiples of 128 x 64; got 128 x 96"
        ),
        (replace(CONFIG, tile_n=40), {}, "sm_90a", "multiples of 128 x 64; got 128 x 40"),
        (replace(CONFIG, schedule=PingPong()), {}, "sm_90a", "do not hold 128 x 256 accumulators"),
        (
            replace(FP8_CONFIG, tile_n=192), {**OF_FP8, "block_scales": True}, "sm_90a",
            "one block of 128 columns; got 192"
        ),
        (
            replace(FP8_CONFIG, tile_n=192), {**OF_FP8, "epilogue": "general"}, "sm_90a",
            "multiples of 128 x 64|whole blocks"
        ),
        (
            replace(FP8_CONFIG, tile_n=176), {**OF_FP8, "block_scales": True}, "sm_90a",
            "got 128 x 176"
        ),
        (replace(FP8_CONFIG, tile_n=224), OF_FP8, "sm_90a", "blocks of 128 columns"),
        (replace(FP8_CONFIG, tile_n=168), OF_FP8, "sm_90a", "got 128 x 168"),
        (replace(CONFIG, tile_m=192, schedule=Cooperative(3)), {}, "sm_90a", "warpgroups 1 or 2"),
        (
            replace(FP8_CONFIG, tile_m=192, schedule=Cooperative(3)), OF_FP8, "sm_90a",
            "at most 128 columns"
        ),
        (
            replace(FP8_CONFIG, tile_n=128, schedule=Cooperative(3)), OF_FP8, "sm_90a",
            "multiples of 192 x 16"
        ),
        (replace(FP8_CONFIG, schedule=Cooperative(4)), OF_FP8, "sm_90a", "warpgroups 1 or 2 or 3"),
        (replace(FP8_CONFIG, tile_m=256), OF_FP8, "sm_90a", "do not hold 256 x 256 accumulators"),
        (
            replace(FP8_CONFIG, tile_m=256, tile_n=128), OF_FP8, "sm_90a",
            "64 rows of accumulators a warpgroup"
        ),
        (replace(FP8_CONFIG, tile_n=320), OF_FP8, "sm_90a", "do not hold 128 x 320 accumulators"),
        (replace(CONFIG, schedule=SlicedK(), tile_n=64), {}, "sm_90a", "tiles of at most 64 x 64"),
        (replace(MIXED_CONFIG, tile_m=64, tile_n=256), OF_MIXED, "sm_90a", "64 columns of b per"),
        (replace(CONFIG, stages=1), {}, "sm_90a", "at least 2"),
        (replace(CONFIG, stages=5), {}, "sm_90a", "bytes of shared memory are more than"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_with_the_reason(config, changes, arch, said):
    reason = gemm.refusal(config, task(**changes), arch)
    assert reason is not None and any(x in reason for x in said.split("|"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(CONFIG, stages=True), "GemmConfig's stages must be an integer; got True"),
        (lambda: replace(CONFIG, swap_ab=1), "Config's swap_ab must be a bool; got 1"),
        (
            lambda: replace(CONFIG, schedule="ping-pong"),
            "Config's schedule must be a Cooperative, PingPong or SlicedK; got 'ping-pong'",
        ),
        (lambda: Multicast(2.0), "Multicast's size must be an integer; got 2.0"),
        (
            lambda: replace(FP8_CONFIG, schedule=PingPong()),
            "Sm90Fp8GemmConfig's schedule must be a Cooperative or SlicedK",
        ),
        (
            lambda: DecodeFirst(FP8_CONFIG),
            "DecodeFirst's config must be a Sm90GemmConfig or Sm90DualGemmConfig",
        ),
    ],
)
def test_fields_of_other_types(make, said):
    with pytest.raises(TypeError, match=said):
        make()
