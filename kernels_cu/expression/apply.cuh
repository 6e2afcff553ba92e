// A user's formula as the epilogue: Expression::of(x, acc, i, j, b, results), in FP32 with one
// rounding at the end; acc: alpha * (scale_a * (scale_b * accumulator)); x.get<k>(): operand k of
// Expression::Operands.  results[0] goes to out, later results to arrays among the operands.  8-bit
// results saturate; NaN is 0 in int8.
// Expression::Rows: results that are reductions of rows (expression/row_results.cuh).
//
// cupykern/expression/cpp.py generates the struct Expression, before the kernel's own text.
#pragma once
#include "gemm/epilogue/linear_combination.cuh"
#include "expression/math.cuh"
#include "expression/operand.cuh"

// Strides in elements, 0 where an operand is broadcast.
struct ExpressionParams {
    int64_t first_matrix;  // index of the launch's first matrix in the batch
    int64_t i_strides[kMaxOperands], j_strides[kMaxOperands];
    int64_t batch_strides[kMaxOperands][kMaxBatchDims];
    float numbers[kMaxOperands];  // operands that are not arrays
};

// The operands of one matrix of a batch.  arrays: null if absent or a number.
struct ExpressionOperands {
    const void* arrays[kMaxOperands];
    int64_t offsets[kMaxOperands];
    const ExpressionParams& params;
    int64_t matrix;

    template <class T> DEVICE const T* array(int k) const {
        return static_cast<const T*>(arrays[k]) + offsets[k];
    }
    // The array of a result of the formula.
    template <class T> DEVICE T* result(int k) const {
        return static_cast<T*>(const_cast<void*>(arrays[k])) + offsets[k];
    }
    // The operands of matrix `index` of `batch`.
    DEVICE ExpressionOperands of_matrix(const BatchLayout& batch, int64_t index) const {
        ExpressionOperands found = *this;
        found.matrix = params.first_matrix + index;
        uint32_t rest = uint32_t(index);
#pragma unroll 1
        for (int d = 0; d < int(batch.num_dims); ++d) {
            const uint32_t size = uint32_t(batch.sizes[d]), next = rest / size;
#pragma unroll
            for (int k = 0; k < kMaxOperands; ++k)
                found.offsets[k] += int64_t(rest - next * size) * params.batch_strides[k][d];
            rest = next;
        }
        return found;
    }
};

// The operands of the element (i, j), for Expression::of.
template <class Expression> struct ElementOperands {
    const ExpressionOperands& operands;
    int64_t i, j;

    template <int k> DEVICE float get() const {
        using Operand = typename Expression::Operands::template At<k>;
        const ExpressionParams& params = operands.params;
        if constexpr (Operand::kIsArray) {
            const int64_t index = (Operand::kRows ? i * params.i_strides[k] : 0) +
                                  (Operand::kCols ? j * params.j_strides[k] : 0);
            return operand_to_float(operands.array<typename Operand::Element>(k)[index]);
        } else {
            return params.numbers[k];
        }
    }
};

// The parameters without activation, for an epilogue without bias and residual.
DEVICE EpilogueParams without_addends(const EpilogueParams& params) {
    EpilogueParams found = params;
    found.activation = kNoActivation;
    return found;
}

// Stores all results but the first, for a run of `count` columns.
template <class Expression, int kRun> struct StoreMore {
    const ExpressionOperands& operands;
    int64_t row, col;
    int count;
    const float (&results)[Expression::kResults][kRun];

    template <class T> DEVICE void store(int which, int k) const {
        const int64_t step = operands.params.j_strides[k];
        T* first = operands.result<T>(k) + row * operands.params.i_strides[k] + col * step;
        store_run(first, step, count, results[which]);
    }
};

// The epilogue with a formula, with MatrixEpilogue's interface.
template <class Expression> struct ExpressionEpilogue {
    using Rows = typename Expression::Rows;
    const MatrixEpilogue& matrix;
    const ExpressionOperands& operands;

    // Applies the formula to the accumulators of row `row`, columns [col, col + kRun), and stores
    // the results.  Accesses nothing outside of the matrix.  Returns the row's reductions of these
    // columns.
    template <int kRun, class T>
    DEVICE Rows store(int64_t row, int64_t col, const T (&acc)[kRun]) const {
        const EpilogueParams& params = matrix.params;
        Rows rows;
        if (row >= params.m || col >= params.n) return rows;
        const int count = params.n - col < kRun ? int(params.n - col) : kRun;
        float values[kRun], results[Expression::kResults][kRun];
        matrix.scale(row, col, count, acc, values);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            const int64_t at = col + (i < count ? i : count - 1);
            float of_element[Expression::kResults];
            const ElementOperands<Expression> x{operands, row, at};
            Expression::of(x, values[i], row, at, operands.matrix, of_element);
            if (i < count) rows.add(of_element);
#pragma unroll
            for (int r = 0; r < Expression::kResults; ++r) results[r][i] = of_element[r];
        }
        matrix.template write_as<typename Expression::Narrow>(row, col, count, results[0]);
        Expression::for_each_more(StoreMore<Expression, kRun>{operands, row, col, count, results});
        return rows;
    }
    // Called by all lanes of a warp: stores the reductions of slices of kSlice columns.  Adjacent
    // lanes have runs of kRun columns of a slice; (row, col) is the lane's first element.
    template <int kSlice, int kRun>
    DEVICE void store_rows(Rows rows, int64_t row, int64_t col) const {
        if constexpr (Rows::kCount > 0) {
            constexpr int kLanes = kSlice / kRun;
            rows.template merge_lanes<kLanes>();
            if (lane_id() % kLanes == 0 && row < matrix.params.m && col < matrix.params.n)
                rows.store(operands, row, col / kSlice);
        }
    }
};

// A formula of both products of a dual GEMM, with SiluRuns' interface (gemm/epilogue/gate.cuh).
template <class Expression> struct ExpressionRuns {
    using Rows = typename Expression::Rows;
    ExpressionOperands operands;

    template <int kRun>
    DEVICE Rows store(const MatrixEpilogue& out, int64_t row, int64_t col, int count,
                      float (&values)[kRun], float (&others)[kRun]) const {
        Rows rows;
        float results[Expression::kResults][kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            const int64_t at = col + (i < count ? i : count - 1);
            float of_element[Expression::kResults];
            const ElementOperands<Expression> x{operands, row, at};
            Expression::of(x, values[i], others[i], row, at, operands.matrix, of_element);
            if (i < count) rows.add(of_element);
#pragma unroll
            for (int r = 0; r < Expression::kResults; ++r) results[r][i] = of_element[r];
        }
        out.template write_as<typename Expression::Narrow>(row, col, count, results[0]);
        Expression::for_each_more(StoreMore<Expression, kRun>{operands, row, col, count, results});
        return rows;
    }
    template <int kSlice, int kRun>
    DEVICE void store_rows(const MatrixEpilogue& out, Rows rows, int64_t row, int64_t col) const {
        const ExpressionEpilogue<Expression> epilogue{out, operands};
        epilogue.template store_rows<kSlice, kRun>(rows, row, col);
    }
};
