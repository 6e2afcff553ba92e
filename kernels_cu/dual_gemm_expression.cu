// dual_gemm_expression.cu: out = Expression(A @ B1, A @ B2), a user's formula
// (expression/apply.cuh), for a batch of matrices, on any target; otherwise dual_gemm.cu.
// Launch: as gemm.cu.
#include "expression/apply.cuh"
#include "gemm/tile.cuh"

struct ExpressionDualGemmParams {
    TileParams tile;
    EpilogueParams epilogues[2];  // of each product; epilogues[0] has the output
    ExpressionParams expression;
};

KERNEL void dual_gemm_expression(const void* a, const void* b1, const void* b2, void* out,
                                 const float* scale_a, const float* scale_b1, const float* scale_b2,
                                 const e4m3* groups_a, const e4m3* groups_b1, const e4m3* groups_b2,
                                 const void* x0, const void* x1, const void* x2, const void* x3,
                                 const void* x4, const void* x5, const void* x6, const void* x7,
                                 ElementAccumulator* partials,
                                 const ExpressionDualGemmParams params, int64_t pass) {
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
    const ExpressionOperands operands =
        ExpressionOperands{{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0}.of_matrix(
            params.tile.batch, work.batch);
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[2][kRun]) {
                     const int64_t at_row = work.row + row, at_col = work.col + col;
                     const int64_t cols = params.tile.n - at_col;
                     if (at_row >= params.tile.m || cols <= 0) return;
                     const int count = cols < kRun ? int(cols) : kRun;
                     float values[kRun], others[kRun], results[Expression::kResults][kRun];
                     first.scale(at_row, at_col, count, runs[0], values);
                     second.scale(at_row, at_col, count, runs[1], others);
#pragma unroll
                     for (int i = 0; i < kRun; ++i) {
                         const int64_t at = at_col + (i < count ? i : count - 1);
                         float of_element[Expression::kResults];
                         Expression::of(operands, values[i], others[i], at_row, at, operands.matrix,
                                        of_element);
#pragma unroll
                         for (int r = 0; r < Expression::kResults; ++r)
                             results[r][i] = of_element[r];
                     }
                     first.write(at_row, at_col, count, results[0]);
                     Expression::for_each_more(
                         StoreMore<Expression, kRun>{operands, at_row, at_col, count, results});
                 });
}
