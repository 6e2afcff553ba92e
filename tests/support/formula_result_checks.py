"""Problems and checks of formulas' results, of any dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from gemm_hopper_problems import fp4, fp8, mixed
from products import MATMUL, compare, random

import cupykern
from cupykern.gemm import gemm, sm90_heuristic
from cupykern.gemm.sm90_gemm_config import Sm90Fp8GemmConfig, Sm90GemmConfig, Sm90MixedGemmConfig
from cupykern.gemm.sm90_heuristic import Sm90AnyConfig
from cupykern.gemm.sm90_policies import Multicast, PingPong, SlicedK, SplitK
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.nvfp4 import random as random_nvfp4
from cupykern.op import Op
from cupykern.ops.problems import dual_gemm
from cupykern.ops.problems.dual_gemm import DualProblem
from cupykern.ops.problems.products import NVFP4, MatmulProblem
from cupykern.targets import Target, host

HOPPER = (
    (Sm90GemmConfig(128, 128, 64, 3), MatmulProblem(200, 264, 192, layout_b="F")),
    (Sm90GemmConfig(128, 128, 64, 3, PingPong(), Multicast(2)),
     MatmulProblem(392, 257, 192, "bfloat16", layout_b="F", batch_a=(2,))),
    (Sm90GemmConfig(128, 128, 64, 3, cluster=SplitK(2)),
     MatmulProblem(136, 264, 320, layout_b="F")),
    (Sm90GemmConfig(32, 64, 64, 4, SlicedK(), Multicast(2), swap_ab=True),
     MatmulProblem(19, 137, 136, layout_b="F")),
    (SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4), MatmulProblem(24, 72, 256, layout_b="F")),
    (Sm90Fp8GemmConfig(128, 128, 4), fp8(136, 264, 272, "blocks")),
    (Sm90Fp8GemmConfig(128, 128, 4), fp8(136, 250, 272, "rows")),
    (Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)), mixed(72, 144, 400, layout_b="F")),
    (Sm90MixedGemmConfig(128, 128, 128, 2, cluster=SplitK(2)), fp4(40, 144, 544)),
)  # fmt: skip

HOPPER_GATES = (
    DualProblem(136, 75, 208),
    DualProblem(140, 136, 96, NVFP4, NVFP4, batch_a=(2, 1), batch_b=(3,)),
    DualProblem(9, 202, 272, "float8_e4m3fn", "float8_e4m3fn", batch_a=(2,), scales="rows"),
    DualProblem(9, 300, 272, "bfloat16", "bfloat16"),
    DualProblem(9, 304, 272, "bfloat16", "bfloat16"),
)


def hoppers_gate_configs(problem: DualProblem, all_configs: bool) -> list[Sm90AnyConfig]:
    """Every second one but with all_configs.  problem: with its formula."""
    found = gemm.configs(dual_gemm.task_of(problem), "sm_90a")
    configs = [c for c in found if isinstance(c, sm90_heuristic.CONFIGS)]
    assert configs
    return configs if all_configs else configs[::2]


def check_with(target: Target, op: Op, problem: Any, config: Any = None, **kwargs: Any) -> None:
    call = op.inputs(problem, 1, target.xp)
    options = {**call.kwargs, **kwargs} | ({} if config is None else {"config": config})
    comparison = compare(op, *call.args, **options)
    assert comparison.ok, f"{problem!r} {config}: {comparison}"


def check_schedules_agree(**changes: Any) -> None:
    """changes: the formula and its results' dtypes, of a problem of HOPPER."""
    config, problem = HOPPER[1]
    call = MATMUL.inputs(replace(problem, **changes), 1, np)
    bits = set()
    for schedule in ("fifo", "lifo", "sticky:1"):
        with host.use(schedule=schedule):
            results = cupykern.matmul(*call.args, **call.kwargs, config=config)
            bits.add(tuple(y.tobytes() for y in results))
    assert len(bits) == 1


def with_nvfp4(target: Target, sides: str) -> tuple[Any, Any]:
    """a (24, 64) and b (64, 40): those of `sides` are NvFp4, others float16."""
    xp = target.xp
    a, b = random(target, (24, 64), "float16", 1), random(target, (64, 40), "float16", 2)
    a = random_nvfp4("unit", (24, 64), 1, xp, "C") if "a" in sides else a
    b = random_nvfp4("unit", (40, 64), 2, xp, "C") if "b" in sides else b
    return a, b
