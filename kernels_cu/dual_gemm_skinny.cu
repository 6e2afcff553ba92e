// dual_gemm_skinny.cu: out = silu(A @ B1) * (A @ B2), m <= kRows, in one pass over B1 and B2, bound
// by their read.
// Constants: see gemm/skinny.cuh, kMatrices 2.
// Launch: grid (ceil(n / kTileN)), block (kNumThreads), dynamic shared memory
// sizeof(SkinnyGemmStorage).
#include "gemm/epilogue/gate.cuh"
#include "gemm/skinny_dual.cuh"

KERNEL void dual_gemm_skinny(const ElementA* a, const ElementB* b1, const ElementB* b2, void* out,
                             const float* scale_a, const float* scale_b1, const float* scale_b2,
                             const e4m3* groups_b1, const e4m3* groups_b2,
                             const SkinnyDualParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SkinnyGemmStorage, storage);
    multiply_and_gate(storage, params,
                      {a, b1, b2, out, scale_a, scale_b1, scale_b2, groups_b1, groups_b2},
                      SiluRuns{params.policy});
}
