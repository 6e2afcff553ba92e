"""`cupykern startup`: new processes with an empty and a warm cache."""

from __future__ import annotations

import pytest

from cupykern import OPS, cli
from cupykern.tools import report, startup, stored
from cupykern.tools.bench import Task, first_tasks
from cupykern.tools.options import Failure


def task(name: str) -> Task:
    return first_tasks([op for op in OPS if op.name == name], "host")[0]


def test_kernels_are_compiled_with_an_empty_cache_alone(tmp_path):
    cold = startup.child(task("softmax"), "host", tmp_path)
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    warm = startup.child(task("softmax"), "host", tmp_path)
    assert compiled == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} != {}
    assert cold["call_ms"] > warm["call_ms"] > 0 < warm["import_ms"]


def test_an_op_whose_function_has_another_name(tmp_path):
    assert startup.child(task("complex_matmul"), "host", tmp_path)["call_ms"] > 0


def test_a_process_that_fails_is_named(tmp_path):
    wrong = Task(task("softmax").op, (4, 4), "float3", None)
    with pytest.raises(Failure, match=r"softmax: .*float3"):
        startup.child(wrong, "host", tmp_path)


def test_the_command_prints_and_writes_medians(capsys, tmp_path):
    path = tmp_path / "startup.json"
    args = ["startup", "merge_attention", "--target", "host", "--repeats", "1", "--wait"]
    assert cli.main([*args, "--json", str(path)]) == 0
    (row,) = stored.read(path)["rows"]
    assert row["op"] == "merge_attention" and row["cold_ms"] > row["warm_ms"] > 0
    assert "empty cache" in capsys.readouterr().out
    path.write_text(path.read_text().replace('"target": "host"', '"target": "cuda"'))
    assert "| merge_attention | 64 x 4 x 128 |" in report.all_tables(tmp_path)["startup"]
