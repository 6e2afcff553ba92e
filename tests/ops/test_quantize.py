"""What quantize alone promises."""

from __future__ import annotations

import numpy as np
import pytest
from quantize_checks import LARGEST, check_scales_of_one, to_numpy

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.op import Call
from cupykern.ops.quantize import OP, QuantizeProblem
from cupykern.rows.quantize_rows import GRANULARITIES


def run_and_compare(call: Call) -> check.Comparison:
    references = OP.reference(*call.args, **call.kwargs)
    bounds = OP.bound(*call.args, **call.kwargs, reference=references)
    return check.compare(OP.run(*call.args, **call.kwargs), references, bounds)


@pytest.mark.parametrize("granularity", ["tensor", "row", "column"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_config_is_within_the_bound(target, dtype, granularity, exhaustive):
    # Columns are blocks' strips, each of which some configs give 8192 threads.
    lengths = (5, 100, 256) if granularity == "column" else (5, 1024, 40_000)
    for num_cols in (*lengths, 100, 5000) if exhaustive and granularity != "column" else lengths:
        problem = QuantizeProblem((3, num_cols), dtype, granularity=granularity)
        call = OP.inputs(problem, 1, target.xp)
        references = OP.reference(*call.args, **call.kwargs)
        bounds = OP.bound(*call.args, **call.kwargs, reference=references)
        for config in OP.configs(problem, target.arch):
            outputs = OP.run(*call.args, **call.kwargs, config=config)
            comparison = check.compare(outputs, references, bounds)
            assert comparison.ok, f"{config}, {num_cols}: {comparison}"


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_layout_is_within_the_bound(target, granularity, layout):
    for shape in ((3, 4, 70, 129), (2, 300, 257)):
        problem = QuantizeProblem(shape, "bfloat16", "int8", granularity, (3, 64), layout=layout)
        comparison = check.check_problem(OP, problem, 1, target.xp)
        assert comparison.ok, comparison


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_cols", [2, 9, 255, 257])
def test_a_single_row_of_no_whole_vectors_is_within_the_bound(target, granularity, num_cols):
    """Its one stride says nothing about where it ends; memory behind it must not be read."""
    memory = np.full((1, num_cols + 16), np.inf, np.float16)
    x = memory[:, :num_cols]
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    block = {"block": (1, 32)} if granularity == "block" else {}
    assert run_and_compare(Call((x, "int8"), {"granularity": granularity, **block})).ok


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_large_groups_are_within_the_bound(target, granularity):
    shape = (400_003, 3) if granularity == "column" else (2, 1_000_003)
    problem = QuantizeProblem(shape, "float16", "e4m3", granularity, (2, 400_000))
    comparison = check.check_problem(OP, problem, 1, target.xp)
    assert comparison.ok, comparison


@pytest.mark.parametrize("to", dtypes.QUANTIZED)
def test_rounding_is_to_the_nearest_code_and_ties_to_even(target, to):
    """Representable numbers stay, ties go to even codes, the rest to the nearest."""
    if to == "int8":
        exact = np.arange(-127, 128, dtype=np.float32)
        ties = np.arange(-126, 126, dtype=np.float32) + 0.5
    else:
        codes = np.arange(256, dtype=np.uint8).view(dtypes.QUANTIZED[to]).astype(np.float32)
        exact = np.unique(codes[np.isfinite(codes)])
        ties = ((exact[1:].astype(np.float64) + exact[:-1]) / 2).astype(np.float32)
    x = np.concatenate([exact, ties, [LARGEST[to]]]).astype(np.float32)
    q, scale = cupykern.quantize(target.xp.asarray(x), to)
    assert to_numpy(scale) == 1
    expected = np.rint(x) if to == "int8" else x.astype(dtypes.QUANTIZED[to])
    np.testing.assert_array_equal(to_numpy(q), expected.astype(np.float64))


@pytest.mark.parametrize("to", dtypes.QUANTIZED)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_results_have_the_documented_shapes_and_dtypes(target, granularity, to):
    x = target.xp.asarray(inputs.values("normal", (2, 5, 300), dtypes.float16, 1))
    q, scale = cupykern.quantize(x, dtypes.QUANTIZED[to], granularity=granularity)
    shapes = {"tensor": (), "row": (2, 5, 1), "column": (2, 1, 300), "block": (2, 5, 3)}
    assert q.shape == x.shape and q.dtype == dtypes.QUANTIZED[to]
    assert scale.shape == shapes[granularity] and scale.dtype == np.float32
    assert np.abs(to_numpy(q)).max() == LARGEST[to]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("to", dtypes.QUANTIZED)
def test_a_non_finite_group_is_nan_and_a_zero_group_has_scale_one(target, to, granularity):
    x = np.zeros((4, 256), np.float32)
    x[1, 7], x[2, 9] = np.nan, np.inf
    q, scale = cupykern.quantize(target.xp.asarray(x), to, granularity=granularity)
    q, scale = to_numpy(q), to_numpy(scale)
    bad = {
        "tensor": np.ones((4, 256), bool),
        "row": np.repeat([[False], [True], [True], [False]], 256, 1),
        "column": np.repeat([(np.arange(256) == 7) | (np.arange(256) == 9)], 4, 0),
        "block": np.repeat([[0, 0], [1, 0], [1, 0], [0, 0]], 128, 1).astype(bool),
    }[granularity]
    seen = np.broadcast_to(np.repeat(scale, 128, 1) if granularity == "block" else scale, x.shape)
    assert np.isnan(seen[bad]).all() and (seen[~bad] == 1).all() and not q[~bad].any()
    assert not q[bad].any() if to == "int8" else np.isnan(q[bad]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("to", dtypes.QUANTIZED)
@pytest.mark.parametrize("granularity", ["row", "column", "block"])
def test_a_scale_below_the_least_normal_number_is_one(target, to, granularity, dtype):
    check_scales_of_one(target.xp, to, granularity, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("to", dtypes.QUANTIZED)
def test_subnormal_elements_of_a_normal_scale_are_within_the_bound(target, to, dtype):
    """They may count as zeros, which is up to a unit of a code."""
    x = np.full((1, 64), 0.9 * 2.0**-126, dtypes.NAMES[dtype])
    x[0, 0] = 1.5 * LARGEST[to] * 2.0**-126
    found = run_and_compare(Call((target.xp.asarray(x), to), {"granularity": "row"}))
    assert found.ok, found


def test_empty_groups_have_scale_one(target):
    for shape, granularity, expected in (
        ((0, 5), "row", (0, 1)),
        ((3, 0), "row", (3, 1)),
        ((3, 0), "column", (1, 0)),
        ((0,), "tensor", ()),
        ((200, 0), "block", (2, 0)),
    ):
        x = target.xp.empty(shape, np.float32)
        q, scale = cupykern.quantize(x, "e4m3", granularity=granularity, block=(128, 128))
        assert q.shape == shape and scale.shape == expected and (to_numpy(scale) == 1).all()


def test_an_array_without_dims_is_one_group(target):
    q, scale = cupykern.quantize(target.xp.asarray(np.float32(-3)), "int8")
    assert q.shape == scale.shape == () and to_numpy(q) == -127


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_repeated_calls_give_the_same_bits(target, granularity):
    x = target.xp.asarray(inputs.values("normal", (70, 5000), dtypes.bfloat16, 1))
    first = cupykern.quantize(x, "e4m3", granularity=granularity)
    for _ in range(3):
        for a, b in zip(first, cupykern.quantize(x, "e4m3", granularity=granularity), strict=True):
            same = a.reshape(-1).view(np.uint8) == b.reshape(-1).view(np.uint8)
            assert bool(same.all())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x: (([1.0], "e4m3"), {}), TypeError, "x must be a cupy or numpy array"),
        (lambda x: ((x.astype("i4"), "e4m3"), {}), TypeError, "x's dtype must be one of"),
        (lambda x: ((x, "fp4"), {}), TypeError, "dtype must be one of"),
        (lambda x: ((x, "float16"), {}), TypeError, "dtype must be one of"),
        (
            lambda x: ((x, "e4m3"), {"granularity": "rows"}),
            ValueError,
            "granularity must be one of",
        ),
        (lambda x: ((x[0], "e4m3"), {"granularity": "column"}), ValueError, "needs 2 dims"),
        (
            lambda x: ((x, "e4m3"), {"granularity": "block", "block": 128}),
            ValueError,
            "block must be two positive integers",
        ),
        (
            lambda x: ((x, "e4m3"), {"granularity": "block", "block": (0, 128)}),
            ValueError,
            "block must be two positive integers",
        ),
        (
            lambda x: ((x, "e4m3"), {"granularity": "block", "block": (np.int32(2**16),) * 2}),
            ValueError,
            "of a product up to",
        ),
        (
            lambda x: ((x, "e4m3"), {"granularity": "block", "block": (True, 128)}),
            TypeError,
            "block's rows must be an integer",
        ),
        (lambda x: ((x, "e4m3"), {"block": "all"}), ValueError, "block must be two positive"),
        (lambda x: ((x, "e4m3"), {"granularity": x}), ValueError, "granularity must be one of"),
    ],
)
def test_illegal_arguments_are_refused(target, arguments, error, message):
    args, kwargs = arguments(target.xp.ones((4, 8), np.float32))
    with pytest.raises(error, match=message):
        cupykern.quantize(*args, **kwargs)


def test_sizes_of_blocks_may_be_any_integers(target):
    x = target.xp.ones((4, 300), np.float32)
    for block in ([1, 128], (np.uint8(1), np.uint8(128)), (np.int64(1), 128)):
        assert cupykern.quantize(x, "int8", granularity="block", block=block)[1].shape == (4, 3)


def test_bench_problems_are_what_their_options_say():
    problem = OP.bench_problem((4, 8), "bfloat16:int8+column")
    assert (problem.dtype, problem.to, problem.granularity) == ("bfloat16", "int8", "column")
    for text in ("float16:fp4", "float16:row+column"):
        with pytest.raises(ValueError, match=r"bench option|at most one"):
            OP.bench_problem((4, 8), text)
