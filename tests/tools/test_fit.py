"""The fit of the GEMM model finds the times that synthetic sweeps were made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupykern import cli, dtypes, tuned
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import FP4, K_MAJOR
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.runtime.choice import Request
from cupykern.targets import host
from cupykern.tools import fit
from cupykern.tuning.trials import Trial

FILE = Path(tuned.__file__).with_name("sm_90a.json")


def tasks(count: int) -> list[GemmTask]:
    """Of shapes drawn at random."""
    rng, found = np.random.default_rng(7), []
    for i in range(count):
        m, n, k = (
            int(2 ** rng.uniform(low, high)) // 64 * 64 for low, high in ((7, 13), (9, 14), (9, 13))
        )
        b = FP4 if i % 4 == 3 else dtypes.float16
        task = GemmTask(1, m, n, k, dtypes.float16, b, K_MAJOR, K_MAJOR)
        found.append(
            replace(
                task, slow_activation=i % 3 == 1, epilogue="general" if i % 5 == 4 else "tma_store"
            )
        )
    return found  # fmt: skip


def sampled(times: dict[str, float], noise: float, count: int = 80) -> list[fit.Sample]:
    rng, found = np.random.default_rng(3), []
    for task in tasks(count):
        for i, tile in enumerate(sm90_heuristic.tiles_of(task)):
            for splits in (1, 4) if task.b != FP4 and i in (0, 4) else (1,):
                if not sm90_heuristic.has_epilogue(tile, task, splits):
                    continue
                sample = fit.Sample(task, tile, splits, 1.0)
                us = sample.predict(times, 132) * float(np.exp(noise * rng.standard_normal()))
                found.append(replace(sample, us=us))
    return found


def planted(seed: int = 5) -> dict[str, float]:
    """Other times than the file's, by up to a third, and a launch of 7 us."""
    rng = np.random.default_rng(seed)
    times = {x: time * rng.uniform(0.7, 1.4) for x, time in fit.present_times().items()}
    return {**times, fit.LAUNCH: 7.0}


def test_planted_times_are_found():
    times = planted()
    found = fit.fit(sampled(times, noise=0))
    told = [name for name, count in found.counts.items() if count]
    assert {"activation", "split_launch", "decode.gemm", fit.LAUNCH} <= {*told}
    assert any(name.endswith(fit.BESIDES) for name in told)
    for name in told:
        tolerance = 0.02 if found.counts[name] > 20 else 0.1
        assert found.times[name] == pytest.approx(times[name], rel=tolerance), name
    assert found.after.max_error < 1e-3 and found.after.max_loss < 1e-3
    assert found.before.median_error > 0.03


def test_what_no_sample_tells_stays():
    found = fit.fit(sampled(planted(), noise=0.02))
    for name, time in fit.present_times().items():
        if not found.counts[name]:
            assert found.times[name] == time
    assert not found.counts["decode.dual_gemm"] and not found.counts["e4m3[0]"]


def test_noise_costs_little_and_shapes_that_were_not_seen_judge():
    times = planted()
    found = fit.fit(sampled(times, noise=0.05))
    assert found.after.num_shapes == 20
    assert 0.01 < found.after.median_error < 0.06 and found.after.mean_loss < 0.05
    assert found.after.median_error < found.before.median_error
    for name in ("16-bit[0]", "nvfp4[0]"):
        assert found.times[name] == pytest.approx(times[name], rel=0.1)


def test_a_model_that_is_wrong_is_seen():
    """Times that no tile has: the error on other shapes is large, whatever is fitted."""
    rng = np.random.default_rng(1)
    found = [replace(s, us=float(2 ** rng.uniform(3, 12))) for s in sampled(planted(), 0)]
    assert fit.fit(found).after.median_error > 0.3


def test_times_that_are_not_asked_for_stay():
    old = fit.present_times()
    times = {**old, "16-bit[1]": 2 * old["16-bit[1]"], fit.LAUNCH: 6.0}
    found = fit.fit(sampled(times, noise=0), only=("16-bit[1]",))
    assert {name for name in old if found.counts[name]} == {
        fit.LAUNCH, "16-bit[1]", "16-bit[1]" + fit.BESIDES
    }  # fmt: skip
    assert found.times["16-bit[1]"] == pytest.approx(times["16-bit[1]"], rel=0.02)
    assert all(found.times[x] == old[x] for x in old if not found.counts[x])
    with pytest.raises(ValueError, match=r"no time is called 17-bit\.\.\."):
        fit.fit(sampled(old, noise=0), only=("17-bit",))


def test_too_few_shapes():
    with pytest.raises(ValueError, match="too few shapes"):
        fit.fit(sampled(planted(), 0, count=6))


def trials(times: dict[str, float]) -> list[Trial]:
    made = []
    with host.use() as target:
        for sample in sampled(times, 0):
            config: Any = sample.tile.config
            if sample.splits > 1:
                config = SplitKWorkspace(config, sample.splits)
            t, key = sample.task, Request(gemm.FAMILY, sample.task, target).key
            made.append(
                Trial("matmul", (t.m, t.n, t.k), "float16", repr(config), key=key, verified=True,
                      median_us=sample.us)
            )  # fmt: skip
    return made


def test_samples_of_sweeps():
    times = planted()
    made = trials(times)
    assert fit.samples(made) == sampled(times, 0)
    others = (
        replace(made[0], verified=False),
        replace(made[0], median_us=None),
        replace(made[0], key="softmax m=1 on x"),
        replace(made[0], config="GemmConfig()"),
    )
    assert fit.samples(others) == []


def test_the_file_is_written_as_it_is():
    document = tuned.load("sm_90a")
    assert fit.text(document) + "\n" == FILE.read_text()
    same = fit.updated(document, fit.present_times(), "elsewhere")
    assert same == document
    times = {**fit.present_times(), "decode.gemm": 3.14159, "16-bit[1]": 30.0, "activation": 2.0}
    other = fit.updated(document, times, "elsewhere")
    assert other["gemm"]["decode"]["value"] == {**document["gemm"]["decode"]["value"], "gemm": 3.14}
    assert other["gemm"]["activation"] == {
        **document["gemm"]["activation"], "value": 2.0, "measured": "elsewhere"
    }  # fmt: skip
    assert other["gemm_tiles"]["16-bit"]["tiles"][1]["us"] == 30.0
    assert other["gemm_tiles"]["16-bit"]["measured"] == "elsewhere"
    assert other["gemm_tiles"]["int8"] == document["gemm_tiles"]["int8"]


def test_fit_writes_the_constants_of_a_sweep(tmp_path, capsys):
    header = {"kind": "sweep", "target": "cuda", "machine": {"device": "NVIDIA H200"}}
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({**header, "trials": [vars(t) for t in trials(planted())]}))
    written = tmp_path / "sm_90a.json"
    assert cli.main(["fit", str(sweep), "--write", str(written)]) == 0
    said = capsys.readouterr().out
    assert "16-bit[0]" in said and "NVIDIA H200" in written.read_text()
    assert json.loads(written.read_text())["gemm"]["activation"]["value"] == pytest.approx(
        planted()["activation"], rel=0.03
    )
    assert cli.main(["fit", str(sweep), "--write", str(written), "--only", "nvfp4"]) == 0
    new = json.loads(written.read_text())
    assert new["gemm_tiles"]["16-bit"] == tuned.load("sm_90a")["gemm_tiles"]["16-bit"]
    assert new["gemm_tiles"]["nvfp4"] != tuned.load("sm_90a")["gemm_tiles"]["nvfp4"]
    sweep.write_text(json.dumps({**header, "trials": []}))
    assert cli.main(["fit", str(sweep)]) == 1
