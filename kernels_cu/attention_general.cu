// attention_general.cu: out = softmax(scale * q k^T + bias, masked) v for each head, on any target,
// with the options of GeneralScore (attention/score.cuh).
// Constants and launch: attention/block.cuh.
#include "attention/block.cuh"

KERNEL void attention_general(const Element* q, const Element* k, const Element* v, Element* out,
                              float* lse, float* row_max, float* row_sum, const void* mask_array,
                              const int32_t* kv_num_blocks, const int32_t* kv_indices,
                              const uint8_t* block_types, const int32_t* partial_indices,
                              const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                              const float* slopes, const float* sinks, const Params params) {
    wait_for_previous_grid();
    SHARED_STORAGE(AttentionStorage, storage);
    const Score::Arrays arrays{
        {mask_array, kv_num_blocks, kv_indices, block_types, partial_indices}, slopes, sinks};
    attention_block(storage, params, q, ContiguousKv{k, v, cu_seqlens_q, cu_seqlens_k}, out, lse,
                    row_max, row_sum, arrays);
}
