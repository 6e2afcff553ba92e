"""Tuned configs: who wins, what invalidates them, a store that survives what happens to files."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_op import Config, make_op
from hypothesis import given
from hypothesis import strategies as st

import cupykern
from cupykern import OPS, cli, targets
from cupykern.op import Call, Op, as_tuple
from cupykern.runtime import choice, plans, store
from cupykern.tools import options, stored
from cupykern.tools.trace import document
from cupykern.tuning import sweep, winners
from cupykern.tuning import trials as trials_module
from cupykern.tuning import tune as tuning
from cupykern.tuning.trials import Trial

ROOT = Path(__file__).resolve().parents[2]
SLOW, FAST, WRONG = Config(1, "slow"), Config(2), Config(3, "value")
X = np.ones((8, 16), np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPYKERN_TUNE", raising=False)
    plans.clear()
    yield tmp_path
    plans.clear()


@pytest.fixture
def op(monkeypatch):
    found = make_op(configs=(SLOW, FAST, WRONG))
    for module in (cupykern, cli, options):
        monkeypatch.setattr(module, "OPS", (found,))
    return found


def chosen(op, x=X) -> str:
    """The config that a call gets."""
    request = sweep.first_request(op, Call((x,)))
    return repr(request.family.config(request.task, request.target))


def test_the_winner_is_kept_and_used(op, monkeypatch):
    assert chosen(op) == repr(SLOW)
    assert tuning.tune(op, X) == repr(FAST)
    assert chosen(op) == repr(FAST)
    (row,) = store.rows().values()
    assert row["default_us"] > 2 * row["median_us"] and row["configs"] == 3
    store.reload()  # as another process
    assert chosen(op) == repr(FAST)
    assert chosen(op, np.ones((8, 15), np.float32)) == repr(FAST)  # 120: the bucket of 128
    assert chosen(op, np.ones((8, 32), np.float32)) == repr(SLOW)
    monkeypatch.setenv("CUPYKERN_TUNE", "0")
    assert chosen(op) == repr(SLOW)
    monkeypatch.setenv("CUPYKERN_TUNE", "yes")
    with pytest.raises(ValueError, match="CUPYKERN_TUNE must be one of"):
        chosen(op)


def test_a_changed_kernel_invalidates_its_rows(op):
    tuning.tune(op, X)
    changed = replace(op, variant=op.variant)
    (key,) = store.rows()
    store.put({key: {**store.rows()[key], "digest": "0" * 16}})
    assert chosen(changed) == repr(SLOW)


def test_digests_follow_the_source(monkeypatch):
    def digest(text: str) -> str:
        store.digest.cache_clear()
        monkeypatch.setattr(store, "file_text", lambda name: text if name == "a.cu" else name)
        return store.digest("cuda", (("a", ""),))

    assert digest("x") == digest("x") != digest("y")
    assert store.digest("cuda", (("a", ""),)) != store.digest("hip", (("a", ""),))
    store.digest.cache_clear()


def test_a_config_that_the_space_lacks_is_not_used(op):
    tuning.tune(op, X)
    (key,) = store.rows()
    store.put({key: {**store.rows()[key], "config": "Config(block=77, fault=None)"}})
    assert chosen(op) == repr(SLOW)


def test_built_in_rows_are_asked_last(op, monkeypatch, tmp_path):
    trials = []
    request = sweep.first_request(op, Call((X,)))
    _, _ = winners.tune_request(
        op, Call((X,)), request, targets.get("host"), winners.SETTINGS, (8, 16), "float32",
        trials.append,
    )  # fmt: skip
    store.forget()
    monkeypatch.setattr(store, "BUILT_IN", tmp_path / "built_in.json")
    rows = winners.write_built_in(trials).rows
    try:
        assert [row["config"] for row in rows.values()] == [repr(FAST)]
        assert chosen(op) == repr(FAST)
        store.put({request.key: {"config": repr(WRONG), "digest": request.digest}})
        assert chosen(op) == repr(WRONG)
        monkeypatch.setenv("CUPYKERN_TUNE", "0")
        assert chosen(op) == repr(FAST)
    finally:
        store.built_in.cache_clear()


@dataclass(frozen=True)
class Number:
    value: int


def numbers(configs, refusal=lambda config, task, device: None):
    """A family whose tasks are numbers."""
    traits = lambda task: ({"size": task}, {})  # noqa: E731
    return choice.Family("f", (Number,), configs, refusal, None, traits)


def test_a_config_is_a_function_of_the_task_alone():
    """Tasks of one bucket of sizes share no config."""
    family = numbers(lambda task, device: (Number(task),))
    for task in (1000, 999, 1000, 7):
        assert family.config(task, targets.get("host")) == Number(task)


def test_a_chosen_config_that_is_not_legal_is_an_internal_error():
    family = numbers(lambda task, device: (Number(1),), lambda config, task, device: "too slow")
    with pytest.raises(choice.InternalError, match=r"f: Number.* was chosen for 5: too slow"):
        family.config(5, targets.get("host"))
    with pytest.raises(ValueError, match="config does not fit: too slow"):
        family.config(5, targets.get("host"), Number(2))
    with pytest.raises(TypeError, match="config must be a Number"):
        family.config(5, targets.get("host"), "none such")


def test_a_task_is_a_value():
    with pytest.raises(TypeError, match="unhashable"):
        numbers(lambda task, device: (Number(1),)).config([1], targets.get("host"))


def test_built_in_rows_are_whole():
    for row in store.built_in().values():
        assert row["median_us"] < row["default_us"]


def test_the_default_stays_unless_another_is_clearly_faster():
    trial = Trial("third", (8,), "float32", "a", True, verified=True, median_us=100.0)
    trial.default_us = 100.0
    other = replace(trial, config="b", default=False, median_us=99.0)
    assert winners.winner([other, trial]) is trial
    other.median_us = 97.0
    assert winners.winner([other, trial]) is other
    assert winners.winner([replace(trial, reason="wrong")]) is None


def test_of_problems_that_share_a_row_the_one_that_gains_most_counts():
    default = Trial("third", (8,), "float32", "a", True, "third size=8", "0", verified=True)
    default.median_us = default.default_us = 100.0
    trials = []
    for size, config, median_us in ((8, "b", 80.0), (7, "c", 60.0), (6, "d", 70.0)):
        trials += [replace(default, shape=(size,))]
        trials += [
            replace(default, shape=(size,), config=config, default=False, median_us=median_us)
        ]
    (row,) = winners.worth_of_sweeps(trials).rows.values()
    assert (row["config"], row["median_us"]) == ("c", 60.0)


def test_finalists_come_first_and_what_is_wrong_last():
    """A time in the finals is one beside the other best ones."""
    trial = Trial("third", (8,), "float32", "a", verified=True, default_us=100.0)
    found = [
        replace(trial, config="wrong", verified=False, median_us=1.0),
        replace(trial, config="not timed"),
        replace(trial, config="early", median_us=40.0),
        replace(trial, config="final", median_us=60.0, final=True),
        replace(trial, config="better", median_us=30.0),
        replace(trial, config="better", median_us=50.0, final=True),
    ]
    names = [trial.config for trial in trials_module.ranking(found)]
    assert names[:3] == ["better", "final", "early"] and set(names[3:]) == {"wrong", "not timed"}


def test_tune_refuses_what_is_no_op():
    with pytest.raises(ValueError, match="op must be one of softmax"):
        cupykern.tune("softmaks", X)
    with pytest.raises(TypeError, match="function or name"):
        cupykern.tune(3, X)
    with pytest.raises(TypeError, match="arrays"):
        cupykern.tune("softmax")
    assert tuning.find_op(cupykern.nonfinite_report).name == "nonfinite_report"
    assert tuning.find_op(cupykern.softmax).name == "softmax"


def test_only_right_configs_win(monkeypatch):
    op = make_op(configs=(WRONG, Config(4, "raises")))
    with pytest.raises(RuntimeError, match="no config of third is right"):
        tuning.tune(op, X)
    assert not store.rows()


def test_tuned_at_first(op):
    calls = tuning.tuned_at_first(op, op.run)
    calls(X)
    assert [row["config"] for row in store.rows().values()] == [repr(FAST)]
    before = store.path().read_bytes()
    calls(X)
    calls(X, config=SLOW)
    assert store.path().read_bytes() == before
    (key,) = store.rows()
    store.put({key: {**store.rows()[key], "digest": "0" * 16}})
    plans.clear()
    calls(X)
    assert store.rows()[key]["digest"] != "0" * 16


# --- every op ------------------------------------------------------------------------------------


def small_problem(op: Op) -> Any:
    shape = op.bench_shapes("host")[0]
    shape = {2: (8, 1024), 3: (32, 64, 128)}.get(len(shape), shape)
    return op.bench_problem(shape, op.dtypes[0])


CONFIGURABLE = [op for op in OPS if op.configs(small_problem(op), "host") != (None,)]


@pytest.mark.parametrize("op", CONFIGURABLE, ids=lambda op: op.name)
def test_every_op_takes_a_config_and_asks_for_a_tuned_one(op):
    problem = small_problem(op)
    assert "config" in inspect.signature(op.run).parameters
    call = op.inputs(problem, 0, np)
    with pytest.raises((TypeError, ValueError)):
        op.run(*call.args, **call.kwargs, config="none such")
    request = sweep.first_request(op, call)
    assert request is not None and len(request.digest) == 16
    assert targets.get("host").arch in request.key
    assert request.configs() == op.configs(problem, "host")  # what a sweep tries is what tune does
    again = op.run(*call.args, **call.kwargs, config=request.configs()[0])
    for y, z in zip(as_tuple(op.run(*call.args, **call.kwargs)), as_tuple(again), strict=True):
        assert y.tobytes() == z.tobytes()


# --- the store -----------------------------------------------------------------------------------


@given(st.integers(0, 10**9))
def test_buckets_are_at_most_a_quarter_larger(size):
    top = choice.bucket(size)
    assert size <= top <= max(size, 1.25 * size + 1)
    assert choice.bucket(top) == top


def test_usual_sizes_are_tops_of_buckets():
    for size in (1, 2, 3, 4, 64, 4096, 5120, 7168, 8192, 14336, 16384):
        assert choice.bucket(size) == size


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"version": 0}', '{"version": 1, "rows": {"a": 1}}', "\xff\xfe"]
)
def test_a_broken_store_is_set_aside(text, folder):
    store.path().write_text(text, encoding="latin-1")
    store.reload()
    with pytest.warns(RuntimeWarning, match="holds no tuned configs"):
        assert store.rows() == {}
    assert not store.path().exists()
    (aside,) = folder.glob("tuned-1.json.broken-*")
    assert aside.read_text(encoding="latin-1") == text
    store.put({"a": {"config": "x", "digest": "y"}})
    assert list(store.rows()) == ["a"]


def test_a_store_that_cannot_be_written_is_no_error_to_read(monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", "/proc/nowhere")
    store.reload()
    assert store.rows() == {}
    with pytest.raises(OSError):
        store.put({})


def _put(folder: str, name: str) -> None:
    os.environ["CUPYKERN_CACHE_DIR"] = folder
    for i in range(20):
        store.put({f"{name}{i}": {"config": "x", "digest": "y"}})


def test_two_processes_write_at_once(folder):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put, args=(str(folder), name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    store.reload()
    assert len(store.rows()) == 40
    assert {path.name for path in folder.glob("tuned*")} <= {"tuned-1.json", "tuned-1.json.lock"}


# --- the command ----------------------------------------------------------------------------------


def test_tune_keeps_and_lists_the_fastest_right_config(op, capsys, folder):
    arguments = ["--target", "host", "--shapes", "8,16", "--dtype", "float32", "--rep-ms", "0"]
    path = folder / "t.json"
    assert cli.main(["tune", "third", *arguments, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"kept: {FAST!r}\n" in out and "value" in out
    document = json.loads(path.read_text())
    assert document["kind"] == "tune" and document["kept"] == stored.plain_json(store.rows())
    configs = {trial["config"]: trial["reason"] is None for trial in document["trials"]}
    assert configs == {repr(SLOW): True, repr(FAST): True, repr(WRONG): False}
    assert cli.main(["tune", "--list"]) == 0
    out = capsys.readouterr().out
    assert "1 tuned configs" in out and "size=128" in out
    assert store.forget("another") == 0
    assert cli.main(["tune", "third", "--list"]) == 0 and "size=128" in capsys.readouterr().out
    assert cli.main(["tune", "--forget", "third"]) == 0
    assert "1 tuned configs removed" in capsys.readouterr().out
    assert cli.main(["tune"]) == 2


def test_host_sweeps_do_not_become_built_in_rows(op, capsys, tmp_path):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"kind": "sweep", "target": "host", "trials": []}))
    assert cli.main(["tune", "--built-in", str(path)]) == 1
    assert "host emulation" in capsys.readouterr().err


def test_what_sweeps_are_worth_is_said(capsys, monkeypatch, tmp_path):
    """Problems where another config wins, where the default does, about or exactly, or neither."""
    monkeypatch.setattr(store, "BUILT_IN", tmp_path / "built_in.json")
    default = Trial("third", (8,), "float32", "a", True, "third size=8", "0", verified=True)
    default.median_us = default.default_us = 100.0
    other = replace(default, config="b", default=False, median_us=80.0)
    wrong = {"verified": False, "reason": "wrong"}
    trials = [
        *(default, other),
        *(
            replace(default, shape=(16,), key="third size=16"),
            replace(other, shape=(16,), median_us=99.0)
        ),
        replace(default, shape=(32,), key="third size=32"),
        *(replace(default, shape=(64,), **wrong), replace(other, shape=(64,), default_us=None)),
        *(replace(default, shape=(128,), key=""), replace(other, shape=(128,), key="")),
    ]  # fmt: skip
    path = tmp_path / "s.json"
    path.write_text(json.dumps(document({"kind": "sweep", "target": "cuda"}, trials)))
    try:
        assert cli.main(["tune", "--built-in", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].split() == ["third", "size=8", "b", "80.0", "1.250x"]
        assert lines[3:6] == [
            "problems whose default config is the best, or less than 2% behind: 2",
            "problems whose default config is not right: 1",
            "problems that ask for no tuned config: 1",
        ]
        assert lines[6] == f"{store.BUILT_IN}: 1 configs"
        assert [row["config"] for row in store.built_in().values()] == ["b"]
    finally:
        store.built_in.cache_clear()


def test_a_warm_call_does_not_ask(monkeypatch):
    """Neither the store nor choose is asked again by a plan that is known."""
    x = np.ones((4, 64), np.float32)
    cupykern.softmax(x)
    asked = []
    monkeypatch.setattr(choice.Family, "config", lambda *given: asked.append(given))
    cupykern.softmax(x)
    cupykern.softmax(x, scale=1.0)
    assert not asked


def test_first_calls_tune_where_the_environment_says_so():
    code = "import cupykern; print(cupykern.softmax.__wrapped__.__wrapped__.__name__)"
    for mode, found in (("1", "softmax\n"), ("readonly", "")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "CUPYKERN_TUNE": mode},
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.stdout == found


def test_importing_does_not_load_the_tools():
    code = (
        "import sys, cupykern; "
        "print([m for m in ('cupykern.tuning.sweep', 'cupykern.tools.bench', "
        "'multiprocessing.pool', 'filelock') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr
