"""Verdicts of one benchmark against another, on times of known noise."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from fake_op import make_op
from hypothesis import given, settings
from hypothesis import strategies as st

import cupykern
from cupykern import cli
from cupykern.tools import baseline, options, results


def _log_times(rng, median: float, noise: float, count: int) -> list[float]:
    return list(np.log(median) + noise * rng.standard_normal(count))


@pytest.mark.parametrize("runs_before", [1, 5])
@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_false_alarms_are_rare(noise, runs_before):
    """Of 2000 benchmarks of 6 rows without a change, at most 5% (and its own noise) have an alarm."""
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(2000):
        found = [
            baseline.judge(
                _log_times(rng, 50, noise, 5), _log_times(rng, 50, noise, runs_before), 6
            )
            for _ in range(6)
        ]
        alarms += any(verdict.word == "reject" for verdict in found)
    limit = baseline.FALSE_ALARMS
    assert alarms / 2000 <= limit + 3 * math.sqrt(limit / 2000)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    noise=st.floats(1e-4, 0.01),
    change=st.floats(0.15, 0.6),
    slower=st.booleans(),
    runs_before=st.integers(3, 7),
)
def test_large_changes_are_found(seed, noise, change, slower, runs_before):
    rng = np.random.default_rng(seed)
    factor = 1 + change if slower else 1 / (1 + change)
    now = _log_times(rng, 50 * factor, noise, 5)
    verdict = baseline.judge(now, _log_times(rng, 50, noise, runs_before))
    assert verdict.word == ("reject" if slower else "keep")
    assert verdict.change == pytest.approx(factor - 1, abs=0.1)


@given(st.floats(0, 0.0099), st.integers(2, 6))
def test_less_than_a_percent_is_noise_however_sure(change, runs):
    now = [math.log(50 * (1 + change))] * runs
    assert baseline.judge(now, [math.log(50)] * runs).word == "noise"


def test_student():
    """Against the tables of Abramowitz and Stegun, 26.10: P(|T| <= t) = 0.95, 0.99."""
    for freedom, t95, t99 in ((1, 12.706, 63.657), (2, 4.303, 9.925), (5, 2.571, 4.032),
                              (10, 2.228, 3.169), (29, 2.045, 2.756)):  # fmt: skip
        assert baseline.within(t95, freedom) == pytest.approx(0.95, abs=1e-4)
        assert baseline.within(t99, freedom) == pytest.approx(0.99, abs=1e-4)


def test_one_run_is_no_spread():
    with pytest.raises(ValueError, match="two runs"):
        baseline.judge([1.0], [1.0])


def _row(medians, plains, flops=0, verified=True) -> results.Row:
    runs = [
        results.Row(
            *("third", (8, 16), "float32", "", 10, 10, flops, "copy", plain),
            [results.Result("cupykern", median, verified=verified)],
        )
        for median, plain in zip(medians, plains, strict=True)
    ]
    return results.merged(runs)


def _record(row: results.Row) -> dict:
    return {
        ("third", (8, 16), "float32"): {
            "results": [{"median_us": row.results[0].median_us}],
            "plain_us": row.plain_us,
            "repeats": row.repeats,
        }
    }


def test_what_memory_bounds_is_compared_with_the_copy():
    slow_clock = _row([22, 22.1, 21.9, 22], [20, 20.1, 19.9, 20])
    fast_clock = _row([11, 11.1, 10.9, 11], [10, 10.1, 9.9, 10])
    (verdict,) = baseline.verdicts([slow_clock], _record(fast_clock))
    assert verdict.word == "noise" and abs(verdict.change) < 1e-3
    # What arithmetic bounds is not.
    slow = _row([220, 221, 219, 220], [20, 20.1, 19.9, 20])
    fast = _row([110, 111, 109, 110], [10, 10.1, 9.9, 10])
    (verdict,) = baseline.verdicts([slow], _record(fast))
    assert verdict.word == "reject" and verdict.change == pytest.approx(1, abs=0.01)


def test_a_wrong_row_is_rejected_and_a_new_one_is_new():
    wrong = _row([10, 10], [10, 10], verified=False)
    right = _row([10, 10], [10, 10])
    assert [v.word for v in baseline.verdicts([wrong], _record(right))] == ["reject"]
    assert [v.word for v in baseline.verdicts([right], {})] == ["new"]


def test_merged_runs():
    row = _row([10, 30, 20], [1, 2, 3])
    assert row.results[0].median_us == 20 and row.plain_us == 2
    assert [run["median_us"] for run in row.repeats] == [10, 30, 20]


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


def test_the_command(commands, tmp_path):
    path = tmp_path / "b.json"
    assert commands(None, "--json", path, "--repeats", "3")[0] == 0
    assert len(json.loads(path.read_text())["rows"][0]["repeats"]) == 3
    code, out, _ = commands("slow", "--baseline", path)
    assert code == 1 and "reject" in out.splitlines()[-1]
    assert commands("slow", "--json", path, "--repeats", "3")[0] == 0
    code, out, _ = commands(None, "--baseline", path)
    assert code == 0 and out.splitlines()[-1].endswith("keep")


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"),
        ("[]", "no benchmark"),
        ('{"kind": "bench", "machine": {"device": "NVIDIA H200"}, "rows": []}', "this is"),
    ],
)
def test_baselines_that_do_not_fit(text, says, commands, tmp_path):
    path = tmp_path / "b.json"
    path.write_text(text)
    code, _, err = commands(None, "--baseline", path)
    assert code == 1 and says in err and err.count("\n") == 1
    assert commands(None, "--baseline", path, "--repeats", "1")[0] != 0
