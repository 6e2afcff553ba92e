"""README's tables against the committed results."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from result_documents import DOCUMENT, result_row

from cupykern import cli
from cupykern.tools import headline, report, stored
from cupykern.tools.suite import summary

ROOT = Path(__file__).resolve().parents[2]


SITE_TABLE = "<!-- table of the site: softmax -->\n"
README = "# t\n\n<!-- table: softmax -->\nold\n<!-- end -->\n\ntext\n"


def test_readme_matches_the_committed_results():
    pages = [ROOT / "README.md", ROOT / "docs" / "results.md"]
    texts, wanted = report.report(pages, ROOT / "results")
    assert texts == wanted, "run `python cli.py report`"


def test_the_pictures_are_of_the_committed_results():
    for name, text in report.pictures(ROOT / "results").items():
        assert (ROOT / "docs" / name).read_text() == text, "run `python cli.py report`"


def test_the_headline_is_the_geometric_mean_over_the_fastest_library():
    rows = [
        {**DOCUMENT["rows"][0], "results": [result_row("cupykern", 20.0), *peers]}
        for peers in (
            [result_row("torch", 40.0), result_row("quack", 80.0)],
            [result_row("torch", 10.0)],
            [],
        )
    ]
    found = headline.line("softmax", rows)
    assert found.speedups == (2.0, 0.5) and found.speedup == pytest.approx(1.0)
    assert found.ahead == 1 and found.copy == pytest.approx(90)
    assert headline.table([found])[1] == (
        *("`softmax`", "FP16", "torch, QuACK", "90% of copy bandwidth", "1.00", "1 of 2"),
    )
    assert headline.line("softmax", []) is None


def test_the_headline_has_products_of_fp32_apart():
    row = {**DOCUMENT["rows"][0], "flops": 2**30, "results": [result_row("cupykern", 20.0)]}
    row["results"][0]["tflops"] = 300.0
    rows = [{**row, "dtype": dtype} for dtype in ("float16", "float32", "float32:fma")]
    assert [one.label for one in headline.lines("matmul", rows)] == ["matmul", "matmul FP32"]
    assert [one.label for one in headline.lines("matmul", rows[1:])] == ["matmul"]


def test_the_headline_counts_no_rows_of_a_named_precision():
    row = {**DOCUMENT["rows"][0], "flops": 2**30}
    names = "float32", "float32:tf32", "float32:fma", "float32:bias+tf32"
    rows = [{**row, "dtype": name} for name in names]
    (line,) = headline.lines("matmul", rows)
    assert len(line.speedups) == 1
    assert headline.lines("matmul", rows[1:]) == []


def test_the_headline_lists_ops_without_results():
    written = report.tables([DOCUMENT])[report.HEADLINE]
    assert "| `merge_attention` | FP16, BF16, FP32 | - | not benchmarked | - | - |" in written
    assert "| `matmul` | complex64 | - | not benchmarked | - | - |" in written


def test_tables_have_times_rates_and_peers():
    (written,) = report.update([README], report.tables([DOCUMENT]))
    lines = written.splitlines()
    assert "NVIDIA H200, CuPy 14.2.0, NVRTC 13.0, 2026-01-02." in lines
    assert "| shape | dtype | µs | GB/s | % of floor | torch, µs |" in lines
    row = "| 4096 x 4096 | float16 | 20.0 | 200.0 | 90.0 | 50.0 (2.50x), error 7.00 x bound |"
    assert row in lines
    assert lines[-1] == "text" and "old" not in written
    assert report.update([written], report.tables([DOCUMENT])) == [written]


def test_the_summary_marks_peers_beyond_the_bound():
    (written,) = report.update(
        [README + "<!-- table: summary -->\n<!-- end -->\n"], report.tables([DOCUMENT])
    )
    assert (
        "| `softmax` | float16 | torch* | 1 | 90 | 2.50 / 2.50 / 2.50 |" in written
    )  # beyond the bound
    right = copy.deepcopy(DOCUMENT)
    right["rows"][0]["results"][1] = result_row("torch", 50.0)
    assert "| `softmax` | float16 | torch | 1 |" in report.tables([right])["summary"]


def test_the_summary_does_not_hide_what_is_wrong():
    wrong = copy.deepcopy(DOCUMENT)
    wrong["rows"][0]["results"] = [result_row("cupykern", 20.0, 1.5)]
    wrong["rows"][0]["dtype"] = "float16*int8"
    table = report.tables([wrong])["summary"]
    assert "| `softmax` | float16*int8 | - | 1, 1 wrong | 90 | - |" in table
    assert "misses our error bound" not in table  # that is of peers


@pytest.mark.parametrize(
    "dtype, flops, floor",
    [
        ("float16", 0, 18.0),
        ("float16", 989.5e8, 100.0),
        ("float16*float8_e4m3fn:bias", 989.5e8, 100.0),
        ("float8_e4m3fn:rows", 989.5e8, 50.0),
        ("float4_e2m1fn", 989.5e8, 100.0),
        ("int8", 989.5e6, 18.0),
    ],
)
def test_the_floor_is_the_longer_of_bytes_and_operations(dtype, flops, floor):
    row = {"dtype": dtype, "flops": flops, "plain_us": 18.0}
    assert report.floor_us("NVIDIA H200", row) == pytest.approx(floor)
    assert report.floor_us("another", row) == 18.0


def test_the_latest_result_of_a_row_counts():
    later = copy.deepcopy(DOCUMENT)
    later["date"] = "2026-02-01T00:00:00+00:00"
    later["rows"][0]["results"] = [result_row("cupykern", 19.0)]
    table = report.tables([DOCUMENT, later])["softmax"]
    assert "| 19.0 |" in table and "| 20.0 |" not in table and "torch" not in table


def test_rows_stand_as_the_bench_has_them_whenever_they_were_measured():
    """Two files of one op, the older one with shapes that come later in the bench's list."""
    documents = []
    for shapes in (([2048, 262144], [7, 7]), ([32768, 1024], [4096, 4096])):
        rows = [DOCUMENT["rows"][0] | {"shape": shape} for shape in shapes]
        documents.append(DOCUMENT | {"rows": rows})
    table = report.tables(documents)["softmax"]
    order = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    expected = ["4096 x 4096", "32768 x 1024", "2048 x 262144", "7 x 7"]
    assert order[2:] == [f"| {shape}" for shape in expected]


def test_host_time_has_its_own_table():
    text = README + "<!-- table: host time -->\n<!-- end -->\n"
    (written,) = report.update([text], report.tables([DOCUMENT]))
    assert "| softmax | 11.5 | 5.00 | 2.00 |" in written


def test_host_times_stand_as_the_ops_do():
    times = dict.fromkeys(("matmul", "gone", "softmax"), DOCUMENT["host_time_us"]["softmax"])
    table = report.tables([DOCUMENT | {"host_time_us": times}])["host time"]
    ops = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
    assert ops == ["op", "softmax", "matmul", "gone"]


def test_profiles_have_a_table_of_the_latest_of_each_call(tmp_path):
    call = {"op": "matmul", "shape": [4, 8, 16], "dtype": "float16"}
    for day, busy, launches in (("02", 80.0, 1), ("01", 70.0, 1), ("03", 60.0, 0)):
        launch = {"figures": [["tensor cores busy", busy, "%"]], "stalls": [["a barrier", 0.5]]}
        profile = {**call, "launches": [launch] * launches}
        document = {"kind": "profile", "target": "cuda", "date": day, "profiles": [profile]}
        (tmp_path / f"{day}.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: profiles -->\n<!-- end -->\n")
    (written,) = report.report([page], tmp_path)[1]
    assert (
        "| matmul | 4 x 8 x 16 | float16 | a barrier (50%) | - | 80.0 | - | - | - | - |" in written
    )
    assert "70.0" not in written and "60.0" not in written


def test_sensitivity_has_a_table_of_the_latest_of_each_device(tmp_path):
    row = {
        "op": "softmax", "dtype": "float16", "shape": [8, 9], "result": "float16", "rms": 1.0,
        "unit": "relative", "random": 11, "one_sign": 12, "single": 0.97,
    }  # fmt: skip
    for day, target, s in (("02", "host", 11), ("01", "host", 10), ("03", "cuda", 9)):
        document = {
            "kind": "sensitivity", "date": f"2026-01-{day}T00", "target": target,
            "machine": {"device": "NVIDIA H200"}, "rows": [{**row, "random": s}],
        }  # fmt: skip
        (tmp_path / f"{day}.json").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("<!-- table: sensitivity -->\n<!-- end -->\n")
    (written,) = report.report([page], tmp_path)[1]
    assert "Host target, 2026-01-02." in written and "NVIDIA H200, 2026-01-03." in written
    assert "| softmax | float16 | 8 x 9 | float16 | 1.00 | 2^-11 | 2^-12 | 97.0% |" in written
    assert "2^-9 |" in written and "2^-10" not in written


def test_a_suite_has_a_table_of_the_share_of_shapes_ahead(tmp_path):
    """Of the latest run of each seed, also without its rows; they are in no op's table."""
    times = ((100.0, 200.0), (100.0, 97.5), (100.0, 50.0), (100.0, None))
    for day, seed, scale in (("02", 0, 1.0), ("01", 0, 9.0), ("01", 1, 2.0)):
        rows = [
            DOCUMENT["rows"][0]
            | {
                "results": [
                    result_row("cupykern", ours),
                    *([result_row("torch", scale * peer)] if peer else [])
                ]
            }
            for ours, peer in times
        ]  # fmt: skip
        alone = [DOCUMENT["rows"][0] | {"op": "quantize", "results": [result_row("cupykern", 1.0)]}]
        document = DOCUMENT | {
            "kind": "suite", "date": f"2026-01-{day}T00", "rows": rows + alone,
            "suite": {"name": "models", "seed": seed, "rows": 12},
            "summary": [asdict(line) for line in summary.lines(rows + alone)],
        }  # fmt: skip
        if seed:  # as committed files have it
            document["rows"] = []
        (tmp_path / f"{day}_{seed}.json").write_text(stored.to_json(document))
    page = tmp_path / "page.md"
    page.write_text(README + "<!-- table: suite -->\n<!-- end -->\n")
    (written,) = report.report([page], tmp_path)[1]
    assert "Suite `models`, seed 0. NVIDIA H200, CuPy 14.2.0, NVRTC 13.0, 2026-01-02." in written
    assert "| `softmax` | float16 | 3 | 33% | 33% | 33% | 0.992 |" in written
    assert "| `softmax` | float16 | 3 | 100% | 0% | 0% | 1.98 |" in written and "seed 1" in written
    assert written.count("`softmax`") == 2 and "quantize" not in written
    assert "Not measured yet." in written.partition("text")[0]


def test_a_table_of_the_site_is_not_committed(tmp_path):
    text = README.replace("<!-- table: softmax -->\nold\n<!-- end -->", SITE_TABLE)
    (page := tmp_path / "page.md").write_text(text)
    (tmp_path / "h200.json").write_text(json.dumps(DOCUMENT))
    assert report.report([page], tmp_path)[1] == [text]
    assert "| 4096\u00a0x\u00a04096 | float16 | 20.0 |" in report.on_site(text, tmp_path)
    with pytest.raises(ValueError, match="no op for the table 'softmaks'"):
        report.update([text.replace("softmax", "softmaks")], {})


def test_a_table_without_results_says_so():
    assert "Not measured yet." in report.update([README], {})[0]


@pytest.mark.parametrize(
    "text, says",
    [
        ("<!-- table: softmax -->\n", "lacks"),
        (README.replace("softmax", "softmaks"), "softmaks"),
        ("nothing\n", "no '<!-- table: softmax"),
    ],
)
def test_markers_that_do_not_fit(text, says):
    with pytest.raises(ValueError, match=says):
        report.update([text], report.tables([DOCUMENT]))


def test_report_writes_the_pages_and_check_finds_a_difference(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("<!-- table: summary -->\n<!-- end -->\n")
    Path("docs").mkdir()
    Path("docs/results.md").write_text(README)
    Path("results").mkdir()
    Path("results/h200.json").write_text(json.dumps(DOCUMENT))
    Path("results/host.json").write_text(json.dumps({**DOCUMENT, "target": "host"}))
    Path("results/other.json").write_text("[]")
    assert cli.main(["report", "--check"]) == 1
    assert "differs" in capsys.readouterr().err and Path("docs/results.md").read_text() == README
    assert cli.main(["report"]) == 0
    assert cli.main(["report", "--check"]) == 0
    Path("unrelated").mkdir()
    Path("unrelated/package.json").write_text('{"kind": "package"}')
    assert cli.main(["report", "--results", "unrelated"]) == 1
    assert "there are no results in unrelated" in capsys.readouterr().err
    assert cli.main(["report", "--check"]) == 0  # it has written nothing
    Path("results/h200.json").write_text("{")
    assert cli.main(["report"]) == 1
    assert "h200.json is not JSON" in capsys.readouterr().err


def test_rows_whose_clocks_fell_are_marked():
    document = copy.deepcopy(DOCUMENT)
    (row,) = document["rows"]
    row["clocks"] = {"fell": False, "sm_mhz": 1980.0}
    assert "†" not in report.tables([document])["softmax"]
    row["clocks"]["fell"] = True
    table = report.tables([document])["softmax"]
    assert "| 20.0 † |" in table and table.endswith(
        "† the clocks fell below 95% while it was measured.\n"
    )


def test_a_wrong_row_is_no_error():
    document = copy.deepcopy(DOCUMENT)
    wrong = {
        **result_row("cupykern", 20.0, 7.0),
        **dict.fromkeys(("median_us", "gbps", "speed_percent")),
    }
    document["rows"][0]["results"] = [wrong]
    assert "| wrong | - | - |" in report.tables([document])["softmax"]
