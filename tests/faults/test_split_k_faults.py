"""Planted faults in split-K with a workspace, each of which a check must catch."""

from __future__ import annotations

from gemm_hopper_problems import check_parts_of_k, compute
from planted import Fault, fault_tests

from cupykern.gemm.sm90_gemm_config import Sm90GemmConfig
from cupykern.gemm.sm90_policies import PingPong
from cupykern.gemm.split_plan import SplitKWorkspace
from cupykern.ops.problems.products import MatmulProblem
from cupykern.targets import host

FILE = "reduce_split_k.cu"
SCHEDULER, STORE = "gemm/scheduler_split_k.cuh", "gemm/epilogue/store_partials.cuh"
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
    "every split has what is left": Fault(
        SCHEDULER, "rest < per_split ? rest : per_split", "rest", "uneven splits"
    ),
    "the first split's stages": Fault(
        SCHEDULER, "int(Base::tile(params, this->first).batch)", "0", "uneven splits"
    ),
    "rows behind the last one": Fault(STORE, "if (at_row >= rows) continue;", "", "uneven splits"),
    "columns behind the last one": Fault(
        STORE, "else if (at_col < cols) {", "else {", "uneven splits"
    ),
    "the second row's accumulators": Fault(STORE, "2 * (i % 2)", "0", "uneven splits"),
    "swap-AB: rows behind the last one": Fault(
        STORE, "if (at_col + 1 < cols) to[n]", "to[n]", "swapped splits"
    ),
    "swap-AB: a pair in one row": Fault(
        STORE, "to[n] = pair[1]", "to[1] = pair[1]", "swapped splits"
    ),
}


def check_splits() -> None:
    if host.current().warp_size != 32:
        return  # Hopper's main loop has no others
    problem = MatmulProblem(24, 72, 256, layout_b="F", bias=(72,))
    compute(host.current(), problem, SplitKWorkspace(Sm90GemmConfig(128, 64, 64, 8), 4))


def check_uneven_splits() -> None:
    check_whole_numbers(Sm90GemmConfig(128, 64, 64, 8))


def check_swapped_splits() -> None:
    check_whole_numbers(Sm90GemmConfig(64, 128, 64, 8, PingPong(), swap_ab=True))


def check_whole_numbers(config: Sm90GemmConfig) -> None:
    """11 stages, the last of 8 elements, in splits of 4, 4 and 3; no whole tile."""
    if host.current().warp_size == 32:
        problem = MatmulProblem(131, 68, 648, layout_b="F", kind="exact")
        compute(host.current(), problem, SplitKWorkspace(config, 3))


def check_many_splits() -> None:
    if host.current().warp_size == 32:
        check_parts_of_k(9)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    checks={
        "splits": check_splits,
        "many splits": check_many_splits,
        "uneven splits": check_uneven_splits,
        "swapped splits": check_swapped_splits,
    },
)
