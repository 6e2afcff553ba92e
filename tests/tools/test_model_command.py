"""cupykern bench --model, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupykern import targets
from cupykern.cli import main
from cupykern.tools import report, stored
from cupykern.tools.model import measure
from cupykern.tools.model.config import LayerKind, ModelConfig
from cupykern.tools.model.random_weights import random_decoder
from cupykern.tuning import protocol

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--batch", "2", "--context", "5", "--prefill", "3", "--layers", "1", "--rep-ms", "1"]
COMMAND = ["bench", "--target", "host", "--warmup-ms", "0", *TINY, "--model"]


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    """Other tests bench at the same time."""
    monkeypatch.setattr(protocol, "lock_path", lambda: tmp_path / "lock")


@pytest.fixture
def path(tmp_path):
    """A file of two rows."""
    (tmp_path / "of").mkdir()
    path = tmp_path / "of" / "m.json"
    assert main([*COMMAND, "qwen3-8b", "--json", str(path)]) == 0
    return path


def test_what_is_printed(capsys):
    options = ["--weights", "int8", "--cache", "e4m3", "--dtype", "float16"]
    assert main([*COMMAND, "llama3-8b", *options]) == 0
    out, err = capsys.readouterr()
    assert "host emulation: llama3-8b with 1 layers of 128" in err
    assert "1 layers, float16, weights int8, cache e4m3;" in out
    lines = [line.split() for line in out.splitlines() if line.startswith("llama3-8b ")]
    assert [line[1:5] for line in lines] == [
        ["decode", "2", "5", "cupykern"],
        ["prefill", "1", "3", "cupykern"],
    ]
    assert all(line[-1] == "yes" and 0.1 < float(line[-2]) <= 1 for line in lines)


def test_what_is_written(path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs/reference/bench.schema.json").read_text())
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["kind"] == "model"
    model = {"name": "qwen3-8b", "layers": 1, "weights": "16bit", "cache": "16bit"}
    assert document["model"] == model
    assert [(row["op"], row["shape"]) for row in document["rows"]] == [
        ("qwen3-8b decode", [2, 5]),
        ("qwen3-8b prefill", [1, 3]),
    ]


def test_report_has_a_line_for_each_step(path, tmp_path):
    document = stored.read(path)
    decode, prefill = document["rows"]
    document["target"], document["machine"]["device"] = "cuda", "NVIDIA X"
    for row, us in ((decode, 200.0), (prefill, 500.0)):
        row["plain_us"], row["results"][0]["median_us"] = 150.0, us
        peer = {**row["results"][0], "name": "torch.compile", "median_us": 2 * us}
        row["results"].append(peer)
    (tmp_path / "m.json").write_text(stored.to_json(document))
    lines = report.all_tables(tmp_path)["model"].splitlines()
    assert lines[0].startswith("1 layers of `qwen3-8b`, weights 16bit, cache 16bit. NVIDIA X")
    assert lines[-2:] == [
        "| decode | 2 | 5 | 200.0 | 150.0 | 75.0 | 10000 | 400 (2.00x) |",
        "| prefill | 1 | 3 | 500.0 | - | - | 6000 | 1000 (2.00x) |",
    ]
    del document["model"]["cache"]  # as in files that were written before there were formats
    for name, change in (("old", {}), ("e4m3", {"cache": "e4m3"})):
        other = {**document, "model": document["model"] | change}
        (tmp_path / f"{name}.json").write_text(stored.to_json(other))
    heads = [x for x in report.all_tables(tmp_path)["model"].splitlines() if "layers of" in x]
    assert [x.split(". ")[0].rpartition(" ")[2] for x in heads] == ["e4m3", "16bit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama"], "models are llama3-8b"),
        (["--batch", "3"], "are of a --model"),
        (["softmax", "--model", "llama3-8b"], "--model goes with"),
        (["--model", "llama3-8b", "--dtype", "float32"], "float16 or bfloat16"),
        (["--model", "llama3-8b", "--batch", "0"], "positive numbers"),
        (["--model", "llama3-8b", "--target", "host", "--against", "torch.compile"], "a GPU"),
    ],
)
def test_wrong_arguments_are_named_with_exit_code_2(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_step_is_not_timed(monkeypatch, capsys):
    original = measure.function_of

    def wrong(decoder, step, tokens, cache):
        return lambda: original(decoder, step, tokens, cache)() * np.float32(1.02)

    monkeypatch.setattr(measure, "function_of", wrong)
    assert main([*COMMAND, "llama3-8b"]) == 1
    assert " NO" in capsys.readouterr().out


@pytest.mark.parametrize("cache_format, head", [("16bit", 4 * 2), ("int8", 4 + 4)])
def test_work_of_a_step(cache_format, head):
    """Counted by hand, for two sequences of which one token or three are new.

    head: bytes of a key or value, with its scale.
    """
    config = ModelConfig(10, 8, 12, 2, 1, 4, (LayerKind(),) * 3)
    decoder = random_decoder(config, "float16", target="host")
    host, weights = targets.get("host"), 3 * (8 * 16 + 8 * 8 + 3 * 8 * 12)
    for kind, tokens, pairs in (("decode", 7, 7), ("prefill", 3, 6)):
        step = measure.Step(kind, 2, tokens, cache_format)
        cache = measure.made_cache(decoder, step, host)
        found, rows, token = measure.work(decoder, step, cache), 2 * step.count, 3 * 2 * head
        before = 2 * step.start * token
        assert found.bytes_read == 2 * (weights + 10 * 8) + rows * 8 * 2 + before
        assert found.bytes_written == rows * token + 2 * 10 * 4
        assert found.flops == 2 * rows * weights + 2 * 2 * 10 * 8 + 3 * 2 * pairs * 4 * 8
