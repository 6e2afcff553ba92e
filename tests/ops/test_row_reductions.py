"""Formulas with row_max and row_sum: every mainloop, order, NaN, padding, sizes and errors."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from formula_result_checks import (
    HOPPER,
    HOPPER_GATES,
    check_schedules_agree,
    check_with,
    hoppers_gate_configs,
    with_nvfp4,
)
from hypothesis import given
from hypothesis import strategies as st
from products import DUAL, MATMUL, SCALED, compare, random, to_numpy

import cupykern
from cupykern import dtypes
from cupykern.expression.tree import REDUCTIONS
from cupykern.gemm import gemm
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.product import FP4, K_MAJOR
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.nvfp4 import random as random_nvfp4
from cupykern.op import Call
from cupykern.ops.problems import dual_gemm
from cupykern.ops.problems.dual_gemm import FLOAT32, DualProblem
from cupykern.ops.problems.products import NVFP4, PAIRS, ROWS, MatmulProblem, formula_of, task_of
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.reference.expression_rows import Terms, levels, reduce_rows, reduced
from cupykern.targets import UnavailableError, offline


def integers(target, shape, seed):
    """FP16 numbers whose sums of products FP32 has exactly."""
    x = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float16)
    return target.xp.asarray(x)


# --- mainloops -----------------------------------------------------------------------------------


@pytest.mark.thinned(5)
@pytest.mark.parametrize("m", [1, 35])
@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_pair_of_dtypes(target, dtype, dtype_b, m):
    check_with(
        target, MATMUL, MatmulProblem(m, 43, 72, dtype, dtype_b, (2,), layout_b="F", epilogue=ROWS)
    )


@pytest.mark.parametrize(
    ("dtype", "dtype_b"),
    [
        FLOAT32[0],
        ("float16", "float16"),
        ("bfloat16", "int8"),
        ("float8_e4m3fn",) * 2,
        (NVFP4,) * 2,
    ],
)
def test_reductions_of_a_gate_are_within_the_bound(target, dtype, dtype_b):
    problem = DualProblem(35, 43, 80, dtype, dtype_b, (2,), epilogue=dual_gemm.ROWS)
    check_with(target, DUAL, problem)
    check_with(target, DUAL, replace(problem, m=3, batch_a=()), out_dtype="int8")


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_of_k(target, splits):
    config = GemmConfig(64, 64, 64, 2, 2, splits=splits)
    check_with(target, MATMUL, MatmulProblem(20, 75, 640, epilogue=ROWS), config)


def reduces(config) -> bool:
    inner = getattr(config, "config", config)
    return isinstance(config, SplitKWorkspace) or not inner.swap_ab


@needs.hopper
@pytest.mark.parametrize(("config", "problem"), HOPPER)
def test_every_hopper_mainloop_reduces_rows_or_refuses(target, config, problem):
    """Those that swap A and B have columns in a thread, and are refused."""
    op = SCALED if isinstance(problem, ScaledProblem) else MATMUL
    plain = {"bias": None, "residual": None, "activation": None, "epilogue": ROWS}
    inner = replace(problem.product if op is SCALED else problem, **plain)
    problem = replace(problem, product=inner) if op is SCALED else inner
    if reduces(config):
        check_with(target, op, problem, config)
        return
    with pytest.raises(ValueError, match="of which no row is reduced"):
        check_with(target, op, problem, config)


@needs.hopper
@pytest.mark.parametrize("problem", HOPPER_GATES, ids=str)
def test_reductions_of_hopper_gates_are_within_the_bound(target, problem, exhaustive):
    own = replace(problem, epilogue=dual_gemm.ROWS)
    for config in hoppers_gate_configs(own, exhaustive):
        check_with(target, DUAL, own, config)


@needs.hopper
def test_every_schedule_gives_the_same_bits():
    check_schedules_agree(epilogue=ROWS)


def test_skinny_products_are_refused(target):
    a, b = random(target, (4, 64), "float16", 1), random(target, (64, 64), "float16", 2)
    with pytest.raises(ValueError, match="no reductions of rows"):
        cupykern.matmul(a, b, epilogue="acc, row_sum(acc)", config=SkinnyGemmConfig(32, 64, 4, 2))


def test_mixed_input_on_hopper_stores_its_accumulators_first():
    problem = MatmulProblem(64, 512, 512, "bfloat16", "int8", layout_b="F", epilogue=ROWS)
    config = gemm.choose_config(task_of(problem), "sm_90a")
    assert isinstance(config, SplitKWorkspace) and config.splits == 1


@needs.hopper
@pytest.mark.parametrize("n", [136, 8192])
def test_nvfp4_on_hopper_with_a_scale_per_row_of_a(target, n):
    """No tile decodes first then; of mixed input none may be one of cluster split-K."""
    m, k = 100, 512
    formula, half = "acc, row_sum(acc * acc)", dtypes.float16
    a, scale_a = random(target, (m, k), "float16", 1), random(target, (m, 1), "float32", 2)
    b = random_nvfp4("unit", (n, k), 3, target.xp, "C")
    read = formula_of(Call((a, b), {"epilogue": formula, "operands": {}}), (m, n), (half, half))
    task = GemmTask(
        *(1, m, n, k, half, FP4, K_MAJOR, K_MAJOR), scale_vectors=True, formula=read.code(half)
    )
    config = gemm.choose_config(task, "sm_90a")
    assert isinstance(config, SplitKWorkspace)
    assert compare(SCALED, a, b, scale_a, None, epilogue=formula, config=config).ok


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_nvfp4_on_either_side(target, sides):
    a, b = with_nvfp4(target, sides)
    operands = {
        "s": random(target, (40,), "float32", 3),
        "t": random(target, (24, 1), "float16", 4),
    }
    assert compare(SCALED, a, b, epilogue=ROWS, operands=operands).ok
    out = target.xp.empty((24, 40), np.float32)
    y, total = cupykern.scaled_mm(a, b, epilogue="acc, row_sum(acc)", out_dtype="float32", out=out)
    assert y is out and total.shape == (24, 1)


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [None, "float32", "int8", ("float16", None, "float32")])
def test_they_are_float32_columns(target, out_dtype):
    a = target.xp.ones((2, 3, 8), np.float16)
    results = cupykern.matmul(
        a, a[0].T, epilogue="acc + i, row_max(acc + i), row_sum(acc + j)", out_dtype=out_dtype
    )
    y, most, total = results
    assert y.shape == (2, 3, 3) and most.dtype == total.dtype == np.float32
    assert to_numpy(most).tolist() == [[[8], [9], [10]]] * 2
    assert to_numpy(total).tolist() == [[[27]] * 3] * 2


@pytest.mark.parametrize("n", [1, 15, 16, 17, 64, 257, 4099])
def test_integers_are_exact(target, n):
    """Any order of additions is: every column is there once, and none beyond the last one."""
    a, b = integers(target, (2, 37, 16), 1), integers(target, (16, n), 2)
    acc = to_numpy(a) @ to_numpy(b)
    _, total, most, least = cupykern.matmul(
        a, b, epilogue="acc, row_sum(acc), row_max(-400 - acc * acc), row_sum(1)"
    )
    np.testing.assert_array_equal(to_numpy(total), acc.sum(-1, keepdims=True))
    np.testing.assert_array_equal(to_numpy(most), (-400 - acc**2).max(-1, keepdims=True))
    assert (to_numpy(least) == n).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_propagates_to_the_maximum_and_the_sum(target, dtype):
    b = np.zeros((8, 70), dtype)
    b[0, 66] = np.nan
    a = np.zeros((3, 8), dtype)
    a[0] = 1
    x = target.xp.asarray(a), target.xp.asarray(b)
    formula = "acc, row_max(where(i == 1, j, acc)), row_sum(where(i == 1, j, acc))"
    _, most, total = cupykern.matmul(*x, epilogue=formula)
    np.testing.assert_array_equal(to_numpy(most), [[np.nan], [69], [np.nan]])
    np.testing.assert_array_equal(to_numpy(total), [[np.nan], [2415], [np.nan]])


def test_the_same_bits_on_every_run(target):
    a, b = random(target, (70, 128), "bfloat16", 1), random(target, (128, 300), "bfloat16", 2)
    runs = [cupykern.matmul(a, b, epilogue="acc, row_sum(acc)")[1] for _ in range(3)]
    first, *others = (to_numpy(total).tobytes() for total in runs)
    assert all(other == first for other in others)


def test_scales_of_the_next_quantisation(target):
    a, w = random(target, (9, 32), "float16", 1), random(target, (32, 40), "float16", 2)
    y, amax = cupykern.matmul(a, w, epilogue="maximum(acc, 0), row_max(abs(maximum(acc, 0)))")
    assert (to_numpy(amax) >= to_numpy(y).max(-1, keepdims=True) * (1 - 2.0**-10)).all()
    assert (y / amax).shape == y.shape


def test_a_callable_names_them_as_parameters(target):
    a = random(target, (9, 16), "float16", 1)

    def formula(acc, s, row_max, row_sum):
        y = np.maximum(acc, s)
        return y, row_max(abs(y)), row_sum(y * y)

    y = "maximum(acc, s)"
    text = f"{y}, row_max(abs({y})), row_sum({y} * {y})"
    assert cupykern.expression(formula) == cupykern.expression(text)
    one, two = (cupykern.matmul(a, a.T, epilogue=f, operands={"s": 0.5}) for f in (formula, text))
    for y, z in zip(one, two, strict=True):
        np.testing.assert_array_equal(to_numpy(y), to_numpy(z))
    assert "row_max(t3)" in str(cupykern.expression(formula))


def test_reductions_of_vector_products_have_one_number_a_row(target):
    a, b = random(target, (9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    formula = "acc, row_max(acc), row_sum(acc)"
    for x, y, shape in ((a[0], b, (1,)), (a, b[:, 0], (9,)), (a[0], b[:, 0], ())):
        assert compare(MATMUL, x, y, epilogue=formula).ok
        assert [z.shape for z in cupykern.matmul(x, y, epilogue=formula)[1:]] == [shape] * 2


def test_a_batch_that_does_not_merge(target):
    shape = (2, 2, 2, 2, 2, 3, 8)
    a = random(target, tuple(2 * n for n in shape), "float16", 1)
    a = a[tuple(slice(None, None, 2) for _ in shape)]
    b = random(target, (8, 5), "float16", 2)
    assert compare(MATMUL, a, b, epilogue="acc + b, row_sum(acc - b), row_max(acc + j)").ok


def test_out_that_kernels_cannot_write(target):
    a = random(target, (9, 16), "float16", 1)
    frame = target.xp.zeros((9, 27), np.float16)
    formula = "acc, row_max(acc)"
    y, most = cupykern.matmul(a, a.T, epilogue=formula, out=frame[:, ::3])
    wanted = cupykern.matmul(a, a.T, epilogue=formula)
    np.testing.assert_array_equal(to_numpy(y), to_numpy(wanted[0]))
    np.testing.assert_array_equal(to_numpy(most), to_numpy(wanted[1]))


def test_sizes_without_elements(target):
    a, b = target.xp.ones((3, 4), np.float16), target.xp.ones((4, 5), np.float16)
    formula = "acc, row_max(acc), row_sum(acc)"
    y, most, total = cupykern.matmul(a, b[:, :0], epilogue=formula)
    assert y.shape == (3, 0)
    assert (to_numpy(most) == -np.inf).all() and (to_numpy(total) == 0).all()
    assert [x.shape for x in cupykern.matmul(a[:0], b, epilogue=formula)] == [(0, 5), *[(0, 1)] * 2]
    _, most, total = cupykern.matmul(a[:, :0], b[:0], epilogue="acc, row_max(j), row_sum(j)")
    assert (to_numpy(most) == 4).all() and (to_numpy(total) == 10).all()


# --- bounds --------------------------------------------------------------------------------------

_ROWS = st.lists(
    st.tuples(
        st.integers(-3, 3) | st.floats(-3, 3), st.sampled_from((0.0, 0.1, 1.0)), st.floats(-1, 1)
    ),
    min_size=1,
    max_size=8,
)


@given(_ROWS, st.sampled_from(REDUCTIONS))
def test_errors_of_terms_stay_within_the_bound(columns, reduction):
    values, worst, part = (np.array(x, np.float64)[None] for x in zip(*columns, strict=True))
    none = np.zeros_like(values)
    terms = Terms(values, worst, none, none > 0, none > 0, none)
    found = reduced(np, reduction, terms)
    exact, off = (reduce_rows(np, reduction, x) for x in (values, values + worst * part))
    assert abs(off - exact) <= found.worst * (1 + 1e-12) + 1e-300


@pytest.mark.parametrize("n", [1, 2, 7, 64, 4096, 2**20])
def test_levels_are_at_most_all_additions(n):
    assert levels(n) <= n - 1


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formula", "place", "reason"),
    [
        ("row_max(acc)", (1, 13), r"the first result is a matrix, which row_max\(...\) may follow"),
        ("row_sum(acc), acc", (1, 18), "the first result is a matrix"),
        ("acc, row_sum(acc) + 1", (6, 22), r"row_sum\(...\) is a whole result"),
        ("acc, -row_max(acc)", (6, 19), r"row_max\(...\) is a whole result"),
        ("acc, row_max(row_sum(acc))", (6, 27), r"row_sum\(...\) is a whole result"),
        ("acc, row_sum(acc) if acc > 0 else 1", (6, 36), r"row_sum\(...\) is a whole result"),
        ("acc, row_sum(acc) > 1", (6, 22), r"row_sum\(...\) is a whole result"),
        ("acc, row_max(acc > 1)", (6, 22), "a boolean is not a number"),
        ("acc, row_max(acc, j)", (6, 21), "row_max takes 1 arguments; got 2"),
        ("acc, row_max", (6, 13), r"row_max is a function: write row_max\(...\)"),
    ],
)
def test_a_syntax_error_names_the_place_in_the_formula(formula, place, reason):
    with pytest.raises(SyntaxError, match=reason) as found:
        cupykern.expression(formula)
    assert (found.value.offset, found.value.end_offset) == place


def test_wrong_reductions_are_named():
    a = np.ones((4, 4), np.float16)
    with pytest.raises(SyntaxError, match="row_max is for results of products"):
        cupykern.expression("row_max(s)", "score")
    with pytest.raises(TypeError, match="row_sum: row_max"):
        cupykern.expression(lambda acc, row_max, row_sum: (acc, row_sum(row_max(acc))))
    with pytest.raises(TypeError, match="the first result is a matrix"):
        cupykern.expression(lambda acc, row_max: row_max(acc))
    with pytest.raises(TypeError, match=r"out_dtype of row_max\(...\) must be one of float32"):
        cupykern.matmul(a, a, epilogue="acc, row_max(acc)", out_dtype=("float16", "float16"))
    with pytest.raises(ValueError, match="names that are free; got 'row_max'"):
        cupykern.matmul(a, a, epilogue="acc", operands={"row_max": 1})


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a"])
def test_they_compile_without_local_memory(arch):
    problem = MatmulProblem(512, 512, 512, "bfloat16", layout_b="F", epilogue=ROWS)
    gate = DualProblem(512, 512, 512, "bfloat16", "bfloat16", epilogue=dual_gemm.ROWS)
    for task in (task_of(problem), dual_gemm.task_of(gate)):
        variant = gemm.choose_config(task, arch).variant(task)
        try:
            usage = offline.compile_offline(variant, arch)
        except UnavailableError as missing:
            pytest.skip(str(missing))
        assert not usage.local_bytes and not usage.warnings


def test_a_formula_without_accumulators_beside_an_nvfp4_a(target):
    """The transposed product is not computed for it: nothing of the result depends on it."""
    a, b = random_nvfp4("unit", (8, 64), 1, target.xp, "C"), random(target, (64, 16), "float16", 2)
    s = target.xp.arange(16, dtype=np.float32)
    y, largest = cupykern.scaled_mm(a, b, operands={"s": s}, epilogue="s, row_max(s)")
    assert (to_numpy(y) == np.arange(16)).all() and (to_numpy(largest) == 15).all()


def test_out_beside_an_nvfp4_a_is_checked_before_a_launch(target):
    a, b = random_nvfp4("unit", (16, 64), 1, target.xp, "C"), random(target, (64, 16), "float16", 2)
    for out, error in ((b[:16], "overlap"), (target.xp.empty((3, 16), np.float16), "shape")):
        with pytest.raises(ValueError, match=error):
            options = {"out_dtype": ("float16", None), "out": out}
            cupykern.scaled_mm(a, b, epilogue="acc, row_max(acc)", **options)
