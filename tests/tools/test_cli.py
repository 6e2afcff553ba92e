"""The command: exit codes, one-line errors, files."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from fake_op import make_op

import cupykern
from cupykern import OPS, cli
from cupykern.tools import commands_measure, gate, options, plot, stored, tables
from cupykern.tuning import protocol

ROOT = Path(__file__).resolve().parents[2]
GOOD = make_op()
WRONG = replace(make_op("value"), name="wrong")
INTERRUPTED = replace(make_op("interrupt"), name="interrupted")


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    """Tests run at once; none of them is a benchmark for another."""
    monkeypatch.setattr(protocol, "lock_path", lambda: tmp_path / "lock")


@pytest.fixture
def fake_ops(monkeypatch):
    for module in (cupykern, cli, options):
        monkeypatch.setattr(module, "OPS", (GOOD, WRONG, INTERRUPTED))


def _run(capsys, *args: str) -> tuple[int, str, str]:
    code = cli.main(list(args))
    out, err = capsys.readouterr()
    return code, out, err


def _words(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_check_that_passes_prints_and_writes_a_row(fake_ops, capsys, tmp_path):
    path = tmp_path / "check.json"
    code, out, err = _run(
        capsys, "check", "third", "--target", "host", "--cases", "7", "--json", str(path)
    )
    assert code == 0 and err.startswith("check: 1 op, 7 cases each") and err.count("\n") == 1
    title, header, _, row = out.splitlines()
    assert "error/bound 1" in title and _words(row)[:4] == ["third", "float32", "7", "0"]
    document = stored.read(path)
    assert document["failures"] == [] and document["summary"][0]["cases"] == 7


def test_check_says_how_to_reproduce_a_violation(fake_ops, capsys):
    args = ("check", "wrong", "--target", "host", "--cases")
    code, out, _ = _run(capsys, *args, "30", "--seed", "5")
    assert code == 1
    problem, command = out.splitlines()[5:7]
    assert "Problem(shape=" in problem
    again = command.split()
    assert again[:2] == ["cupykern", "check"]
    code, out, _ = _run(capsys, *again[1:])
    assert code == 1 and problem in out


def test_bench_writes_everything(fake_ops, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("b.json", "b.csv", "b.svg")]
    code, out, err = _run(
        capsys,
        *("bench", "third", "--target", "host", "--shapes", "8,16;4,4", "--dtype", "float32"),
        *("--rep-ms", "0", "--warmup-ms", "0", "--seed", "3"),
        *("--json", str(paths[0]), "--csv", str(paths[1]), "--plot", str(paths[2])),
    )
    assert (code, err) == (0, "")
    assert out.startswith("host emulation: times are not GPU times")
    rows = [_words(line) for line in out.splitlines()[3:]]
    assert [row[1] for row in rows] == ["8x16", "4x4"] and all(row[-1] == "yes" for row in rows)

    document = stored.read(paths[0])
    assert document["settings"]["seed"] == 3 and document["machine"]["device"]
    assert [row["shape"] for row in document["rows"]] == [[8, 16], [4, 4]]
    with paths[1].open() as file:
        lines = list(csv.DictReader(file))
    assert [line["shape"] for line in lines] == ["8x16", "4x4"]
    figure = document["rows"][0]["results"][0]["median_us"]
    assert number_in(lines[0]["median_us"], figure) and number_in(rows[0][3], figure)
    assert b"<svg" in paths[2].read_bytes()


def test_bench_of_the_host_has_a_line_for_each_op_in_100_columns(capsys):
    args = "bench", "--target", "host", "--rep-ms", "0", "--warmup-ms", "0"
    code, out, err = _run(capsys, *args)
    lines = out.splitlines()
    assert code == 0 and [line.split()[0] for line in lines[3:]] == [op.name for op in OPS]
    assert max(map(len, lines)) <= 100
    assert re.match(rf"{len(OPS)} rows: about \d+ s on \d+ idle cores", err)


@pytest.mark.parametrize(
    "more, rows",
    [((), 1), (("--all",), 2), (("--dtype", "float32,float16"), 4), (("--shapes", "3,5;1,2"), 2)],
)
def test_more_rows_of_the_host_are_asked_for(monkeypatch, capsys, more, rows):
    for module in (cli, options, commands_measure):
        monkeypatch.setattr(module, "OPS", (replace(GOOD, dtypes=("float32",)),))
    args = "bench", "--target", "host", "--rep-ms", "0", "--warmup-ms", "0", *more
    code, out, _ = _run(capsys, *args)
    assert code == 0 and len(out.splitlines()) == 3 + rows


def number_in(cell: str, value: float) -> bool:
    return float(cell) == pytest.approx(value, rel=1e-3)


def test_bench_of_a_wrong_op_fails(fake_ops, capsys):
    code, out, _ = _run(capsys, "bench", "wrong", "--target", "host", "--dtype", "float32")
    assert code == 1 and "NO" in out and "error/bound" in out.splitlines()[-1]


def test_an_interrupted_bench_keeps_the_finished_rows(fake_ops, capsys, tmp_path):
    path = tmp_path / "b.json"
    code, out, err = _run(
        capsys,
        *("bench", "third", "interrupted", "--target", "host", "--dtype", "float32"),
        *("--rep-ms", "0", "--json", str(path)),
    )
    assert (code, err) == (130, "interrupted\n")
    document = json.loads(path.read_text())
    assert document["interrupted"] and len(document["rows"]) == 2


def test_two_benchmarks_at_once(fake_ops, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    with protocol.lock(wait=False):
        code, out, err = _run(capsys, "bench", "third", "--target", "host")
    assert (code, out) == (1, "")
    assert err.startswith("error: another benchmark") and err.count("\n") == 1


@pytest.mark.parametrize(
    "args, says",
    [
        (["nonsense"], "nonsense"),
        (["check", "nope"], "softmax"),
        (["check", "--target", "tpu"], "'tpu' is not one of 'cuda', 'hip', 'host'"),
        (["check", "--cases", "0"], "--cases"),
        (["check", "--json", "/no/such/folder/f.json"], "--json: there is no folder"),
        (["bench", "--shapes", "3x4"], "--shapes must be"),
        (["bench", "--shapes", "3,-4"], "--shapes must be"),
        (["bench", "--shapes", ""], "--shapes must be"),
        (["bench", "--dtype", "float17"], "unknown dtype 'float17'"),
        (["bench", "softmax", "--dtype", "int8"], "float16, bfloat16, float32"),
        (["bench", "--against", "nobody"], "unknown library 'nobody'"),
        (["bench", "--target", "host", "--against", "torch"], "needs a GPU"),
        (["bench", "--dtype", ","], "--dtype must be names"),
        (["bench", "--rep-ms", "nan"], "--rep-ms must be a number"),
        (["bench", "--warmup-ms", "-1"], "--warmup-ms must be a number"),
        (["source"], "OP"),
        (["source", "softmax", "--arch", "gfx942"], "those of cuda are sm_80"),
        (["source", "nope"], "unknown op"),
        (["bench", "sofmax"], "did you mean 'softmax'?"),
        (["compile", "--arch", "sm_1"], "sm_1"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(args, says, capsys):
    code, out, err = _run(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUPYKERN_HOST_WARP_SIZE", "33"),
        ("CUPYKERN_HOST_SCHEDULE", "random"),
        ("CUPYKERN_HOST_SCHEDULE", "sticky:²"),
        ("CUPYKERN_HOST_SANITIZER", "all"),
        ("CUPYKERN_HOST_OPTIMIZE", "3"),
        ("CUPYKERN_CUDA_CHECKED", "maybe"),
        ("CXX", "g++ '-O1"),
        ("CXX", "nonexistent"),
        ("CXX", "false"),
        ("CUPYKERN_TUNE", "2"),
    ],
)
def test_a_wrong_environment_variable_is_wrong_usage(name, value, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    code, out, err = _run(capsys, "cache")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {name} must be ") and err.count("\n") == 1
    assert repr(value)[1:-1] in err


def test_a_shape_that_the_op_refuses(fake_ops, capsys):
    code, _, err = _run(capsys, "bench", "third", "--shapes", "3", "--target", "host")
    assert code == 2 and "2 dims" in err


def test_a_target_that_is_not_there(capsys):
    missing = "hip" if "cuda" in cupykern.targets.available() else "cuda"
    code, out, err = _run(capsys, "check", "--target", missing)
    assert (code, out) == (1, "") and err.startswith(f"error: target {missing} cannot run here")


def test_list_names_every_op(capsys):
    code, out, _ = _run(capsys, "list")
    assert code == 0
    for op in cupykern.OPS:
        assert op.name in out
    for target in options.TARGETS:
        assert target in out


def test_doctor_names_every_component(capsys):
    code, out, _ = _run(capsys, "doctor")
    assert code == (0 if cupykern.targets.available() else 1)
    for thing in (
        "cupy",
        "C++ compiler",
        "clang for HIP",
        "kernel cache",
        "free memory",
        "targets that work",
    ):
        assert thing in out


def test_source_is_the_variants_string(capsys):
    op = cupykern.OPS[0]
    shape = op.bench_shapes("cuda")[0]
    for target, arch in options.DEFAULT_ARCHS.items():
        code, out, _ = _run(
            capsys,
            *("source", op.name, "--target", target, "--shape", ",".join(map(str, shape))),
            *("--dtype", "bfloat16"),
        )
        problem = op.bench_problem(shape, "bfloat16")
        variant = op.variant(problem, op.configs(problem, arch)[0])
        assert code == 0 and out == cli.source_text(variant, target)
    wide = _run(capsys, "source", op.name, "--cols", "100000")[1]
    assert wide == _run(capsys, "source", op.name, "--shape", f"{shape[0]},100000")[1] != out


@pytest.mark.parametrize("local_bytes, code", [(0, 0), (8, 1)])
def test_compile_fails_on_local_memory_of_a_tuned_variant(
    local_bytes, code, capsys, monkeypatch, tmp_path
):
    variant = cupykern.OPS[0].variants("sm_90a")[0]
    rows = [
        gate.Row(variant, "sm_90a", 0.1, 40, None, local_bytes, 1024),
        gate.Row(variant, "sm_120a", 0.1, skipped="too old"),
    ]
    monkeypatch.setattr(gate, "compile_all", lambda tasks, jobs: iter(rows))
    path = tmp_path / "c.json"
    found, out, _ = _run(capsys, "compile", "softmax", "--json", str(path))
    assert found == code and out.endswith(f"2 variants, {code} failed, 1 skipped\n")
    first = json.loads(path.read_text())[0]
    assert (first["local_bytes"], first["failure"] is None) == (local_bytes, code == 0)


def test_compile_shows_what_fails(capsys, monkeypatch):
    seen = []

    def compile_all(tasks, jobs):
        for i, (variant, arch) in enumerate(tasks):
            seen.append((variant, arch))
            yield gate.Row(variant, arch, 0.1, 40, None, 8 if i == 1 else 0, 1024)

    monkeypatch.setattr(gate, "compile_all", compile_all)
    command = ("compile", "softmax", "--arch", "sm_80,gfx942", "--only-failures")
    code, out, _ = _run(capsys, *command)
    assert code == 1 and seen == gate.tasks([cupykern.OPS[0]], ("sm_80", "gfx942"))
    assert len(re.findall(r"^softmax\w*<", out, re.M)) == 1 and "8 bytes of local memory" in out
    monkeypatch.setattr(gate, "compile_all", lambda tasks, jobs: iter(()))
    code, out, _ = _run(capsys, *command)
    assert code == 0 and out.endswith("0 variants, 0 failed, 0 skipped\n")
    code, _, err = _run(capsys, *command, "--again", "1")
    assert code == 2 and "--again and --within need --record" in err


def test_cache_prints_its_size_and_clears(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    kernel = tmp_path / "host" / f"{'0' * 40}.so"
    kernel.parent.mkdir()
    kernel.write_bytes(bytes(3 * 2**20))
    code, out, _ = _run(capsys, "cache")
    assert code == 0 and out == f"{tmp_path}: 3.0 MiB\n" and kernel.exists()
    assert _run(capsys, "cache", "--clear")[1] == f"{tmp_path}: 3.0 MiB removed\n"
    assert not list(tmp_path.iterdir())
    assert "0.0 MiB" in _run(capsys, "cache")[1]


@pytest.mark.parametrize("name", sorted(cli.cli.commands))
def test_every_command_has_help_with_an_example(name, capsys):
    code, out, _ = _run(capsys, name, "--help")
    assert code == 0 and f"Example: cupykern {name}" in out
    for param in cli.cli.commands[name].params:
        if isinstance(param, click.Option):
            assert param.help or param.show_default, f"{name} {param.opts[0]} says nothing"


def test_what_each_command_does_fits_a_line(capsys):
    code, out, _ = _run(capsys, "--help")
    lines = out[out.index("Commands:") :].splitlines()[1:]
    assert code == 0 and [line.split()[0] for line in lines] == sorted(cli.cli.commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


def _subprocess(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "cli.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


def test_cli_py_is_the_command():
    assert cupykern.__version__ in _subprocess("--version").stdout
    wrong = _subprocess("check", "nope")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_without_rich_and_matplotlib():
    code = (
        "import sys; sys.modules['rich'] = sys.modules['matplotlib'] = None\n"
        "sys.stdout.isatty = lambda: True\n"
        "from cupykern.cli import main; sys.exit(main(['list']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "softmax" in done.stdout


def test_a_pipe_gets_no_progress_bar():
    done = _subprocess("bench", "softmax", "--target", "host", "--shapes", "4,8", "--wait")
    assert done.returncode == 0, done.stdout
    assert done.stderr == "" and "\r" not in done.stdout


@pytest.mark.parametrize("command", ["bench", "check"])
def test_a_plot_of_an_unknown_kind_is_refused_before_anything_runs(command, tmp_path, capsys):
    arguments = [command, "softmax", "--target", "host", "--plot", str(tmp_path / "p.txt")]
    assert cli.main(arguments) == 2
    assert ".png or .svg" in capsys.readouterr().err


def test_a_plot_of_nothing_is_no_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "p.svg"
    assert not plot.plot_rows([], str(path)) and not plot.plot_precision([], str(path))
    assert not path.exists()


def test_progress_says_how_much_time_is_left(monkeypatch, capsys):
    """Where stderr is no terminal: a line from time to time."""
    now = iter((0.0, 4.0, 12.0, 13.0, 24.0))
    monkeypatch.setattr(tables.time, "monotonic", lambda: next(now))
    with tables.progress(8, "sweep") as advance:
        for text in ("a", "b", "c", "d"):
            advance(text)
    assert capsys.readouterr().err.splitlines() == [
        "sweep: 2 of 8 in 12 s, about 36 s left  b",
        "sweep: 4 of 8 in 24 s, about 24 s left  d",
    ]


def test_the_first_of_many_parts_says_not_yet_how_much_time_is_left(monkeypatch, capsys):
    """Of kernels, it may have waited for a compiler that first builds its own library."""
    now = iter((0.0, 99.0, 110.0, 121.0))
    monkeypatch.setattr(tables.time, "monotonic", lambda: next(now))
    with tables.progress(60, "compile") as advance:
        for _ in range(3):
            advance()
    assert [", about" in line for line in capsys.readouterr().err.splitlines()] == [
        False,
        False,
        True,
    ]
