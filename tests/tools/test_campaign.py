"""The campaign: each part passes right ops and finds planted faults; the record outlives a run."""

from __future__ import annotations

import inspect
import json
import os
import stat
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import fake_gpu, on_fake_gpu
from fake_op import make_op

from cupykern import OPS, cli, targets
from cupykern.targets import host
from cupykern.tools import commands_campaign
from cupykern.tools.campaign import (
    bad_calls,
    bad_values,
    breaks,
    cases,
    large,
    large_calls,
    parts,
    products,
    repeats,
    runner,
    sanitizers,
    shapes,
    streams,
    tally,
    workers,
)
from cupykern.tools.campaign.bits import codes
from cupykern.tools.campaign.tally import Task

BY_NAME = {op.name: op for op in OPS}
HOST = targets.get("host")


@pytest.fixture
def ops(monkeypatch):
    """ops(*replaced): the tasks find these ops by their names."""

    def use(*replaced):
        monkeypatch.setattr(tally, "OPS", replaced)

    return use


def planted(name, change):
    """The op whose function returns change(result), which it also writes to `out`."""
    op = BY_NAME[name]

    def run(*args, out=None, **kwargs):
        result = change(op.run(*args, **kwargs))
        if out is None:
            return result
        out[...] = result
        return out

    return replace(op, run=run)


def first_task(part, op, count):
    amount = replace(part.on_host, count=count)
    return replace(part, on_host=amount).tasks_on(HOST, (op,), 0)[0]


def part(name):
    return next(part for part in parts.PARTS if part.name == name)


# --- random cases -------------------------------------------------------------------------------


def test_cases_find_a_wrong_element(ops):
    for fault in (None, "value", "guard", "raises"):
        op = make_op(fault)
        ops(op)
        found = cases.run(Task("cases", op.name, 0, 20, 3), HOST)
        assert found.done == 20 and bool(found.failed) == (fault is not None), fault
    assert found.failures[0]["seed"] in range(3, 23)


def test_cases_advance_all_ops_together():
    found = cases.tasks(OPS, 5, 0, 2)
    assert [task.subject for task in found[: len(OPS)]] == [op.name for op in OPS]
    assert sum(task.count for task in found) == 5 * len(OPS)
    seeds = [seed for task in found if task.subject == "softmax" for seed in task.seeds]
    assert seeds == list(range(5))


# --- the same bits ------------------------------------------------------------------------------


def test_repeats_find_a_result_that_differs_now_and_then(ops):
    good = BY_NAME["quantize_nvfp4"]
    ops(good)
    task = first_task(part("repeats"), good, 3)
    found = repeats.run(task, HOST)
    assert (found.failed, found.done) == (0, 9)
    calls = iter(range(1000))

    def change(result):
        if next(calls) == 9:
            result.scale.view(np.uint8).reshape(-1)[-1] ^= 1  # one bit
        return result

    ops(planted(good.name, change))
    assert repeats.run(task, HOST).failed == 1


def test_streams_find_what_depends_on_the_thread(ops):
    good = BY_NAME["quantize_nvfp4"]
    ops(good)
    task = first_task(part("streams"), good, 2)
    found = streams.run(task, HOST)
    assert found.failed == 0
    assert found.done == streams.THREADS * streams.STREAMS * 2

    def change(result):
        if threading.current_thread() is not threading.main_thread():
            result.data.reshape(-1)[0] ^= 1
        return result

    ops(planted(good.name, change))
    assert streams.run(task, HOST).failed


def test_streams_count_an_error_in_a_thread(ops):
    def change(result):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no such luck")
        return result

    ops(planted("quantize_nvfp4", change))
    found = streams.run(Task("streams", "quantize_nvfp4", 0, 2, 0), HOST)
    assert found.failed and "no such luck" in found.failures[0]["error"]


# --- exact products -----------------------------------------------------------------------------

SUBJECTS = [task.subject for task in products.tasks(OPS, 1, 0, 1)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_products_of_integers_are_exact(subject):
    found = products.run(Task("products", subject, 0, 3, 0), HOST)
    assert (found.done, found.failed) == (3, 0), found.failures


def test_products_are_of_every_pair_of_dtypes():
    assert len(SUBJECTS) == len(set(SUBJECTS)) == 50
    for op in OPS:
        named = [subject for subject in SUBJECTS if subject.split()[0] == op.name]
        assert len(named) == len(products.pairs(op))


def run_for_hopper(subject, seed, gpu):
    """Launch what the campaign draws for an H200.  Raises if the config does not fit."""
    name, *names = subject.split()
    op, on_hopper = BY_NAME[name], SimpleNamespace(name="cuda", arch="sm_90a", xp=np)
    drawn = products.draw(op, tuple(names), seed, on_hopper)
    call = on_fake_gpu(drawn.call, gpu)
    out = gpu.array(drawn.expected.shape, drawn.expected.dtype)
    given = {"out": out} if products.takes_out(drawn, seed) else {}
    op.run(*call.args, **call.kwargs, **given)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_configs_drawn_for_hopper_fit_their_products(subject, monkeypatch, exhaustive):
    monkeypatch.setattr(products, "CONFIG_EVERY", 1)
    with fake_gpu(monkeypatch, 1 << 28) as gpu:
        for seed in range(20 if exhaustive else 5):
            gpu.reuse()
            run_for_hopper(subject, seed, gpu)


@pytest.mark.parametrize(
    ("subject", "seed"),
    [("matmul float16 int8", 1000009), ("matmul bfloat16 float8_e4m3fn", 1000142)],
)
def test_configs_fit_a_residual_of_any_dtype(subject, seed, monkeypatch):
    """Tiles of the epilogue that adds a residual of the result's dtype, which these have not."""
    with fake_gpu(monkeypatch, 1 << 28) as gpu:
        run_for_hopper(subject, seed, gpu)


def test_sums_of_products_come_near_to_the_limit():
    """2^22, 2^24 over the epilogue's factors: smaller sums would hide a lossy accumulator."""
    largest = 0.0
    for seed in range(100):
        drawn = products.draw(BY_NAME["matmul"], ("float16", "float16"), seed, HOST)
        a, b = (np.abs(x.astype(np.float64)) for x in drawn.call.args)
        largest = max(largest, float((a @ b).max(initial=0)))
    assert 2**21 < largest <= 2**22


@pytest.mark.parametrize("name", ["matmul", "scaled_mm", "dual_gemm_silu"])
def test_products_find_one_bit_of_one_element(name, ops):
    def change(result):
        codes(result).reshape(-1)[-1] ^= 1
        return result

    ops(planted(name, change))
    task = Task("products", f"{name} float16 float8_e4m3fn", 0, 2, 0)
    assert products.run(task, HOST).failed == 2


def test_products_find_an_element_written_too_many(ops):
    op = BY_NAME["matmul"]

    def run(*args, out=None, **kwargs):
        if out is not None:
            buffer = out.base
            while buffer.base is not None:
                buffer = buffer.base
            buffer[-1] = 0
        return op.run(*args, out=out, **kwargs)

    ops(replace(op, run=run))
    found = products.run(Task("products", "matmul float16 float16", 0, 4, 0), HOST)
    assert found.failed == 2 and "overwritten" in found.failures[0]["error"]


# --- large arrays -------------------------------------------------------------------------------


def test_every_op_has_large_calls():
    assert {*large_calls.CALLS, *shapes.SHAPES} <= set(BY_NAME)
    assert all(map(large_calls.calls, OPS)) and all(any(shapes.large(op)) for op in OPS)


def test_large_calls_are_of_bench_shapes_by_default(monkeypatch):
    monkeypatch.delitem(large_calls.CALLS, "softmax")
    assert large.tasks([BY_NAME["softmax"]], 1, 0, 1) == [Task("large", "softmax rows", 0, 1, 0)]
    assert large.run(Task("large", "softmax rows", 0, 1, 0), HOST).done == 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("task", large.tasks(OPS, 1, 0, 1), ids=lambda task: task.subject)
def test_large_calls_are_right(task):
    found = large.run(task, HOST)
    assert (found.done, found.failed) == (1, 0), found.failures


def test_large_calls_find_the_last_row_unwritten(ops):
    def change(result):
        result[-1] = result[0]
        return result

    ops(planted("softmax", change))
    assert large.run(Task("large", "softmax rows", 0, 1, 0), HOST).failed == 1


def test_large_calls_without_memory_are_noted(ops):
    def change(result):
        raise MemoryError("no 8 GB")

    ops(planted("softmax", change))
    found = large.run(Task("large", "softmax rows", 0, 1, 0), HOST)
    assert found.done == 0 and found.notes == ["softmax rows: not run, no 8 GB"]


# --- bad calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_bad_calls_raise_typed_errors(op):
    found = bad_calls.run(Task("bad_calls", op.name, 0, 3, 0), HOST)
    assert (found.done, found.failed) == (30, 0), found.failures


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_argument_has_bad_values(op):
    for name, parameter in inspect.signature(op.run).parameters.items():
        has_own = bad_values.is_array(name) or name in ("out", "config")
        assert has_own or bad_values.options(parameter)


def test_configs_of_other_packages_are_bad_values():
    drawn = bad_calls.draw(BY_NAME["softmax"], 1, HOST)
    labels = {way.label for way in breaks.breaks(drawn, np.random.default_rng(0))}
    assert any(label.startswith("config=GemmConfig(") for label in labels)


def test_bad_values_of_an_argument_without_its_own_follow_from_its_default():
    op = make_op()

    def run(y, shift=1.0, *, wide=False, out=None):
        return op.run(y, out=out)

    drawn = bad_calls.draw(replace(op, run=run), 1, HOST)
    labels = {way.label for way in breaks.breaks(drawn, np.random.default_rng(0))}
    assert {"shift='1'", "wide=1.0", "y: float64"} <= labels and "shift=inf" not in labels


def test_the_longest_length_of_paged_keys_may_be_none():
    seen = set()
    for seed in range(20):
        drawn = bad_calls.draw(BY_NAME["attention_varlen"], seed, HOST)
        labels = {way.label for way in breaks.breaks(drawn, np.random.default_rng(0))}
        paged = "block_table" in drawn.arguments
        assert ("max_seqlen_k=None" in labels) != paged and "max_seqlen_k=-1" in labels
        seen.add(paged)
    assert seen == {False, True}


def bad_softmax(handle):
    """handle(error, x, out, kwargs) takes place of the error."""
    op = BY_NAME["softmax"]

    def run(x, axis=-1, *, mask=None, scale=None, dtype=None, out=None, config=None):
        try:
            kwargs = {"mask": mask, "scale": scale, "dtype": dtype, "out": out, "config": config}
            return op.run(x, axis, **kwargs)
        except Exception as error:
            return handle(error, x, out)

    return replace(op, run=run)


def test_bad_calls_find_one_that_is_accepted(ops):
    ops(bad_softmax(lambda error, x, out: out))
    found = bad_calls.run(Task("bad_calls", "softmax", 0, 2, 0), HOST)
    assert found.failed >= 15 and found.failures[0]["error"] == "it was accepted"


def test_bad_calls_find_an_error_of_another_type(ops):
    def handle(error, x, out):
        raise RuntimeError("no such luck")

    ops(bad_softmax(handle))
    found = bad_calls.run(Task("bad_calls", "softmax", 0, 2, 0), HOST)
    assert found.failed >= 15 and found.failures[0]["error"] == "RuntimeError: no such luck"


@pytest.mark.parametrize("which", ["an input", "out"])
def test_bad_calls_find_memory_that_was_written(which, ops):
    def handle(error, x, out):
        y = {"an input": x, "out": out}[which]
        if isinstance(y, np.ndarray) and y.size and y.dtype in (np.float16, np.float32):
            y.flags.writeable = True
            y[...] = 1
        raise error

    ops(bad_softmax(handle))
    found = bad_calls.run(Task("bad_calls", "softmax", 0, 8, 0), HOST)
    assert f"{which} was written" in {failure["error"] for failure in found.failures}


# --- compute-sanitizer --------------------------------------------------------------------------

CUDA = SimpleNamespace(name="cuda", arch="sm_90a")


def fake_sanitizer(tmp_path, monkeypatch, text, code):
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("text", "code", "done", "failed"),
    [
        ("checked softmax a\nfinished softmax\nchecked matmul b\nfinished matmul", 0, 2, 0),
        ("checked softmax a\nfinished softmax\n========= Invalid read", 9, 2, 1),
        ("Traceback", 1, 1, 1),
    ],
)
def test_sanitizers_count_reports(text, code, done, failed, tmp_path, monkeypatch):
    fake_sanitizer(tmp_path, monkeypatch, text, code)
    found = sanitizers.run(Task("sanitizers", "memcheck softmax matmul", 0, 1, 0), CUDA)
    assert (found.done, found.failed) == (done, failed)
    if code == 9:
        assert found.failures[0]["op"] == "matmul" and "Invalid read" in found.failures[0]["error"]


def test_sanitizers_that_are_not_here_are_noted(tmp_path, monkeypatch):
    task = Task("sanitizers", "memcheck softmax", 0, 1, 0)
    fake_sanitizer(tmp_path, monkeypatch, "Device not supported", 1)
    assert "does not support" in sanitizers.run(task, CUDA).notes[0]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert "no compute-sanitizer" in sanitizers.run(task, CUDA).notes[0]
    assert "not for host" in sanitizers.run(task, HOST).notes[0]


def test_sanitizers_that_run_at_once_have_different_ops():
    found = [task.subject.split() for task in sanitizers.tasks(OPS, 1, 0, 1)]
    assert len(found) == len(sanitizers.TOOLS) * sanitizers.GROUPS
    for i in range(0, len(found), len(sanitizers.TOOLS)):
        names = [name for _, *names in found[i : i + len(sanitizers.TOOLS)] for name in names]
        assert sorted(names) == sorted(BY_NAME)


# --- the record ---------------------------------------------------------------------------------


def small(name, count=1, **changes):
    amount = replace(part(name).on_host, count=count, chunk=1)
    return replace(part(name), on_host=amount, **changes)


def read(path):
    """The record, and its parts by name."""
    document = json.loads(path.read_text())
    return document, {part["part"]: part for part in document["parts"]}


def campaign(tmp_path, *chosen):
    path = tmp_path / "campaign.json"
    op = BY_NAME["quantize_nvfp4"]
    return runner.Campaign(chosen, (op,), HOST, 5, path), path


def test_a_campaign_runs_its_parts_in_processes(tmp_path):
    run, path = campaign(tmp_path, small("large"), small("cases", 3))
    told = []
    run.run(2, 60, lambda progress: told.append(progress.part.name))
    document, by_name = read(path)
    assert sorted(told) == ["cases", "large"]
    assert document["kind"] == "campaign" and document["seed"] == 5 and document["complete"]
    found = by_name["cases"]
    assert (found["state"], found["done"], found["failed"]) == ("finished", 3, 0)
    assert (document["seed"], found["last_seed"]) == (5, 7)
    done = document["row_columns"].index("done")
    assert sum(row[done] for of_op in found["rows"].values() for row in of_op.values()) == 3
    assert not list(tmp_path.glob("*.new"))


def test_an_interrupted_campaign_keeps_what_was_done(tmp_path):
    run, path = campaign(tmp_path, small("cases", 1000))

    def tick():
        if run.progress[0].finished >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(1, 60, tick=tick)
    document, by_name = read(path)
    found = by_name["cases"]
    assert found["state"] == "cut" and found["done"] >= 2 and not document["complete"]


def test_a_campaign_ends_in_time(tmp_path):
    run, path = campaign(tmp_path, small("cases", 100_000), small("repeats"))
    run.run(1, 3)
    states = {name: part["state"] for name, part in read(path)[1].items()}
    assert states == {"cases": "cut", "repeats": "not begun"} and run.seconds < 15


def test_a_part_gives_way_after_its_share_of_the_time(tmp_path):
    run, _ = campaign(tmp_path, small("cases", 100_000, share=0.01), small("large"))
    run.run(1, 60)
    assert [progress.state for progress in run.progress] == ["cut", "finished"]


def test_a_hung_task_is_a_failure(tmp_path):
    run, _ = campaign(
        tmp_path, replace(small("cases"), task_seconds=0, on_host=parts.Amount(1000, 1000))
    )
    run.run(1, 60)
    found = run.progress[0]
    assert found.tally.failed == 1 and "no answer" in found.tally.failures[0]["error"]


def test_a_part_whose_tasks_all_break_gives_up(tmp_path):
    run, path = campaign(tmp_path, small("cases", 1000))
    progress = run.progress[0]
    for _ in range(8):
        broken = tally.Tally()
        workers.failed(broken, progress.begin(), "no such luck")
        progress.end(broken)
    assert progress.done and progress.state == "cut" and "given up" in progress.tally.notes[0]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        ("CUDARuntimeError: cudaErrorIllegalAddress: an illegal memory access", True),
        ("CUDADriverError: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", True),
        ("CUDARuntimeError: cudaErrorMemoryAllocation: out of memory", False),
        ("ValueError: x must be an array", False),
    ],
)
def test_a_lost_context_is_known_by_its_error(error, lost):
    assert tally.is_context_lost(error) == lost


# --- the command --------------------------------------------------------------------------------


def test_the_command_names_every_part():
    assert tuple(part.name for part in parts.PARTS) == commands_campaign.PARTS


def test_the_command_writes_a_record(capsys, tmp_path):
    path = tmp_path / "campaign.json"
    args = ("--target", "host", "--only", "sanitizers", "--json", str(path))
    assert cli.main(["campaign", *args]) == 0
    out = capsys.readouterr().out
    assert "sanitizers: finished, 0 done, 0 failed" in out
    assert out.splitlines()[-1].startswith("campaign: 0 of 0 checks failed")
    assert read(path)[1]["sanitizers"]["state"] == "finished"


def test_the_command_fails_if_a_check_does(capsys, monkeypatch):
    hung = replace(part("cases"), task_seconds=0, on_host=parts.Amount(1000, 1000))
    monkeypatch.setattr(parts, "PARTS", (hung,))
    args = ("--target", "host", "--only", "cases", "--jobs", "1", "--seconds", "2")
    assert cli.main(["campaign", *args]) == 1
    assert "no answer in 0 s" in capsys.readouterr().out


def test_host_settings_do_not_change_the_campaign():
    with host.use(warp_size=64) as target:
        found = products.run(Task("products", "matmul float16 float16", 0, 2, 0), target)
    assert found.failed == 0
