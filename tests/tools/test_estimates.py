"""What check and tune say about their time before they begin."""

from __future__ import annotations

import numpy as np
import pytest

from cupykern import OPS, cli
from cupykern.tools import estimates
from cupykern.tuning.sweep import first_request


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1, "5 s"), (11.0, "15 s"), (5.9, "10 s"), (59.0, "60 s"), (60.9, "2 min"), (4000.0, "2 h")],
)
def test_times_are_rounded_up(seconds, text):
    assert estimates.spelt(seconds) == text


def test_more_jobs_and_fewer_cases_take_less():
    assert "20 s if none" in estimates.of_check(1, 100, "host", 2)
    assert "5 s if none" in estimates.of_check(1, 2, "host", 16)
    assert "1 op, 1 case each" in estimates.of_check(1, 1, "host", 2)
    assert "min" in estimates.of_tune(100, "cuda", 1, 25.0)


def test_slow_configs_of_the_host_are_in_the_estimate():
    """Each adds its one call, a fast one all of its calls."""
    none = estimates.of_tune(3, "host", 2, 25.0, 0.02, (1.0, 1.0, 1.0))
    assert none == "3 configs, about 5 s"
    assert estimates.of_tune(3, "host", 2, 25.0, 0.02, (1.0, 1.0, 1000.0)) == (
        "3 configs, about 25 s"
    )


def test_slowdowns_follow_from_launches():
    """One row in a cluster of 16 blocks takes many times one in a block; nothing is launched."""
    op = next(op for op in OPS if op.name == "softmax")
    call = op.inputs(op.bench_problem((1024, 1024), "float16"), 0, np)
    configs = first_request(op, call).configs()
    found = dict(zip(configs, estimates.slowdowns(op, call, configs), strict=True))
    assert found[configs[0]] == 1.0
    of_clusters = [x for c, x in found.items() if getattr(c, "cluster_size", 1) == 16]
    assert of_clusters and min(of_clusters) > 100
    assert max(x for c, x in found.items() if getattr(c, "cluster_size", 1) == 1) < 50


def test_the_commands_say_so_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    assert cli.main(["check", "softmax", "--target", "host", "--cases", "2"]) == 0
    assert capsys.readouterr().err.startswith("check: 1 op, 2 cases each: about ")
    arguments = ["--target", "host", "--shapes", "4,64", "--dtype", "float32", "--rep-ms", "1"]
    assert cli.main(["tune", "quantize_nvfp4", *arguments]) == 0
    assert "quantize_nvfp4 4x64 float32: " in capsys.readouterr().err
