// Finds the tiles of an FP32 product that 16-bit parts do not represent (gemm/split_float32.cuh),
// for gemm_flagged.cu.
#pragma once
#include "gemm/tile_fma.cuh"

struct FlaggedParams {
    GemmFmaParams product;
    int64_t scales_row, scales_col;  // strides of a's block rows and b's block columns
    int64_t num_scales, num_lossy;   // num_scales: along k; num_lossy: of `lossy`
};
static_assert(kTileM == 128 && kTileN == 128, "a tile has one row and column of blocks");

// Whether any of the tile's scales is negative; count: scales along k.  Every warp reads all of
// them.
DEVICE bool is_flagged(const float* scales_a, const float* scales_b, int64_t count) {
    bool flagged = false;
    for (int64_t k = lane_id(); k < count; k += kWarpSize)
        flagged |= scales_a[k] < 0 || scales_b[k] < 0;
    return vote_any(flagged);
}
