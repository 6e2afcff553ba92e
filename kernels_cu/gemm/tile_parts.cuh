// An output tile of FP32 operands in 16-bit parts (gemm/mainloop_parts.cuh).
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/mainloop_parts.cuh"

struct PartsGemmParams {
    TileParams tile;  // block_scales: blocks of 128 rows or columns x 64 along k
    EpilogueParams epilogue;
    int64_t part_steps[2];  // strides of the parts of a and b, in elements
};
using PartsStorage = TileStorage<gemm::PartsStage>;

// Computes the accumulators of the tile's split of k.
DEVICE void multiply_parts(PartsStorage& storage, const PartsGemmParams& params,
                           const GemmWorkTile& work, const WarpCoord& warp, const ElementA* a,
                           const ElementB* b, const float* scales_a, const float* scales_b,
                           AccumulatorTile& acc) {
    const TileParams& tile = params.tile;
    const auto offset = [&](Operand operand) { return tile.batch.offset(operand, work.batch); };
    const MatrixStrides &of_a = tile.a.block_scales, &of_b = tile.b[0].block_scales;
    const gemm::PartsSource a_source{
        {a + offset(kA) + work.row * tile.a.strides.row, tile.a.strides.row, 1, tile.m - work.row,
         tile.a.dtype, work.row, GroupScales{}},
        params.part_steps[0],
        scales_a + offset(kScaleA) + work.row / gemm::kSplitMn * of_a.row};
    const gemm::PartsSource b_source{
        {b + offset(kB) + work.col * tile.b[0].strides.col, tile.b[0].strides.col, 1,
         tile.n - work.col, tile.b[0].dtype, work.col, GroupScales{}},
        params.part_steps[1],
        scales_b + offset(kScaleB) + work.col / gemm::kSplitMn * of_b.col};
    const int64_t first_k = work.split * tile.k_per_split, last_k = first_k + tile.k_per_split;
    gemm::multiply(storage.stages, a_source, b_source, first_k, last_k < tile.k ? last_k : tile.k,
                   warp, acc);
}
