// merge_attention.cu: merges the attention results over two disjoint sets of keys.
//
// lse = log(exp(lse1) + exp(lse2)) and out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2, row by
// row.  The result of a set without keys (lse -inf) is ignored.  Any other result has a weight of
// at least 2^-126, so that its infinities and NaN propagate.
// Constants: Element, kWidth (elements per load; 1: any strides), kRows (rows per thread).
// Launch: grid (ceil(rows / (kRows * kNumThreads >> lanes_log2))), block (kNumThreads).
#include "attention/merge_rows.cuh"

KERNEL void merge_attention(const Element* out1, const float* lse1, const Element* out2,
                            const float* lse2, Element* out, float* lse, const MergeParams p) {
    wait_for_previous_grid();
    const int lanes = 1 << p.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
    const int rows_at_once = kNumThreads >> p.lanes_log2;
    const int64_t row_of_thread =
        int64_t(blockIdx.x) * (rows_at_once * kRows) + (int(threadIdx.x) >> p.lanes_log2);
    for (int vector = lane; vector < p.num_vectors; vector += lanes) {
        MergeRow rows[kRows];
        // All loads of a thread are issued before the first use.
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int64_t row = row_of_thread + i * rows_at_once;
            if (row < p.num_rows) rows[i].load(p, row, vector, out1, lse1, out2, lse2);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            if (row_of_thread + i * rows_at_once >= p.num_rows) continue;
            rows[i].store(out, lse, vector == 0);
        }
    }
}
