"""Planted faults in nonfinite_report (tests/support/planted.py)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

import cupykern
from cupykern import dtypes
from cupykern.ops.nonfinite_report import OP, NonfiniteProblem
from cupykern.rows import nonfinite_plan
from cupykern.rows.nonfinite_walk import make_walk
from cupykern.rows.row_layout import operand
from cupykern.targets import host

FILE = "rows/nonfinite_report.cuh"
PARTS = "rows/nonfinite.cuh"
FAULTS = {
    # name: (file, old, new, the check that catches it first)
    # Within the first level too, what is left for the last block may be zero, for which it waits.
    "no barrier between the merges": Fault(
        FILE,
        "of_warps[warp] = found;\n        sync_block();",
        "of_warps[warp] = found;\n        if (level == 0) sync_block();",
        "blocks",
    ),
    "no barrier before what is counted": Fault(
        FILE,
        "special[tid] = tid == kFirst ? kNowhere : 0;\n    sync_block();",
        "sync_block();\n    special[tid] = tid == kFirst ? kNowhere : 0;",
        "special",
    ),
    "what all blocks have found is left too": Fault(
        FILE, "if (level == 0 && warp", "if (warp", "words"
    ),
    "the head is no vector": Fault(
        FILE,
        "head = int64_t(-reinterpret_cast<uintptr_t>(data) % 16 / sizeof(Element));",
        "",
        "unaligned",
    ),
    "the tail begins late": Fault(FILE, "tid - head + tail;", "tid - head + tail + 1;", "dense"),
    "what is read twice counts twice": Fault(
        FILE, "sums[j] = j * kStep < count ? part : 0.0f;", "sums[j] = part;", "dense"
    ),
    "a sum that is not finite is taken": Fault(
        FILE, "if (is_finite(batch_sum))", "if (true)", "special"
    ),
    "an infinite sum passes for finite": Fault(
        PARTS, "& 0x7fffffffu) < 0x7f800000u; }", "& 0x7fffffffu) <= 0x7f800000u; }", "special"
    ),
    "only a batch's first vector is inspected": Fault(
        FILE, "j < count; j += kStep", "j < 1; j += kStep", "special"
    ),
    "places of 32 bits": Fault(
        PARTS,
        "return index + int64_t(rest) * steps[num_dims - 1];",
        "return int(index + int64_t(rest) * steps[num_dims - 1]);",
        "large offsets",
    ),
    "outer dims in the wrong order": Fault(
        PARTS, "index += int64_t(rest - next * size)", "index += int64_t(next)", "F"
    ),
    "the first as it is walked": Fault(
        FILE, "params.first + params.locate(begin + i, params.weights)", "begin + i", "F"
    ),
    "the last for the first": Fault(
        FILE, "first = index < first ? index : first;", "first = index;", "adjacent"
    ),
    "the first of the first thread": Fault(
        FILE, "atomic_min(&special[kFirst], first);", "special[kFirst] = first;", "special"
    ),
    "no largest without a positive number": Fault(
        PARTS, "most_signed >> 31 ? least : most_signed", "most_signed", "signs"
    ),
    "no smallest without a negative number": Fault(
        PARTS, "most >> 31 ? most : least", "most", "blocks"
    ),
    "signed for unsigned": Fault(
        PARTS, "most = max_unsigned_pair(most,", "most = max_signed_pair(most,", "dense"
    ),
    "half of the pairs": Fault(FILE, "    extremes.merge_pairs();\n", "", "dense"),
    "half of the bytes": Fault(
        PARTS, "if constexpr (kBits == 8) extremes.take(word << 8);", "", "bytes"
    ),
    "the signs of infinities": Fault(
        FILE, "} else if (code >> (kBits - 1)) {", "} else if (!(code >> (kBits - 1))) {", "special"
    ),
    "NaN of e4m3 is infinite": Fault(PARTS, "? 0xffu : kSpecial", "? 0x7fu : kSpecial", "bytes"),
    "NaN of e4m3 is a number": Fault(PARTS, ": 0x7fu;", ": 0x80u;", "bytes"),
    "subnormals flushed": Fault(PARTS, "if (magnitude >= 0x00800000u)", "if (true)", "subnormals"),
    "a mean of all": Fault(
        FILE,
        "if (num_finite != params.num_elements) per_element",
        "if (false) per_element",
        "special",
    ),
    "a quotient that nobody corrects": Fault(
        FILE, "quotient + rest * per_element", "quotient", "quotients"
    ),
    "no block is the last": Fault(FILE, "== gridDim.x - 1;", "== gridDim.x;", "blocks"),
    "a block is not merged": Fault(FILE, "if (block < grid)", "if (block < grid - 1)", "blocks"),
    "the first place of this block": Fault(
        FILE, "if (counted) atomic_min(&special[kFirst], index - 1);", "", "special"
    ),
    "counts of the first of 32 blocks": Fault(
        FILE,
        "const double of_warp = sum_of_warp(double(count - 1));",
        "const double of_warp = double(count - 1);",
        "special",
    ),
    "the number of blocks stays": Fault(FILE, "        *num_begun = 0;\n", "", "words"),
    "a sum stays": Fault(FILE, "store_relaxed(word(kSum, block), 0);", "", "words"),
    "a count stays": Fault(FILE, "if (counted) store_relaxed(word(kind, block), 0);", "", "words"),
    "halves swapped in unpack": Fault(
        "platform/numbers.cuh",
        "high = to_float(T{uint16_t(pair >> 16)});",
        "high = to_float(T{uint16_t(pair)});",
        "dense",
    ),
}


def _problems() -> Iterator[tuple[str, object, NonfiniteProblem]]:
    yield "blocks", OP, NonfiniteProblem((1024, 256), "float32", "same_sign")
    for dtype in ("float32", "float16", "bfloat16"):
        yield "dense", OP, NonfiniteProblem((3, 1001), dtype, "normal")
        yield "unaligned", OP, NonfiniteProblem((67, 41), dtype, "normal", "offset")
        yield "signs", OP, NonfiniteProblem((2, 999), dtype, "same_sign")
        yield "special", OP, NonfiniteProblem((300, 170), dtype, "special")
        yield "F", OP, NonfiniteProblem((40, 30, 9), dtype, "special", "F")
        yield "strided", OP, NonfiniteProblem((5, 6, 7, 8), dtype, "special", "sliced")
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        yield "bytes", OP, NonfiniteProblem((300, 170), dtype, "special")
        yield "bytes", OP, NonfiniteProblem((30, 17), dtype, "wide")


def _agrees(x: np.ndarray) -> None:
    report = cupykern.nonfinite_report(x)
    y = x.astype(np.float64)
    finite = np.isfinite(y)
    assert (report.min, report.max) == (y[finite].min(), y[finite].max())
    assert report.num_nonfinite == x.size - finite.sum()


def _check_signs() -> None:
    x = np.arange(1, 1000, dtype=np.float16)
    for values in (x, -x, np.append(x, np.float16(-1)), -np.append(x, np.float16(-1))):
        _agrees(values)


def _check_subnormals() -> None:
    for dtype in (dtypes.float32, dtypes.bfloat16, dtypes.float16):
        tiny = cupykern.finfo(dtype).min_subnormal
        _agrees((tiny * np.arange(1.0, 50)).astype(dtype))
        _agrees((-tiny * np.arange(1.0, 50)).astype(dtype))


def _check_adjacent() -> None:
    """Two of one vector."""
    x = np.ones((8, 8), np.float16)
    x[3, 5:7] = np.nan
    for view, first in ((x, (3, 5)), (x[::-1, ::-1], (4, 1)), (x.T, (5, 3))):
        assert cupykern.nonfinite_report(view).first_index == first


def _check_quotients() -> None:
    """As divisions give them: the mean of equal numbers is that number."""
    for size in (3, 49, 98, 103, 107, 161, 187, 196, 197, 206):
        assert cupykern.nonfinite_report(np.ones(size, np.float32)).mean == 1


def _check_words() -> None:
    """Launches one after the other that share what is zero before and after each."""
    x = np.ones((700, 1000), np.float32)
    x[600, 7] = np.nan
    task = nonfinite_plan.NonfiniteTask(make_walk(x.shape, operand(x)), x.dtype)
    plan = nonfinite_plan.plan(host.current(), task, None)
    words = np.zeros(plan.num_counters, np.uint32)
    assert words.size > 2 * (1 + nonfinite_plan.WORDS)  # several blocks
    for _ in range(3):
        figures = np.full(7, -1)
        plan.repeated.launch((x, figures, words))
        assert list(figures[:4]) == [1, 0, 0, 600_007] and not words.any()


def _check_large_offsets() -> None:
    gap, flags = 2**31 + 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, 2 * (2 * gap + 1000), flags=flags)
    x = np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, np.float16), (3, 1000), (2 * gap, 2), writeable=True
    )
    x[...] = np.arange(3000).reshape(3, 1000) % 7
    x[2, 5] = 99
    _agrees(x)


CHECKS = {
    "signs": _check_signs,
    "subnormals": _check_subnormals,
    "adjacent": _check_adjacent,
    "quotients": _check_quotients,
    "words": _check_words,
    "large offsets": _check_large_offsets,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
