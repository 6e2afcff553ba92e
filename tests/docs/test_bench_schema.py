"""What bench --json writes is what docs/reference/bench.schema.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupykern.cli import main
from cupykern.tools.stored import COLUMNS

jsonschema = pytest.importorskip("jsonschema")
ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs/reference/bench.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["columns"]["const"] == list(COLUMNS)


def test_what_is_written(tmp_path):
    path = tmp_path / "b.json"
    options = ["--target", "host", "--shapes", "8,64", "--dtype", "float16", "--rep-ms", "1"]
    assert main(["bench", "softmax", *options, "--repeats", "2", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    VALIDATOR.validate(document)
    assert len(document["rows"][0]["repeats"]) == 2


def test_committed_results_hold_the_schema():
    documents = [json.loads(path.read_text()) for path in sorted((ROOT / "results").glob("*.json"))]
    benches = [document for document in documents if document.get("kind") == "bench"]
    assert len(benches) > 10
    for document in benches:
        VALIDATOR.validate(document)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("rows"),
        lambda document: document.update(speed=3),
        lambda document: document["rows"][0]["results"]["cupykern"].pop(),
        lambda document: document["rows"][0].update(flops="many"),
    ],
)
def test_what_is_refused(change):
    document = json.loads((ROOT / "results/softmax.json").read_text())
    change(document)
    assert not VALIDATOR.is_valid(document)
