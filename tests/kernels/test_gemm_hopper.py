"""Hopper's main loop: every kind of problem at hostile schedules and on a GPU, refusals, races."""

from __future__ import annotations

import os
import subprocess
import sys

import needs
import numpy as np
import pytest
from hopper_kernels import SCHEDULES
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hopper_choice import OF_FP8, OF_MIXED, task

from cupykern import OPS, check, dtypes
from cupykern.gemm import gemm, hopper_choice
from cupykern.gemm.dequant_softmax import LogitsProblem
from cupykern.gemm.dual_gemm import NVFP4, DualProblem
from cupykern.gemm.hopper_config import HopperConfig
from cupykern.gemm.matmul_problem import MatmulProblem
from cupykern.gemm.product import OUTER
from cupykern.gemm.scaled_problem import ScaledProblem
from cupykern.targets import Target, UnavailableError, host, host_compiler
from cupykern.tools import gate

OP, SCALED = (next(op for op in OPS if op.name == name) for name in ("matmul", "scaled_mm"))
CONFIGS = (
    *(config for config in hopper_choice.CONFIGS if not config.turned),  # FEW_ROWS
    HopperConfig(256, 128, 2),
    HopperConfig(128, 128, 3, cluster=2),
    HopperConfig(256, 104, 2),  # chunks of columns that overlap, by either end of a tile
)

# By dtype and layouts, which make variants: all configs have the first group, and one of the others that
# they can compute.
PROBLEMS = (
    MatmulProblem(136, 264, 192, layout_b="F", kind="exact"),
    MatmulProblem(392, 520, 640, layout_b="F", out_dtype="bfloat16", alpha=-3.7),
    MatmulProblem(
        *(200, 328, 200), layout_b="F", bias=(328,), residual=(200, 328), activation="gelu", alpha=0.125,
    ),
    MatmulProblem(
        *(328, 520, 136), layout_b="F", batch_a=(2,), residual=(2, 328, 520), activation="gelu_tanh",
        out_dtype="bfloat16",
    ),
    MatmulProblem(1, 8, 8, layout_b="F"),
    MatmulProblem(300, 257, 136, layout_b="F", out_dtype="bfloat16"),
    MatmulProblem(64, 64, 128, layout_b="F", kind="special"),
)  # fmt: skip
OTHERS = (
    (
        MatmulProblem(136, 264, 520, "bfloat16", out_dtype="float32"),
        MatmulProblem(72, 136, 136, "bfloat16", batch_a=(2, 1), batch_b=(3,), residual=(72, 136)),
        MatmulProblem(65, 136, 64, "bfloat16", batch_a=(3,), bias=(65, 1), activation="silu"),
        MatmulProblem(136, 264, 640, "bfloat16", batch_a=(2,), batch_b=(2,)),
    ),
    (MatmulProblem(136, 264, 192, layout_a="F", kind="same_sign"),),
    (MatmulProblem(136, 264, 72, "bfloat16", layout_a="F", layout_b="F"),),
)


# Few rows, whose sums lie turned.
FEW_ROWS = (
    (
        MatmulProblem(16, 264, 200, layout_b="F", kind="exact"),
        MatmulProblem(1, 136, 520, layout_b="F", bias=(136,), activation="gelu"),
        MatmulProblem(40, 136, 136, layout_b="F", bias=(40, 1), residual=(40, 136)),
        MatmulProblem(20, 137, 136, layout_b="F", out_dtype="float32"),
        MatmulProblem(17, 264, 400, "bfloat16", batch_a=(2,), batch_b=(2,)),
    ),
    (
        HopperConfig(16, 64, 4, share_k=True, turned=True),
        HopperConfig(32, 64, 4, share_k=True, turned=True, cluster=2),
    ),
)


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def fp8(m: int, n: int, k: int, scales: str, b: str = E4M3, **options) -> ScaledProblem:
    return ScaledProblem(MatmulProblem(m, n, k, E4M3, b, layout_b="F", **options), scales)


# (problems, configs), each for each.
FP8 = (
    (
        fp8(136, 392, 656, "blocks"),
        fp8(72, 136, 784, "blocks", batch_a=(2,), kind="same_sign", out_dtype="float32"),
        fp8(136, 264, 272, "rows", bias=(264,), activation="gelu"),
        fp8(1, 16, 16, "tensor"),
        MatmulProblem(392, 264, 272, E4M3, layout_b="F", residual=(392, 264)),
        fp8(136, 72, 144, "none", kind="exact"),
        fp8(64, 64, 128, "none", kind="special"),
    ),
    (
        HopperConfig(128, 128, 4),
        HopperConfig(128, 128, 3, cluster=2, split_k=True),
        HopperConfig(64, 64, 4, share_k=True),
        HopperConfig(16, 64, 4, share_k=True, turned=True),
        HopperConfig(192, 128, 4, warpgroups=3),
    ),
)
# Halves of the columns, for the short epilogue alone.
HALVES = (
    (
        fp8(392, 392, 656, "rows", bias=(392,)),
        fp8(72, 264, 144, "tensor", batch_a=(2,), kind="same_sign", out_dtype="bfloat16"),
        fp8(136, 72, 272, "none", kind="exact"),
        fp8(1, 16, 16, "tensor"),
        fp8(64, 64, 128, "none", kind="special"),
    ),
    (HopperConfig(128, 176, 2, cluster=2), HopperConfig(128, 192, 3)),
)
INT8 = (
    (
        MatmulProblem(136, 264, 400, "int8", layout_b="F"),
        MatmulProblem(72, 136, 144, "int8", layout_b="F", bias=(136,), out_dtype="float16"),
        ScaledProblem(MatmulProblem(65, 264, 1040, "int8", layout_b="F"), "rows"),
        MatmulProblem(
            *(72, 136, 144, "int8"),
            layout_b="F",
            residual=(72, 136),
            out_dtype="bfloat16",
        ),
    ),
    (HopperConfig(128, 64, 4), HopperConfig(64, 64, 4, share_k=True)),
)


def mixed(m: int, n: int, k: int, b: str = E4M3, a: str = "float16", **options) -> MatmulProblem:
    return MatmulProblem(m, n, k, a, b, **options)


# b (N, K) in memory; (K, N); of int8 in bfloat16.
MIXED = (
    (
        mixed(136, 272, 208, layout_b="F", kind="exact"),
        mixed(72, 136, 144, layout_b="F", bias=(72, 136), residual=(72, 136), activation="silu"),
        ScaledProblem(mixed(300, 144, 272, layout_b="F", bias=(300, 1)), "rows"),
        mixed(72, 144, 400, layout_b="C", batch_a=(2, 1), batch_b=(3,), bias=(144,)),
        mixed(136, 272, 208, layout_b="C", out_dtype="float32"),
        mixed(64, 64, 128, layout_b="C", kind="special"),
        mixed(1, 16, 16, "int8", "bfloat16", layout_b="F"),
        mixed(392, 144, 272, a="bfloat16", layout_b="F", residual=(392, 144), activation="relu"),
        mixed(72, 272, 144, a="bfloat16", layout_b="C", batch_a=(3,), residual=(3, 72, 272)),
        ScaledProblem(mixed(65, 144, 272, "int8", "bfloat16", layout_b="F"), "rows"),
    ),
    (
        HopperConfig(256, 128, 3),
        HopperConfig(128, 128, 2, lines=2, cluster=2, split_k=True),
        HopperConfig(64, 64, 4, share_k=True, lines=2, cluster=2),
        HopperConfig(32, 64, 4, share_k=True, lines=4),
        HopperConfig(16, 64, 4, share_k=True, lines=2),
    ),
)


def fp4(m: int, n: int, k: int, **options) -> ScaledProblem:
    return ScaledProblem(mixed(m, n, k, NVFP4, layout_b="F", **options), "tensor")


FP4 = (
    (
        fp4(16, 136, 1056),
        fp4(40, 144, 288, bias=(144,), kind="exact"),
        fp4(130, 264, 2080, out_dtype="float32", activation="silu"),
    ),
    (
        HopperConfig(16, 64, 4, share_k=True, lines=4),
        HopperConfig(128, 128, 2, lines=2, cluster=2, split_k=True),
        HopperConfig(64, 128, 2, lines=4, cluster=2, split_k=True),
    ),
)


# k in parts that another launch adds.
SPLITS = (
    (
        MatmulProblem(136, 264, 512, layout_b="F", kind="exact"),
        MatmulProblem(
            *(20, 136, 768, "bfloat16"), bias=(136,), residual=(20, 136), activation="silu", alpha=-3.7,
        ),
        MatmulProblem(328, 132, 256, layout_a="F", layout_b="F", bias=(328, 1), out_dtype="float32"),
        MatmulProblem(136, 72, 512, "bfloat16", batch_a=(1,), layout_a="F"),
        MatmulProblem(64, 64, 256, layout_b="F", kind="special"),
    ),
    (HopperConfig(128, 64, 8, splits=4), HopperConfig(128, 128, 6, cluster=2, splits=2)),
)  # fmt: skip


def compute(target: Target, problem: MatmulProblem | ScaledProblem, config: HopperConfig) -> bytes:
    """Checks the output against the bound, and returns its bytes."""
    op = OP if isinstance(problem, MatmulProblem) else SCALED
    call = op.inputs(problem, 3, target.xp)
    y = op.run(*call.args, **call.kwargs, config=config)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    comparison = check.compare((y,), references, bounds)
    # What is expected of FP8 on the host is too small for scales of blocks and numbers of one sign.
    known = op is SCALED and (problem.scales, problem.product.kind) == ("blocks", "same_sign")
    assert comparison.ok or (known and comparison.within_bound), f"{problem!r}: {comparison}"
    return y.tobytes()


CASES = [
    *(
        (PROBLEMS + OTHERS[2 if config.tile_n % 128 else i % len(OTHERS)], config)
        for i, config in enumerate(CONFIGS)
    ),
    *(
        (problems, config)
        for problems, configs in (FEW_ROWS, FP8, HALVES, INT8, MIXED, FP4, SPLITS)
        for config in configs
    ),
]


@needs.hopper
@pytest.mark.parametrize(
    ("problems", "config"), CASES, ids=[f"{p[0].dtype}-{config}" for p, config in CASES]
)
def test_errors_are_within_the_bound(target, problems, config, exhaustive):
    if CASES.index((problems, config)) % 2 and not exhaustive:
        problems = problems[:2]
    for i, problem in enumerate(problems):
        if config.split_k and getattr(problem, "product", problem).k <= 128:
            continue  # each block of the cluster has a stage
        y = compute(target, problem, config)
        for schedule in SCHEDULES[1:] if target.name == "host" and i < 1 + exhaustive else ():
            with host.use(schedule=schedule) as here:
                assert compute(here, problem, config) == y, f"{schedule} changes {problem!r}"


def check_parts_of_k(splits: int) -> None:
    """Every part counts once: products of ones, which are 4^i in the i-th of up to 12 parts."""
    k = 64 * splits
    a, b = np.ones((4, k), np.float16), np.ones((64, k), np.float16)
    sizes = 4.0 ** (np.arange(splits) % 12)
    a *= np.repeat(np.exp2(np.arange(splits) % 12), 64).astype(np.float16)
    b *= np.repeat(np.exp2(np.arange(splits) % 12), 64).astype(np.float16)
    y = OP.run(a, b.T, out_dtype="float32", config=HopperConfig(128, 64, 8, splits=splits))
    np.testing.assert_array_equal(y, np.full((4, 64), 64 * sizes.sum()))


@pytest.mark.parametrize("splits", [8, 9, 17])
def test_every_part_of_k_is_added(splits):
    """As many parts as are loaded at once, and more."""
    with host.use():
        check_parts_of_k(splits)


# Variants that the tests above have compiled.
FAMILIES = (
    (("float16", None), "F", ("none",), CONFIGS[8]),
    ((E4M3, E4M3), "F", ("none", "tensor", "rows", "blocks"), FP8[1][1]),
    ((E4M3, E4M3), "F", ("tensor", "rows", "blocks"), FP8[1][2]),
    (("int8", "int8"), "F", ("none", "rows"), INT8[1][1]),
    (("float16", E4M3), "F", ("none", "tensor", "rows"), MIXED[1][0]),
    (("float16", E4M3), "C", ("none", "tensor", "rows"), MIXED[1][1]),
)


@needs.hopper
@given(data=st.data())
@settings(max_examples=40)
def test_any_problem(target, data):

    def pick(*options):
        return data.draw(st.sampled_from(options))

    (a, b), layout_b, recipes, config = pick(*FAMILIES)
    # Rows in memory are multiples of 16 bytes.
    m, n, k = (
        pick(1, 2, 63, 64, 65, 129, 200),
        16 * pick(1, 4, 5, 9, 17),
        16 * pick(*((9, 17, 41) if config.split_k else (1, 4, 7, 8, 9, 41))),
    )
    problem = MatmulProblem(
        *(m, n, k, a, b), layout_b=layout_b, kind=pick("normal", "same_sign", "exact", "uniform"),
        bias=pick(None, (n,), (m, 1), (m, n)), activation=pick(None, "relu", "gelu", "silu"),
        out_dtype=pick("float16", "bfloat16", "float32"),
    )  # fmt: skip
    scales = pick(*recipes)
    compute(target, problem if scales == "none" else ScaledProblem(problem, scales), config)


@needs.hopper
@pytest.mark.parametrize("kind", ["normal", "same_sign"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family[0][0]}-{family[1]}")
def test_gates(target, family, kind):
    """Of the errors of a product as a whole, by both main loops."""
    (a, b), layout_b, recipes, config = family
    for out_dtype, most in (("float16", 5e-4), ("bfloat16", 4e-3)):
        problem = MatmulProblem(
            72, 144, 1040, a, b, layout_b=layout_b, kind=kind, out_dtype=out_dtype
        )
        op, problem = (OP, problem) if b is None else (SCALED, ScaledProblem(problem, recipes[-1]))
        call = op.inputs(problem, 1, target.xp)
        references = op.reference(*call.args, **call.kwargs)
        bounds = op.bound(*call.args, **call.kwargs, reference=references)
        for chosen in (None, config):
            y = op.run(*call.args, **call.kwargs, config=chosen)
            comparison = check.compare((y,), references, bounds)
            assert comparison.within_bound and comparison.relative_l2 <= most, comparison


@needs.hopper
def test_batches_whose_strides_have_a_common_factor(target):
    """Views of a batch that is no one dim of the array: every second matrix, in another order."""
    a = target.xp.asarray(np.random.default_rng(1).integers(-3, 4, (4, 6, 40, 64)), np.float16)
    b = target.xp.asarray(np.random.default_rng(2).integers(-3, 4, (6, 64, 72)), np.float16)
    views = a[::2, ::3].swapaxes(0, 1), b[::3, None]
    out = target.xp.zeros((2, 2, 40, 80), np.float16)[..., :72]
    y = OP.run(*views, out=out, config=CONFIGS[0])
    expected = target.xp.matmul(*(v.astype(np.float32) for v in views))
    assert y is out and bool((y.astype(np.float32) == expected).all())


@needs.hopper
def test_gelu_of_the_smallest_alpha(target):
    """The short epilogue's gelu is of half its argument; half of this alpha would be flushed to zero."""
    a, b = (
        target.xp.asarray(np.full(shape, 2.0**60, dtypes.bfloat16))
        for shape in ((72, 64), (64, 136))
    )
    y = OP.run(a, b, alpha=2.0**-126, activation="gelu", out_dtype="float16", config=CONFIGS[0])
    assert bool((abs(y.astype(np.float32) - 0.8413447) < 2.0**-11).all())


@needs.hopper
@pytest.mark.parametrize("config", [CONFIGS[0], FEW_ROWS[1][0]], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_apart_from_each_other(target, config, dtype):
    """The output's and an operand's rows are parts of longer ones, which keep their other numbers."""
    whole = target.xp.full((100, 256), 7, dtype)
    a = target.xp.ones((200, 128), np.float16)[::2, :64]
    b = target.xp.ones((96, 128), np.float16)[:, 64:].T
    # For TMA: aligned; not; rows end within 16 bytes.
    for rows, first, last in ((100, 64, 160), (100, 65, 161), (100, 64, 157), (1, 64, 157)):
        out = whole[:rows, first:last]
        OP.run(a[:rows], b[:, : last - first], out=out, out_dtype=dtype, config=config)
        assert bool((out == 64).all())
        out[...] = 7
        assert bool((whole == 7).all())


# --- which config ------------------------------------------------------------------------------


@needs.hopper
@pytest.mark.parametrize("config", FP8[1], ids=str)
def test_integers_that_fp8_sums_exactly(target, config):
    """sum |a b| <= 2^13 in every 128 of k: nothing is cut.  Of one sign, 512 of k would not fit."""
    check_fp8_integers(target, config, 72, 136, 2064)


def check_fp8_integers(target: Target, config, m: int, n: int, k: int) -> None:
    """Raises AssertionError unless FP8 products of integers are exact."""
    rng = np.random.default_rng(1)
    for least in (-8, 7):
        a, b = (rng.integers(least, 9, shape).astype(np.float32) for shape in ((m, k), (n, k)))
        codes = [target.xp.asarray(x.astype(dtypes.float8_e4m3fn).view(np.uint8)) for x in (a, b)]
        fp8_a, fp8_b = (x.view(dtypes.float8_e4m3fn) for x in codes)
        y = SCALED.run(fp8_a, fp8_b.T, out_dtype="float32", config=config)
        assert bool((target.xp.asarray(a @ b.T) == y).all())


@needs.hopper
def test_numbers_and_arrays_of_scales_are_the_same(target):
    """A number takes the place of the array that is not there."""
    call = SCALED.inputs(fp8(136, 264, 272, "rows"), 1, target.xp)
    a, b, rows, cols = call.args
    for pair in (rows, 0.3), (0.3, cols), (0.5, 0.6):
        arrays = [
            x if hasattr(x, "dtype") else target.xp.full_like(like, np.float32(x))
            for x, like in zip(pair, (rows, cols), strict=True)
        ]
        if not hasattr(pair[0], "dtype") and not hasattr(pair[1], "dtype"):
            arrays[1][...] = 1
            arrays[0][...] = np.float32(pair[0] * pair[1])
        y, expected = (SCALED.run(a, b, *two, config=FP8[1][0]) for two in (pair, arrays))
        assert y.tobytes() == expected.tobytes()


@needs.hopper
@pytest.mark.parametrize("config", [HALVES[1][0], FP8[1][0], FP8[1][3]], ids=str)
def test_scales_wherever_they_lie(target, config):
    """TMA brings neither those of a tile that are no whole 16 bytes nor what is not aligned or apart."""
    call = SCALED.inputs(fp8(390, 264, 272, "rows"), 1, target.xp)
    *operands, scale_a, scale_b = call.args
    for m in (390, 72):  # of clusters, the last block has fewer rows, or none
        a, of_rows = operands[0][:m], scale_a[:m]
        expected = None
        for first, step in ((0, 1), (1, 1), (0, 2)):
            views = []
            for scale in (of_rows, scale_b):
                whole = target.xp.full(first + step * scale.size, np.nan, np.float32)
                whole[first::step] = scale.ravel()
                views.append(whole[first::step].reshape(scale.shape))
            y = SCALED.run(a, operands[1], *views, config=config)
            expected = y if expected is None else expected
            assert y.tobytes() == expected.tobytes()


def test_hopper_has_warps_of_32_lanes():
    x = np.ones((8, 8), np.float16)
    with host.use(warp_size=64), pytest.raises(ValueError, match="warps of 32 lanes; got 64"):
        OP.run(x, x, config=CONFIGS[0])


# Of each main loop the tile with the most registers.
_TASKS = (
    *(({"layout_b": OUTER}, (CONFIGS[6], CONFIGS[7], CONFIGS[9])), ({}, CONFIGS[2:3])),
    *((OF_FP8, (*FP8[1][:1], *HALVES[1])), (OF_MIXED, MIXED[1][:1])),
)


@pytest.mark.compile
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("changes", "config"), [(x, c) for x, configs in _TASKS for c in configs], ids=str
)
def test_compiles_without_spills(changes, config):
    row = gate.compile_row(gemm.variant(task(**changes), config), "sm_90a")
    assert gate.failure(row) is None and row.local_bytes == 0
    assert row.registers == 168  # gemm_hopper.cu: what the warps share out


# --- the race checker --------------------------------------------------------------------------

# Few: a checker's build of a variant takes seconds.
CHECKED = (
    (FP8[0][0], FP8[1][1]),
    (HALVES[0][0], HALVES[1][0]),
    (MIXED[0][3], MIXED[1][1]),
    (PROBLEMS[2], CONFIGS[0]),
    (PROBLEMS[1], CONFIGS[2]),
    (PROBLEMS[3], CONFIGS[0]),
    (MIXED[0][-2], MIXED[1][0]),
)
# Of other ops: logits, NVFP4 decoded in registers and before.
OTHER_OPS = (
    ("dequant_softmax", LogitsProblem(70, 272, 272, layout_w="F"), HopperConfig(64, 128, 3, lines=2)),
    ("dual_gemm_silu", DualProblem(70, 72, 288, NVFP4, NVFP4), HopperConfig(64, 128, 3, lines=2)),
    ("dual_gemm_silu", DualProblem(70, 72, 80, NVFP4, NVFP4), HopperConfig(128, 128, 3, decoded=True)),
)  # fmt: skip
_RUN = """
import sys
from test_gemm_hopper import CHECKED, OTHER_OPS, compute
from cupykern import OPS
from cupykern.targets import host

OPS = {op.name: op for op in OPS}

def run(target, number):
    if number < len(CHECKED):
        compute(target, *CHECKED[number])
        return
    name, problem, config = OTHER_OPS[number - len(CHECKED)]
    call = OPS[name].inputs(problem, 1, target.xp)
    OPS[name].run(*call.args, **call.kwargs, config=config)


everything = len(sys.argv) > 2
step = 2 if sys.argv[1] == "address" and not everything else 1
for number in range(0, len(CHECKED) + len(OTHER_OPS), step):
    for turn in range(1 + everything):
        schedule = ("fifo", "lifo")[(number // step + turn) % 2]
        with host.use(sanitizer=sys.argv[1], schedule=schedule) as target:
            run(target, number)
"""


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", host.SANITIZERS)
def test_the_checkers_find_nothing(sanitizer, exhaustive):
    try:
        added = host_compiler.sanitizer_environment(sanitizer)
    except UnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-c", _RUN, sanitizer, *(["all"] if exhaustive else [])],
        env={
            **os.environ,
            **added,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "Sanitizer" not in done.stderr, done.stderr[-3000:]
