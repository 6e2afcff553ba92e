// attention_hopper_formula.cu: out = softmax(score(scale * Q @ K^T) + mask) @ V on Hopper, with
// user formulas for the score and the mask (attention/formula.cuh).
//
// Persistent and warp-specialised: one producer warpgroup issues TMA loads, consumer warpgroups of
// 64 queries each run both GEMMs by wgmma and the softmax between them.
// Type: Traits, an attention::TraitsSm90.
// Launch: grid (any), block (Kernel::kThreads), dynamic shared memory sizeof(Kernel::Storage).
// Tensor maps: (batch, head, row, dim) of q, k, v and out; boxes of 64 dims and kTileM, kTileN,
// kTileN and 16 rows; 128-byte swizzle.  Varlen: attention/storage_sm90.cuh.
#include "attention/kernel_sm90.cuh"

using Kernel = attention::KernelSm90<Traits>;

KERNEL void attention_hopper_formula(
    GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map, GRID_CONSTANT TensorMap v_map,
    GRID_CONSTANT TensorMap out_map, float* lse, float* row_max, float* row_sum,
    const uint8_t* partial_tiles, const int32_t* kv_num_blocks, const int32_t* kv_indices,
    const uint8_t* block_types, const int32_t* partial_indices, const int32_t* cu_seqlens_q,
    const int32_t* cu_seqlens_k, const int32_t* schedule, uint32_t* counter, const float* slopes,
    const float* sinks, const void* x0, const void* x1, const void* x2, const void* x3,
    const void* x4, const void* x5, const void* x6, const void* x7, const Kernel::Params params) {
    SHARED_STORAGE(Kernel::Storage, storage);
    const Kernel::Arguments arguments{
        q_map,
        k_map,
        v_map,
        out_map,
        {lse, row_max, row_sum},
        {{{partial_tiles, kv_num_blocks, kv_indices, block_types, partial_indices}, slopes, sinks},
         {{x0, x1, x2, x3, x4, x5, x6, x7}}},
        cu_seqlens_q,
        cu_seqlens_k,
        schedule,
        counter};
    Kernel{params, arguments, storage}.run();
}
