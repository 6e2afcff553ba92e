// skinny_gemm.cu: skinny GEMM, m <= kRows: out = activation(alpha * (scale_a * (scale_b * (A @ B)))
// + bias) + residual, bound by the read of B.
//
// FP32 operands use FMA (gemm/skinny_fma.cuh), because tensor cores would round them.
// Constants: see gemm/skinny.cuh.
// Launch: grid (kSkews * ceil(n / (kSkews * kTileN))), block (kNumThreads), dynamic shared memory
// sizeof(SkinnyGemmStorage).
#include "gemm/skinny_skew.cuh"

KERNEL void skinny_gemm(const ElementA* a, const ElementB* b, void* out, const void* bias,
                        const void* residual, const float* scale_a, const float* scale_b,
                        const e4m3* groups_b, const SkinnyGemmParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    const int warp = int(threadIdx.x) / kWarpSize, skew = int(blockIdx.x % kSkews);
    const int64_t first_col = int64_t(blockIdx.x / kSkews) * kTileN;
    EpilogueParams own = params.epilogue;
    const SkewColumns columns(b, params.b_row, skew);
    own.n = columns.count(own.n);
    if (kSkews > 1 && first_col >= own.n) return;
    columns.step(own);
    const int first_k = warp * kDepth;
    const ElementA* own_a = a + first_k - columns.before;
    const ElementB* own_b =
        own_columns(columns.first - columns.before, columns.row, first_col, first_k);
    const SkinnyOperands operands = columns.operands(params, own, own_a, own_b, first_col, first_k);
    CopierOf<ElementA, TileA> of_a(a, own_a, params.a_row, kStepK);
    MatrixCopier of_b[] = {{b, own_b, columns.row, groups_b, params.groups, first_col, first_k}};
    const MatrixEpilogue epilogue =
        columns.epilogue(own, params.epilogue, {out, bias, residual, scale_a, scale_b});
    const SkinnyScales scales{
        scale_a, {scale_b}, params.block_scales_a, {params.block_scales_b}, first_col};
    OwnRuns runs;
    multiply_columns(storage, operands, of_a, of_b, scales,
                     [&] { runs.prepare(epilogue, first_col); });
    runs.store(storage, epilogue);
}
