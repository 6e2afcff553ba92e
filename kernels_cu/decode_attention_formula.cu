// decode_attention_formula.cu: decode_attention_general.cu with user formulas for the score and the
// mask (attention/decode/formula.cuh).  Fully masked key tiles are not read.
// Constants and launch: decode_attention.cu; kTileM is 8 or 16.
#include "attention/decode/formula.cuh"
#include "attention/decode/mainloop.cuh"

static_assert(!kHasMergeKernel, "decode_merge.cu knows no windows");

KERNEL void decode_attention_formula(const Element* q, const Element* k_cache,
                                     const Element* v_cache, const int* seq_lens,
                                     const int* block_table, Element* out, float* lse,
                                     void* partial_results, uint32_t* counters, const float* slopes,
                                     const float* sinks, const void* x0, const void* x1,
                                     const void* x2, const void* x3, const void* x4, const void* x5,
                                     const void* x6, const void* x7,
                                     const FormulaDecodeParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(DecodeStorage, storage);
    decode_block<FormulaDecodeScore<Formulas>>(
        storage, params, {{slopes, sinks}, {{x0, x1, x2, x3, x4, x5, x6, x7}}}, {k_cache, v_cache},
        seq_lens, block_table, q, out, lse, partial_results, counters);
}
