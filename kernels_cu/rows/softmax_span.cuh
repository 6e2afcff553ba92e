// Softmax of a thread's part of a contiguous row (rows/load_span.cuh).
#pragma once
#include "rows/load_span.cuh"
#include "rows/softmax.cuh"

namespace rows {

template <bool kLog, int kStep>
DEVICE void softmax_span_row(const SpanRow<kStep>& row, const RowThreads& t,
                             const SoftmaxParams& params) {
    SpanValues x;
    row.load(x, -kInfinity);
    float max = -kLargestFloat;
    row.for_values(x, [&](float value) { max = maximum(max, value); });
    max = t.combine_in_warp(max, Max());
    const MergeMaxSum merge{exponent_scale(params)};
    float sum = 0.0f;
    row.for_values(
        x, [&](float& value) { sum += exponentiate<kLog>(value, max, merge.exponent_scale); });
    const MaxSum of_warp{max, t.combine_in_warp(sum, Sum())};
    SoftmaxEpilogue<kLog> epilogue(t.merge_across_warps<0>(of_warp, merge), params);
    epilogue.rescale(max, merge);

    row.for_values(x, [&](float& value) { value = epilogue(value); });
    row.store(x);
}
template <int kStep>
DEVICE void softmax_span_row(SpanStorage& tile, int begin, const RowThreads& t, int num_cols,
                             const SoftmaxParams& params) {
    const SpanRow<kStep> row(tile, begin, t, num_cols);
    if (params.log) {
        softmax_span_row<true>(row, t, params);
    } else {
        softmax_span_row<false>(row, t, params);
    }
}

}  // namespace rows
