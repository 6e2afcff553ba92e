"""Planted faults in align_rows.cu, each of which a check must catch."""

from __future__ import annotations

import numpy as np
from copy_checks import check_copy
from planted import Fault, fault_tests

from cupykern.targets import host

FILE = "align_rows.cu"
FAULTS = {
    "lines that begin at 8 bytes are not shifted": Fault(FILE, "first & 8", "first & 16", "lines"),
    "whole words are not shifted": Fault(FILE, "first & 4", "first & 16", "lines"),
    "parts of words are not shifted": Fault(FILE, "first % 4 * 0x1111", "0 * 0x1111", "lines"),
    "the last chunk is not copied": Fault(FILE, "i < rest;", "i < 0;", "lines"),
    "chunks of the first blocks only": Fault(
        FILE, "number < params.num_chunks; number += step", "number < step; number += step", "lines"
    ),
}


def check_lines() -> None:
    for dtype, gap in ((np.float16, 0), (np.int8, 3), (np.float32, 0)):
        check_copy(host.current(), (1100, 301), dtype, gap, 3)


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, checks={"lines": check_lines}
)
