"""Race and address checkers over every kernel: clean ones give no report, planted faults do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cupykern import OPS
from cupykern.targets import UnavailableError, host_compiler

pytestmark = pytest.mark.sanitizer

# A process each: loading Python and the package under a checker takes as long as several kernels.
GROUPS = (
    (
        *("softmax", "log_softmax", "layer_norm", "rms_norm", "add_rms_norm"),
        *("quantize", "nonfinite_report", "quantize_nvfp4"),
    ),
    ("matmul", "scaled_mm", "complex_matmul", "dual_gemm_silu", "dequant_softmax"),
    (
        *("attention", "attention_varlen", "decode_attention", "rope_and_cache"),
        *("merge_attention", "cascade_attention"),
    ),
)
FAMILIES = "rows", "products", "attention"

_CHECK = """
import sys
from cupykern import OPS, check
from cupykern.attention.decode_config import DecodeConfig
from cupykern.op import RandomDraw, as_tuple
from cupykern.ops.problems.dual_gemm import GATES, DualProblem
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.problems.products import FORMULAS, ROWS, MatmulProblem
from cupykern.ops.problems.scaled import ScaledProblem
from cupykern.rows.norm_configs import PersistentRows
from cupykern.targets import host

# A cluster of blocks, splits of k, chunks of keys.
LARGE = {
    "matmul": (20, 130, 1100),
    "scaled_mm": (20, 130, 1100),
    "complex_matmul": (20, 130, 300),
    "attention": (1, 2, 130, 64, 1),
    "attention_varlen": (2, 2, 100, 64, 1),
    "dual_gemm_silu": (20, 70, 1100),
    "dequant_softmax": (20, 1000, 64),
    "quantize_nvfp4": (130, 96),
    "decode_attention": (1, 4, 2, 600, 128),
    "rope_and_cache": (2, 9, 6, 2, 128),
    "merge_attention": (40, 6, 128),
    "cascade_attention": (40, 2, 1, 30, 16, 64),
}
FIRST = "softmax", "layer_norm", "quantize"  # of the ops whose large rows have one kernel
# Skinny GEMMs that fill their stages again, whose rows and columns end within a tile; rows of a
# number of warps that is not a power of two.
SKINNY = 9, 75, 1104
MORE = {
    "matmul": [
        MatmulProblem(*SKINNY, layout_b="F", epilogue=x) for x in (None, FORMULAS[1], ROWS)
    ],
    "scaled_mm": [
        ScaledProblem(MatmulProblem(m, 75, k, a, "float8_e4m3fn", layout_b="F"), "blocks")
        for m, k, a in ((9, 1104, "float8_e4m3fn"), (3, 80, "float8_e4m3fn"), (5, 1104, "bfloat16"))
    ],
    "dual_gemm_silu": [DualProblem(*SKINNY, epilogue=x) for x in (None, GATES[2])],
    "layer_norm": [NormProblem((3, 2240), "float16", return_stats=True)],
}


def run(op, problem, target):
    comparison = check.check_problem(op, problem, 1, target.xp)
    assert comparison.ok, f"{problem!r}: {comparison}"


def run_with(op, problem, target, config):
    call = op.inputs(problem, 1, target.xp)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    outputs = as_tuple(op.run(*call.args, **call.kwargs, config=config))
    assert check.compare(outputs, references, bounds).ok


def kernel_of(op, problem):
    return op.variant(problem, op.configs(problem, "host")[0]).kernel


def pairs(problem):
    return getattr(problem, "queries", 1) * getattr(problem, "keys", 1)


def drawn(op, covered, count):
    \"\"\"Problems of kernels that are not covered yet, and of others up to `count`.

    Few: a checker's build of a variant takes a second.
    \"\"\"
    problems = [op.draw_problem(RandomDraw(seed)) for seed in range(30)]
    # ThreadSanitizer has room for 8128 threads, fewer than a cluster of 16 blocks.
    problems = [p for p in problems if max(getattr(p, "shape", ()), default=0) <= 2048]
    problems = [p for p in problems if op.work(p).bytes_written]
    if not everything:  # many queries of many keys take as long as all else together
        problems = [p for p in problems if pairs(getattr(p, "own", p)) <= 4096]
    new = []
    for problem in problems:
        if kernel_of(op, problem) not in covered:
            covered.add(kernel_of(op, problem))
            new.append(problem)
    others = [p for p in problems if p not in new]
    return new + others[: max(count - len(new), 0)]


warp_size = int(sys.argv[2])
schedule = {32: "fifo", 64: "lifo"}[warp_size]
ops = [op for op in OPS if op.name in sys.argv[1].split(",")]
covered = set()
everything = sys.argv[3] == "all"
with host.use(sanitizer=sys.argv[4], schedule=schedule, warp_size=warp_size) as target:
    for op in ops:
        large = op.bench_problem(LARGE.get(op.name, (1, 30_000)), op.dtypes[0])
        if everything or op.name in LARGE or op.name in FIRST:  # else the same kernels
            run(op, large, target)
        for problem in MORE.get(op.name, ()):
            run(op, problem, target)
        for problem in drawn(op, covered, 5 if everything else 1):
            run(op, problem, target)
        if op.name in ("softmax", "log_softmax"):  # rows in registers, and long ones with ends
            run(op, op.bench_problem((2, 4096), "float16"), target)
            run(op, op.bench_problem((2, 12_345), "float16"), target)
        if op.name == "decode_attention":  # clusters of blocks
            config = DecodeConfig(16, 64, 2, 64, 8, min_chunk=64, cluster=2)
            run_with(op, large, target, config)
        if op.name in ("layer_norm", "add_rms_norm"):
            config = PersistentRows(128, 8, 2, 2, stages=3)
            run_with(op, op.bench_problem((9, 3000), "float16"), target, config)
"""

_PLANTED = """
import sys
import numpy as np
from cupykern.targets import host
from cupykern.kernels import Variant

SOURCES = {
    "race": '''KERNEL void planted(float* x) {
    SHARED(float, s, [64]);
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[63 - threadIdx.x];
}
''',
    "global": '''KERNEL void planted(float* x) {
    x[threadIdx.x + 1] = 1.0f;
}
''',
    "shared": '''KERNEL void planted(float* x) {
    SHARED(float, s, [64]);
    s[threadIdx.x + 1] = x[threadIdx.x];
    sync_block();
    x[threadIdx.x] = s[threadIdx.x];
}
''',
    "undefined": '''KERNEL void planted(float* x) {
    x[threadIdx.x] = float(1 << (int(threadIdx.x) + 30));
}
''',
}
with host.use(sanitizer=sys.argv[2]) as target:
    variant = Variant("planted", (), (), 64, text=SOURCES[sys.argv[1]])
    target.compile(variant)(1, (np.ones(64, np.float32),))
"""


def run(sanitizer: str, script: str, *args: str) -> subprocess.CompletedProcess:
    try:
        added = host_compiler.sanitizer_environment(sanitizer)
    except UnavailableError as error:
        pytest.skip(str(error))
    return subprocess.run(
        [sys.executable, "-c", script, *args, sanitizer],
        # numpy's threads, of which the checkers know nothing, look like races.
        env={**os.environ, **added, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_op_is_in_a_group():
    assert sorted(name for group in GROUPS for name in group) == sorted(op.name for op in OPS)


@pytest.mark.parametrize(
    ("sanitizer", "warp_size"),
    [
        ("thread", 32),
        ("address", 64),
        pytest.param("thread", 64, marks=pytest.mark.exhaustive),
        pytest.param("address", 32, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("group", GROUPS, ids=FAMILIES)
def test_no_sanitizer_reports_an_error_of_any_kernel(group, sanitizer, warp_size, exhaustive):
    count = "all" if exhaustive else "few"
    done = run(sanitizer, _CHECK, ",".join(group), str(warp_size), count)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Sanitizer" not in done.stderr, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("fault", "sanitizer", "line"),
    [
        ("race", "thread", 4),
        ("global", "address", 2),
        ("shared", "address", 3),
        ("undefined", "address", 2),
    ],
)
def test_sanitizers_name_the_line_of_a_planted_fault(fault, sanitizer, line):
    done = run(sanitizer, _PLANTED, fault)
    assert done.returncode != 0
    assert f"planted.cu:{line}" in done.stderr, done.stderr[-3000:]
