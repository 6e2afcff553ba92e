// Epilogue of a tile of logits: stores them, and the statistics of each row and set of columns.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/tile.cuh"
#include "logits/statistics.cuh"
#include "common/math.cuh"
#include "common/max_sum.cuh"

static_assert(kTileN % kSetColumns == 0, "a tile has whole sets of columns");

struct LogitsParams {
    TileParams tile;
    EpilogueParams epilogue;  // `out`: the logits
};
using FragmentStatistics = MaxSum[kTileM][kTileN / 16];

// Stores a tile's logits and their statistics.
DEVICE void store_logits(GemmStorage& storage, FragmentStatistics& of_fragments,
                         const WarpCoord& warp, const GemmWorkTile& work,
                         const MatrixEpilogue& epilogue, const AccumulatorTile& acc,
                         MaxSum* statistics) {
    const EpilogueParams& params = epilogue.params;
    const MergeMaxSum merge{kLog2E};
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[1][kRun]) {
                     const int64_t at_row = work.row + row, at_col = work.col + col;
                     const int count = at_row < params.m ? clamp_to(params.n - at_col, kRun) : 0;
                     MaxSum run{-kInfinity, 0.0f};
                     if (count > 0) {
                         float values[kRun];
                         epilogue.scale(at_row, at_col, count, runs[0], values);
                         if (epilogue.bias) {
                             MatrixEpilogue::add(epilogue.bias, params.bias_dtype, params.bias,
                                                 at_row, at_col, count, values);
                         }
                         epilogue.write(at_row, at_col, count, values);
                         run.max = -kLargestFloat;
#pragma unroll
                         for (int i = 0; i < kRun; ++i)
                             run.max = i < count ? maximum(run.max, values[i]) : run.max;
#pragma unroll
                         for (int i = 0; i < kRun; ++i) {
                             if (i < count) run.sum += exp2_approx((values[i] - run.max) * kLog2E);
                         }
                     }
                     run = merge.across_lanes(run, 1, 16 / kRun);  // the fragment's row
                     if (col % 16 == 0) of_fragments[row][col / 16] = run;
                 });
    sync_block();
    constexpr int kSets = kTileN / kSetColumns, kFragmentsOfSet = kSetColumns / 16;
    const int64_t num_sets = (params.n + kSetColumns - 1) / kSetColumns;
    for (int i = int(threadIdx.x); i < kTileM * kSets; i += kNumThreads) {
        const int64_t row = work.row + i / kSets, set = work.col / kSetColumns + i % kSets;
        if (row >= params.m || set >= num_sets) continue;
        MaxSum total{-kInfinity, 0.0f};
#pragma unroll
        for (int j = 0; j < kFragmentsOfSet; ++j) {
            total = merge(total, of_fragments[i / kSets][i % kSets * kFragmentsOfSet + j]);
        }
        statistics[row * num_sets + set] = total;
    }
}
