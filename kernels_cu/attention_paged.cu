// attention_paged.cu: attention of varlen queries over paged KV caches, on any target.
//
// Plain, or with the options of GeneralScore (attention/score.cuh).  Only GeneralScore reads slopes
// and sinks.
// Constants and launch: attention/block.cuh.
#include "attention/block.cuh"

KERNEL void attention_paged(const Element* q, const Element* k, const Element* v, Element* out,
                            float* lse, const int32_t* cu_seqlens_q, const int32_t* seq_lens,
                            const int32_t* block_table, const float* slopes, const float* sinks,
                            const Params params, const PageParams pages) {
    wait_for_previous_grid();
    SHARED_STORAGE(AttentionStorage, storage);
    const PagedKv kv{k, v, cu_seqlens_q, seq_lens, block_table, pages};
    attention_block(storage, params, q, kv, out, lse, nullptr, nullptr,
                    Score::without_mask(slopes, sinks));
}
