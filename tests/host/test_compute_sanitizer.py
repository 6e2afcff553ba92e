"""NVIDIA's checkers over a variant of each kernel.

They find accesses out of bounds, races in shared memory, reads of memory that nobody wrote, and
barriers that not all threads reach.  The host target's checkers (test_sanitizers.py) need no GPU,
but what they check is not NVIDIA's code.
"""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import needs
import numpy as np
import pytest

from cupykern import OPS, targets
from cupykern.tools.campaign import sanitizers

_AT_ONCE = 2 * len(sanitizers.TOOLS)  # processes


@pytest.fixture(scope="module")
def tallies():
    """What all tools say about all groups of ops: [(tool, names, tally)]."""
    here = targets.get()
    tasks = sanitizers.tasks(OPS, 1, 0, 1)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = pool.map(lambda task: sanitizers.run(task, here), tasks)
    subjects = (task.subject.split() for task in tasks)
    return [(tool, names, tally) for (tool, *names), tally in zip(subjects, found, strict=True)]


@pytest.mark.gpu
@pytest.mark.sanitizer
@needs.cuda
@pytest.mark.parametrize("tool", sanitizers.TOOLS)
def test_no_tool_reports_an_error_of_any_kernel(gpu, tool, request):
    for of, names, tally in request.getfixturevalue("tallies"):
        if of == tool:
            if tally.notes:
                pytest.skip(tally.notes[0])
            assert not tally.failed, tally.failures
            assert {op for op, _ in tally.rows} == set(names)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_kernel_is_launched(op, monkeypatch):
    pytest.importorskip("cupy")
    from fake_gpu import fake_gpu, on_fake_gpu

    with fake_gpu(monkeypatch) as gpu:

        def inputs(problem, seed, xp):
            gpu.reuse()
            return on_fake_gpu(op.inputs(problem, seed, np), gpu)

        uploading = dataclasses.replace(op, inputs=inputs)
        launched = set()
        for problem in sanitizers.select(uploading, gpu, 0):
            launched |= sanitizers.launches(uploading, problem, 0, gpu)
    kernels = {variant.kernel for variant in launched}
    assert kernels >= {variant.kernel for variant in op.variants(gpu.arch)}


def test_report_names_the_call_of_the_first_error():
    text = "checked softmax A\n========= Invalid read\n=========     at softmax\n"
    found = sanitizers.report(9, text + "checked softmax B\nchecked softmax C\n")
    assert found.splitlines()[:2] == ["exit code 9 in softmax B", "========= Invalid read"]
    assert sanitizers.report(9, text).startswith("exit code 9 after softmax A")


def test_initcheck_makes_results_of_zeros(monkeypatch):
    """Stores by TMA, which it does not know, would count as none where CuPy copies a result."""
    from cupykern import arrays
    from cupykern.ops import attention
    from cupykern.targets import host

    modules = [module for module in list(sys.modules.values()) if hasattr(module, "maker")]
    for module in modules:
        monkeypatch.setattr(module, "maker", module.maker)
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            set_allocator=lambda allocate: None,
            Device=lambda: SimpleNamespace(synchronize=lambda: None),
        )
    )
    monkeypatch.setattr(targets, "get", lambda name: SimpleNamespace(xp=fake))
    sanitizers.calls("initcheck", [], 0)
    assert attention.maker is not arrays.maker
    made = attention.maker(np)((300, 500), np.float32)
    assert made.shape == (300, 500) and not made.any()
    assert host.current().xp is np
