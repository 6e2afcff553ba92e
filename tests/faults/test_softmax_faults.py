"""Planted faults in softmax and in what every row kernel shares (tests/support/planted.py)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern import check, inputs
from cupykern import softmax as softmax_function
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem

FAULTS = {
    # name: (file, old, new, the check that catches it first)
    "no barrier between warps": Fault("rows/reduce.cuh", "        sync_block();\n", "\n", "warps"),
    "no wait for the other blocks": Fault("rows/reduce.cuh", "full.wait(0);", "", "configs"),
    "too few bytes awaited": Fault(
        "rows/reduce.cuh",
        "kPartials * int(sizeof(Statistic))",
        "(kPartials - 1) * int(sizeof(Statistic))",
        "configs",
    ),
    "blocks that have not started": Fault(
        "rows/reduce.cuh",
        "if constexpr (kExchange == 0) cluster_wait();",
        "",
        "configs",
    ),
    "no wait for the copies": Fault(
        "rows/load_shared.cuh", "copy_async_wait<0>();", ";", "short rows"
    ),
    "wait for all copies but one": Fault(
        "rows/load_shared.cuh",
        "copy_async_wait<0>()",
        "copy_async_wait<1>()",
        "short rows",
    ),
    "vector past the row's end": Fault(
        "rows/tile.cuh",
        "position + kVectorWidth <= high;",
        "position + kVectorWidth <= high + 1;",
        "short rows",
    ),
    "one element too many": Fault(
        "rows/tile.cuh",
        "(kEven || position >= low) && position < high;",
        "(kEven || position >= low) && position <= high;",
        "short rows",
    ),
    "head ignored": Fault(
        "rows/tile.cuh", "c.low = chunk == 0 ? head : 0;", "c.low = 0;", "short rows"
    ),
    "chunks overlap": Fault(
        "rows/tile.cuh",
        "c.first_col = chunk * kChunk - head;",
        "c.first_col = chunk * (kChunk - 1) - head;",
        "configs",
    ),
    "rows past the end": Fault(
        "rows/tile.cuh",
        "c.live = row < num_rows;",
        "c.live = true;",
        "short rows",
    ),
    "32-bit row offset": Fault(
        "rows/tile.cuh",
        "return row * layout.outer_strides[0][operand];",
        "return int(row * layout.outer_strides[0][operand]);",
        "large offsets",
    ),
    "outer dims in the wrong order": Fault(
        "rows/tile.cuh",
        "offset += int64_t(rest - next * size)",
        "offset += int64_t(next)",
        "axis",
    ),
    "half a butterfly": Fault(
        "rows/reduce.cuh",
        "bit < kLastLaneBit; bit *= 2",
        "bit < kLastLaneBit / 2; bit *= 2",
        "below zero",
    ),
    "a warp's partial in another's place": Fault(
        "rows/reduce.cuh",
        "partials[t.row_in_block][warp] = mine;",
        "partials[t.row_in_block][warp ^ (kWarpsPerRow - 1) & 1 & ~warp] = mine;",
        "warps",
    ),
    "a block's partial in the first slot": Fault(
        "rows/reduce.cuh",
        "&partials[t.rank * kWarpsPerRow + warp]",
        "&partials[warp]",
        "configs",
    ),
    "identity 0 for the maximum": Fault(
        "rows/softmax_shared.cuh",
        "larger.fill(from_float<Element>(-kInfinity));",
        "larger.fill(from_float<Element>(0.0f));",
        "masks",
    ),
    "fill of the wrong sign": Fault(
        "rows/softmax_shared.cuh",
        "from_float<Element>(-sign * kInfinity)",
        "from_float<Element>(-kInfinity)",
        "below zero",
    ),
    "no rescaling of partial sums": Fault(
        "common/max_sum.cuh",
        "float sum = mine.sum * rescale(mine.max, max);",
        "float sum = mine.sum;",
        "warps",
    ),
    "chunks merged without rescaling": Fault(
        "common/max_sum.cuh",
        "a.sum * rescale(a.max, max) + b.sum",
        "a.sum + b.sum",
        "axis",
    ),
    "the scale before the subtraction": Fault(
        "rows/softmax_shared.cuh",
        "part += exp2_approx((x[j] - x_max) * exponent_scale);",
        "part += exp2_approx(x[j] * exponent_scale - x_max * exponent_scale);",
        "large numbers",
    ),
    "log2 e left out": Fault(
        "rows/softmax_shared.cuh",
        "exponent_scale(scale * kLog2E)",
        "exponent_scale(scale)",
        "short rows",
    ),
    "the mask inverted": Fault(
        "rows/softmax_shared.cuh", "keep.element(j) != 0", "keep.element(j) == 0", "masks"
    ),
    "the mask's stride ignored": Fault(
        "rows/softmax_shared.cuh",
        "mask[(position + j) * stride] != 0",
        "mask[position + j] != 0",
        "masks",
    ),
    "a hidden row is NaN": Fault(
        "rows/softmax_shared.cuh", "if (total.max == -kInfinity) return;", "", "masks"
    ),
    "NaN is swallowed": Fault(
        "rows/softmax_shared.cuh",
        "factor = 1.0f / total.sum;",
        "factor = 1.0f / maximum(total.sum, 1.0f);",
        "special",
    ),
    "16-bit outputs swapped": Fault(
        "rows/softmax_shared.cuh",
        "params.dtype == kHalf",
        "params.dtype == kBf16",
        "short rows",
    ),
    "the logarithm of the reciprocal": Fault(
        "rows/softmax_shared.cuh",
        "log_accurate(total.sum)",
        "-log_accurate(total.sum)",
        "short rows",
    ),
    "plain rows: powers of a warp not made the row's": Fault(
        "rows/softmax.cuh",
        "factor *= merge.rescale(from, max);",
        "factor *= 1.0f;",
        "plain rows",
    ),
    "plain rows: the scale before the subtraction": Fault(
        "rows/softmax.cuh",
        "exp2_approx((value - max) * exponent_scale);",
        "exp2_approx(value * exponent_scale - max * exponent_scale);",
        "large numbers",
    ),
    "plain rows: log_softmax is not scaled": Fault(
        "rows/softmax.cuh",
        "multiply_add(value - max, scale, -log_sum)",
        "value - max - log_sum",
        "uneven warps",
    ),
    "long rows: log_softmax is not scaled": Fault(
        "rows/softmax_cluster.cuh", "kScaled ? params.scale : 1.0f", "1.0f", "scaled long rows"
    ),
    "the scale of unscaled calls for all": Fault(
        "rows/softmax.cuh",
        "kScaled ? params.exponent_scale : kLog2E",
        "kLog2E",
        "uneven warps",
    ),
    "a tree that leaves out a warp": Fault(
        "rows/reduce.cuh",
        "merge_tree<kCount - kHalf>(partials + kHalf, merge)",
        "merge_tree<kHalf>(partials + kHalf, merge)",
        "uneven warps",
    ),
    "plain rows: the logarithm over a warp's largest": Fault(
        "rows/softmax.cuh",
        "factor *= merge.rescale(from, max);",
        "factor *= merge.rescale(from, max); max = from;",
        "plain rows",
    ),
    "plain rows: a warp's sum over another's largest": Fault(
        "rows/softmax_register.cuh",
        "const MaxSum of_warp{max,",
        "const MaxSum of_warp{max + 0.5f,",
        "plain rows",
    ),
    "plain rows: NaN is swallowed": Fault(
        "rows/softmax.cuh",
        "reciprocal_approx(total.sum)",
        "reciprocal_approx(maximum(total.sum, 1.0f))",
        "special plain rows",
    ),
    "plain rows: zeros after a row's end": Fault(
        "rows/softmax_register.cuh",
        "return from_float<Element>(-kInfinity);",
        "return from_float<Element>(0.0f);",
        "ends of plain rows",
    ),
    "plain rows: rows past the end": Fault(
        "rows/load_register.cuh",
        "row >= layout.num_rows ? 0 :",
        "false ? 0 :",
        "special plain rows",
    ),
    "the last chunk not merged": Fault(
        "rows/reduce.cuh",
        "live && i < work.num_chunks;",
        "live && i < work.num_chunks - 1;",
        "configs",
    ),
}


def _problems() -> Iterator[tuple[str, object, SoftmaxProblem]]:
    for op in (OP, LOG_OP):
        yield "plain rows", op, SoftmaxProblem((5, 4096), dtype="float16")
        yield "uneven warps", op, SoftmaxProblem((3, 6144), dtype="float16", scale=1.5)
        yield "scaled long rows", op, SoftmaxProblem((2, 1501), dtype="float16", scale=1.5)
        yield "ends of plain rows", op, SoftmaxProblem((5, 1000), dtype="float32")
        short = {"scale": -0.5, "kind": "same_sign"}
        yield "short rows", op, SoftmaxProblem((7, 9), dtype="float32", **short)
        yield "short rows", op, SoftmaxProblem((70, 13), dtype="float16", scale=-0.5, kind="wide")
        yield "below zero", op, SoftmaxProblem((3, 1000), dtype="bfloat16", scale=-3.5)
        yield "warps", op, SoftmaxProblem((5, 4001), dtype="float16", layout="offset")
        yield "axis", op, SoftmaxProblem((2, 45, 3, 6), axis=1, dtype="float32")
        yield "axis", op, SoftmaxProblem((6, 5, 4, 33), axis=1, dtype="bfloat16", layout="sliced")
        yield "masks", op, SoftmaxProblem((6, 100), dtype="float32", mask_shape=(6, 100))
        yield "masks", op, SoftmaxProblem((6, 8, 33), axis=1, dtype="float16", mask_shape=(8, 1))
        yield "masks", op, SoftmaxProblem((9, 3), dtype="float32", mask_shape=(9, 1))
        yield "special", op, SoftmaxProblem((40, 9), dtype="float32", scale=-0.5, kind="special")
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
        y = OP.run(x, config=config)
        references = OP.reference(x)
        bounds = OP.bound(x, reference=references)
        comparison = check.compare((y,), references, bounds)
        assert comparison.ok, f"{config}: {comparison}"


OP_DTYPE = np.dtype(np.float32)


def _check_large_numbers() -> None:
    for columns, scale in ((3, -1.125), (4, 1.125)):
        x = np.array([[3e38, -3e38, 3e38, 3e38][:columns]], np.float32)
        y = softmax_function(x, scale=scale)
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


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS, every=4
)
