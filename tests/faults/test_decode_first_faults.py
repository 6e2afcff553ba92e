"""Planted faults in the conversion of 8-bit weights and in their scales."""

from __future__ import annotations

from decode_first_checks import check_codes, check_scales
from planted import Fault, fault_tests

from cupykern.targets import host

FILE, BROADCAST = "dequantize_8bit.cu", "gemm/epilogue/broadcast.cuh"
FAULTS = {
    "rows of the result as far apart as the source's": Fault(
        FILE, "rows[i] * p.result_stride", "rows[i] * p.source_stride", "codes"
    ),
    "the last chunk of a row is left out": Fault(
        FILE, "j < there ? from[j]", "j < there - kChunk ? from[j]", "codes"
    ),
    "chunks of the first blocks only": Fault(
        FILE, "first < p.num_chunks; first += kAtOnce * step",
        "first < step; first += kAtOnce * step", "many codes",
    ),
    "one load in flight of four": Fault(
        FILE, "if (first + i * step >= p.num_chunks) continue;", "if (i > 0) continue;",
        "many codes",
    ),
    "no scales of columns": Fault(
        "gemm/epilogue/store_tma.cuh", "if (kScales) values[i] *= of_col(0, i);", "", "scales"
    ),
    "no scale of a": Fault(
        "gemm/epilogue/store_tma.cuh", "alpha * broadcast.rows[0] : alpha", "alpha : alpha",
        "scales",
    ),
    "the bias of the scales' columns": Fault(
        "gemm/epilogue/store_tma.cuh", "of_col(Broadcast::kColVectors - 1, i);", "of_col(0, i);",
        "scales",
    ),
}  # fmt: skip


def _check_codes() -> None:
    if host.current().warp_size == 32:
        check_codes(host.current(), "float8_e4m3fn", "float16", True)


def _check_many_codes() -> None:
    """More chunks than the grid's threads load at once."""
    if host.current().warp_size == 32:
        check_codes(host.current(), "int8", "bfloat16", False, n=3000)


def _check_scales() -> None:
    if host.current().warp_size == 32:
        check_scales(host.current())


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS,
    checks={"codes": _check_codes, "many codes": _check_many_codes, "scales": _check_scales},
)
