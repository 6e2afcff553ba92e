"""Products of few rows: the portable main loop with stages of each warp's own, and tiles of 8 rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_matmul import MATMUL, SCALED, compare, padded, random, to_numpy

import cupykern
from cupykern import check, dtypes
from cupykern.gemm import gemm
from cupykern.gemm.gemm import GemmConfig
from cupykern.gemm.matmul import MatmulProblem
from cupykern.gemm.product import INNER, OUTER, STRIDED, GemmTask
from cupykern.gemm.scaled_problem import ScaledProblem
from cupykern.op import as_tuple
from cupykern.targets import host

E4M3, NVFP4 = "float8_e4m3fn", "float4_e2m1fn"
EIGHT = GemmConfig(8, 32, 256, 1, 1, 4, stages=3, own_stages=True)
SIXTEEN = replace(EIGHT, tile_m=16)
PAIRS = (
    *(("float16", E4M3, "F"), ("float16", E4M3, "C"), ("bfloat16", None, "F"), ("bfloat16", None, "C")),
    *((E4M3, E4M3, "F"), ("int8", None, "F"), ("bfloat16", "int8", "F"), ("float16", NVFP4, "F")),
)  # fmt: skip


def aligned(size: int, layout: str) -> int:
    """Rows of b at multiples of 16 bytes whatever its dtype, where they lie along n."""
    return -(-size // 16) * 16 if layout == "C" else size


def holds(op, problem, config, target, seed: int = 1) -> check.Comparison:
    call = op.inputs(problem, seed, target.xp)
    outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
    references = op.reference(*call.args, **call.kwargs)
    return check.compare(
        outputs, references, op.bound(*call.args, **call.kwargs, reference=references)
    )


def check_problem_of(m, n, k, dtype, dtype_b, layout_b, config, scales="none") -> None:
    """Raises AssertionError."""
    problem = MatmulProblem(m, n, k, dtype, dtype_b, layout_b=layout_b, kind="same_sign")
    comparison = holds(SCALED, ScaledProblem(problem, scales), config, host.current())
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_any_problem(target, data, seed):
    """Tiles with a row or more of their own, of which few exist; k that is shared unevenly or ends
    within a vector; epilogues; scales of rows and blocks; batches."""
    dtype, dtype_b, layout_b = data.draw(st.sampled_from(PAIRS))
    scaled = data.draw(st.sampled_from(("none", "rows"))) if dtype_b else "none"
    m, n = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 70))
    k = 16 * data.draw(st.sampled_from((1, 3, 4, 15, 16, 17, 33, 64, 67)))
    problem = MatmulProblem(
        *(m, aligned(n, layout_b), k, dtype, dtype_b),
        batch_a=data.draw(st.sampled_from(((), (), (2,)))),
        layout_b=layout_b,
        bias=data.draw(st.sampled_from((None, (m, 1)))),
        activation=data.draw(st.sampled_from((None, "silu"))),
        kind=data.draw(st.sampled_from(("normal", "same_sign"))),
    )
    if dtype == E4M3 and data.draw(st.booleans()):
        scaled = "blocks"
    op = SCALED if dtype_b else MATMUL
    config = data.draw(st.sampled_from((EIGHT, SIXTEEN)))
    config = replace(config, splits=data.draw(st.sampled_from((1, 1 + (k > 128)))))
    comparison = holds(
        op, ScaledProblem(problem, scaled) if dtype_b else problem, config, target, seed
    )
    assert comparison.ok, f"{problem!r} {scaled} {config}: {comparison}"


@pytest.mark.parametrize("config", [EIGHT, SIXTEEN], ids=["8", "16"])
def test_what_lies_behind_k_is_not_read(target, config):
    """Rows at multiples of 16 bytes with NaN behind each."""
    a = padded(random(target, (5, 333), "bfloat16", 1), target)
    b = padded(random(target, (40, 333), "bfloat16", 2), target).T
    assert compare(MATMUL, a, b, outputs=cupykern.matmul(a, b, config=config)).ok


@pytest.mark.parametrize("config", [EIGHT, SIXTEEN], ids=["8", "16"])
def test_rows_do_not_touch_each_other(target, config):
    """NaN stays in its row and column, and a row is the same bit for bit whatever others there are."""
    a, b = random(target, (11, 320), "bfloat16", 1), random(target, (40, 320), "bfloat16", 2).T
    whole = to_numpy(cupykern.matmul(a, b, config=config))
    for first, last in ((0, 1), (3, 9), (8, 11)):
        part = to_numpy(cupykern.matmul(a[first:last], b, config=config))
        np.testing.assert_array_equal(part, whole[first:last])
    a[4], b[7, 9] = np.nan, np.inf
    bad = np.zeros((11, 40), bool)
    bad[4], bad[:, 9] = True, True
    seen = to_numpy(cupykern.matmul(a, b, config=config))
    np.testing.assert_array_equal(np.isfinite(seen), ~bad)
    np.testing.assert_array_equal(seen[~bad], whole[~bad])


def test_the_order_of_warps_does_not_show():
    """Warps that never meet before the end: the same bits under every schedule."""
    a, b = (
        np.random.default_rng(i).standard_normal(shape).astype(np.float16)
        for i, shape in enumerate(((3, 1040), (40, 1040)))
    )
    with host.use():
        first = cupykern.matmul(a, b.T, out_dtype="float32", config=EIGHT)
    for schedule in ("lifo", "sticky:1", "sticky:5"):
        with host.use(schedule=schedule):
            again = cupykern.matmul(a, b.T, out_dtype="float32", config=EIGHT)
        np.testing.assert_array_equal(again, first)


HALF = dtypes.float16
TASK = GemmTask(1, 5, 64, 1024, HALF, HALF, INNER, INNER)


@pytest.mark.parametrize(
    ("change", "of_task", "says"),
    [
        ({"warps_n": 2}, {}, "even number of warps that all share k"),
        ({"warps_k": 1}, {}, "even number of warps that all share k"),
        ({"own_stages": False}, {}, "do not share 8 x 32"),
        ({}, {"layout_a": OUTER}, "do not share 8 x 32"),
        ({}, {"layout_a": STRIDED, "layout_b": STRIDED}, "do not share 8 x 32"),
        ({"tile_k": 192}, {}, "a power of two"),
        ({"tile_k": 512}, {"b": dtypes.int8, "block_scales": True}, "no multiple of a stage's 256"),
        ({"stages": 30}, {}, "bytes of shared memory"),
    ],
)
def test_configs_that_do_not_fit(change, of_task, says):
    reason = gemm.refusal(replace(EIGHT, **change), replace(TASK, **of_task), "sm_90a")
    assert reason is not None and says in reason
    assert gemm.refusal(EIGHT, TASK, "sm_90a") is None
