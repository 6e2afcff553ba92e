// attention_paged_formula.cu: attention of varlen queries over paged KV caches, on any target, with
// user formulas for the score and the mask (attention/formula.cuh).
// Constants and launch: attention/block.cuh.
#include "attention/formula.cuh"

template <> struct GeneralPolicy<Element> { using Type = FormulaScore<Formulas>; };

#include "attention/block.cuh"

KERNEL void attention_paged_formula(const Element* q, const Element* k, const Element* v,
                                    Element* out, float* lse, const int32_t* cu_seqlens_q,
                                    const int32_t* seq_lens, const int32_t* block_table,
                                    const float* slopes, const float* sinks, const void* x0,
                                    const void* x1, const void* x2, const void* x3, const void* x4,
                                    const void* x5, const void* x6, const void* x7,
                                    const Params params, const PageParams pages) {
    wait_for_previous_grid();
    SHARED_STORAGE(AttentionStorage, storage);
    const Score::Arrays arrays{{{}, slopes, sinks}, {{x0, x1, x2, x3, x4, x5, x6, x7}}};
    const PagedKv kv{k, v, cu_seqlens_q, seq_lens, block_table, pages};
    attention_block(storage, params, q, kv, out, lse, nullptr, nullptr, arrays);
}
