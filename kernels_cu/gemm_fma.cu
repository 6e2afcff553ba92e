// gemm_fma.cu: out = activation(alpha * (A @ B) + bias) + residual for FP32 operands, by FP32
// multiply-adds.
//
// A block computes one tile (gemm/mainloop_fma.cuh) of one split of k.  Split-K stores the partial
// accumulators of each split as a separate result; reduce_split_k.cu adds them.
// Constants: see gemm/mainloop_fma.cuh.
// Launch: grid (tiles * batch * splits), block (kNumThreads), dynamic shared memory
// sizeof(GemmFmaStorage).
#include "gemm/tile_fma.cuh"

KERNEL void gemm_fma(const float* a, const float* b, void* out, const void* bias,
                     const void* residual, const GemmFmaParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(GemmFmaStorage, storage);
    const GemmWorkTile work = GemmWorkTile::of_block(blockIdx.x, params.order, kTileM, kTileN);
    compute_tile(storage, params, {a, b, out, bias, residual}, work);
}
