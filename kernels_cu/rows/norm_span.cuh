// layer_norm and rms_norm of contiguous rows of any length (normalize_span.cu).
#pragma once
#include "common/math.cuh"
#include "rows/load_span.cuh"
#include "rows/norm_params.cuh"

namespace rows {

template <int kStep, class Body>
DEVICE void for_columns(const SpanRow<kStep>& part, SpanValues& s, const void* columns,
                        int32_t dtype, Body body) {
    if (columns == nullptr) return;
    if (dtype == kFloat) {
        part.for_columns(s, static_cast<const float*>(columns), body);
    } else {
        part.for_columns(s, static_cast<const Element*>(columns), body);
    }
}

// Options of a row.
struct SpanNormOptions {
    const void *weight, *bias;  // null: none
    int32_t weight_dtype, bias_dtype;
    int num_cols;
    float eps;
    float *mean, *rstd;  // this row's; null: not stored
    bool wants_sum;
};

// residual: null, or the residual's row, which gets the sum if wants_sum.
template <int kStep>
DEVICE void normalize_span_row(const SpanRow<kStep>& row, const SpanRow<kStep>* residual,
                               const RowThreads& t, const SpanNormOptions& options) {
    SpanValues s;
    row.load(s, 0.0f);
    if (residual) {
        residual->add_to(s);
        if (options.wants_sum) residual->store(s);
    }
    const MergeFloats<Sum> merge;
    const float one_over_count = 1.0f / float(options.num_cols);
    float mean = 0.0f;
    if constexpr (kCentered) {
        float sum = 0.0f;
        row.for_values(s, [&](float value) { sum += value; });
        sum = t.merge_across_warps<0>(t.combine_in_warp(sum, Sum()), merge);
        mean = sum * one_over_count;
        row.for_values_predicated(
            s, [&](float& value, bool there) { value = there ? value - mean : 0.0f; });
    }
    float squares = 0.0f;
    row.for_values(s, [&](float value) { squares += value * value; });
    squares = t.merge_across_warps<1>(t.combine_in_warp(squares, Sum()), merge);
    const float rstd = reciprocal_square_root(squares * one_over_count + options.eps);
    if (t.live() && t.lane == 0) {
        // The mean of a row with an infinity is NaN, whatever its sums are.
        if (options.mean) *options.mean = rstd != rstd ? rstd : mean;
        if (options.rstd) *options.rstd = rstd;
    }
    row.for_values(s, [&](float& value) { value *= rstd; });
    for_columns(row, s, options.weight, options.weight_dtype,
                [](float& value, float weight) { value *= weight; });
    if constexpr (kCentered) {
        for_columns(row, s, options.bias, options.bias_dtype,
                    [](float& value, float bias) { value += bias; });
    }
    row.store(s);
}

template <int kStep>
DEVICE void normalize_span_row(SpanStorage& x, SpanStorage* residual, int begin,
                               const RowThreads& t, const SpanNormOptions& options) {
    const SpanRow<kStep> row(x, begin, t, options.num_cols);
    if (residual) {
        const SpanRow<kStep> of_residual(*residual, begin, t, options.num_cols);
        normalize_span_row(row, &of_residual, t, options);
    } else {
        normalize_span_row<kStep>(row, nullptr, t, options);
    }
}

}  // namespace rows
