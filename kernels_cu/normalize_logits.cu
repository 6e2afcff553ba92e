// normalize_logits.cu: y = exp(logit - max) / sum for every row of a matrix, from the statistics of
// sets of its columns (dequant_softmax.cu): the logits are read once.  y may be the logits.
// Launch: grid (m * blocks_per_row), block (kNumThreads).  Each block merges the statistics of its
// row.
#include "parts/dtype.cuh"
#include "parts/gemm_task.cuh"
#include "parts/max_sum.cuh"
#include "parts/math.cuh"
#include "parts/vector.cuh"

struct NormalizeParams {
    int64_t n, num_sets, blocks_per_row;
    MatrixStrides logits, y;
    int64_t dtype;  // of y
};

constexpr int kRun = 8;

// Merges the statistics of a row, in an order that does not depend on the rest; for all threads.
DEVICE MaxSum row_statistics(const MaxSum* sets, int64_t num_sets) {
    constexpr int kWarps = kNumThreads / kWarpSize;
    SHARED(MaxSum, of_warps, [kWarps]);
    const MergeMaxSum merge{kLog2E};
    MaxSum total{-kInfinity, 0.0f};
    for (int64_t i = threadIdx.x; i < num_sets; i += kNumThreads) total = merge(total, sets[i]);
    total = merge.across_lanes(total, 1, kWarpSize);
    if (lane_id() == 0) of_warps[threadIdx.x / kWarpSize] = total;
    sync_block();
    total = of_warps[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) total = merge(total, of_warps[i]);
    return total;
}

template <class Out>
DEVICE void normalize(const float* logits, Out* y, const NormalizeParams& p, int64_t part,
                      const MaxSum& total) {
    const float factor = 1.0f / total.sum;
    const int64_t step = p.blocks_per_row * kNumThreads * kRun;
    for (int64_t col = (part * kNumThreads + threadIdx.x) * kRun; col < p.n; col += step) {
        const int count = p.n - col < kRun ? int(p.n - col) : kRun;
        float values[kRun];
        load_run(logits + col * p.logits.col, p.logits.col, count, values);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            values[i] = exp2_approx((values[i] - total.max) * kLog2E) * factor;
        }
        store_run(y + col * p.y.col, p.y.col, count, values);
    }
}

KERNEL void normalize_logits(const float* logits, const MaxSum* statistics, void* y,
                             const NormalizeParams params) {
    const int64_t row = blockIdx.x / params.blocks_per_row,
                  part = blockIdx.x % params.blocks_per_row;
    const MaxSum total = row_statistics(statistics + row * params.num_sets, params.num_sets);
    const float* from = logits + row * params.logits.row;
    const int64_t offset = row * params.y.row;
    if (params.dtype == kFloat) {
        normalize(from, static_cast<float*>(y) + offset, params, part, total);
    } else if (params.dtype == kHalf) {
        normalize(from, static_cast<half*>(y) + offset, params, part, total);
    } else {
        normalize(from, static_cast<bf16*>(y) + offset, params, part, total);
    }
}
