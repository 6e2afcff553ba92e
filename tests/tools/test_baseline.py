"""Verdicts of one benchmark against another, on times of known noise."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_op import make_op
from hypothesis import given, settings
from hypothesis import strategies as st
from slowed import slowed

import cupykern
from cupykern import check, cli, targets
from cupykern.tools import baseline, bench, options, results
from cupykern.tuning import timing


def _runs(rng, runs: int, noise: float, kind: str) -> np.ndarray:
    """Log times of unit variance but for `noise`: normal, with heavy tails, or of two levels."""
    if kind == "normal":
        unit = rng.standard_normal(runs)
    elif kind == "heavy":
        unit = rng.standard_t(4, runs) / math.sqrt(2)
    else:
        unit = (2.5 * ((rng.random(runs) < 0.2) - 0.2) + 0.1 * rng.standard_normal(runs)) / 1.005
    return noise * unit


def _compare(rng, num_rows: int, change: float, noise: float, before: int, kind: str, off=0.0):
    """The words of a benchmark of rows that are all slower by `change`, look by look.

    off: by how much a process as a whole may lie off, for each row, of the logs.
    """
    words = []
    tests = num_rows * len(baseline.LOOKS)
    for _ in range(num_rows):
        then = _runs(rng, before, noise, kind)
        now = _runs(rng, baseline.LOOKS[-1], noise, kind) + math.log1p(change)
        now += rng.uniform(-off, off)
        for look in baseline.LOOKS:
            verdict = baseline.judge(now[:look].tolist(), then.tolist(), tests)
            if verdict.decided:
                break
        words.append(verdict.word)
    return words


@pytest.mark.parametrize(
    "before, kind", [(1, "normal"), (12, "normal"), (12, "heavy"), (12, "levels")]
)
@pytest.mark.parametrize("change, off", [(0.0, baseline.MARGIN), (baseline.MARGIN, 0.0)])
def test_false_alarms_are_rare(change, off, before, kind, exhaustive):
    """Of 50 benchmarks (200) of 20 rows that changed by no more than the margin, at most
    FALSE_ALARMS / 2 reject a row, and as many keep one (three standard deviations more of that), at
    every noise."""
    rng = np.random.default_rng(1)
    limit = baseline.FALSE_ALARMS / 2
    count = 200 if exhaustive else 50
    most = count * limit + 3 * math.sqrt(count * limit)
    rejected = kept = 0
    for _ in range(count):
        noise = 10 ** rng.uniform(-3.3, -1.3)
        words = _compare(rng, 20, change, noise, before, kind, off)
        rejected += "reject" in words
        kept += "keep" in words
    assert rejected <= most and kept <= most


@pytest.mark.parametrize("kind", ["normal", "heavy", "levels"])
def test_a_slowdown_of_5_percent_is_caught(kind):
    """With the spread that short rows have on an H200, 1% from run to run, against 12 runs: all of
    20 rows in nearly all of 50 benchmarks, and in none of the unchanged ones is a row rejected."""
    rng = np.random.default_rng(2)
    slower = [_compare(rng, 20, 0.05, 0.01, 12, kind) for _ in range(50)]
    assert sum(words == ["reject"] * 20 for words in slower) >= 45
    assert sum(words.count("reject") for words in slower) >= 990
    same = [_compare(rng, 20, 0.0, 0.01, 12, kind) for _ in range(50)]
    assert sum(words == ["noise"] * 20 for words in same) >= 49


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    noise=st.floats(1e-4, 0.01),
    change=st.floats(0.15, 0.6),
    slower=st.booleans(),
    before=st.integers(3, 7),
)
def test_large_changes_are_found(seed, noise, change, slower, before):
    rng = np.random.default_rng(seed)
    shift = math.log1p(change) * (1 if slower else -1)
    now = _runs(rng, 5, noise, "normal") + shift
    verdict = baseline.judge(now, _runs(rng, before, noise, "normal"))
    assert verdict.word == ("reject" if slower else "keep") and verdict.decided
    assert verdict.change == pytest.approx(math.expm1(shift), abs=0.1)
    assert verdict.runs == (5, before)


@given(st.floats(0, 0.0099), st.integers(2, 6))
def test_less_than_the_margin_is_noise_however_sure(change, runs):
    now = [math.log(50 * (1 + change))] * runs
    verdict = baseline.judge(now, [math.log(50)] * runs)
    assert verdict.word == "noise" and verdict.decided


def test_what_would_be_rejected():
    """A change of `seen` is at the limit: a little more is a reject, a little less is not."""
    rng = np.random.default_rng(3)
    now, then = _runs(rng, 8, 0.01, "normal"), _runs(rng, 8, 0.01, "normal")
    now += then.mean() - now.mean()
    seen = math.log1p(baseline.judge(now, then, 20).seen)
    assert baseline.judge(now + seen * 1.001, then, 20).word == "reject"
    assert baseline.judge(now + seen * 0.999, then, 20).word == "noise"
    assert 0.01 < seen < 0.05


@pytest.mark.parametrize("num_looks, num_rows", [(1, 1), (5, 1), (5, 3)])
def test_the_level_of_a_test_is_that_of_all_rows_and_looks(num_looks, num_rows):
    """At changes on both sides of it, by the p that the verdict tells."""
    level = 0.025 / num_looks / num_rows
    now = _row([100, 101, 99, 100.5], [20] * 4)
    near = set()
    for change in np.linspace(1.01, 1.08, 200).tolist():
        then = _record(_row([time / change for time in (100, 100.7, 99.3, 100)], [20] * 4))
        verdict, *_ = baseline.verdicts([now] * num_rows, then, num_looks)
        assert verdict.word == ("reject" if verdict.p <= level else "noise")
        near |= {verdict.word} if level / 2 < verdict.p < 2 * level else set()
    assert near == {"reject", "noise"}


def test_what_is_not_sure_of_the_machine_is_not_sure_of_the_row():
    now, then = [math.log(110 + i % 2) for i in range(8)], [math.log(100 + i % 2) for i in range(8)]
    assert baseline.judge(now, then).word == "reject"
    verdict = baseline.judge(now, then, drift_error2=0.1**2)
    assert verdict.word == "noise" and not verdict.decided


def test_looks_end_with_the_runs_asked_for():
    assert baseline.looks(None) == baseline.LOOKS
    assert baseline.looks(2) == (2,) and baseline.looks(10) == (6, 8, 10)
    assert baseline.looks(30) == (*baseline.LOOKS, 30)


def test_student_distribution_is_that_of_tables():
    """Against the tables of Abramowitz and Stegun, 26.10: P(|T| <= t) = 0.95, 0.99."""
    for freedom, t95, t99 in ((1, 12.706, 63.657), (2, 4.303, 9.925), (5, 2.571, 4.032),
                              (10, 2.228, 3.169), (29, 2.045, 2.756)):  # fmt: skip
        assert baseline.within(t95, freedom) == pytest.approx(0.95, abs=1e-4)
        assert baseline.within(t99, freedom) == pytest.approx(0.99, abs=1e-4)


def test_one_run_is_no_spread():
    with pytest.raises(ValueError, match="two runs"):
        baseline.judge([1.0], [1.0])


def _row(medians, plains, flops=0, verified=True, shape=(8, 16)) -> results.Row:
    runs = [
        results.Row(
            *("third", shape, "float32", "", 10, 10, flops, "copy", plain),
            [results.Result("cupykern", median, verified=verified)],
        )
        for median, plain in zip(medians, plains, strict=True)
    ]
    return results.merged(runs)


def _record(row: results.Row) -> dict:
    return {
        ("third", row.shape, "float32"): {
            "results": [{"median_us": row.results[0].median_us}],
            "plain_us": row.plain_us,
            "repeats": row.repeats,
        }
    }


def test_a_slower_memory_clock_hits_copies_alike():
    slow_clock = _row([22, 22.1, 21.9, 22], [20, 20.1, 19.9, 20])
    fast_clock = _row([11, 11.1, 10.9, 11], [10, 10.1, 9.9, 10])
    (verdict,) = baseline.verdicts([slow_clock], _record(fast_clock))
    assert verdict.word == "noise" and abs(verdict.change) < 1e-3
    # What arithmetic bounds is not.
    slow = _row([220, 221, 219, 220], [20, 20.1, 19.9, 20])
    fast = _row([110, 111, 109, 110], [10, 10.1, 9.9, 10])
    (verdict,) = baseline.verdicts([slow], _record(fast))
    assert verdict.word == "reject" and verdict.change == pytest.approx(1, abs=0.01)


def test_one_copy_that_was_slow_does_not_excuse_its_row():
    """The machine's change is that of all copies."""
    steady = [_row([10, 10.01, 9.99], [10, 10.01, 9.99], shape=(n,)) for n in range(20)]
    records = {k: v for row in steady for k, v in _record(row).items()}
    now = [*steady[:-1], _row([11, 11.01, 10.99], [11, 11.01, 10.99], shape=(19,))]
    words = [verdict.word for verdict in baseline.verdicts(now, records)]
    assert words == ["noise"] * 19 + ["reject"]


def test_a_wrong_row_is_rejected_and_a_new_one_is_new():
    wrong = _row([10, 10], [10, 10], verified=False)
    right = _row([10, 10], [10, 10])
    assert [v.word for v in baseline.verdicts([wrong], _record(right))] == ["reject"]
    assert [v.word for v in baseline.verdicts([right], {})] == ["new"]


def test_merged_runs_have_the_median_and_keep_every_run():
    row = _row([10, 30, 20], [1, 2, 3])
    assert row.results[0].median_us == 20 and row.plain_us == 2
    assert [run["median_us"] for run in row.repeats] == [10, 30, 20]


def test_merged_runs_have_the_worst_clocks_and_errors():
    runs = [_row([10], [1]) for _ in range(3)]
    for run, fell, error in zip(runs, (False, True, False), (0.5, 0.25, 0.75), strict=True):
        run.clocks = {"fell": fell}
        run.results[0].error_over_bound = error
    merged = results.merged(runs)
    assert merged.clocks["fell"] and merged.results[0].error_over_bound == 0.75
    assert not results.merged(runs[::2]).clocks["fell"]


def test_a_result_keeps_its_worst_errors():
    result = results.Result("third")
    for error in (0.25, 0.75, 0.5):
        result.compared(check.Comparison(error_over_bound=error, rms_ratio=1 - error))
    assert (result.error_over_bound, result.rms_ratio, result.note) == (0.75, 0.75, None)


@pytest.fixture
def commands(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))

    def run(fault, *args):
        op = make_op(fault)
        for module in (cupykern, cli, options):
            monkeypatch.setattr(module, "OPS", (op,))
        code = cli.main(
            ["bench", "third", "--target", "host", "--dtype", "float32", "--shapes", "8,16"]
            + ["--rep-ms", "0", "--warmup-ms", "0", *map(str, args)]
        )
        return code, *capsys.readouterr()

    return run


def test_bench_against_a_baseline_prints_and_writes_its_verdict(commands, tmp_path):
    path = tmp_path / "b.json"
    assert commands(None, "--json", path, "--repeats", "3")[0] == 0
    assert len(json.loads(path.read_text())["rows"][0]["repeats"]) == 3
    found = tmp_path / "c.json"
    code, out, _ = commands("slow", "--baseline", path, "--json", found)
    assert code == 1 and out.splitlines()[-1].endswith("reject")
    document = json.loads(found.read_text())
    assert document["kind"] == "comparison" and document["baseline"] == str(path)
    (verdict,), (row,) = document["verdicts"], document["rows"]
    assert verdict["word"] == "reject" and verdict["runs"] == [len(row["repeats"]), 3]
    assert len(row["repeats"]) == baseline.LOOKS[0]  # 100 times slower: the first look decides
    assert commands("slow", "--json", path, "--repeats", "3")[0] == 0
    code, out, _ = commands(None, "--baseline", path)
    assert code == 0 and out.splitlines()[-1].endswith("keep")
    assert commands("slow", "--baseline", found)[0] in (0, 1)  # a comparison is a benchmark too


def test_ctrl_c_leaves_the_runs_so_far(commands, tmp_path, monkeypatch):
    path, found = tmp_path / "b.json", tmp_path / "c.json"
    assert commands(None, "--json", path, "--repeats", "3")[0] == 0
    calls = []

    def judge(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return baseline.Verdict("noise", False, 0.0, 0.01, 0.5, 0.2, (6, 3))

    monkeypatch.setattr(baseline, "judge", judge)
    code, out, err = commands(None, "--baseline", path, "--json", found)
    assert (code, err) == (130, "interrupted\n") and "8x16" in out
    document = json.loads(found.read_text())
    assert document["interrupted"] and document["verdicts"][0]["decided"] is False
    assert len(document["rows"][0]["repeats"]) == baseline.LOOKS[1]


def test_undecided_rows_say_what_helps(commands, tmp_path, monkeypatch):
    path = tmp_path / "b.json"
    assert commands(None, "--json", path)[0] == 0
    verdict = baseline.Verdict("noise", False, 0.0, 0.01, 0.5, 0.2, (2, 1))
    monkeypatch.setattr(baseline, "judge", lambda *args: verdict)
    code, out, _ = commands(None, "--baseline", path, "--repeats", "2")
    assert code == 0 and "noise (undecided)" in out
    assert "1 runs of a row" in out.splitlines()[-1] and "--repeats 12" in out.splitlines()[-1]


def test_a_planted_slowdown_is_right_but_for_its_time():
    op = slowed(cupykern.OPS[0], 0.05)
    task = bench.tasks([op], "host", [(400, 64)], ("float16",))[0]
    host = targets.get("host")
    row = bench.bench_task(task, host, timing.clock_of(host), bench.Settings(0, 0))
    real = cupykern.OPS[0]
    assert row.ok and row.shape == (400, 64) and "420" in row.problem
    assert row.bytes_read == real.work(real.bench_problem((400, 64), "float16")).bytes_read


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"),
        ("[]", "not a benchmark"),
        ('{"kind": "bench", "rows": []}', "not a complete benchmark"),
        ('{"kind": "bench", "machine": {"device": "NVIDIA H200"}, "rows": []}', "this is"),
    ],
)
def test_baselines_that_do_not_fit(text, says, commands, tmp_path):
    path = tmp_path / "b.json"
    path.write_text(text)
    code, _, err = commands(None, "--baseline", path)
    assert code == 1 and says in err and err.count("\n") == 1
    assert commands(None, "--baseline", path, "--repeats", "1")[0] != 0
