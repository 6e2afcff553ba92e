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
    if (pass != kReducePartials)
        multiply_parts(storage, params, work, warp, a, b, scales_a, scales_b, acc);
    if (pass != kSinglePass) exchange_partials(tile, work, warp, partials, pass, acc);
    if (pass == kStorePartials) return;
    const MatrixEpilogue epilogue =
        MatrixEpilogue::of_matrix(params.epilogue, out, bias, residual, nullptr, nullptr,
                                  offset(kOut), offset(kBias), offset(kResidual), 0, 0);
    for_each_run(storage, warp, acc, [&](int row, int col, const float (&runs)[1][kRun]) {
        epilogue.store(work.row + row, work.col + col, runs[0]);
    });
}
