// dequant_softmax.cu: logits = A @ (scale_b * B) + bias in FP32, and for every row and kColumns
// columns their largest and the sum of exp(logit - largest): the first half of a softmax along the
// columns (normalize_logits.cu is the other one), which need not read the logits for it.
// Constants: those of parts/mainloop.cuh but kProducts.
// Launch: as gemm.cu's.  statistics: (m, ceil(n / kColumns)).
constexpr int kProducts = 1;
#include "parts/epilogue.cuh"
#include "parts/gemm_tile.cuh"
#include "parts/max_sum.cuh"

constexpr int kColumns = 64;
static_assert(kTileN % kColumns == 0, "a tile has whole sets of columns");

struct LogitsParams {
    TileParams tile;
    EpilogueParams epilogue;
};

KERNEL void dequant_softmax(const void* a, const void* b, float* logits, const void* bias,
                            const float* scale_b, MaxSum* statistics, SumType* partials,
                            const LogitsParams params, int64_t pass) {
    SHARED_STORAGE(GemmStorage, storage);
    SHARED(MaxSum, of_fragments, [kTileM][kTileN / 16]);
    const WarpPlace warp = WarpPlace::here();
    const GemmTask task = task_of(params.tile);
    AllSums acc{};
    sum_tile(storage, params.tile, task, warp, {a, nullptr, nullptr}, {{b, scale_b, nullptr}},
             partials, pass, acc);
    if (pass == kPartial) return;
    const Epilogue epilogue = Epilogue::of_matrix(params.epilogue, logits, bias, nullptr, nullptr,
                                                  scale_b, 0, 0, 0, 0, 0);
    const MergeMaxSum merge{kLog2E};
    for_each_run(storage, warp, acc, [&](int row, int col, const SumType(&runs)[1][kRun]) {
        const int64_t at_row = task.row + row, at_col = task.col + col;
        const int64_t cols = params.tile.n - at_col;
        const int count = at_row < params.tile.m ? clamp_to(cols, kRun) : 0;
        MaxSum run{-kInfinity, 0.0f};
        if (count > 0) {
            float values[kRun];
            epilogue.scale(at_row, at_col, count, runs[0], values);
            if (bias) {
                Epilogue::add(bias, params.epilogue.bias_dtype, params.epilogue.bias, at_row,
                              at_col, count, values);
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
    constexpr int kSets = kTileN / kColumns, kFragmentsOfSet = kColumns / 16;
    const int64_t num_sets = (params.tile.n + kColumns - 1) / kColumns;
    for (int i = int(threadIdx.x); i < kTileM * kSets; i += kNumThreads) {
        const int64_t row = task.row + i / kSets, set = task.col / kColumns + i % kSets;
        if (row >= params.tile.m || set >= num_sets) continue;
        MaxSum total{-kInfinity, 0.0f};
#pragma unroll
        for (int j = 0; j < kFragmentsOfSet; ++j) {
            total = merge(total, of_fragments[i / kSets][i % kSets * kFragmentsOfSet + j]);
        }
        statistics[row * num_sets + set] = total;
    }
}
