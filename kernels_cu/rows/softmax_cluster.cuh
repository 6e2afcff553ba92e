// Statistics and results of long rows in a cluster (softmax_cluster.cu).
#pragma once
#include "rows/load_cluster.cuh"
#include "rows/softmax.cuh"

namespace rows {

// The warp's statistic.  single: this thread's single element, -inf if it has none.
DEVICE MaxSum warp_max_sum(const ClusterRow& row, float single, float exponent_scale) {
    RowVector larger;
    larger.fill(from_float<Element>(-kInfinity));
    row.for_vectors([&](RowVector vector, int) { larger.take_larger(vector, false); });
    float max = maximum(single, -kLargestFloat);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    max = reduce_in_warp(max, Max());
    float sum = exp2_approx((single - max) * exponent_scale);
    row.for_vectors([&](RowVector vector, int) {
        float some = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            some += exp2_approx((vector[j] - max) * exponent_scale);
        }
        sum += some;
    });
    return {max, reduce_in_warp(sum, Sum())};
}

template <bool kLog>
DEVICE void store(Element* y_row, const ClusterRow& row, float single, const MaxSum& total,
                  const SoftmaxParams& params, StorePolicy policy) {
    const float log_sum = kLog ? log_accurate(total.sum) : 0.0f;
    const float factor = reciprocal_approx(total.sum);
    row.store(y_row, single, policy, [&](float value) {
        const float distance = value - total.max;
        return kLog ? multiply_add(distance, kScaled ? params.scale : 1.0f, -log_sum)
                    : exp2_approx(distance * exponent_scale(params)) * factor;
    });
}

}  // namespace rows
