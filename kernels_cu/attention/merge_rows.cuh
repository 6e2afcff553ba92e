// Merges rows of two attention results: their weights, and their places.
//
// Constants: Element, kWidth (elements per load; 1: any strides).
#pragma once
#include "common/fast_divmod.cuh"
#include "common/math.cuh"
#include "common/vector.cuh"

struct MergeParams {
    // Strides of the three outer dims in elements; `steps`: strides of the last dim.
    int64_t strides1[3], strides2[3], out_strides[3], lse1_strides[3], lse2_strides[3];
    int64_t lse_strides[3], steps[3];
    FastDivmod second, third;       // sizes of the outer dims
    int32_t num_rows, num_vectors;  // num_vectors: per row
    int32_t lanes_log2;             // threads per row
};

using MergeVector = Vector<Element, kWidth>;

// Weights of both results in a row.
struct MergeWeights {
    float first, second;
    float largest, sum;  // of the log-sum-exp

    DEVICE MergeWeights(float lse1, float lse2) {
        largest = maximum(lse1, lse2);
        const float origin = largest == -kInfinity ? 0.0f : largest;
        const float weight1 = exp2_approx((lse1 - origin) * kLog2E);
        const float weight2 = exp2_approx((lse2 - origin) * kLog2E);
        sum = weight1 + weight2;
        const float inverse = 1.0f / sum;
        first = share(lse1, weight1 * inverse);
        second = share(lse2, weight2 * inverse);
    }
    DEVICE float lse() const { return largest + log_accurate(sum); }
    // At least the smallest normal number for a result with keys, so that its infinities and NaN
    // propagate.
    DEVICE static float share(float lse, float x) {
        const float nonzero = x < kSmallestNormal ? kSmallestNormal : x;
        return lse == -kInfinity ? 0.0f : nonzero;
    }
    DEVICE void merge(const MergeVector& x1, const MergeVector& x2, MergeVector& result) const {
        float merged[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) merged[j] = merge(x1[j], x2[j]);
        result.from_floats(merged);
    }
    DEVICE float merge(float x1, float x2) const {
        const float kept1 = first == 0.0f ? 0.0f : x1, kept2 = second == 0.0f ? 0.0f : x2;
        return multiply_add(first, kept1, second * kept2);
    }
};

// The index of a row in the three outer dims.
struct RowIndex {
    int index[3];

    DEVICE RowIndex(const MergeParams& p, int row) : index{row, 0, 0} {
        index[2] = p.third.divide(index[0]);
        index[1] = p.second.divide(index[0]);
    }
    DEVICE int64_t offset(const int64_t (&strides)[3]) const {
        return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
    }
};

// A vector of a row of both results.
struct MergeRow {
    MergeVector vector1, vector2;
    float sum1, sum2;  // log-sum-exps
    int64_t to, to_lse;

    DEVICE void load(const MergeParams& p, int64_t row, int vector, const Element* out1,
                     const float* lse1, const Element* out2, const float* lse2) {
        const RowIndex index(p, int(row));
        const int64_t col = int64_t(vector) * kWidth;
        sum1 = lse1[index.offset(p.lse1_strides)];
        sum2 = lse2[index.offset(p.lse2_strides)];
        vector1.load(out1 + index.offset(p.strides1) + col * p.steps[0]);
        vector2.load(out2 + index.offset(p.strides2) + col * p.steps[1]);
        to = index.offset(p.out_strides) + col * p.steps[2];
        to_lse = index.offset(p.lse_strides);
    }
    DEVICE void store(Element* out, float* lse, bool stores_lse) const {
        const MergeWeights weights(sum1, sum2);
        MergeVector merged;
        weights.merge(vector1, vector2, merged);
        merged.store(out + to);
        if (stores_lse) lse[to_lse] = weights.lse();
    }
};
