// attention_naive.cu: attention in three launches with all scores in global memory, a baseline for
// attention.cu.  Constants, steps and launch: attention/naive_steps.cuh.
#include "attention/naive_steps.cuh"

KERNEL void attention_naive(const Element* q, const Element* k, const Element* v, Element* out,
                            float* lse, float* row_max, float* row_sum, const void* mask_array,
                            const int32_t* kv_num_blocks, const int32_t* kv_indices,
                            const uint8_t* block_types, const int32_t* partial_indices,
                            float* scores, const Params params, int64_t step) {
    wait_for_previous_grid();
    const Score::Arrays arrays{mask_array, kv_num_blocks, kv_indices, block_types, partial_indices};
    naive_step(params, q, k, v, out, {lse, row_max, row_sum}, arrays, nullptr, scores, step);
}
