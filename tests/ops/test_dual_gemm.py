"""What dual_gemm_silu alone promises."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import needs
import numpy as np
import pytest
from click.testing import CliRunner
from dual_gemm_checks import check_fp16_policy, to_numpy
from products import DUAL

import cupykern
from cupykern import OPS, check, cli, dtypes, nvfp4, reference
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.gemm import GemmConfig
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import FLOAT16S, FP4
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.gemm.sm90_dual_config import Sm90DualGemmConfig
from cupykern.gemm.sm90_policies import Multicast, SlicedK, SplitK
from cupykern.numerics import finfo
from cupykern.op import Call
from cupykern.ops.checks.gates import POLICIES
from cupykern.ops.problems.dual_gemm import PAIRS, DualProblem, task_layouts, task_of
from cupykern.ops.problems.products import NVFP4, with_layout
from cupykern.reference.dual_gemm import SLOPE
from cupykern.reference.matmul import scaled_product
from cupykern.targets import host
from cupykern.tools import options, policies


def compare(*args, outputs=None, **kwargs) -> check.Comparison:
    if outputs is None:
        outputs = DUAL.run(*args, **kwargs)
    kwargs.pop("config", None)
    references = DUAL.reference(*args, **kwargs)
    bounds = DUAL.bound(*args, **kwargs, reference=references)
    return check.compare((outputs,), references, bounds)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@needs.hopper
@pytest.mark.parametrize("precision", ["float32", "fma", "tf32", "bf16x6"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_products_of_float32(target, precision, batch):
    problem = DualProblem(70, 144, 200, "float32", "float32", batch, layout_b2="C", kind="unit")
    call = DUAL.inputs(problem, 1, target.xp)
    assert compare(*call.args, precision=precision).ok
    assert compare(*call.args, precision=precision, out_dtype="float16").ok


@pytest.mark.parametrize(("dtype", "dtype_b"), PAIRS)
def test_every_config_of_every_pair_is_within_the_bound(target, dtype, dtype_b):
    """Tails in all three sizes; vectors of both orders and element by element; split k."""
    seen = set()
    scales = "blocks" if dtype_b in ("float8_e4m3fn", "int8") else "none"
    for m, n, k, layout, kind in (
        (80, 144, 272, "F", "none"),
        (80, 144, 272, "C", "none"),
        (70, 75, 272, "C", "none"),
        (40, 140, 272, "F", scales),
    ):
        problem = DualProblem(
            m, n, k, dtype, dtype_b, layout_b1=layout, layout_b2=layout, scales=kind
        )
        task = task_of(problem)
        for config in gemm.configs(task, target.arch):
            variant = gemm.variant(task, config)
            if variant in seen or not isinstance(config, GemmConfig):
                continue
            seen.add(variant)
            call = DUAL.inputs(problem, 1, target.xp)
            config = replace(config, splits=1 + len(seen) % 3)
            comparison = compare(*call.args, **call.kwargs, config=config, out_dtype="float32")
            assert comparison.ok, f"{problem!r} {config}: {comparison}"
    assert seen


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [64, 1024])
def test_errors_are_at_most_those_of_the_two_products(target, dtype, k):
    """|err| <= tau (1.1 |d2| + |silu(d1)|) + 1 ulp of the output, tau the product's own bound."""
    for kind in ("unit", "same_sign"):
        problem = DualProblem(33, 40, k, dtype, dtype, kind=kind, scales="numbers")
        call = DUAL.inputs(problem, 3, target.xp)
        (expected,) = map(to_numpy, DUAL.reference(*call.args, **call.kwargs))
        a, *bs = call.args
        products = (
            scaled_product(a, b, call.kwargs["scale_a"], call.kwargs[f"scale_{name}"])
            for name, b in zip(("b1", "b2"), bs, strict=True)
        )
        (d1, tau1), (d2, tau2) = (map(to_numpy, (p.exact, p.worst)) for p in products)
        got = to_numpy(DUAL.run(*call.args, **call.kwargs))
        info = finfo(dtype)
        ulp = np.maximum(
            info.eps * np.exp2(np.floor(np.log2(np.abs(expected)))), info.min_subnormal
        )
        gate = SLOPE * tau1 * np.abs(d2) + tau2 * np.abs(silu(d1)) + ulp
        finite = np.isfinite(got)
        assert (np.abs(got - expected) <= gate)[finite].all()
        assert (np.abs(expected[~finite]) > 0.99 * info.max).all()


def test_integers_are_exact(target):
    """d2 of whole numbers, d1 so large that silu is the identity: silu(d1) d2 is a whole number."""
    rng = np.random.default_rng(7)
    for dtype, dtype_b in (("float16", "float16"), ("bfloat16", "float8_e4m3fn"), ("int8", "int8")):
        for m, n, k in ((70, 33, 200), (5, 150, 64), (17, 64, 1000)):
            a = rng.integers(0, 3, (m, k))
            b1, b2 = rng.integers(1, 3, (k, n)), rng.integers(-2, 3, (k, n))
            a[:, 0], b1[0] = 8, 8  # accumulators of at least 64
            arrays = (
                with_layout(x.astype(dtypes.NAMES[name]), layout, target.xp)
                for x, name, layout in ((a, dtype, "C"), (b1, dtype_b, "F"), (b2, dtype_b, "F"))
            )
            y = to_numpy(cupykern.dual_gemm_silu(*arrays, out_dtype="float32"))
            np.testing.assert_array_equal(y, (a @ b1) * (a @ b2))


def test_nan_and_infinity_stand_where_they_should(target):
    a = np.ones((6, 32), np.float16)
    b1, b2 = np.full((32, 8), 0.25, np.float16), np.full((32, 8), 0.5, np.float16)
    a[1, 3], a[2, 4], b1[5, 6], b2[7, 2], b1[0, 3] = np.nan, np.inf, -np.inf, np.inf, np.nan
    args = tuple(map(target.xp.asarray, (a, b1, b2)))
    assert compare(*args).ok
    y = to_numpy(cupykern.dual_gemm_silu(*args))
    assert np.isnan(y[1]).all() and np.isnan(y[:, 6]).all() and np.isnan(y[:, 3]).all()
    assert np.isposinf(y[0, 2]) and np.isposinf(y[2, 0])


def test_large_negative_gates_give_zero_but_nan_with_policy_fp16(target):
    """The policy "fp16" gives NaN there, as it says; the others give zero."""
    a, b = np.full((1, 16), -100, np.float16), np.full((16, 3), 100, np.float16)
    ones = np.full((16, 3), 1 / 128, np.float16)
    args = tuple(map(target.xp.asarray, (a, b, ones)))
    found = {policy: to_numpy(cupykern.dual_gemm_silu(*args, policy=policy)) for policy in POLICIES}
    assert (found["fp32"] == 0).all() and (found["hybrid"] == 0).all()
    assert np.isnan(found["fp16"]).all()


def test_policies_round_where_they_say(target):
    """One product each, of numbers at which the policies differ."""
    x = np.linspace(-12, 12, 97)[None].astype(np.float16)
    factors = np.full((1, 97), 1 + 2.0**-10, np.float16)
    pad = np.zeros((7, 97), np.float16)
    a = target.xp.asarray(np.eye(1, 8, dtype=np.float16))
    b1, b2 = (target.xp.asarray(np.concatenate([row, pad])) for row in (x, factors))
    exact = silu(x.astype(np.float64))
    half = lambda v: v.astype(np.float16).astype(np.float64)  # noqa: E731
    found = {
        policy: to_numpy(cupykern.dual_gemm_silu(a, b1, b2, policy=policy, out_dtype="float32"))
        for policy in POLICIES
    }
    np.testing.assert_allclose(found["fp32"], exact * (1 + 2.0**-10), rtol=2e-5)
    np.testing.assert_array_equal(found["hybrid"], half(found["hybrid"]))
    hybrid = half(half(exact) * (1 + 2.0**-10))
    assert (np.abs(found["hybrid"] - hybrid) <= 2.0**-9 * np.abs(hybrid)).all()
    assert (found["fp16"][x < -11.1] == 0).all() and (hybrid[x < -11.1] != 0).all()
    assert not (found["fp16"] == found["hybrid"]).all()


def test_the_fp16_policy_rounds_every_operation(target):
    check_fp16_policy(target)


def test_splits_and_schedules_change_no_bit(target):
    problem = DualProblem(20, 70, 1500)
    call = DUAL.inputs(problem, 1, target.xp)
    config = replace(gemm.choose_config(task_of(problem), target.arch), splits=5)
    first = to_numpy(cupykern.dual_gemm_silu(*call.args, config=config))
    for schedule in ("fifo", "lifo", "sticky:3"):
        if target.name == "host":
            with host.use(schedule=schedule, warp_size=target.warp_size):
                again = to_numpy(cupykern.dual_gemm_silu(*call.args, config=config))
        else:
            again = to_numpy(cupykern.dual_gemm_silu(*call.args, config=config))
        np.testing.assert_array_equal(again, first)


def test_out_may_have_any_layout(target):
    xp = target.xp
    call = DUAL.inputs(DualProblem(20, 24, 64), 1, xp)
    expected = to_numpy(cupykern.dual_gemm_silu(*call.args))
    frame = xp.full((26, 60), 7, np.float16)
    for out in (xp.full((24, 20), 7, np.float16).T, frame[3:23, 5:53:2], frame[22:2:-1, 40:16:-1]):
        assert cupykern.dual_gemm_silu(*call.args, out=out) is out
        np.testing.assert_array_equal(to_numpy(out), expected)
        out[...] = 7
    assert (to_numpy(frame) == 7).all()


def test_the_default_dtype_follows_the_operands(target):
    for (dtype, dtype_b), wanted in (
        (("bfloat16", "int8"), "bfloat16"),
        (("float8_e4m3fn", "float8_e5m2"), "float16"),
        (("int8", "int8"), "float16"),
        ((NVFP4, NVFP4), "float16"),
    ):
        call = DUAL.inputs(DualProblem(3, 5, 32, dtype, dtype_b), 1, target.xp)
        assert DUAL.run(*call.args).dtype == dtypes.NAMES[wanted]


def test_empty_arrays_give_empty_results(target):
    for shape_a, shape_b in (((0, 16), (16, 4)), ((3, 16), (16, 0)), ((2, 0, 3, 16), (16, 4))):
        a, b = (target.xp.ones(s, np.float16) for s in (shape_a, shape_b))
        assert cupykern.dual_gemm_silu(a, b, b).shape == (*shape_a[:-1], shape_b[-1])
    a, b = target.xp.ones((3, 0), np.float16), target.xp.ones((0, 4), np.float16)
    assert (to_numpy(cupykern.dual_gemm_silu(a, b, b)) == 0).all()


# --- Hopper's main loop --------------------------------------------------------------------------

HOPPER = (
    DualProblem(200, 200, 208),
    DualProblem(
        136, 72, 400, "bfloat16", "bfloat16", layout_b1="C", layout_b2="C", policy="hybrid"
    ),
    DualProblem(130, 75, 144, out_dtype="float32", scales="numbers", batch_a=(2,)),
    DualProblem(70, 80, 400, "float8_e4m3fn", "float8_e4m3fn", scales="rows", policy="fp16"),
    DualProblem(
        260, 140, 272, "float8_e4m3fn", "float8_e4m3fn", scales="tensor", out_dtype="bfloat16"
    ),
    DualProblem(
        140, 272, 400, "float8_e4m3fn", "float8_e4m3fn", batch_a=(2,),
        scales="blocks",
    ),
    DualProblem(
        9, 200, 1424, "float8_e4m3fn", "float8_e4m3fn", scales="blocks", out_dtype="float32"
    ),
    DualProblem(140, 136, 96, NVFP4, NVFP4, batch_a=(2, 1), batch_b=(3,)),
    DualProblem(70, 200, 272, "bfloat16", "float8_e4m3fn", scales="rows"),
    DualProblem(130, 75, 400, "float16", "int8", batch_a=(2,), scales="tensor", policy="hybrid"),
    DualProblem(9, 200, 272, "bfloat16", "bfloat16", batch_a=(2,), policy="hybrid"),
    DualProblem(9, 200, 272, "float8_e4m3fn", "float8_e4m3fn", batch_a=(2,), scales="rows"),
    DualProblem(16, 300, 1040, "float8_e4m3fn", "float8_e4m3fn", scales="tensor", policy="hybrid"),
)  # fmt: skip


def hopper_configs(problem) -> list[Any]:
    """But for most of those widths that are many."""
    task = task_of(problem)
    configs = sm90_heuristic.compiled_ahead(task, gemm.configs(task, "sm_90a"))
    return [config for config in configs if isinstance(config, sm90_heuristic.CONFIGS)]


@needs.hopper
@pytest.mark.parametrize("problem", HOPPER, ids=str)
def test_hoppers_mainloop_is_within_the_bound(target, problem, exhaustive):
    """Of the configs every second."""
    call = DUAL.inputs(problem, 1, target.xp)
    configs = hopper_configs(problem)
    assert configs
    first = 0 if exhaustive else HOPPER.index(problem) % min(2, len(configs))
    for config in configs[first :: 1 if exhaustive else 2]:
        comparison = compare(*call.args, **call.kwargs, config=config)
        assert comparison.ok, f"{config}: {comparison}"


def test_configs_that_hoppers_mainloop_cannot_take_are_refused():
    for change, says in (
        ({"dtype_b": "float8_e5m2"}, "two 16-bit or int8 operands"),
        ({"scales": "rows"}, "TMA takes K-major"),  # of 16-bit operands
        ({"layout_b2": "C"}, "TMA takes K-major"),
    ):
        task = task_of(replace(HOPPER[0], **change))
        assert not any(isinstance(c, sm90_heuristic.CONFIGS) for c in gemm.configs(task, "sm_90a"))
        assert says in gemm.refusal(Sm90DualGemmConfig(128, 256, 64, 4), task, "sm_90a")
    task = task_of(HOPPER[0])
    for config, says in (
        (Sm90DualGemmConfig(128, 144, 64, 4), "tile_n a multiple of 32"),
        (Sm90DualGemmConfig(128, 192, 64, 4, cluster=SplitK(4)), "not a multiple of 16"),
        (Sm90DualGemmConfig(128, 128, 64, 4, cluster=SplitK(2)), "less than a stage for each"),
        (Sm90DualGemmConfig(128, 128, 128, 6, cluster=Multicast(2)), "a tile_k of 128 bytes"),
    ):
        assert says in gemm.refusal(config, replace(task, k=64), "sm_90a")
    with pytest.raises(TypeError, match="schedule must be a Cooperative or PingPong; got SlicedK"):
        Sm90DualGemmConfig(128, 128, 64, 6, SlicedK())
    mn_major = task_of(replace(HOPPER[0], n=192, layout_b1="C", layout_b2="C"))
    assert "of 128 where" in gemm.refusal(Sm90DualGemmConfig(128, 192, 64, 4), mn_major, "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_few_rows_are_streamed(arch):
    """Whatever the operands; not batches, int8 by blocks and what is not K-major."""
    few = DualProblem(16, 1024, 512)
    for change, streamed in (
        *(({"dtype": a, "dtype_b": b}, "float8_e5m2" not in (a, b)) for a, b in PAIRS),
        ({"epilogue": "acc1 + acc2"}, True),
        ({"m": 17}, False),
        ({"batch_a": (2,)}, False),
        ({"layout_b1": "C", "layout_b2": "C"}, False),
        ({"dtype": "float16", "dtype_b": "int8", "scales": "blocks"}, False),
        ({"dtype": "bfloat16", "dtype_b": "float8_e4m3fn", "scales": "blocks"}, True),
        ({"dtype": "float8_e4m3fn", "dtype_b": "float8_e4m3fn", "scales": "blocks"}, True),
    ):
        config = gemm.choose_config(task_of(replace(few, **change)), arch)
        assert isinstance(config, SkinnyGemmConfig) is streamed, change


# --- the comparison of policies ------------------------------------------------------------------


def test_policies_lose_what_is_known(monkeypatch):
    """NVFP4 with K = 7168: FP32 loses nothing that rtol = atol = 1e-3 sees, the others do."""
    problem = ("NVFP4", DualProblem(64, 128, policies.K, NVFP4, NVFP4, kind="codes"))
    monkeypatch.setattr(policies, "problems", lambda target: (problem,))
    with host.use() as target:
        rows = {row.policy: row for row in policies.compare(target)}
    assert rows["fp32"].outside == 0
    assert 0 < rows["hybrid"].outside < 0.01 < rows["fp16"].outside < 0.1
    assert rows["fp32"].ulps < 1 < rows["hybrid"].ulps < rows["fp16"].ulps
    assert all(row.error_over_bound <= 1 for row in rows.values())


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_the_command_compares_policies(monkeypatch, ratio):
    row = policies.PolicyRow("inputs", "hybrid", 0.1, 2.0, 0.001, ratio, "sm_90a", 168, None)
    monkeypatch.setattr(policies, "compare", lambda target, seed: iter((row,)))
    result = CliRunner().invoke(
        cli.cli, ["check", "dual_gemm_silu", "--policies", "--target", "host"]
    )
    assert result.exit_code == 0 or ratio > 1
    assert "hybrid" in result.output and "0.1000%" in result.output and "168" in result.output


def test_usage_is_known_of_either_mainloop():
    with host.use() as target:
        for problem in (DualProblem(64, 64, 64, NVFP4, NVFP4), DualProblem(512, 4096, 64)):
            arch, registers, share = policies.usage_of(problem, target)
            assert arch == "sm_90a" and registers > 64 and 0 < share <= 0.5


def test_check_policies_is_for_dual_gemm_silu_alone():
    result = CliRunner().invoke(cli.cli, ["check", "matmul", "--policies", "--target", "host"])
    assert result.exit_code == 2 and "dual_gemm_silu alone" in result.output


def test_occupancy_counts_registers_threads_and_shared_memory():
    assert policies.occupancy("sm_90a", 256, 128, 100 * 1024) == 16 / 64
    assert policies.occupancy("sm_90a", 256, 151, 1024) == 8 / 64
    assert policies.occupancy("sm_89", 128, 32, 1024) == 48 / 48
    assert policies.occupancy("sm_90a", 128, 64, 200 * 1024) == 4 / 64


# --- configs -------------------------------------------------------------------------------------


_ROWS = 1, 16, 32, 64, 4096


def test_every_variant_is_chosen_by_some_product():
    for arch in ("sm_80", "sm_90a", "gfx942", "gfx1100"):
        chosen: set = set()
        for a, b in ((dtypes.NAMES[x], dtypes.NAMES[y]) for x, y in PAIRS):
            for blocks in (False, True) if b not in (*FLOAT16S, FP4) else (False,):
                for layouts in task_layouts(a, b, blocks):
                    for batch, m, n in itertools.product((1, 2), _ROWS, (1024, 4096)):
                        task = GemmTask(
                            batch, m, n, 4096, a, b, *layouts, blocks, False, "dual_gemm"
                        )
                        chosen.add(gemm.variant(task, gemm.choose_config(task, arch)))
        variants = {v for v in DUAL.variants(arch) if v.kernel in ("dual_gemm", "dual_gemm_skinny")}
        assert chosen == variants
        assert len({v for v in variants if v.kernel == "dual_gemm"}) <= 23


def test_few_variants_in_all():
    ops = [op for op in OPS if op.name in ("dual_gemm_silu", "dequant_softmax", "quantize_nvfp4")]
    for arch in options.ARCHS:
        most = 151 if arch == "sm_90a" else 31 if arch.startswith("gfx") else 47
        assert len({v for op in ops for v in op.variants(arch)}) <= most


# --- errors --------------------------------------------------------------------------------------

A, B = np.ones((4, 16), np.float16), np.ones((16, 6), np.float16)
F32 = tuple(x.astype(np.float32) for x in (A, B, B))
X = nvfp4.random("codes", (6, 16), 1, np, "C")


@pytest.mark.parametrize(
    ("error", "says", "args", "kwargs"),
    [
        (TypeError, "a must be a cupy or numpy array", ([[1.0]], B, B), {}),
        (TypeError, "b2 must be a cupy or numpy array", (A, B, None), {}),
        (TypeError, "b1 and b2 must be of one dtype", (A, B, B.astype(np.int8)), {}),
        (TypeError, "b1 and b2 must be of one dtype", (A, B, X), {}),
        (TypeError, "a and b1 must both be", (A.astype("i1"), B, B), {}),
        (ValueError, "policy must be 'fp32'", F32, {"policy": "fp16"}),
        (ValueError, "scale_b1 must be None for float32", F32, {"scale_b1": 2.0}),
        (ValueError, "precision must be one of", F32, {"precision": "tf64"}),
        (ValueError, "of float32 operands; got float16", (A, B, B), {"precision": "fma"}),
        (ValueError, "out must not overlap b2", (F32[0][:, :4], F32[1][:4], F32[1][4:8]),
         {"out": F32[1][4:8]}),
        (TypeError, "a and b1 must both be", (X, B.T, B.T), {}),
        (TypeError, "a's dtype must be one of", (A.astype("i2"), B, B), {}),
        (TypeError, "out_dtype may be int8 where", (A, B, B), {"out_dtype": "int8"}),
        (TypeError, "out_dtype must be one of", (A, B, B), {"out_dtype": "int16"}),
        (TypeError, "out must have dtype", (A, B, B), {"out": np.ones((4, 6), np.float32)}),
        (TypeError, "config must be a GemmConfig", (A, B, B), {"config": "fast"}),
        (
            TypeError, "scale_b2 must be a number or a float32", (A, B, B),
            {"scale_b2": np.ones((1, 6))}
        ),
        (ValueError, "policy must be 'fp32' or 'hybrid'", (A, B, B), {"policy": "fp64"}),
        (ValueError, "a's columns must be b's rows", (A, B, B[1:]), {}),
        (ValueError, "as many columns", (A, B, B[:, 1:]), {}),
        (
            ValueError, "do not broadcast",
            (A, np.ones((2, 16, 6), np.float16), np.ones((3, 16, 6), np.float16)), {}
        ),
        (
            ValueError, "scale_a \\* scale_b2 must be finite", (A, B, B),
            {"scale_a": 1e30, "scale_b2": 1e30}
        ),
        (
            ValueError, "scale_b1 must have one element", (A, B, B),
            {"scale_b1": np.ones((6, 1), np.float32)}
        ),
        (ValueError, "scale_b2 must be None", (A, X, X), {"scale_b2": 2.0}),
        (ValueError, "out must have shape", (A, B, B), {"out": np.ones((6, 4), np.float16)}),
        (ValueError, "out must not overlap b1", (A[:, :4], B[:4], B[4:8]), {"out": B[:4]}),
        (ValueError, "out must not overlap b2", (A[:, :4], B[:4], B[4:8]), {"out": B[4:8]}),
        (
            ValueError, "config does not fit: .*do not share", (A, B, B),
            {"config": GemmConfig(48, 32, 32, 2, 2)}
        ),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(error, says, args, kwargs):
    with pytest.raises(error, match=says):
        cupykern.dual_gemm_silu(*args, **kwargs)


@pytest.mark.parametrize("dtype", ["float16", NVFP4, "float8_e4m3fn:blocks", "bfloat16*int8:rows"])
def test_sampled_rows_are_verified_alone(dtype):
    problem = DUAL.bench_problem((300, 40, 64), dtype)
    call = DUAL.inputs(problem, 1, np)
    outputs = (DUAL.run(*call.args, **call.kwargs),)
    part, some = DUAL.sample(Call(call.args, call.kwargs), outputs, 20 * 40, 3)
    assert part.args[0].shape == (20, 64) and some[0].shape == (20, 40)
    references = reference.dual_gemm_silu(*part.args, **part.kwargs)
    bounds = DUAL.bound(*part.args, **part.kwargs, reference=references)
    assert check.compare(some, references, bounds).ok


def test_bench_wants_three_sizes_and_whole_groups():
    for shape, dtype, says in (
        ((4, 4), "float16", "needs a shape"),
        ((4, 4, 40), NVFP4, "multiple of 16"),
        ((4, 4, 40), "float16*bfloat16", "multiplies no float16 by bfloat16"),
        ((4, 4, 40), "bfloat16:rows", "of 8-bit weights"),
        ((4, 4, 40), "float8_e4m3fn:rows+blocks", "at most one kind of scales"),
    ):
        with pytest.raises(ValueError, match=says):
            DUAL.bench_problem(shape, dtype)


@pytest.mark.parametrize("n", [128, 129])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "float32" not in pair], ids=str)
def test_results_of_any_dtype_and_width_have_the_task_of_the_problem(
    monkeypatch, pair, out_dtype, n
):
    """The gated epilogue stores all of them, so the same kind of config is chosen."""
    problem = DualProblem(70, n, 256, *pair, layout_b1="F", layout_b2="F", out_dtype=out_dtype)
    launched = []

    def recorded(product):
        launched.append(known(product))
        return launched[-1]

    known = gemm.task_of
    monkeypatch.setattr(gemm, "task_of", recorded)
    call = DUAL.inputs(problem, 0, np)
    with host.use():
        DUAL.run(*call.args, **call.kwargs)
    assert {*launched} == {task_of(problem)}
    plain = task_of(replace(problem, n=128, out_dtype="float16"))
    kinds = {
        type(gemm.choose_config(replace(task, m=4096, n=14336, k=4096), "sm_90a"))
        for task in (launched[0], plain)
    }
    assert len(kinds) == 1
