"""What layer_norm and rms_norm alone promise."""

from __future__ import annotations

import mmap

import needs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupykern
from cupykern import check, dtypes, inputs, numerics
from cupykern.op import Call, as_tuple
from cupykern.ops.norm import ADD_OP, LAYER_OP, RMS_OP
from cupykern.ops.problems.norm import NormProblem
from cupykern.rows.norm_configs import NormSharedRows

DTYPES = ("float16", "bfloat16", "float32")
OPS = {op.name: op for op in (LAYER_OP, RMS_OP, ADD_OP)}


def compare(op, call: Call, outputs) -> check.Comparison:
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    return check.compare(as_tuple(outputs), references, bounds)


def run_and_compare(op, call: Call) -> check.Comparison:
    return compare(op, call, op.run(*call.args, **call.kwargs))


def to_numpy(x) -> np.ndarray:
    return (x if isinstance(x, np.ndarray) else x.get()).astype(np.float64)


def random(target, shape, dtype="float32", seed=1, kind="normal"):
    return target.xp.asarray(inputs.values(kind, shape, dtypes.NAMES[dtype], seed))


@pytest.mark.in_turn("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_every_config_is_within_the_bound(target, name, dtype):
    """Also rows that need a cluster or chunks; plain and with every option.

    On the host each op and dtype compiles every fourth, others each: there are hundreds.
    """
    op = OPS[name]
    centered = op is LAYER_OP
    part = slice(None)
    if target.name == "host":
        part = slice((list(OPS).index(name) + DTYPES.index(dtype)) % 4, None, 4)
    seen = set()
    for num_cols in (5, 96, 1024, 5000, 40_000):
        for plain in (True, False):
            problem = NormProblem(
                (3, num_cols),
                dtype,
                weight_dtype=dtype if plain else "float32",
                bias_dtype="float16" if centered and not plain else None,
                residual=op is ADD_OP,
                compensated=centered and not plain,
                return_stats=True,
            )
            call = op.inputs(problem, num_cols, target.xp)
            configs = [c for c in op.configs(problem, target.arch) if c not in seen][part]
            seen |= set(op.configs(problem, target.arch))
            for config in configs:
                outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
                comparison = compare(op, call, outputs)
                assert comparison.ok, f"{config}, {num_cols}: {comparison}"


@pytest.mark.parametrize("name", OPS)
def test_rows_that_fill_their_threads_are_within_the_bound(target, name):
    """Which have code of their own, as have those beside them."""
    for shape, dtype in (((8, 1024), "float16"), ((9, 1024), "float16"), ((4, 4096), "float32")):
        problem = NormProblem(
            shape,
            dtype,
            weight_dtype=dtype,
            bias_dtype=dtype if name == "layer_norm" else None,
            residual=name == "add_rms_norm",
            return_stats=shape[0] == 9,
        )
        comparison = check.check_problem(OPS[name], problem, 1, target.xp)
        assert comparison.ok, comparison


@pytest.mark.in_turn("cols")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("cols", [72, 328, 1416, 2880, 5376, 9000, 9002, 18_440])
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", OPS)
def test_rows_of_any_number_of_vectors_are_within_the_bound(target, name, quantize, cols):
    """Threads are fitted to the row: any multiple of 64, of which the last have fewer vectors."""
    if quantize and name == "layer_norm":
        name = "rms_norm"  # with its block scales
    dtype = ("bfloat16", "float32")[cols % 16 == 8]
    problem = NormProblem(
        *((5, cols), dtype),
        weight_dtype=dtype,
        bias_dtype=dtype if name == "layer_norm" else None,
        residual=name == "add_rms_norm",
        quantize=quantize,
        granularity="block" if quantize and cols % 128 == 0 else "row",
        return_stats=not quantize,
    )
    comparison = check.check_problem(OPS[name], problem, cols, target.xp)
    assert comparison.ok, comparison


@pytest.mark.parametrize("residual", [False, True])
def test_each_operand_has_its_own_row_stride(target, residual):
    """x, the residual, y and the sum: none may be walked at another's."""
    x, other = (random(target, (16, columns), seed=columns) for columns in (640, 768))
    args, kwargs = (x[:, :512], random(target, (512,), seed=3)), {}
    if residual:
        kwargs["residual"] = other[:, 128:640]
    out = random(target, (16, 1024))[:, 512:]
    call = Call(args, kwargs)
    op = ADD_OP if residual else RMS_OP
    outputs = as_tuple(op.run(*args, **kwargs, out=out))
    assert outputs[0] is out
    assert compare(op, call, outputs).ok


@needs.clusters(2)
@pytest.mark.parametrize(
    ("name", "quantize"), [("layer_norm", None), ("rms_norm", None), ("rms_norm", "int8")]
)
def test_two_rows_a_thread_with_weights_loaded_first_are_within_the_bound(target, name, quantize):
    """In clusters; whole groups of whole rows, and others.  Also where products with weights alone
    are too small or too large to tell a row's largest result."""
    config = NormSharedRows(64, 64, 8, 2, 2, rows_per_thread=2, weights_first=True)
    op, random = OPS[name], np.random.default_rng(3)

    @settings(max_examples=12, deadline=None)
    @given(
        st.integers(1, 9),
        st.sampled_from((config.chunk, 1200, 8)),
        st.sampled_from(("normal", "uniform", "same_sign", "wide", "exact")),
        st.booleans(),
        st.sampled_from((1.0, 2.0**-90, 2.0**90)),
    )
    def check_one(rows, cols, kind, bad, factor):
        x = np.asarray(inputs.values(kind, (rows, cols), dtypes.bfloat16, rows))
        if bad:
            x[rows // 2, cols // 2] = np.nan
        weight = (random.normal(size=cols) * factor).astype(x.dtype)
        kwargs = {"weight": target.xp.asarray(weight), "eps": 0.0}
        if quantize:
            kwargs["quantize"] = quantize
        call = Call((target.xp.asarray(x),), kwargs)
        comparison = compare(op, call, op.run(*call.args, **call.kwargs, config=config))
        assert comparison.ok, f"{rows} x {cols} {kind} {factor}: {comparison}"

    check_one()


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_every_layout_is_within_the_bound(target, name, layout):
    for num_cols in (70, 3001):
        problem = NormProblem(
            (5, 3, 4, num_cols), "bfloat16", residual=name == "add_rms_norm", layout=layout
        )
        comparison = check.check_problem(OPS[name], problem, 1, target.xp)
        assert comparison.ok, comparison


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_long_rows_are_within_the_bound(target, name, dtype, exhaustive):
    lengths = (2**18, 2**20 + 3)
    for num_cols in lengths if exhaustive else lengths[dtype == "float32" :][:1]:
        problem = NormProblem(
            (2, num_cols), dtype, weight_dtype="float32", residual=name == "add_rms_norm"
        )
        comparison = check.check_problem(OPS[name], problem, 1, target.xp)
        assert comparison.ok, comparison


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_may_have_another_dtype_stride_and_alignment(target, dtype, weight_dtype):
    """Also strided ones, and ones that are not aligned as x is."""
    x = random(target, (7, 515), dtype)
    many = random(target, (2 * 515 + 1,), weight_dtype, 2)
    for weight in (many[:515], many[1:516], many[::2][:515], many[514::-1]):
        for op, kwargs in ((RMS_OP, {}), (LAYER_OP, {"bias": weight[::-1]})):
            comparison = run_and_compare(op, Call((x,), {"weight": weight, **kwargs}))
            assert comparison.ok, comparison


# --- statistics -----------------------------------------------------------------------------------


def _far_from_zero(target, shape=(64, 4096)):
    """Numbers of spread 1 about 1e4, in FP32."""
    return random(target, shape) + np.float32(1e4)


def test_a_mean_of_ten_thousand_times_the_spread_is_within_the_bound(target):
    x = _far_from_zero(target)
    (expected,) = (to_numpy(y) for y in LAYER_OP.reference(x))
    errors = {}
    for compensated in (False, True):
        call = Call((x,), {"compensated": compensated})
        y = cupykern.layer_norm(x, compensated=compensated)
        comparison = compare(LAYER_OP, call, y)
        assert comparison.ok, comparison
        errors[compensated] = np.abs(to_numpy(y) - expected).max()
    assert errors[False] <= 5e-3 and errors[True] <= 1e-5


@pytest.mark.parametrize(("shape", "transposed"), [((40, 33), True), ((3, 40_001), False)])
def test_compensated_means_merge_over_chunks(target, shape, transposed):
    """Of rows merged from chunks: contiguous elements belong to several rows, or rows are long."""
    x = _far_from_zero(target, shape[::-1]).T if transposed else _far_from_zero(target, shape)
    (expected,) = (to_numpy(y) for y in LAYER_OP.reference(x))
    y = to_numpy(cupykern.layer_norm(x, compensated=True))
    assert np.abs(y - expected).max() <= 1e-5


def test_one_pass_variance_is_beyond_the_bound(target):
    """E[x^2] - E[x]^2 in FP32, which kernels with one pass take, is outside of the bound."""
    x = to_numpy(_far_from_zero(target)).astype(np.float32)
    mean = x.mean(-1, keepdims=True, dtype=np.float32)
    square = (x * x).mean(-1, keepdims=True, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        naive = (x - mean) / np.sqrt(square - mean * mean + np.float32(1e-5))
    assert not compare(LAYER_OP, Call((x,)), naive.astype(np.float32)).ok


def test_constant_rows_normalise_to_zero(target):
    x = target.xp.full((9, 777), 0.1, np.float32) * target.xp.arange(9, dtype=np.float32)[:, None]
    y, mean, rstd = (to_numpy(a) for a in cupykern.layer_norm(x, return_stats=True))
    np.testing.assert_allclose(mean, to_numpy(x)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(rstd, 1e-5**-0.5, rtol=1e-5)
    assert np.abs(y).max() < 1e-3
    assert np.abs(to_numpy(cupykern.layer_norm(x, compensated=True))).max() < 1e-4


def test_squares_beyond_fp32_are_infinite_or_zero(target):
    """The edges of what is promised: squares that are infinite, or 0 with nothing added."""
    large, small = (target.xp.asarray([[1, x]], np.float32) for x in (1e20, 1e-30))
    assert not to_numpy(cupykern.rms_norm(large)).any()
    assert not to_numpy(cupykern.layer_norm(large)).any()
    assert not np.isfinite(to_numpy(cupykern.rms_norm(small[:, 1:], eps=0))).any()
    assert to_numpy(cupykern.rms_norm(small[:, 1:], eps=2.0**-126)) < 1e-10


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_column(target, dtype):
    x = random(target, (33, 1), dtype)
    # x * rstd - mean * rstd: the second product is rounded, with fused multiply-adds the first not.
    y, most = to_numpy(cupykern.layer_norm(x, eps=1e-5)), np.abs(to_numpy(x)).max()
    assert np.abs(y).max() <= 2.0**-23 * most / 1e-5**0.5
    reference = LAYER_OP.reference(x, eps=1e-5)
    bound = LAYER_OP.bound(x, eps=1e-5, reference=reference)
    assert check.compare(as_tuple(cupykern.layer_norm(x, eps=1e-5)), reference, bound).within_bound
    expected = to_numpy(x) / np.sqrt(to_numpy(x) ** 2 + cupykern.finfo(dtype).eps)
    np.testing.assert_allclose(to_numpy(cupykern.rms_norm(x, dtype="float32")), expected, rtol=1e-6)


@pytest.mark.parametrize("columns", [700, 704])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_leaves_the_others_alone(target, bad, columns):
    x = random(target, (12, columns), "float16")
    clean = [cupykern.layer_norm(x), cupykern.rms_norm(x)]
    x[5, 123] = bad
    for y, before in zip((cupykern.layer_norm(x), cupykern.rms_norm(x)), clean, strict=True):
        others = np.arange(12) != 5
        np.testing.assert_array_equal(to_numpy(y)[others], to_numpy(before)[others])
        assert np.isnan(to_numpy(y)[5, 123])
    _, mean, rstd = cupykern.layer_norm(x, return_stats=True)
    assert np.isnan(to_numpy(mean)[5]) and np.isnan(to_numpy(rstd)[5])
    assert np.isfinite(np.delete(to_numpy(mean), 5)).all()


@pytest.mark.in_turn
@pytest.mark.parametrize("columns", [7, 256, 1000, 4096, 12_000, 20_000])
@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_reaches_the_scale(target, weight, columns):
    """An infinite weight makes a NaN of an element that is 0, and an infinity of the others."""
    x = random(target, (3, columns), "float16")
    x[1, columns // 2] = 0
    weights = random(target, (columns,), "float16", kind="uniform")
    weights[columns // 2] = weight
    call = Call((x, weights), {"quantize": "int8"})
    references = RMS_OP.reference(*map(to_numpy, call.args), **call.kwargs)
    bounds = RMS_OP.bound(*map(to_numpy, call.args), **call.kwargs, reference=references)
    outputs = [to_numpy(y) for y in cupykern.rms_norm(*call.args, **call.kwargs)]
    assert check.compare(outputs, references, bounds).ok
    assert np.isnan(outputs[1]).all()


def test_scaling_and_shifting_change_nothing(target):
    x = random(target, (9, 515), kind="exact")
    shifted = x + 8
    (bound,) = LAYER_OP.bound(x, reference=LAYER_OP.reference(x))
    (shifted_bound,) = LAYER_OP.bound(shifted, reference=LAYER_OP.reference(shifted))
    difference = abs(cupykern.layer_norm(shifted) - cupykern.layer_norm(x))
    assert bool((difference <= bound.elementwise + shifted_bound.elementwise).all())
    scaled, y = cupykern.rms_norm(x * 4, eps=0.0), cupykern.rms_norm(x, eps=0.0)
    assert bool((scaled == y).all())  # a power of two scales exactly


# --- options --------------------------------------------------------------------------------------


def test_results_have_the_documented_shapes_and_dtypes(target):
    x = random(target, (4, 3, 50), "float16")
    assert cupykern.rms_norm(x).shape == x.shape
    y, s = cupykern.rms_norm(x, residual=x)
    assert bool((s == x + x).all()) and y.dtype == s.dtype == x.dtype
    y, s, mean, rstd = cupykern.layer_norm(x, residual=x, return_stats=True)
    assert mean.shape == rstd.shape == (4, 3) and mean.dtype == rstd.dtype == np.float32
    q, scale, s, rstd = cupykern.rms_norm(x, residual=x, quantize="int8", return_stats=True)
    assert q.dtype == np.int8 and scale.shape == (4, 3, 1) and rstd.shape == (4, 3)


def test_empty_arrays_give_empty_results(target):
    xp = target.xp
    y, s, mean, rstd = cupykern.layer_norm(
        xp.empty((3, 0), np.float32), residual=xp.empty((3, 0), np.float32), return_stats=True
    )
    assert y.shape == s.shape == (3, 0)
    assert np.isnan(to_numpy(mean)).all() and np.isnan(to_numpy(rstd)).all()
    q, scale = cupykern.rms_norm(xp.empty((0, 8), np.float16), quantize="e4m3")
    assert q.shape == (0, 8) and scale.shape == (0, 1) and q.dtype == dtypes.float8_e4m3fn
    _, scale = cupykern.rms_norm(xp.empty((2, 0), np.float16), quantize="int8")
    assert (to_numpy(scale) == 1).all()


def test_out_may_be_x(target):
    x = random(target, (33, 1000), "bfloat16")
    residual = random(target, (33, 1000), "bfloat16", 2)
    expected = cupykern.rms_norm(x, residual=residual)
    y, s = cupykern.rms_norm(x, residual=residual, out=x)
    assert y is x and bool((y == expected[0]).all()) and bool((s == expected[1]).all())


def test_the_sum_is_not_rounded_before_it_is_normalised(target):
    """In bf16, 256 + 0.5 rounds to 256: y must show the half."""
    x = target.xp.asarray(np.array([[256.0, 256.0]]).astype(dtypes.bfloat16))
    residual = target.xp.asarray(np.array([[0.5, -0.5]]).astype(dtypes.bfloat16))
    y, s = cupykern.layer_norm(x, residual=residual, dtype="float32")
    np.testing.assert_allclose(to_numpy(y), [[1, -1]], rtol=1e-4)
    assert (to_numpy(s) == 256).all()


@pytest.mark.parametrize("quantize", ["e4m3", "e5m2", "int8"])
def test_quantized_rows_decode_to_the_norm(target, quantize):
    x = random(target, (9, 3000), "bfloat16")
    x[2] = 0
    q, scale = cupykern.rms_norm(x, quantize=quantize)
    y = to_numpy(cupykern.rms_norm(x, dtype="float32"))
    codes = numerics.as_float64(q)
    codes = codes if isinstance(codes, np.ndarray) else codes.get()
    largest = {"e4m3": 448, "e5m2": 57344, "int8": 127}[quantize]
    assert (np.abs(codes).max(-1) == np.where(np.arange(9) == 2, 0, largest)).all()
    assert to_numpy(scale)[2] == 1
    step = {"e4m3": 2**-4, "e5m2": 2**-3, "int8": 0}[quantize] * np.abs(y)
    assert (np.abs(codes * to_numpy(scale) - y) <= step + 0.51 * to_numpy(scale)).all()


@pytest.mark.parametrize("cols", [384, 1000, 4096, 20_000])
def test_quantized_blocks_are_those_of_quantize(target, cols):
    """Whole blocks by one kernel; the last one of 1000 columns has 104 of them."""
    x, weight = random(target, (9, cols), "bfloat16"), random(target, (cols,), "bfloat16")
    x[2] = 0
    q, scale = cupykern.rms_norm(x, weight, quantize="e4m3", granularity="block")
    y = cupykern.rms_norm(x, weight, dtype="float32")
    _, wanted = cupykern.quantize(y, "e4m3", granularity="block")
    assert scale.shape == (9, -(-cols // 128))
    np.testing.assert_allclose(to_numpy(scale), to_numpy(wanted), rtol=2.0**-21)
    assert (to_numpy(scale)[2] == 1).all()
    assert numerics.as_float64(q).shape == (9, cols)


def test_configs_of_two_launches_are_of_the_first(target):
    """Blocks that are not whole are quantized by a second launch."""
    problem = NormProblem((3, 255), "float16", quantize="int8", granularity="block")
    call = RMS_OP.inputs(problem, 1, target.xp)
    for config in RMS_OP.configs(problem, target.arch):
        outputs = RMS_OP.run(*call.args, **call.kwargs, config=config)
        assert compare(RMS_OP, call, outputs).ok, config


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_quantized_blocks_do_not_depend_on_the_alignment(target, offset):
    """Of x, or of the codes."""
    x = random(target, (4, 1024), "float16")
    expected = [to_numpy(y) for y in cupykern.rms_norm(x, quantize="e4m3", granularity="block")]
    memory = target.xp.zeros(4 * 1024 + offset, np.uint8)
    out = memory[offset:].view(dtypes.float8_e4m3fn).reshape(4, 1024)
    buffer = target.xp.zeros(4 * 1024 + offset, x.dtype)
    moved = buffer[offset:].reshape(4, 1024)
    moved[...] = x
    for rows, kwargs in ((x, {"out": out}), (moved, {})):
        found = cupykern.rms_norm(rows, quantize="e4m3", granularity="block", **kwargs)
        for y, wanted in zip(found, expected, strict=True):
            close = np.isclose(to_numpy(y), wanted, rtol=0.13, atol=1e-5)
            assert close.all(), offset


@pytest.mark.parametrize("cols", [384, 300])
def test_infinities_stay_in_their_block_and_nan_does_not(target, cols):
    x = random(target, (3, cols), "float16")
    x[0, 200], x[1, 200] = np.inf, np.nan
    q, scale = cupykern.rms_norm(x, quantize="e4m3", granularity="block")
    scale, codes = to_numpy(scale), to_numpy(numerics.as_float64(q))
    np.testing.assert_array_equal(scale[0], [1, np.nan, 1])
    assert np.isnan(codes[0, 128:256]).all()
    assert (np.delete(codes[0], np.s_[128:256]) == 0).all()
    assert np.isnan(scale[1]).all() and np.isnan(codes[1]).all()
    assert np.isfinite(scale[2]).all() and np.isfinite(codes[2]).all()


def test_quantized_rows_may_have_any_length_and_strides(target):
    for shape, layout in (((2, 300_001), "C"), ((3, 20_000), "sliced"), ((40, 2000), "F")):
        for granularity in ("row", "block"):
            problem = NormProblem(
                *(shape, "float16"),
                residual=True, return_stats=True, quantize="e4m3", granularity=granularity,
                layout=layout,
            )  # fmt: skip
            comparison = check.check_problem(RMS_OP, problem, 1, target.xp)
            assert comparison.ok, f"{problem!r}: {comparison}"


@needs.host
def test_elements_may_lie_at_odd_addresses(target):
    """numpy has arrays that begin, or step, within an element."""
    memory = np.zeros(4 * 8 * 4 + 1, np.uint8)
    x = memory[1:].view(np.float32).reshape(4, 8)
    x[...] = inputs.values("normal", (4, 8), dtypes.float32, 1)
    for quantize in (None, "int8"):
        comparison = run_and_compare(RMS_OP, Call((x,), {"quantize": quantize}))
        assert comparison.ok, comparison
    row = np.lib.stride_tricks.as_strided(np.array(x[0]), (1, 8), (3, 4))
    assert row.flags.c_contiguous  # all the same
    comparison = run_and_compare(RMS_OP, Call((row,)))
    assert comparison.ok, comparison
    out = np.zeros_like(memory)[1:].view(np.float32).reshape(4, 8)
    cupykern.rms_norm(x, out=out)
    assert (out == cupykern.rms_norm(x)).all()


@pytest.mark.in_turn
def test_repeated_calls_give_the_same_bits(target):
    x = random(target, (5, 40_000), "float16")
    first = [cupykern.layer_norm(x), *cupykern.rms_norm(x, quantize="e4m3")]
    for _ in range(3):
        again = [cupykern.layer_norm(x), *cupykern.rms_norm(x, quantize="e4m3")]
        for a, b in zip(first, again, strict=True):
            assert bool((a.view(np.uint8) == b.view(np.uint8)).all())


@needs.host
def test_offsets_may_exceed_two_to_the_31(target):
    """Three rows in a sparse map, more than 2^31 elements apart."""
    gap, num_cols = 2**31 + 8, 1000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    maps = [mmap.mmap(-1, 2 * (2 * gap + num_cols), flags=flags) for _ in range(3)]
    x, residual, y = (
        np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, np.float16), (3, num_cols), (2 * gap, 2), writeable=True
        )
        for memory in maps
    )
    x[...] = inputs.values("normal", x.shape, dtypes.float16, 1)
    residual[...] = inputs.values("normal", x.shape, dtypes.float16, 2)
    y, *_ = cupykern.rms_norm(x, residual=residual, out=y)
    call = Call((x.copy(),), {"residual": residual.copy()})
    references = RMS_OP.reference(*call.args, **call.kwargs)
    bounds = RMS_OP.bound(*call.args, **call.kwargs, reference=references)
    assert check.compare((y,), references[:1], bounds[:1]).ok


def test_arrays_may_have_more_than_two_to_the_31_elements(gpu):
    x = inputs.bench_values((2**21 + 1, 1025), dtypes.float16, 3, gpu.xp)
    part, (got,) = RMS_OP.sample(Call((x,)), (cupykern.rms_norm(x),), 2**20, 1)
    comparison = compare(RMS_OP, part, got)
    assert comparison.ok, comparison


# --- illegal input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x: ((1.0,), {}), TypeError, "x must be a cupy or numpy array"),
        (lambda x: ((x.astype(np.float64),), {}), NotImplementedError, "x's dtype must be one of"),
        (lambda x: ((x.reshape(-1)[:1].reshape(()),), {}), ValueError, "at least one dim"),
        (lambda x: ((x, x), {}), ValueError, r"weight must have shape \(8,\)"),
        (lambda x: ((x, x[0].astype(np.int32)), {}), TypeError, "weight's dtype"),
        (lambda x: ((x, [1.0] * 8), {}), TypeError, "weight must be"),
        (lambda x: ((x,), {"eps": -1e-3}), ValueError, "eps must be at least 0"),
        (lambda x: ((x,), {"eps": "small"}), TypeError, "eps must be a real number"),
        (lambda x: ((x,), {"eps": np.inf}), ValueError, "eps must be finite"),
        (lambda x: ((x,), {"residual": x[:1]}), ValueError, "residual must have x's shape"),
        (lambda x: ((x,), {"residual": x.astype("f2")}), TypeError, "residual must have x's dtype"),
        (lambda x: ((x,), {"dtype": "int8"}), TypeError, "dtype must be one of"),
        (lambda x: ((x,), {"dtype": []}), TypeError, "dtype must be one of"),
        (lambda x: ((x,), {"quantize": "fp8"}), ValueError, "quantize must be one of"),
        (lambda x: ((x,), {"quantize": ["int8"]}), ValueError, "quantize must be one of"),
        (
            lambda x: ((x,), {"quantize": "int8", "granularity": "tensor"}),
            ValueError,
            "granularity must be 'row' or 'block'",
        ),
        (lambda x: ((x,), {"granularity": "block"}), ValueError, "quantize must not be None"),
        (lambda x: ((x,), {"return_stats": 1}), TypeError, "return_stats must be a bool"),
        (lambda x: ((x,), {"quantize": "int8", "dtype": "f2"}), ValueError, "dtype must be None"),
        (lambda x: ((x,), {"out": x[:, ::-1]}), ValueError, "out must not overlap x"),
        (lambda x: ((x, x[0]), {"out": x}), ValueError, "out must not overlap weight"),
    ],
)
def test_illegal_arguments_are_refused(target, arguments, error, message):
    args, kwargs = arguments(target.xp.ones((4, 8), np.float32))
    with pytest.raises(error, match=message):
        cupykern.rms_norm(*args, **kwargs)


# --- bench ----------------------------------------------------------------------------------------


def test_bench_problems_are_what_their_options_say():
    assert LAYER_OP.bench_problem((2, 8), "float32:shifted+compensated") == NormProblem(
        (2, 8), "float32", weight_dtype="float32", bias_dtype="float32", mean=1e4, compensated=True,
        kind="bench",
    )  # fmt: skip
    assert RMS_OP.bench_problem((2, 8), "bfloat16:e4m3").quantize == "e4m3"
    for op, text in (
        (LAYER_OP, "float32:e4m3"),
        (RMS_OP, "float32:compensated"),
        (RMS_OP, "float32:e4m3+int8"),
    ):
        with pytest.raises(ValueError, match=r"bench option|at most one format"):
            op.bench_problem((2, 8), text)
    x = LAYER_OP.inputs(LAYER_OP.bench_problem((4, 64), "float32:shifted"), 0, np).args[0]
    assert x.dtype == np.float32 and abs(x.mean() - 1e4) < 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_subnormal_inputs_are_within_the_bound(target, name, dtype):
    """FP32 arithmetic may take them for zeros, which eps makes 316 times as large."""
    x = np.full((3, 64), 1e-38, dtypes.NAMES[dtype])
    x[1], x[2, ::2] = -9e-39, 2.0**-126
    kwargs = {"eps": 1e-5, "return_stats": True}
    found = run_and_compare(OPS[name], Call((target.xp.asarray(x),), kwargs))
    assert found.ok, found


@pytest.mark.parametrize("eps", [0.0, 2e-38, 1e-36])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name, options",
    [("layer_norm", {}), ("rms_norm", {}), ("rms_norm", {"quantize": "e4m3"})],
)
def test_subnormal_squares_are_within_the_bound(target, name, options, dtype, eps):
    """And expected.  Without eps nothing is promised of a row whose variance may vanish."""
    numbers = np.random.default_rng(3).standard_normal((2, 64))
    for size in (1e-38, 1e-20, 1e-19, 1e-18, 1e-8):
        x = target.xp.asarray((size * numbers).astype(dtypes.NAMES[dtype]))
        kwargs = {"eps": eps, "return_stats": True, **options}
        found = run_and_compare(OPS[name], Call((x,), kwargs))
        assert found.ok, f"{size}: {found}"
