// split_float32.cu: splits FP32 matrices into sums of 16-bit parts, which tensor cores multiply.
//
// A block of 128 rows of A (columns of B) x 64 along k is
//     x = scale * sum over p of 2^(-kShift p) part[p].
// scale is a power of two that brings the block's largest magnitude to [2^14, 2^15).  Parts are
// K-major in either layout of x.  Each part is the remainder of the parts before it, rounded to
// nearest.  A negative scale flags a block that the parts do not represent: gemm_flagged.cu
// computes its tiles.
// Types and constants: see gemm/split_float32.cuh.
// Launch: grid (any), block (kNumThreads), dynamic shared memory sizeof(SplitStorage).
#include "gemm/split_float32.cuh"

// lossy: per CUDA block, 1 if it stored a negative scale.
KERNEL void split_float32(const float* a, const float* b, Part* parts_a, Part* parts_b,
                          float* scales_a, float* scales_b, int32_t* lossy,
                          const SplitParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(SplitStorage, storage);
    const int of_a = params.operands[0].num_blocks, all = of_a + params.operands[1].num_blocks;
    const auto copy = [&](int i, int stage) {
        const bool is_b = i >= of_a;
        if (i < all) {
            copy_block(is_b ? b : a, params.operands[is_b], is_b ? i - of_a : i,
                       storage.stages[stage]);
        }
        copy_async_commit();
    };
    bool holds = true;
    int stage = 0;
    copy(blockIdx.x, 0);
    for (int i = blockIdx.x; i < all; i += gridDim.x) {
        // The other stage was read before the barriers of the previous iteration.
        if constexpr (kStages > 1) copy(i + gridDim.x, stage ^ 1);
        copy_async_wait<kStages - 1>();
        sync_block();
        const bool is_b = i >= of_a;
        holds &=
            split_block(is_b ? parts_b : parts_a, is_b ? scales_b : scales_a, params,
                        params.operands[is_b], is_b ? i - of_a : i, storage, storage.stages[stage]);
        if constexpr (kStages > 1) stage ^= 1;
        else copy(i + gridDim.x, stage);
    }
    if (threadIdx.x == 0) lossy[blockIdx.x] = !holds;
}
