"""Hopper's main loop: every kind of problem at hostile schedules and on a GPU, refusals, races."""

from __future__ import annotations

import os
import subprocess
import sys

import needs
import numpy as np
import pytest
from gemm_hopper_problems import (
    CONFIGS,
    E4M3,
    FEW_ROWS,
    FP4,
    FP4_SPLITS,
    FP8,
    FP8_SPLITS,
    HALVES,
    INT8,
    MANY_GROUPS,
    MIXED,
    MIXED_BLOCKS,
    MIXED_SPLITS,
    OF_FP8,
    OF_MIXED,
    OP,
    OTHERS,
    PROBLEMS,
    SCALED,
    SPLITS,
    UNEVEN_SPLITS,
    WIDTHS,
    check_fp8_integers,
    check_parts_of_k,
    compute,
    fp8,
    task,
)
from hopper_kernels import SCHEDULES
from hypothesis import given, settings
from hypothesis import strategies as st

from cupykern import check, dtypes
from cupykern.gemm import gemm
from cupykern.gemm.product import MN_MAJOR, k_per_split
from cupykern.gemm.sm90_config import Sm90Config
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.problems.products import MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.targets import UnavailableError, host, host_compiler
from cupykern.tools import gate

# Problems, a config, and which of the problems it computes where not all: every third, or fewer of
# families with fewer configs, which together compute all.
CASES = [
    *(
        (
            PROBLEMS + OTHERS[2 if config.tile_n % 128 else i % len(OTHERS)],
            config,
            slice(i // len(OTHERS) % 3, None, 3),
        )
        for i, config in enumerate(CONFIGS)
    ),
    *(
        (problems, config, slice(i % min(3, len(configs)), None, min(3, len(configs))))
        for problems, configs in (
            *(FEW_ROWS, FP8, HALVES, *WIDTHS, INT8, MIXED, MIXED_BLOCKS, FP4),
            *(MANY_GROUPS, SPLITS, UNEVEN_SPLITS, FP8_SPLITS, MIXED_SPLITS, FP4_SPLITS),
        )
        for i, config in enumerate(configs)
    ),
]


def computes(config, problem) -> bool:
    of_product = getattr(problem, "product", problem)
    if isinstance(config, SplitKWorkspace):  # no split is empty
        depth = k_per_split(of_product.k, config.splits, config.config.tile_k)
        return (config.splits - 1) * depth < of_product.k
    if not isinstance(config, Sm90Config):
        return True
    if config.split_k > 1 and of_product.k <= (config.split_k - 1) * config.tile_k:
        return False  # each block of the cluster has a stage
    # Few columns of accumulators are of a K-major a.
    return not (config.swap_ab and config.tile_m < 64 and of_product.layout_a != "C")


def elements(problem) -> int:
    of_product = getattr(problem, "product", problem)
    return of_product.m * of_product.n


@needs.hopper
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("problems", "config", "few"), CASES, ids=[f"{p[0].dtype}-{config}" for p, config, _ in CASES]
)
def test_errors_are_within_the_bound(target, problems, config, few, exhaustive):
    problems = [problem for problem in problems if computes(config, problem)]
    assert problems
    chosen = problems if exhaustive else problems[few] or problems
    # The smallest first: they run under other schedules too.
    for i, problem in enumerate(sorted(chosen, key=elements)):
        y = compute(target, problem, config)
        for schedule in SCHEDULES[1:] if target.name == "host" and i < 1 + exhaustive else ():
            with host.use(schedule=schedule) as here:
                assert compute(here, problem, config) == y, f"{schedule} changes {problem!r}"


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
    (("bfloat16", E4M3), "F", ("blocks", "blocks of b"), MIXED_BLOCKS[1][1]),
    (("float16", E4M3), "F", ("blocks", "blocks of b"), MIXED_BLOCKS[1][2]),
)


@needs.hopper
@given(data=st.data())
@settings(max_examples=40)
def test_any_problem_is_within_the_bound(target, data):

    def pick(*options):
        return data.draw(st.sampled_from(options))

    (a, b), layout_b, recipes, config = pick(*FAMILIES)
    # Rows in memory are multiples of 16 bytes.
    m, n, k = (
        pick(1, 2, 63, 64, 65, 129, 200),
        16 * pick(1, 4, 5, 9, 17),
        16 * pick(*((9, 17, 41) if config.split_k > 1 else (1, 4, 7, 8, 9, 41))),
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
def test_error_of_the_whole_product_is_small(target, family, kind):
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
    """The short epilogue's gelu takes half its argument; half of this alpha would flush to 0."""
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
    """Rows of the output and of an operand are parts of longer ones, whose rest stays."""
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
    """TMA loads neither tiles' scales of less than 16 bytes nor misaligned or strided ones."""
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
    *(({"layout_b": MN_MAJOR}, (CONFIGS[5], CONFIGS[6], CONFIGS[8])), ({}, CONFIGS[2:3])),
    *((OF_FP8, (*FP8[1][:1], *HALVES[1])), (OF_MIXED, MIXED[1][:1])),
    (OF_MIXED | {"block_scales": True}, (MIXED_BLOCKS[1][0], WIDTHS[-1][1][0])),
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

_RUN = """
import sys
from gemm_hopper_problems import CHECKED, OTHER_OPS, compute
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
step = 1 if everything else {"thread": 2, "address": 4}[sys.argv[1]]
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
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "Sanitizer" not in done.stderr, done.stderr[-3000:]
