"""Formulas as the gate of dual_gemm_silu: every mainloop, operands and errors."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from products import DUAL, array, compare, random, to_numpy

import cupykern
from cupykern import check, dtypes, reference
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.portable_config import GemmConfig
from cupykern.ops.checks.gates import SILU
from cupykern.ops.problems.dual_gemm import FLOAT32, GATES, PAIRS, DualProblem, task_of
from cupykern.ops.problems.products import NVFP4
from cupykern.targets import UnavailableError, host, offline

GPT_OSS, GEGLU, WHERE = GATES


def check_gate(target, problem, config=None, **kwargs) -> None:
    call = DUAL.inputs(problem, 1, target.xp)
    options = {**call.kwargs, **kwargs} | ({} if config is None else {"config": config})
    comparison = compare(DUAL, *call.args, **options)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


# --- mainloops -----------------------------------------------------------------------------------


@pytest.mark.thinned(5)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("dtype", "dtype_b"), (*PAIRS, *FLOAT32))
def test_every_pair_of_dtypes(target, dtype, dtype_b, gate):
    for layout, m, k in (("F", 35, 272), ("C", 17, 48)):
        problem = DualProblem(
            *(m, 44, k, dtype, dtype_b), layout_b1=layout, layout_b2=layout, epilogue=gate
        )
        check_gate(target, problem)
        check_gate(target, replace(problem, batch_a=(2,), out_dtype="float32"))


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_the_formula_is_of_the_whole_sums(target, splits):
    """One that is not linear: of partial sums it is another one."""
    config = GemmConfig(64, 64, 64, 2, 2, splits=splits)
    check_gate(target, DualProblem(20, 72, 640, epilogue=WHERE, out_dtype="float32"), config)


@pytest.mark.parametrize("scales", ["numbers", "tensor", "rows", "blocks"])
def test_scales_come_first(target, scales):
    for pair in (("float16", "int8"), ("float8_e4m3fn", "float8_e4m3fn")):
        check_gate(target, DualProblem(40, 140, 300, *pair, scales=scales, epilogue=GEGLU))


HOPPER = (
    DualProblem(200, 200, 208),
    DualProblem(136, 72, 400, "bfloat16", "bfloat16", layout_b1="C", layout_b2="C"),
    DualProblem(130, 75, 144, out_dtype="float32", scales="numbers", batch_a=(2,)),
    DualProblem(260, 140, 272, "float8_e4m3fn", "float8_e4m3fn", scales="rows"),
    DualProblem(140, 136, 96, NVFP4, NVFP4, batch_a=(2, 1), batch_b=(3,)),
    DualProblem(70, 136, 272, "bfloat16", "int8", scales="rows"),
    DualProblem(9, 200, 272, "bfloat16", "bfloat16", batch_a=(2,)),
    DualProblem(16, 300, 1040, "float8_e4m3fn", "float8_e4m3fn", scales="tensor"),
)


@needs.hopper
@pytest.mark.thinned(2)
@pytest.mark.parametrize("gate", [GPT_OSS, WHERE])
@pytest.mark.parametrize("problem", HOPPER, ids=str)
def test_a_gate_on_every_hopper_mainloop_is_within_the_bound(target, problem, gate, exhaustive):
    """As many configs as without a formula; of these every second."""
    own = replace(problem, epilogue=gate)
    task = task_of(own)
    found = sm90_heuristic.compiled_ahead(task, gemm.configs(task, "sm_90a"))
    configs = [c for c in found if isinstance(c, sm90_heuristic.CONFIGS)]
    assert configs
    for config in configs[:: 1 if exhaustive else 2]:
        check_gate(target, own, config)


@needs.hopper
def test_every_schedule_gives_the_same_bits():
    call = DUAL.inputs(replace(HOPPER[0], epilogue=WHERE), 1, np)
    bits = set()
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule):
            bits.add(cupykern.dual_gemm_silu(*call.args, **call.kwargs).tobytes())
    assert len(bits) == 1


# --- formulas ------------------------------------------------------------------------------------


def test_silu_as_a_formula_is_silu(target):
    """Within both bounds of the same reference."""
    call = DUAL.inputs(DualProblem(33, 40, 64, out_dtype="float32"), 1, target.xp)
    y = cupykern.dual_gemm_silu(*call.args, **call.kwargs, epilogue=SILU)
    assert compare(DUAL, *call.args, **call.kwargs, outputs=y).ok
    assert compare(DUAL, *call.args, **call.kwargs, epilogue=SILU, outputs=y).ok


def test_acc1_is_of_b1_and_acc2_of_b2(target):
    for dtype in ("float16", "float32"):
        a, b1, b2 = (
            array(target, np.random.default_rng(k).integers(-4, 5, shape), dtype)
            for k, shape in enumerate(((9, 16), (16, 20), (16, 20)))
        )
        for formula, of in (("acc1", lambda x, y: x), ("acc2 - 2 * acc1", lambda x, y: y - 2 * x)):
            y = cupykern.dual_gemm_silu(a, b1, b2, epilogue=formula, out_dtype="float32")
            x1, x2 = (to_numpy(a).astype(float) @ to_numpy(b).astype(float) for b in (b1, b2))
            np.testing.assert_array_equal(to_numpy(y), of(x1, x2))


def test_interleaved_columns_are_views(target):
    """Weights whose rows are of gate and linear part in turn, as gpt-oss has them."""
    a, w = random(target, (17, 64), "float16", 1), random(target, (48, 64), "float16", 2)
    y = cupykern.dual_gemm_silu(a, w[::2].T, w[1::2].T, epilogue="acc1 * acc2")
    xp = target.xp
    other = (xp.ascontiguousarray(x).T for x in (w[::2], w[1::2]))
    z = cupykern.dual_gemm_silu(a, *other, epilogue="acc1 * acc2")
    np.testing.assert_array_equal(to_numpy(y), to_numpy(z))


@pytest.mark.in_turn()
def test_operands_of_every_dtype_and_shape(target):
    a = random(target, (3, 9, 16), "float16", 1)
    b1, b2 = (random(target, (16, 20), "float16", k) for k in (2, 3))
    for number, dtype in enumerate(("float16", "bfloat16", "float32", "int8", "float8_e4m3fn")):
        for shape in ((), (20,), (9, 1), (3, 1, 20), (3, 9, 20)):
            values = np.random.default_rng(number).integers(-8, 9, shape)
            x = array(target, values, dtype)
            kwargs = {"operands": {"x": x}, "epilogue": "acc1 * x - b + acc2"}
            assert compare(DUAL, a, b1, b2, **kwargs, out_dtype="float32").ok, shape


def test_seven_operands_of_float32_too(target):
    operands = {f"x{k}": k if k % 2 else target.xp.full(4, k, np.float32) for k in range(7)}
    formula = "acc2 - acc2 + " + " + ".join(f"{10**k}.0 * x{6 - k}" for k in range(7))
    for dtype in ("float16", "float32"):
        a = target.xp.ones((4, 4), dtype)
        options = {"epilogue": formula, "operands": operands, "out_dtype": "float32"}
        y = cupykern.dual_gemm_silu(a, a, a, **options)
        assert (to_numpy(y) == np.float32(123456)).all()
    options = {"epilogue": f"{formula} + x7", "operands": {**operands, "x7": 1}}
    with pytest.raises(ValueError, match="at most 7"):
        cupykern.dual_gemm_silu(a, a, a, **options)


def test_callables_and_expressions(target):
    a, b = random(target, (9, 16), "float16", 1), random(target, (16, 20), "float16", 2)

    def formula(acc1, acc2, s, maximum):
        return maximum(acc1, 0) * acc2 * s

    text = "maximum(acc1, 0) * acc2 * s"
    assert cupykern.expression(formula, "gate") == cupykern.expression(text, "gate")
    one, two, three = (
        to_numpy(cupykern.dual_gemm_silu(a, b, -b, epilogue=f, operands={"s": 2}))
        for f in (text, formula, cupykern.expression(text, "gate"))
    )
    assert (one == two).all() and (one == three).all()
    printed = str(cupykern.expression(text, "gate"))
    assert "float acc1, float acc2" in printed and "e(acc1), e(acc2)" in printed


def test_sizes_without_elements(target):
    a, b = target.xp.ones((3, 0), np.float16), target.xp.ones((0, 5), np.float16)
    y = cupykern.dual_gemm_silu(a, b, b, epilogue="acc1 + acc2 + j")
    np.testing.assert_array_equal(to_numpy(y), np.tile(np.arange(5), (3, 1)))
    assert cupykern.dual_gemm_silu(a[:0], b, b, epilogue="acc1").shape == (0, 5)


def test_a_batch_that_does_not_merge(target):
    """More dims than a kernel walks: each first matrix by a launch, whose `b` goes on."""
    shape = (2, 2, 2, 2, 2, 3, 8)
    a = random(target, tuple(2 * n for n in shape), "float16", 1)
    a = a[tuple(slice(None, None, 2) for _ in shape)]
    b = random(target, (8, 5), "float16", 2)
    assert compare(DUAL, a, b, -b, epilogue="acc1 - 2 * acc2 + b").ok


def test_the_bound_holds_the_errors_of_both_products():
    """Of acc1 * acc2: |acc1| e2 + |acc2| e1 and more."""
    call = DUAL.inputs(DualProblem(9, 20, 64, out_dtype="float32"), 1, np)
    bounds = []
    for formula in ("acc1", "acc2", "acc1 * acc2"):
        exact = reference.dual_gemm_silu(*call.args, epilogue=formula)
        options = {"epilogue": formula, "reference": exact, "out_dtype": "float32"}
        bounds.append((exact[0], reference.dual_gemm_silu_bound(*call.args, **options)[0]))
    (x, of_x), (y, of_y), (_, of_product) = bounds
    least = abs(x) * of_y.elementwise + abs(y) * of_x.elementwise
    assert (of_product.elementwise >= 0.9 * least).all()


def test_equal_columns_of_either_product_share_their_errors():
    b = np.random.default_rng(1).standard_normal((2, 64, 20)).astype(np.float16)
    a, equal = np.ones((9, 64), np.float16), np.broadcast_to(b[0, :, :1], (64, 20))
    for b1, b2 in ((b[0], equal), (equal, b[1])):
        exact = reference.dual_gemm_silu(a, b1, b2, epilogue="acc1 + acc2")
        options = {"epilogue": "acc1 + acc2", "reference": exact, "out_dtype": "float32"}
        (bound,) = reference.dual_gemm_silu_bound(a, b1, b2, **options)
        assert np.all(bound.shared > 0) and np.all(bound.shared < bound.rms)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "reason"),
    [
        ({"epilogue": "acc1 + x"}, NameError, r"name 'x' \(line 1, column 8\) is not an operand"),
        ({"epilogue": "acc"}, NameError, "known: acc1, acc2, i, j, b"),
        ({"epilogue": "acc1", "operands": {"x": 1}}, ValueError, "does not name 'x'"),
        ({"epilogue": "acc1", "operands": {"acc2": 1}}, ValueError, "names that are free"),
        ({"operands": {"x": 1}}, ValueError, "epilogue, which is None"),
        ({"epilogue": "acc1", "policy": "fp16"}, ValueError, "'fp32' beside epilogue; got 'fp16'"),
        ({"epilogue": "acc1 ** 2"}, SyntaxError, "in place of"),
        ({"epilogue": cupykern.expression("acc")}, TypeError, "kind 'gate'; got 'epilogue'"),
        (
            {"epilogue": "acc1 + x", "operands": {"x": np.ones(5, np.float32)}},
            *(ValueError, r"operands\['x'\] must broadcast to \(4, 4\)"),
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_wrong_gates_and_operands_are_named(dtype, kwargs, error, reason):
    a = np.ones((4, 4), dtype)
    with pytest.raises(error, match=reason):
        cupykern.dual_gemm_silu(a, a, a, **kwargs)


def test_out_must_be_apart_from_operands(target):
    a, x = target.xp.ones((4, 4), np.float16), target.xp.ones((4, 4), np.float32)
    options = {"epilogue": "acc1 + acc2 + x", "operands": {"x": x}, "out_dtype": "float32"}
    with pytest.raises(ValueError, match="out must not overlap"):
        cupykern.dual_gemm_silu(a, a, a, **options, out=x)
    guarded = check.GuardedArray(target.xp, (4, 4), dtypes.float32)
    assert cupykern.dual_gemm_silu(a, a, a, **options, out=guarded.array) is guarded.array
    guarded.check()
    assert (to_numpy(guarded.array) == 9).all()


# --- compiled ------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "gfx90a"])
@pytest.mark.parametrize("gate", GATES)
def test_gates_compile_without_local_memory(arch, gate):
    task = task_of(DualProblem(512, 512, 512, "bfloat16", "bfloat16", epilogue=gate))
    variant = gemm.choose_config(task, arch).variant(task)
    assert variant.kernel.startswith("dual_gemm_expression")
    try:
        usage = offline.compile_offline(variant, arch)
    except UnavailableError as missing:
        pytest.skip(str(missing))
    assert not usage.local_bytes and not usage.warnings
