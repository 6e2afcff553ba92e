"""How small an error of its results each op's comparison finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_op import make_op

from cupykern import OPS, cli, targets
from cupykern.tools import sensitivity, stored
from cupykern.tools.sensitivity import OPTIONS, SHAPES, rows_of

ROW_OPS = (
    *("softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm"),
    *("quantize", "quantize_nvfp4", "nonfinite_report"),
)
BY_NAME = {op.name: op for op in OPS}
ALL = [
    (op.name, dtype)
    for op in OPS
    for dtype in dict.fromkeys((*op.dtypes, *OPTIONS.get(op.name, ())))
]
CALLS = [(name, dtype) for name, dtype in ALL if "shifted" not in dtype]  # results of few digits
# Relative errors of 2^-s, s at least so much: one unit in the last place of 16 bits is 2^-11 to
# 2^-10, 2^-8 to 2^-7.
GOALS = {"float16": 11, "bfloat16": 8, "float32": 20, "float64": 20}
PRODUCTS_GOAL = 18  # of FP32 results, at K = 1024


@pytest.mark.parametrize("name, dtype", CALLS)
def test_small_errors_of_all_elements_are_found(name, dtype):
    op = BY_NAME[name]
    shape = SHAPES.get(name) or op.bench_shapes("host")[0]
    found = list(rows_of(op, shape, dtype, targets.get("host"), 0))
    assert found
    for row in found:
        decoded = name == "quantize_nvfp4" and row.result == "0: float32"  # of FP4
        goal = 4 if decoded else GOALS.get(row.result.split(": ")[-1], 0)
        if name in ("matmul", "complex_matmul", "scaled_mm", "dual_gemm_silu"):
            goal = min(goal, PRODUCTS_GOAL)
        for planted in (row.random, row.one_sign):
            assert planted is not None and planted >= goal, row
        if name in ROW_OPS[:-1] and "2: " not in row.result:  # not of single numbers
            assert 0.5 <= row.rms <= 1.2, row
        if name in ROW_OPS and (row.unit == "ulp" or row.result.endswith("float16")):
            assert row.single >= 0.85, row


def test_the_record_has_every_dtype_of_its_ops():
    """The table of docs/results.md.  Another: `check --sensitivity --json`, then `report`."""
    path = Path(__file__).parents[2] / "results" / "host_sensitivity.json"
    recorded = {(row["op"], row["dtype"]) for row in stored.read(path)["rows"]}
    measured = {name for name, _ in recorded}
    assert recorded == {row for row in ALL if row[0] in measured} and len(measured) >= 18


def test_an_error_below_what_is_expected_is_not_found():
    """One rounding to FP32."""
    (row,) = rows_of(make_op(), (64, 1024), "float32", targets.get("host"), 0)
    # Thirds lie a third of a gap off, or not at all; it expects u / sqrt(3) of the result.
    assert row.rms == pytest.approx(0.7, abs=0.02)
    assert row.random in (22, 23, 24) and row.unit == "relative"


def test_results_that_are_exact_have_no_row():
    rows = rows_of(BY_NAME["nonfinite_report"], (4, 64), "float16", targets.get("host"), 0)
    assert [row.result for row in rows] == ["1: float64"]


def test_the_most_is_found_by_bisection():
    for most in (None, 0, 5, 31, 32):
        assert sensitivity.most_found(lambda s, _, m=most: m is not None and s <= m, 0, 32) == most


@pytest.mark.parametrize(
    "unit, s, cell", [("ulp", 0, "1 ulp"), ("ulp", None, "none"), ("relative", 11, "2^-11")]
)
def test_cells_name_the_smallest_error_found(unit, s, cell):
    row = sensitivity.Row("op", (2, 3), "float16", "float16", 1.0, unit, s, s, 0.5)
    cells = sensitivity.cells(vars(row))
    assert cells == ("op", "float16", "2 x 3", "float16", "1.00", cell, cell, "50.0%")
    assert len(cells) == len(sensitivity.HEAD)


def test_check_sensitivity_prints_and_writes_rows(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sensitivity.SHAPES, "quantize", (8, 64))
    path = tmp_path / "s.json"
    command = ["check", "--sensitivity", "quantize", "--target", "host", "--json", str(path)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "float16:int8" in out and "1 ulp" in out and len(stored.read(path)["rows"]) > 5


def test_rows_by_the_format_of_their_result():
    """From the finest error that is found in all results of a format to the coarsest."""
    rows = [
        vars(sensitivity.Row("a", (2, 3), "float16", f"{i}: float32", 1.0, "relative", s, s, 0.5))
        for i, s in enumerate((20, 24, 22))
    ]
    rows.append(vars(sensitivity.Row("b", (2, 3), "float16", "int8", 1.0, "ulp", 0, None, 0.5)))
    assert sensitivity.by_format(rows) == [
        ("float32", "3", "2^-24 to 2^-20", "2^-24 to 2^-20"),
        ("int8", "1", "1 ulp", "none"),
    ]
