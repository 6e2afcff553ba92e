"""Hopper's dual GEMM of 16-bit a and 8-bit weights: any problem, schedules, races, spills."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from hopper_kernels import SCHEDULES
from hypothesis import given, settings
from hypothesis import strategies as st
from products import DUAL, array, compare

from cupykern import check, dtypes
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.sm90_dual_config import Sm90MixedDualGemmConfig
from cupykern.gemm.sm90_policies import Cooperative
from cupykern.ops.problems.dual_gemm import GATES, RESULTS, DualProblem, task_of
from cupykern.targets import UnavailableError, host
from cupykern.tools import gate

E4M3 = "float8_e4m3fn"
# One to four warpgroups; boxes of 16 and of 32 rows; a weight row of a stage of 64 and 128 bytes.
CONFIGS = (
    Sm90MixedDualGemmConfig(64, 128, 128, 3),
    Sm90MixedDualGemmConfig(256, 128, 64, 2),
    Sm90MixedDualGemmConfig(16, 64, 128, 4, Cooperative(1)),
    Sm90MixedDualGemmConfig(48, 192, 64, 3, Cooperative(3)),
    Sm90MixedDualGemmConfig(32, 256, 128, 2, Cooperative(4)),
)
# Those with block scales: a stage is a block.
BLOCK_CONFIGS = (
    CONFIGS[0],
    CONFIGS[2],
    Sm90MixedDualGemmConfig(144, 128, 128, 2),
    Sm90MixedDualGemmConfig(48, 192, 128, 3, Cooperative(3)),
    CONFIGS[4],
)


def compute(target, problem: DualProblem, config: Sm90MixedDualGemmConfig, seed: int = 1):
    """The outputs, within the bound; nothing is written beyond the first."""
    call = DUAL.inputs(problem, seed, target.xp)
    references = DUAL.reference(*call.args, **call.kwargs)
    bounds = DUAL.bound(*call.args, **call.kwargs, reference=references)
    out = check.GuardedArray(
        target.xp, references[0].shape, dtypes.NAMES[problem.out_dtype or problem.dtype]
    )
    y = DUAL.run(*call.args, **call.kwargs, config=config, out=out.array)
    y = y if isinstance(y, tuple) else (y,)
    comparison = check.compare(y, references, bounds)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"
    out.check()
    return y


@needs.hopper
@given(data=st.data(), seed=st.integers(0, 2**20))
@settings(max_examples=40)
def test_any_problem_is_within_the_bound(target, data, seed):
    """Rows of operands are multiples of 16 bytes; rows of the result, which TMA stores or threads,
    are not."""

    def pick(*options):
        return data.draw(st.sampled_from(options))

    problem = DualProblem(
        *(pick(1, 2, 15, 17, 33, 64, 70, 130), pick(1, 5, 16, 31, 32, 72, 75, 136, 200)),
        *(16 * pick(1, 4, 5, 8, 9, 25), pick("float16", "bfloat16"), pick(E4M3, "int8")),
        batch_a=pick((), (), (2,)),
        scales=pick("none", "numbers", "tensor", "rows", "rows", "blocks", "blocks of b"),
        policy=pick("fp32", "fp32", "hybrid", "fp16"),
        out_dtype=pick(None, "float16", "bfloat16", "float32"),
        kind=pick("unit", "same_sign", "exact"),
    )
    if problem.policy == "fp32":
        problem = replace(problem, epilogue=pick(None, None, GATES[0], GATES[2]))
    config = pick(*CONFIGS)
    if problem.scales.startswith("blocks"):
        problem = replace(problem, dtype_b=E4M3)  # there are no int8 by vectors
        config = pick(*BLOCK_CONFIGS)
    compute(target, problem, config, seed)


@needs.hopper
def test_formulas_with_several_results(target):
    for n in (72, 75):
        compute(target, DualProblem(70, n, 80, "float16", "int8", epilogue=RESULTS), CONFIGS[0])


@needs.hopper
@pytest.mark.thinned(2)
@pytest.mark.parametrize("n", [456, 300])  # stored by TMA, by threads
@pytest.mark.parametrize(
    ("config", "scales"),
    [*((c, "rows") for c in CONFIGS), *((c, "blocks of b") for c in BLOCK_CONFIGS)],
    ids=str,
)
def test_every_schedule_gives_the_same_bits(config, scales, n):
    """Tiles of a block follow one another: of few blocks."""
    problem = DualProblem(70, n, 400, "bfloat16", E4M3, scales=scales)
    bits = set()
    for schedule in SCHEDULES:
        with host.use(schedule=schedule) as target:
            (y,) = compute(target, problem, config)
            bits.add(y.tobytes())
    assert len(bits) == 1


@needs.hopper
def test_tiles_and_stages_change_no_bit(target):
    problem = DualProblem(70, 136, 400, "float16", "int8", scales="rows")
    found = {compute(target, problem, config)[0].tobytes() for config in CONFIGS}
    assert len(found) == 1
    problem = replace(problem, dtype_b=E4M3, scales="blocks")
    found = {compute(target, problem, config)[0].tobytes() for config in BLOCK_CONFIGS}
    assert len(found) == 1


@needs.hopper
def test_more_block_scales_than_lanes(target):
    """A lane has every 32nd scale along k."""
    compute(target, DualProblem(5, 40, 4240, "float16", E4M3, scales="blocks of b"), CONFIGS[2])


@needs.hopper
def test_batches_of_weights(target):
    """Each matrix K-major, with scales of its own."""
    rng = np.random.default_rng(1)
    a = array(target, rng.standard_normal((2, 1, 40, 144)), "float16")
    b1, b2 = (
        array(target, rng.integers(-127, 128, (3, 75, 144)), "int8").swapaxes(1, 2) for _ in "12"
    )
    scales = {
        name: array(target, rng.uniform(0.5, 1.5, (3, 1, 75)) / 900, "float32")
        for name in ("scale_b1", "scale_b2")
    }
    y = DUAL.run(a, b1, b2, **scales, config=CONFIGS[0])
    assert compare(DUAL, a, b1, b2, **scales, outputs=y).ok


@needs.hopper
def test_rows_apart_from_each_other(target):
    """Rows of the result are parts of longer ones, whose rest stays."""
    whole = target.xp.full((100, 256), 7, np.float16)
    a = target.xp.ones((70, 64), np.float16)
    b = target.xp.ones((96, 64), np.int8).T
    for first, last in ((64, 160), (65, 161), (64, 157)):  # for TMA: aligned; not; odd
        out = whole[:70, first:last]
        part = b[:, : last - first]
        DUAL.run(a, part, part, scale_b1=1.0, scale_b2=1 / 64, out=out, config=CONFIGS[0])
        assert bool((out == 64).all())
        out[...] = 7
        assert bool((whole == 7).all())


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (CONFIGS[0], {"dtype_b": "float16"}, "a 16-bit a and an 8-bit or NVFP4 b"),
        (CONFIGS[0], {"dtype": E4M3}, "a 16-bit a and an 8-bit or NVFP4 b"),
        (CONFIGS[0], {"k": 136}, "TMA takes K-major"),
        (CONFIGS[3], {"scales": "blocks"}, "a stage of the mixed-input mainloop is a block"),
        (replace(CONFIGS[0], tile_m=192), {"scales": "blocks"}, "registers of the warpgroups"),
        (replace(CONFIGS[0], tile_n=96), {}, "multiples of 16 x 128"),
        (replace(CONFIGS[0], tile_n=256), {}, "64 columns of b per warpgroup"),
        (replace(CONFIGS[0], tile_m=72), {}, "multiples of 16 x 128"),
        (replace(CONFIGS[0], schedule=Cooperative(5)), {}, "warpgroups 1 or 2 or 3 or 4"),
        (replace(CONFIGS[0], stages=8), {}, "bytes of shared memory"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_the_reason(config, change, says):
    task = task_of(replace(DualProblem(70, 75, 144, "float16", E4M3), **change))
    reason = gemm.refusal(config, task, "sm_90a")
    assert reason is not None and any(x in reason for x in says.split("|")), reason


def test_weights_whose_columns_are_contiguous_are_refused():
    task = task_of(DualProblem(70, 80, 144, "float16", E4M3, layout_b1="C", layout_b2="C"))
    assert not any(isinstance(c, sm90_heuristic.CONFIGS) for c in gemm.configs(task, "sm_90a"))
    assert gemm.refusal(CONFIGS[0], task, "sm_90a") is not None


@pytest.mark.compile
@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("pair", "scales"),
    [(("bfloat16", E4M3), "none"), (("float16", "int8"), "none"), (("bfloat16", E4M3), "blocks")],
    ids=str,
)
def test_a_formula_compiles_without_spills(pair, scales):
    """By the tiles with the most registers, which are compiled ahead; the gate has them without a
    formula."""
    task = task_of(DualProblem(512, 512, 512, *pair, scales=scales, epilogue=GATES[2]))
    for tile in sm90_heuristic.tiles_of(task):
        if tile.on_call:
            continue
        try:
            row = gate.compile_row(tile.config.variant(task), "sm_90a")
        except UnavailableError as missing:
            pytest.skip(str(missing))
        assert gate.failure(row) is None and row.local_bytes == 0, tile.config


@pytest.mark.parametrize(
    ("m", "n", "k", "tile"),
    [
        (24, 14336, 4096, (32, 256)),  # one wave of tiles
        (64, 14336, 4096, (64, 256)),
        (64, 8192, 3072, (64, 128)),
        (64, 18944, 3584, (64, 192)),
        (128, 14336, 4096, (128, 128)),
        (192, 14336, 4096, (192, 128)),
        (256, 18944, 3584, (128, 192)),
        (1024, 14336, 4096, (256, 128)),
    ],
)
def test_tiles_that_were_measured_to_be_the_fastest(m, n, k, tile):
    for pair in (("bfloat16", E4M3), ("float16", "int8")):
        config = gemm.choose_config(
            task_of(DualProblem(m, n, k, *pair, kind="bench")), "sm_90a", 132
        )
        assert (config.tile_m, config.tile_n) == tile


@pytest.mark.parametrize(
    ("m", "tile"),
    [(24, (32, 256)), (48, (48, 256)), (64, (64, 128)), (512, (128, 128)), (4096, (160, 128))],
)
def test_tiles_of_block_scales(m, tile):
    problem = DualProblem(m, 14336, 4096, "bfloat16", E4M3, scales="blocks of b", kind="bench")
    config = gemm.choose_config(task_of(problem), "sm_90a", 132)
    assert (config.tile_m, config.tile_n) == tile
