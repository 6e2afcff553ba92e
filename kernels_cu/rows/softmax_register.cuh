// Softmax's functor for even rows in registers (rows/load_register.cuh).
#pragma once
#include "rows/softmax.cuh"
#include "rows/load_register.cuh"

namespace rows {

template <bool kLog>
struct RegisterSoftmax {
    DEVICE static Element fill() { return from_float<Element>(-kInfinity); }

    DEVICE static SoftmaxEpilogue<kLog> reduce(const RowVectors& vectors, RowValues& values,
                                               const RowThread& t, const SoftmaxParams& params) {
        float max = -kLargestFloat;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) {
                values[i][j] = vectors[i][j];
                max = maximum(max, values[i][j]);
            }
        }
        max = reduce_in_warp(max, Max());
        const MergeMaxSum merge{exponent_scale(params)};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            float part = 0.0f;
#pragma unroll
            for (float& value : values[i])
                part += exponentiate<kLog>(value, max, merge.exponent_scale);
            sum += part;
        }
        const MaxSum of_warp{max, reduce_in_warp(sum, Sum())};
        SoftmaxEpilogue<kLog> epilogue(merge_across_warps<0>(of_warp, t, merge), params);
        if constexpr (kWarpsPerRow > 1) epilogue.rescale(max, merge);
        return epilogue;
    }
};

template <bool kLog>
DEVICE void softmax_register_rows(const Element* x, Element* y, const SoftmaxParams& params) {
    if (params.unpredicated) {
        transform_register_rows<RegisterSoftmax<kLog>, true>(x, y, params);
    } else {
        transform_register_rows<RegisterSoftmax<kLog>, false>(x, y, params);
    }
}

}  // namespace rows
