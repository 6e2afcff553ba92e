// Computes an output tile of FP32 operands by multiply-adds: mainloop_fma.cuh and the epilogue.
#pragma once
#include "gemm/mainloop_fma.cuh"
#include "gemm/epilogue/linear_combination.cuh"

struct GemmFmaParams {
    BatchLayout batch;
    TileOrder order;
    int64_t k, k_per_split;
    int64_t split_stride;  // of the result, in elements
    MatrixStrides a, b;
    EpilogueParams epilogue;
};

constexpr int kRun = 4, kRunsN = kThreadN / kRun, kRuns = kThreadM * kRunsN;
// Runs of a thread that fit the stages' memory.
constexpr int kStageRuns = int(sizeof(gemm::Stage)) * kStages / (16 * kNumThreads);
constexpr int kStagedRuns = kStageRuns >= kRuns       ? kRuns
                            : kStageRuns >= kRuns / 2 ? kRuns / 2
                            : kStageRuns >= kRuns / 4 ? kRuns / 4
                                                      : kRuns / 8;
struct GemmFmaStorage {
    union {
        gemm::Stage stages[kStages];
        Bytes<16> runs[kStagedRuns][kNumThreads];
    };
};

struct GemmFmaArrays {
    const float *a, *b;
    void* out;
    const void *bias, *residual;
};

DEVICE void compute_tile(GemmFmaStorage& storage, const GemmFmaParams& params,
                         const GemmFmaArrays& arrays, const GemmWorkTile& work) {
    const auto offset = [&](Operand operand) { return params.batch.offset(operand, work.batch); };
    const gemm::ThreadCoord thread = gemm::ThreadCoord::here();
    gemm::Accumulators acc{};
    {
        const int64_t first_k = work.split * params.k_per_split;
        gemm::CopierA copier_a(arrays.a + offset(kA) + first_k * params.a.col, params.a.row,
                               params.a.col, work.row, params.epilogue.m);
        gemm::CopierB copier_b(arrays.b + offset(kB) + first_k * params.b.row, params.b.col,
                               params.b.row, work.col, params.epilogue.n);
        const int64_t num_k = params.k - first_k;
        gemm::multiply(storage.stages, copier_a, copier_b,
                       int(num_k < params.k_per_split ? num_k : params.k_per_split), thread, acc);
    }
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
        params.epilogue, arrays.out, arrays.bias, arrays.residual, nullptr, nullptr,
        offset(kOut) + work.split * params.split_stride, offset(kBias), offset(kResidual), 0, 0);
    if (epilogue.is_scaled_float()) {
#pragma unroll
        for (int i = 0; i < kRuns; ++i) {
            float values[kRun];
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                values[j] = acc[i / kRunsN][i % kRunsN * kRun + j] * params.epilogue.alpha;
            }
            epilogue.store_float(work.row + thread.row(i / kRunsN),
                                 work.col + thread.col(i % kRunsN * kRun), values);
        }
        return;
    }
    // Staged in the thread's own shared memory: a rolled loop has one instance of the epilogue.
#pragma unroll
    for (int first = 0; first < kRuns; first += kStagedRuns) {
#pragma unroll
        for (int i = 0; i < kStagedRuns; ++i) {
            const int run = first + i;
            Bytes<16> four;
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                four.words[j] = bit_cast<uint32_t>(acc[run / kRunsN][run % kRunsN * kRun + j]);
            }
            storage.runs[i][threadIdx.x] = four;
        }
#pragma unroll 1
        for (int i = 0; i < kStagedRuns; ++i) {
            const int run = first + i;
            const Bytes<16> four = storage.runs[i][threadIdx.x];
            float values[kRun];
#pragma unroll
            for (int j = 0; j < kRun; ++j) values[j] = bit_cast<float>(four.words[j]);
            epilogue.store(work.row + thread.row(run / kRunsN),
                           work.col + thread.col(run % kRunsN * kRun), values);
        }
    }
}
