// normalize_logits.cu: y = exp(logit - max) / sum for every row of a matrix, from the statistics of
// sets of its columns (dequant_softmax.cu): the logits are read once.  y may be the logits.
// Without logits y holds exp(logit - max of the set) already, and is scaled
// (dequant_softmax_hopper.cu).
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
constexpr int kColumns = 64;  // of a set (dequant_softmax.cu)

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

// Shares of a set become shares of the row.  y: of neighbouring columns, aligned to 16 bytes.
template <class Out>
DEVICE void scale_shares(Out* y, const MaxSum* sets, const NormalizeParams& p, int64_t part) {
    constexpr int kAtOnce = 4;  // runs that are loaded before the first one is stored
    const int64_t whole = p.n / kRun, step = p.blocks_per_row * kAtOnce * kNumThreads;
    Vector<Out, kRun> runs[kAtOnce];
    float largest[kAtOnce];
    const auto load = [&](int64_t run) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t at = run + i * kNumThreads;
            if (at < whole) runs[i].load(y + at * kRun);
            largest[i] = at < whole ? sets[at * kRun / kColumns].max : 0.0f;
        }
    };
    int64_t run = part * kAtOnce * kNumThreads + threadIdx.x;
    load(run);  // under way while the row's statistics are merged
    const MaxSum total = row_statistics(sets, p.num_sets);
    const float factor = 1.0f / total.sum;
    const auto scale_of = [&](float largest) {
        return exp2_approx((largest - total.max) * kLog2E) * factor;
    };
    while (run < whole) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int64_t at = run + i * kNumThreads;
            if (at >= whole) break;
            const float scale = scale_of(largest[i]);
            float values[kRun];
#pragma unroll
            for (int j = 0; j < kRun; ++j) values[j] = runs[i][j] * scale;
            runs[i].from_floats(values);
            runs[i].store(y + at * kRun);
        }
        run += step;
        load(run);
    }
    const int64_t col = whole * kRun + threadIdx.x;
    if (part == 0 && col < p.n) {
        y[col] = from_float<Out>(to_float(y[col]) * scale_of(sets[col / kColumns].max));
    }
}

KERNEL void normalize_logits(const float* logits, const MaxSum* statistics, void* y,
                             const NormalizeParams params) {
    const int64_t row = blockIdx.x / params.blocks_per_row,
                  part = blockIdx.x % params.blocks_per_row;
    const MaxSum* sets = statistics + row * params.num_sets;
    const int64_t offset = row * params.y.row;
    if (!logits) {
        if (params.dtype == kHalf) {
            scale_shares(static_cast<half*>(y) + offset, sets, params, part);
        } else {
            scale_shares(static_cast<bf16*>(y) + offset, sets, params, part);
        }
        return;
    }
    const MaxSum total = row_statistics(sets, params.num_sets);
    const float* from = logits + row * params.logits.row;
    if (params.dtype == kFloat) {
        normalize(from, static_cast<float*>(y) + offset, params, part, total);
    } else if (params.dtype == kHalf) {
        normalize(from, static_cast<half*>(y) + offset, params, part, total);
    } else {
        normalize(from, static_cast<bf16*>(y) + offset, params, part, total);
    }
}
