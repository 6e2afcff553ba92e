// A dual GEMM's tile: computes the accumulators of both products and applies their gate.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "gemm/tile.cuh"

// The arrays of a dual GEMM; null: absent.
struct DualOperands {
    const void *a, *b1, *b2;
    void* out;
    const float *scale_a, *scale_b1, *scale_b2;
    const e4m3 *groups_a, *groups_b1, *groups_b2;
    ElementAccumulator* partials;
};

// epilogues: one per product; epilogues[0] has the output.  gate_of(matrix of the batch) returns
// SiluRuns or ExpressionRuns.
template <class GateOf>
DEVICE void multiply_and_gate(GemmStorage& storage, const TileParams& params,
                              const EpilogueParams (&epilogues)[2], const DualOperands& x,
                              int64_t pass, GateOf gate_of) {
    const WarpCoord warp = WarpCoord::here();
    const GemmWorkTile work = work_tile_of(params);
    AccumulatorTile acc{};
    accumulate_tile(storage, params, work, warp, {x.a, x.scale_a, x.groups_a},
                    {{x.b1, x.scale_b1, x.groups_b1}, {x.b2, x.scale_b2, x.groups_b2}}, x.partials,
                    pass, acc);
    if (pass == kStorePartials) return;
    const bool by_block = params.has_block_scales != 0;
    const auto offset = [&](Operand operand) { return params.batch.offset(operand, work.batch); };
    const auto epilogue = [&](int product, const float* scale_b, Operand operand) {
        return MatrixEpilogue::of_matrix(
            epilogues[product], x.out, nullptr, nullptr, by_block ? nullptr : x.scale_a,
            by_block ? nullptr : scale_b, offset(kOut), 0, 0, offset(kScaleA), offset(operand));
    };
    const MatrixEpilogue first = epilogue(0, x.scale_b1, kScaleB),
                         second = epilogue(1, x.scale_b2, kScaleB2);
    const auto gate = gate_of(work.batch);
    using Rows = typename decltype(gate_of(0))::Rows;
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[2][kRun]) {
                     const int64_t at_row = work.row + row, at_col = work.col + col;
                     const int64_t cols = params.n - at_col;
                     const bool outside = at_row >= params.m || cols <= 0;
                     if (Rows::kCount == 0 && outside) return;  // row reductions take all lanes
                     Rows rows;
                     if (!outside) {
                         const int count = cols < kRun ? int(cols) : kRun;
                         float values[kRun], others[kRun];
                         first.scale(at_row, at_col, count, runs[0], values);
                         second.scale(at_row, at_col, count, runs[1], others);
                         rows = gate.store(first, at_row, at_col, count, values, others);
                     }
                     gate.template store_rows<kPositionCols, kRun>(first, rows, at_row, at_col);
                 });
}
