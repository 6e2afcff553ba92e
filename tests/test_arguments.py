"""Illegal arguments raise a typed error that names the argument; nothing is changed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupykern
from cupykern import arguments

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
    (TypeError, "x's dtype", lambda: (X.astype(np.float64),)),
    (TypeError, "x's dtype", lambda: (X.astype(">f4"),)),
    (np.exceptions.AxisError, "axis", lambda: (X, 2)),
    (np.exceptions.AxisError, "axis", lambda: (X, -3)),
    (np.exceptions.AxisError, "axis", lambda: (np.zeros((), np.float32),)),
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


def _overlapping():
    memory = np.zeros(30, np.float32)
    return memory[:24].reshape(4, 6), -1, {"out": memory[6:].reshape(4, 6)}


def _read_only() -> np.ndarray:
    out = np.zeros((4, 6), np.float32)
    out.flags.writeable = False
    return out


@pytest.mark.parametrize("function", [cupykern.softmax, cupykern.log_softmax])
@pytest.mark.parametrize(("error", "match", "make"), CASES)
def test_refused(function, error, match, make):
    args = make()
    kwargs = args[2] if len(args) == 3 else {}
    before = kwargs["out"].copy() if isinstance(kwargs.get("out"), np.ndarray) else None
    with pytest.raises(error, match=match):
        function(*args[:2], **kwargs)
    if before is not None:
        assert (kwargs["out"] == before).all()


@pytest.mark.parametrize("function", [cupykern.softmax, cupykern.log_softmax])
@pytest.mark.parametrize("wrong", [{"axis": 1.0}, {"axis": True}, {"axis": 1, "scale": True}])
def test_refused_though_an_equal_value_is_cached(function, wrong):
    function(X, axis=1, scale=1)
    with pytest.raises(TypeError):
        function(X, **wrong)


def test_interleaved_out_is_no_overlap():
    memory = np.zeros((4, 12), np.float32)
    memory[:, ::2] = X
    cupykern.softmax(memory[:, ::2], out=memory[:, 1::2])
    assert (memory[:, ::2] == X).all()
    assert (memory[:, 1::2] == cupykern.softmax(X)).all()


def test_strides_whose_overlap_takes_long_to_find():
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


def test_numpy_mask_with_cupy_x(gpu):
    with pytest.raises(TypeError, match="mask must be a cupy array"):
        cupykern.softmax(gpu.xp.asarray(X), mask=np.ones(6, bool))


def test_finfo():
    for dtype in ("float8_e5m2", ml_dtypes.bfloat16, np.float64):
        info = cupykern.finfo(dtype)
        assert info.max == float(ml_dtypes.finfo(info.dtype).max)
    for dtype in ("float17", None, int, []):
        with pytest.raises(TypeError, match="dtype must be one of"):
            cupykern.finfo(dtype)


def test_asarray_and_empty():
    x = cupykern.asarray([0.5, 448.0, np.nan], "float8_e4m3fn", "host")
    assert x.dtype.name == "float8_e4m3fn" and x.astype(np.float32)[1] == 448
    assert cupykern.empty((2, 3), "bfloat16", "host").dtype.name == "bfloat16"
    with pytest.raises(TypeError, match="dtype must be"):
        cupykern.empty(3, "complex64", "host")
    with pytest.raises(ValueError, match="target must be"):
        cupykern.empty(3, "float16", "tpu")
