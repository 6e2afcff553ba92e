// decode_attention.cu: out = softmax(scale * q k^T) v for few queries against caches of many keys.
//
// Bound by one read of K and V.  The rows of one KV head, its query heads times the queries, share
// that read.  A sequence's keys fall into chunks whose size follows from its length alone; every
// chunk starts fresh.  The sums of kGroup neighbouring chunks are folded into their group's one
// after another, then those of all groups are added up in their order.  So a sequence's result
// depends neither on the rest of the batch nor on who computes what of it.
//
// A task is one chunk, or one or several whole groups, which are folded in registers.  Partial
// results go to memory as threads hold them.  Whoever is the last of a group's chunks folds them,
// and the last of a sequence's tasks adds up its groups: counters tell, which the last one sets
// back to 0.
//
// A block streams the tiles of its task through kStages buffers (parts/decode_source.cuh);
// parts/decode_warps.cuh is what its warps do with them.
// Constants: Element, kRows (of a block), kDim (at least those of q and v), kTileK (keys of a
// tile), kStages, kMaxChunks, kGroup.  Launch: grid (tasks), block
// (kNumThreads), dynamic shared memory sizeof(DecodeStorage).  Counters are 0 at the start of a
// launch.
#include "parts/decode_warps.cuh"

KERNEL void decode_attention(const Element* q, const Element* k_cache, const Element* v_cache,
                             const int* seq_lens, const int* block_table, Element* out, float* lse,
                             void* partial_results, uint32_t* counters, const DecodeParams params) {
    SHARED_STORAGE(DecodeStorage, storage);
    attend_rows(storage, params, {k_cache, v_cache}, seq_lens, block_table, q, out, lse,
                partial_results, counters);
}
