// dual_gemm_skinny.cu: out = silu(A @ B1) * (A @ B2), m <= 16, in one pass over B1 and B2, whose read
// bounds it.
//
// A block computes the same columns of both products (gemm/skinny.cuh); the epilogue multiplies them
// (gemm/epilogue/gate.cuh).
// Constants: those of gemm/skinny.cuh, kMatrices 2.
// Launch: grid (ceil(n / kTileN)), block (kNumThreads), dynamic shared memory
// sizeof(SkinnyGemmStorage).
#include "gemm/skinny.cuh"
#include "gemm/epilogue/gate.cuh"

struct SkinnyDualParams {
    int64_t a_row, b_rows[2];  // row strides of A and of both matrices B, in elements
    int32_t k, policy;
    struct { int64_t block, quarter, row, word; } groups[2];  // GroupScales of NVFP4
    EpilogueParams epilogues[2];                              // epilogues[0] has the output
};

KERNEL void dual_gemm_skinny(const ElementA* a, const ElementB* b1, const ElementB* b2, void* out,
                             const float* scale_a, const float* scale_b1, const float* scale_b2,
                             const e4m3* groups_b1, const e4m3* groups_b2,
                             const SkinnyDualParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const int first_k = int(threadIdx.x) / kWarpSize * kDepth;
    const int64_t first_col = int64_t(blockIdx.x) * kTileN;
    const int64_t m = params.epilogues[0].m, n = params.epilogues[0].n;
    const SkinnyOperands operands{int(m), clamp_to(n - first_col, kTileN), first_k, params.k};
    CopierOf<ElementA, TileA> of_a(a, a + first_k, params.a_row, kStepK);
    const auto columns = [&](const ElementB* b, int i) {
        return b + first_col * params.b_rows[i] + first_k / kPerElement;
    };
    MatrixCopier of_b[] = {
        {b1, columns(b1, 0), params.b_rows[0], groups_b1, params.groups[0], first_col, first_k},
        {b2, columns(b2, 1), params.b_rows[1], groups_b2, params.groups[1], first_col, first_k}};
    const MatrixEpilogue epilogues[] = {
        {params.epilogues[0], out, nullptr, nullptr, scale_a, scale_b1},
        {params.epilogues[1], nullptr, nullptr, nullptr, scale_a, scale_b2}};
    FinishedRun runs[kOwnRuns][2];
    multiply_columns(storage, operands, of_a, of_b, [&] {
#pragma unroll
        for (int i = 0; i < kOwnRuns; ++i) {
            const int number = int(threadIdx.x) + i * kNumThreads;
#pragma unroll
            for (int j = 0; j < 2; ++j) runs[i][j].prepare(epilogues[j], number, first_col);
        }
    });
#pragma unroll
    for (const auto& run : runs) {
        if (run[0].count == 0) continue;
        float values[2][kRun];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            ElementAccumulator totals[kRun] = {};
            storage.add(run[0].row, j * kTileN + run[0].tile_col, totals);
            run[j].scale(params.epilogues[j], totals, values[j]);
        }
        gate_all(values[0], values[1], params.policy);
        epilogues[0].write(run[0].row, run[0].col, run[0].count, values[0]);
    }
}
