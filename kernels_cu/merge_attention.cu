// merge_attention.cu: merges the attention results over two disjoint sets of keys.
//
// lse = log(exp(lse1) + exp(lse2)) and out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2, row by
// row.  The result of a set without keys (lse -inf) is ignored.  Any other result has a weight of
// at least 2^-126, so that its infinities and NaN propagate.
// Constants: Element, kWidth (elements per load; 1: any strides), kRows (rows per thread).
// Launch: grid (ceil(rows / (kRows * kNumThreads >> lanes_log2))), block (kNumThreads).
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
    DEVICE static float share(float lse, float x) {
        const float nonzero = x < kSmallestNormal ? kSmallestNormal : x;
        return lse == -kInfinity ? 0.0f : nonzero;
    }
    DEVICE float merge(float x1, float x2) const {
        const float kept1 = first == 0.0f ? 0.0f : x1, kept2 = second == 0.0f ? 0.0f : x2;
        return multiply_add(first, kept1, second * kept2);
    }
};

DEVICE int64_t offset_of(const int64_t (&strides)[3], const int (&index)[3]) {
    return index[0] * strides[0] + index[1] * strides[1] + index[2] * strides[2];
}

KERNEL void merge_attention(const Element* out1, const float* lse1, const Element* out2,
                            const float* lse2, Element* out, float* lse, const MergeParams p) {
    wait_for_previous_grid();
    using Items = Vector<Element, kWidth>;
    const int lanes = 1 << p.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
    const int rows_at_once = kNumThreads >> p.lanes_log2;
    const int64_t first_row = int64_t(blockIdx.x) * (rows_at_once * kRows);
    const int64_t row_of_thread = first_row + (int(threadIdx.x) >> p.lanes_log2);
    for (int first = lane; first < p.num_vectors; first += lanes) {
        Items items1[kRows], items2[kRows];
        float sums1[kRows], sums2[kRows];
        int64_t to[kRows], to_lse[kRows];
        // All loads of a thread are issued before the first use.
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int64_t row = row_of_thread + i * rows_at_once;
            if (row >= p.num_rows) continue;
            int index[3] = {int(row), 0, 0};
            index[2] = p.third.divide(index[0]);
            index[1] = p.second.divide(index[0]);
            sums1[i] = lse1[offset_of(p.lse1_strides, index)];
            sums2[i] = lse2[offset_of(p.lse2_strides, index)];
            const int64_t col = int64_t(first) * kWidth;
            items1[i].load(out1 + offset_of(p.strides1, index) + col * p.steps[0]);
            items2[i].load(out2 + offset_of(p.strides2, index) + col * p.steps[1]);
            to[i] = offset_of(p.out_strides, index) + col * p.steps[2];
            to_lse[i] = offset_of(p.lse_strides, index);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (row_of_thread + i * rows_at_once >= p.num_rows) continue;
            const MergeWeights weights(sums1[i], sums2[i]);
            float merged[kWidth];
#pragma unroll
            for (int j = 0; j < kWidth; ++j) merged[j] = weights.merge(items1[i][j], items2[i][j]);
            Items result;
            result.from_floats(merged);
            result.store(out + to[i]);
            if (first == 0) lse[to_lse[i]] = weights.lse();
        }
    }
}
