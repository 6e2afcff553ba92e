// gemm_flagged.cu: computes the tiles of an FP32 product whose operands 16-bit parts do not
// represent (split_float32.cu), by FP32 multiply-adds like gemm_fma.cu.
//
// Constants: see gemm/mainloop_fma.cuh; tiles are 128 x 128, the extents of the scales' blocks.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(GemmFmaStorage).
#include "gemm/flagged.cuh"

// lossy: written by split_float32.  Most launches return because all elements are 0.
KERNEL void gemm_flagged(const float* a, const float* b, void* out, const void* bias,
                         const void* residual, const float* scales_a, const float* scales_b,
                         const int32_t* lossy, const FlaggedParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmFmaStorage, storage);
    bool any = false;
    for (int64_t i = lane_id(); i < params.num_lossy; i += kWarpSize) any |= lossy[i] != 0;
    if (!vote_any(any)) return;
    const GemmFmaParams& product = params.product;
    for (int64_t index = blockIdx.x; index < product.order.num_tiles(); index += gridDim.x) {
        const GemmWorkTile work = GemmWorkTile::of_tile(int(index), product.order, kTileM, kTileN);
        const int64_t row =
            product.batch.offset(kScaleA, work.batch) + work.row / kTileM * params.scales_row;
        const int64_t col =
            product.batch.offset(kScaleB, work.batch) + work.col / kTileN * params.scales_col;
        if (!is_flagged(scales_a + row, scales_b + col, params.num_scales)) continue;
        compute_tile(storage, product, {a, b, out, bias, residual}, work);
        sync_block();  // the next tile's stages overwrite the epilogue's runs
    }
}
