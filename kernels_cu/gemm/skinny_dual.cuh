// Skinny dual GEMM: a block computes the same columns of both products (gemm/skinny.cuh) and
// applies their gate.
#pragma once
#include "gemm/skinny.cuh"

struct SkinnyDualParams {
    int64_t a_row, b_rows[2];  // row strides of A and of both matrices B, in elements
    int32_t k, policy;
    struct { int64_t block, quarter, row, word; } groups[2];  // strides of GroupScales
    MatrixStrides block_scales_a, block_scales_b[2];          // of scale_a, scale_b1 and scale_b2
    EpilogueParams epilogues[2];                              // epilogues[0] has the output
};

// The arrays of a skinny dual GEMM; null: absent.
struct SkinnyDualOperands {
    const ElementA* a;
    const ElementB *b1, *b2;
    void* out;
    const float *scale_a, *scale_b1, *scale_b2;
    const e4m3 *groups_b1, *groups_b2;
};

// gate: SiluRuns or ExpressionRuns.
template <class Gate>
DEVICE void multiply_and_gate(SkinnyGemmStorage& storage, const SkinnyDualParams& params,
                              const SkinnyDualOperands& x, const Gate& gate) {
    const int first_k = int(threadIdx.x) / kWarpSize * kDepth;
    const int64_t first_col = int64_t(blockIdx.x) * kTileN;
    const int64_t m = params.epilogues[0].m, n = params.epilogues[0].n;
    const SkinnyOperands operands{int(m), clamp_to(n - first_col, kTileN), first_k, params.k};
    CopierOf<ElementA, TileA> of_a(x.a, x.a + first_k, params.a_row, kStepK);
    const auto copier = [&](const ElementB* b, int i, const e4m3* scales) {
        const ElementB* columns = own_columns(b, params.b_rows[i], first_col, first_k);
        return MatrixCopier(b, columns, params.b_rows[i], scales, params.groups[i], first_col,
                            first_k);
    };
    MatrixCopier of_b[] = {copier(x.b1, 0, x.groups_b1), copier(x.b2, 1, x.groups_b2)};
    const auto epilogue = [&](int i, void* out, const float* scale_b) {
        return MatrixEpilogue{params.epilogues[i],
                              out,
                              nullptr,
                              nullptr,
                              SkinnyScales::of_epilogue(x.scale_a),
                              SkinnyScales::of_epilogue(scale_b)};
    };
    const MatrixEpilogue epilogues[] = {epilogue(0, x.out, x.scale_b1),
                                        epilogue(1, nullptr, x.scale_b2)};
    const SkinnyScales scales{x.scale_a,
                              {x.scale_b1, x.scale_b2},
                              params.block_scales_a,
                              {params.block_scales_b[0], params.block_scales_b[1]},
                              first_col};
    FinishedRun runs[kOwnRuns][2];
    multiply_columns(storage, operands, of_a, of_b, scales, [&] {
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
        gate.store(epilogues[0], run[0].row, run[0].col, run[0].count, values[0], values[1]);
    }
}
