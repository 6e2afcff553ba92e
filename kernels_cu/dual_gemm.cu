// dual_gemm.cu: out = silu(A @ B1) * (A @ B2) for a batch of matrices, in one pass over A.
//
// A block computes the same tile of both products (gemm/mainloop_portable.cuh); the epilogue
// multiplies them (gemm/epilogue/gate.cuh).
// Constants: see gemm/mainloop_portable.cuh.
// Launch: see gemm.cu.
#include "gemm/dual_tile.cuh"
#include "gemm/epilogue/gate.cuh"

struct DualGemmParams {
    TileParams tile;
    EpilogueParams epilogues[2];  // one per product; epilogues[0] has the output
    int64_t policy;
};

KERNEL void dual_gemm(const void* a, const void* b1, const void* b2, void* out,
                      const float* scale_a, const float* scale_b1, const float* scale_b2,
                      const e4m3* groups_a, const e4m3* groups_b1, const e4m3* groups_b2,
                      ElementAccumulator* partials, const DualGemmParams params, int64_t pass) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmStorage, storage);
    multiply_and_gate(
        storage, params.tile, params.epilogues,
        {a, b1, b2, out, scale_a, scale_b1, scale_b2, groups_a, groups_b1, groups_b2, partials},
        pass, [&](int64_t) { return SiluRuns{int(params.policy)}; });
}
