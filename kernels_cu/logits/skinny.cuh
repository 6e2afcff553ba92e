// Building blocks of the skinny GEMM for logits: its stages, and the product of a warp.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/work_tile.cuh"
#include "logits/statistics.cuh"
#include "common/math.cuh"
#include "common/max_sum.cuh"
#include "common/prefetch.cuh"
#include "pipeline/tma_pipeline.cuh"

constexpr int kColumns = kSetColumns;  // columns of two consumer warps
constexpr int kTileM = 16, kWarpCols = 32, kWarps = kTileN / kWarpCols;
constexpr int kDepth = 128, kSwizzleBytes = 128;  // tile_k of a stage; bytes of a swizzled row of B
constexpr int kRun = 16, kPitch = kWarpCols + 4;
static_assert(kNumThreads == 32 * (kWarps + 1) && kWarps % 2 == 0, "warps that multiply, and one");
static_assert(sizeof(ElementA) == 2 && sizeof(ElementB) == 1, "a stage's rows");

struct SkinnyLogitsParams {
    int64_t num_k_tiles;
    int64_t rows;             // of A's TMA boxes: 8 or 16
    EpilogueParams epilogue;  // `out`: the logits
};

// Rows of 128 bytes with TMA's 128-byte swizzle, in adjacent boxes of kRows rows.
template <int kRows>
struct BoxesTile {
    unsigned char bytes[kRows * kSwizzleBytes];

    DEVICE const void* operator()(int row, int chunk) const {
        const unsigned char* box = bytes + chunk / 8 * (kRows * kSwizzleBytes);
        return box + row * kSwizzleBytes + (chunk % 8 ^ row % 8) * 16;
    }
};
struct SkinnyLogitsStage {
    BoxesTile<kTileN> cols;
    BoxesTile<kTileM> rows[2];
};
struct SkinnyLogitsStorage {
    SkinnyLogitsStage stages[kStages];
    float logits[kWarps][kTileM][kPitch];  // staging of each warp
    MaxSum of_warps[kWarps][kTileM];       // statistics of each warp's columns
    pipeline::TmaPipeline<kStages, 32, kWarps> pipeline;
};
static_assert(sizeof(SkinnyLogitsStage) % 1024 == 0, "stages are aligned");

// acc += A * B of one stage, for 16 rows and kWarpCols columns from `col` on.
DEVICE void multiply_stage(const SkinnyLogitsStage& stage, int col,
                           Accumulator<ElementA> (&acc)[1][2]) {
#pragma unroll
    for (int k = 0; k < kDepth; k += 32) {
        FragmentA<ElementA> a[2][1];
        FragmentB<ElementA> b[2][2];
        load_mixed_input<ElementA, false, LaneOrder::kFours>(a[0][0], a[1][0], stage.rows[0], 0, k);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            load_mixed_input<ElementB, false, LaneOrder::kFours>(b[0][j], b[1][j], stage.cols,
                                                                 col + j * 16, k);
        }
        mma(acc, a[0], b[0]);
        mma(acc, a[1], b[1]);
    }
}

// Epilogue of the warp's columns from `first_col` on, staged in `staged`.  Merges the statistics of
// row lane / 2 into `seen`.
DEVICE void store_logits(float (&staged)[kTileM][kPitch], const MatrixEpilogue& epilogue,
                         int64_t first_col, const Accumulator<ElementA> (&acc)[1][2],
                         MaxSum& seen) {
    using Acc = Accumulator<ElementA>;
    const EpilogueParams& params = epilogue.params;
    const MergeMaxSum merge{kLog2E};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < Acc::kCount; ++i) {
            staged[Acc::row(lane, i)][j * 16 + Acc::col(lane, i)] = acc[0][j].values[i];
        }
    }
    sync_warp();
    const int row = lane / 2;
    const int64_t col = first_col + lane % 2 * kRun, rest = params.n - col;
    const int count = row >= params.m || rest < 0 ? 0 : rest < kRun ? int(rest) : kRun;
    MaxSum total{-kInfinity, 0.0f};
    if (count > 0) {
        Vector<float, kRun> run;
        run.load(&staged[row][lane % 2 * kRun]);
        float run_acc[kRun], values[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) run_acc[i] = run[i];
        epilogue.scale(row, col, count, run_acc, values);
        if (epilogue.bias) {
            MatrixEpilogue::add(epilogue.bias, params.bias_dtype, params.bias, row, col, count,
                                values);
        }
        epilogue.write(row, col, count, values);
        total.max = -kLargestFloat;
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            total.max = i < count ? maximum(total.max, values[i]) : total.max;
        }
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            if (i < count) total.sum += exp2_approx((values[i] - total.max) * kLog2E);
        }
    }
    seen = merge(seen, merge.across_lanes(total, 1, 2));
}
