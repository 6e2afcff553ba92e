"""What softmax and log_softmax alone promise."""

from __future__ import annotations

import mmap

import needs
import numpy as np
import pytest

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.op import Call
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem

DTYPES = ("float16", "bfloat16", "float32")
OP_OF = {op.name: op for op in (OP, LOG_OP)}


def compare(op, call: Call, output) -> check.Comparison:
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    return check.compare((output,), references, bounds)


def array(target, values, dtype="float32"):
    return target.xp.asarray(np.asarray(values).astype(dtypes.NAMES[dtype]))


def to_numpy(x) -> np.ndarray:
    return (x if isinstance(x, np.ndarray) else x.get()).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OP_OF)
def test_every_config_is_within_the_bound(target, name, dtype, exhaustive):
    """Also rows that need a cluster or chunks, aligned and not, masked, of other strides."""
    op = OP_OF[name]
    for num_cols in (5, 1024, 5000, 40_000, *((100,) if exhaustive else ())):
        problem = SoftmaxProblem((3, num_cols), dtype=dtype, mask_shape=(1, num_cols), scale=0.5)
        call = op.inputs(problem, num_cols, target.xp)
        for config in op.configs(problem, target.arch):
            y = op.run(*call.args, **call.kwargs, config=config)
            comparison = compare(op, call, y)
            assert comparison.ok, f"{config}, {num_cols}: {comparison}"


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_every_axis_and_layout_is_within_the_bound(target, axis, layout):
    problem = SoftmaxProblem((3, 9, 2, 70), axis=axis, dtype="bfloat16", layout=layout)
    comparison = check.check_problem(OP, problem, 1, target.xp)
    assert comparison.ok, comparison


@pytest.mark.parametrize("num_cols", [9000, 70_001])
def test_long_columns_are_within_the_bound(target, num_cols):
    problem = SoftmaxProblem((num_cols, 35), axis=0, dtype="float16")
    comparison = check.check_problem(OP, problem, 1, target.xp)
    assert comparison.ok, comparison


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_million_columns_are_within_the_bound(target, dtype):
    problem = SoftmaxProblem((2, 2**20 + 3), dtype=dtype)
    comparison = check.check_problem(OP, problem, 1, target.xp)
    assert comparison.ok, comparison


@needs.host
def test_offsets_may_exceed_two_to_the_31(target):
    """Three rows in a sparse map, more than 2^31 elements apart."""
    gap, num_cols = 2**31 + 8, 1000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    maps = [mmap.mmap(-1, 2 * (2 * gap + num_cols), flags=flags) for _ in range(2)]
    x, y = (
        np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, np.float16), (3, num_cols), (2 * gap, 2), writeable=True
        )
        for memory in maps
    )
    x[...] = inputs.values("normal", x.shape, dtypes.float16, 1)
    cupykern.softmax(x, out=y)
    comparison = compare(OP, Call((x,)), y)
    assert comparison.ok, comparison


def test_arrays_may_have_more_than_two_to_the_31_elements(gpu):
    x = inputs.bench_values((2**21 + 1, 1025), dtypes.float16, 3, gpu.xp)
    y = cupykern.softmax(x)
    part, (got,) = OP.sample(Call((x,)), (y,), 2**20, 1)
    comparison = compare(OP, part, got)
    assert comparison.ok, comparison


def test_errors_on_uniform_logits_meet_the_gates(target):
    """Uniform in [-10, 10]: the gates of the contract."""
    shape = (256 if target.name == "host" else 4096, 4096)
    x = target.xp.asarray(inputs.values("uniform", shape, dtypes.float32, 1))
    comparison = compare(OP, Call((x,), {"dtype": "float32"}), cupykern.softmax(x, dtype="float32"))
    assert comparison.max_abs <= 5e-6 and comparison.max_rel <= 1e-5
    for dtype in ("float16", "bfloat16"):
        y = to_numpy(cupykern.softmax(x, dtype=dtype))
        (expected,) = OP.reference(x)
        rounded = to_numpy(expected).astype(dtypes.NAMES[dtype])
        floor = cupykern.finfo(dtype).underflow_error
        gap = np.maximum(np.spacing(np.abs(rounded)).astype(np.float64), floor)
        assert (np.abs(y - rounded.astype(np.float64)) <= gap).all()


def test_rows_sum_to_one(target):
    x = target.xp.asarray(inputs.values("normal", (50, 777), dtypes.float32, 1))
    references = OP.reference(x)
    (bound,) = OP.bound(x, reference=references)
    y = to_numpy(cupykern.softmax(x))
    assert (np.abs(y.sum(-1) - 1) <= to_numpy(bound.elementwise).sum(-1)).all()


def test_shifting_changes_no_bit_and_permuting_permutes(target):
    xp = target.xp
    x = target.xp.asarray(inputs.values("exact", (20, 300), dtypes.float32, 1))
    y = cupykern.softmax(x)
    assert bool((cupykern.softmax(x + 4096) == y).all())  # small integers shift exactly
    order = np.random.default_rng(1).permutation(300)
    shuffled = cupykern.softmax(xp.ascontiguousarray(x[:, order]))
    (bound,) = OP.bound(x, reference=OP.reference(x))
    assert bool((xp.abs(shuffled - y[:, order]) <= 2 * bound.elementwise[:, order]).all())


def test_log_softmax_is_the_logarithm_of_softmax(target):
    x = target.xp.asarray(inputs.values("normal", (20, 300), dtypes.float32, 1))
    y, log_y = to_numpy(cupykern.softmax(x)), to_numpy(cupykern.log_softmax(x))
    reference = OP.reference(x)
    (bound,) = OP.bound(x, reference=reference)
    (log_bound,) = LOG_OP.bound(x, reference=LOG_OP.reference(x))
    relative = to_numpy(bound.elementwise) / to_numpy(reference[0])
    assert (np.abs(np.log(y) - log_y) <= 2 * relative + to_numpy(log_bound.elementwise)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_give_no_nan(target, dtype):
    large = 80.0 if dtype == "float16" else 3e38
    for row in ([large] * 9, [-large] * 9, [80.0] * 5 + [-80.0], [-large, 0.0, -large]):
        y = to_numpy(cupykern.softmax(array(target, [row], dtype)))
        assert np.isfinite(y).all()
    y = to_numpy(cupykern.softmax(array(target, [[large, -large]], dtype)))
    assert (y == [[1.0, 0.0]]).all()  # the difference may overflow: still no NaN


def test_flushed_subnormal_logits_are_within_the_bound(target):
    """The kernel flushes them: the bound says so, and is one."""
    x = array(target, [[1.0, 2.0], [0.0, 1e-38], [0.0, 0.0]])
    for op in OP_OF.values():
        call = Call((x,), {"scale": 2e38})
        comparison = compare(op, call, op.run(x, **call.kwargs))
        assert comparison.ok, comparison


def test_nan_or_infinity_spoils_its_row_and_minus_infinity_is_zero(target):
    nan, inf = np.nan, np.inf
    rows = [[1, nan, 2], [1, inf, 2], [-inf, -inf, -inf], [1, -inf, 2], [1, 2, 3]]
    y = to_numpy(cupykern.softmax(array(target, rows)))
    log_y = to_numpy(cupykern.log_softmax(array(target, rows)))
    assert np.isnan(y[:3]).all() and np.isnan(log_y[:3]).all()
    assert np.isfinite(y[3:]).all() and y[3, 1] == 0 and log_y[3, 1] == -inf


def test_masked_elements_are_zero_whatever_they_hold(target):
    nan, inf = np.nan, np.inf
    x = array(target, [[1, nan, 2], [nan, nan, nan], [1, -inf, inf], [1, -inf, 5]])
    keep = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0]], bool)
    mask = target.xp.asarray(keep)
    y = to_numpy(cupykern.softmax(x, mask=mask))
    log_y = to_numpy(cupykern.log_softmax(x, mask=mask))
    assert np.isfinite(y[:3]).all() and (y[:3][~keep[:3]] == 0).all()
    assert (y[1] == 0).all() and (log_y[1] == -inf).all()
    assert y[2, 0] == 1 and log_y[2, 1] == -inf
    assert np.isnan(y[3]).all()  # keeps nothing but -inf


def test_repeated_calls_and_out_in_place_give_the_same_bits(target):
    x = target.xp.asarray(inputs.values("normal", (33, 1001), dtypes.float16, 1))
    first = cupykern.softmax(x)
    for _ in range(5):
        assert bool((cupykern.softmax(x) == first).all())
    assert cupykern.softmax(x, out=x) is x
    assert bool((x == first).all())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_empty_arrays_give_empty_results(target, shape):
    y = cupykern.softmax(target.xp.zeros(shape, np.float32), dtype="float16")
    assert y.shape == shape and y.dtype == np.float16
