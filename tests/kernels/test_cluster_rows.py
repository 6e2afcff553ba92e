"""ClusterRows: long rows of any length and alignment (rows/load_cluster.cuh), softmax."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem
from cupykern.rows.softmax_configs import ClusterRows

DTYPES = ("float16", "bfloat16", "float32")
OPS = [OP, LOG_OP]


def config_of(itemsize: int, num_threads: int, blocks: int, num_cols: int) -> ClusterRows:
    width = 16 // itemsize
    vectors = -(-num_cols // (width * num_threads * blocks)) + 1
    return ClusterRows(num_threads, width, vectors, blocks)


def compare(op, x, y) -> check.Comparison:
    references = op.reference(x)
    return check.compare((y,), references, op.bound(x, reference=references))


def test_plain_rows_of_vocabularies_are_shared_by_a_cluster():
    """The vocabularies of language models; not calls with options, nor what no vector can walk."""
    for arch, long in (("sm_90a", True), ("sm_80", False)):
        for num_cols in (32000, 32001, 50257, 50304, 128256, 151669, 151936, 256000, 262144):
            for dtype in DTYPES:
                problem = SoftmaxProblem((64, num_cols), dtype=dtype)
                first = OP.configs(problem, arch)[0]
                assert isinstance(first, ClusterRows) == long, (arch, problem)
                scaled = OP.configs(replace(problem, scale=-0.5), arch)
                assert not isinstance(scaled[0], ClusterRows)
    for num_cols, dtype, wanted in (
        (1001, "float16", False),
        (1501, "float16", True),
        (1501, "float32", False),
        (2047, "float32", True),
    ):
        problem = SoftmaxProblem((2**15, num_cols), dtype=dtype)
        first = OP.configs(problem, "sm_90a")[0]
        assert isinstance(first, ClusterRows) == wanted, problem


def test_few_rows_take_more_blocks():
    """If that is more than many rows take."""
    for dtype, num_cols in (("float16", 50257), ("float32", 10001), ("float16", 151936)):
        blocks = [
            OP.configs(SoftmaxProblem((rows, num_cols), dtype=dtype), "sm_90a")[0].cluster_size
            for rows in (1, 8, 132, 4096)
        ]
        assert blocks[0] >= blocks[1] > blocks[2] == blocks[3], (dtype, num_cols, blocks)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_all_are_one_variant(op):
    for dtype in DTYPES:
        listed = [
            variant
            for variant in op.variants("sm_90a")
            if variant.kernel == "softmax_cluster" and variant.types[0][1] == OP_CPP[dtype]
        ]
        found = {
            replace(op.variant(problem, op.configs(problem, "sm_90a")[0]), launched=None)
            for problem in (SoftmaxProblem((9, n), dtype=dtype) for n in (32001, 65536, 2**18))
        }
        assert found == {replace(variant, launched=None) for variant in listed}


OP_CPP = {"float16": "half", "bfloat16": "bf16", "float32": "float"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_rows_of_any_length_are_within_the_bound(target, op, dtype):
    """By few threads and many, one block and several, also some that have nothing of the row."""
    itemsize = dtypes.NAMES[dtype].itemsize
    lengths = (1, 2, *(2**k + i for k in range(3, 14) for i in (-1, 1)), 8, 1024, 10_001)
    for i, num_cols in enumerate(lengths):
        problem = SoftmaxProblem((3, num_cols), dtype=dtype, kind="wide")
        x = op.inputs(problem, num_cols, target.xp).args[0]
        num_threads, blocks = ((64, 1), (192, 2), (128, 4), (64, 16))[i % 4]
        config = config_of(itemsize, num_threads, blocks, num_cols)
        y = op.run(x, config=config)
        comparison = compare(op, x, y)
        assert comparison.ok, f"{problem}: {comparison}"


@pytest.mark.parametrize("num_cols", [2**15 - 1, 2**15 + 1, 50257])
def test_as_they_come(target, num_cols):
    for op, dtype in ((OP, "float16"), (LOG_OP, "float32")):
        problem = SoftmaxProblem((2, num_cols), dtype=dtype)
        comparison = check.check_problem(op, problem, 1, target.xp)
        assert comparison.ok, f"{problem}: {comparison}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_begin_anywhere(target, dtype):
    """Every place in a vector, every vector of a line; nothing around the rows is touched; rows
    with gaps between them; in place."""
    xp, itemsize = target.xp, dtypes.NAMES[dtype].itemsize
    num_rows, num_cols, width = 3, 1023, 16 // itemsize
    values = inputs.values("normal", (4096,), dtypes.NAMES[dtype], 1)
    config = config_of(itemsize, 64, 2, num_cols)
    for offset in (*range(width), *range(2 * width - 1, 128 // itemsize, width)):
        for gap in (0, 5, width):
            step, size = num_cols + gap, num_rows * (num_cols + gap)
            memory, out = xp.asarray(values), xp.full(4096, 7, values.dtype)
            x, y = (
                a[offset : offset + size].reshape(num_rows, step)[:, :num_cols]
                for a in (memory, out)
            )
            cupykern.softmax(x, out=y, config=config)
            comparison = compare(OP, x, y)
            assert comparison.ok, f"{offset}, {gap}: {comparison}"
            before = y.copy()
            y[...] = 7
            assert bool((out == 7).all())
            cupykern.softmax(x, out=x, config=config)
            assert bool((x == before).all())
            x[...] = xp.asarray(values)[offset : offset + size].reshape(num_rows, step)[
                :, :num_cols
            ]
            assert bool((memory == xp.asarray(values)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_rows(target, dtype):
    """Also at the elements that are no part of a vector; neighbours are as they were."""
    x = inputs.values("normal", (9, 1025), dtypes.NAMES[dtype], 1)
    config = config_of(x.itemsize, 64, 2, 1025)
    expected = cupykern.softmax(target.xp.asarray(x), config=config)
    x[1, 0], x[3, 1024], x[5, 500], x[7] = np.nan, np.inf, np.nan, -np.inf
    y = cupykern.softmax(target.xp.asarray(x), config=config)
    assert bool((y[::2] == expected[::2]).all())
    assert bool(target.xp.isnan(y[1::2]).all())
    z = cupykern.log_softmax(target.xp.asarray(x), config=config)
    assert bool(target.xp.isnan(z[1::2]).all()) and bool(target.xp.isfinite(z[::2]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_give_no_nan(target, dtype):
    large = 6e4 if dtype == "float16" else 3e38
    x = np.full((3, 1025), -large, dtypes.NAMES[dtype])
    x[0, 0] = x[1, 1024] = x[2, 512] = large
    config = config_of(x.itemsize, 64, 4, 1025)
    y = cupykern.softmax(target.xp.asarray(x), config=config)
    assert bool((y == target.xp.asarray((x > 0).astype(x.dtype))).all())


def test_what_does_not_fit(target):
    x = target.xp.asarray(inputs.values("normal", (3, 1025), dtypes.float16, 1))
    config = config_of(2, 64, 2, 1025)
    for changes, says in (
        ({"num_threads": 1024}, "at most 512; got 1024"),
        ({"num_threads": 80}, "a multiple of 32"),
        ({"cluster_size": 3}, "powers of two"),
        ({"vectors_per_thread": 1}, "elements are fewer than a row's"),
    ):
        with pytest.raises(ValueError, match=says):
            cupykern.softmax(x, config=replace(config, **changes))
    for options in ({"scale": -0.5}, {"mask": x > 0}):
        with pytest.raises(ValueError, match="calls without options"):
            cupykern.softmax(x, **options, config=config)
    with pytest.raises(TypeError, match="got ClusterRows"):
        cupykern.rms_norm(x, config=config)
