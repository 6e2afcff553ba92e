"""Formulas as the epilogue of matmul and scaled_mm: every mainloop, operand and error."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from gemm_hopper_problems import fp4, fp8, mixed
from products import FP8, MATMUL, SCALED, array, check_problem, compare, random, to_numpy

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.gemm import gemm
from cupykern.gemm.decode_first import DecodeFirst
from cupykern.gemm.fma_config import FmaGemmConfig
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.gemm.sm90_gemm_config import (
    Sm90Fp8GemmConfig,
    Sm90GemmConfig,
    Sm90MixedGemmConfig,
    Sm90PartsGemmConfig,
)
from cupykern.gemm.sm90_policies import Multicast, PingPong, SlicedK, SplitK
from cupykern.gemm.split_float32 import SplitFloat32
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.nvfp4 import random as random_nvfp4
from cupykern.ops.problems.products import FORMULAS, PAIRS, MatmulProblem, task_of
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.precisions import SPLITS
from cupykern.targets import UnavailableError, host, offline

# A formula that is not linear: of partial sums it is another one.
SQUARE, WHERE = FORMULAS[0].replace("acc", "acc * acc"), FORMULAS[1]


def with_formula(problem, formula):
    if hasattr(problem, "product"):
        return replace(problem, product=with_formula(problem.product, formula))
    return replace(problem, bias=None, residual=None, activation=None, epilogue=formula)


def check_with(target, problem, config):
    op = SCALED if isinstance(problem, ScaledProblem) else MATMUL
    call = op.inputs(problem, 1, target.xp)
    comparison = compare(op, *call.args, **call.kwargs, config=config)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


# --- mainloops -----------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_pair_of_dtypes(target, dtype, dtype_b, formula):
    for layout_b, m, k in (("F", 35, 272), ("C", 35, 37), ("F", 1, 64)):
        problem = MatmulProblem(m, 48, k, dtype, dtype_b, layout_b=layout_b, epilogue=formula)
        check_problem(MATMUL, problem, target)
        check_problem(MATMUL, replace(problem, batch_a=(2,), out_dtype="float32"), target)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_formula_is_of_the_whole_sum(target, splits):
    problem = MatmulProblem(20, 72, 640, kind="exact", epilogue=SQUARE, out_dtype="float32")
    config = GemmConfig(64, 64, 64, 2, 2, splits=splits)
    check_with(target, problem, config)
    check_with(target, replace(problem, dtype="int8"), replace(config, tile_k=128))


FLOAT32 = FmaGemmConfig(64, 64, 16, 8, 4, 4, 4)


@needs.hopper
@pytest.mark.parametrize("batch", [(), (3,), (2, 1)])
@pytest.mark.parametrize("m, n, k", [(33, 41, 200), (130, 70, 256)])
def test_every_way_of_fp32(target, batch, m, n, k):
    """The accumulators go to memory, and a second launch has the formula."""
    problem = MatmulProblem(m, n, k, "float32", batch_a=batch, epilogue=SQUARE, alpha=-3.7)
    for config in (FLOAT32, SplitFloat32(Sm90PartsGemmConfig(SPLITS["fp16x3"])), None):
        check_with(target, problem, config)
    if not batch:
        check_with(target, replace(problem, epilogue=WHERE), replace(FLOAT32, splits=3))
    call = MATMUL.inputs(problem, 1, target.xp)
    assert compare(MATMUL, *call.args, **call.kwargs, precision="bf16x6").ok


@needs.fp16_accumulators
def test_a_formula_on_fp16_accumulators_is_within_the_bound(target):
    call = MATMUL.inputs(MatmulProblem(20, 40, 64, layout_b="F", epilogue=WHERE), 1, target.xp)
    assert compare(MATMUL, *call.args, **call.kwargs, accumulate="float16").within_bound


HOPPER = [
    (Sm90GemmConfig(128, 128, 64, 3), MatmulProblem(200, 264, 192, layout_b="F")),
    (Sm90GemmConfig(128, 128, 64, 3, PingPong(), Multicast(2)),
     MatmulProblem(392, 264, 192, "bfloat16", layout_b="F", batch_a=(2,))),
    (Sm90GemmConfig(128, 128, 64, 3), MatmulProblem(200, 257, 192, layout_b="F")),  # not by TMA
    (Sm90GemmConfig(128, 128, 64, 3), MatmulProblem(200, 264, 192, out_dtype="float32")),
    (Sm90GemmConfig(256, 128, 64, 2), MatmulProblem(300, 264, 136, layout_b="F")),
    (Sm90GemmConfig(128, 128, 64, 3, cluster=SplitK(2)),
     MatmulProblem(136, 264, 320, layout_b="F")),
    (Sm90GemmConfig(16, 64, 64, 4, SlicedK(), swap_ab=True),
     MatmulProblem(9, 264, 200, layout_b="F")),
    (Sm90GemmConfig(32, 64, 64, 4, SlicedK(), Multicast(2), swap_ab=True),
     MatmulProblem(20, 137, 136, layout_b="F", out_dtype="float32")),
    (SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4), MatmulProblem(24, 72, 256, layout_b="F")),
    (Sm90GemmConfig(128, 64, 128, 4), MatmulProblem(72, 136, 144, "int8", layout_b="F")),
    (Sm90Fp8GemmConfig(128, 128, 4), fp8(136, 264, 272, "rows")),
    (Sm90Fp8GemmConfig(64, 64, 4, SlicedK()), fp8(136, 264, 272, "tensor", out_dtype="float32")),
    (Sm90Fp8GemmConfig(128, 128, 4), fp8(136, 264, 272, "blocks")),
    (Sm90Fp8GemmConfig(16, 64, 4, SlicedK(), swap_ab=True), fp8(9, 264, 272, "rows")),
    (Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)), mixed(72, 144, 400, layout_b="F")),
    (Sm90MixedGemmConfig(64, 64, 128, 4, SlicedK()), ScaledProblem(mixed(72, 144, 400), "rows")),
    (Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)), fp4(40, 144, 544)),
    (DecodeFirst(Sm90GemmConfig(128, 128, 64, 3)), fp4(40, 144, 544)),
]  # fmt: skip


@needs.hopper
@pytest.mark.thinned(2)
@pytest.mark.parametrize("formula", [SQUARE, WHERE])
@pytest.mark.parametrize(("config", "problem"), HOPPER)
def test_a_formula_on_every_hopper_mainloop_is_within_the_bound(target, config, problem, formula):
    check_with(target, with_formula(problem, formula), config)


@needs.hopper
def test_every_schedule_gives_the_same_bits():
    config, problem = HOPPER[1]
    call = MATMUL.inputs(with_formula(problem, WHERE), 1, np)
    bits = set()
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule):
            bits.add(cupykern.matmul(*call.args, **call.kwargs, config=config).tobytes())
    assert len(bits) == 1


# Columns and k that end within a block's; more stages than a pipeline has.
SKINNY = [
    (SkinnyGemmConfig(32, 64, 4, 2), MatmulProblem(9, 75, 1104, layout_b="F", batch_a=(1, 1))),
    (SkinnyGemmConfig(64, 64, 2, 2), MatmulProblem(16, 136, 304, "bfloat16", alpha=-3.7)),
    (SkinnyGemmConfig(32, 128, 4, 2, rows=8), fp8(5, 75, 272, "rows")),
    (SkinnyGemmConfig(32, 128, 4, 2), MatmulProblem(7, 41, 144, "int8", layout_b="F")),
    (SkinnyGemmConfig(16, 128, 4, 2), fp4(3, 75, 576)),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("formula", [SQUARE, WHERE])
@pytest.mark.parametrize(("config", "problem"), SKINNY)
def test_a_formula_on_a_skinny_gemm_is_within_the_bound(target, config, problem, formula):
    check_with(target, with_formula(problem, formula), config)


@pytest.mark.parametrize(
    "problem",
    [
        MatmulProblem(4, 256, 256, "float32", layout_b="F"),
        MatmulProblem(4, 256, 257, layout_b="F"),
        MatmulProblem(4, 257, 256),
    ],
)
def test_skinny_gemms_without_a_formula(target, problem):
    """Of FP32 and of misaligned rows: the config that computes the product has no formula."""
    config = next(
        c for c in gemm.configs(task_of(problem), "sm_90a") if isinstance(c, SkinnyGemmConfig)
    )
    problem = with_formula(problem, WHERE)
    task = task_of(problem)
    assert not any(isinstance(c, SkinnyGemmConfig) for c in gemm.configs(task, "sm_90a"))
    call = MATMUL.inputs(problem, 1, target.xp)
    with pytest.raises(ValueError, match="with an expression reads aligned rows"):
        cupykern.matmul(*call.args, **call.kwargs, config=config)


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_nvfp4_on_either_side(target, sides):
    """With an NvFp4 a alone it is the transposed product that is computed."""
    xp, shape = target.xp, (24, 40)
    a = (
        random_nvfp4("unit", (24, 64), 1, xp, "C")
        if "a" in sides
        else random(target, (24, 64), "float16", 1)
    )
    b = (
        random_nvfp4("unit", (40, 64), 2, xp, "C")
        if "b" in sides
        else random(target, (64, 40), "float16", 2)
    )
    operands = {
        "s": random(target, (40,), "float32", 3),
        "t": random(target, (24, 1), "float16", 4),
        "r": random(target, shape, "float32", 5),
        "k": 2,
        "z": random(target, (), "float32", 6),
    }
    for formula in ("acc * s + t + r * k + i - 2 * j", "acc * s * z if i < j else t + r + k"):
        named = {x: operands[x] for x in cupykern.expression(formula).names}
        kwargs = {"epilogue": formula, "operands": named, "out_dtype": "float32"}
        assert compare(SCALED, a, b, **kwargs).ok


# --- operands ------------------------------------------------------------------------------------


DTYPES = "float16", "bfloat16", "float32", "int8", *FP8


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_every_dtype_and_shape(target, dtype, exhaustive):
    """Shapes in turn."""
    a, b = random(target, (3, 9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    shapes = (), (1,), (20,), (9, 1), (9, 20), (3, 1, 1), (3, 1, 20), (3, 9, 20), (1, 1, 1)
    for shape in shapes if exhaustive else shapes[DTYPES.index(dtype) % 3 :: 3]:
        x = array(target, np.random.default_rng(3).integers(-8, 9, shape), dtype)
        kwargs = {"operands": {"x": x}, "epilogue": "acc * x - b", "out_dtype": "float32"}
        assert compare(MATMUL, a, b, **kwargs).ok, shape


MOST = {"int32": 2**31 - 1, "int64": 2**62, "bool": 1}


@pytest.mark.parametrize("dtype", MOST)
def test_operands_of_integers_and_booleans_become_fp32(target, dtype, exhaustive):
    """To nearest beyond 2^24, as numpy converts them; exact below.  Shapes in turn."""
    xp = target.xp
    a, b = random(target, (3, 9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    most, shapes = MOST[dtype], ((), (1,), (20,), (9, 1), (9, 20), (3, 1, 20), (3, 9, 20))
    for shape in shapes if exhaustive else shapes[list(MOST).index(dtype) :: 3]:
        x = np.random.default_rng(3).integers(-most if most > 1 else 0, most + 1, shape)
        x = xp.asarray(np.asarray(x).astype(dtype))
        y = cupykern.matmul(a, b, epilogue="x", operands={"x": x}, out_dtype="float32")
        assert (y == xp.broadcast_to(x.astype(np.float32), y.shape)).all()
        kwargs = {"operands": {"x": x}, "epilogue": "acc * x - b", "out_dtype": "float32"}
        assert compare(MATMUL, a, b, **kwargs).ok, shape
    edge = xp.asarray(np.array([2**24, 2**24 + 1, 2**24 + 3, -(2**24) - 1] * 5, np.int64))
    y = cupykern.matmul(a, b, epilogue="x", operands={"x": edge}, out_dtype="float32")
    assert y[0, 0, :4].tolist() == [2**24, 2**24, 2**24 + 4, -(2**24)]


def test_a_bool_operand_is_a_condition(target):
    xp = target.xp
    a, b = random(target, (9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    keep = xp.asarray(np.arange(180).reshape(9, 20) % 3 > 0)
    options = {"epilogue": "acc if keep & on else z", "out_dtype": "float32"}
    for on in (True, np.bool_(False), xp.asarray(np.arange(20) % 2 == 0)):
        operands = {"keep": keep, "on": on, "z": -np.inf}
        y = cupykern.matmul(a, b, **options, operands=operands)
        assert (np.isneginf(to_numpy(y)) == ~to_numpy(keep & on).astype(bool)).all()
        assert compare(MATMUL, a, b, **options, operands=operands).ok


@needs.hopper
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int32", "int64"])
def test_hoppers_epilogue_reads_operands_of_any_dtype_and_strides(target, dtype):
    """By TMA where a 16-bit matrix allows it, by pairs of columns where they are aligned, else by
    elements."""
    whole = np.arange(74 * 281).reshape(74, 281) % (5 if dtype == "bfloat16" else 9973)
    a, b = random(target, (72, 64), "float16", 1), random(target, (136, 64), "float16", 2).T
    even = array(target, whole[:, :280], dtype)
    odd, flat = array(target, whole, dtype), array(target, whole.T[:140, :72], dtype)
    views = (
        *(even[:72, :136], even[1:73, 2:138], even[:72, 1:137]),
        *(odd[:72, :136], even[:72, :272:2], even[71::-1, 135::-1], flat[:136].T),
    )
    for x in views:
        kwargs = {"operands": {"x": x, "s": x[:, :1], "t": x[0]}, "epilogue": "acc * s + x - t",
                  "config": Sm90GemmConfig(128, 128, 64, 3)}  # fmt: skip
        assert compare(MATMUL, a, b, **kwargs).ok, x.strides


@needs.hopper
@pytest.mark.parametrize(
    "config",
    [
        Sm90GemmConfig(128, 128, 64, 3, PingPong()),
        Sm90GemmConfig(128, 128, 64, 3, cluster=SplitK(2)),
        Sm90GemmConfig(64, 64, 64, 4, SlicedK()),
    ],
    ids=str,
)
def test_a_matrix_of_16_bits_is_loaded_by_tma(target, config):
    """The first one; the second is read by threads."""
    a, b = random(target, (333, 136), "float16", 1), random(target, (200, 136), "float16", 2).T
    r, more = (random(target, (333, 200), dtype, 3) for dtype in ("bfloat16", "float16"))
    operands = {"r": r, "q": more, "t": random(target, (200,), "float32", 4)}
    for formula in (
        "acc * 0.5 + t - r * q",
        "maximum(acc, r), row_max(abs(acc - q)), acc * q + t",
    ):
        kwargs = {"operands": {k: operands[k] for k in cupykern.expression(formula).names}}
        assert compare(MATMUL, a, b, epilogue=formula, config=config, **kwargs).ok


@needs.hopper
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_an_int8_product_minus_its_zero_points_is_exact(target, dtype):
    x8 = array(target, np.random.default_rng(1).integers(-8, 9, (72, 64)), "int8")
    z = target.xp.asarray(np.arange(72).astype(dtype)[:, None])
    exact = {"operands": {"z": z}, "epilogue": "acc - z", "out_dtype": "float32"}
    assert compare(SCALED, x8, x8.T, **exact).ok


def test_operands_of_any_strides(target):
    a, b = random(target, (9, 16), "float16", 1), random(target, (16, 20), "float16", 2)
    whole = random(target, (40, 60), "float32", 3)
    views = (whole[:9, :20], whole[9:0:-1, 20:0:-1], whole[::4, ::3][:9], whole.T[:9, 5:25],
             whole[:1, :20], whole[:9, :1], whole[3:4, 2:3])  # fmt: skip
    for view in views:
        kwargs = {"operands": {"x": view}, "epilogue": "acc + x", "out_dtype": "float32"}
        assert compare(MATMUL, a, b, **kwargs).ok, view.strides


def test_strides_need_not_be_multiples_of_the_itemsize():
    packed = np.zeros((9, 20), np.dtype([("byte", np.uint8), ("x", np.float32)]))
    packed["x"] = np.arange(180).reshape(9, 20)
    a, b = np.ones((9, 4), np.float16), np.ones((4, 20), np.float16)
    y = cupykern.matmul(a, b, epilogue="acc + x", operands={"x": packed["x"]}, out_dtype="float32")
    np.testing.assert_array_equal(y, packed["x"] + 4)


def test_a_number_of_any_type_is_an_fp32_operand(target):
    a = target.xp.ones((4, 4), np.float16)
    for number, expected in ((2, 2), (0.5, 0.5), (np.float16(3), 3), (np.int8(-1), -1), (0.1, 0.1),
                             (np.float64(0.1), 0.1), (float("inf"), np.inf), (-np.inf, -np.inf),
                             (np.array(7, np.int32), 7), (1e-300 * 0, 0)):  # fmt: skip
        y = cupykern.matmul(a, a, epilogue="x", operands={"x": number}, out_dtype="float32")
        assert (to_numpy(y) == np.float32(expected)).all(), number


def test_operands_are_at_most_eight(target):
    a = target.xp.ones((4, 4), np.float16)
    operands = {f"x{k}": k if k % 2 else target.xp.full(4, k, np.float32) for k in range(8)}
    formula = " + ".join(f"{10**k}.0 * x{7 - k}" for k in range(8))
    y = cupykern.matmul(a, a, epilogue=formula, operands=operands, out_dtype="float32")
    assert (to_numpy(y) == np.float32(1234567)).all()
    operands["x8"] = 1
    with pytest.raises(ValueError, match="at most 8"):
        cupykern.matmul(a, a, epilogue=f"{formula} + x8", operands=operands)


def test_indices_are_those_of_batch_row_and_column(target):
    a, b = target.xp.ones((2, 3, 5, 4), np.float16), target.xp.ones((4, 70), np.float16)
    y = cupykern.matmul(a, b, epilogue="b * 1000 + i * 100 + j", out_dtype="float32")
    number = np.arange(6).reshape(2, 3, 1, 1) * 1000 + np.arange(5)[:, None] * 100 + np.arange(70)
    np.testing.assert_array_equal(to_numpy(y), number)


def test_a_batch_that_does_not_merge(target):
    """More dims than a kernel walks: each first matrix by a launch, whose `b` goes on."""
    xp, shape = target.xp, (2, 2, 2, 2, 2, 3, 8)
    a = xp.asarray(inputs.values("normal", tuple(2 * n for n in shape), dtypes.float16, 1))
    a = a[tuple(slice(None, None, 2) for _ in shape)]
    b = xp.asarray(inputs.values("normal", (8, 5), dtypes.float16, 2))
    x = xp.asarray(inputs.values("normal", (2, 1, 2, 1, 2, 1, 5), dtypes.float32, 3))
    assert compare(MATMUL, a, b, epilogue="acc * x + b", operands={"x": x}).ok


def test_sizes_without_elements(target):
    a, b = target.xp.ones((3, 0), np.float16), target.xp.ones((0, 5), np.float16)
    y = cupykern.matmul(a, b, epilogue="acc + j")
    np.testing.assert_array_equal(to_numpy(y), np.tile(np.arange(5), (3, 1)))
    assert cupykern.matmul(a[:0], b, epilogue="acc + j").shape == (0, 5)


def test_alpha_and_scales_come_first(target):
    a = target.xp.ones((4, 8), np.float16)
    y = cupykern.matmul(a, a.T, alpha=0.5, epilogue="acc * acc", out_dtype="float32")
    assert (to_numpy(y) == 16).all()
    x = array(target, np.ones((4, 32)), "float8_e4m3fn")
    y = cupykern.scaled_mm(x, x.T, 0.5, 0.25, epilogue="acc * acc", out_dtype="float32")
    assert (to_numpy(y) == 16).all()


def test_the_result_of_int8_is_float32(target):
    x = array(target, np.full((4, 32), 3), "int8")
    assert cupykern.matmul(x, x.T).dtype == np.int32
    y = cupykern.matmul(x, x.T, epilogue="acc")
    assert y.dtype == np.float32 and (to_numpy(y) == 288).all()


def test_callables_and_expressions(target):
    a = random(target, (9, 16), "float16", 1)
    s = random(target, (9, 1), "float32", 2)

    def formula(acc, s, maximum):
        return maximum(acc * s, 0)

    text = "maximum(acc * s, 0)"
    one, two, three = (
        to_numpy(cupykern.matmul(a, a.T, epilogue=f, operands={"s": s}))
        for f in (text, formula, cupykern.expression(text))
    )
    assert (one == two).all() and (one == three).all()
    assert compare(MATMUL, a, a.T, epilogue=formula, operands={"s": s}).ok


def test_a_callable_is_traced_in_every_call(target):
    """What it refers to may have changed."""
    a, factor = target.xp.ones((4, 4), np.float16), 1.0
    for factor in (1.0, 2.0, 3.0):
        y = cupykern.matmul(a, a, epilogue=lambda acc: acc * factor)  # noqa: B023
        assert (to_numpy(y) == 4 * factor).all()


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"epilogue": "acc + x"}, NameError, r"name 'x' \(line 1, column 7\) is not an operand"),
        ({"epilogue": "acc", "operands": {"x": 1}}, ValueError, "does not name 'x'"),
        ({"operands": {"x": 1}}, ValueError, "epilogue, which is None"),
        ({"epilogue": "acc + x", "operands": [1]}, TypeError, "must be a dict; got list"),
        ({"epilogue": "acc + x", "operands": {"x": "1"}}, TypeError, r"operands\['x'\]"),
        ({"epilogue": "acc + x", "operands": {"x": None}}, TypeError, "or an array; got None"),
        (
            {"epilogue": "acc + \u00b5", "operands": {"\u00b5": 1}},
            ValueError,
            "names that are free",
        ),
        ({"epilogue": "acc + x", "operands": {"x": [1.0]}}, TypeError, r"operands\['x'\]"),
        ({"epilogue": "acc + x", "operands": {"x": 1e39}}, ValueError, "finite in FP32"),
        ({"epilogue": "acc + x", "operands": {"x": float("nan")}}, ValueError, "finite in FP32"),
        ({"epilogue": "acc", "bias": np.ones(4, np.float32)}, ValueError, "bias must be None"),
        ({"epilogue": "acc", "activation": "relu"}, ValueError, "activation must be None"),
        ({"epilogue": "acc", "residual": np.ones((4, 4), np.float32)}, ValueError, "residual must"),
        ({"epilogue": "acc", "out_dtype": "int32"}, TypeError, "out_dtype"),
        ({"epilogue": "acc ** 2"}, SyntaxError, "in place of"),
        ({"epilogue": 3}, TypeError, "string or a callable"),
    ],
)
def test_wrong_formulas_and_operands_are_named(kwargs, error, reason):
    a = np.ones((4, 4), np.int8 if "out_dtype" in kwargs else np.float16)
    with pytest.raises(error, match=reason):
        cupykern.matmul(a, a, **kwargs)
    if "residual" not in kwargs:
        with pytest.raises(error, match=reason):
            cupykern.scaled_mm(a.astype(np.int8), a.astype(np.int8), **kwargs)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "reason"),
    [
        ((5,), np.float32, ValueError, r"operands\['x'\] must broadcast to \(4, 4\); got shape"),
        ((2, 4, 4), np.float32, ValueError, r"must broadcast to \(4, 4\)"),
        ((4,), np.float64, TypeError, r"operands\['x'\]'s dtype must be one of float16"),
        ((4,), np.uint8, TypeError, r"operands\['x'\]'s dtype"),
        ((4,), np.int16, TypeError, r"operands\['x'\]'s dtype"),
    ],
)
def test_errors_of_arrays(target, shape, dtype, error, reason):
    a, x = target.xp.ones((4, 4), np.float16), target.xp.ones(shape, dtype)
    with pytest.raises(error, match=reason):
        cupykern.matmul(a, a, epilogue="acc + x", operands={"x": x})


def test_out_must_be_apart_from_operands(target):
    a, x = target.xp.ones((4, 4), np.float16), target.xp.ones((4, 4), np.float32)
    with pytest.raises(ValueError, match="out must not overlap"):
        cupykern.matmul(a, a, epilogue="acc + x", operands={"x": x}, out_dtype="float32", out=x)
    guarded = check.GuardedArray(target.xp, (4, 4), np.dtype(np.float32))
    out = guarded.array
    assert cupykern.matmul(
        a, a, epilogue="acc + x", operands={"x": x}, out_dtype="float32", out=out
    ) is out  # fmt: skip
    guarded.check()
    assert (to_numpy(out) == 5).all()


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a"])
@pytest.mark.parametrize("formula", [SQUARE, WHERE, "sqrt(sin(acc) * cos(i // 3)) - log(exp(acc))"])
def test_formulas_compile_without_local_memory(arch, formula):
    for dtype, dtype_b in (("bfloat16", None), ("float8_e4m3fn", "float8_e4m3fn")):
        if dtype_b and arch != "sm_90a":
            continue
        problem = MatmulProblem(512, 512, 512, dtype, dtype_b, layout_b="F", epilogue=formula)
        task = task_of(problem)
        variant = gemm.choose_config(task, arch).variant(task)
        assert "expression" in variant.kernel
        try:
            usage = offline.compile_offline(variant, arch)
        except UnavailableError as missing:
            pytest.skip(str(missing))
        assert not usage.local_bytes and not usage.warnings
