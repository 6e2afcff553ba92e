"""The page of results: one file that loads nothing, with every figure that the results allow."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import numpy as np
import pytest
from fake_op import Problem, make_op
from result_documents import DOCUMENT, result_row

from cupykern import OPS, check, cli, targets
from cupykern.op import Bound
from cupykern.tools import page, precision, shape_names

pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]
MATMUL = {
    "op": "matmul",
    "dtype": "float16",
    "plain": "copy",
    "plain_us": 20.0,
    "bytes_read": 2**24,
    "bytes_written": 2**23,
    "flops": 2**33,
}
SWEEP = {
    "kind": "sweep",
    "target": "cuda",
    "machine": {"device": "NVIDIA H200"},
    "trials": [
        {
            "op": "matmul",
            "shape": [n, n, n],
            "dtype": "float16",
            "verified": True,
            "config": f"Config(tile={tile})",
            "median_us": float(n + tile),
            "default_us": 1.0,
        }
        for n in (100, 200)
        for tile in (64, 128)
    ],
}


MACHINE = {"device": "NVIDIA H200"}
RECORD = {"date": "2026-01-02T03:04:05+00:00", "target": "cuda", "machine": MACHINE}
TUNE = {
    **RECORD,
    "kind": "tune",
    "kept": {"softmax size=128": {"config": "C(2)", "median_us": 8.0, "default_us": 10.0}},
    "trials": SWEEP["trials"],
}
COMPARISON = {
    **RECORD,
    "kind": "comparison",
    "title": "A planted slowdown",
    "limits": {"false_alarms": 0.05, "margin": 0.01, "found": 0.03},
    "rows": DOCUMENT["rows"],
    "verdicts": [
        {
            "word": "reject",
            "decided": True,
            "change": 0.0498,
            "spread": 0.0071,
            "p": 1e-9,
            "seen": 0.027,
            "runs": [6, 12],
        }
    ],
}
PROFILE = {
    **RECORD,
    "kind": "profile",
    "profiles": [
        {
            "op": "softmax",
            "shape": [4096, 4096],
            "dtype": "float16",
            "date": RECORD["date"],
            "launches": [
                {
                    "kernel": "softmax",
                    "figures": [["DRAM throughput", 88.25, "%"]],
                    "stalls": [["a barrier", 0.9]],
                }
            ],
        }
    ],
}
MISSING = {
    **PROFILE,
    "profiles": [
        PROFILE["profiles"][0] | {"op": "matmul", "launches": [], "unavailable": "ncu is missing"}
    ],
}
HOST_SWEEP = {**SWEEP, "target": "host", "machine": {"device": "a CPU"}}


class Loads(html.parser.HTMLParser):
    """Collects what a browser would fetch, and checks that tags are closed."""

    VOID = ("meta", "link", "br", "img", "use", "path")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.svgs += tag == "svg"
        if tag not in ("meta",):
            self.open.append(tag)
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href", "srcset", "data", "action")
            if loads and not value.startswith("#"):
                self.found.append(value)
            if name == "id":
                self.ids.append(value)
        if tag in ("script", "link", "iframe", "object", "embed", "img"):
            self.found.append(f"<{tag}>")

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.handle_starttag(tag, attrs)
        if tag != "meta":
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Results of every kind."""
    folder = tmp_path_factory.mktemp("results")
    results = [
        {**result_row("cupykern", 30.0), "tflops": 300.0},
        {**result_row("torch", 20.0, 3.0)},
    ]
    results[1]["tflops"] = 450.0
    products = [{**MATMUL, "shape": [n, n, n], "results": results} for n in (2048, 4096)]
    bench = {**DOCUMENT, "rows": [*DOCUMENT["rows"], *products]}
    found = precision.Row(
        "softmax", "float16", "", "float16", 9, (0.1, 0.2, 0.4, 0.5), 0.5, 1, 2, 0.5
    )
    checked = {"kind": "check", "target": "host", "precision": [vars(found)]}
    documents = (bench, SWEEP, checked, TUNE, COMPARISON, PROFILE, MISSING, HOST_SWEEP)
    for name, document in enumerate(documents):
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return page.make(folder)


def test_it_loads_nothing(text):
    parser = Loads()
    parser.feed(text)
    assert parser.found == [] and parser.open == []
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))
    assert len(parser.ids) == len(set(parser.ids))
    assert (
        parser.svgs == 9
    )  # two roofs, softmax, matmul, errors, two sweeps, a comparison, precision


def test_it_is_for_light_and_dark_and_phones(text):
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    assert "var(--ink)" in text and "#010203" not in text
    assert not re.search(r"<svg[^>]* (width|height)=", text) and "viewBox" in text
    assert text.count('role="img" aria-label="') == 9


def test_it_says_what_was_measured(text):
    for words in (
        *("NVIDIA H200: roofs", "matmul, float16", "Roofline", "sweep of matmul", "tile=64"),
        *("Host time of a warm call", "softmax on host", "20.0", "wrong"),
        *("4 configs tried", "softmax size=128", "C(2)", "1.25"),
        *("A planted slowdown", "1 reject", "1.0498", "0.71%", "+2.7%", "6 / 12"),
        *("DRAM throughput", "88.2", "waiting for a barrier", "90.0", "ncu is missing"),
        "Host emulation on a CPU, whose times are not GPU times",
    ):
        assert words in text


def test_the_same_results_give_the_same_page(folder, text):
    assert page.make(folder) == text


def test_a_page_without_results_says_so(tmp_path):
    assert "Not measured yet." in page.make(tmp_path)


def test_stale_pages_are_found(folder, tmp_path, text):
    path = tmp_path / "page.html"
    assert not page.is_current(path, folder)
    path.write_text(text)
    assert page.is_current(path, folder)
    assert not page.is_current(path, ROOT / "results")


@pytest.mark.parametrize(
    ("op", "shape", "text"),
    [
        ("softmax", (4096, 1024), "4096 x 1024"),
        ("matmul", (4096, 14336, 4096), "M 4096, N 14336, K 4096"),
        ("attention", (4, 16, 4096, 128), "B 4, H 16, S 4096, D 128"),
        ("attention", (4, 16, 4096, 128, 1, 8), "B 4, H 16, Hkv 8, S 4096, D 128, causal"),
        ("attention", (1, 16, 16384, 128, 1024), "B 1, H 16, S 16384, D 128, window 1024"),
        ("attention", (1, 16, 4096, 64, 6), "B 1, H 16, S 4096, D 64, causal, ALiBi"),
        ("attention", (1, 16, 4096, 64, 9), "B 1, H 16, S 4096, D 64, window 4096, sinks"),
        (
            "attention_varlen",
            (4, 8, 100, 64, 0, 8, 16),
            "B 4, H 8, mean S 100, D 64, pages of 16",
        ),
        ("decode_attention", (1, 32, 8, 8192, 128), "B 1, H 32, Hkv 8, Sk 8192, D 128"),
        (
            "cascade_attention",
            (16, 32, 8, 2048, 256, 128),
            "B 16, H 32, Hkv 8, S 2048, Sk 256, D 128",
        ),
        ("merge_attention", (64, 32, 128), "rows 64, H 32, Dv 128"),
        ("matmul", (2, 3), "2 x 3"),
    ],
)
def test_shapes_are_spelt_out(op, shape, text):
    assert shape_names.spelt(op, shape) == text


_NAMED = {
    *("matmul", "complex_matmul", "scaled_mm", "dual_gemm_silu", "dequant_softmax"),
    *("attention", "attention_varlen", "decode_attention", "merge_attention", "rope_and_cache"),
    "cascade_attention",
}


def test_the_shapes_of_every_op_have_names():
    """But for rows and columns, and ops that shape_names.py does not know yet."""
    plain = {
        op.name
        for op in OPS
        for shape in op.bench_shapes("cuda")
        if " x " in shape_names.spelt(op.name, shape)
    }
    rows = {"softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm"}
    others = {op.name for op in OPS if op.name not in _NAMED}
    assert {*rows, "quantize", "quantize_nvfp4", "nonfinite_report"} <= plain <= others


def test_numbers_of_attention_s_options_are_named_as_what_they_are():
    """All that are no windows have a name of their own."""
    (op,) = (op for op in OPS if op.name == "attention")
    for number in range(1, 10):
        problem = op.bench_problem((1, 2, 8192, 64, number), "bfloat16")
        text, options = shape_names.spelt("attention", (1, 2, 8192, 64, number)), problem.options
        assert ("sinks" in text) is options.sinks
        assert ("ALiBi" in text) is (options.slopes is not None)
        assert ("soft cap" in text) is (options.softcap is not None)
        assert ("bias" in text) is (options.score is not None)
        assert ("blocks" in text) is (problem.mask == "block")
        if options.window is not None:
            assert f"window {options.window[0] + 1}" in text


def test_throughput_without_a_known_peak(tmp_path):
    """Bars are speeds then; with one they are shares of the roof."""
    result = {**result_row("cupykern", 30.0), "tflops": 300.0}
    row = {**MATMUL, "shape": [2048, 2048, 2048], "results": [result]}
    for device, words in (("NVIDIA H200", "dense peak"), ("a GPU", "speed of each shape")):
        machine = {**DOCUMENT["machine"], "device": device}
        document = {**DOCUMENT, "machine": machine, "rows": [row]}
        (tmp_path / "a.json").write_text(json.dumps(document))
        made = page.make(tmp_path)
        assert words in made and "M 2048, N 2048, K 2048" in made


# --- precision -----------------------------------------------------------------------------------


def test_errors_in_ulps():
    """Of 1 and 2 in float32, whose ulps are 2^-23 and 2^-22; zeros of a mask do not count."""
    ulp = 2.0**-23
    output = np.array([1 + ulp, 2 + 4 * ulp, 0, np.nan], np.float32)
    reference = np.array([1.0, 2.0, 0.0, 1.0])
    errors, limits = check.ulp_errors(output, reference, Bound(np.full(4, 4 * ulp), np.zeros(4)))
    assert list(errors) == [1, 2] and list(limits) == [4, 2]


def test_the_collector_sees_every_case():
    collector = precision.Collector()
    cases = list(check.run_cases([make_op()], targets.get("host"), 20, 0, collector))
    (row,) = collector.rows()
    assert (row.op, row.dtype, row.output, row.policy) == ("third", "float32", "float32", "")
    assert 0 < row.worst <= 0.5 + 1e-9 and row.half == 1  # rounded once
    assert row.error_over_bound <= max(case.comparison.error_over_bound for case in cases)
    assert row.quantiles[0] <= row.quantiles[-1] <= row.worst


def test_the_policy_of_a_problem_is_named():
    class WithPolicy(Problem):
        policy = "fp16"
        compensated = False

    assert precision.policy_of(WithPolicy((2,))) == "policy=fp16"
    assert precision.policy_of(Problem((2,))) == ""


def test_check_report_writes_rows_and_a_plot(capsys, tmp_path):
    paths = [str(tmp_path / name) for name in ("c.json", "c.svg")]
    arguments = ["--target", "host", "--cases", "3", "--report"]
    assert cli.main(["check", "softmax", *arguments, "--json", paths[0], "--plot", paths[1]]) == 0
    assert "units of the output's last place" in capsys.readouterr().out
    rows = json.loads(Path(paths[0]).read_text())["precision"]
    assert rows and {row["op"] for row in rows} == {"softmax"}
    assert "<svg" in Path(paths[1]).read_text()
