"""cupykern.dask: the plain ops block by block, lazily; products whose K is cut into chunks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import fake_gpu

import cupykern
from cupykern import reference
from cupykern.arrays import packed
from cupykern.check import compare
from cupykern.op import as_tuple

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
pytest.importorskip("cupykern.dask")

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
RNG = np.random.default_rng(0)
X = da.from_array(RNG.standard_normal((8, 64)).astype(np.float32), chunks=(3, 20))


def normal(shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def same_bits(x, y):
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def check_blocks(lazy):
    """What is known of a result before it is computed is so of each block."""
    for place, block in np.ndenumerate(lazy.to_delayed(optimize_graph=False)):
        found = block.compute()
        assert type(found) is type(lazy._meta) is np.ndarray
        assert found.dtype == lazy._meta.dtype == lazy.dtype and found.ndim == lazy._meta.ndim
        assert found.shape == tuple(lazy.chunks[dim][i] for dim, i in enumerate(place))


ROWS = {
    "softmax": lambda x: ("softmax", {"scale": 0.5}),
    "softmax of columns": lambda x: ("softmax", {"axis": 0, "dtype": "float32"}),
    "masked": lambda x: ("log_softmax", {"mask": RNG.random(x.shape) < 0.7}),
    "masked by row": lambda x: ("softmax", {"mask": RNG.random((x.shape[0], 1)) < 0.7}),
    "masked by column": lambda x: ("softmax", {"mask": RNG.random(x.shape[1]) < 0.7}),
    "layer_norm": lambda x: (
        "layer_norm",
        {"weight": normal(x.shape[1]), "bias": normal(x.shape[1]), "return_stats": True},
    ),
    "compensated": lambda x: ("layer_norm", {"compensated": True, "residual": x[::-1].copy()}),
    "rms_norm": lambda x: ("rms_norm", {"weight": normal(x.shape[1], BF16), "dtype": "float32"}),
    "quantized": lambda x: (
        "rms_norm",
        {"quantize": "e4m3", "residual": x[::-1].copy(), "return_stats": True},
    ),
    "quantized by blocks": lambda x: ("rms_norm", {"quantize": "int8", "granularity": "block"}),
    "rows": lambda x: ("quantize", {"dtype": "int8", "granularity": "row"}),
    "columns": lambda x: ("quantize", {"dtype": "e5m2", "granularity": "column"}),
    "tiles": lambda x: (
        "quantize",
        {"dtype": "e4m3", "granularity": "block", "block": (3, 20)},
    ),
    "tensor": lambda x: ("quantize", {"dtype": "e4m3"}),
}


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_results_are_the_plain_ops_bit_for_bit(name, dtype):
    # Few rows of more columns are summed in another order, and chunks have fewer rows.
    x = normal((10, 100 if name.startswith("quantized") else 300), dtype)
    op, options = ROWS[name](x)
    lazy = as_tuple(getattr(cupykern.dask, op)(da.from_array(x, chunks=(4, 128)), **options))
    found = dask.compute(*lazy)
    expected = as_tuple(getattr(cupykern, op)(packed(x), **options))
    assert len(found) == len(expected)
    for y, z, known in zip(found, expected, lazy, strict=True):
        assert same_bits(y, z)
        check_blocks(known)


@pytest.mark.parametrize("bad", [None, np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
def test_one_scale_for_all_chunks_is_the_plain_ops(bad, dtype):
    x = normal((3, 5, 40), np.float16)
    if bad is not None:
        x[2, 4, 3] = bad
    found = dask.compute(cupykern.dask.quantize(da.from_array(x, chunks=(2, 3, 16)), dtype))[0]
    assert all(map(same_bits, found, cupykern.quantize(packed(x), dtype)))


@pytest.mark.parametrize("shape", [(), (7,), (0,), (3, 0)])
def test_tensors_of_few_dims_and_of_no_elements_are_quantized(shape):
    x = np.full(shape, 3, np.float32)
    lazy = cupykern.dask.quantize(da.from_array(x, chunks=2), "e5m2")
    assert all(map(same_bits, dask.compute(*lazy), cupykern.quantize(x, "e5m2")))


@pytest.mark.parametrize("bad", [None, np.nan])
def test_nvfp4_numbers_are_the_plain_ops(bad):
    x = normal((2, 9, 80), BF16)
    if bad is not None:
        x[0, 0, 0] = bad
    lazy = cupykern.dask.quantize_nvfp4(da.from_array(x, chunks=(1, 4, 24)))
    assert lazy.data.chunks[2] == (16, 8, 16) and lazy.shape == x.shape
    check_blocks(lazy.data)
    check_blocks(lazy.scale)
    (found,) = dask.compute(lazy)
    assert isinstance(found, cupykern.NvFp4)
    assert all(map(same_bits, found.arrays(), cupykern.quantize_nvfp4(packed(x)).arrays()))


@pytest.mark.parametrize(
    ("shape", "chunks", "rows"),
    [
        ((300, 80), (100, 24), ((128, 128, 44),)),
        ((2, 129, 64), (1, 129, 64), ((1, 1), (129,))),
        ((130, 0), (50, 1), ((128, 2),)),
        ((0, 32), (1, 32), ((0,),)),
    ],
)
def test_blocked_scales_are_the_plain_ops(shape, chunks, rows):
    x = normal(shape, np.float16)
    lazy = cupykern.dask.quantize_nvfp4(da.from_array(x, chunks=chunks), layout="blocked")
    assert lazy.layout == "blocked" and lazy.data.chunks == (*rows, (shape[-1] // 2,))
    check_blocks(lazy.data)
    check_blocks(lazy.scale)
    (found,) = dask.compute(lazy)
    expected = cupykern.quantize_nvfp4(packed(x), layout="blocked")
    assert all(map(same_bits, found.arrays(), expected.arrays()))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, FP8], ids=str)
@pytest.mark.parametrize("bad", [(), (3, 70), (3, 70, 9, 2)])
def test_reports_are_those_of_whole_arrays(dtype, bad):
    x = normal((20, 75), dtype)
    for i, j in zip(bad[::2], bad[1::2], strict=True):
        x[i, j] = np.nan
    found = cupykern.dask.nonfinite_report(da.from_array(x, chunks=(1, 16))).compute()
    plain = cupykern.nonfinite_report(x)
    names = ("size", "num_nan", "num_posinf", "num_neginf", "first_index", "min", "max")
    assert all(getattr(found, name) == getattr(plain, name) for name in names)
    exact = reference.nonfinite(x)
    bound = reference.nonfinite_bound(x, reference=exact)[1].elementwise[2]
    assert abs(found.mean - exact[1][2]) <= bound


def test_reports_of_no_elements():
    found = cupykern.dask.nonfinite_report(da.zeros((0, 4), dtype=np.float32)).compute()
    assert found.size == 0 and found.first_index is None and np.isnan(found.mean)


def test_the_chunks_of_results_are_those_of_x_but_where_rows_must_be_whole():
    assert cupykern.dask.softmax(X, axis=0).chunks == ((8,), (20, 20, 20, 4))
    y, mean, _ = cupykern.dask.layer_norm(X, return_stats=True)
    assert y.chunks == ((3, 3, 2), (64,)) and mean.chunks == ((3, 3, 2),)
    q, scale = cupykern.dask.quantize(X, "int8")
    assert q.chunks == X.chunks and scale.chunks == ()
    q, scale = cupykern.dask.quantize(X, "int8", granularity="block", block=(2, 16))
    assert q.chunks == ((4, 2, 2), (32, 16, 16)) and scale.chunks == ((2, 1, 1), (2, 1, 1))


def test_bits_do_not_depend_on_where_blocks_lie():
    x = normal((6, 259), np.float16)
    memory = np.empty(x.nbytes + 2, np.uint8)
    shifted = memory[2:].view(np.float16).reshape(x.shape)
    shifted[...] = x
    expected = cupykern.rms_norm(packed(x))
    for source in (x, shifted, np.asfortranarray(x)):
        lazy = da.from_array(source, chunks=(2, -1), name=False)
        assert same_bits(cupykern.dask.rms_norm(lazy).compute(), expected)


def _never():
    raise AssertionError("computed while the graph was built")


def test_nothing_is_computed_before_compute():
    x = da.from_delayed(dask.delayed(_never)(), (8, 64), np.float32).rechunk((3, 20))
    assert cupykern.dask.softmax(x, mask=x > 0).shape == (8, 64)
    assert cupykern.dask.rms_norm(x, residual=x)[1].shape == (8, 64)
    assert cupykern.dask.quantize(x, "e4m3")[1].shape == ()
    assert cupykern.dask.quantize_nvfp4(x).shape == (8, 64)
    assert cupykern.dask.nonfinite_report(x).key
    product = cupykern.dask.matmul(x, x.T)
    assert product.shape == (8, 8)
    with pytest.raises(AssertionError, match="computed while"):
        product.compute()


NAMES = """
import dask.array as da, numpy as np, cupykern.dask as ck
x = da.from_array(np.arange(48, dtype=np.float16).reshape(3, 16), chunks=(2, 5))
y = [ck.softmax(x), ck.softmax(x, scale=2.0), ck.softmax(x, axis=0), ck.log_softmax(x)]
y += [*ck.rms_norm(x, np.ones(16, np.float32), residual=x), *ck.quantize(x, "int8")]
y += [ck.matmul(x, x.T), ck.matmul(x, x.T, split_every=1), ck.matmul(x, x.T, alpha=0.5)]
y += [ck.quantize_nvfp4(x).data, ck.quantize(x, "e4m3")[0]]
print(*(a.name for a in y), ck.nonfinite_report(x).key)
"""


def test_names_follow_from_the_arguments():
    """In every process; other arguments have other names."""
    runs = [
        subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, again = (run.stdout.split() for run in runs)
    assert first == again and len(set(first)) == len(first) == 14


def test_importing_cupykern_does_not_import_dask():
    code = "import sys, cupykern; print([m for m in sys.modules if m.startswith('dask')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_results_of_cupy_chunks_are_cupy_arrays(monkeypatch):
    cupy = pytest.importorskip("cupy")
    with fake_gpu(monkeypatch) as gpu:
        x = da.from_array(gpu.array((8, 64), np.float16), (4, 32), asarray=False, name="x")
        weight = gpu.array((64,), np.float32)
        results = [
            cupykern.dask.softmax(x),
            *cupykern.dask.layer_norm(x, weight, return_stats=True),
            *cupykern.dask.quantize(x, "e4m3", granularity="row"),
            *cupykern.dask.quantize(x, "e4m3"),
            *cupykern.dask.quantize_nvfp4(x).arrays(),
            cupykern.dask.matmul(x, x.T),
        ]
        assert all(isinstance(y._meta, cupy.ndarray) for y in results)
        assert all(y._meta.dtype == y.dtype for y in results)
        whole = da.from_array(gpu.array((8, 64), np.float16), asarray=False, name="whole")
        y = cupykern.dask.softmax(whole).compute(scheduler="synchronous")
        assert isinstance(y, cupy.ndarray) and len(gpu.launches) == 1
        with pytest.raises(TypeError, match="weight must be a cupy array as x is; got a numpy"):
            cupykern.dask.layer_norm(x, np.ones(64, np.float32))


WRONG = {
    "no dask array": (
        lambda: cupykern.dask.softmax(np.ones((2, 3))),
        TypeError,
        "x must be a dask",
    ),
    "a list": (lambda: cupykern.dask.layer_norm([1.0]), TypeError, "dask array; got list"),
    "masked": (
        lambda: cupykern.dask.softmax(da.ma.masked_equal(X, 0)),
        TypeError,
        "x's chunks must be a cupy or numpy array; got numpy.ma",
    ),
    "dtype": (lambda: cupykern.dask.softmax(X.astype(int)), TypeError, "x's dtype must be one of"),
    "axis": (lambda: cupykern.dask.softmax(X, axis=2), np.exceptions.AxisError, "axis 2"),
    "scale": (lambda: cupykern.dask.softmax(X, scale=np.inf), ValueError, "scale must be finite"),
    "mask": (lambda: cupykern.dask.softmax(X, mask=X), TypeError, "mask must have dtype bool"),
    "mask's shape": (
        lambda: cupykern.dask.softmax(X, mask=da.ones((8, 3), dtype=bool)),
        ValueError,
        r"mask must broadcast to x's shape \(8, 64\); got shape \(8, 3\)",
    ),
    "weight": (
        lambda: cupykern.dask.rms_norm(X, X[0, :5]),
        ValueError,
        r"weight must have shape \(64,\); got \(5,\)",
    ),
    "residual": (
        lambda: cupykern.dask.layer_norm(X, residual=X.astype(np.float16)),
        TypeError,
        "residual must have x's dtype float32",
    ),
    "eps": (lambda: cupykern.dask.layer_norm(X, eps=-1), ValueError, "eps must be at least 0"),
    "granularity": (
        lambda: cupykern.dask.quantize(X, "int8", granularity="rows"),
        ValueError,
        "granularity must be one of",
    ),
    "block": (
        lambda: cupykern.dask.quantize(X, "int8", granularity="block", block=(0, 1)),
        ValueError,
        "block must be two positive integers",
    ),
    "K": (lambda: cupykern.dask.quantize_nvfp4(X[:, :24]), ValueError, "K a multiple of 16"),
    "layout": (
        lambda: cupykern.dask.quantize_nvfp4(X, layout="swizzled"),
        ValueError,
        "layout must be 'plain' or 'blocked'",
    ),
    "report": (lambda: cupykern.dask.nonfinite_report(X.astype(int)), TypeError, "x's dtype must"),
    "shapes": (
        lambda: cupykern.dask.matmul(X, X),
        ValueError,
        r"a's columns must be b's rows; got shapes \(8, 64\) and \(8, 64\)",
    ),
    "bias": (
        lambda: cupykern.dask.matmul(X, X.T, bias=np.ones(3, np.float32)),
        ValueError,
        r"bias must broadcast to \(8, 8\)",
    ),
    "activation": (
        lambda: cupykern.dask.matmul(X, X.T, activation="elu"),
        ValueError,
        "activation must be one of",
    ),
    "vector": (
        lambda: cupykern.dask.matmul(X, np.ones(8, np.float32)),
        ValueError,
        r"a's columns must be b's rows; got shapes \(8, 64\) and \(8, 1\)",
    ),
    "bias of a vector": (
        lambda: cupykern.dask.matmul(X, X[0], bias=np.ones((8, 1), np.float32)),
        ValueError,
        r"bias must broadcast to \(8,\)",
    ),
    "formula": (lambda: cupykern.dask.matmul(X, X.T, epilogue="acc **"), SyntaxError, "invalid"),
    "operand": (
        lambda: cupykern.dask.matmul(X, X.T, epilogue="acc + x", operands={"x": X}),
        ValueError,
        r"operands\['x'\] must broadcast to \(8, 8\)",
    ),
    "operand's name": (
        lambda: cupykern.dask.matmul(X, X.T, epilogue="acc + x"),
        NameError,
        "name 'x'",
    ),
    "operands": (
        lambda: cupykern.dask.matmul(
            X, X.T, epilogue="+".join("stuvwxyz"), operands=dict.fromkeys("stuvwxyz", 1)
        ),
        ValueError,
        "operands must be at most 7 where K is several chunks; got 8",
    ),
    "formula and bias": (
        lambda: cupykern.dask.matmul(X, X.T, epilogue="acc", bias=np.ones(8, np.float32)),
        ValueError,
        "bias must be None",
    ),
    "pair": (
        lambda: cupykern.dask.matmul(X, X.T.astype(np.int8)),
        TypeError,
        "float32.*int8",
    ),
    "split_every": (
        lambda: cupykern.dask.matmul(X, X.T, split_every=0),
        ValueError,
        "split_every must be at least 1; got 0",
    ),
    "split_every's type": (
        lambda: cupykern.dask.matmul(X, X.T, split_every=2.0),
        TypeError,
        "split_every must be an integer; got float",
    ),
    "no dask operand": (
        lambda: cupykern.dask.matmul(np.ones((2, 2)), np.ones((2, 2))),
        TypeError,
        "a or b must be a dask array; got numpy.ndarray and numpy.ndarray",
    ),
    "unknown chunks": (
        lambda: cupykern.dask.softmax(X[X[:, 0] > 0]),
        ValueError,
        "x must have chunks of known sizes",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_when_the_graph_is_built(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


# --- products ------------------------------------------------------------------------------------

PRODUCTS = {
    "fp16": (np.float16, np.float16, {}),
    "bf16 to fp32": (BF16, BF16, {"out_dtype": "float32"}),
    "fp32": (np.float32, np.float32, {"alpha": 0.3}),
    "fp32 in bf16 parts": (np.float32, np.float32, {"precision": "bf16x3"}),
    "fp8": (FP8, FP8, {}),
    "fp8 weights": (np.float16, FP8, {"activation": "silu"}),
    "int8": (np.int8, np.int8, {}),
    "int8 to fp16": (np.int8, np.int8, {"out_dtype": "float16", "alpha": 2**-10, "bias": (1, 40)}),
    "fp16 sums": (np.float16, np.float16, {"accumulate": "float16"}),
    "epilogue": (
        np.float16,
        np.float16,
        {"bias": (40,), "residual": (24, 1), "activation": "gelu", "alpha": 0.125},
    ),
    "bias and residual": (
        np.float32,
        np.float32,
        {"bias": (24, 40), "residual": (24, 40), "activation": "relu"},
    ),
    "complex64": (np.complex64, np.complex64, {"bias": (40,), "alpha": 0.5}),
}
CHUNKS = (100, 37, 128, 1, 64, 70)


def numbers(shape, dtype):
    if dtype == np.int8:
        return RNG.integers(-128, 128, shape).astype(np.int8)
    if dtype == np.complex64:
        return (normal(shape) + 1j * normal(shape)).astype(dtype)
    return normal(shape, dtype)


def operands(name):
    dtype_a, dtype_b, options = PRODUCTS[name]
    a, b = numbers((24, sum(CHUNKS)), dtype_a), numbers((sum(CHUNKS), 40), dtype_b)
    addend_dtype = np.complex64 if dtype_a == np.complex64 else np.float32
    shapes = {key: options[key] for key in ("bias", "residual") if key in options}
    addends = {key: numbers(shape, addend_dtype) for key, shape in shapes.items()}
    return a, b, {**options, **addends}


def comparison(c, a, b, options, k_chunks, split_every):
    exact_of = reference.complex_matmul if a.dtype == np.complex64 else reference.matmul
    exact = exact_of(a, b, **options)
    bound = reference.chunked_matmul_bound(
        a, b, **options, k_chunks=k_chunks, split_every=split_every, reference=exact
    )
    return compare((c,), exact, bound)


@pytest.mark.parametrize("split_every", [1, 2, 8])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_over_chunks_of_k_keep_their_bound(name, split_every):
    a, b, options = operands(name)
    lazy = cupykern.dask.matmul(
        da.from_array(a, chunks=(16, CHUNKS)),
        da.from_array(b, chunks=(CHUNKS, 25)),
        **options,
        split_every=split_every,
    )
    check_blocks(lazy)
    assert lazy.chunks == ((16, 8), (25, 15))
    assert lazy.dtype == cupykern.matmul(a, b, **options).dtype
    found = comparison(lazy.compute(), a, b, options, CHUNKS, split_every)
    assert found.ok, found


@pytest.mark.parametrize("name", ["fp16", "fp32", "int8", "complex64"])
def test_the_bound_finds_a_chunk_that_is_missing(name):
    a, b, options = operands(name)
    less = b.copy()
    less[CHUNKS[0] + CHUNKS[1] : sum(CHUNKS[:3])] = 0
    c = cupykern.dask.matmul(da.from_array(a, chunks=(16, CHUNKS)), less, **options).compute()
    assert not comparison(c, a, b, options, CHUNKS, 8).within_bound


def test_the_bound_of_one_chunk_is_matmuls():
    a, b, options = operands("epilogue")
    exact = reference.matmul(a, b, **options)
    (one,) = reference.matmul_bound(a, b, **options, reference=exact)
    (same,) = reference.chunked_matmul_bound(a, b, **options, k_chunks=a.shape[1:], reference=exact)
    assert (one.elementwise == same.elementwise).all() and (one.rms == same.rms).all()


def test_products_are_added_in_the_order_that_is_told():
    a, b, options = operands("epilogue")
    lazy = cupykern.dask.matmul(da.from_array(a, chunks=(24, CHUNKS)), b, **options, split_every=2)
    ends = np.cumsum(CHUNKS)
    parts = [
        (packed(a[:, end - size : end]), packed(b[end - size : end]))
        for end, size in zip(ends, CHUNKS, strict=True)
    ]
    step = partial(cupykern.matmul, alpha=options["alpha"], out_dtype="float32")
    first = step(*parts[1], bias=step(*parts[0], bias=options["bias"]))
    second = step(*parts[3], bias=step(*parts[2]))
    total = first + second + step(*parts[4])
    last = {**options, "bias": total}
    expected = cupykern.matmul(*parts[5], **last)
    for scheduler in ("synchronous", "threads"):
        assert same_bits(lazy.compute(scheduler=scheduler), expected)


SILU = "acc * sigmoid(acc * s) + r"
FORMULAS = {
    "one": (SILU, None),
    "several": (f"{SILU}, acc, s if acc < 0 else k", ("float16", "float32", "bfloat16")),
    "of 8 bits": (f"{SILU}, acc * s", ("float8_e4m3fn", "int8")),
    "of no product": ("s + r", None),
}


def formula_options(name):
    text, out_dtype = FORMULAS[name]
    given = {"s": normal(40), "r": normal((24, 1), np.float16), "k": 2, "z": np.array(3)}
    names = cupykern.expression(text).names
    return {"epilogue": text, "operands": {n: given[n] for n in names}, "out_dtype": out_dtype}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("k_chunks", [CHUNKS, (sum(CHUNKS),)], ids=["chunks", "whole"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("product", ["fp16", "fp32", "int8", "fp8 weights"])
def test_formulas_are_of_the_whole_sum(product, name, k_chunks):
    a, b, _ = operands(product)
    options = formula_options(name) | {"alpha": 0.125}
    lazy = cupykern.dask.matmul(
        da.from_array(a, chunks=(16, k_chunks)), da.from_array(b, chunks=(k_chunks, 25)), **options
    )
    exact = reference.matmul(a, b, **options)
    bounds = reference.chunked_matmul_bound(a, b, **options, k_chunks=k_chunks, reference=exact)
    plain = as_tuple(cupykern.matmul(a, b, **options))
    for known, like in zip(as_tuple(lazy), plain, strict=True):
        check_blocks(known)
        assert known.dtype == like.dtype and known.chunks == ((16, 8), (25, 15))
    assert compare(dask.compute(*as_tuple(lazy)), exact, bounds).ok


def test_the_bound_of_a_formula_finds_a_chunk_that_is_missing():
    a, b, _ = operands("fp16")
    options = formula_options("one")
    less = b.copy()
    less[: CHUNKS[0]] = 0
    c = cupykern.dask.matmul(da.from_array(a, chunks=(16, CHUNKS)), less, **options).compute()
    exact = reference.matmul(a, b, **options)
    bounds = reference.chunked_matmul_bound(a, b, **options, k_chunks=CHUNKS, reference=exact)
    assert not compare((c,), exact, bounds).within_bound


def test_formulas_count_within_chunks():
    a = da.from_array(normal((2, 8, 12), np.float16), chunks=(1, 4, 6))
    b = normal((12, 5), np.float16)
    for name in ("i", "b"):
        with pytest.raises(NotImplementedError, match=f"{name} in a formula counts within a chunk"):
            cupykern.dask.matmul(a, b, epilogue=f"acc + {name}")
    rows = {"row": np.arange(8)[:, None]}
    found = cupykern.dask.matmul(a, b, epilogue="acc * row + j", operands=rows).compute()
    expected = cupykern.matmul(a.compute(), b, epilogue="acc * i + j")
    np.testing.assert_allclose(found, expected, rtol=2**-9, atol=2**-6)
    lazy = cupykern.dask.matmul(a[0].rechunk((8, 6)), b, epilogue="acc * i")
    np.testing.assert_allclose(
        lazy.compute(), cupykern.matmul(a[0].compute(), b, epilogue="acc * i"), rtol=2**-9,
        atol=2**-6,
    )  # fmt: skip


@pytest.mark.parametrize("k_chunks", [CHUNKS, (sum(CHUNKS),)], ids=["chunks", "whole"])
@pytest.mark.parametrize("product", ["fp16", "fp32"])
def test_rows_of_one_chunk_are_reduced(product, k_chunks):
    a, b, _ = operands(product)
    formula = {"epilogue": "acc * s, row_max(abs(acc)), row_sum(acc)", "operands": {"s": 0.5}}
    lazy_a, lazy_b = (
        da.from_array(a, chunks=(16, k_chunks)),
        da.from_array(b, chunks=(k_chunks, 40)),
    )
    lazy = cupykern.dask.matmul(lazy_a, lazy_b, **formula)
    exact = reference.matmul(a, b, **formula)
    bounds = reference.chunked_matmul_bound(a, b, **formula, k_chunks=k_chunks, reference=exact)
    for known, columns in zip(lazy, (40, 1, 1), strict=True):
        check_blocks(known)
        assert known.chunks == ((16, 8), (columns,))
    assert compare(dask.compute(*lazy), exact, bounds).ok
    with pytest.raises(NotImplementedError, match=r"rows of one chunk, .* several along N"):
        cupykern.dask.matmul(lazy_a, lazy_b.rechunk({1: 20}), **formula)
    column = cupykern.dask.matmul(lazy_a, lazy_b[:, 0], **formula)
    assert [x.compute().shape for x in column] == [(24,)] * 3


def test_callables_and_numbers_of_dask_are_operands():
    a, b = normal((4, 6), np.float16), normal((6, 5), np.float16)
    lazy = cupykern.dask.matmul(
        da.from_array(a, chunks=2), b, epilogue=lambda acc, k, z: acc * k - z,
        operands={"k": 2, "z": da.from_array(np.float16(3))},
    )  # fmt: skip
    expected = 2 * (a.astype(np.float32) @ b.astype(np.float32)) - 3
    np.testing.assert_allclose(lazy.compute(), expected, rtol=2**-9, atol=2**-8)


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "chunks"),
    [
        ((445,), (445, 40), ((25, 15),)),
        ((24, 445), (445,), ((16, 8),)),
        ((445,), (445,), ()),
        ((3, 24, 445), (445,), ((2, 1), (16, 8))),
        ((445,), (3, 445, 40), ((2, 1), (25, 15))),
    ],
)
def test_vectors_are_rows_and_columns_as_in_numpy(shape_a, shape_b, chunks):
    pieces = {445: 100, 24: 16, 40: 25, 3: 2}
    a, b = (normal(shape, np.float16) for shape in (shape_a, shape_b))
    lazy_a, lazy_b = (da.from_array(x, chunks=tuple(pieces[n] for n in x.shape)) for x in (a, b))
    addend = normal(np.matmul(a, b).shape[-1:])
    for options in (
        {},
        {"bias": addend, "activation": "silu", "residual": addend},
        {"epilogue": "acc * s + k", "operands": {"s": addend, "k": 2}},
        {"epilogue": "acc * s, acc", "operands": {"s": addend}},
    ):
        lazy = as_tuple(cupykern.dask.matmul(lazy_a, lazy_b, **options))
        for known in lazy:
            assert known.chunks == chunks
            check_blocks(known)
        exact = reference.matmul(a, b, **options)
        k_chunks = (100, 100, 100, 100, 45)
        bounds = reference.chunked_matmul_bound(a, b, **options, k_chunks=k_chunks, reference=exact)
        assert compare(dask.compute(*lazy), exact, bounds).ok


def test_one_chunk_of_k_is_the_plain_product_of_blocks():
    a, b = normal((20, 70), np.float16), normal((70, 50), np.float16)
    lazy = cupykern.dask.matmul(da.from_array(a, chunks=(8, -1)), b, bias=np.float32([1]))
    blocks = [cupykern.matmul(packed(a[i : i + 8]), b, bias=np.float32([1])) for i in (0, 8, 16)]
    assert same_bits(lazy.compute(), np.concatenate(blocks))


@pytest.mark.parametrize(
    "a, b, chunks_a, chunks_b, chunks",
    [
        ((3, 1, 8, 12), (5, 12, 4), (2, 1, 4, 5), (2, 6, 4), ((2, 1), (2, 2, 1), (4, 4), (4,))),
        ((4, 8, 12), (4, 12, 4), (3, 8, 12), (2, 12, 2), ((2, 1, 1), (8,), (2, 2))),
        ((6, 0), (0, 4), (4, 1), (1, 4), ((4, 2), (4,))),
        ((0, 6), (6, 4), (4, 4), (4, 4), ((0,), (4,))),
    ],
)
def test_batches_broadcast_and_chunks_are_cut_where_either_is(a, b, chunks_a, chunks_b, chunks):
    a, b = normal(a, np.float16), normal(b, np.float16)
    lazy = cupykern.dask.matmul(da.from_array(a, chunks_a), da.from_array(b, chunks_b))
    assert lazy.chunks == chunks
    check_blocks(lazy)
    found = comparison(lazy.compute(), a, b, {}, (a.shape[-1],), 8)
    assert found.within_bound or a.shape[-1]  # few roundings more, of exact sums of 12 numbers
    np.testing.assert_allclose(lazy.compute(), cupykern.matmul(a, b), rtol=2**-9, atol=2**-8)


# --- larger than memory --------------------------------------------------------------------------

LARGE = Path(__file__).parents[1] / "support" / "dask_larger_than_memory.py"


def test_arrays_larger_than_memory_on_two_workers(tmp_path):
    done = subprocess.run(
        [sys.executable, str(LARGE), str(tmp_path)],
        env={**os.environ, "CUPYKERN_HOST_OPTIMIZE": "2"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (tmp_path / "y").unlink()  # of 200 MiB, which pytest would keep
