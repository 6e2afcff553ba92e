// decode_attention_8bit.cu: decode_attention.cu, or with kGeneral decode_attention_general.cu, for
// e4m3 or int8 caches with scales (attention/decode/scales.cuh).
//
// Shared memory holds the 8-bit codes.  Fragments hold FP16, in which all codes are exact.  BF16
// queries are also converted to FP16, with a scale per row (attention/decode/load_q.cuh).
// Types: Element, CacheElement.  Constants and launch: decode_attention.cu; kTileM is 8 or 16.
#include "attention/decode/mainloop.cuh"

static_assert(!kHasMergeKernel, "decode_merge.cu knows no scales");
using Score = Choose<kGeneral, GeneralDecodeScore, PlainDecodeScore>::Type;

KERNEL void decode_attention_8bit(const Element* q, const CacheElement* k_cache,
                                  const CacheElement* v_cache, const int* seq_lens,
                                  const int* block_table, Element* out, float* lse,
                                  void* partial_results, uint32_t* counters, const float* slopes,
                                  const float* sinks, const float* k_scale, const float* v_scale,
                                  const Score::Params params, const CacheScaleParams scale_params) {
    wait_for_previous_grid();
    SHARED_STORAGE(DecodeStorage, storage);
    decode_block<Score>(storage, params, Score::arrays(slopes, sinks), {k_cache, v_cache}, seq_lens,
                        block_table, q, out, lse, partial_results, counters, [&](int kv_head) {
                            return KvScales(scale_params, k_scale, v_scale, kv_head);
                        });
}
