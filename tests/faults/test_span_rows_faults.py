"""Planted faults in SpanRows (tests/support/planted.py)."""

from __future__ import annotations

from collections.abc import Iterator

from planted import Fault, fault_tests
from span_rows import on_spans

from cupykern.op import Op
from cupykern.ops.norm import LAYER_OP, RMS_OP
from cupykern.ops.problems.norm import NormProblem
from cupykern.ops.softmax import LOG_OP, OP, SoftmaxProblem

SPAN = "rows/load_span.cuh"
SOFTMAX, FUNCTOR = "softmax_span.cu", "rows/softmax_span.cuh"
NORM = "rows/norm_span.cuh"
FAULTS = {
    "no wait for the copies": Fault(SPAN, "copy_async_wait<0>();", ";", "softmax"),
    "no barrier behind the copies": Fault(
        SPAN, "copy_async_wait<0>(); sync_block();", "copy_async_wait<0>();", "softmax"
    ),
    "results leave too early": Fault(SOFTMAX, "sync_block(); span.store", "span.store", "softmax"),
    "the first elements left out": Fault(
        SPAN, "return first_vector() && thread >= begin", "return false && thread >= begin", "warps"
    ),
    "the last elements left out": Fault(
        SPAN, "there && position < end ? position", "false && position < end ? position", "softmax"
    ),
    "rows past the end": Fault(SPAN, "rest < most ? int(rest) : most;", "most;", "softmax"),
    "a shared word's first element": Fault(SPAN, "begin % 2 != 0", "false", "softmax"),
    "a shared word's last element": Fault(SPAN, "end % 2 != 0", "false", "softmax"),
    "lanes' words overlap": Fault(SPAN, "rest < most ? rest : most;", "rest;", "softmax"),
    "half a butterfly": Fault(
        SPAN, "bit < lanes; bit *= 2", "bit < lanes / 2; bit *= 2", "softmax"
    ),
    "warps not merged": Fault(
        SPAN, "if (count <= kWarpSize) return mine;", "return mine;", "warps"
    ),
    "another row's warps": Fault(SPAN, "row_in_block * warps +", "0 * warps +", "warps"),
    "a warp's own maximum": Fault(FUNCTOR, "epilogue.rescale(max, merge);", "", "warps"),
    "logarithms over a warp's maximum": Fault(
        FUNCTOR, "epilogue.rescale(max, merge);", "epilogue.max = max;", "warps"
    ),
    "squares about zero": Fault(NORM, "there ? value - mean : 0.0f;", "value;", "norms"),
    "elements outside of the row": Fault(
        NORM, "there ? value - mean : 0.0f;", "value - mean;", "norms"
    ),
    "one exchange for two": Fault(
        NORM, "t.merge_across_warps<1>", "t.merge_across_warps<0>", "norms of several warps"
    ),
    "the sum rounded before it is normalised": Fault(
        SPAN,
        "values.packed[i][j] += found[j];",
        "values.packed[i][j] = to_float(from_float<Element>(values.packed[i][j] + found[j]));",
        "residual",
    ),
    "another column's weight": Fault(
        SPAN, "first[i * kStep * kPack + j]", "first[i * kStep * kPack]", "norms"
    ),
    "a shared word's weight": Fault(SPAN, "columns[single_col]", "columns[0]", "norms"),
    "no eps": Fault(
        NORM, "squares * one_over_count + options.eps", "squares * one_over_count", "norms"
    ),
}


def _on_any_rows() -> Iterator[tuple[str, Op, object]]:
    for op in (OP, LOG_OP):
        yield "softmax", op, SoftmaxProblem((70, 13), dtype="float16", kind="wide")
        yield "softmax", op, SoftmaxProblem((37, 63), dtype="bfloat16")
        yield "softmax", op, SoftmaxProblem((7, 301), dtype="float32")
        yield "warps", op, SoftmaxProblem((5, 1501), dtype="float32")
        yield "warps", op, SoftmaxProblem((9, 1001), dtype="float16", kind="wide")
        yield "warps", op, SoftmaxProblem((5, 1501), dtype="float32", kind="wide")
    for op in (LAYER_OP, RMS_OP):
        bias = "float16" if op is LAYER_OP else None
        weights = {"weight_dtype": "float16", "bias_dtype": bias}
        yield "norms", op, NormProblem((39, 33), "float16", eps=0.5, mean=3.0, **weights)
        yield "norms of several warps", op, NormProblem((5, 2047), "float32", mean=-3.0)
        yield "residual", op, NormProblem((9, 301), "bfloat16", residual=True)


def _problems() -> Iterator[tuple[str, Op, object]]:
    for check, op, problem in _on_any_rows():
        yield check, on_spans(op, problem), problem


test_faults_apply, test_nothing_fails_without_a_fault, test_caught = fault_tests(
    FAULTS, _problems, {}, every=4
)
