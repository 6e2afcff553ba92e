"""Planted faults in where kernels wait for the previous one (tests/support/planted.py).

A kernel without any wait is right: it is launched when the previous one has ended.
"""

from __future__ import annotations

import numpy as np
from planted import Fault, fault_tests

from cupykern import check, ops
from cupykern.attention.attention_hopper import AttentionHopperConfig
from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.ops.problems.attention_varlen import VarlenProblem
from cupykern.ops.problems.products import MatmulProblem
from cupykern.ops.problems.rope import RopeProblem
from cupykern.targets import host

WAIT = "wait_for_previous_grid();"
FAULTS = {
    "positions before the wait": Fault(
        "rope_and_cache.cu", WAIT,
        f"const int early = positions[0]; {WAIT} if (early < 0) return;", "rope",
    ),
    "a counter before the wait": Fault(
        "nonfinite.cu", WAIT,
        f"if (threadIdx.x == 0) atomic_add(reinterpret_cast<uint32_t*>(words), 1u); {WAIT}",
        "nonfinite",
    ),
    "only consumers wait": Fault(
        "gemm/kernel_sm90.cuh", WAIT,
        "if (warpgroup != kConsumers)\n wait_for_previous_grid();", "product",
    ),
    "a load before the wait": Fault(
        "gemm/kernel_sm90.cuh", WAIT,
        "if (warp == 4 * kConsumers && elect_one()) {\n"
        "typename Mainloop::PipelineState state;\n"
        "loader.load(scheduler, storage.mainloop, state, first_tile); }\n"
        "sync_warp();\n"
        "wait_for_previous_grid();",
        "product",
    ),
    "lengths before the wait": Fault(
        "attention/kernel_sm90.cuh", WAIT,
        "if (threadIdx.x == 0 && a.cu_seqlens_q && a.cu_seqlens_q[0] != 0) return;\n"
        "wait_for_previous_grid();",
        "sequences",
    ),
}  # fmt: skip


def _holds(op, problem, config) -> None:
    """The previous kernel's results, the arguments, are there late."""
    call = op.inputs(problem, 1, np)
    references = op.reference(*call.args, **call.kwargs)
    bounds = op.bound(*call.args, **call.kwargs, reference=references)
    with host.use(late_producer=True, warp_size=32):
        output = op.run(*call.args, **call.kwargs, config=config)
    assert check.compare((output,), references, bounds).ok


def _check_rope() -> None:
    with host.use(late_producer=True):
        problem = RopeProblem(1, 5, 4, 2, 64, first=3)
        assert check.check_problem(ops.rope_and_cache.OP, problem, 1, np).ok


def _check_product() -> None:
    _holds(ops.matmul.OP, MatmulProblem(136, 72, 128), Sm90GemmConfig(128, 64, 64, 3))


def _check_sequences() -> None:
    problem = VarlenProblem(((70, 90), (0, 5), (130, 130)), 2, 1, 64, 64)
    _holds(ops.attention_varlen.OP, problem, AttentionHopperConfig(128, 64))


def _check_nonfinite() -> None:
    x = np.arange(3000, dtype=np.float32)
    with host.use(late_producer=True):
        report = ops.nonfinite_report.nonfinite_report(x)
    assert report.max == 2999


CHECKS = {
    "rope": _check_rope,
    "product": _check_product,
    "sequences": _check_sequences,
    "nonfinite": _check_nonfinite,
}
test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks=CHECKS, every=2
)
