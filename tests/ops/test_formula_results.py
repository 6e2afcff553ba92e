"""Formulas with several results: every mainloop, dtypes, layouts and errors."""

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
from products import DUAL, MATMUL, SCALED, compare, random, to_numpy

import cupykern
from cupykern import check, dtypes
from cupykern.gemm import gemm
from cupykern.gemm.portable_config import GemmConfig
from cupykern.ops.problems import dual_gemm
from cupykern.ops.problems.dual_gemm import FLOAT32, DualProblem
from cupykern.ops.problems.products import NVFP4, PAIRS, RESULTS, MatmulProblem, task_of
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import UnavailableError, offline

# Dtypes that take different ways out of the registers.
EACH = ("float16", "float32", "bfloat16")


def with_results(problem):
    if isinstance(problem, ScaledProblem):
        return replace(problem, product=with_results(problem.product))
    plain = {"bias": None, "residual": None, "activation": None}
    return replace(problem, **plain, epilogue=RESULTS)


# --- mainloops -----------------------------------------------------------------------------------


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("m", "out_dtype"), [(35, None), (35, EACH), (1, EACH[::-1])])
@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_pair_of_dtypes(target, dtype, dtype_b, m, out_dtype):
    problem = MatmulProblem(m, 43, 72, dtype, dtype_b, (2,), layout_b="F", epilogue=RESULTS)
    check_with(target, MATMUL, problem, **({} if out_dtype is None else {"out_dtype": out_dtype}))


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
def test_several_results_of_a_gate_are_within_the_bound(target, dtype, dtype_b):
    problem = DualProblem(35, 43, 80, dtype, dtype_b, (2,), epilogue=dual_gemm.RESULTS)
    check_with(target, DUAL, problem)
    check_with(target, DUAL, problem, out_dtype=EACH)


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_of_k(target, splits):
    config = GemmConfig(64, 64, 64, 2, 2, splits=splits)
    check_with(target, MATMUL, MatmulProblem(20, 75, 640, epilogue=RESULTS), config)


@needs.hopper
@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{}, {"out_dtype": EACH}], ids=["one dtype", "each its own"])
@pytest.mark.parametrize(("config", "problem"), HOPPER)
def test_several_results_of_every_hopper_mainloop_are_within_the_bound(
    target, config, problem, options
):
    op = SCALED if isinstance(problem, ScaledProblem) else MATMUL
    check_with(target, op, with_results(problem), config, **options)


@needs.hopper
@pytest.mark.parametrize("problem", HOPPER_GATES, ids=str)
def test_several_results_of_hopper_gates_are_within_the_bound(target, problem, exhaustive):
    own = replace(problem, epilogue=dual_gemm.RESULTS)
    for config in hoppers_gate_configs(own, exhaustive):
        check_with(target, DUAL, own, config)


@needs.hopper
def test_every_schedule_gives_the_same_bits():
    check_schedules_agree(epilogue=RESULTS)


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_nvfp4_on_either_side(target, sides):
    """With an NvFp4 a alone it is the transposed product that is computed."""
    xp = target.xp
    a, b = with_nvfp4(target, sides)
    operands = {
        "s": random(target, (40,), "float32", 3),
        "t": random(target, (24, 1), "float16", 4),
    }
    kwargs = {"epilogue": "acc * s + i, t - acc", "operands": operands}
    assert compare(SCALED, a, b, **kwargs, out_dtype="float32").ok
    assert compare(SCALED, a, b, **kwargs, out_dtype=("float16", "float32")).ok
    out = xp.empty((24, 40), np.float32)
    assert cupykern.scaled_mm(a, b, **kwargs, out_dtype="float32", out=out)[0] is out


# --- results -------------------------------------------------------------------------------------


def test_each_result_is_that_of_its_formula_alone(target):
    a, b = random(target, (2, 9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    t = random(target, (9, 1), "float32", 3)
    formulas = ("maximum(acc + t, 0)", "acc + t", "exp(acc / 9)", "t * 2 - j")
    together = cupykern.matmul(a, b, epilogue=", ".join(formulas), operands={"t": t})
    assert isinstance(together, tuple) and len(together) == 4
    for y, formula in zip(together, formulas, strict=True):
        operands = {"t": t} if "t" in cupykern.expression(formula).names else None
        alone = cupykern.matmul(a, b, epilogue=formula, operands=operands)
        np.testing.assert_array_equal(to_numpy(y), to_numpy(alone))


def test_results_may_share_parts_and_be_equal(target):
    a = target.xp.ones((4, 8), np.float16)
    for formula, wanted in (
        ("acc * 2, acc, acc", (16, 8, 8)),
        ("acc, acc * 2", (8, 16)),
        ("7, acc", (7, 8)),
        ("(acc + 1, acc + 1 - j * 0)", (9, 9)),
    ):
        results = cupykern.matmul(a, a.T, epilogue=formula)
        assert [float(to_numpy(y).max()) for y in results] == list(wanted)


def test_a_callable_returns_a_tuple(target):
    a = random(target, (9, 16), "float16", 1)

    def formula(acc, s):
        return np.maximum(acc, s), acc

    text = "maximum(acc, s), acc"
    assert cupykern.expression(formula) == cupykern.expression(text) != cupykern.expression("acc")
    one, two = (cupykern.matmul(a, a.T, epilogue=f, operands={"s": 0.5}) for f in (formula, text))
    for y, z in zip(one, two, strict=True):
        np.testing.assert_array_equal(to_numpy(y), to_numpy(z))
    assert "result = t2, acc" in str(cupykern.expression(text))


def test_out_takes_the_first_result(target):
    a = target.xp.ones((4, 8), np.float16)
    guarded = check.GuardedArray(target.xp, (4, 4), dtypes.float32)
    y, z = cupykern.matmul(
        a, a.T, epilogue="acc, acc + 1", out_dtype=("float32", "float16"), out=guarded.array
    )
    assert y is guarded.array and z.dtype == np.float16
    guarded.check()
    assert (to_numpy(y) == 8).all() and (to_numpy(z) == 9).all()
    frame = target.xp.full((4, 12), 7, np.float16)  # not by vectors
    y, z = cupykern.matmul(a, a.T, epilogue="acc, acc + 1", out=frame[:, ::3])
    assert (to_numpy(frame)[:, ::3] == 8).all() and (to_numpy(frame)[:, 1::3] == 7).all()
    assert (to_numpy(z) == 9).all()


def test_a_batch_that_does_not_merge(target):
    shape = (2, 2, 2, 2, 2, 3, 8)
    a = random(target, tuple(2 * n for n in shape), "float16", 1)
    a = a[tuple(slice(None, None, 2) for _ in shape)]
    b = random(target, (8, 5), "float16", 2)
    assert compare(MATMUL, a, b, epilogue="acc + b, acc - b").ok


def test_sizes_without_elements(target):
    a, b = target.xp.ones((3, 0), np.float16), target.xp.ones((0, 5), np.float16)
    y, z = cupykern.matmul(a, b, epilogue="acc + j, i")
    np.testing.assert_array_equal(to_numpy(y), np.tile(np.arange(5), (3, 1)))
    np.testing.assert_array_equal(to_numpy(z), np.tile(np.arange(3)[:, None], (1, 5)))
    assert [x.shape for x in cupykern.matmul(a[:0], b, epilogue="acc, acc")] == [(0, 5)] * 2


def test_as_many_operands_as_places_are_left(target):
    a = target.xp.ones((4, 4), np.float16)
    operands = {f"x{k}": k for k in range(5)}
    text = "acc + x0, acc + x1, acc + x2, acc + x3 + x4"
    results = cupykern.matmul(a, a, epilogue=text, operands=operands)
    assert [float(to_numpy(y)[0, 0]) for y in results] == [4, 5, 6, 11]
    with pytest.raises(ValueError, match="at most 5 beside 4 results; got 6"):
        cupykern.matmul(a, a, epilogue=f"{text} + x5", operands={**operands, "x5": 1})


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"epilogue": "acc, acc, acc, acc, acc"}, SyntaxError, "at most 4 results here; got 5"),
        ({"epilogue": "()"}, SyntaxError, "at most 4 results here; got 0"),
        ({"epilogue": "acc, (acc, 1)"}, SyntaxError, "Tuple is not part of an expression"),
        ({"epilogue": lambda acc: (acc,) * 5}, TypeError, "at most 4 results"),
        ({"epilogue": "acc, j", "out_dtype": ("float16",)}, ValueError, "which are 2; got 1"),
        ({"epilogue": "acc", "out_dtype": ("float16",) * 2}, ValueError, "which are 1; got 2"),
        ({"epilogue": "acc, j", "out_dtype": ("float16", "int16")}, TypeError, "out_dtype"),
    ],
)
def test_wrong_formulas_and_results_are_named(kwargs, error, reason):
    a = np.ones((4, 4), np.float16)
    with pytest.raises(error, match=reason):
        cupykern.matmul(a, a, **kwargs)
    with pytest.raises(error, match=reason):
        cupykern.scaled_mm(a, a.astype(np.int8), **kwargs)


def test_scores_and_masks_have_one_result():
    for text, kind in (("s, s", "score"), ("i < j, i > j", "mask")):
        with pytest.raises(SyntaxError, match="one result here; got 2"):
            cupykern.expression(text, kind)


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a"])
def test_results_compile_without_local_memory(arch):
    problem = MatmulProblem(512, 512, 512, "bfloat16", layout_b="F", epilogue=RESULTS)
    gate = DualProblem(512, 512, 512, "bfloat16", "bfloat16", epilogue=dual_gemm.RESULTS)
    for task in (task_of(problem), dual_gemm.task_of(gate)):
        variant = gemm.choose_config(task, arch).variant(task)
        try:
            usage = offline.compile_offline(variant, arch)
        except UnavailableError as missing:
            pytest.skip(str(missing))
        assert not usage.local_bytes and not usage.warnings
