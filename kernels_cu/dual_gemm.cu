// dual_gemm.cu: out = silu(A @ B1) * (A @ B2) for a batch of matrices, in one pass over A.
//
// A block computes the same tile of both products (gemm/mainloop_portable.cuh); the epilogue
// multiplies them (gemm/epilogue/gate.cuh).
// Constants: those of gemm/mainloop_portable.cuh.
// Launch: as gemm.cu.
#include "gemm/epilogue/gate.cuh"
#include "gemm/tile.cuh"

struct DualGemmParams {
    TileParams tile;
    EpilogueParams epilogues[2];  // of each product; epilogues[0] has the output
    int64_t policy;
};

KERNEL void dual_gemm(const void* a, const void* b1, const void* b2, void* out,
                      const float* scale_a, const float* scale_b1, const float* scale_b2,
                      const e4m3* groups_a, const e4m3* groups_b1, const e4m3* groups_b2,
                      ElementAccumulator* partials, const DualGemmParams params, int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmStorage, storage);
    const WarpCoord warp = WarpCoord::here();
    const GemmWorkTile work = work_tile_of(params.tile);
    AccumulatorTile acc{};
    accumulate_tile(storage, params.tile, work, warp, {a, scale_a, groups_a},
                    {{b1, scale_b1, groups_b1}, {b2, scale_b2, groups_b2}}, partials, pass, acc);
    if (pass == kStorePartials) return;
    const bool by_block = params.tile.has_block_scales != 0;
    const auto offset = [&](Operand operand) {
        return params.tile.batch.offset(operand, work.batch);
    };
    const auto epilogue = [&](int product, const float* scale_b, Operand operand) {
        return MatrixEpilogue::of_matrix(params.epilogues[product], out, nullptr, nullptr,
                                         by_block ? nullptr : scale_a, by_block ? nullptr : scale_b,
                                         offset(kOut), 0, 0, offset(kScaleA), offset(operand));
    };
    const MatrixEpilogue first = epilogue(0, scale_b1, kScaleB),
                         second = epilogue(1, scale_b2, kScaleB2);
    const int policy = int(params.policy);
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[2][kRun]) {
                     const int64_t at_row = work.row + row, at_col = work.col + col;
                     const int64_t cols = params.tile.n - at_col;
                     if (at_row >= params.tile.m || cols <= 0) return;
                     const int count = cols < kRun ? int(cols) : kRun;
                     float values[kRun], factors[kRun];
                     first.scale(at_row, at_col, count, runs[0], values);
                     second.scale(at_row, at_col, count, runs[1], factors);
                     gate_all(values, factors, policy);
                     first.write(at_row, at_col, count, values);
                 });
}
