// reduce_split_k_expression.cu: adds the partial accumulators of split-K with a workspace like
// reduce_split_k.cu, then applies a user's formula (expression/apply.cuh).  FP32 products use it
// even if k is not split.
// Launch: grid (any), block (kNumThreads).
#include "expression/apply.cuh"

struct SplitKExpressionParams {
    EpilogueParams epilogue;
    BatchLayout batch;
    int64_t batch_size;
    int64_t num_splits;  // contiguous in partials; each has batch_size * m rows of whole runs
    ExpressionParams expression;
};

constexpr int kRun = 4;

KERNEL void reduce_split_k_expression(const float* partials, void* out, const float* scale_a,
                                      const float* scale_b, const void* x0, const void* x1,
                                      const void* x2, const void* x3, const void* x4,
                                      const void* x5, const void* x6, const void* x7,
                                      const SplitKExpressionParams params) {
    wait_for_previous_grid();
    const ExpressionOperands operands{{x0, x1, x2, x3, x4, x5, x6, x7}, {}, params.expression, 0};
    const int64_t row_runs = (params.epilogue.n + kRun - 1) / kRun,
                  matrix_runs = params.epilogue.m * row_runs,
                  num_runs = params.batch_size * matrix_runs;
    const int64_t step = int64_t(gridDim.x) * kNumThreads;
    int64_t run = int64_t(blockIdx.x) * kNumThreads + threadIdx.x;
    for (; run < num_runs; run += step) {
        float acc[kRun] = {};
#pragma unroll 8  // loads in flight
        for (int64_t split = 0; split < params.num_splits; ++split) {
            const Bytes<16> four = load_vector<16>(partials + (split * num_runs + run) * kRun);
#pragma unroll
            for (int i = 0; i < kRun; ++i) acc[i] += bit_cast<float>(four.words[i]);
        }
        const int64_t index = params.batch_size > 1 ? run / matrix_runs : 0,
                      in_matrix = run - index * matrix_runs, row = in_matrix / row_runs;
        const auto offset = [&](Operand operand) { return params.batch.offset(operand, index); };
        const MatrixEpilogue matrix =
            MatrixEpilogue::of_matrix(params.epilogue, out, nullptr, nullptr, scale_a, scale_b,
                                      offset(kOut), 0, 0, offset(kScaleA), offset(kScaleB));
        const ExpressionOperands found = operands.of_matrix(params.batch, index);
        const ExpressionEpilogue<Expression> epilogue{matrix, found};
        const int64_t col = (in_matrix - row * row_runs) * kRun;
        const auto rows = epilogue.store(row, col, acc);
        epilogue.template store_rows<kRun, kRun>(rows, row, col);
    }
}
