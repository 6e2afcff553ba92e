// gemm_flagged.cu: the tiles of a product of FP32 matrices that 16-bit parts cannot stand for
// (split_float32.cu), by FP32 multiply-adds; as gemm.cu.
//
// Constants: those of parts/mainloop.cuh; tiles of 128 x 128, as the blocks of scales.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(GemmStorage).
#include "parts/epilogue.cuh"
#include "parts/gemm_tile.cuh"

struct FlaggedParams {
    TileParams tile;  // block_scales: of a's rows of blocks and b's columns of blocks
    EpilogueParams epilogue;
    int64_t num_tiles, num_scales, num_lossy;  // num_scales: along k
};

// Whether one of the scales along k of the tile's rows or columns is negative.  All warps look at
// all of them.
DEVICE bool is_flagged(const float* scales_a, const float* scales_b, int64_t count) {
    bool flagged = false;
    for (int64_t k = lane_id(); k < count; k += kWarpSize)
        flagged |= scales_a[k] < 0 || scales_b[k] < 0;
    return vote_any(flagged);
}

// lossy: split_float32's, by which most launches end.
KERNEL void gemm_flagged(const void* a, const void* b, void* out, const void* bias,
                         const void* residual, const float* scales_a, const float* scales_b,
                         const int32_t* lossy, const FlaggedParams params) {
    SHARED_STORAGE(GemmStorage, storage);
    bool any = false;
    for (int64_t i = lane_id(); i < params.num_lossy; i += kWarpSize) any |= lossy[i] != 0;
    if (!vote_any(any)) return;
    static_assert(kTileM == 128 && kTileN == 128, "a tile has one row and column of blocks");
    const WarpCoord warp = WarpCoord::here();
    const TileParams& tile = params.tile;
    for (int64_t index = blockIdx.x; index < params.num_tiles; index += gridDim.x) {
        const GemmWorkTile work = work_tile_of(tile, uint32_t(index));
        const auto offset = [&](Operand operand) { return tile.batch.offset(operand, work.batch); };
        const int64_t row = work.row / kTileM * tile.a.block_scales.row;
        const int64_t col = work.col / kTileN * tile.b[0].block_scales.col;
        if (!is_flagged(scales_a + offset(kScaleA) + row, scales_b + offset(kScaleB) + col,
                        params.num_scales)) {
            continue;
        }
        AccumulatorTile acc{};
        accumulate_tile(storage, tile, work, warp, {a, nullptr, nullptr}, {{b, nullptr, nullptr}},
                        nullptr, kSinglePass, acc);
        const MatrixEpilogue epilogue =
            MatrixEpilogue::of_matrix(params.epilogue, out, bias, residual, nullptr, nullptr,
                                      offset(kOut), offset(kBias), offset(kResidual), 0, 0);
        for_each_run(storage, warp, acc,
                     [&](int r, int c, const ElementAccumulator(&runs)[1][kRun]) {
                         epilogue.store(work.row + r, work.col + c, runs[0]);
                     });
        sync_block();  // the next tile's stages overwrite the fragments
    }
}
