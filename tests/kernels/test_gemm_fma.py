"""FP32 products by multiply-adds (kernels_cu/gemm_fma.cu)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gemm_fma_checks import CONFIGS, TILE, check_far_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from products import MATMUL, compare, to_numpy

import cupykern
from cupykern import dtypes, inputs
from cupykern.gemm import fma_heuristic
from cupykern.gemm.fma_config import FmaGemmConfig
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.product import K_MAJOR, MN_MAJOR, STRIDED
from cupykern.ops.problems.products import MatmulProblem
from cupykern.targets.limits import device

F32 = dtypes.float32


def task_of(m, n, k, batch=1, layout_a=K_MAJOR, layout_b=MN_MAJOR, **changes):
    return replace(GemmTask(batch, m, n, k, F32, F32, layout_a, layout_b), **changes)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_problem_is_within_the_bound(target, data, seed):
    """Every layout, aligned or not, tails, batches, epilogues and splits."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    m, n, k = (data.draw(st.integers(1, top)) for top in (150, 150, 200))
    if pick(True, False):
        m, n = -(-m // 4) * 4, -(-n // 4) * 4
    config, batch = pick(*CONFIGS), pick((), (), (3,))
    splits = pick(1, 2, 3) if not batch else 1
    if (splits - 1) * config.k_per_split(k) < k and splits > 1:
        split = replace(config, splits=splits)
        config = split if split.refusal(task_of(m, n, k), device("host")) is None else config
    problem = MatmulProblem(
        *(m, n, k, "float32", None, batch, ()),
        layout_a=pick(*inputs.LAYOUTS),
        layout_b=pick(*inputs.LAYOUTS),
        alpha=pick(1.0, -0.3),
        bias=pick(None, (n,), (m, 1)),
        residual=pick(None, (m, n)),
        activation=pick(None, "relu", "gelu", "silu"),
        out_dtype=pick(None, "float16", "bfloat16"),
        kind=pick("normal", "same_sign", "exact", "special", "subnormal"),
    )
    call = MATMUL.inputs(problem, seed, target.xp)
    comparison = compare(MATMUL, *call.args, **call.kwargs, config=config)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


def test_rows_past_the_end_are_not_read():
    check_far_rows()


def test_all_tiles_add_in_the_same_order(target):
    """Bit for bit, also split."""
    rng = np.random.default_rng(3)
    a, b = (target.xp.asarray(rng.standard_normal(s, np.float32)) for s in ((70, 300), (300, 52)))
    for splits in (1, 3):
        results = [
            to_numpy(cupykern.matmul(a, b, config=replace(config, splits=splits)))
            for config in CONFIGS
        ]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    ("config", "task", "reason"),
    [
        (TILE, task_of(8, 8, 8, a=dtypes.float16, b=dtypes.float16), "FP32 operands"),
        (TILE, task_of(8, 8, 8, kernel="dual_gemm"), "one product"),
        (replace(TILE, stages=1), task_of(8, 8, 8), "stages at least 2"),
        (replace(TILE, tile_m=96), task_of(8, 8, 8), "powers of two"),
        (replace(TILE, tile_k=4), task_of(8, 8, 8), "tile_k must be"),
        (replace(TILE, tile_m=16), task_of(8, 8, 8), "of the tile's parts"),
        (FmaGemmConfig(256, 256, 8, 4, 4), task_of(8, 8, 8), "more than 1024"),
        (replace(TILE, splits=2), task_of(8, 8, 64, batch=2), "not of a batch"),
        (replace(TILE, splits=3), task_of(8, 8, 64), "would be empty"),
        (replace(TILE, stages=200), task_of(8, 8, 64), "shared memory"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config, task, reason):
    assert reason in config.refusal(task, device("sm_90a"))


def test_fp32_is_not_for_tensor_cores():
    refusal = GemmConfig(64, 64, 32, 2, 2).refusal(task_of(64, 64, 64), device("sm_90a"))
    assert "up to 16 bits" in refusal


@pytest.mark.parametrize("layout_a", [K_MAJOR, MN_MAJOR, STRIDED])
@pytest.mark.parametrize("layout_b", [K_MAJOR, MN_MAJOR, STRIDED])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "gfx942", "gfx1201", "host"])
def test_every_task_has_a_config_on_every_architecture(arch, layout_a, layout_b):
    for sizes in ((1, 1, 0), (1, 4096, 4096), (4096, 1, 4096), (4096,) * 3, (333, 1111, 2222)):
        task = task_of(*sizes, layout_a=layout_a, layout_b=layout_b)
        assert fma_heuristic.configs(task, device(arch))


def test_the_number_of_sms_does_not_change_the_order_of_accumulation():
    for sizes in ((128, 4096, 4096), (512, 512, 4096), (16, 300, 8000)):
        task = task_of(*sizes)
        splits = {
            fma_heuristic.configs(task, device("sm_90a", sms))[0].splits for sms in (78, 114, 132)
        }
        assert len(splits) == 1
