"""SpanRows: contiguous rows of any length (rows/load_span.cuh), softmax and the norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from span_rows import on_spans, span_config

import cupykern
from cupykern import check, dtypes, inputs
from cupykern.op import Op
from cupykern.ops.norm import ADD_OP, LAYER_OP, RMS_OP
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem
from cupykern.rows.configs import SpanRows
from cupykern.rows.row_layout import RowLayout, contiguous_operand, operand, row_layout

# One thread a row and several, a warp, several warps; one element, even and odd, the most.
CONFIG = span_config("float16")
MOST = CONFIG.chunk - 7  # a row may begin with the last element of a vector
LENGTHS = (1, 2, 3, 17, 32, 33, 63, 100, 301, 1001, 1025, 1501, 2047, 4097, MOST)
DTYPES = ("float16", "bfloat16", "float32")


def rows_of(num_cols: int) -> tuple[int, int]:
    """Few rows, and more than two blocks have of them, the last block not all."""
    return 3, 2 * (CONFIG.chunk // num_cols) + 1


def _spans(op: Op, problem: object) -> bool:
    return isinstance(op.configs(problem, "sm_90a")[0], SpanRows)


def test_short_contiguous_misaligned_rows_are_spans():
    """Whole vectors, and norms of few rows, go to plain rows' kernels; long rows and options to the
    general ones."""
    many = 2**17
    for shape, spans in (
        ((many, 301), True),
        ((many, 296), False),
        ((many, 5200), False),
    ):
        assert _spans(OP, SoftmaxProblem(shape)) == spans, shape
    assert not _spans(OP, SoftmaxProblem((many, 301), scale=-0.5))
    assert _spans(LAYER_OP, NormProblem((many, 301), weight_dtype="float16"))
    assert not _spans(LAYER_OP, NormProblem((64, 301), weight_dtype="float16"))
    assert _spans(LAYER_OP, NormProblem((64, 301), weight_dtype="float32"))
    assert _spans(LAYER_OP, NormProblem((64, 304), weight_dtype="float32"))
    x = np.zeros((64, 640), np.float16)
    assert row_layout_of(x[:, :301], 1).contiguous is False
    assert row_layout_of(np.broadcast_to(x[0, :301], (64, 301)), 1).contiguous is False
    assert row_layout_of(x[:, :301].copy(), 1).contiguous is True
    assert not _spans(LAYER_OP, NormProblem((many, 301), compensated=True))
    assert not _spans(RMS_OP, NormProblem((many, 301), quantize="e4m3"))


def row_layout_of(x: np.ndarray, axis: int) -> RowLayout:
    layout = row_layout(x.shape, axis, (operand(x), contiguous_operand(x.shape, x.itemsize)), (1,))
    assert layout is not None
    return layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [OP, LOG_OP], ids=lambda op: op.name)
def test_softmax_of_any_length(target, op, dtype):
    for num_cols in LENGTHS:
        for num_rows in rows_of(num_cols):
            problem = SoftmaxProblem((num_rows, num_cols), dtype=dtype, kind="wide")
            comparison = check.check_problem(on_spans(op, problem), problem, num_cols, target.xp)
            assert comparison.ok, f"{problem}: {comparison}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [LAYER_OP, RMS_OP, ADD_OP], ids=lambda op: op.name)
def test_norms_of_any_length(target, op, dtype):
    bias = dtype if op is LAYER_OP else None
    for i, num_cols in enumerate(LENGTHS):
        for num_rows in rows_of(num_cols):
            problem = NormProblem(
                (num_rows, num_cols),
                dtype=dtype,
                weight_dtype=(None, dtype, "float32")[i % 3],
                bias_dtype=bias and (bias, "float32", None)[i % 3],
                residual=op is ADD_OP or i % 2 == 1,
                return_stats=i % 4 < 2,
                mean=3.0,
            )
            comparison = check.check_problem(on_spans(op, problem), problem, num_cols, target.xp)
            assert comparison.ok, f"{problem}: {comparison}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 4])
def test_rows_that_begin_anywhere(target, dtype, offset):
    """Neither the elements before the first row nor those behind the last one are touched."""
    xp, shape = target.xp, (37, 63)
    size = shape[0] * shape[1]
    values = inputs.values("normal", (size + 16,), dtypes.NAMES[dtype], 1)
    memory = xp.asarray(values)
    x = memory[offset : offset + size].reshape(shape)
    out = xp.full(size + 16, 7, memory.dtype)
    y = out[offset : offset + size].reshape(shape)
    config = span_config(dtype)
    assert cupykern.softmax(x, out=y, config=config) is y
    assert bool((out[:offset] == 7).all()) and bool((out[offset + size :] == 7).all())
    references = OP.reference(x)
    assert check.compare((y,), references, OP.bound(x, reference=references)).ok
    cupykern.softmax(x, out=x, config=config)
    assert bool((x == y).all())
    after = memory if isinstance(memory, np.ndarray) else memory.get()
    assert (after[:offset] == values[:offset]).all()
    assert (after[offset + size :] == values[offset + size :]).all()


def test_a_bad_row_leaves_its_neighbours_alone(target):
    """Of 16 bits they share words."""
    x = inputs.values("normal", (40, 33), dtypes.float16, 1)
    expected = cupykern.softmax(target.xp.asarray(x), config=CONFIG)
    x[1::4], x[2::4] = np.nan, np.inf
    y = cupykern.softmax(target.xp.asarray(x), config=CONFIG)
    good = np.arange(40) % 4 % 3 == 0
    assert bool((y[target.xp.asarray(good)] == expected[target.xp.asarray(good)]).all())
    assert bool(target.xp.isnan(y[target.xp.asarray(~good)]).all())


def test_a_config_of_ones_own(target):
    """More threads, and fewer elements of each."""
    x = target.xp.asarray(inputs.values("normal", (50, 1001), dtypes.float16, 1))
    config = CONFIG
    expected = cupykern.softmax(x, config=config)
    for own in (
        replace(config, num_threads=512, min_blocks=1),
        replace(config, vectors_per_thread=2),
    ):
        y = cupykern.softmax(x, config=own)
        references = OP.reference(x)
        assert check.compare((y,), references, OP.bound(x, reference=references)).ok
    for changes, says in (
        ({"num_threads": 96}, "powers of two"),
        ({"num_threads": 32, "vectors_per_thread": 1}, "elements are fewer than a row's"),
    ):
        with pytest.raises(ValueError, match=says):
            cupykern.softmax(x, config=replace(config, **changes))
    with pytest.raises(ValueError, match="of contiguous rows"):
        cupykern.softmax(x, scale=-0.5, config=config)
    assert bool((cupykern.softmax(x, config=config) == expected).all())
