// attention_paged_8bit.cu: attention_paged.cu for e4m3 or int8 caches with scales
// (attention/kv_8bit.cuh), with the options of GeneralScore.
// Type: CacheElement.  Constants and launch: attention/block.cuh, with ScaledStorage.
#include "attention/block.cuh"
#include "attention/kv_8bit.cuh"

static_assert(kGeneral, "plain scores are not scaled");

KERNEL void attention_paged_8bit(const Element* q, const CacheElement* k, const CacheElement* v,
                                 Element* out, float* lse, const int32_t* cu_seqlens_q,
                                 const int32_t* seq_lens, const int32_t* block_table,
                                 const float* slopes, const float* sinks, const float* k_scale,
                                 const float* v_scale, const Params params, const PageParams pages,
                                 const CacheScaleParams scales) {
    wait_for_previous_grid();
    SHARED_STORAGE(ScaledStorage, storage);
    const ScaledPagedKv kv{k,     v,       cu_seqlens_q, seq_lens, block_table,
                           pages, k_scale, v_scale,      scales,   storage.scales};
    attention_block(storage.attention, params, q, kv, out, lse, nullptr, nullptr,
                    Score::without_mask(slopes, sinks));
}
