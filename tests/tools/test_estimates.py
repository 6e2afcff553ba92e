"""What check and tune say about their time before they begin."""

from __future__ import annotations

import pytest

from cupykern import cli
from cupykern.tools import estimates


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "5 s"), (11.0, "15 s"), (59.0, "60 s"), (61.0, "2 min"), (4000.0, "2 h")],
)
def test_times_are_rounded_up(seconds, text):
    assert estimates.spelt(seconds) == text


def test_more_jobs_and_fewer_cases_take_less():
    assert "15 s if none" in estimates.of_check(1, 100, "host", 2)
    assert "5 s if none" in estimates.of_check(1, 2, "host", 16)
    assert "1 op, 1 case each" in estimates.of_check(1, 1, "host", 2)
    assert "min" in estimates.of_tune(100, "cuda", 1, 0.0, 25.0)
    assert "minutes on the host target" in estimates.of_tune(1, "host", 1, 0.01, 25.0)


def test_the_commands_say_so_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    assert cli.main(["check", "softmax", "--target", "host", "--cases", "2"]) == 0
    assert capsys.readouterr().err.startswith("check: 1 op, 2 cases each: about ")
    arguments = ["--target", "host", "--shapes", "4,64", "--dtype", "float32", "--rep-ms", "1"]
    assert cli.main(["tune", "quantize_nvfp4", *arguments]) == 0
    assert "quantize_nvfp4 4x64 float32: " in capsys.readouterr().err
