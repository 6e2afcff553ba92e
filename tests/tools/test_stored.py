"""Stored measurements: what is written is read back, and what follows from it is worked out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cupykern.tools import stored
from cupykern.tuning.contender import NO_SUCH_FUNCTION

ROOT = Path(__file__).resolve().parents[2]
OURS = {
    "name": "cupykern", "median_us": 20.123456, "q20_us": 20.0, "q80_us": float("inf"), "runs": 9,
    "error_over_bound": 0.5, "verified": True, "note": None, "parts_us": None, "gbps": 1.0,
}  # fmt: skip
ABSENT = {**dict.fromkeys(OURS), "name": "torch", "runs": 0, "verified": False, "note": "absent"}
ROW = {
    "op": "softmax", "shape": (4, 8), "dtype": "float16", "problem": "P()", "bytes_read": 1000,
    "bytes_written": 1000, "flops": 0, "plain": "copy", "plain_us": 10.0, "clocks": None,
    "repeats": [], "results": [OURS, ABSENT],
}  # fmt: skip


def test_a_benchmark_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "b.json"
    path.write_text(stored.to_json({"kind": "bench", "date": "now", "rows": [ROW]}))
    assert len(path.read_text().splitlines()) == 8  # a record a line
    (row,) = stored.read(path)["rows"]
    ours, absent = row["results"]
    assert ours["median_us"] == 20.123 and ours["verified"] and ours["note"] is None
    assert ours["q80_us"] == "inf"
    assert ours["gbps"] == pytest.approx(2000 / 20.123 / 1e3) and ours["tflops"] is None
    assert ours["speed_percent"] == pytest.approx(100 * 10 / 20.123)
    assert not absent["verified"] and absent["note"] == "absent" and absent["gbps"] is None


def test_an_unverified_result_without_a_note_stays_unverified():
    wrong = {**OURS, "verified": False}
    text = stored.to_json({"kind": "bench", "rows": [{**ROW, "results": [wrong]}]})
    (result,) = stored.unpack(json.loads(text))["rows"][0]["results"]
    assert not result["verified"]


def test_of_what_is_not_verified_the_reason_is_kept():
    """Unless the error says it, or the library has no such function."""
    wrong = {**OURS, "verified": False, "error_over_bound": 2.0, "note": "error/bound 2"}
    lacks = {**ABSENT, "note": NO_SUCH_FUNCTION}
    row = {**ROW, "results": [wrong, ABSENT, {**lacks, "name": "cupy"}]}
    document = stored.pack({"kind": "bench", "rows": [row]})
    assert document["rows"][0]["notes"] == {"cupykern": "", "torch": "absent"}
    again = stored.pack(stored.unpack(document))
    assert again["rows"][0]["notes"] == document["rows"][0]["notes"]


def test_a_profile_is_read_as_it_was_written(tmp_path):
    """Labels and units stand once; a launch lacks what its profiler did not count."""
    first = {"kernel": "a", "figures": [["time", 2.5, "us"], ["blocks", 8.0, ""]], "stalls": []}
    other = {"kernel": "b", "figures": [["blocks", 4.0, ""], ["L2 hits", 90.0, "%"]], "stalls": []}
    profile = {"op": "softmax", "shape": [4, 8], "launches": [first, other]}
    document = {"kind": "profile", "profiles": [profile, {**profile, "launches": []}]}
    path = tmp_path / "p.json"
    path.write_text(stored.to_json(document))
    assert stored.read(path) == document and path.read_text().count('"blocks"') == 1


def test_a_check_is_read_as_it_was_written(tmp_path):
    """The names of figures stand once; ops without a case have none."""
    one = {"op": "softmax", "dtype": "float16", "cases": 3, "failed": 0}
    summary = [{**one, "worst": {"ulps": 2.5, "max_abs": 1.0}}, {**one, "cases": 0, "worst": None}]
    path = tmp_path / "c.json"
    for found in (summary, summary[1:]):
        document = {"kind": "check", "summary": found, "failures": []}
        path.write_text(stored.to_json(document))
        assert stored.read(path) == document and path.read_text().count('"ulps"') <= 1


def test_broken_files_name_themselves(tmp_path):
    path = tmp_path / "b.json"
    for text in ("{", '{"kind": "bench", "columns": [], "rows": [{"op": "a"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"b\.json"):
            stored.read(path)


def test_committed_measurements_and_pages_are_small():
    docs = ROOT / "docs"
    found = [*ROOT.glob("results/*"), *docs.glob("*.svg"), docs / "results.md"]
    assert sum(path.stat().st_size for path in found) < 300_000
