"""What a user sees of the command: tables that fit, what to install, estimates, a page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cupykern
from cupykern import cli
from cupykern.tools import doctor, tables

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def terminal(monkeypatch):
    """stdout counts as a terminal of so many columns, without rich."""

    def use(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setitem(sys.modules, "rich.console", None)

    return use


@pytest.mark.parametrize(
    "columns, ops", [(80, ()), (160, ()), (80, ("softmax", "scaled_mm")), (120, ("attention",))]
)
def test_list_fits_a_terminal(columns, ops, terminal, capsys):
    terminal(columns)
    assert cli.main(["list", *ops]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    words = set(out.replace(",", " ").split())
    assert set(ops or (op.name for op in cupykern.OPS)) <= words


def test_a_row_is_a_line_elsewhere(capsys):
    tables.print_table(("op", "text"), [("softmax", "word " * 100)])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_wrapped_cells_keep_every_word(terminal, capsys):
    terminal(40)
    words = [f"word{i}" for i in range(30)]
    tables.print_table(("op", "number", "text"), [("softmax", "17", " ".join(words))])
    out = capsys.readouterr().out
    assert (
        max(map(len, out.splitlines())) <= 40
        and [w for w in out.split() if w[-1].isdigit()][1:] == words
    )


def test_list_of_ops_has_the_default_configs(capsys, tmp_path):
    path = tmp_path / "l.json"
    assert cli.main(["list", "softmax", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert {row["op"] for row in rows} == {"softmax"} and len(rows) == 3
    out = capsys.readouterr().out
    assert all(row["config"] in out for row in rows)


def no_distribution(name):
    raise doctor.metadata.PackageNotFoundError(name)


def test_doctor_says_what_to_install(monkeypatch, capsys):
    """Of a machine without anything: each missing thing has a use and a remedy."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.metadata, "version", no_distribution)
    assert cli.main(["doctor"]) in (0, 1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("missing ")]
    for thing, remedy in (
        ("cupy", "'cupykern[cuda13]'"),
        ("rich", "'cupykern[bench]'"),
        ("matplotlib", "'cupykern[bench]'"),
        ("profiler", "Nsight Compute"),
    ):
        (line,) = (line for line in lines if line.startswith(f"missing {thing}"))
        assert "needed for" in line and remedy in line


def test_an_estimate_comes_when_the_number_is_known(monkeypatch, capsys):
    times = iter(range(0, 1000, 12))
    monkeypatch.setattr(tables.time, "monotonic", lambda: next(times))
    items = tables.Counted("abcd")
    with tables.progress(lambda: items.total, "compile") as advance:
        for _ in range(2):
            next(items)
            advance()
        rest = list(items)
        for _ in rest:
            advance()
    assert capsys.readouterr().err.splitlines() == [
        "compile: 1 in 12 s",
        "compile: 2 in 24 s",
        "compile: 3 of 4 in 36 s, about 12 s left",
        "compile: 4 of 4 in 48 s",
    ]


def test_python_m_cupykern_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cupykern", "--version"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and cupykern.__version__ in done.stdout


def test_report_outside_a_checkout(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report"]) == 1
    assert "there are no results in results" in capsys.readouterr().err
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "b.json").write_text((ROOT / "results" / "log_softmax.json").read_text())
    assert cli.main(["report", "--results", "measured"]) == 0
    assert capsys.readouterr().out == "results.html written\n"
    assert "log_softmax" in Path("results.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["measured", "results.html"]
    assert cli.main(["report", "--results", "measured", "--tables", "no.md"]) == 1
    assert "no.md" in capsys.readouterr().err
