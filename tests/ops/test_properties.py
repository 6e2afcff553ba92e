"""Every op against FP64 within its derived bound, on every target, under every schedule."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis_draw import HypothesisDraw
from small_problems import is_small

from cupykern import OPS, check
from cupykern.op import RandomDraw, as_tuple
from cupykern.targets import host

_NEAR = {"nonfinite_report": (0.0, 0.0)}  # nearly all of its results are exact


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_errors_are_within_the_bound(op, target, exhaustive):
    """And the bound is not much larger than it need be, nor is the error that it expects: else no
    comparison could fail.  Of some problem, as one rounding to the result's format is part of all
    bounds.
    """
    worst = check.Comparison()

    @given(data=st.data(), seed=st.integers(0, 2**20))
    def within(data, seed):
        nonlocal worst
        problem = op.draw_problem(HypothesisDraw(data))
        assume(exhaustive or is_small(op, problem))
        comparison = check.check_problem(op, problem, seed, target.xp)
        assert comparison.ok, f"{problem!r}: {comparison}"
        worst = worst.merge(comparison)

    within()
    near, expected = _NEAR.get(op.name, (0.3, 0.4))
    assert worst.error_over_bound >= near and worst.rms_ratio >= expected, worst


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_references_and_samples_are_made_by_cupy(op, gpu, monkeypatch):
    """As bench makes them, of arrays that are too large for the CPU."""
    monkeypatch.setattr(check, "SMALL", -1)
    for seed in range(8):
        problem = op.draw_problem(RandomDraw(seed))
        comparison = check.check_problem(op, problem, seed, gpu.xp)
        assert comparison.ok, f"{problem!r}: {comparison}"
    for dtype in op.dtypes:
        problem = op.bench_problem(op.bench_shapes("host")[0], dtype)
        call = op.inputs(problem, 1, gpu.xp)
        part, outputs = op.sample(call, as_tuple(op.run(*call.args, **call.kwargs)), 1, 1)
        references = op.reference(*part.args, **part.kwargs)
        bounds = op.bound(*part.args, **part.kwargs, reference=references)
        assert check.compare(outputs, references, bounds).ok, problem


@pytest.mark.thinned(5)
@pytest.mark.parametrize("schedule", ["lifo", "sticky:1", "sticky:2"])
@pytest.mark.parametrize("warp_size", [32, 64])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_errors_are_within_the_bound_under_every_schedule(
    op, warp_size, schedule, exhaustive, data, seed
):
    problem = op.draw_problem(HypothesisDraw(data))
    assume(exhaustive or is_small(op, problem))
    late = schedule == "sticky:2"
    with host.use(warp_size=warp_size, schedule=schedule, late_producer=late) as target:
        comparison = check.check_problem(op, problem, seed, target.xp)
    assert comparison.ok, f"{problem!r}: {comparison}"
