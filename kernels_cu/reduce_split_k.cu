// reduce_split_k.cu: adds the partial accumulators of split-K with a workspace, then applies the
// epilogue out = activation(alpha * sum + bias) + residual.
//
// Partial accumulators are added in the order of k, so results are bitwise reproducible.
// Launch: grid (any), block (kNumThreads).
#include "gemm/epilogue/linear_combination.cuh"

struct SplitKParams {
    EpilogueParams epilogue;
    int64_t num_splits;  // contiguous in partials; each has m rows of whole runs
};

constexpr int kRun = 4;

KERNEL void reduce_split_k(const float* partials, void* out, const void* bias, const void* residual,
                           const float* scale_a, const float* scale_b, const SplitKParams params) {
    wait_for_previous_grid();
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(params.epilogue, out, bias, residual,
                                                              scale_a, scale_b, 0, 0, 0, 0, 0);
    const int64_t row_runs = (params.epilogue.n + kRun - 1) / kRun,
                  num_runs = params.epilogue.m * row_runs;
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
        epilogue.store(run / row_runs, run % row_runs * kRun, acc);
    }
}
