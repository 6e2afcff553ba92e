"""Planted faults in softmax and in what every row kernel shares (tests/planted.py)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern import check, inputs
from cupykern import softmax as softmax_function
from cupykern.rows.softmax import _run
from cupykern.rows.softmax_ops import LOG_OP, OP, SoftmaxProblem

FAULTS = {
    # name: (file, old, new, the check that catches it first)
    "no barrier between warps": Fault("parts/row.cuh", "        sync_block();\n", "\n", "warps"),
    "no wait for the other blocks": Fault("parts/row.cuh", "full.wait(0);", "", "configs"),
    "too few bytes awaited": Fault(
        "parts/row.cuh",
        "kParts * int(sizeof(Statistic))",
        "(kParts - 1) * int(sizeof(Statistic))",
        "configs",
    ),
    "blocks that have not started": Fault(
        "parts/row.cuh",
        "if constexpr (kExchange == 0) cluster_wait();",
        "",
        "configs",
    ),
    "no wait for the copies": Fault("parts/row.cuh", "copy_async_wait<0>();", ";", "short rows"),
    "wait for all copies but one": Fault(
        "parts/row.cuh",
        "copy_async_wait<0>()",
        "copy_async_wait<1>()",
        "short rows",
    ),
    "vector past the row's end": Fault(
        "parts/row.cuh",
        "position + kVectorWidth <= high;",
        "position + kVectorWidth <= high + 1;",
        "short rows",
    ),
    "one element too many": Fault(
        "parts/row.cuh",
        "(kPlain || position >= low) && position < high;",
        "(kPlain || position >= low) && position <= high;",
        "short rows",
    ),
    "head ignored": Fault(
        "parts/row.cuh", "c.low = chunk == 0 ? head : 0;", "c.low = 0;", "short rows"
    ),
    "chunks overlap": Fault(
        "parts/row.cuh",
        "c.first_col = chunk * kChunk - head;",
        "c.first_col = chunk * (kChunk - 1) - head;",
        "configs",
    ),
    "rows past the end": Fault(
        "parts/row.cuh",
        "c.live = row < num_rows;",
        "c.live = true;",
        "short rows",
    ),
    "32-bit row offset": Fault(
        "parts/row.cuh",
        "return row * layout.outer_strides[0][operand];",
        "return int(row * layout.outer_strides[0][operand]);",
        "large offsets",
    ),
    "outer dims in the wrong order": Fault(
        "parts/row.cuh",
        "offset += int64_t(rest - next * size)",
        "offset += int64_t(next)",
        "axis",
    ),
    "half a butterfly": Fault(
        "parts/row.cuh",
        "bit < kLastLaneBit; bit *= 2",
        "bit < kLastLaneBit / 2; bit *= 2",
        "below zero",
    ),
    "a warp's partial in another's place": Fault(
        "parts/row.cuh",
        "parts[t.row_in_block][warp] = mine;",
        "parts[t.row_in_block][warp ^ (kWarpsPerRow - 1) & 1 & ~warp] = mine;",
        "warps",
    ),
    "a block's partial in the first slot": Fault(
        "parts/row.cuh",
        "&parts[t.rank * kWarpsPerRow + warp]",
        "&parts[warp]",
        "configs",
    ),
    "identity 0 for the maximum": Fault(
        "softmax.cu",
        "larger.fill(from_float<Element>(-kInfinity));",
        "larger.fill(from_float<Element>(0.0f));",
        "masks",
    ),
    "fill of the wrong sign": Fault(
        "softmax.cu",
        "from_float<Element>(-sign * kInfinity)",
        "from_float<Element>(-kInfinity)",
        "below zero",
    ),
    "no rescaling of partial sums": Fault(
        "parts/max_sum.cuh",
        "float sum = mine.sum * rescale(mine.max, max);",
        "float sum = mine.sum;",
        "warps",
    ),
    "chunks merged without rescaling": Fault(
        "parts/max_sum.cuh",
        "a.sum * rescale(a.max, max) + b.sum",
        "a.sum + b.sum",
        "axis",
    ),
    "the scale before the subtraction": Fault(
        "softmax.cu",
        "part += exp2_approx((x[j] - x_max) * exponent_scale);",
        "part += exp2_approx(x[j] * exponent_scale - x_max * exponent_scale);",
        "large numbers",
    ),
    "log2 e left out": Fault(
        "softmax.cu",
        "exponent_scale(scale * kLog2E)",
        "exponent_scale(scale)",
        "short rows",
    ),
    "the mask inverted": Fault(
        "softmax.cu", "keep.element(j) != 0", "keep.element(j) == 0", "masks"
    ),
    "the mask's stride ignored": Fault(
        "softmax.cu",
        "mask[(position + j) * stride] != 0",
        "mask[position + j] != 0",
        "masks",
    ),
    "a hidden row is NaN": Fault("softmax.cu", "if (total.max == -kInfinity) return;", "", "masks"),
    "NaN is swallowed": Fault(
        "softmax.cu",
        "factor = 1.0f / total.sum;",
        "factor = 1.0f / maximum(total.sum, 1.0f);",
        "special",
    ),
    "16-bit outputs swapped": Fault(
        "softmax.cu",
        "params.dtype == kHalf",
        "params.dtype == kBf16",
        "short rows",
    ),
    "the logarithm of the reciprocal": Fault(
        "softmax.cu",
        "log_accurate(total.sum)",
        "-log_accurate(total.sum)",
        "short rows",
    ),
    "plain rows: powers of a warp not made the row's": Fault(
        "softmax_plain.cu",
        "factor *= merge.rescale(max, total.max);",
        "factor *= 1.0f;",
        "plain rows",
    ),
    "plain rows: the logarithm over a warp's largest": Fault(
        "softmax_plain.cu",
        "value - total.max - log_sum",
        "value - max - log_sum",
        "plain rows",
    ),
    "plain rows: a warp's sum over another's largest": Fault(
        "softmax_plain.cu",
        "const MaxSum mine{max,",
        "const MaxSum mine{max + 0.5f,",
        "plain rows",
    ),
    "plain rows: NaN is swallowed": Fault(
        "softmax_plain.cu",
        "reciprocal_approx(total.sum)",
        "reciprocal_approx(maximum(total.sum, 1.0f))",
        "special plain rows",
    ),
    "plain rows: zeros after a row's end": Fault(
        "softmax_plain.cu",
        "packed[i].fill(from_float<Element>(-kInfinity));",
        "packed[i].fill(from_float<Element>(0.0f));",
        "ends of plain rows",
    ),
    "plain rows: rows past the end": Fault(
        "softmax_plain.cu",
        "row >= layout.num_rows ? 0 :",
        "false ? 0 :",
        "special plain rows",
    ),
    "the last chunk not merged": Fault(
        "parts/row.cuh",
        "live && i < task.num_chunks;",
        "live && i < task.num_chunks - 1;",
        "configs",
    ),
}


def _problems() -> Iterator[tuple[str, object, SoftmaxProblem]]:
    for op in (OP, LOG_OP):
        yield "plain rows", op, SoftmaxProblem((5, 4096), dtype="float16")
        yield "ends of plain rows", op, SoftmaxProblem((5, 1000), dtype="float32")
        yield "short rows", op, SoftmaxProblem((7, 9), dtype="float32", scale=0.5, kind="same_sign")
        yield "short rows", op, SoftmaxProblem((70, 13), dtype="float16", scale=0.5, kind="wide")
        yield "below zero", op, SoftmaxProblem((3, 1000), dtype="bfloat16", scale=-3.5)
        yield "warps", op, SoftmaxProblem((5, 4001), dtype="float16", layout="offset")
        yield "axis", op, SoftmaxProblem((2, 45, 3, 6), axis=1, dtype="float32")
        yield "axis", op, SoftmaxProblem((6, 5, 4, 33), axis=1, dtype="bfloat16", layout="sliced")
        yield "masks", op, SoftmaxProblem((6, 100), dtype="float32", mask_shape=(6, 100))
        yield "masks", op, SoftmaxProblem((6, 8, 33), axis=1, dtype="float16", mask_shape=(8, 1))
        yield "masks", op, SoftmaxProblem((9, 3), dtype="float32", mask_shape=(9, 1))
        yield "special", op, SoftmaxProblem((40, 9), dtype="float32", scale=0.5, kind="special")
        yield "special plain rows", op, SoftmaxProblem((40, 8), dtype="float32", kind="special")
        yield "output dtypes", op, SoftmaxProblem((4, 64), dtype="float32", out_dtype="float16")
        yield "output dtypes", op, SoftmaxProblem((4, 64), dtype="float16", out_dtype="bfloat16")


def _check_configs() -> None:
    """Rows in clusters and in chunks, of which the first and the last hold the largest numbers."""
    x = inputs.values("normal", (2, 40_003), OP_DTYPE, 1)
    x[:, :64] += 9
    x[:, -64:] += 12
    problem = SoftmaxProblem(x.shape, dtype="float32")
    for config in OP.configs(problem, "host"):
        y = _run(x, -1, None, None, None, None, False, config)
        references = OP.reference(x)
        bounds = OP.bound(x, reference=references)
        comparison = check.compare((y,), references, bounds)
        assert comparison.ok, f"{config}: {comparison}"


OP_DTYPE = np.dtype(np.float32)


def _check_large_numbers() -> None:
    y = softmax_function(np.array([[3e38, -3e38, 3e38]], np.float32), scale=1.125)
    assert np.isfinite(y).all(), "a NaN from large numbers"


def _check_large_offsets() -> None:
    gap, flags = 2**31 + 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    maps = [mmap.mmap(-1, 2 * (2 * gap + 100), flags=flags) for _ in range(2)]
    x, y = (
        np.lib.stride_tricks.as_strided(np.frombuffer(m, np.float16), (3, 100), (2 * gap, 2))
        for m in maps
    )
    x[...] = np.arange(300).reshape(3, 100) % 7
    softmax_function(x, out=y)
    references = OP.reference(x)
    assert check.compare((y,), references, OP.bound(x, reference=references)).ok


CHECKS = {
    "configs": _check_configs,
    "large numbers": _check_large_numbers,
    "large offsets": _check_large_offsets,
}


test_nothing_fails_without_a_fault, test_caught = fault_tests(FAULTS, _problems, CHECKS, every=4)
