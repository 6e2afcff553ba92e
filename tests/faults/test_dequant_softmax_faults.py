"""Planted faults in dequant_softmax, each of which a check must catch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from planted import Fault, fault_tests

from cupykern import OPS, check
from cupykern.gemm.sm90_logits_config import SkinnyLogitsConfig, Sm90LogitsConfig
from cupykern.ops.dequant_softmax import LogitsProblem
from cupykern.targets import host

LOGITS = next(op for op in OPS if op.name == "dequant_softmax")
PARTIAL = "gemm/epilogue/partial_softmax.cuh"
SCALE = "logits/scale_probabilities.cuh"
EPILOGUE = "logits/epilogue.cuh"
ROLES = "logits/kernel_skinny.cuh"
PARTS = "logits/skinny.cuh"
NORMALIZE = "logits/normalize.cuh"

FAULTS = {
    "the ragged last set counts what is not there": Fault(
        EPILOGUE, "if (i < count) run.sum +=", "run.sum +=", "softmax"
    ),
    "rows of a fragment share no statistics": Fault(
        EPILOGUE, "run = merge.across_lanes(run, 1, 16 / kRun);", "", "softmax"
    ),
    "statistics before they are there": Fault(
        EPILOGUE, "    sync_block();\n    constexpr int kSets",
        "    constexpr int kSets", "softmax"
    ),
    "a set's first fragment alone": Fault(
        EPILOGUE, "j < kFragmentsOfSet;", "j < 1;", "softmax"
    ),
    "sets past the end": Fault(
        EPILOGUE, " || set >= num_sets) continue;", ") continue;", "softmax"
    ),
    "a lane's statistics for all": Fault(
        NORMALIZE, "total = merge.across_lanes(total, 1, kWarpSize);", "", "softmax"
    ),
    "the first warp's statistics for all": Fault(
        NORMALIZE, "for (int i = 1; i < kBlockWarps; ++i) total",
        "for (int i = kBlockWarps; i < kBlockWarps; ++i) total", "many columns",
    ),
    "a block's part of a row is every block's": Fault(
        NORMALIZE, "int64_t piece = blockIdx.x * all / gridDim.x;", "int64_t piece = 0;", "softmax"
    ),
    "statistics of a warp's columns alone": Fault(
        PARTIAL, "for (int j = 1; j < 4; ++j) total", "for (int j = 4; j < 4; ++j) total", "logits"
    ),
    "logits of columns that are not there": Fault(
        PARTIAL, "if (i < count) total.sum +=", "total.sum +=", "logits"
    ),
    "sums before they are all there": Fault(
        PARTIAL, "        sync_warp();\n#pragma unroll 1\n        for (int slice_row",
        "#pragma unroll 1\n        for (int slice_row", "logits",
    ),
    "statistics before the other warps have theirs": Fault(
        PARTIAL,
        "named_barrier(1 + warpgroup, 128);\n const MergeMaxSum merge{kLog2E};\n const int64_t set",
        "const MergeMaxSum merge{kLog2E};\n const int64_t set", "logits",
    ),
    "the even columns are the first ones": Fault(
        PARTIAL, "kMnMajorRows ? 2 * j + i / 4 : i + j", "i + j", "logits"
    ),
    "shares of a warp's largest": Fault(
        PARTIAL, "max = maximum(max, to.warp_max[i][thread])", "max = to.warp_max[0][thread]",
        "shares"
    ),
    "sums of a warp's shares alone": Fault(
        PARTIAL, "sum += to.warp_sum[i][thread]", "sum = to.warp_sum[0][thread]", "shares"
    ),
    "shares of columns that are not there": Fault(
        PARTIAL, "there ? 0.0f : -kInfinity", "0.0f", "shares"
    ),
    "the largest before all warps have theirs": Fault(
        PARTIAL, "        named_barrier(barrier, 128);\n        if (thread < kPassRows) {",
        "        if (thread < kPassRows) {", "shares",
    ),
    "lanes merge the same half of their rows": Fault(
        PARTIAL, "const float sent = upper ? values[i] : values[i + rest];",
        "const float sent = upper ? values[i + rest] : values[i];", "shares",
    ),
    "all parts' rows are the first one's": Fault(
        PARTIAL, "first_row + pass * kPassRows", "first_row", "shares"
    ),
    "the next part's sums stay where they are": Fault(
        PARTIAL, "accumulator[0][i] = accumulator[0][i + kPassValues];", ";", "shares"
    ),
    "a box is stored before all warps have filled it": Fault(
        PARTIAL, "to.warp_sum[warp][merged(i)] = values[i];\n        named_barrier(barrier, 128);",
        "to.warp_sum[warp][merged(i)] = values[i];", "shares",
    ),
    "shares of the row's first set": Fault(
        SCALE, "sets[at * kNormalRun / kSetColumns].max", "sets[0].max", "shares"
    ),
    "a row's last run stays as it is": Fault(
        SCALE, "if (at >= whole) break;", "if (at + 1 >= whole) break;", "shares"
    ),
    "a row's statistics before all warps have theirs": Fault(
        NORMALIZE, "= total;\n    sync_block();", "= total;", "shares"
    ),
    "streams: warps without columns count": Fault(ROLES, "own < num_own;", "true;", "streams"),
    "streams: statistics of one warp": Fault(
        ROLES, "for (int i = 1; i < kWarps; ++i) total",
        "for (int i = kWarps; i < kWarps; ++i) total", "streams"
    ),
    "streams: half of a row": Fault(PARTS, "merge.across_lanes(total, 1, 2)", "total", "streams"),
    "streams: the first half of k twice": Fault(
        ROLES, "{i * kDepth + 64, 0, 0}", "{i * kDepth, 0, 0}", "streams"
    ),
    "streams: stages are released by the first warp": Fault(
        "logits/skinny.cuh", "TmaPipeline<kStages, 32, kWarps>",
        "TmaPipeline<kStages, 32, 1>", "streams"
    ),
    "streams: the last tile's statistics alone": Fault(
        PARTS, "seen = merge(seen, merge", "seen = (merge", "streams"
    ),
    "the even columns of shares are the first ones": Fault(
        PARTIAL, "pack<Out>(two[0], two[2])", "pack<Out>(two[2], two[0])", "shares"
    ),
}  # fmt: skip


def _problems() -> Iterator[tuple[str, object, object]]:
    yield "softmax", LOGITS, LogitsProblem(40, 190, 64, layout_w="F", out_dtype="float32")
    yield "softmax", LOGITS, LogitsProblem(3, 1000, 40, bias=(1000,))


def _check_many_columns() -> None:
    rng = np.random.default_rng(3)
    a = rng.standard_normal((1, 16)).astype(np.float16)
    w = np.asfortranarray(rng.integers(-128, 128, (16, 40_000)).astype(np.int8))
    args = (a, w, 0.01)
    references = LOGITS.reference(*args)
    bounds = LOGITS.bound(*args, dtype="float32", reference=references)
    y = LOGITS.run(*args, dtype="float32")
    assert check.compare((y,), references, bounds).ok


def _check_streams() -> None:
    """More than one tile for every block, ragged ones."""
    if host.current().warp_size != 32:
        return
    call = LOGITS.inputs(LogitsProblem(9, 1100, 272, layout_w="F", out_dtype="float32"), 1, np)
    references = LOGITS.reference(*call.args, **call.kwargs)
    bounds = LOGITS.bound(*call.args, **call.kwargs, reference=references)
    y = LOGITS.run(*call.args, **call.kwargs, config=SkinnyLogitsConfig(128, 2))
    assert check.compare((y,), references, bounds).ok


def _check_shares() -> None:
    """Results of 16 bits on Hopper: ragged tiles, both parts of a tile's rows, both orders of w."""
    if host.current().warp_size != 32:
        return
    for layout, m, n, config in (
        ("F", 140, 200, Sm90LogitsConfig(256, 128, 64, 2)),
        ("C", 70, 272, Sm90LogitsConfig(64, 128, 128, 3)),
    ):
        # Logits that differ from row to row and from set to set, among them large ones.
        call = LOGITS.inputs(LogitsProblem(m, n, 80, layout_w=layout), 1, np)
        a, w, scale = call.args
        out = np.zeros((m, n), a.dtype)
        args = (a * np.linspace(1, 30, m)[:, None].astype(a.dtype), w, scale)
        references = LOGITS.reference(*args)
        bounds = LOGITS.bound(*args, reference=references)
        assert check.compare((LOGITS.run(*args, config=config, out=out),), references, bounds).ok


def _check_logits() -> None:
    """Equal logits and others, ragged tiles, on Hopper."""
    if host.current().warp_size != 32:
        return
    for problem in (
        LogitsProblem(70, 203, 272, layout_w="F", out_dtype="float32"),
        LogitsProblem(40, 272, 80, layout_w="C", out_dtype="float32"),
    ):
        call = LOGITS.inputs(problem, 1, np)
        references = LOGITS.reference(*call.args, **call.kwargs)
        bounds = LOGITS.bound(*call.args, **call.kwargs, reference=references)
        config = Sm90LogitsConfig(64, 128, 128, 3)
        assert check.compare(
            (LOGITS.run(*call.args, **call.kwargs, config=config),), references, bounds
        ).ok


CHECKS = {
    "logits": _check_logits,
    "shares": _check_shares,
    "streams": _check_streams,
    "many columns": _check_many_columns,
}


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, CHECKS
)
