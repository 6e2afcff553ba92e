"""The comparison, the guards and the benchmark protocol."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from fake_op import make_op

from cupykern import OPS, check, targets
from cupykern.op import Bound, RandomDraw
from cupykern.peers.base import Peer
from cupykern.runtime import jit
from cupykern.tools import bench, results
from cupykern.tuning import compile_ahead, protocol, timing

SETTINGS = bench.Settings(warmup_ms=0, rep_ms=0)


@pytest.fixture
def host():
    return targets.get("host")


def _compare(output, reference, bound, rms=1.0, dtype=np.float32):
    reference = np.asarray(reference, np.float64)
    bounds = Bound(*(np.broadcast_to(x, reference.shape) for x in (bound, rms)))
    return check.compare([np.asarray(output, dtype)], [reference], [bounds])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_problem_has_its_work(op):
    for seed in range(200):
        problem = op.draw_problem(RandomDraw(seed))
        assert min(op.work(problem)) >= 0, problem


def test_compare_finds_the_worst_element():
    found = _compare([[1, 2], [3, 4.5]], [[1, 2.25], [3, 4]], 0.25, rms=0.5)
    assert (found.index, found.error_over_bound, found.got, found.expected) == ((1, 1), 2, 4.5, 4)
    assert found.max_abs == 0.5 and found.max_rel == 0.125
    assert found.ulps == 0.5 / 2.0**-21
    assert found.relative_l2 == pytest.approx(np.sqrt(0.25**2 + 0.5**2) / np.sqrt(31.0625))
    assert not found.ok


@pytest.mark.parametrize(
    "output, reference, ok",
    [
        (np.nan, np.nan, True),
        (np.nan, 0, False),
        (0, np.nan, False),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (3e38, np.inf, False),
        (np.inf, 1, False),
        (np.inf, 1e39, True),  # what FP32 cannot hold rounds to infinity
        (-np.inf, 1e39, False),
        (-0.0, 0.0, True),
    ],
)
def test_compare_wants_nan_and_infinities_in_place(output, reference, ok):
    assert _compare([1, output], [1, reference], 1e-30).ok is ok


def test_a_bound_that_bounds_nothing_fails():
    assert not _compare([1.0], [1.0], np.nan).ok
    assert not _compare([1.0], [1.0], -1.0).ok
    assert _compare([1.0], [1.0], 0.0).ok


@pytest.mark.parametrize("seed", [1, 2])
def test_rms_and_bias_beyond_what_is_expected_fail(seed):
    """Normal errors, 1.6 times as large as expected, then all of one sign."""
    rng = np.random.default_rng(seed)
    reference, errors = rng.uniform(1, 2, 100_000), 1e-3 * rng.standard_normal(100_000)
    for error, fails in ((errors, ""), (1.6 * errors, "rms_ratio"), (np.abs(errors), "bias_ratio")):
        bound = Bound(np.full(reference.shape, 1.0), np.full(reference.shape, 1e-3), bias=0.0)
        found = check.compare([np.float32(reference + error)], [reference], [bound])
        assert (found.rms_ratio > check.RMS_LIMIT, found.bias_ratio > 1) == (
            fails == "rms_ratio",
            fails == "bias_ratio",
        )
        assert found.ok is not bool(fails) and found.within_bound


def test_elements_of_which_no_error_is_expected_do_not_count():
    alone = _compare([1.5], [1], 1, rms=[0.25]).rms_ratio
    assert _compare([1.5, 7], [1, 7], 1, rms=[0.25, 0]).rms_ratio == alone > 0


def test_ulps_below_the_smallest_normal_number_are_its():
    assert _compare([2.0**-23], [2.0**-24], 1, dtype=np.float16).ulps == 1


def test_compare_of_nothing_and_of_wrong_shapes():
    assert _compare(np.zeros((0, 3)), np.zeros((0, 3)), 0.0).ok
    with pytest.raises(check.Violation, match="shape"):
        _compare([1.0], [1.0, 2.0], 0.0)


@pytest.mark.parametrize("fault", ["value", "unwritten", "guard", "elsewhere", "input", "raises"])
def test_check_finds_faults(fault, host):
    cases = list(check.run_cases([make_op(fault)], host, cases=20, seed=3))
    (summary,) = check.summarize(cases)
    assert summary.failed == sum(case.error is not None for case in cases) > 0
    failed = next(case for case in cases if case.error)
    (again,) = check.run_cases([make_op(fault)], host, cases=1, seed=failed.seed)
    assert (again.problem, bool(again.error)) == (failed.problem, True)


def test_the_worse_of_two_comparisons_counts():
    bad = check.Comparison(2.0, 0.1, output=1, index=(3,), got=5.0)
    good = check.Comparison(0.5, 4.0, output=0, index=(7,), got=6.0)
    for merged in (bad.merge(good), good.merge(bad)):
        assert (merged.error_over_bound, merged.rms_ratio) == (2.0, 4.0)
        assert (merged.output, merged.index, merged.got) == (1, (3,), 5.0)


def test_check_passes_what_is_right(host):
    cases = list(check.run_cases([make_op()], host, cases=20, seed=0))
    (summary,) = check.summarize(cases)
    assert (summary.cases, summary.failed) == (20, 0) and 0 < summary.worst.error_over_bound <= 1


def _rows(op, host, peers=()):
    todo = bench.tasks([op], "host", dtypes=("float32",))
    return list(bench.run(todo, host, timing.clock_of(host), SETTINGS, peers))


def test_bench_times_what_is_verified(host):
    rows = _rows(make_op(flops=1000), host)
    assert [row.shape for row in rows] == [(8, 16), (4, 4)]
    for row in rows:
        (ours,) = row.results
        assert row.ok and row.plain == "copy" and row.plain_us > 0
        assert ours.q20_us <= ours.median_us <= ours.q80_us
        assert ours.runs >= 3 and 0 < ours.error_over_bound <= 1
        nbytes = row.bytes_read + row.bytes_written
        assert ours.gbps == pytest.approx(nbytes / (ours.median_us * 1e-6) / 1e9)
        assert ours.tflops == pytest.approx(1000 / (ours.median_us * 1e-6) / 1e12)


@pytest.mark.parametrize("fault", ["value", "unwritten", "guard", "input", "raises"])
def test_bench_does_not_time_what_is_wrong(fault, host):
    for row in _rows(make_op(fault), host):
        assert not row.ok and row.results[0].note and row.results[0].median_us is None


def test_what_the_timed_runs_do_not_write_is_found(host):
    """Of a function that leaves what its first runs wrote, which was right."""
    right = make_op()
    runs = []

    def run(x, *, out=None):
        runs.append(out)
        return right.run(x, out=out) if len(runs) <= 2 else out

    row, *_ = _rows(replace(right, run=run), host)
    assert len(runs) > 2 and not row.ok


class KnownClock:
    """The plain copy takes 7 us, contender i 10 + i."""

    min_rounds = max_rounds = 3

    def copy(self, nbytes):
        return self.copy

    def round(self, functions, number=0):
        return [7.0 if f == self.copy else 10.0 + i for i, f in enumerate(functions)]


def test_each_time_is_its_contenders(host):
    peers = [Peer(f"p{i}", "numpy", lambda op, call: lambda: call.args[0] / 3) for i in range(2)]
    task, *_ = bench.tasks([make_op()], "host", dtypes=("float32",))
    row = bench.bench_task(task, host, KnownClock(), SETTINGS, peers)
    assert [result.median_us for result in row.results] == [10, 11, 12] and row.plain_us == 7


def test_summary_has_median_and_quantiles():
    assert timing.summarize([3, 11, 1, 2, 4, 5, 10, 9, 8, 7, 6]) == (6, 3, 9, 11)


def test_peers_are_verified_against_the_same_reference(host):
    def build(factor):
        return lambda op, call: lambda: (call.args[0] * np.float32(factor)).astype(np.float32)

    def broken(op, call):
        raise RuntimeError("unsupported")

    peers = [
        Peer("good", "numpy", build(1 / 3)),
        Peer("bad", "numpy", build(0.4)),
        Peer("none", "numpy", lambda op, call: None),
        Peer("broken", "numpy", broken),
    ]
    row = _rows(make_op(), host, peers)[0]
    good, bad, none, failed = row.results[1:]
    assert row.ok
    assert good.error_over_bound <= 4 and good.median_us > 0  # 1/3 itself is rounded
    assert not bad.verified and bad.error_over_bound > 1 and bad.median_us > 0
    assert none.median_us is None and "no such" in none.note
    assert failed.median_us is None and "unsupported" in failed.note
    assert [cells[3] for cells in results.table_rows([row])][1:] == [p.name for p in peers]


def test_a_missing_library_is_no_error():
    assert Peer("numpy", "numpy", lambda op, call: None).missing() is None
    assert "no_such_library" in Peer("x", "no_such_library.y", lambda op, call: None).missing()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_function_runs_once_a_round_and_follows_each_other(count, host):
    clock, num_rounds, ran = timing.HostClock(host), 40, []
    clock.min_rounds = clock.max_rounds = num_rounds
    functions = [partial(ran.append, i) for i in range(count)]
    assert [t.runs for t in timing.time_rounds(clock, functions, 1, 1)] == [num_rounds] * count
    orders = [ran[i : i + count] for i in range(0, len(ran), count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    follows = Counter(pair for order in orders[-num_rounds:] for pair in itertools.pairwise(order))
    assert set(follows) == set(itertools.permutations(range(count), 2))
    assert max(follows.values()) <= 3 * num_rounds / count <= 9 * min(follows.values())


def test_times_stand_at_their_functions_places(host):
    clock = timing.HostClock(host)
    functions = (lambda: None), (lambda: sum(range(200_000))), (lambda: None)
    orders = {tuple(timing.order_of_round(3, number)) for number in range(60)}
    assert orders == set(itertools.permutations(range(3)))
    for number in range(20):
        assert np.argmax(clock.round(functions, number)) == 1


def test_one_benchmark_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(tmp_path))
    with protocol.lock(wait=False):
        with pytest.raises(targets.UnavailableError, match="another benchmark"):
            with protocol.lock(wait=False):
                pass
    with protocol.lock(wait=False):
        pass


def test_kernels_of_cases_are_known_before_they_run(host, monkeypatch):
    """Calls of two and three kernels, and one with another array; nothing is compiled."""
    ops = [op for op in OPS if op.name in ("softmax", "dequant_softmax")]
    monkeypatch.setattr(type(host), "compile", lambda *args: pytest.fail("compiled"))
    variants = list(compile_ahead.variants_of_cases(ops, host, 3, 0))
    assert {v.kernel for v in variants} == {
        *("softmax_shared", "align_rows", "dequant_softmax", "normalize_logits")
    }
    monkeypatch.undo()
    compiled = {v for v, _, error in compile_ahead.compile_ahead(host, variants, 2) if not error}
    assert compiled == set(variants)
    assert not [case for case in check.run_cases(ops, host, 3, 0) if case.error]


@pytest.mark.parametrize("found", [0, 200])
def test_an_interrupt_ends_compiling_ahead(found):
    """While variants are found, or while they are compiled: none begins after that."""
    compiled = []

    def compile_slowly(variant):
        compiled.append(variant)
        time.sleep(0.02)

    def variants():
        yield from range(200)
        if not found:
            raise KeyboardInterrupt

    target = SimpleNamespace(name="host", compile=compile_slowly)
    with pytest.raises(KeyboardInterrupt):
        for _ in compile_ahead.compile_ahead(target, variants(), 2):
            raise KeyboardInterrupt
    assert len(compiled) < 20


@pytest.mark.parametrize("nbytes", [1, 8, 4000, 1 << 16])
def test_the_hosts_plain_copy_and_read(nbytes, host, monkeypatch):
    """Kernels too: the copy copies half the bytes, the read reads all, and no more."""
    launched = []
    real = jit.get_kernel

    def get_kernel(target, variant):
        kernel = real(target, variant)
        return lambda grid, args: launched.append(args) or kernel(grid, args)

    monkeypatch.setattr(timing.jit, "get_kernel", get_kernel)
    clock = timing.HostClock(host)
    for function in (clock.copy(nbytes), clock.read(nbytes)):
        function()
    (x, y, count), (z, seen, number) = launched
    assert count == x.size == max(nbytes // 8, 1) and number == z.size == max(nbytes // 4, 1)
    assert (y[:count] == x).all() and (seen[: min(number, 128)] == 1).all()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_sample_of_a_call_needs_no_outputs(op):
    """What a bench row verifies: the same part of the call, with its results and without."""
    problem = op.bench_problem(op.bench_shapes("host")[0], op.dtypes[0])
    call = op.inputs(problem, 0, np)
    with np.errstate(all="ignore"):
        outputs = op.reference(*call.args, **call.kwargs)
    alone, none = op.sample(call, (), 64, 1)
    part, some = op.sample(call, outputs, 64, 1)
    assert none == () and len(some) == len(outputs)
    assert repr(alone) == repr(part)
