// The gate by a user's formula: Expression (expression/apply.cuh) of both products.
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
    using Narrow = typename Expression::Narrow;
    using Rows = typename Expression::Rows;
    ExpressionOperands operands;  // of the matrix
    int last_row, last_col;

    DEVICE static ExpressionGate of(const Arguments& arguments, const GemmWorkTile& tile) {
        const GatedParams& params = arguments.params;
        return {arguments.operands.of_matrix(params.batch, tile.batch),
                int(params.epilogues[0].m) - 1, int(params.columns()) - 1};
    }
    // Stores an element's results after the first one.
    struct StoreElement {
        const ExpressionOperands& operands;
        int64_t row, col;
        const float (&results)[Expression::kResults];

        template <class T> DEVICE void store(int which, int k) const {
            const ExpressionParams& params = operands.params;
            operands.result<T>(k)[row * params.i_strides[k] + col * params.j_strides[k]] =
                from_float<T>(results[which]);
        }
    };

    DEVICE bool silu_in_fp32() const { return false; }
    // rows: reductions of the lane's rows, where it has two (store_quad_rows).
    template <int kCount, class At>
    DEVICE void apply(float (&values)[kCount], float (&others)[kCount], At at,
                      Rows (&rows)[2]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const Element element = at(i);
            // Clamped: operands have no elements outside of the output.
            const int row = element.row < last_row ? element.row : last_row,
                      col = element.col < last_col ? element.col : last_col;
            float results[Expression::kResults];
            const ElementOperands<Expression> x{operands, row, col};
            Expression::of(x, values[i], others[i], row, col, operands.matrix, results);
            values[i] = results[0];
            if (element.inside && row == element.row && col == element.col) {
                Expression::for_each_more(StoreElement{operands, row, col, results});
                rows[i / 2 % 2].add(results);
            }
        }
    }
    // Stores the reductions of a slice of columns.  row: the lane's first row.
    DEVICE void store_rows(Rows (&rows)[2], int row, int slice) const {
        store_quad_rows(rows, operands, row, last_row, slice);
    }
};

}  // namespace gemm
