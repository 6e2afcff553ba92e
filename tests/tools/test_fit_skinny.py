"""The fit of the skinny GEMM model finds the constants that synthetic sweeps were made with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from cupykern import cli, dtypes, tuned
from cupykern.gemm import gemm, skinny_heuristic
from cupykern.gemm.gemm_task import GemmTask
from cupykern.gemm.product import FP4, K_MAJOR
from cupykern.runtime.choice import Request
from cupykern.targets import host
from cupykern.targets.limits import device
from cupykern.tools import fit, fit_skinny
from cupykern.tuning.trials import Trial

HOPPER = device("sm_90a")


def tasks(count: int, kinds=(dtypes.int8, dtypes.float8_e4m3fn, FP4)) -> list[GemmTask]:
    """Of shapes drawn at random, every third with block scales if it is of E4M3."""
    rng, found = np.random.default_rng(5), []
    for i in range(count):
        b = kinds[i % len(kinds)]
        m = int(rng.integers(17 if b == FP4 else 1, 33))
        n, k = (int(2 ** rng.uniform(*x)) // 128 * 128 for x in ((9, 15), (9, 14)))
        blocks = b == dtypes.float8_e4m3fn and i % 2 == 0
        found.append(GemmTask(1, m, n, k, dtypes.bfloat16, b, K_MAJOR, K_MAJOR, blocks))
    return found


def sampled(constants, of, noise: float = 0.0) -> list[fit_skinny.Sample]:
    rng, found = np.random.default_rng(9), []
    for task in of:
        for config in skinny_heuristic.configs(task, HOPPER):
            us = skinny_heuristic.estimate(config, task, HOPPER.multiprocessors, constants)
            us *= float(np.exp(noise * rng.standard_normal()))
            found.append(fit_skinny.Sample(task, config, us))
    return found


def planted() -> dict[str, float]:
    """Other constants than the file's, by up to a third."""
    rng = np.random.default_rng(4)
    present = fit_skinny.present_constants()
    return {name: value * rng.uniform(0.7, 1.4) for name, value in present.items()}


def test_planted_constants_are_found():
    constants = planted()
    found = fit_skinny.fit(sampled(constants, tasks(100)))
    assert found.times == pytest.approx(constants, rel=0.1)  # some nearly replace each other
    assert found.after.max_error < 0.005 < found.before.median_error
    assert found.after.mean_loss == pytest.approx(0, abs=1e-4)


def test_what_no_sample_tells_stays():
    found = fit_skinny.fit(sampled(planted(), tasks(90, (dtypes.int8,))))
    old = fit_skinny.present_constants()
    for name in ("convert_fp4", "promote"):
        assert found.counts[name] == 0 and found.times[name] == old[name]
    assert found.counts["latency"] and found.times["latency"] != old["latency"]


def test_noise_costs_little_and_shapes_that_were_not_seen_judge():
    of = tasks(100)
    found = fit_skinny.fit(sampled(planted(), of, noise=0.03))
    assert found.after.num_shapes == len({(t.m, t.n, t.k) for t in of}) // 4
    assert 0.01 < found.after.median_error < 0.04 < found.before.median_error


def test_too_few_shapes():
    with pytest.raises(ValueError, match="too few shapes"):
        fit_skinny.fit(sampled(planted(), tasks(6)))


def trials(constants) -> list[Trial]:
    made = []
    with host.use() as target:
        for sample in sampled(constants, tasks(90)):
            t, key = sample.task, Request(gemm.FAMILY, sample.task, target).key
            made.append(
                Trial("scaled_mm", (t.m, t.n, t.k), "bfloat16", repr(sample.config), key=key,
                      verified=True, median_us=sample.us)
            )  # fmt: skip
    return made


def test_samples_of_sweeps():
    constants = planted()
    made = trials(constants)
    assert fit_skinny.samples(made) == sampled(constants, tasks(90))
    assert fit.samples(made) == []
    others = (
        replace(made[0], verified=False),
        replace(made[0], median_us=None),
        replace(made[0], key="softmax m=1 on x"),
        replace(made[0], config="GemmConfig()"),
    )
    assert fit_skinny.samples(others) == []


def test_fit_writes_the_constants_of_a_sweep(tmp_path, capsys):
    header = {"kind": "sweep", "target": "cuda", "machine": {"device": "NVIDIA H200"}}
    sweep, written = tmp_path / "sweep.json", tmp_path / "sm_90a.json"
    sweep.write_text(json.dumps({**header, "trials": [vars(t) for t in trials(planted())]}))
    assert cli.main(["fit", str(sweep), "--write", str(written)]) == 0
    assert "sm_bytes" in capsys.readouterr().out
    found, before = json.loads(written.read_text()), tuned.load("sm_90a")
    changed = found["skinny"]["sm_bytes"]
    assert changed["value"] == pytest.approx(planted()["sm_bytes"], rel=0.1)
    assert "NVIDIA H200" in changed["measured"]
    assert found["skinny"]["other_launch"] == before["skinny"]["other_launch"]
    assert {**found, "skinny": None} == {**before, "skinny": None}
