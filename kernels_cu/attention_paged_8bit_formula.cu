// attention_paged_8bit_formula.cu: attention_paged_8bit.cu with user formulas for the score and the
// mask (attention/formula.cuh).  Formulas receive the score of the scaled keys.
// Constants and launch: attention_paged_8bit.cu.
#include "attention/formula.cuh"

template <> struct GeneralPolicy<Element> { using Type = FormulaScore<Formulas>; };

#include "attention/block.cuh"
#include "attention/kv_8bit.cuh"

KERNEL void attention_paged_8bit_formula(
    const Element* q, const CacheElement* k, const CacheElement* v, Element* out, float* lse,
    const int32_t* cu_seqlens_q, const int32_t* seq_lens, const int32_t* block_table,
    const float* slopes, const float* sinks, const float* k_scale, const float* v_scale,
    const void* x0, const void* x1, const void* x2, const void* x3, const void* x4, const void* x5,
    const void* x6, const void* x7, const Params params, const PageParams pages,
    const CacheScaleParams scales) {
    wait_for_previous_grid();
    SHARED_STORAGE(ScaledStorage, storage);
    const Score::Arrays arrays{{{}, slopes, sinks}, {{x0, x1, x2, x3, x4, x5, x6, x7}}};
    const ScaledPagedKv kv{k,     v,       cu_seqlens_q, seq_lens, block_table,
                           pages, k_scale, v_scale,      scales,   storage.scales};
    attention_block(storage.attention, params, q, kv, out, lse, nullptr, nullptr, arrays);
}
