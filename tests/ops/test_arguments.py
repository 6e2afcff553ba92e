"""Illegal arguments raise a typed error that names the argument; nothing is changed."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import fake_gpu
from hypothesis import given
from hypothesis import strategies as st

import cupykern
from cupykern import OPS, arguments
from cupykern.arguments import field_kinds
from cupykern.gemm.quantize_nvfp4_plan import NvFp4Config
from cupykern.rows.configs import SharedRows
from cupykern.tools.bench import tiny_problem

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


class FakeTensor:
    """Looks like an array of another library."""

    shape, dtype, ndim = (4, 6), np.dtype(np.float32), 2


CASES = [
    (TypeError, "x must be", lambda: ([1.0, 2.0],)),
    (TypeError, "x must be.*FakeTensor", lambda: (FakeTensor(),)),
    (TypeError, "x must be", lambda: (np.ma.masked_array(X),)),
    (TypeError, "x's dtype", lambda: (X.astype(np.complex64),)),
    (TypeError, "x's dtype", lambda: (X.astype(np.int32),)),
    (TypeError, "x's dtype", lambda: (X.astype(object),)),
    (NotImplementedError, "x's dtype", lambda: (X.astype(np.float64),)),
    (TypeError, "x's dtype", lambda: (X.astype(">f4"),)),
    (np.exceptions.AxisError, r"x of shape \(4, 6\): axis 2 is out of bounds", lambda: (X, 2)),
    (np.exceptions.AxisError, r"x of shape \(4, 6\): axis -3", lambda: (X, -3)),
    (np.exceptions.AxisError, r"x of shape \(\): axis -1", lambda: (np.zeros((), np.float32),)),
    (TypeError, "axis must be", lambda: (X, 1.0)),
    (TypeError, "axis must be", lambda: (X, [1])),
    (TypeError, "dtype must be", lambda: (X, -1, {"dtype": "float64"})),
    (TypeError, "dtype must be", lambda: (X, -1, {"dtype": []})),
    (TypeError, "dtype must be", lambda: (X, -1, {"dtype": {"names": ["a"], "formats": []}})),
    (TypeError, "scale must be", lambda: (X, -1, {"scale": "1"})),
    (TypeError, "scale must be", lambda: (X, -1, {"scale": 1j})),
    (TypeError, "scale must be", lambda: (X, -1, {"scale": True})),
    (ValueError, "scale must be finite", lambda: (X, -1, {"scale": np.inf})),
    (ValueError, "scale must be finite", lambda: (X, -1, {"scale": np.nan})),
    (ValueError, "scale must be finite", lambda: (X, -1, {"scale": 1e39})),
    (ValueError, "scale must be finite", lambda: (X, -1, {"scale": 10**400})),
    (ValueError, "scale must be 0 or", lambda: (X, -1, {"scale": 2.0**-127})),
    (TypeError, "scale must be", lambda: (X, -1, {"scale": np.ma.masked})),
    (ValueError, "scale must be", lambda: (X, -1, {"scale": np.ones(2)})),
    (TypeError, "mask must be", lambda: (X, -1, {"mask": [True] * 6})),
    (TypeError, "mask must have dtype bool", lambda: (X, -1, {"mask": np.ones(6, np.int8)})),
    (ValueError, "mask must broadcast", lambda: (X, -1, {"mask": np.ones(5, bool)})),
    (TypeError, "out must be", lambda: (X, -1, {"out": [0.0]})),
    (TypeError, "out must have dtype", lambda: (X, -1, {"out": np.zeros((4, 6), np.float16)})),
    (ValueError, "out must have shape", lambda: (X, -1, {"out": np.zeros((6, 4), np.float32)})),
    (ValueError, "out must not overlap x", lambda: _overlapping()),
    (ValueError, "out must be writable", lambda: (X, -1, {"out": _read_only()})),
    (
        ValueError,
        "out must not hold one element twice",
        lambda: (X, -1, {"out": np.lib.stride_tricks.as_strided(X.copy(), (4, 6), (0, 4))}),
    ),
    (
        ValueError,
        "out must not hold one element twice",
        lambda: (X, -1, {"out": np.lib.stride_tricks.as_strided(X.copy(), (4, 6), (8, 4))}),
    ),
]


SQUARE = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)
# Legal results for x in the same memory: (x, out) of an array of 8 x 6 x 6.
IN_PLACE = {
    "itself": lambda m: (m[0], m[0]),
    "another view of it": lambda m: (m[0], m[:1].reshape(6, 6)),
    "transposed both": lambda m: (m[0].T, m[0].T),
    "reversed both": lambda m: (m[0, ::-1], m[0, ::-1]),
    "one row, whose stride is nothing": lambda m: (m[0, :1], m[0, ::6]),
}
APART = {
    "next to it": lambda m: (m[0], m[1]),
    "before it, reversed": lambda m: (m[1], m[0, ::-1, ::-1]),
    "behind it, reversed": lambda m: (m[1, ::-1, ::-1], m[2]),
    "every other row": lambda m: (m[:2].reshape(12, 6)[::2], m[:2].reshape(12, 6)[1::2]),
    "every other row, reversed": lambda m: (
        m[:2].reshape(12, 6)[::2],
        m[:2].reshape(12, 6)[::-1][::2],
    ),
}
OVERLAPPING = {
    "transposed": lambda m: (m[0], m[0].T),
    "transposed x": lambda m: (m[0].T, m[0]),
    "rows reversed": lambda m: (m[0], m[0, ::-1]),
    "columns reversed": lambda m: (m[0], m[0, :, ::-1]),
    "both reversed": lambda m: (m[0], m[0, ::-1, ::-1]),
    "reversed x": lambda m: (m[0, ::-1], m[0]),
    "a row further": lambda m: (m[:2].reshape(12, 6)[:6], m[:2].reshape(12, 6)[1:7]),
    "a row before": lambda m: (m[:2].reshape(12, 6)[1:7], m[:2].reshape(12, 6)[:6]),
    "a row further, reversed": lambda m: (m[:2].reshape(12, 6)[:6], m[:2].reshape(12, 6)[6:0:-1]),
    "the last element, reversed": lambda m: (m[1], m.reshape(-1)[71:107][::-1].reshape(6, 6)),
    "the first element, reversed": lambda m: (m[1], m.reshape(-1)[1:37][::-1].reshape(6, 6)),
    "every other element": lambda m: (m[:2].reshape(6, 12)[:, ::2], m[0]),
}


def _overlapping():
    memory = np.zeros(30, np.float32)
    return memory[:24].reshape(4, 6), -1, {"out": memory[6:].reshape(4, 6)}


def _read_only() -> np.ndarray:
    out = np.zeros((4, 6), np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize("function", [cupykern.softmax, cupykern.log_softmax])
@pytest.mark.parametrize(("error", "match", "make"), CASES)
def test_illegal_arguments_are_refused_and_nothing_is_written(function, error, match, make):
    args = make()
    kwargs = args[2] if len(args) == 3 else {}
    before = kwargs["out"].copy() if isinstance(kwargs.get("out"), np.ndarray) else None
    with pytest.raises(error, match=match):
        function(*args[:2], **kwargs)
    if before is not None:
        assert (kwargs["out"] == before).all()


@pytest.mark.parametrize("function", [cupykern.softmax, cupykern.log_softmax])
@pytest.mark.parametrize("wrong", [{"axis": 1.0}, {"axis": True}, {"axis": 1, "scale": True}])
def test_illegal_arguments_are_refused_though_an_equal_value_is_cached(function, wrong):
    function(X, axis=1, scale=1)
    with pytest.raises(TypeError):
        function(X, **wrong)


def test_interleaved_out_is_no_overlap():
    memory = np.zeros((4, 12), np.float32)
    memory[:, ::2] = X
    cupykern.softmax(memory[:, ::2], out=memory[:, 1::2])
    assert (memory[:, ::2] == X).all()
    assert (memory[:, 1::2] == cupykern.softmax(X)).all()


def _views(name: str, memory, views):
    x, out = views[name](memory)
    x[...] = SQUARE[: len(x)]
    return x, out


@pytest.mark.parametrize("name", [*IN_PLACE, *APART])
def test_out_may_be_x_or_apart_from_it(name):
    memory = np.zeros((8, 6, 6), np.float32)
    x, out = _views(name, memory, IN_PLACE | APART)
    expected = cupykern.softmax(x.copy())
    assert cupykern.softmax(x, out=out) is out
    assert (out == expected).all()


@pytest.mark.parametrize("name", OVERLAPPING)
def test_out_that_overlaps_x_otherwise_is_refused(name):
    """Rows are read after others are written."""
    memory = np.zeros((8, 6, 6), np.float32)
    x, out = _views(name, memory, OVERLAPPING)
    before = memory.copy()
    for function in cupykern.softmax, cupykern.log_softmax, cupykern.layer_norm, cupykern.rms_norm:
        with pytest.raises(ValueError, match=r"out must not overlap x \(only exactly in place"):
            function(x, out=out)
    with pytest.raises(ValueError, match="out must not overlap a"):
        cupykern.matmul(x, np.eye(6, dtype=np.float32), out=out)
    assert (memory == before).all()


@pytest.mark.parametrize("views", [IN_PLACE, APART, OVERLAPPING])
def test_overlap_of_cupy_arrays_is_found_as_of_numpy_arrays(views, monkeypatch):
    pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as gpu:
        for name, make in views.items():
            x, out = make(gpu.array((8, 6, 6), "float32"))
            assert arguments.overlap(x, out) == (views is not APART), name
            assert arguments.overlap(out, x) == (views is not APART), name
            if views is OVERLAPPING:
                with pytest.raises(ValueError, match="out must not overlap x"):
                    cupykern.softmax(x, out=out)
            else:
                cupykern.softmax(x, out=out)


def test_out_of_another_dtype_in_x_is_refused():
    x = SQUARE.astype(np.float16)
    with pytest.raises(ValueError, match="out must not overlap x"):
        cupykern.softmax(x, dtype="bfloat16", out=x.view(ml_dtypes.bfloat16))


@given(data=st.data())
def test_views_overlap_where_their_bytes_do(data):
    """Of any two views of a small array, with steps in bytes."""
    memory = np.zeros(96, np.uint8)
    views, places = [], []
    for _ in range(2):
        shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        strides = tuple(data.draw(st.integers(-9, 9)) for _ in shape)
        steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low, high = (sum(f(step, 0) for step in steps) for f in (min, max))
        start = data.draw(st.integers(-low, len(memory) - 4 - high))
        view = np.ndarray(shape, np.float32, memory, start, strides)
        views.append(view)
        places.append(
            {
                start + sum(i * s for i, s in zip(index, strides, strict=True)) + byte
                for index in np.ndindex(shape)
                for byte in range(4)
            }
        )
    assert arguments.overlap(*views) == bool(places[0] & places[1])


def test_overlap_that_takes_long_to_find_is_assumed():
    """numpy's own example, a minute of work."""
    memory = np.zeros(192163377, np.int8)
    x = np.lib.stride_tricks.as_strided(memory, (1050,) * 3, (36674, 61119, 85569))
    y = np.lib.stride_tricks.as_strided(memory[64023025:], (1050, 1050, 1), (12223, 12224, 1))
    assert arguments.overlap(x, y)


@pytest.mark.parametrize(
    "scale",
    [np.float16(0.5), np.array(0.5), ml_dtypes.bfloat16(0.5), np.array(0.5, ml_dtypes.bfloat16)],
)
def test_any_scalar_is_a_number(scale):
    assert (cupykern.softmax(X, scale=scale) == cupykern.softmax(X, scale=0.5)).all()


# --- configs --------------------------------------------------------------------------------------


CONFIGURED = [op for op in OPS if "config" in inspect.signature(op.run).parameters]
# All fields of quantize_nvfp4's configs have defaults, which stand for missing ones.
PUBLIC = [
    op for op in CONFIGURED if op.run.__name__ in cupykern.__all__ and op.name != "quantize_nvfp4"
]


@pytest.mark.parametrize("op", PUBLIC, ids=lambda op: op.name)
def test_a_config_without_all_fields_says_which_it_lacks(op):
    """One that was pickled by a version with fewer fields, say."""
    problem = tiny_problem(op, "host")
    config = copy.copy(op.configs(problem, "host")[0])
    required = [x.name for x in dataclasses.fields(config) if x.default is dataclasses.MISSING]
    for name in required:
        del config.__dict__[name]
    call = op.inputs(problem, 0, np)
    lacks = f"config, a {type(config).__name__}, lacks {', '.join(required)}$"
    run = getattr(cupykern, op.run.__name__)
    with pytest.raises(TypeError, match=lacks):
        run(*call.args, **call.kwargs, config=config)
    with pytest.raises(TypeError, match=r"config must be .*; got dict"):
        run(*call.args, **call.kwargs, config=dict.fromkeys(required, 1))


# --- K of products --------------------------------------------------------------------------------


def _long(rows: int, dtype: str) -> np.ndarray:
    """(rows, 2^31) that takes no memory."""
    return np.broadcast_to(np.ones((), dtype), (rows, 2**31))


K_CALLS = {
    "matmul": lambda: cupykern.matmul(_long(2, "f2"), _long(3, "f2").T),
    "matmul fp32": lambda: cupykern.matmul(_long(2, "f4"), _long(3, "f4").T),
    "scaled_mm": lambda: cupykern.scaled_mm(_long(2, "f2"), _long(3, "i1").T, 1.0, 1.0),
    "scaled_mm of NVFP4": lambda: cupykern.scaled_mm(_long(2, "f2"), _nvfp4(3)),
    "scaled_mm of NVFP4 first": lambda: cupykern.scaled_mm(_nvfp4(2), _long(3, "f2").T),
    "dual_gemm_silu": lambda: cupykern.dual_gemm_silu(_long(2, "f2"), *[_long(3, "f2").T] * 2),
    "dual_gemm_silu of NVFP4": lambda: cupykern.dual_gemm_silu(*[_nvfp4(3)] * 3),
    "dequant_softmax": lambda: cupykern.dequant_softmax(_long(2, "f2"), _long(3, "i1").T, 1.0),
}


def _nvfp4(rows: int) -> cupykern.NvFp4:
    """Of shape (rows, 2^31), whose codes a product would have to copy."""
    codes = np.broadcast_to(np.zeros((), np.uint8), (rows, 2**30))
    scales = np.broadcast_to(np.ones((), ml_dtypes.float8_e4m3fn), (rows, 2**27))
    return cupykern.NvFp4(codes, scales)


@pytest.mark.parametrize("name", K_CALLS)
def test_a_k_of_2_to_the_31_is_refused_before_anything_is_copied(name):
    """In the memory that a megabyte takes."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"K must be less than 2\^31; got 2147483648"):
            K_CALLS[name]()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_numpy_mask_with_cupy_x_is_refused(gpu):
    with pytest.raises(TypeError, match="mask must be a cupy array"):
        cupykern.softmax(gpu.xp.asarray(X), mask=np.ones(6, bool))


def _double(*shape):
    return np.zeros(shape)


FLOATS = (np.float16, np.float32, ml_dtypes.bfloat16)
HALF, ROWS = np.zeros((4, 16), np.float16), np.zeros((1, 2, 4, 16), np.float16)
OFFSETS = np.array([0, 4], np.int32)
FUNCTIONS = {"nonfinite": "nonfinite_report"}  # of ops that have another name
IN_DOUBLE = {
    "softmax": ("x's dtype.*cupyx.scipy.special.softmax", (_double(4, 16),), {}),
    "log_softmax": ("x's dtype.*cupyx.scipy.special.softmax", (_double(4, 16),), {}),
    "layer_norm": ("x's dtype.*convert it", (_double(4, 16),), {}),
    "rms_norm": ("x's dtype.*convert it", (_double(4, 16),), {}),
    "quantize": ("x's dtype.*convert it", (_double(4, 16), "int8"), {}),
    "quantize_nvfp4": ("x's dtype.*convert it", (_double(4, 16),), {}),
    "nonfinite": ("x's dtype.*cupy.isfinite", (_double(4, 16),), {}),
    "matmul": ("b's dtype.*cupy.matmul", (HALF, _double(16, 4)), {}),
    "scaled_mm": ("a's dtype.*cupy.matmul", (_double(4, 16), HALF.astype(np.int8).T), {}),
    "dual_gemm_silu": ("a's dtype.*cupy.matmul", (_double(4, 16), HALF.T, HALF.T), {}),
    "dequant_softmax": ("a's dtype.*cupy.matmul", (_double(4, 16), HALF.astype("i1").T, 1.0), {}),
    "attention": ("q's dtype.*convert it", (_double(1, 2, 4, 16),) * 3, {}),
    "scaled_dot_product_attention": ("dtype.*convert it", (_double(1, 2, 4, 16),) * 3, {}),
    "attention_varlen": (
        "q's dtype.*convert it",
        (*[_double(4, 2, 16)] * 3, OFFSETS, OFFSETS),
        {"max_seqlen_q": 4, "max_seqlen_k": 4},
    ),
    "decode_attention": ("k_cache's dtype.*convert it", (ROWS, *[_double(1, 2, 4, 16)] * 2), {}),
    "cascade_attention": ("shared_k's dtype.*convert it", (ROWS, *[_double(1, 2, 4, 16)] * 4), {}),
    "merge_attention": (
        "out1's dtype.*convert it",
        (_double(1, 2, 4, 16), _double(1, 2, 4)) * 2,
        {},
    ),
    "rope_and_cache": (
        "q's dtype.*convert it",
        (*[_double(1, 4, 2, 16)] * 3, np.arange(4, dtype=np.int32)),
        {"inv_freq": np.ones(8, np.float32)},
    ),
}


def _bench_call(op):
    """A benchmark's call with arrays of FP64, and what every error says."""
    call = op.inputs(tiny_problem(op, "host"), 0, np)

    def widened(x):
        is_float = isinstance(x, np.ndarray) and x.dtype in FLOATS
        return x.astype(np.float64) if is_float else x

    kwargs = {name: widened(x) for name, x in call.kwargs.items()}
    return "dtype", tuple(map(widened, call.args)), kwargs


IN_DOUBLE |= {
    name: _bench_call(op)
    for op in OPS
    if (name := op.run.__name__.removesuffix("_arrays")) not in IN_DOUBLE
}


@pytest.mark.parametrize("name", IN_DOUBLE)
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_double_precision_is_not_implemented_and_the_error_says_what_to_call(name, dtype):
    says, args, kwargs = IN_DOUBLE[name]
    wide = [x.astype(dtype) if getattr(x, "dtype", None) == np.float64 else x for x in args]
    with pytest.raises(NotImplementedError, match=says):
        getattr(cupykern, FUNCTIONS.get(name, name))(*wide, **kwargs)


def test_complex64_beside_complex128_is_not_implemented():
    a = np.ones((4, 4), np.complex64)
    with pytest.raises(NotImplementedError, match=r"must be one of complex64; .*cupy\.mat"):
        cupykern.matmul(a, a.astype(np.complex128))
    with pytest.raises(TypeError, match="dtype must be one of"):
        cupykern.softmax(X, dtype="float64")


def test_finfo_is_that_of_ml_dtypes():
    for dtype in ("float8_e5m2", ml_dtypes.bfloat16, np.float64):
        info = cupykern.finfo(dtype)
        assert info.max == float(ml_dtypes.finfo(info.dtype).max)
    for dtype in ("float17", None, int, []):
        with pytest.raises(TypeError, match="dtype must be one of"):
            cupykern.finfo(dtype)


def test_asarray_and_empty_make_arrays_of_any_dtype_of_a_target():
    x = cupykern.asarray([0.5, 448.0, np.nan], "float8_e4m3fn", "host")
    assert x.dtype.name == "float8_e4m3fn" and x.astype(np.float32)[1] == 448
    assert cupykern.empty((2, 3), "bfloat16", "host").dtype.name == "bfloat16"
    with pytest.raises(TypeError, match="dtype must be"):
        cupykern.empty(3, "complex64", "host")
    for make in (cupykern.empty, cupykern.asarray):  # FP4 codes are an NvFp4's bytes
        with pytest.raises(TypeError, match="dtype must be"):
            make((3,), "float4_e2m1fn", "host")
    assert cupykern.empty(np.int64(3), "float16", "host").shape == (3,)
    with pytest.raises(ValueError, match="target must be"):
        cupykern.empty(3, "float16", "tpu")
    for shape in (-1, (-1,), (2, -1)):
        with pytest.raises(ValueError, match="shape must not be negative"):
            cupykern.empty(shape, "float16", "host")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"num_threads": "8"}, TypeError, "num_threads must be an integer; got '8'"),
        ({"num_threads": True}, TypeError, "num_threads must be an integer; got True"),
        ({"num_threads": 64.0}, TypeError, "num_threads must be an integer; got 64.0"),
        ({"num_threads": np.int64(64)}, TypeError, "num_threads must be an integer; got"),
        ({"chunked": 1}, TypeError, "chunked must be a bool; got 1"),
        ({"min_blocks": 2**31}, ValueError, "min_blocks must fit 32 bits"),
    ],
)
def test_a_config_with_illegal_fields_cannot_be_made(changes, error, says):
    """64.0 and 64 are equal: a cache of plans, found by value, would take one for the other."""
    with pytest.raises(error, match=f"SharedRows's {says}"):
        replace(SharedRows(64, 32, 8, 1), **changes)


@pytest.mark.parametrize("op", CONFIGURED, ids=lambda op: op.name)
def test_configs_check_their_fields(op):
    config = op.configs(tiny_problem(op, "host"), "host")[0]
    for field, kinds in field_kinds(type(config)).items():
        wrong = 1 if kinds == (bool,) else 1.0
        with pytest.raises(TypeError, match=f"{type(config).__name__}'s {field} must be"):
            replace(config, **{field: wrong})


@pytest.mark.parametrize("granularity", ["tensor", "row", "column", "block"])
def test_quantize_refuses_another_ops_config(granularity):
    x = np.ones((16, 256), np.float16)
    with pytest.raises(TypeError, match=r"config must be a .*(Rows|Tiles); got NvFp4Config"):
        cupykern.quantize(x, "e4m3", granularity=granularity, config=NvFp4Config())
