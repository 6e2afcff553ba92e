// dual_gemm_expression.cu: out = Expression(A @ B1, A @ B2), a user's formula
// (expression/apply.cuh), for a batch of matrices, on any target; otherwise like dual_gemm.cu.
// Launch: see gemm.cu.
#include "expression/apply.cuh"
#include "gemm/dual_tile.cuh"

struct ExpressionDualGemmParams {
    TileParams tile;
    EpilogueParams epilogues[2];  // one per product; epilogues[0] has the output
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
    const ExpressionOperands all{{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0};
    multiply_and_gate(
        storage, params.tile, params.epilogues,
        {a, b1, b2, out, scale_a, scale_b1, scale_b2, groups_a, groups_b1, groups_b2, partials},
        pass, [&](int64_t matrix) {
            return ExpressionRuns<Expression>{all.of_matrix(params.tile.batch, matrix)};
        });
}
