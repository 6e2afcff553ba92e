"""Planted faults in the norms (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern import check, inputs, layer_norm, rms_norm
from cupykern.op import Call, as_tuple
from cupykern.ops.norm import LAYER_OP, RMS_OP
from cupykern.ops.problems.norm import NormProblem
from cupykern.rows.norm_configs import NormSharedRows

SHARED = "rows/norm_shared.cuh"
EVEN = "rows/norm_even.cuh"
LOAD = "rows/load_even.cuh"
VECTORS = "rows/vector_moments.cuh"
MOMENTS = "rows/moments.cuh"
QUANTIZE = "rows/quantize.cuh"
FAULTS = {
    "no barrier between warps": Fault(
        "rows/reduce.cuh", "        sync_block();\n", "\n", "far from zero"
    ),
    "one exchange for two": Fault(
        SHARED,
        "merge_across_warps<1>(warp_squares(s, mean, nullptr)",
        "merge_across_warps<0>(warp_squares(s, mean, nullptr)",
        "far from zero",
    ),
    "the sample's variance": Fault(
        SHARED, "squares / count + eps", "squares / (count - 1.0f) + eps", "eps"
    ),
    "no eps": Fault(SHARED, "squares / count + eps", "squares / count", "eps"),
    "squares about zero": Fault(
        SHARED, "const float distance = values[j] - mean;", "const float distance = values[j];",
        "far from zero",
    ),
    "elements outside of the row": Fault(
        SHARED,
        "if (!x.chunk.holds(position + j)) values[j] = outside;",
        "",
        "far from zero",
    ),
    "the residual left out of the statistics": Fault(
        SHARED, "values[j] += b[j];", "values[j] += 0.0f * b[j];", "residual"
    ),
    "the sum rounded before it is normalised": Fault(
        SHARED,
        "values[j] += b[j];",
        "values[j] = to_float(from_float<Element>(values[j] + b[j]));",
        "residual",
    ),
    "weight and bias exchanged": Fault(
        SHARED, "if (kOfMeans && bias.first) {\n            bias.get",
        "if (kOfMeans && bias.first) {\n            weight.get",
        "weights",
    ),
    "a weight's stride ignored": Fault(
        SHARED, "load_element(first, (col + j) * stride, dtype)",
        "load_element(first, col + j, dtype)", "weights"
    ),
    "a chunk's weights from the row's start": Fault(
        SHARED, "const int64_t col = first_col + position;", "const int64_t col = position;",
        "weights"
    ),
    "the second part of the mean left out": Fault(
        SHARED, "(values[j] - mean - mean_low)", "(values[j] - mean)", "compensated"
    ),
    "counts not summed": Fault(
        MOMENTS, "s.count += shuffle_xor(s.count, bit);", "", "clusters and chunks"
    ),
    "no squares between the means": Fault(
        MOMENTS,
        "s.m2 = mine.m2 + mine.count * (from_mean * from_mean);",
        "s.m2 = mine.m2;",
        "clusters and chunks",
    ),
    "chunks' means not merged": Fault(
        MOMENTS, "distance * distance * (a.count * weight)", "0.0f", "clusters and chunks"
    ),
    "the largest with its sign": Fault(
        QUANTIZE, "bit_cast<uint32_t>(x) & 0x7fffffffu;", "bit_cast<uint32_t>(x);",
        "quantized blocks",
    ),
    "NaN does not reach the scale": Fault(
        "platform/maximum_or_nan.cuh", "return a >= b || a != a ? a : b;", "return a >= b ? a : b;",
        "quantized"
    ),
    "the other format's largest number": Fault(
        QUANTIZE, "dtype == kE4m3 ? 448.0f", "dtype == kE5m2 ? 448.0f", "quantized"
    ),
    "every block writes the statistics": Fault(
        SHARED, "out.rstd[offset] = n.rstd;", "out.rstd[offset + 1] = n.rstd;", "statistics"
    ),
    "warps that do not meet": Fault(EVEN, "            sync_block();\n", "", "plain rows"),
    "the warp's own part as the row's": Fault(
        EVEN, "s[r] = merge_row_partials(mine[r], at);", ";", "a cluster"
    ),
    "the first row's statistics for all": Fault(
        EVEN, "merge_row_partials(mine[r], at)", "merge_row_partials(mine[0], at)", "a cluster"
    ),
    "rows that are not there": Fault(
        EVEN, "if (kQuantized != kByBlock && !exists) continue;", "", "short rows"
    ),
    "blocks: a lane's largest alone": Fault(
        EVEN, "(largest.value(), 1, kBlockLanes)", "(largest.value(), 1, 1)",
        "quantized blocks"
    ),
    "blocks: rows' scales over each other": Fault(
        EVEN, "of_row * blocks +", "of_row +", "quantized blocks"
    ),
    "blocks: the scale of a row's first block": Fault(
        EVEN, "(at.first() + at.step(i)) / kQuantizedBlock]", "at.step(i) / kQuantizedBlock]",
        "quantized blocks"
    ),
    "blocks: rows that are not there": Fault(
        EVEN, "kQuantized != kByBlock || (exists && at.holds(i));",
        "kQuantized != kByBlock || at.holds(i);", "short quantized blocks"
    ),
    "no squares between the warps' means": Fault(
        EVEN, "s.squares += at.count_of(i) * (distance * distance);", "", "plain rows"
    ),
    "every warp as many elements": Fault(
        LOAD, "if (kUnpredicated || num_cols == chunk()) return", "return", "ends of rows"
    ),
    "squares of zeros at a row's end": Fault(
        EVEN, "if (!at.holds(i)) break;", "", "ends of rows"
    ),
    "no squares between the vectors' means": Fault(
        VECTORS, "own_squares + delta * delta * (kWidth * (before * weight))", "own_squares",
        "a cluster"
    ),
    "the last vector's mean": Fault(
        VECTORS, "mean += delta * weight;", "mean += delta;", "a cluster"
    ),
    "the first vector's weights for all": Fault(
        EVEN, "loaded = kWeightsFirst ? i : 0;", "loaded = 0;", "a cluster"
    ),
    "the largest without the weights": Fault(
        EVEN, "magnitude(values[j] * weights[j])", "magnitude(values[j])", "quantized plain rows"
    ),
    "the largest before it is normalised": Fault(
        EVEN, "float largest = product * rstd;", "float largest = product;", "quantized plain rows"
    ),
    "products too small for a largest": Fault(
        EVEN, "product >= 0x1p-60f && product < kInfinity", "product < kInfinity", "small products"
    ),
    "a lane forgets a weight's NaN": Fault(
        EVEN,
        "largest = maximum_or_nan(largest, magnitude(",
        "largest = maximum(largest, magnitude(",
        "weights of NaN",
    ),
    "a warp forgets a weight's NaN": Fault(
        EVEN,
        "mean = reduce_in_warp(largest, Larger());",
        "mean = reduce_in_warp(largest, Max());",
        "weights of NaN",
    ),
    "a row forgets a warp's NaN": Fault(
        EVEN,
        "s.first = maximum_or_nan(s.first, partials[i].first);",
        "s.first = maximum(s.first, partials[i].first);",
        "weights of NaN",
    ),
    "a row's lanes forget its NaN": Fault(
        EVEN,
        "MergeFloats<Larger>().across_lanes(s.first",
        "MergeFloats<Max>().across_lanes(s.first",
        "weights of NaN",
    ),
    "codes that are not scaled": Fault(
        EVEN, "values[j] *= factors[r].encode;", "values[j] *= 1.0f;", "quantized plain rows"
    ),
    "every block's statistics in one place": Fault(
        EVEN, "at.t.rank * kWarpsPerRow + at.warp()]", "at.warp()]", "a cluster"
    ),
    "one row's bytes awaited": Fault(
        EVEN, "arrive_expect_tx(kRowsPerThread * at.partials()", "arrive_expect_tx(at.partials()",
        "a cluster"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, NormProblem]]:
    for op in (LAYER_OP, RMS_OP):
        bias = "bfloat16" if op is LAYER_OP else None
        yield "plain rows", op, NormProblem((5, 2048), "float16", weight_dtype="float16")
        yield "short rows", op, NormProblem((70, 16), "float32", kind="uniform")
        yield "ends of rows", op, NormProblem((6, 1032), "float16", mean=-2.0)
        yield "eps", op, NormProblem((6, 33), "bfloat16", out_dtype="float32", eps=0.5)
        yield (
            "far from zero",
            op,
            NormProblem((5, 11_003), "float32", weight_dtype="float16", mean=-100.0),
        )
        yield "residual", op, NormProblem((4, 1000), "bfloat16", out_dtype="float32", residual=True)
        yield (
            "weights",
            op,
            NormProblem((4, 515), "float16", weight_dtype="bfloat16", bias_dtype=bias),
        )
        yield (
            "statistics",
            op,
            NormProblem((7, 9001), "float32", weight_dtype="float16", return_stats=True),
        )
        yield "special", op, NormProblem((40, 8), "float32", kind="special")
    yield (
        "quantized plain rows",
        RMS_OP,
        NormProblem((3, 2048), "float16", weight_dtype="float16", quantize="e4m3", kind="uniform"),
    )
    for shape in ((3, 2048), (33, 384)):
        yield (
            "short quantized blocks" if shape[1] < 1024 else "quantized blocks",
            RMS_OP,
            NormProblem(shape, "float16", quantize="e4m3", granularity="block", residual=True),
        )
    for quantize in ("e4m3", "int8"):
        yield (
            "quantized",
            RMS_OP,
            NormProblem((7, 1000), "bfloat16", quantize=quantize, kind="same_sign", mean=-2.0),
        )
        yield (
            "quantized",
            RMS_OP,
            NormProblem((40, 9), "float16", quantize=quantize, kind="special"),
        )


def _check_strided_weights() -> None:
    x = inputs.values("normal", (3, 100), np.dtype(np.float16), 1)
    weight = inputs.values("normal", (200,), np.dtype(np.float32), 2)[::2]
    call = Call((x,), {"weight": weight})
    references = RMS_OP.reference(*call.args, **call.kwargs)
    bounds = RMS_OP.bound(*call.args, **call.kwargs, reference=references)
    assert check.compare((rms_norm(x, weight),), references, bounds).ok


def _check_compensated() -> None:
    x = inputs.values("normal", (3, 5000), np.dtype(np.float32), 1) + np.float32(1e4)
    references = LAYER_OP.reference(x)
    bounds = LAYER_OP.bound(x, compensated=True, reference=references)
    assert check.compare((layer_norm(x, compensated=True),), references, bounds).ok


def _check_clusters_and_chunks() -> None:
    """Whose parts have other means, and weights of their own."""
    x = inputs.values("normal", (2, 40_008), np.dtype(np.float32), 1)
    x += np.arange(40_008, dtype=np.float32) / 10_000
    weight = inputs.values("uniform", (40_008,), np.dtype(np.float32), 2)
    for op in (LAYER_OP, RMS_OP):
        call = Call((x,), {"weight": weight})
        references = op.reference(*call.args, **call.kwargs)
        bounds = op.bound(*call.args, **call.kwargs, reference=references)
        for config in op.configs(NormProblem(x.shape, "float32", weight_dtype="float32"), "host"):
            y = op.run(x, weight, config=config)
            comparison = check.compare(as_tuple(y), references, bounds)
            assert comparison.ok, f"{config}: {comparison}"
        across = op.run(np.asfortranarray(x), weight)  # more chunks than threads on a row
        assert check.compare((across,), references, bounds).ok


def _check_cluster() -> None:
    """Of two blocks with two rows each; the last ones hold less."""
    config = NormSharedRows(64, 64, 8, 2, 2, rows_per_thread=2, weights_first=True)
    for op in (LAYER_OP, RMS_OP):
        call = op.inputs(
            NormProblem((5, 1800), "float16", weight_dtype="float16", mean=-2.0), 1, np
        )
        references = op.reference(*call.args, **call.kwargs)
        bounds = op.bound(*call.args, **call.kwargs, reference=references)
        y = op.run(*call.args, **call.kwargs, config=config)
        comparison = check.compare((y,), references, bounds)
        assert comparison.ok, comparison


def _check_small_products() -> None:
    """Of elements and weights, which in FP32 are zero."""
    x = inputs.values("uniform", (3, 256), np.dtype(np.float32), 1) * np.float32(1e-15)
    weight = inputs.values("uniform", (256,), np.dtype(np.float32), 2) * np.float32(1e-25)
    call = Call((x, weight), {"quantize": "e4m3", "eps": 0.0})
    references = RMS_OP.reference(*call.args, **call.kwargs)
    bounds = RMS_OP.bound(*call.args, **call.kwargs, reference=references)
    outputs = rms_norm(*call.args, **call.kwargs)
    assert check.compare(as_tuple(outputs), references, bounds).ok


def _check_weights_of_nan() -> None:
    """Of which the squares of a row know nothing; of one warp, several, and all places in them."""
    for cols in (64, 2048, 9000):
        x = inputs.values("normal", (2, cols), np.dtype(np.float16), 1)
        for column in (0, 9, cols // 2, cols - 1):
            weight = np.ones(cols, np.float16)
            weight[column] = np.nan
            assert np.isnan(rms_norm(x, weight, quantize="int8")[1]).all()


CHECKS = {
    "weights of NaN": _check_weights_of_nan,
    "a cluster": _check_cluster,
    "small products": _check_small_products,
    "weights": _check_strided_weights,
    "compensated": _check_compensated,
    "clusters and chunks": _check_clusters_and_chunks,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
