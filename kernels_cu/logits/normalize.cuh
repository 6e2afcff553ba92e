// The second half of a softmax of logits: y = exp(logit - max) / sum, from the statistics of sets
// of kSetColumns columns.  The logits are read once; y can alias them.
#pragma once
#include "common/dtype.cuh"
#include "gemm/work_tile.cuh"
#include "common/math.cuh"
#include "logits/statistics.cuh"
#include "common/max_sum.cuh"
#include "common/vector.cuh"

struct NormalizeParams {
    int64_t m, n, num_sets;
    MatrixStrides logits, y;
    int64_t dtype;  // of y
};

constexpr int kNormalRun = 8;        // columns per thread and iteration
constexpr int kPieceColumns = 2048;  // columns of a piece, the unit in which blocks share the work
constexpr int kBlockWarps = kNumThreads / kWarpSize;

// Merges a row's statistics in a fixed order; every thread gets the result.
DEVICE MaxSum row_statistics(const MaxSum* sets, int64_t num_sets, MaxSum* of_warps) {
    const MergeMaxSum merge{kLog2E};
    MaxSum total{-kInfinity, 0.0f};
    for (int64_t i = threadIdx.x; i < num_sets; i += kNumThreads) total = merge(total, sets[i]);
    total = merge.across_lanes(total, 1, kWarpSize);
    sync_block();  // the previous row's statistics have been read
    if (lane_id() == 0) of_warps[threadIdx.x / kWarpSize] = total;
    sync_block();
    total = of_warps[0];
#pragma unroll
    for (int i = 1; i < kBlockWarps; ++i) total = merge(total, of_warps[i]);
    return total;
}

DEVICE void normalize_run(const MaxSum& total, float (&values)[kNormalRun]) {
    const float factor = 1.0f / total.sum;
#pragma unroll
    for (int i = 0; i < kNormalRun; ++i) {
        values[i] = exp2_approx((values[i] - total.max) * kLog2E) * factor;
    }
}

// Normalises columns [begin, end) of a row.
template <class Out>
DEVICE void normalize_columns(const float* logits, Out* y, const NormalizeParams& p,
                              const MaxSum& total, int64_t begin, int64_t end) {
    constexpr int64_t kStep = kNumThreads * kNormalRun;
    for (int64_t col = begin + threadIdx.x * kNormalRun; col < end; col += kStep) {
        const int count = end - col < kNormalRun ? int(end - col) : kNormalRun;
        float values[kNormalRun];
        load_run(logits + col * p.logits.col, p.logits.col, count, values);
        normalize_run(total, values);
        store_run(y + col * p.y.col, p.y.col, count, values);
    }
}

// Calls f(row, begin, end) for this block's column ranges: the pieces of all rows are split evenly,
// in contiguous runs, over the blocks.
template <class F>
DEVICE void for_each_own_row(const NormalizeParams& p, F f) {
    const int64_t pieces = (p.n + kPieceColumns - 1) / kPieceColumns, all = p.m * pieces;
    int64_t piece = blockIdx.x * all / gridDim.x;
    const int64_t last = (blockIdx.x + 1) * all / gridDim.x;
    while (piece < last) {
        const int64_t row = piece / pieces, first = piece - row * pieces;
        const int64_t rest = pieces - first, own = last - piece, count = rest < own ? rest : own;
        const int64_t begin = first * kPieceColumns, end = begin + count * kPieceColumns;
        f(row, begin, end < p.n ? end : p.n);
        piece += count;
    }
}

// of_warps: kBlockWarps elements in shared memory.
DEVICE void normalize_rows(const float* logits, const MaxSum* statistics, void* y,
                           const NormalizeParams& p, MaxSum* of_warps) {
    for_each_own_row(p, [&](int64_t row, int64_t begin, int64_t end) {
        const MaxSum total = row_statistics(statistics + row * p.num_sets, p.num_sets, of_warps);
        const float* from = logits + row * p.logits.row;
        const int64_t offset = row * p.y.row;
        if (p.dtype == kFloat) {
            normalize_columns(from, static_cast<float*>(y) + offset, p, total, begin, end);
        } else if (p.dtype == kHalf) {
            normalize_columns(from, static_cast<half*>(y) + offset, p, total, begin, end);
        } else {
            normalize_columns(from, static_cast<bf16*>(y) + offset, p, total, begin, end);
        }
    });
}
