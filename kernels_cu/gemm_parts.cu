// gemm_parts.cu: out = activation(alpha * (A @ B) + bias) + residual for FP32 operands in 16-bit
// parts, on any target.
//
// Like gemm.cu, with the mainloop gemm/mainloop_parts.cuh.  split_float32.cu computes the parts and
// their scales.  gemm_flagged.cu recomputes tiles that the parts do not represent.
// Types and constants: see gemm/mainloop_parts.cuh and gemm/mainloop_portable.cuh.
// Launch: see gemm.cu, dynamic shared memory sizeof(PartsStorage).
#include "gemm/tile_parts.cuh"

KERNEL void gemm_parts(const ElementA* a, const ElementB* b, void* out, const void* bias,
                       const void* residual, const float* scales_a, const float* scales_b,
                       float* partials, const PartsGemmParams params, int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(PartsStorage, storage);
    const WarpCoord warp = WarpCoord::here();
    const TileParams& tile = params.tile;
    const GemmWorkTile work = work_tile_of(tile);
    const auto offset = [&](Operand operand) { return tile.batch.offset(operand, work.batch); };
    AccumulatorTile acc{};
    if (pass != kReducePartials) {
        const MatrixStrides &of_a = tile.a.block_scales, &of_b = tile.b[0].block_scales;
        const gemm::PartsSource a_source{
            {a + offset(kA) + work.row * tile.a.strides.row, tile.a.strides.row, 1,
             tile.m - work.row, tile.a.dtype, work.row, GroupScales{}},
            params.part_steps[0],
            scales_a + offset(kScaleA) + work.row / gemm::kSplitMn * of_a.row};
        const gemm::PartsSource b_source{
            {b + offset(kB) + work.col * tile.b[0].strides.col, tile.b[0].strides.col, 1,
             tile.n - work.col, tile.b[0].dtype, work.col, GroupScales{}},
            params.part_steps[1],
            scales_b + offset(kScaleB) + work.col / gemm::kSplitMn * of_b.col};
        const int64_t first_k = work.split * tile.k_per_split, last_k = first_k + tile.k_per_split;
        gemm::multiply(storage.stages, a_source, b_source, first_k,
                       last_k < tile.k ? last_k : tile.k, warp, acc);
    }
    if (pass != kSinglePass) exchange_partials(tile, work, warp, partials, pass, acc);
    if (pass == kStorePartials) return;
    const MatrixEpilogue epilogue =
        MatrixEpilogue::of_matrix(params.epilogue, out, bias, residual, nullptr, nullptr,
                                  offset(kOut), offset(kBias), offset(kResidual), 0, 0);
    for_each_run(storage, warp, acc, [&](int row, int col, const float (&runs)[1][kRun]) {
        epilogue.store(work.row + row, work.col + col, runs[0]);
    });
}
