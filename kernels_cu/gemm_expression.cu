// gemm_expression.cu: out = Expression(alpha * (A @ B)), a user's formula (expression/apply.cuh),
// for a batch of matrices, on any target; otherwise like gemm.cu.
// Launch: see gemm.cu.
#include "expression/apply.cuh"
#include "gemm/tile.cuh"

struct ExpressionGemmParams {
    TileParams tile;
    EpilogueParams epilogue;
    ExpressionParams expression;
};

KERNEL void gemm_expression(const void* a, const void* b, void* out, const void* bias,
                            const void* residual, const float* scale_a, const float* scale_b,
                            const e4m3* groups_a, const e4m3* groups_b, const void* x0,
                            const void* x1, const void* x2, const void* x3, const void* x4,
                            const void* x5, const void* x6, const void* x7,
                            ElementAccumulator* partials, const ExpressionGemmParams params,
                            int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmStorage, storage);
    const WarpCoord warp = WarpCoord::here();
    const GemmWorkTile work = work_tile_of(params.tile);
    AccumulatorTile acc{};
    accumulate_tile(storage, params.tile, work, warp, {a, scale_a, groups_a},
                    {{b, scale_b, groups_b}}, partials, pass, acc);
    if (pass == kStorePartials) return;
    const bool by_block = params.tile.has_block_scales != 0;
    const auto offset = [&](Operand operand) {
        return params.tile.batch.offset(operand, work.batch);
    };
    const MatrixEpilogue matrix = MatrixEpilogue::of_matrix(
        params.epilogue, out, nullptr, nullptr, by_block ? nullptr : scale_a,
        by_block ? nullptr : scale_b, offset(kOut), 0, 0, offset(kScaleA), offset(kScaleB));
    const ExpressionOperands operands =
        ExpressionOperands{{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0}.of_matrix(
            params.tile.batch, work.batch);
    const ExpressionEpilogue<Expression> epilogue{matrix, operands};
    for_each_run(storage, warp, acc,
                 [&](int row, int col, const ElementAccumulator(&runs)[1][kRun]) {
                     const int64_t at_row = work.row + row, at_col = work.col + col;
                     const auto rows = epilogue.store(at_row, at_col, runs[0]);
                     epilogue.template store_rows<kPositionCols, kRun>(rows, at_row, at_col);
                 });
}
