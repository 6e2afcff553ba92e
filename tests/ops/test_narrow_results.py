"""Formulas with results of 8 bits: every mainloop, rounding, saturation and what is refused."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from fake_gpu import fake_gpu
from formula_result_checks import (
    HOPPER,
    HOPPER_GATES,
    check_schedules_agree,
    hoppers_gate_configs,
    with_nvfp4,
)
from products import DUAL, MATMUL, SCALED, compare, random, to_numpy

import cupykern
from cupykern import check, dtypes
from cupykern.gemm import gemm
from cupykern.gemm.portable_config import GemmConfig
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.op import as_tuple
from cupykern.ops.problems import dual_gemm
from cupykern.ops.problems.dual_gemm import FLOAT32, DualProblem
from cupykern.ops.problems.products import MIXED, NARROW, NVFP4, PAIRS, MatmulProblem, task_of
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import UnavailableError, offline

RANGES = {"float8_e4m3fn": (-448, 448), "float8_e5m2": (-57344, 57344), "int8": (-128, 127)}
FORMULA, SEVERAL = "acc * s", "acc * s, acc, acc * s"
OF_GATE = "acc1 * s, acc2, acc1 * s"


def rounded(y: np.ndarray, name: str) -> np.ndarray:
    """FP32 as a result of this dtype."""
    y = y.astype(np.float64)
    if name == "int8":
        return np.rint(np.clip(np.nan_to_num(y, nan=0.0), *RANGES[name])).astype(np.int8)
    return np.clip(y, *RANGES.get(name, (-np.inf, np.inf))).astype(dtypes.NAMES[name])


def assert_rounded(op, target, problem, formula, kinds, config=None) -> None:
    """Results of 8 bits are those in FP32, rounded; both within the bounds."""
    inner = problem.product if isinstance(problem, ScaledProblem) else problem
    plain = {} if isinstance(inner, DualProblem) else {"bias": None, "residual": None}
    inner = replace(inner, **plain, epilogue=formula)
    if not isinstance(inner, DualProblem):
        inner = replace(inner, activation=None)
    problem = replace(problem, product=inner) if isinstance(problem, ScaledProblem) else inner
    call = op.inputs(problem, 1, target.xp)
    options = {} if config is None else {"config": config}
    wide = as_tuple(op.run(*call.args, **{**call.kwargs, **options, "out_dtype": "float32"}))
    given = {**call.kwargs, **options, "out_dtype": kinds}
    narrow = as_tuple(op.run(*call.args, **given))
    names = kinds if isinstance(kinds, tuple) else (kinds,) * len(wide)
    for x, y, name in zip(wide, narrow, names, strict=True):
        assert y.dtype == dtypes.NAMES[name]
        wanted = rounded(to_numpy(x), name)
        np.testing.assert_array_equal(to_numpy(y), wanted, f"{problem!r} {config} {name}")
    references = op.reference(*call.args, **given)
    bounds = op.bound(*call.args, **given, reference=references)
    assert check.compare(narrow, references, bounds).ok


def test_cupy_makes_results_of_8_bits(monkeypatch):
    """CuPy allocates no FP8: of each op, by a first call and by one whose plan is known."""
    pytest.importorskip("cupy")
    kinds = "float8_e4m3fn", "float32", "float8_e5m2"
    made = [dtypes.NAMES[kind] for kind in kinds]
    with fake_gpu(monkeypatch) as gpu:
        a, b = gpu.array((40, 64), "float16"), gpu.array((64, 48), "float16")
        codes = gpu.asarray(np.zeros((64, 48), dtypes.float8_e4m3fn))
        for _ in range(2):
            results = (
                cupykern.matmul(a, b, epilogue=SEVERAL, operands={"s": 2.0}, out_dtype=kinds),
                cupykern.scaled_mm(
                    a, codes, epilogue=SEVERAL, operands={"s": 2.0}, out_dtype=kinds
                ),
                cupykern.dual_gemm_silu(
                    a, b, b, epilogue=OF_GATE, operands={"s": 2.0}, out_dtype=kinds
                ),
            )
            assert all([y.dtype for y in ys] == made for ys in results)


# --- mainloops -----------------------------------------------------------------------------------


@pytest.mark.thinned(8)
@pytest.mark.parametrize("m", [1, 35])
@pytest.mark.parametrize(("formula", "kinds"), [(FORMULA, NARROW[0]), (SEVERAL, MIXED[0])])
@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_pair_of_dtypes(target, dtype, dtype_b, formula, kinds, m):
    problem = MatmulProblem(m, 43, 80, dtype, dtype_b, (2,), layout_b="F")
    assert_rounded(MATMUL, target, problem, formula, kinds)


@pytest.mark.parametrize("kinds", [*NARROW, *MIXED])
@pytest.mark.parametrize("config", [None, GemmConfig(64, 64, 64, 2, 2, splits=3)])
def test_narrow_results_are_the_wide_ones_rounded(target, kinds, config):
    formula = SEVERAL if isinstance(kinds, tuple) else FORMULA
    assert_rounded(MATMUL, target, MatmulProblem(20, 75, 640), formula, kinds, config)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("m", [3, 35])
@pytest.mark.parametrize("kinds", [NARROW[0], MIXED[0], MIXED[1]])
@pytest.mark.parametrize(
    ("dtype", "dtype_b"),
    [
        *(FLOAT32[0], ("float16", "float16"), ("bfloat16", "int8"), ("float8_e4m3fn",) * 2),
        (NVFP4,) * 2,
    ],
)
def test_narrow_results_of_gates_are_the_wide_ones_rounded(target, dtype, dtype_b, kinds, m):
    formula = OF_GATE if isinstance(kinds, tuple) else "acc1 * s"
    assert_rounded(DUAL, target, DualProblem(m, 43, 80, dtype, dtype_b), formula, kinds)


@needs.hopper
@pytest.mark.thinned(6)
@pytest.mark.parametrize("kinds", [*NARROW, *MIXED])
@pytest.mark.parametrize(("config", "problem"), HOPPER)
def test_narrow_results_of_every_hopper_mainloop_are_the_wide_ones_rounded(
    target, config, problem, kinds
):
    op = SCALED if isinstance(problem, ScaledProblem) else MATMUL
    formula = SEVERAL if isinstance(kinds, tuple) else FORMULA
    assert_rounded(op, target, problem, formula, kinds, config)


@needs.hopper
@pytest.mark.thinned(4)
@pytest.mark.parametrize("kinds", [NARROW[0], MIXED[0]])
@pytest.mark.parametrize("problem", HOPPER_GATES, ids=str)
def test_narrow_results_of_hopper_gates_are_the_wide_ones_rounded(
    target, problem, kinds, exhaustive
):
    own = replace(problem, epilogue="acc1 * s", out_dtype=NARROW[0])
    for config in hoppers_gate_configs(own, exhaustive):
        formula = OF_GATE if isinstance(kinds, tuple) else "acc1 * s"
        assert_rounded(DUAL, target, problem, formula, kinds, config)


@needs.hopper
@pytest.mark.parametrize("columns", [128, 129, 136, 144])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_hopper_writes_its_result_and_nothing_else(target, columns, offset):
    """Rows that begin at multiples of 16 bytes, of 8 and of neither."""
    xp = target.xp
    a = random(target, (70, 136), "float16", 1)
    b = random(target, (columns, 136), "float16", 2).T
    config = Sm90GemmConfig(128, 128, 64, 3)
    wanted = cupykern.matmul(a, b, epilogue="acc", out_dtype="int8", config=config)
    for step in (1, 2):
        frame = xp.full((72, 176 * step), 77, np.int8)
        out = frame[1:71, offset : offset + columns * step : step]
        cupykern.matmul(a, b, epilogue="acc", out_dtype="int8", config=config, out=out)
        np.testing.assert_array_equal(to_numpy(out), to_numpy(wanted))
        out[:] = 77
        assert (to_numpy(frame) == 77).all()


@needs.hopper
def test_every_schedule_gives_the_same_bits():
    check_schedules_agree(epilogue=SEVERAL, out_dtype=MIXED[0])


@pytest.mark.parametrize("sides", ["a", "b", "ab"])
def test_nvfp4_on_either_side(target, sides):
    """With an NvFp4 a alone it is the transposed product that is computed."""
    a, b = with_nvfp4(target, sides)
    kwargs = {"epilogue": "acc * s", "operands": {"s": random(target, (40,), "float32", 3)}}
    for name in NARROW:
        out = cupykern.empty((24, 40), name, target=target.name)
        assert compare(SCALED, a, b, **kwargs, out_dtype=name).ok
        assert cupykern.scaled_mm(a, b, **kwargs, out_dtype=name, out=out) is out


# --- values --------------------------------------------------------------------------------------


def test_integers_are_exact(target):
    xp = target.xp
    for name, reach in (("int8", 127), ("float8_e4m3fn", 16), ("float8_e5m2", 8)):
        x = xp.asarray(np.arange(-reach, reach + 1, dtype=np.float32)[:, None])
        y = cupykern.matmul(x, xp.ones((1, 20), np.float32), epilogue="acc", out_dtype=name)
        wanted = np.arange(-reach, reach + 1)[:, None] + np.zeros((1, 20))
        np.testing.assert_array_equal(to_numpy(y).astype(np.float64), wanted)


@pytest.mark.parametrize("name", NARROW)
def test_halves_go_to_even_and_numbers_beyond_saturate(target, name):
    xp, (low, high) = target.xp, RANGES[name]
    values = np.float32(
        [0.5, 1.5, -2.5, 17, 19, -25, 126.5, 127.5, -128.5, 464, -480, 1e6, -1e6, 3e38, 2**-10]
    )
    tiny = xp.ones((1, 1), np.float32)
    y = to_numpy(cupykern.matmul(xp.asarray(values)[:, None], tiny, epilogue="acc", out_dtype=name))
    np.testing.assert_array_equal(y[:, 0], rounded(values, name))
    assert float(y[-2, 0]) == high and float(y[-3, 0]) == low


@pytest.mark.parametrize("name", NARROW)
def test_nan_and_infinities_are_those_of_quantize(target, name):
    """NaN stays NaN and is 0 in int8; infinities saturate."""
    xp = target.xp
    a = xp.asarray(np.float32([[np.nan], [np.inf], [-np.inf], [1]]))
    b = xp.ones((1, 24), np.float32)
    y = to_numpy(cupykern.matmul(a, b, epilogue="acc", out_dtype=name)).astype(np.float64)
    low, high = RANGES[name]
    nan = 0.0 if name == "int8" else np.nan
    np.testing.assert_array_equal(y, np.float64([[nan], [high], [low], [1]]) + np.zeros((1, 24)))
    assert compare(MATMUL, a, b, epilogue="acc", out_dtype=name).ok
    codes, _ = cupykern.quantize(a[:1], name.removeprefix("float8_").removesuffix("fn"))
    np.testing.assert_array_equal(to_numpy(codes).astype(np.float64), y[:1, :1])


@pytest.mark.parametrize("name", NARROW)
def test_the_bound_finds_truncation_and_is_zero_beyond_the_range(name):
    low, high = RANGES[name]
    problem = MatmulProblem(70, 75, 128, epilogue="acc * k", out_dtype=name)
    call = MATMUL.inputs(problem, 1, np)
    call.kwargs["operands"] = {"k": high / 16}
    exact = MATMUL.reference(*call.args, **call.kwargs)
    (bound,) = MATMUL.bound(*call.args, **call.kwargs, reference=exact)
    beyond = (exact[0] == low) | (exact[0] == high)
    assert 0.01 < beyond.mean() < 0.5 and (bound.elementwise[beyond] == 0).all()
    nearest = rounded(exact[0], name)
    assert check.compare((nearest,), exact, (bound,)).ok
    toward_zero = rounded(exact[0] - np.sign(exact[0]) * bound.elementwise / 2, name)
    toward_zero[beyond] = nearest[beyond]
    assert not check.compare((toward_zero,), exact, (bound,)).within_bound
    wraps = nearest.copy()
    wraps[beyond] = dtypes.NAMES[name].type(0)
    assert not check.compare((wraps,), exact, (bound,)).within_bound


def test_a_static_scale_feeds_the_next_product(target):
    xp = target.xp
    x, up, down = (
        cupykern.quantize(random(target, shape, "float32", seed), "e4m3")[0]
        for seed, shape in enumerate(((24, 64), (64, 48), (48, 32)))
    )
    h = cupykern.scaled_mm(
        x, up, 1 / 64, 1 / 64, epilogue="maximum(acc, 0) * s", operands={"s": 1 / 8},
        out_dtype="float8_e4m3fn",
    )  # fmt: skip
    assert h.dtype == dtypes.float8_e4m3fn
    y = cupykern.scaled_mm(h, down, 8.0, 1 / 64, out_dtype="float32")
    first = (to_numpy(x).astype(np.float64) @ to_numpy(up).astype(np.float64)) / 2**12
    codes = rounded(np.maximum(first, 0) / 8, "float8_e4m3fn")
    wanted = codes.astype(np.float64) @ to_numpy(down).astype(np.float64) / 8
    np.testing.assert_allclose(to_numpy(y), wanted, rtol=1e-3, atol=0.05 * abs(wanted).max())
    assert xp.asarray(y).shape == (24, 32)


def test_out_and_vectors(target):
    a = target.xp.ones((4, 8), np.float16)
    guarded = check.GuardedArray(target.xp, (4, 4), dtypes.float8_e4m3fn)
    y, z = cupykern.matmul(
        a, a.T, epilogue="acc, -acc", out_dtype=("float8_e4m3fn", "int8"), out=guarded.array
    )
    assert y is guarded.array and z.dtype == np.int8
    guarded.check()
    assert (to_numpy(y).astype(float) == 8).all() and (to_numpy(z) == -8).all()
    frame = target.xp.full((4, 12), 7, np.int8)
    cupykern.matmul(a, a.T, epilogue="acc * 2", out_dtype="int8", out=frame[:, ::3])
    assert (to_numpy(frame)[:, ::3] == 16).all() and (to_numpy(frame)[:, 1::3] == 7).all()
    v = cupykern.matmul(a[0], a.T, epilogue="acc + j", out_dtype="int8")
    assert to_numpy(v).tolist() == [8, 9, 10, 11]
    empty = cupykern.matmul(a[:, :0], a.T[:0], epilogue="acc + j", out_dtype="int8")
    assert to_numpy(empty)[0].tolist() == [0, 1, 2, 3]


def test_as_many_operands_as_in_16_bits(target):
    a = target.xp.ones((4, 4), np.float16)
    operands = {f"x{k}": target.xp.full((4, 1), k, np.float32) for k in range(8)}
    text = "acc + " + " + ".join(operands)
    y = cupykern.matmul(a, a, epilogue=text, operands=operands, out_dtype="int8")
    assert (to_numpy(y) == 32).all()


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NARROW)
def test_without_a_formula_they_are_refused(name):
    a = np.ones((4, 4), np.float16)
    for out_dtype in (name, dtypes.NAMES[name]):
        for call, hint in (
            (lambda d: cupykern.matmul(a, a, out_dtype=d), "epilogue='acc'"),
            (lambda d: cupykern.scaled_mm(a, a.astype(np.int8), out_dtype=d), "epilogue='acc'"),
            (lambda d: cupykern.dual_gemm_silu(a, a, a, out_dtype=d), "sigmoid"),
        ):
            with pytest.raises(TypeError, match=rf"{name} where there is a formula.*{hint}"):
                call(out_dtype)
    with pytest.raises(TypeError, match=r"out_dtype must be one of.*int8; got 'int16'"):
        cupykern.matmul(a, a, epilogue="acc", out_dtype="int16")


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a"])
@pytest.mark.parametrize("kinds", [NARROW[0], MIXED[0]])
def test_they_compile_without_local_memory(arch, kinds):
    several = isinstance(kinds, tuple)
    problem = MatmulProblem(
        512, 512, 512, "float8_e4m3fn", layout_b="F", epilogue=SEVERAL if several else FORMULA,
        out_dtype=kinds,
    )  # fmt: skip
    gate = DualProblem(
        512, 512, 512, "bfloat16", "bfloat16", epilogue=OF_GATE if several else "acc1 * s",
        out_dtype=kinds,
    )  # fmt: skip
    for task in (task_of(problem), dual_gemm.task_of(gate)):
        variant = gemm.choose_config(task, arch).variant(task)
        try:
            usage = offline.compile_offline(variant, arch)
        except UnavailableError as missing:
            pytest.skip(str(missing))
        assert not usage.local_bytes and not usage.warnings
