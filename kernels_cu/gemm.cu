// gemm.cu: out = activation(alpha * (A @ B) + bias) + residual for a batch of matrices.
//
// A block computes one tile (parts/mainloop.cuh), puts its fragments in shared memory one after
// another and finishes them in runs of neighbouring columns (parts/epilogue.cuh); splits of k:
// parts/gemm_tile.cuh.
// Constants: those of parts/mainloop.cuh but kProducts.
// Launch: grid (tiles * batch * splits; of kReduce: tiles * batch), block (kNumThreads), dynamic
// shared memory sizeof(GemmStorage).
constexpr int kProducts = 1;
#include "parts/epilogue.cuh"
#include "parts/gemm_tile.cuh"
#include "parts/read_ahead.cuh"

struct GemmParams {
    TileParams tile;
    EpilogueParams epilogue;
};

KERNEL void gemm(const void* a, const void* b, void* out, const void* bias, const void* residual,
                 const float* scale_a, const float* scale_b, const e4m3* groups_a,
                 const e4m3* groups_b, SumType* partials, const GemmParams params, int64_t pass) {
    SHARED_STORAGE(GemmStorage, storage);
    const WarpPlace warp = WarpPlace::here();
    if (kOwnStages && read_lines_ahead<kNumWarps>(params, warp.k)) prefetch(out);
    const GemmTask task = task_of(params.tile);
    const bool by_block = params.tile.has_block_scales != 0;
    const auto offset = [&](Operand operand) {
        return params.tile.batch.offset(operand, task.batch);
    };
    const auto epilogue_of = [&] {
        return Epilogue::of_matrix(params.epilogue, out, bias, residual,
                                   by_block ? nullptr : scale_a, by_block ? nullptr : scale_b,
                                   offset(kOut), offset(kBias), offset(kResidual), offset(kScaleA),
                                   offset(kScaleB));
    };
    AllSums acc{};
    const auto meanwhile = [&] {
        if constexpr (kOwnStages) {
            if (warp.k == kGridK - 1 && warp.lane < kTileN / kRun) {
                epilogue_of().prefetch_factors(task.row, task.col + warp.lane * kRun);
            }
        }
    };
    sum_tile(storage, params.tile, task, warp, {a, scale_a, groups_a}, {{b, scale_b, groups_b}},
             partials, pass, acc, meanwhile);
    if (pass == kPartial) return;
    const Epilogue epilogue = epilogue_of();
    for_each_run(storage, warp, acc, params.tile.m - task.row,
                 [&](int row, int col, const SumType(&runs)[1][kRun]) {
                     epilogue.store(task.row + row, task.col + col, runs[0]);
                 });
}
