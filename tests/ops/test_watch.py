"""What watch alone promises."""

from __future__ import annotations

import logging
import threading
import warnings

import numpy as np
import pytest

import cupykern
from cupykern import watch as watch_function
from cupykern.ops import nonfinite_report as nonfinite_module
from cupykern.ops.nonfinite_report import OP
from cupykern.ops.rope_and_cache import OP as ROPE_OP


@pytest.fixture
def x(target):
    """One infinity, at (2, 3)."""
    numbers = np.ones((4, 50), np.float32)
    numbers[2, 3] = np.inf
    return target.xp.asarray(numbers)


def test_every_bad_call_is_recorded_and_the_first_is_logged(target, x, caplog):
    fine = target.xp.ones((4, 50), np.float32)
    with caplog.at_level(logging.WARNING, "cupykern"), cupykern.watch() as w:
        cupykern.softmax(fine)
        assert w.records == []
        y = cupykern.softmax(x, scale=2.0)
        cupykern.log_softmax(x)
    assert [(r.op, r.output) for r in w.records] == [("softmax", 0), ("log_softmax", 0)]
    (line,) = caplog.messages
    assert line == str(w.records[0]) and "\n" not in line
    for words in ("softmax: output 0, (4, 50) float32", "50 NaN", "the first at (2, 0)", "input x"):
        assert words in line
    first = w.records[0]
    assert first.report == cupykern.nonfinite_report(y)
    assert first.inputs == {"x": cupykern.nonfinite_report(x)}
    assert first.inputs["x"].first_index == (2, 3)


def test_every_output_is_looked_at_and_bad_arguments_are_named(target, x):
    weight = target.xp.ones(50, np.float16)
    weight[7] = np.nan
    fine = target.xp.ones((4, 50), np.float32)
    with cupykern.watch() as w:
        cupykern.layer_norm(fine, weight, residual=x, return_stats=True)
    assert [record.output for record in w.records] == [0, 1, 2, 3]
    assert [record.shape for record in w.records] == [(4, 50), (4, 50), (4,), (4,)]
    for record in w.records:
        assert sorted(record.inputs) == ["residual", "weight"]
        assert record.inputs["weight"].first_index == (7,)


def test_a_bad_output_of_good_inputs_is_recorded(target):
    x = target.xp.asarray(np.full((2, 8), 60000, np.float32))
    with cupykern.watch() as w:
        cupykern.rms_norm(x, x[0], dtype="float16", eps=0.0)
        cupykern.layer_norm(x, dtype="float16")
    (record,) = w.records if w.records else (None,)
    assert record is None
    with cupykern.watch() as w:
        cupykern.rms_norm(x, x[0] * 2, dtype="float16")
    (record,) = w.records
    assert record.report.num_posinf == 16 and not record.inputs
    assert "its inputs are finite" in str(record)


def test_an_overwritten_input_is_named_as_such(x):
    with cupykern.watch() as w:
        cupykern.softmax(x, out=x)
    (record,) = w.records
    assert record.overwritten == ("x",) and not record.inputs
    assert "its input x is overwritten" in str(record)


def test_quantized_outputs_are_looked_at(x):
    with cupykern.watch() as w:
        cupykern.rms_norm(x, quantize="e4m3")
        cupykern.rms_norm(x, quantize="int8")
    assert [(r.output, r.dtype) for r in w.records] == [
        (0, "float8_e4m3fn"),
        (1, "float32"),
        (1, "float32"),
    ]


def test_calls_after_the_block_are_not_watched(x):
    with cupykern.watch() as w:
        pass
    cupykern.softmax(x)
    assert w.records == []


def test_nested_watches_each_record_their_calls(x, caplog):
    with caplog.at_level(logging.WARNING, "cupykern"), cupykern.watch() as outer:
        cupykern.softmax(x)
        with cupykern.watch() as inner:
            cupykern.log_softmax(x)
        cupykern.softmax(x)
    assert [r.op for r in outer.records] == ["softmax", "log_softmax", "softmax"]
    assert [r.op for r in inner.records] == ["log_softmax"]
    assert [line.partition(":")[0] for line in caplog.messages] == ["softmax", "log_softmax"]


def test_an_exception_ends_the_watch(x):
    with pytest.raises(ZeroDivisionError), cupykern.watch() as w:
        cupykern.softmax(x)
        raise ZeroDivisionError
    cupykern.softmax(x)
    assert len(w.records) == 1
    with pytest.raises(TypeError, match="dtype must be"), cupykern.watch():
        cupykern.softmax(x, dtype="int8")
    with w:  # it may be entered again, not twice at once
        with pytest.raises(RuntimeError, match="active already"), w:
            pass
        cupykern.softmax(x)
    assert len(w.records) == 2


def test_a_callback_that_is_not_callable_is_refused():
    with pytest.raises(TypeError, match="callback must be callable; got int"):
        cupykern.watch(3)


def test_the_callback_is_called_with_each_record(x):
    seen = []

    def callback(record):
        seen.append(record)
        cupykern.softmax(x)  # not looked at: no end otherwise

    with cupykern.watch(callback) as w:
        cupykern.softmax(x)
        cupykern.log_softmax(x)
    assert seen == w.records and len(seen) == 2

    def stop(record):
        raise FloatingPointError(str(record))

    with pytest.raises(FloatingPointError, match="softmax: output 0"), cupykern.watch(stop):
        cupykern.softmax(x)


def test_other_threads_are_not_watched(x):
    with cupykern.watch() as w:
        thread = threading.Thread(target=cupykern.softmax, args=(x,))
        thread.start()
        thread.join()
    assert w.records == []


def test_every_public_op_is_watched():
    for op in cupykern.OPS:
        if op in (OP, ROPE_OP):
            continue  # what looks, and one whose record also returns what it writes
        public = getattr(cupykern, op.run.__name__)
        assert public.__wrapped__ is op.run and public.__doc__ == op.run.__doc__


def test_a_captured_stream_is_not_waited_for(x, monkeypatch):
    """As on a GPU: one warning that says so, no look."""
    monkeypatch.setitem(watch_function.__globals__, "is_capturing", lambda target: True)
    monkeypatch.setattr(nonfinite_module, "is_capturing", lambda target: True)
    with pytest.warns(RuntimeWarning, match="cannot look at the output of softmax") as caught:
        with cupykern.watch() as w:
            cupykern.softmax(x)
            cupykern.log_softmax(x)
    assert len(caught) == 1 and caught[0].filename == __file__ and w.records == []
    with pytest.raises(RuntimeError, match="capture"):
        cupykern.nonfinite_report(x)


def test_captured_calls_are_not_looked_at(gpu):
    cupy = gpu.xp
    x = cupy.full((4, 50), np.nan, np.float32)
    y = cupykern.softmax(x)  # compiled
    cupykern.nonfinite_report(x)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupykern.watch() as w:
        stream.begin_capture()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cupykern.softmax(x, out=y)
            cupykern.softmax(x, out=y)
        with pytest.raises(RuntimeError, match="capture"):
            cupykern.nonfinite_report(x)
        graph = stream.end_capture()
        y.fill(1)
        graph.launch()
        stream.synchronize()
    assert len(caught) == 1 and w.records == [] and bool(cupy.isnan(y).all())
