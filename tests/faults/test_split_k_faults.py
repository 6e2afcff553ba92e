"""Planted faults in reduce_split_k.cu, each of which a check must catch."""

from __future__ import annotations

from gemm_hopper_problems import check_parts_of_k, compute
from planted import Fault, fault_tests

from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.problems.products import MatmulProblem
from cupykern.targets import host

FILE = "reduce_split_k.cu"
FAULTS = {
    "the last split is left out": Fault(FILE, "split < params.num_splits", "split < 3", "splits"),
    "the first split for all": Fault(FILE, "(split * num_runs + run)", "(run)", "splits"),
    "no more splits than are loaded at once": Fault(
        FILE, "split < params.num_splits", "split < params.num_splits && split < 8", "many splits"
    ),
    "the rest of the splits left out": Fault(
        FILE,
        "split < params.num_splits",
        "split < (params.num_splits < 8 ? params.num_splits : params.num_splits / 8 * 8)",
        "many splits",
    ),
    "the first row's columns": Fault(FILE, "run % row_runs * kRun", "0", "splits"),
}


def check_splits() -> None:
    if host.current().warp_size != 32:
        return  # Hopper's main loop has no others
    problem = MatmulProblem(24, 72, 256, layout_b="F", bias=(72,))
    compute(host.current(), problem, SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4))


def check_many_splits() -> None:
    if host.current().warp_size == 32:
        check_parts_of_k(9)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks={"splits": check_splits, "many splits": check_many_splits}
)
