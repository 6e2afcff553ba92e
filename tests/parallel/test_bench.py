"""cupykern bench --parallel, on two MPI ranks of the host target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mpi_jobs import run

from cupykern.cli import main
from cupykern.tools import stored

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["--target", "host", "--rep-ms", "1", "--warmup-ms", "0", "--layers", "1", "--wait"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(what was printed, the file)."""
    path = tmp_path_factory.mktemp("bench") / "p.json"
    command = "bench", "--parallel", "all", *COMMAND, "--json", str(path)
    job = run(2, str(ROOT / "cli.py"), *command)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout, path


def test_rows_are_verified_on_one_rank_and_on_all(done):
    rows = {row["op"]: row for row in stored.read(done[1])["rows"]}
    assert list(rows) == ["mlp", "ring_attention", "llama3-8b decode"]
    for row in rows.values():
        assert [result["name"] for result in row["results"]] == ["cupykern", "cupykern, 1 rank"]
        for result in row["results"]:
            assert result["verified"] and result["median_us"] > 0
            assert 0 < result["error_over_bound"] <= 1


def test_bytes_sent_are_those_of_the_guide(done):
    """Of the rank that sends most.  Few rows of sums: all of them, FP32, to the other rank."""
    mlp, ring, decode = (row["bytes_sent"] for row in stored.read(done[1])["rows"])
    assert mlp == 64 * 3 * 4
    assert ring == 64 // 2 * 2 * (32 + 32) * 2
    assert decode == 2 * 2 * 128 * 4  # two sums of a row in each of two layers


def test_one_rank_prints(done):
    lines = [line for line in done[0].splitlines() if line.startswith("mlp ")]
    assert len(lines) == 1 and lines[0].split()[-1] == "yes"
    assert "efficiency: time on 1 rank / (2 x time on 2)" in done[0]


def test_what_is_written(done):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs/reference/bench.schema.json").read_text())
    document = json.loads(done[1].read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["parallel"] == {"ranks": 2, "graphs": False, "model": "llama3-8b"}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--parallel", "mpl"], "--parallel: unknown step 'mpl'; all, mlp, attention, decode"),
        (["--parallel", "mlp", "--against", "quack"], "unknown library 'quack'"),
        (["--parallel", "mlp", "--weights", "int8"], "--parallel goes with"),
        (["softmax", "--parallel", "mlp"], "--parallel goes with"),
    ],
)
def test_wrong_options_are_named_with_exit_code_2(capsys, options, message):
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err
