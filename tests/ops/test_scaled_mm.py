"""What matmul and scaled_mm promise about scales, configs, illegal calls and their records."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from products import (
    FP8,
    MATMUL,
    SCALED,
    array,
    check_fp8_sums_of_128,
    check_problem,
    compare,
    random,
    to_numpy,
)

import cupykern
from cupykern import check, dtypes, inputs, reference
from cupykern.gemm import gemm, skinny_heuristic
from cupykern.gemm.copied_plan import ALIGN_ROWS
from cupykern.gemm.gemm import GemmConfig
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import FP4, K_MAJOR, MN_MAJOR, STRIDED, by_vectors
from cupykern.gemm.row_reductions import MERGES
from cupykern.gemm.skinny_gemm import SkinnyGemmConfig
from cupykern.gemm.sm90_heuristic import compiled_ahead
from cupykern.gemm.split_plan import REDUCE_SPLIT_K
from cupykern.op import Call
from cupykern.ops.problems.products import (
    PAIRS,
    MatmulProblem,
    has_fp16_accumulators,
    task_of,
    variants,
    with_layout,
)
from cupykern.ops.problems.scaled import (
    NVFP4_PAIRS,
    SCALES,
    ScaledProblem,
    nvfp4_variants,
)
from cupykern.ops.problems.scaled import PAIRS as SCALED_PAIRS
from cupykern.ops.problems.scaled import task_of as scaled_task_of
from cupykern.targets import host

# --- scaled_mm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("dtype", "dtype_b"), SCALED_PAIRS)
def test_scales_of_every_pair_are_within_the_bound(target, dtype, dtype_b, scales, exhaustive):
    sizes = ((40, 150, 300, "F"), (20, 144, 272, "C"), (33, 130, 256, "F"))
    if not exhaustive:  # one of them in turn
        turn = SCALES.index(scales) + SCALED_PAIRS.index((dtype, dtype_b))
        sizes = sizes[turn % len(sizes) :][:1]
    for m, n, k, layout_b in sizes:
        product = MatmulProblem(
            m, n, k, dtype, dtype_b, layout_b=layout_b, bias=(n,), activation="silu"
        )
        check_problem(SCALED, ScaledProblem(product, scales), target)


def test_scales_may_be_numbers_or_arrays_without_dims(target):
    """numpy's 0-d arrays are numbers, of any dtype and on any target."""
    xp = target.xp
    a, b = xp.asarray(A), xp.asarray(E4M3.view(np.uint8)).view(E4M3.dtype)
    expected = to_numpy(cupykern.scaled_mm(a, b, 2.0, 3))
    for scale_a, scale_b in ((np.array(2.0), np.array(3)), (np.float16(2), np.array(3, "f4"))):
        assert (to_numpy(cupykern.scaled_mm(a, b, scale_a, scale_b)) == expected).all()


def test_scales_may_have_any_strides_and_batches(target):
    xp = target.xp
    a, b = (
        random(target, (2, 20, 300), "float8_e4m3fn", 1),
        random(target, (300, 140), "float8_e4m3fn", 2),
    )
    rng = np.random.default_rng(3)
    wide = xp.asarray(rng.uniform(0.5, 2, (4, 40, 6)).astype(np.float32))
    scale_a, scale_b = (
        wide[::2, ::2, ::2],
        xp.asarray(rng.uniform(0.5, 2, (2, 3)).astype(np.float32)).T,
    )
    assert compare(SCALED, a, b, scale_a, scale_b).ok
    assert compare(SCALED, a, b, scale_a, None).ok and compare(SCALED, a, b, None, scale_b).ok
    rows, columns = wide[:2, :20, :1], wide[0, :1, :1] * xp.ones((1, 140), np.float32)
    assert compare(SCALED, a, b, rows, columns[:, ::-1]).ok


@pytest.mark.parametrize("k", [128, 130, 256])
def test_each_block_is_multiplied_by_its_own_scale(target, k):
    """Exact: scales are powers of two, and each block of k and of columns counts once."""
    n = 150
    a, b = np.ones((4, k)), np.ones((k, n))
    scale_a = 2.0 ** np.arange(4)[:, None] * 4.0 ** np.arange(-(-k // 128))
    scale_b = np.array([[1.0, 16.0], [8.0, 2.0]])[: -(-k // 128)]
    x, y = array(target, a, "float8_e4m3fn"), array(target, b, "float8_e4m3fn", "F")
    scales = (target.xp.asarray(s, np.float32) for s in (scale_a, scale_b))
    product = to_numpy(cupykern.scaled_mm(x, y, *scales, out_dtype="float32"))
    by_k = [slice(i, min(i + 128, k)) for i in range(0, k, 128)]
    expected = sum(
        scale_a[:, i, None] * (s.stop - s.start) * np.repeat(scale_b[i], 128)[:n]
        for i, s in enumerate(by_k)
    )
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("dtype_b", FP8)
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_sums_of_128_of_k_are_exact(target, dtype, dtype_b):
    check_fp8_sums_of_128(target, dtype, dtype_b)


def test_the_default_dtype_of_a_product():
    xp = np
    for (a, b), wanted in {
        ("float16", "float8_e4m3fn"): "float16",
        ("bfloat16", "int8"): "bfloat16",
        ("float8_e5m2", "float8_e4m3fn"): "bfloat16",
        ("int8", "int8"): "int32",
        ("float32", "float32"): "float32",
    }.items():
        x, y = (xp.ones((2, 2), dtypes.NAMES[name]) for name in (a, b))
        assert cupykern.matmul(x, y).dtype == dtypes.NAMES[wanted]
    x = np.ones((2, 2), np.int8)
    assert cupykern.scaled_mm(x, x).dtype == np.int32
    assert cupykern.scaled_mm(x, x, 2.0, 0.5).dtype == np.float32  # whatever the numbers
    assert cupykern.matmul(y[:0].astype(np.int8), y.astype(np.int8), alpha=2.0).dtype == np.float32


# --- configs -------------------------------------------------------------------------------------


# Products of FP32 operands have mainloops of their own (test_gemm_fma.py, test_split_float32.py).
MATMUL_PAIRS = tuple(pair for pair in PAIRS if "float32" not in pair)


def portable_variants(arch: str) -> set:
    """Without those of NVFP4 (test_nvfp4.py)."""
    variants = {v for op in (MATMUL, SCALED) for v in op.variants(arch) if v.kernel == "gemm"}
    return {v for v in variants if ("ElementB", "e2m1x2") not in v.types}


def test_the_number_of_variants_is_small():
    for arch, most in (("sm_80", 27), ("sm_90a", 27), ("gfx942", 27), ("host", 68)):
        assert len(portable_variants(arch)) <= most


def test_every_variant_is_chosen_by_some_product():
    """Over sizes from 1 to 8192: a tile that nothing chooses would be dead weight."""
    for arch in ("sm_80", "sm_90a", "sm_120a", "gfx942", "gfx1100"):
        chosen = set()
        for blocks, pairs in ((False, MATMUL_PAIRS), (True, SCALED_PAIRS)):
            for a, b in ((dtypes.NAMES[p], dtypes.NAMES[q or p]) for p, q in pairs):
                for layouts in ((0, 0), (0, 1), (1, 0), (1, 1), (STRIDED, STRIDED)):
                    if layouts[0] != STRIDED and not by_vectors(a, b, *layouts, blocks):
                        continue
                    for m in (1, 64, 8192):
                        # Of two matrices: few rows of one are streamed (test_skinny_gemm.py).
                        task = GemmTask(2, m, 8192, 8192, a, b, *layouts, blocks, tma=False)
                        tasks = [task]
                        if has_fp16_accumulators(task, arch):
                            tasks.append(gemm.fp16_accumulate_task(task))
                        for t in tasks:
                            chosen.add(gemm.variant(t, gemm.choose_config(t, arch)))
        assert chosen == portable_variants(arch)


def test_every_variant_on_hopper_is_chosen_by_some_product():
    """Of those that portable_variants has not, but misaligned rows (test_skinny_gemm.py)."""
    of_products = (*variants("sm_90a", MATMUL_PAIRS), *SCALED.variants("sm_90a"))
    wanted = set(of_products) - {
        *portable_variants("sm_90a"),
        *nvfp4_variants("sm_90a"),
        *MERGES,
        ALIGN_ROWS,
        REDUCE_SPLIT_K,
    }
    wanted = {v for v in wanted if ("kMisaligned", True) not in v.constants}
    wanted = {v for v in wanted if "expression" not in v.kernel}  # test_epilogues.py
    chosen = set()
    for blocks, pairs in ((False, MATMUL_PAIRS), (True, SCALED_PAIRS)):
        for (p, q), *layouts in product(pairs, (K_MAJOR, MN_MAJOR), (K_MAJOR, MN_MAJOR)):
            a, b = dtypes.NAMES[p], dtypes.NAMES[q or p]
            if not by_vectors(a, b, *layouts, blocks):
                continue
            task = GemmTask(1, 4096, 4096, 4096, a, b, *layouts, blocks)
            for epilogue, aligned in product(EPILOGUES, (True, False)):
                if aligned or layouts == [K_MAJOR, K_MAJOR]:
                    task = replace(task, epilogue=epilogue, aligned_128=aligned)
                    chosen |= chosen_variants(task, wanted - chosen)
    assert wanted <= chosen


EPILOGUES = "tma_store", "activated", "residual", "floats", "general"
SIZES = tuple(
    product(
        (4, 12, 32, 64, 120, 128, 192, 200, 208, 256, 384, 480, 512, 744, 768, 1024, 3072, 4096)
        + (4800, 5120),
        (256, 512, 1024, 3072, 4096, 5120, 14336, 131072),
        (1024, 4096, 8192, 16384),
    )
)


def chosen_variants(task, wanted):
    """The variants of the configs chosen for `task` at sizes in random order, until all are found
    of `wanted` that are compiled ahead for it."""
    sizes = (4096, 4096), *product((*skinny_heuristic.SIZES, 32), (4096, 2**16))
    configs = [c for m, n in sizes for c in gemm.configs(replace(task, m=m, n=n), "sm_90a")]
    skinny = (c for c in configs if isinstance(c, SkinnyGemmConfig))
    ahead = {gemm.variant(task, c) for c in (*compiled_ahead(task, configs), *skinny)}
    missing, found = ahead & wanted, set()
    for i in np.random.default_rng(1).permutation(len(SIZES)):
        if missing <= found:
            break
        m, n, k = SIZES[i]
        sized = replace(task, m=m, n=n, k=k)
        found.add(gemm.variant(sized, gemm.choose_config(sized, "sm_90a")))
    return found


def test_split_k_is_chosen_for_few_rows():
    half, e4m3 = dtypes.float16, dtypes.float8_e4m3fn
    task = GemmTask(1, 64, 8192, 8192, half, e4m3, K_MAJOR, K_MAJOR)
    config = GemmConfig(64, 128, 64, 2, 4, stages=4, splits=4, promotes=True)
    assert gemm.choose_config(task, "sm_100a") == config
    assert gemm.choose_config(replace(task, m=8192), "sm_100a").splits == 1
    assert gemm.choose_config(replace(task, k=300), "sm_100a").splits == 1


TASK = GemmTask(1, 64, 64, 1024, dtypes.float16, dtypes.float16, K_MAJOR, K_MAJOR)
FITS = GemmConfig(64, 64, 64, 2, 2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tile_m": 0}, "positive"),
        ({"splits": 0}, "positive"),
        ({"finish_rounds": 0}, "positive"),
        ({"stages": 1}, "stages must be at least 2"),
        ({"tile_m": 48}, "do not share 48 x 64"),
        ({"tile_k": 24}, "multiple of 16"),
        ({"tile_k": 48}, "power of two"),
        ({"finish_rounds": 3}, "finish_rounds must divide"),
        ({"splits": 9}, "shorter than 128"),
        ({"warps_m": 4, "warps_n": 4, "warps_k": 4}, "more than 1024"),
        ({"stages": 40}, "bytes of shared memory"),
        ({"fp8": True}, "two FP8 operands"),
    ],
)
def test_configs_that_do_not_fit_are_refused(change, says):
    config = replace(FITS, **change)
    assert says in gemm.refusal(config, TASK, "sm_90a")
    a = np.ones((64, 1024), np.float16)
    with pytest.raises(ValueError, match=f"config does not fit: .*{says}"):
        cupykern.matmul(a, a.T, config=config)
    assert gemm.refusal(FITS, TASK, "sm_90a") is None


@pytest.mark.parametrize(
    ("dtype", "dtype_b", "layout_a", "layout_b"),
    [
        ("float16", "float8_e5m2", "C", "F"),
        ("float8_e5m2", "float8_e4m3fn", "C", "F"),
        ("bfloat16", None, "F", "F"),
    ],
)
def test_operands_of_any_layout_can_be_read_by_scalar_loads(
    target, dtype, dtype_b, layout_a, layout_b
):
    """As where nothing is measured those of rare dtypes and layouts are."""
    problem = MatmulProblem(80, 144, 272, dtype, dtype_b, layout_a=layout_a, layout_b=layout_b)
    task = task_of(problem)
    (config,) = (c for c in gemm.configs(task, "sm_86") if isinstance(c, GemmConfig))
    assert config.scalar_loads and STRIDED not in (task.layout_a, task.layout_b)
    call = MATMUL.inputs(problem, 1, target.xp)
    assert compare(MATMUL, *call.args, config=replace(config, splits=2)).ok


@pytest.mark.parametrize(
    ("dtype", "dtype_b", "scales"),
    [
        (*pair, scales)
        for pair in (("int8", None), ("bfloat16", "int8"), ("float8_e4m3fn", None))
        for scales in SCALES
        if scales != "blocks of b" or pair[0] == "bfloat16"  # others have scales of both
    ]
    + [(*pair, "none") for pair in NVFP4_PAIRS],
)
def test_problems_have_the_tasks_that_are_launched(monkeypatch, dtype, dtype_b, scales):
    """So that what tune finds for a problem is found again by its call."""
    product = MatmulProblem(48, 272, 256, dtype, dtype_b, layout_b="F", kind="uniform")
    problem, launched = ScaledProblem(product, scales), []

    def recorded(product):
        launched.append(known(product))
        return launched[-1]

    known = gemm.task_of
    monkeypatch.setattr(gemm, "task_of", recorded)
    with host.use():
        SCALED.run(*SCALED.inputs(problem, 0, np).args)  # the seed that tasks have, too
    assert {*launched} == {scaled_task_of(problem)}


def test_scalar_loads_have_scales_of_blocks(target):
    a, b = random(target, (70, 272), "float16", 1), random(target, (272, 144), "int8", 2)
    scale = target.xp.asarray(np.random.default_rng(3).uniform(0.5, 1.5, (3, 2)), np.float32)
    config = GemmConfig(64, 64, 64, 2, 2, stages=2, scalar_loads=True)
    assert compare(SCALED, a, b, None, scale, config=config).ok
    task = replace(TASK, a=FP4, b=FP4)
    assert "NVFP4 is not read" in gemm.refusal(config, task, "sm_90a")


def test_fp8_needs_hardware_that_multiplies_it():
    e4m3 = dtypes.float8_e4m3fn
    task, config = replace(TASK, a=e4m3, b=e4m3), replace(FITS, fp8=True)
    assert "does not multiply FP8" in gemm.refusal(config, task, "sm_80")
    assert gemm.refusal(config, task, "sm_89") is None
    assert "every 128 of k" in gemm.refusal(replace(config, tile_k=256), task, "sm_89")


# --- errors --------------------------------------------------------------------------------------

A, B = np.ones((4, 8), np.float16), np.ones((8, 6), np.float16)
E4M3 = B.astype(dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("error", "says", "args", "kwargs"),
    [
        (TypeError, "a must be a cupy or numpy array", ([[1.0]], B), {}),
        (TypeError, "b must be a cupy or numpy array", (A, None), {}),
        (NotImplementedError, "a's dtype must be one of", (A.astype(np.float64), B), {}),
        (TypeError, "a and b must both be", (A.astype(np.float32), B.astype(np.int8)), {}),
        (TypeError, "a and b must both be", (A.astype(np.int8), E4M3), {}),
        (TypeError, "out_dtype must be one of", (A, B), {"out_dtype": "int32"}),
        (TypeError, "out_dtype must be one of", (A, B), {"out_dtype": "float64"}),
        (TypeError, "out_dtype must be one of", (A, B), {"out_dtype": []}),
        (TypeError, "bias must be float16", (A, B), {"bias": np.ones(6)}),
        (TypeError, "residual must be a cupy or numpy array", (A, B), {"residual": 1.0}),
        (TypeError, "activation must be a string", (A, B), {"activation": 3}),
        (TypeError, "alpha must be a real number", (A, B), {"alpha": "1"}),
        (
            TypeError, "config must be a GemmConfig, FmaGemmConfig, SplitFloat32, ", (A, B),
            {"config": "fast"}
        ),
        (TypeError, "out must have dtype", (A, B), {"out": np.ones((4, 6), np.float32)}),
        (ValueError, "a must have at least 2 dims", (np.ones((), np.float16), B), {}),
        (ValueError, "a's columns must be b's rows", (A, B[1:]), {}),
        (
            ValueError, "do not broadcast",
            (np.ones((2, 4, 8), np.float16), np.ones((3, 8, 6), np.float16)), {}
        ),
        (ValueError, "bias must broadcast", (A, B), {"bias": np.ones(5, np.float16)}),
        (
            ValueError, "residual must broadcast", (A, B),
            {"residual": np.ones((2, 4, 6), np.float16)}
        ),
        (ValueError, "activation must be one of", (A, B), {"activation": "swish"}),
        (ValueError, "alpha must be finite", (A, B), {"alpha": math.inf}),
        (ValueError, "alpha must be 0 or", (A, B), {"alpha": 1e-40}),
        (ValueError, "alpha must be a number or a 0-d", (A, B), {"alpha": np.ones(2)}),
        (ValueError, "accumulate must be", (A, B), {"accumulate": "float64"}),
        (ValueError, "accumulate must be", (A, B), {"accumulate": np.ones(2)}),
        (
            *(NotImplementedError, "accumulate='float16' is for", (A.astype(dtypes.bfloat16),) * 2),
            {"accumulate": "float16"},
        ),
        (ValueError, "out must have shape", (A, B), {"out": np.ones((6, 4), np.float16)}),
        (ValueError, "out must not overlap a", (A, A.T), {"out": A[:, :4]}),
        (ValueError, "out must not hold one element twice", (A, B),
         {"out": np.lib.stride_tricks.as_strided(np.ones(6, np.float16), (4, 6), (0, 2))}),
        (
            ValueError, "exact up to K = 131071",
            (np.ones((1, 131072), np.int8), np.ones((131072, 1), np.int8)), {}
        ),
    ],
)  # fmt: skip
def test_illegal_arguments_are_refused(error, says, args, kwargs):
    with pytest.raises(error, match=says):
        cupykern.matmul(*args, **kwargs)


def test_a_number_goes_with_scales_of_blocks():
    """As an array of one element does."""
    a, b = (np.ones(shape).astype(dtypes.float8_e4m3fn) for shape in ((20, 256), (256, 130)))
    scale = np.array([[2.0, 3.0]] * 20, np.float32)
    y = cupykern.scaled_mm(a, b, scale, 0.5)
    assert (y == 320).all() and y.shape == (20, 130)
    one = np.array([0.5], np.float32)
    exact = reference.scaled_mm(a, b, scale, 0.5)
    for x in (0.5, one):
        bound = reference.scaled_mm_bound(a, b, scale, x, reference=exact)
        assert check.compare((y,), exact, bound).ok


@pytest.mark.parametrize(
    ("error", "says", "args", "kwargs"),
    [
        (TypeError, "matmul takes others", (A, B), {}),
        (TypeError, "scale_a must be a number or a float32 array", (A, E4M3, np.ones((4, 1))), {}),
        (TypeError, "scale_b must be a real number", (A, E4M3, None, "1"), {}),
        (ValueError, "scale_a must be finite", (A, E4M3, math.nan), {}),
        (ValueError, "scale_a \\* scale_b must be finite", (A, E4M3, 1e30, 1e30), {}),
        (ValueError, "scale_a \\* scale_b must be 0 or", (A, E4M3, 1e-30, 1e-30), {}),
        (
            ValueError, "scale_a must have one element or shape",
            (A, E4M3, np.ones((6, 1), np.float32)), {}
        ),
        (
            ValueError, "scale_b must have one element or shape",
            (A, E4M3, None, np.ones((6, 1), np.float32)), {}
        ),
        (
            ValueError, "scale_b must have one element or shape",
            (A, E4M3, None, np.ones(6, np.float32)), {}
        ),
        (
            TypeError, "out_dtype must be one of", (A.astype(np.int8), B.astype(np.int8), 2.0),
            {"out_dtype": "int32"}
        ),
    ],
)  # fmt: skip
def test_illegal_scales_are_refused(error, says, args, kwargs):
    with pytest.raises(error, match=says):
        cupykern.scaled_mm(*args, **kwargs)


# --- the ops' records ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", [MATMUL, SCALED], ids=lambda op: op.name)
def test_sampled_rows_are_verified_alone(op):
    problem = op.bench_problem((300, 40, 64), op.dtypes[0])
    call = op.inputs(problem, 1, np)
    if op is MATMUL:
        bias = inputs.values("normal", (300, 1), dtypes.float32, 2)
        call = Call(call.args, {"bias": bias})
    outputs = (op.run(*call.args, **call.kwargs),)
    part, some = op.sample(call, outputs, 20 * 40, 3)
    assert part.args[0].shape == (20, 64) and some[0].shape == (20, 40)
    references = op.reference(*part.args, **part.kwargs)
    bounds = op.bound(*part.args, **part.kwargs, reference=references)
    assert check.compare(some, references, bounds).ok


@pytest.mark.parametrize("op", [MATMUL, SCALED], ids=lambda op: op.name)
@pytest.mark.parametrize("shape", [(4, 4), (4,)])
def test_bench_wants_three_sizes(op, shape):
    with pytest.raises(ValueError, match="needs a shape"):
        op.bench_problem(shape, op.dtypes[0])


def test_bench_problems_are_what_their_options_say():
    problem = SCALED.bench_problem((32, 48, 64), "float16*int8:bias+kn+rows")
    assert problem.scales == "rows" and problem.product.layout_b == "C"
    call = SCALED.inputs(problem, 1, np)
    assert call.args[1].dtype == np.int8 and call.args[1].flags.c_contiguous
    assert call.kwargs["bias"].shape == (48,) and call.kwargs["bias"].dtype == np.float16
    assert check.check_problem(SCALED, problem, 1, np).ok
    problem = MATMUL.bench_problem((8, 16, 32), "bfloat16:bias+gelu")
    assert problem.activation == "gelu" and check.check_problem(MATMUL, problem, 1, np).ok


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("float16*float16", TypeError),
        ("int8*float8_e4m3fn", TypeError),
        ("float8_e4m3fn:rows+blocks", ValueError),
        ("float16:relu+gelu", ValueError),
        ("float16:nk", ValueError),
    ],
)
def test_illegal_bench_problems_are_refused(text, error):
    with pytest.raises(error):
        SCALED.bench_problem((32, 48, 64), text)


@pytest.mark.in_turn
def test_an_infinite_scale_multiplies_the_sum_of_its_block(target):
    """Not each element, whose products would be infinities of both signs."""
    a = np.tile(np.array([1, -1], np.float16), 128)[None].copy()
    a[0, 0] = 3
    b = np.ones((256, 1), dtypes.float8_e4m3fn)
    scale = np.array([[np.inf, 1]], np.float32)
    assert np.isposinf(reference.scaled_mm(a, b, scale, 1.0)[0]).all()
    a, scale = map(target.xp.asarray, (a, scale))
    y = cupykern.scaled_mm(a, with_layout(b, "F", target.xp), scale, 1.0)
    assert np.isposinf(to_numpy(y).astype(np.float32)).all()
