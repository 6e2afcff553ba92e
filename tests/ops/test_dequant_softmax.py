"""What dequant_softmax alone promises."""

from __future__ import annotations

from dataclasses import replace

import needs
import numpy as np
import pytest
from hopper_kernels import SCHEDULES

import cupykern
from cupykern import OPS, check, dtypes, reference
from cupykern.gemm import gemm
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.logits import NORMALIZE_LOGITS
from cupykern.gemm.product import K_MAJOR, MN_MAJOR
from cupykern.gemm.sm90_gemm_config import Sm90MixedGemmConfig
from cupykern.gemm.sm90_logits_config import SkinnyLogitsConfig, Sm90LogitsConfig
from cupykern.numerics import as_float64
from cupykern.ops.dequant_softmax import LogitsProblem, tasks_of_variants
from cupykern.ops.problems.products import with_layout
from cupykern.targets import host

OP = next(op for op in OPS if op.name == "dequant_softmax")


def to_numpy(x) -> np.ndarray:
    x = as_float64(x)
    return x if isinstance(x, np.ndarray) else x.get()


def compare(*args, outputs, **kwargs) -> check.Comparison:
    references = OP.reference(*args, **kwargs)
    bounds = OP.bound(*args, **kwargs, reference=references)
    return check.compare((outputs,), references, bounds)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_variant_is_within_the_bound(target, dtype):
    for m, n, layout in (
        (70, 208, "F"),
        (70, 208, "C"),
        (1, 1000, "F"),
        (3, 144, "C"),
        (9, 75, "C"),
    ):
        for out_dtype in (None, "float32"):
            problem = LogitsProblem(
                m, n, 272, dtype, layout_w=layout, bias=(n,), out_dtype=out_dtype
            )
            comparison = check.check_problem(OP, problem, 1, target.xp)
            assert comparison.ok, f"{problem!r}: {comparison}"


@pytest.mark.parametrize("n", [1, 63, 64, 65, 191, 4097])
def test_a_ragged_last_tile_counts_once(target, n):
    """Equal logits: every result is 1 / n, whatever lies behind the last column."""
    xp = target.xp
    frame = np.full((16, -(-n // 16) * 16 + 16), 127, np.int8)
    frame[:, :n] = 0
    w = xp.asarray(frame)[:, :n]
    a = xp.full((3, 16), 100, np.float16)
    for bias in (None, xp.full((n,), -300.0, np.float32), xp.full((n,), 300.0, np.float32)):
        y = to_numpy(cupykern.dequant_softmax(a, w, 1.0, bias=bias, dtype="float32"))
        np.testing.assert_allclose(y, 1 / n, rtol=1e-6)


@pytest.mark.in_turn
def test_rows_of_many_column_tiles_are_within_the_bound(target):
    """262144 and one more: more column sets than threads of a block; several blocks a row."""
    xp, n, k = target.xp, 262145, 16
    rng = np.random.default_rng(1)
    a = xp.asarray(rng.standard_normal((2, k)).astype(np.float16))
    w = with_layout(rng.integers(-128, 128, (k, n)).astype(np.int8), "F", xp)
    scale = xp.asarray(rng.uniform(0.005, 0.02, n).astype(np.float32))
    for dtype in ("float32", "bfloat16"):
        y = cupykern.dequant_softmax(a, w, scale, dtype=dtype)
        assert compare(a, w, scale, dtype=dtype, outputs=y).ok
        assert abs(to_numpy(y).sum(-1) - 1).max() < 0.01


def test_nan_or_infinity_spoils_its_row_and_minus_infinity_is_zero(target):
    """A NaN or +inf spoils its row; -inf is a zero, and a row of nothing else NaN."""
    xp = target.xp
    a, w = xp.ones((5, 16), np.float16), xp.ones((16, 200), np.int8)
    bias = np.zeros((5, 200), np.float32)
    bias[0, 130], bias[1, 199], bias[2, 5:150], bias[3] = np.nan, np.inf, -np.inf, -np.inf
    y = to_numpy(cupykern.dequant_softmax(a, w, 1.0, bias=xp.asarray(bias)))
    assert np.isnan(y[[0, 1, 3]]).all()
    assert (y[2, 5:150] == 0).all() and np.isfinite(y[[2, 4]]).all()
    assert compare(a, w, 1.0, bias=xp.asarray(bias), outputs=xp.asarray(y.astype(np.float16))).ok


def test_logits_are_not_rounded(target):
    """Logits of 3000 and 3000.5, which FP16 and BF16 cannot tell apart."""
    xp = target.xp
    a, w = xp.full((1, 16), 1, np.float16), xp.full((16, 2), 100, np.int8)
    bias = xp.asarray(np.array([1400.0, 1400.5], np.float32))
    y = to_numpy(cupykern.dequant_softmax(a, w, 1.0, bias=bias, dtype="float32"))
    np.testing.assert_allclose(y, [[1 / (1 + np.exp(0.5)), 1 / (1 + np.exp(-0.5))]], rtol=1e-4)


def test_out_may_have_any_layout(target):
    xp = target.xp
    call = OP.inputs(LogitsProblem(6, 40, 32, batch=(2,)), 1, xp)
    for dtype in ("float16", "float32"):
        expected = to_numpy(cupykern.dequant_softmax(*call.args, dtype=dtype))
        frame = xp.full((12, 100), 7, dtypes.NAMES[dtype])
        for out in (
            frame[:, 5:85:2].reshape(2, 6, 40),
            xp.full((6, 2, 40), 7, dtypes.NAMES[dtype]).transpose(1, 0, 2),
            xp.full((2, 40, 6), 7, dtypes.NAMES[dtype]).swapaxes(1, 2),
        ):
            assert cupykern.dequant_softmax(*call.args, dtype=dtype, out=out) is out
            np.testing.assert_array_equal(to_numpy(out), expected)


def test_repeated_calls_give_the_same_bits(target):
    call = OP.inputs(LogitsProblem(5, 3000, 64, out_dtype="float32"), 1, target.xp)
    first, second = (to_numpy(OP.run(*call.args, **call.kwargs)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_logits_that_fp32_cannot_tell_apart_are_within_the_bound(target):
    """A y that underflows in FP64 has a logit, whose error may exceed the distance."""
    a, w = np.ones((1, 1), np.float16), np.array([[1, 2, 3, 100]], np.int8)
    bias = np.full(4, 1e11, np.float32)
    options = {"bias": bias, "dtype": "float32"}
    exact = reference.dequant_softmax(a, w, 20.0, **options)
    (bound,) = reference.dequant_softmax_bound(a, w, 20.0, **options, reference=exact)
    a, w, options["bias"] = map(target.xp.asarray, (a, w, bias))
    y = cupykern.dequant_softmax(a, w, 20.0, **options)
    assert (exact[0] == [[0, 0, 0, 1]]).all()
    assert (np.abs(to_numpy(y) - exact[0]) <= bound.elementwise).all()
    assert bound.elementwise.max() < 1.1


def test_empty_arrays_give_empty_results(target):
    xp = target.xp
    assert cupykern.dequant_softmax(
        xp.ones((0, 8), np.float16), xp.ones((8, 4), np.int8), 1.0
    ).shape == (0, 4)
    assert cupykern.dequant_softmax(
        xp.ones((2, 8), np.float16), xp.ones((8, 0), np.int8), 1.0
    ).shape == (2, 0)
    y = cupykern.dequant_softmax(xp.ones((2, 0), np.float16), xp.ones((0, 4), np.int8), 1.0)
    assert (to_numpy(y) == 0.25).all()


HOPPER = (Sm90LogitsConfig(256, 128, 64, 2), Sm90LogitsConfig(64, 128, 128, 3))
STREAM = SkinnyLogitsConfig(128, 2)


def check_hopper(xp) -> None:
    """More tiles than blocks, ragged tiles, every kind of bias, strided FP32 results."""
    problems = (
        (HOPPER[0], LogitsProblem(70, 272, 272, layout_w="F", bias=(272,))),
        (HOPPER[1], LogitsProblem(300, 144, 80, layout_w="C", bias=(300, 1), scale="number")),
        (HOPPER[1], LogitsProblem(70, 336, 80, layout_w="C", bias=(1, 336))),
        (HOPPER[1], LogitsProblem(3, 400, 528, layout_w="C", out_dtype="float32", bias=(3, 400))),
        (HOPPER[0], LogitsProblem(130, 1000, 144, layout_w="F", kind="special")),
        (HOPPER[0], LogitsProblem(130, 203, 144, layout_w="F", kind="special", bias=(203,))),
        (HOPPER[1], LogitsProblem(2100, 75, 16, layout_w="F")),
        (HOPPER[1], LogitsProblem(70, 5, 16, layout_w="F")),
        (STREAM, LogitsProblem(3, 400, 528, layout_w="F", out_dtype="float32", bias=(3, 400))),
        (STREAM, LogitsProblem(16, 1100, 80, layout_w="F", kind="special")),
    )
    for config, problem in problems:
        call = OP.inputs(problem, 1, xp)
        y = OP.run(*call.args, **call.kwargs, config=config)
        comparison = compare(*call.args, **call.kwargs, outputs=y)
        assert comparison.ok, f"{problem!r}: {comparison}"


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_hopper_is_within_the_bound_under_hostile_schedules(schedule):
    with host.use(schedule=schedule, warp_size=32):
        check_hopper(np)


@needs.hopper
def test_hopper_is_within_the_bound(target):
    check_hopper(target.xp)


def test_every_variant_is_chosen_by_some_product():
    """On Hopper the portable main loop has what TMA cannot walk."""
    for arch in ("sm_80", "sm_90a", "gfx942", "gfx1100"):
        chosen = {
            gemm.variant(replace(task, m=m), gemm.choose_config(replace(task, m=m, tma=tma), arch))
            for task in tasks_of_variants()
            for m in (1, 64, 4096)
            for tma in (True, False)
        }
        wanted = set(OP.variants(arch)) - {NORMALIZE_LOGITS}
        assert chosen == wanted and len(wanted) <= 20


def test_skinny_configs_that_do_not_fit_are_refused():
    task = GemmTask(1, 16, 4096, 512, dtypes.float16, dtypes.int8, K_MAJOR, K_MAJOR, kernel=OP.name)
    for config, change, says in (
        (STREAM, {}, None),
        (replace(STREAM, tile_n=96), {}, "a multiple of 64 up to 512"),
        (replace(STREAM, stages=20), {}, "bytes of shared memory"),
        (STREAM, {"layout_b": MN_MAJOR}, "K-major operands"),
        (STREAM, {"kernel": "gemm"}, "for dequant_softmax"),
        (STREAM, {"m": 17}, "up to 16 rows"),
    ):
        found = gemm.refusal(config, replace(task, **change), "sm_90a")
        assert (found is None) if says is None else says in found


A, W, S = np.ones((4, 16), np.float16), np.ones((16, 6), np.int8), np.ones(6, np.float32)


@pytest.mark.parametrize(
    ("error", "says", "args", "kwargs"),
    [
        (TypeError, "a must be a cupy or numpy array", (None, W, S), {}),
        (TypeError, "w must be a cupy or numpy array", (A, None, S), {}),
        (TypeError, "a's dtype must be one of", (A.astype("f4"), W, S), {}),
        (TypeError, "w's dtype must be one of", (A, A.T, S), {}),
        (TypeError, "scale_w must be a number or a float32 array; got None", (A, W, None), {}),
        (TypeError, "scale_w must be a number or a float32 array", (A, W, S.astype("f8")), {}),
        (TypeError, "scale_w must be a real number", (A, W, "1"), {}),
        (TypeError, "dtype must be one of", (A, W, S), {"dtype": "int8"}),
        (TypeError, "bias must be float16", (A, W, S), {"bias": np.ones(6)}),
        (TypeError, "out must have dtype", (A, W, S), {"out": np.ones((4, 6), "f4")}),
        (ValueError, "w must have shape", (A, W[None], S), {}),
        (ValueError, "a must have at least 2 dims", (A[0], W, S), {}),
        (ValueError, "a's columns must be b's rows", (A[:, 1:], W, S), {}),
        (ValueError, "scale_w must be finite", (A, W, np.inf), {}),
        (ValueError, "scale_w must have one element or shape", (A, W, S[1:]), {}),
        (ValueError, "bias must broadcast", (A, W, S), {"bias": np.ones(5, "f4")}),
        (TypeError, "config must be a GemmConfig", (A, W, S), {"config": 1}),
        (
            ValueError, "is for gemm; got dequant", (A, W, S),
            {"config": Sm90MixedGemmConfig(64, 64, 128, 4)}
        ),
        (
            ValueError, "tile_n must be a multiple", (A, W, S),
            {"config": gemm.GemmConfig(32, 32, 32, 2, 2)}
        ),
        (ValueError, "out must have shape", (A, W, S), {"out": np.ones((6, 4), np.float16)}),
        (ValueError, "out must not overlap a", (A, W, S), {"out": A[:, :6]}),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(error, says, args, kwargs):
    with pytest.raises(error, match=says):
        cupykern.dequant_softmax(*args, **kwargs)
