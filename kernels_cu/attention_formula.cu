// attention_formula.cu: out = softmax(score(scale * q k^T) + bias, masked) v for each head, on any
// target, with user formulas for the score and the mask (attention/formula.cuh).
// Constants and launch: attention/block.cuh.
#include "attention/formula.cuh"

template <> struct GeneralPolicy<Element> { using Type = FormulaScore<Formulas>; };

#include "attention/block.cuh"

KERNEL void attention_formula(const Element* q, const Element* k, const Element* v, Element* out,
                              float* lse, float* row_max, float* row_sum, const void* mask_array,
                              const int32_t* kv_num_blocks, const int32_t* kv_indices,
                              const uint8_t* block_types, const int32_t* partial_indices,
                              const int32_t* cu_seqlens_q, const int32_t* cu_seqlens_k,
                              const float* slopes, const float* sinks, const void* x0,
                              const void* x1, const void* x2, const void* x3, const void* x4,
                              const void* x5, const void* x6, const void* x7, const Params params) {
    wait_for_previous_grid();
    SHARED_STORAGE(AttentionStorage, storage);
    const Score::Arrays arrays{
        {{mask_array, kv_num_blocks, kv_indices, block_types, partial_indices}, slopes, sinks},
        {{x0, x1, x2, x3, x4, x5, x6, x7}}};
    attention_block(storage, params, q, ContiguousKv{k, v, cu_seqlens_q, cu_seqlens_k}, out, lse,
                    row_max, row_sum, arrays);
}
