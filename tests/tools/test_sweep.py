"""Sweeps: failing configs are rows, traces survive kills and crashes, --resume goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_op import Config, Problem, make_op

import cupykern
from cupykern import cli, targets
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import SplitK
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.tools import options, sweep_command, trace
from cupykern.tuning import sweep, timing
from cupykern.tuning.trials import Trial, ranking, short_names

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = sweep.Settings(rep_ms=0, warmup_ms=0, top=2, jobs=2)
FAULTS = ("value", "unwritten", "guard", "raises", "compile")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def op(monkeypatch):
    """Makes an op of these configs the only one."""

    def make(*configs: Config):
        found = make_op(configs=configs)
        for module in (cupykern, cli, options):
            monkeypatch.setattr(module, "OPS", (found,))
        return found

    return make


def run_sweep(op, known=(), grid=None):
    host = targets.get("host")
    subject = sweep.subject(op, (8, 16), "float32", Problem((8, 16)), host, 0, grid)
    return list(sweep.sweep(subject, timing.clock_of(host), SETTINGS, known))


def command(capsys, *args: str) -> tuple[int, str, str]:
    arguments = ("--target", "host", "--dtype", "float32", "--rep-ms", "0", "--in-process")
    code = cli.main(["sweep", "third", *arguments, *args])
    return code, *capsys.readouterr()


def test_what_fails_is_a_row_with_its_reason():
    configs = (Config(1), *(Config(i, fault) for i, fault in enumerate(FAULTS, 2)), Config(9))
    trials = run_sweep(make_op(configs=configs))
    first = {t.config: t for t in trials if not t.final}
    assert set(first) == {repr(config) for config in configs}
    for config in configs:
        trial = first[repr(config)]
        if config.fault is None:
            assert trial.verified and trial.reason is None and trial.median_us > 0 and trial.ratio
            assert 0 < trial.error_over_bound <= 1
        else:
            assert not trial.verified and trial.reason and trial.median_us is None
    assert "nothing" in first[repr(configs[5])].reason  # the compiler's message
    assert {t.config for t in trials if t.final} == {repr(Config(1)), repr(Config(9))}


def test_a_wrong_default_does_not_stop_the_others():
    trials = run_sweep(make_op(configs=(Config(1, "value"), Config(2), Config(3))))
    assert [t.verified for t in trials[:3]] == [False, True, True]
    ranked = ranking(trials)
    assert ranked[-1].reason and ranked[0].verified


def test_the_ranking_puts_the_fast_first():
    trials = run_sweep(make_op(configs=(Config(1, "slow"), Config(2), Config(3, "value"))))
    ranked = ranking(trials)
    assert [t.config for t in ranked] == [
        repr(c) for c in (Config(2), Config(1, "slow"), Config(3, "value"))
    ]
    assert ranked[0].final and ranked[0].ratio < 0.5 and ranked[1].default


def test_a_grid_replaces_fields():
    assert sweep.expand((Config(1), Config(2)), {"block": (2, 5)}) == (
        *(Config(1), Config(2), Config(5)),
    )
    with pytest.raises(ValueError, match="no config has a field 'tile'"):
        sweep.expand((Config(1),), {"tile": (1,)})
    tiled = Sm90GemmConfig(128, 128, 64, 4)
    grid = {"cluster": (sweep.Made("SplitK", (2,)), sweep.Made("PingPong", ())), "splits": (2, 4)}
    found = sweep.expand((tiled, SplitKWorkspace(tiled, 8)), grid)
    split = replace(tiled, cluster=SplitK(2))
    wrapped = (SplitKWorkspace(split, splits) for splits in (2, 4))
    assert found == (tiled, SplitKWorkspace(tiled, 8), split, *wrapped)
    names = short_names(["A(x=1, y=2)", "A(x=1, y=3)", "B(x=1, y=2)"])
    assert list(names.values()) == ["A y=2", "A y=3", "B"]


def test_known_trials_are_not_measured_again():
    op = make_op(configs=(Config(1), Config(2), Config(3)))
    trials = run_sweep(op)
    assert run_sweep(op, trials) == []
    rest = run_sweep(op, trials[:1])
    assert [t.config for t in rest if not t.final] == [repr(Config(2)), repr(Config(3))]
    more = make_op(configs=(Config(1), Config(2), Config(3)))
    rest = run_sweep(more, trials, {"block": (4,)})
    assert [t.config for t in rest if not t.final] == [repr(Config(4))]
    assert any(t.final for t in rest)  # the new one against the best so far


def test_sweep_prints_and_writes_its_trials(op, capsys, tmp_path):
    op(Config(1), Config(2, "value"))
    paths = [str(tmp_path / name) for name in ("t.jsonl", "s.json", "s.csv")]
    code, out, err = command(
        *(capsys, "--shapes", "4,4;8,16", "--sizes", "2,3", "--trace", paths[0]),
        *("--json", paths[1], "--csv", paths[2], "--configs", "block=1,7"),
    )
    assert (code, err) == (0, "")
    assert out.count("host emulation: times are not GPU times") == 4 and "(default)" in out
    document = json.loads(Path(paths[1]).read_text())
    assert document["kind"] == "sweep" and document["machine"]["device"]
    shapes = [t["shape"] for t in document["trials"] if not t["final"]]
    assert shapes[::5] == [[4, 4], [8, 16], [2, 2], [3, 3]] and len(shapes) == 20
    with open(paths[2]) as file:
        assert len(list(csv.DictReader(file))) == len(document["trials"])
    assert trace.read(Path(paths[0]))[1] == trace.read(Path(paths[1]))[1]
    code, _, err = command(capsys, "--trace", paths[0])
    assert code == 1 and "--resume" in err


def test_ctrl_c_and_resume(op, capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    op(Config(1), Config(2), Config(3, "interrupt"), Config(4))
    code, _, err = command(capsys, "--trace", str(path), "--shapes", "8,16")
    assert (code, err) == (130, "interrupted\n")
    before = trace.read(path)[1]
    assert [t.config for t in before] == [repr(Config(1)), repr(Config(2))]
    with path.open("a") as file:
        file.write('{"kind": "trial", "op": "thi')  # as if cut off
    op(Config(1), Config(2), Config(3), Config(4))
    code, out, _ = command(capsys, "--trace", str(path), "--shapes", "8,16", "--resume")
    assert code == 0
    after = trace.read(path)[1]
    assert after[:2] == before and len([t for t in after if not t.final]) == 4


def test_a_trace_of_another_kind_or_device_is_refused(op, capsys, tmp_path):
    op(Config(1))
    path = tmp_path / "t.jsonl"
    path.write_text('{"kind": "bench"}\n')
    code, _, err = command(capsys, "--trace", str(path), "--resume")
    assert code == 1 and "not a trace of a sweep" in err
    path.write_text('{"kind": "sweep", "target": "cuda", "machine": {"device": "NVIDIA H200"}}\n')
    code, _, err = command(capsys, "--trace", str(path), "--resume")
    assert code == 1 and "measured on NVIDIA H200" in err


@pytest.mark.parametrize("grid", ["block", "block=", "=3", "block=x", "block=1;tile"])
def test_grids_that_are_none(grid, op, capsys):
    op(Config(1))
    code, _, err = command(capsys, "--configs", grid)
    assert code == 2 and "--configs must be" in err


def child(tmp_path, faults: str, *args: str) -> subprocess.Popen:
    """`cupykern sweep third` in a process of its own, of configs with these faults."""
    patch = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'support')!r}]\n"
        "import cupykern, fake_op\nfrom cupykern.tools import options\n"
        f"configs = tuple(fake_op.Config(i, f) for i, f in enumerate({faults}))\n"
        "cupykern.OPS = options.OPS = (fake_op.make_op(configs=configs),)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(patch)
    arguments = ("--target", "host", "--dtype", "float32", "--shapes", "8,16", "--rep-ms", "0")
    program = (
        "import signal, sys; from cupykern.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored where our parent "
        "does\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "sweep", "third", *arguments, "--trace", "t.jsonl", *args],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_config_that_crashes_is_a_row(tmp_path):
    done = child(tmp_path, "(None, 'crash', None)")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert f"signal {signal.SIGSEGV}" in err and "going on" in err
    first = [t for t in trace.read(tmp_path / "t.jsonl")[1] if not t.final]
    assert [t.verified for t in first] == [True, False, True]
    assert f"signal {signal.SIGSEGV}" in first[1].reason and first[1].reason in out


def test_a_config_that_hangs_is_a_row(tmp_path):
    done = child(tmp_path, "(None, 'hang', None)", "--timeout", "2")
    _, err = done.communicate(timeout=120)
    assert done.returncode == 0 and "no answer in 2 s" in err
    first = [t for t in trace.read(tmp_path / "t.jsonl")[1] if not t.final]
    assert [t.verified for t in first] == [True, False, True]
    assert first[1].reason == "no answer in 2 s"


def test_ctrl_c_ends_the_guarded_process_too(tmp_path):
    process = child(tmp_path, "[None] + 30 * ['slow']")
    path = tmp_path / "t.jsonl"
    while not path.exists() or '"kind": "trial"' not in path.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("interrupted") == 1 and "Traceback" not in err
    assert trace.read(path)[1]


def test_ctrl_c_for_the_first_process_alone_ends_the_other(tmp_path):
    process = child(tmp_path, "[None] + 3000 * ['slow']")
    path = tmp_path / "t.jsonl"
    while not path.exists() or '"kind": "trial"' not in path.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.count("interrupted") == 1 and "Traceback" not in err


def test_a_killed_sweep_goes_on(tmp_path):
    path = tmp_path / "t.jsonl"
    process = child(tmp_path, "[None] + 30 * ['slow']", "--in-process")
    while not path.exists() or path.read_text().count('"kind": "trial"') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    # The last line may be torn: the process was killed while it wrote.
    before = [line for line in path.read_text().split("\n")[:-1] if '"kind": "trial"' in line]
    assert 2 <= len(before) < 31
    again = child(tmp_path, "[None] + 30 * ['slow']", "--resume", "--in-process")
    assert again.wait(timeout=120) == 0
    after = [line for line in path.read_text().splitlines() if '"kind": "trial"' in line]
    assert after[: len(before)] == before
    first = [t.config for t in trace.read(path)[1] if not t.final]
    assert len(first) == len(set(first)) == 31  # each measured once


def test_clocks_that_fell_are_said_once_for_those_timed_together(capsys):
    fallen = {"sm_mhz": 1875.0, "best_sm_mhz": 1980.0, "power_w": 601.6, "fell": True}
    steady = {**fallen, "sm_mhz": 1980.0, "fell": False}
    one = Trial("third", (8,), "float32", "a", True, verified=True, median_us=1.0, default_us=1.0)
    both = [replace(one, clocks=fallen, final=True), replace(one, config="b", clocks=dict(fallen))]
    sweep_command.show(both, 5, targets.get("host"))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "all of these: the clocks fell to 1875 of 1980 MHz (602 W): timed in turns, so that they "
        "compare"
    )
    sweep_command.show([both[0], replace(both[1], clocks=steady)], 5, targets.get("host"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "a: the clocks fell to 1875 of 1980 MHz (602 W)"


def test_a_slow_config_of_the_host_runs_once(monkeypatch):
    monkeypatch.setattr(sweep, "SLOW_US", 1e3)
    found = make_op(configs=(Config(1), Config(2), Config(3, "slow")))  # 2 ms
    calls = []

    def run(x, **kwargs):
        calls.append(kwargs.get("config"))
        return found.run(x, **kwargs)

    trials = run_sweep(replace(found, run=run))
    (slow,) = (trial for trial in trials if trial.config == repr(Config(3, "slow")))
    assert calls.count(Config(3, "slow")) == 1
    assert slow.verified and slow.runs == 1 and slow.ratio > sweep.OUTLIER and not slow.final
