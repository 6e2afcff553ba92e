// decode_attention.cu: out = softmax(scale * q k^T) v for few queries against caches of many keys.
//
// Bound by one read of K and V.  The rows of one KV head, its query heads times the queries, share that
// read.  A sequence's keys fall into chunks whose size follows from its length alone; every chunk starts
// fresh.  The sums of kGroup neighbouring chunks are folded into their group's one after another, then
// those of all groups are added up in their order.  So a sequence's result depends neither on the rest of
// the batch nor on who computes what of it.
//
// A block takes on one chunk, or one or several whole groups, which it folds in registers.  Partial
// results go to memory as threads hold them.  Whoever is the last of a group's chunks folds them, and the
// last of a sequence's blocks adds up its groups: counters tell, which the last one sets back to 0.
//
// A block streams the tiles of neighbouring chunks through kStages buffers.  How they get there
// (parts/decode_source*.cuh) and what its warps do with them (parts/decode_shared_rows.cuh, of few rows;
// parts/decode_warp_rows.cuh, of many) is in headers that the variant includes before this file.
// Constants: Element, kRows (of a block), kDim (at least those of q and v), kTileK (keys of a tile),
// kStages, kMaxChunks, kGroup.  Launch: grid (batch * KV heads * runs of chunks * row_blocks), block
// (kNumThreads), dynamic shared memory sizeof(DecodeStorage).  Counters are 0 at the start of a launch.

KERNEL void decode_attention(const Element* q, const Element* k_cache, const Element* v_cache,
                             const int* seq_lens, const int* block_table, Element* out, float* lse,
                             void* partial_results, uint32_t* counters, const DecodeParams params) {
    SHARED_STORAGE(DecodeStorage, storage);
    const DecodeTask task(params, seq_lens);
    if (task.idle) return;
    const KeyArrays caches = {k_cache, v_cache};
    attend_rows(storage, params, task, caches, block_table, q, out, lse, partial_results, counters);
}
