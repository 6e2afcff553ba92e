// decode_attention_8bit_formula.cu: decode_attention_formula.cu for e4m3 or int8 caches with
// scales (attention/decode/scales.cuh).  Formulas receive the score of the scaled keys.
// Types, constants and launch: decode_attention_8bit.cu.
#include "attention/decode/formula.cuh"
#include "attention/decode/mainloop.cuh"

static_assert(!kHasMergeKernel, "decode_merge.cu knows no scales");

KERNEL void decode_attention_8bit_formula(
    const Element* q, const CacheElement* k_cache, const CacheElement* v_cache, const int* seq_lens,
    const int* block_table, Element* out, float* lse, void* partial_results, uint32_t* counters,
    const float* slopes, const float* sinks, const float* k_scale, const float* v_scale,
    const void* x0, const void* x1, const void* x2, const void* x3, const void* x4, const void* x5,
    const void* x6, const void* x7, const FormulaDecodeParams params,
    const CacheScaleParams scale_params) {
    wait_for_previous_grid();
    SHARED_STORAGE(DecodeStorage, storage);
    decode_block<FormulaDecodeScore<Formulas>>(
        storage, params, {{slopes, sinks}, {{x0, x1, x2, x3, x4, x5, x6, x7}}}, {k_cache, v_cache},
        seq_lens, block_table, q, out, lse, partial_results, counters,
        [&](int kv_head) { return KvScales(scale_params, k_scale, v_scale, kv_head); });
}
