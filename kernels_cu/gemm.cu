// gemm.cu: out = activation(alpha * (A @ B) + bias) + residual for a batch of matrices, on any
// target.
//
// A block computes one tile (gemm/mainloop_portable.cuh).  Its accumulators go through shared
// memory, so that the epilogue stores runs of contiguous columns
// (gemm/epilogue/linear_combination.cuh).  Split-K: gemm/tile.cuh.
// Constants: see gemm/mainloop_portable.cuh.
// Launch: grid (tiles * batch * splits; in pass kReducePartials tiles * batch), block
// (kNumThreads), dynamic shared memory sizeof(GemmStorage).
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/tile.cuh"

struct GemmParams {
    TileParams tile;
    EpilogueParams epilogue;
};

KERNEL void gemm(const void* a, const void* b, void* out, const void* bias, const void* residual,
                 const float* scale_a, const float* scale_b, const e4m3* groups_a,
                 const e4m3* groups_b, ElementAccumulator* partials, const GemmParams params,
                 int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmStorage, storage);
    const WarpCoord warp = WarpCoord::here();
    const GemmWorkTile work = work_tile_of(params.tile);
    AccumulatorTile acc{};
    accumulate_tile(storage, params.tile, work, warp, {a, scale_a, groups_a},
                    {{b, scale_b, groups_b}}, partials, pass, acc);
    if (pass == kStorePartials) return;
    const bool by_block = params.tile.has_block_scales != 0;
    const auto offset = [&](Operand operand) {
        return params.tile.batch.offset(operand, work.batch);
    };
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
        params.epilogue, out, bias, residual, by_block ? nullptr : scale_a,
        by_block ? nullptr : scale_b, offset(kOut), offset(kBias), offset(kResidual),
        offset(kScaleA), offset(kScaleB));
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[1][kRun]) {
                     epilogue.store(work.row + row, work.col + col, runs[0]);
                 });
}
