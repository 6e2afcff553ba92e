"""Compare the accuracy of dual_gemm_silu's policies on the same accumulators.

The policy changes only the epilogue; the accumulators are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import check, dtypes
from ..gemm import gemm
from ..numerics import as_float64, namespace
from ..ops.checks.gates import POLICIES
from ..ops.dual_gemm_silu import OP
from ..ops.problems.dual_gemm import DualProblem, task_of
from ..targets import Target, UnavailableError
from ..targets.limits import max_shared_bytes, max_threads
from ..targets.offline import compile_offline
from ..typing import Array

TOLERANCE = 1e-3  # rtol and atol, against the reference rounded to FP16
K = 7168


@dataclass(frozen=True)
class PolicyRow:
    """One policy on one problem, FP16 results.

    outside: the share of elements with |error| > TOLERANCE * (1 + |reference|), with the reference
    rounded to FP16.  registers, occupancy: of the kernel for `arch`, which all policies share; None
    without a compiler for it.
    """

    problem: str
    policy: str
    max_abs: float
    ulps: float
    outside: float
    error_over_bound: float
    arch: str
    registers: int | None
    occupancy: float | None


def problems(target: str) -> tuple[tuple[str, DualProblem], ...]:
    """Return NVFP4 as in GPU MODE's problem, and FP16 with products of variance 1."""
    m, n = (128, 256) if target == "host" else (256, 4096)
    fp4 = "float4_e2m1fn"
    return (
        ("NVFP4 codes to 1.5, scales in [0, 1)", DualProblem(m, n, K, fp4, fp4, kind="codes")),
        ("FP16, products of variance 1", DualProblem(m, n, K, kind="unit")),
    )


def compare(target: Target, seed: int = 0) -> Iterator[PolicyRow]:
    for name, problem in problems(target.name):
        call = OP.inputs(problem, seed, target.xp)
        references = OP.reference(*call.args, **call.kwargs)
        rounded = as_float64(references[0].astype(dtypes.float16))
        arch, registers, occupancy = usage_of(problem, target)
        for policy in POLICIES:
            kwargs = {**call.kwargs, "policy": policy, "out_dtype": "float16"}
            y = OP.run(*call.args, **kwargs)
            bounds = OP.bound(*call.args, **kwargs, reference=references)
            found = check.compare((y,), references, bounds)
            yield PolicyRow(
                *(name, policy, found.max_abs, found.ulps, outside(y, rounded)),
                *(found.error_over_bound, arch, registers, occupancy),
            )


def outside(y: Array, rounded: Any) -> float:
    xp = namespace(y)
    error = xp.abs(as_float64(y) - rounded)
    return float(xp.mean(~(error <= TOLERANCE * (1 + xp.abs(rounded)))))


def usage_of(problem: DualProblem, target: Target) -> tuple[str, int | None, float | None]:
    """Return (arch, registers, occupancy) of the kernel on the GPU; on the host, of sm_90a's."""
    arch = "sm_90a" if target.name == "host" else target.arch
    task = task_of(problem)
    config = gemm.choose_config(task, arch)
    try:
        usage = compile_offline(gemm.variant(task, config), arch)
    except UnavailableError:
        return arch, None, None
    if arch.startswith("gfx") or usage.registers is None:
        return arch, usage.registers, None
    shared = config.shared_bytes(task)
    return arch, usage.registers, occupancy(arch, config.num_threads, usage.registers, shared)


def occupancy(arch: str, num_threads: int, registers: int, shared_bytes: int) -> float:
    """Return the share of an NVIDIA SM's warps that resident blocks of a kernel fill.

    This follows CUDA's occupancy calculator: 256 registers per warp is the allocation unit, and
    each block takes 1 KiB of additional shared memory.
    """
    warps = -(-num_threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    blocks = min(
        65536 // (per_warp * warps),
        (max_shared_bytes(arch) + 1024) // (shared_bytes + 1024),
        max_threads(arch) // num_threads,
    )
    return blocks * warps / (max_threads(arch) // 32)
