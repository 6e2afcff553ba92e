"""Mistakes with Hopper's primitives are reported, by the host target and its race checker."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from hopper_kernels import (
    MATMUL,
    MATMUL_SHARED,
    SCHEDULES,
    Map,
    launch,
    matmul_problem,
    variant,
)
from hopper_mistakes import MISTAKES

from cupykern.targets import UnavailableError, host, host_compiler

F16, F32 = np.float16, np.float32


# --- mistakes, which only the host reports -------------------------------------------------------


def test_every_mistake_changes_the_kernel():
    for name, (old, _new, _said) in MISTAKES.items():
        assert MATMUL.count(old) == 1, name


# Whether the values show these depends on the schedule; the race checker sees them always.
RACES = ("store before all have written",)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(name):
    old, new, said = MISTAKES[name]
    arrays, args, grid = matmul_problem(128, 256, 640)
    expected = arrays["a"].astype(F32) @ arrays["b"].astype(F32).T
    kernel = variant(MATMUL.replace(old, new), threads=384)
    reported = 0
    for schedule in SCHEDULES:
        with host.use(schedule=schedule) as target:
            try:
                c = launch(target, kernel, arrays, args, grid, MATMUL_SHARED)["c"]
                reported += said is None and bool((c != expected).any())
            except host.HostKernelError as error:
                assert re.search(said or "", str(error)), error
                reported += 1
    assert reported >= (1 if name in RACES else len(SCHEDULES))


_PRODUCT = (
    "float d[32]; wgmma_fence(d); "
    "wgmma<half>(d, matrix_descriptor<128>(s.tile, 16, 1024), "
    "matrix_descriptor<128>(s.tile, 16, 1024), false); wgmma_commit();"
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (t == 0) s.first.init(1);", "word.cu:6: a Barrier is initialised twice"),
        ("if (t == 0) s.second.arrive();", "word.cu:6: the Barrier is not initialised"),
        ("if (t == 0) { s.first.state = 7; s.first.arrive(); }", "not initialised, or overwritten"),
        (
            "if (t == 0) s.first.arrive_expect_tx(16);\nsync_block();\n"
            "if (t < 3) s.first.arrive();",
            "word.cu:8: more threads arrive at the Barrier in one phase than it counts",
        ),
        ("s.first.wait(2);", "parity is 0 or 1"),
        (
            "if (t == 0) s.first.arrive();\nelse if (t == 5) s.first.wait(0);\nelse sync_block();",
            r"word.cu:7: Barrier::wait: 1 thread \(5\) of block 0 wait for parity 0 of the Barrier "
            r"of "
            r"word.cu:5: 1 of 3 arrivals; .*126 threads \(1-4, 6-127\) of block 0 wait",
        ),
        (
            "if (t == 0) { s.first.arrive_expect_tx(8192); tma_load(s.tile, map, s.first, {0, 0}); "
            "}",
            "word.cu:6: the block left the kernel before this had arrived",
        ),
        ("if (t == 0) s.first.arrive_expect_tx(64);", "fewer bytes have arrived at the Barrier"),
        ("if (t < 64) { " + _PRODUCT + " }", "word.cu:6: wgmma: 64 of 128 threads of warpgroup 0"),
        (_PRODUCT + " wgmma_wait<1>(d);", "wgmma_wait: these accumulators are still under way"),
        (
            "uint32_t a[4] = {}; float d[32]; wgmma_fence(d); "
            "wgmma<half>(d, a, matrix_descriptor<128>(s.tile, 16, 1024), false); wgmma_commit(); "
            "a[t % 4] = 1; wgmma_wait<0>(d);",
            "word.cu:6: A's registers changed while wgmma read them",
        ),
        (
            _PRODUCT + " if (t % 2) wgmma_wait<0>(d);\n else wgmma_wait<0>(d);",
            "word.cu:[67]: wgmma_wait: .* of 128 threads",
        ),
        ("if (t == 0) s.first.arrive_remote(1);", "no such rank"),
        ("if (t == 0) bulk_load(s.tile, s.tile + 4, 16, s.first);", r"6: bulk_load: .* of 16"),
        ("if (t == 0) bulk_load(s.tile, s.tile, 24, s.first);", r"word.cu:6: bulk_load: .* of 16"),
        (
            "if (t == 0) bulk_load(s.tile + 4096, s.tile, 4096, s.first);",
            "word.cu:6: bulk_load: the copy is larger than the rest of shared memory",
        ),
        (
            "if (t == 0) { s.first.arrive_expect_tx(64); bulk_load(s.tile, &map, 64, s.first); }",
            "word.cu:6: the block left the kernel before this had arrived",
        ),
        (
            "if (t == 0) tma_load(s.tile, map, s.first, {4, 0});",
            "word.cu:6: TMA: the innermost coordinate must be a multiple of 16 bytes",
        ),
        (
            "if (t == 0) tma_store(map, s.tile, {12, 0});",
            "word.cu:6: TMA: the innermost coordinate must be a multiple of 16 bytes",
        ),
        (
            "if (t == 0) { TensorMap odd = map; odd.shape[0] = 60; tma_store(odd, s.tile, {8, 0}); "
            "}",
            "word.cu:6: tma_store: rows must be whole multiples of 16 bytes",
        ),
        (
            "if (t == 0) tma_store(map, s.tile, {8, -1});",
            "word.cu:6: tma_store: no coordinate may be negative",
        ),
    ],
)
def test_misuse_is_reported(body, said):
    text = (
        "struct Storage { alignas(1024) half tile[64 * 64]; Barrier first, second; };\n"
        "KERNEL void word(GRID_CONSTANT TensorMap map) {\n"
        "    SHARED_STORAGE(Storage, s);\n    const int t = threadIdx.x;\n"
        "    if (t == 0) s.first.init(3); sync_block();\n" + body + "\n}\n"
    )
    x = np.zeros((64, 64), F16)
    for schedule in ("fifo", "lifo"):
        with host.use(schedule=schedule) as target:
            with pytest.raises(host.HostKernelError, match=said):
                launch(target, variant(text), {"x": x}, (Map("x", (64, 64), 128),), shared=9216)


# --- the race checker ----------------------------------------------------------------------------

_RACE_CHECK = """
import sys
from hopper_kernels import MATMUL, MATMUL_SHARED, launch, matmul_problem, variant
from hopper_mistakes import MISTAKES
from cupykern.targets import host

text = MATMUL
if sys.argv[2] in MISTAKES:
    text = text.replace(*MISTAKES[sys.argv[2]][:2])
arrays, args, grid = matmul_problem(128, 256, 640)
for schedule in ("fifo", "lifo"):
    with host.use(sanitizer=sys.argv[1], schedule=schedule) as target:
        launch(target, variant(text, threads=384), arrays, args, grid, MATMUL_SHARED)
"""


def _check(sanitizer: str, mistake: str) -> subprocess.CompletedProcess:
    try:
        added = host_compiler.sanitizer_environment(sanitizer)
    except UnavailableError as error:
        pytest.skip(str(error))
    if "TSAN_OPTIONS" in added:
        added["TSAN_OPTIONS"] += " halt_on_error=1"  # each report takes long
    return subprocess.run(
        [sys.executable, "-c", _RACE_CHECK, sanitizer, mistake],
        env={**os.environ, **added, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", host.SANITIZERS)
def test_the_checkers_find_nothing_in_matmul(sanitizer):
    done = _check(sanitizer, "none")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Sanitizer" not in done.stderr, done.stderr[-3000:]


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("mistake", "word"),
    [
        ("store before all have written", "tma_store("),
        ("a stage released too early", "tma_load(s.a"),
        ("no wait for the tile", "wgmma<half>"),
    ],
)
def test_the_race_checker_names_the_line(mistake, word):
    old, new = MISTAKES[mistake][:2]
    lines = MATMUL.replace(old, new).splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if word in line)
    done = _check("thread", mistake)
    assert done.returncode != 0
    # The host's own checks may come first: a store's of fences, wgmma's of what changes under it.
    named = f"word.cu:{number}" in done.stderr
    assert named or "changed while wgmma read it" in done.stderr, done.stderr[-3000:]
