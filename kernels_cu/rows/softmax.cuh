// Softmax and log_softmax of register-resident rows without options but a positive scale.  Each
// element is exponentiated once, relative to its warp's maximum, and multiplied by one factor when
// the row's maximum and sum are known.  log_softmax keeps the elements instead.
#pragma once
#include "common/math.cuh"
#include "common/max_sum.cuh"
#include "rows/reduce.cuh"
#include "rows/softmax_params.cuh"

namespace rows {

// kScaled: the call has a scale.  Without one, exponents are scaled by an immediate: long rows are
// 2% slower by a parameter (H200).
DEVICE float exponent_scale(const SoftmaxParams& params) {
    return kScaled ? params.exponent_scale : kLog2E;
}

// Returns exp2(exponent_scale * (value - max)), which replaces `value` unless kLog.
template <bool kLog>
DEVICE float exponentiate(float& value, float max, float exponent_scale) {
    const float power = exp2_approx((value - max) * exponent_scale);
    if constexpr (!kLog) value = power;
    return power;
}

// Maps exponentiated values to results.
template <bool kLog>
struct SoftmaxEpilogue {
    float max, scale, log_sum, factor;

    // total: the row's statistic.
    DEVICE SoftmaxEpilogue(const MaxSum& total, const SoftmaxParams& params)
        : max(total.max),
          scale(kScaled ? params.scale : 1.0f),
          log_sum(kLog ? log_accurate(total.sum) : 0.0f),
          factor(reciprocal_approx(total.sum)) {}

    // from: the maximum that the values were exponentiated relative to.
    DEVICE void rescale(float from, const MergeMaxSum& merge) {
        factor *= merge.rescale(from, max);
    }
    DEVICE float operator()(float value) const {
        return kLog ? multiply_add(value - max, scale, -log_sum) : value * factor;
    }
};

}  // namespace rows
