// skinny_gemm.cu: skinny GEMM, m <= 16: out = activation(alpha * (scale_a * (scale_b * (A @ B))) +
// bias) + residual, bound by the read of B.
//
// FP32 operands use FMA (gemm/skinny_fma.cuh), because tensor cores would round them.
// Constants: see gemm/skinny.cuh.
// Launch: grid (kPhases * ceil(n / (kPhases * kTileN))), block (kNumThreads), dynamic shared memory
// sizeof(SkinnyGemmStorage).
#include "gemm/skinny.cuh"

KERNEL void skinny_gemm(const ElementA* a, const ElementB* b, void* out, const void* bias,
                        const void* residual, const float* scale_a, const float* scale_b,
                        const e4m3* groups_b, const SkinnyGemmParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const int warp = int(threadIdx.x) / kWarpSize;
    const int phase = int(blockIdx.x % kPhases);
    const int64_t first_col = int64_t(blockIdx.x / kPhases) * kTileN;
    EpilogueParams epilogue_params = params.epilogue;
    int64_t b_row = params.b_row;
    int before = 0;  // elements of a row's first chunk that precede the row
    const ElementB* first_b = b;
    if constexpr (kPhases > 1) {
        first_b += phase * b_row;
        before = int(uintptr_t(first_b) % 16 / sizeof(ElementB));
        b_row *= kPhases;
        epilogue_params.n = (epilogue_params.n - phase + kPhases - 1) / kPhases;
        if (first_col >= epilogue_params.n) return;
        epilogue_params.out.col *= kPhases;
        epilogue_params.bias.col *= kPhases;
        epilogue_params.residual.col *= kPhases;
        epilogue_params.scale_b_stride *= kPhases;
    }
    const int first_k = warp * kDepth;
    const ElementA* own_a = a + first_k - before;
    const ElementB* own_b = own_columns(first_b - before, b_row, first_col, first_k);
    const SkinnyOperands operands{int(epilogue_params.m),
                                  clamp_to(epilogue_params.n - first_col, kTileN),
                                  first_k,
                                  params.k + before,
                                  before,
                                  RowPhases::of(own_a, params.a_row),
                                  RowPhases::of(own_b, b_row)};
    CopierOf<ElementA, TileA> of_a(a, own_a, params.a_row, kStepK);
    MatrixCopier of_b[] = {{b, own_b, b_row, groups_b, params.groups, first_col, first_k}};
    const EpilogueParams& whole = params.epilogue;
    const MatrixEpilogue epilogue = MatrixEpilogue::of_matrix(
        epilogue_params, out, bias, residual, SkinnyScales::of_epilogue(scale_a),
        SkinnyScales::of_epilogue(scale_b), phase * whole.out.col, phase * whole.bias.col,
        phase * whole.residual.col, 0, phase * whole.scale_b_stride);
    const SkinnyScales scales{
        scale_a, {scale_b}, params.block_scales_a, {params.block_scales_b}, first_col};
    FinishedRun runs[kOwnRuns];
    multiply_columns(storage, operands, of_a, of_b, scales, [&] {
#pragma unroll
        for (int i = 0; i < kOwnRuns; ++i) {
            runs[i].prepare(epilogue, int(threadIdx.x) + i * kNumThreads, first_col);
        }
    });
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
        if (runs[i].count == 0) continue;
        ElementAccumulator totals[kRun] = {};
        storage.add(runs[i].row, runs[i].tile_col, totals);
        runs[i].store(epilogue, totals);
    }
}
