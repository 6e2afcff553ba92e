// dual_gemm_skinny_expression.cu: out = Expression(A @ B1, A @ B2), a user's formula
// (expression/apply.cuh), m <= kRows; otherwise like dual_gemm_skinny.cu.
// Launch: see dual_gemm_skinny.cu.
#include "expression/apply.cuh"
#include "gemm/skinny_dual.cuh"

struct ExpressionSkinnyDualParams {
    SkinnyDualParams product;
    ExpressionParams expression;
};

KERNEL void dual_gemm_skinny_expression(const ElementA* a, const ElementB* b1, const ElementB* b2,
                                        void* out, const float* scale_a, const float* scale_b1,
                                        const float* scale_b2, const e4m3* groups_b1,
                                        const e4m3* groups_b2, const void* x0, const void* x1,
                                        const void* x2, const void* x3, const void* x4,
                                        const void* x5, const void* x6, const void* x7,
                                        const ExpressionSkinnyDualParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const ExpressionOperands operands{
        {x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, params.expression.first_matrix};
    multiply_and_gate(storage, params.product,
                      {a, b1, b2, out, scale_a, scale_b1, scale_b2, groups_b1, groups_b2},
                      ExpressionRuns<Expression>{operands});
}
