"""Planted faults in align_rows.cu, each of which a check must catch."""

from __future__ import annotations

import numpy as np
from copy_checks import check_copy
from planted import Fault, fault_tests

from cupykern.targets import host

FILE = "align_rows.cu"
PARTS = "gemm/align_rows.cuh"
FAULTS = {
    "rows that begin at 8 bytes are not shifted": Fault(PARTS, "first & 8", "first & 16", "rows"),
    "whole words are not shifted": Fault(PARTS, "first & 4", "first & 16", "rows"),
    "parts of words are not shifted": Fault(PARTS, "first % 4 * 0x1111", "0 * 0x1111", "rows"),
    "the last chunk is not copied": Fault(PARTS, "i < rest;", "i < 0;", "rows"),
    "chunks of the first blocks only": Fault(
        FILE, "number < params.num_chunks; number += step", "number < step; number += step", "rows"
    ),
}


def check_rows() -> None:
    for dtype, gap in ((np.float16, 0), (np.int8, 3), (np.float32, 0)):
        check_copy(host.current(), (1100, 301), dtype, gap, 3)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks={"rows": check_rows}
)
