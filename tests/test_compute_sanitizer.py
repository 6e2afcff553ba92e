"""NVIDIA's checkers over every op on a GPU: no access out of bounds, no race in shared memory.

The host target's checkers (test_sanitizers.py) need no GPU, but what they check is not NVIDIA's code.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from cupykern import OPS

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]

_ROWS = ((64, 1024), (16, 4096), (4, 65536), (2, 262144))  # from a warp to a cluster
_PRODUCTS = ((256, 256, 256), (300, 520, 264), (64, 512, 512), (16, 512, 512), (1, 512, 512))
SHAPES = {
    "softmax": _ROWS,
    "log_softmax": _ROWS,
    "layer_norm": _ROWS,
    "rms_norm": _ROWS,
    "add_rms_norm": _ROWS,
    "quantize": _ROWS[:2],
    "quantize_nvfp4": ((256, 512),),
    "nonfinite_report": ((256, 1024), (1024, 1024)),
    "matmul": (*_PRODUCTS, (2048, 2048, 128), (128, 256, 4096)),
    "scaled_mm": (*_PRODUCTS, (2048, 2048, 128)),
    "dual_gemm_silu": _PRODUCTS[::3],
    "dequant_softmax": ((1, 2048, 256), (16, 2048, 256), (256, 2048, 256)),
    "attention": ((1, 2, 256, 64), (1, 2, 256, 128, 1), (1, 2, 300, 256), (1, 2, 512, 128, 2)),
    "attention_varlen": ((2, 2, 200, 128), (2, 2, 200, 128, 1)),
    "decode_attention": ((1, 8, 2, 512, 128), (2, 8, 8, 300, 128)),
}

_CALLS = """
import sys
from cupykern import OPS, check, targets

op, shapes = next(op for op in OPS if op.name == sys.argv[1]), eval(sys.argv[2])
for shape in shapes:
    for dtype in op.dtypes:
        try:
            problem = op.bench_problem(shape, dtype)
        except (ValueError, TypeError):  # k that a dtype does not take
            continue
        comparison = check.check_problem(op, problem, 1, targets.get().xp)
        assert comparison.ok, f"{problem!r}: {comparison}"
        print("right", problem)
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_no_report(gpu, op, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if gpu.name != "cuda" or sanitizer is None:
        pytest.skip("no compute-sanitizer")
    command = [sys.executable, "-c", _CALLS, op.name, repr(SHAPES[op.name])]
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", *command],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "CUPYKERN_CUDA_CHECKED": "1" if tool == "racecheck" else "0",
        },
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this GPU here")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("right") >= len(SHAPES[op.name])
