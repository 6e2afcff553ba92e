// decode_attention_general.cu: decode_attention.cu with the options of attention/decode/score.cuh:
// windows, soft caps, ALiBi and sinks.  Chunks begin at the window of the first query.
// Constants and launch: decode_attention.cu; kTileM is 8 or 16.
#include "attention/decode/mainloop.cuh"

static_assert(!kHasMergeKernel, "decode_merge.cu knows no windows");

KERNEL void decode_attention_general(const Element* q, const Element* k_cache,
                                     const Element* v_cache, const int* seq_lens,
                                     const int* block_table, Element* out, float* lse,
                                     void* partial_results, uint32_t* counters, const float* slopes,
                                     const float* sinks, const GeneralDecodeParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(DecodeStorage, storage);
    decode_block<GeneralDecodeScore>(storage, params, {slopes, sinks}, {k_cache, v_cache}, seq_lens,
                                     block_table, q, out, lse, partial_results, counters);
}
