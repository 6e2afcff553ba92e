"""`reproduce`: every command parses and has its file in results/; failures do not stop the rest."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cupykern import cli
from cupykern.tools import commands_reproduce, reproduce
from cupykern.tools.bench_command import all_peers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("step", reproduce.STEPS, ids=lambda step: step.name)
def test_every_command_parses(step, tmp_path):
    name, *arguments = step.arguments(str(tmp_path))
    command = cli.cli.commands[name]
    context = command.make_context(name, arguments)
    assert set(context.params.get("against") or ()) <= {*all_peers(), "all"}
    for op in context.params.get("ops") or ():
        if context.params.get("dtype_names"):
            for shape in context.params["shapes"] or ():
                for dtype in context.params["dtype_names"]:
                    op.bench_problem(shape, dtype)


def test_profiles_are_of_problems(tmp_path):
    for step in reproduce.chosen(["profile"]):
        command, arguments = cli.cli.commands["profile"], step.arguments(str(tmp_path))[1:]
        params = command.make_context("profile", arguments).params
        (shape,), (dtype,) = params["shapes"], params["dtype_names"]
        assert params["op"].bench_problem(shape, dtype)


def test_every_file_of_results_has_a_step():
    made = {step.file for step in reproduce.STEPS} - {""}
    assert made == {path.name for path in (ROOT / "results").iterdir()}


def test_a_dry_run_prints_commands(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "run", None)
    folder = tmp_path / "measured"
    assert cli.main(["reproduce", "--dry-run", "--results", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert commands == [step.command(str(folder)) for step in reproduce.STEPS]
    assert all("about" in line for line in lines if line.startswith("#"))
    assert not folder.exists()


def test_steps_run_in_order_and_the_rest_after_a_failure(capsys, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(reproduce, "run", lambda step, _: ran.append(step.name) or len(ran) == 1)
    monkeypatch.setattr(commands_reproduce, "count_gpus", lambda: 1)
    names = "parallel_mlp_2,report,matmul,softmax"
    assert cli.main(["reproduce", "--only", names, "--results", str(tmp_path)]) == 1
    assert ran == ["softmax", "matmul", "report"]
    assert capsys.readouterr().err.splitlines() == [
        "need more GPUs: parallel_mlp_2",
        "failed: softmax",
    ]


def test_a_step_that_was_asked_for_and_left_out_is_a_failure(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "run", lambda step, _: 0)
    monkeypatch.setattr(commands_reproduce, "count_gpus", lambda: 0)
    assert cli.main(["reproduce", "--only", "softmax", "--results", str(tmp_path)]) == 1
    assert cli.main(["reproduce", "--results", str(tmp_path)]) == 0
    assert "need more GPUs: check, campaign" in capsys.readouterr().err


def test_an_unknown_step_lists_the_steps(capsys):
    assert cli.main(["reproduce", "--only", "softmaxx"]) == 2
    assert "steps are compile, check, campaign" in capsys.readouterr().err
