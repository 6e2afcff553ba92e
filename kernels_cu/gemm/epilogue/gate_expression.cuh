// The gate of a user's formula: Expression (expression/apply.cuh) of both products.
#pragma once
#include "gemm/epilogue/gate_silu.cuh"
#include "expression/apply.cuh"

namespace gemm {

struct ExpressionGatedParams {
    GatedParams gated;
    ExpressionParams expression;
};

struct ExpressionDualArguments : DualArguments { ExpressionOperands operands; };

template <class Expression> struct ExpressionGate {
    using Arguments = ExpressionDualArguments;
    ExpressionOperands operands;  // of the matrix
    int last_row, last_col;

    DEVICE static ExpressionGate of(const Arguments& arguments, const GemmWorkTile& tile) {
        const GatedParams& params = arguments.params;
        return {arguments.operands.of_matrix(params.batch, tile.batch),
                int(params.epilogues[0].m) - 1, int(params.columns()) - 1};
    }
    DEVICE bool silu_in_fp32() const { return false; }
    template <int kCount, class At>
    DEVICE void apply(float (&values)[kCount], float (&others)[kCount], At at) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const Element element = at(i);
            // Clamped: operands have no elements outside of the output.
            const int row = element.row < last_row ? element.row : last_row,
                      col = element.col < last_col ? element.col : last_col;
            values[i] = Expression::of(operands, values[i], others[i], row, col, operands.matrix);
        }
    }
};

}  // namespace gemm
