// skinny_gemm_expression.cu: out = Expression(alpha * (A @ B)), a user's formula
// (expression/apply.cuh), m <= kRows; otherwise like skinny_gemm.cu.  Rows are aligned.
// Launch: grid (ceil(n / kTileN)), else as skinny_gemm.cu.
#include "expression/apply.cuh"
#include "gemm/skinny.cuh"

struct ExpressionSkinnyGemmParams {
    SkinnyGemmParams product;
    ExpressionParams expression;
};

KERNEL void skinny_gemm_expression(const ElementA* a, const ElementB* b, void* out, const void*,
                                   const void*, const float* scale_a, const float* scale_b,
                                   const e4m3* groups_b, const void* x0, const void* x1,
                                   const void* x2, const void* x3, const void* x4, const void* x5,
                                   const void* x6, const void* x7,
                                   const ExpressionSkinnyGemmParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const SkinnyGemmParams& product = params.product;
    const int first_k = int(threadIdx.x) / kWarpSize * kDepth;
    const int64_t first_col = int64_t(blockIdx.x) * kTileN;
    const int rows = int(product.epilogue.m),
              cols = clamp_to(product.epilogue.n - first_col, kTileN);
    CopierOf<ElementA, TileA> of_a(a, a + first_k, product.a_row, kStepK);
    MatrixCopier of_b[] = {{b, own_columns(b, product.b_row, first_col, first_k), product.b_row,
                            groups_b, product.groups, first_col, first_k}};
    const SkinnyScales scales{
        scale_a, {scale_b}, product.block_scales_a, {product.block_scales_b}, first_col};
    multiply_columns(storage, {rows, cols, first_k, product.k}, of_a, of_b, scales, [] {});
    const ExpressionOperands operands{
        {x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, params.expression.first_matrix};
    const MatrixEpilogue matrix = MatrixEpilogue::of_matrix(
        product.epilogue, out, nullptr, nullptr, SkinnyScales::of_epilogue(scale_a),
        SkinnyScales::of_epilogue(scale_b), 0, 0, 0, 0, 0);
    const ExpressionEpilogue<Expression> epilogue{matrix, operands};
    store_runs(storage, epilogue, first_col, rows, cols);
}
