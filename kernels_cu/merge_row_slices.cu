// merge_row_slices.cu: out[row] = Reduction of partials[row][slice] over slices, the last step of a
// formula's row reductions (expression/row_results.cuh).
//
// One warp per row.  Each lane merges every kWarpSize-th slice, then a tree merges the lanes:
// bitwise reproducible.
// Types: Reduction.  Launch: grid (any), block (kNumThreads).
#include "expression/row_results.cuh"

struct MergeRowsParams { int64_t rows, slices; };

KERNEL void merge_row_slices(const float* partials, float* out, const MergeRowsParams params) {
    wait_for_previous_grid();
    constexpr int kWarps = kNumThreads / kWarpSize;
    const int lane = lane_id();
    const int64_t step = int64_t(gridDim.x) * kWarps;
    int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    for (; row < params.rows; row += step) {
        float value = Reduction::kIdentity;
        for (int64_t slice = lane; slice < params.slices; slice += kWarpSize)
            value = Reduction::merge(value, partials[row * params.slices + slice]);
#pragma unroll
        for (int bit = 1; bit < kWarpSize; bit *= 2)
            value = Reduction::merge(value, shuffle_xor(value, bit));
        if (lane == 0) out[row] = value;
    }
}
