// decode_attention.cu: out = softmax(scale * q k^T) v of few queries against caches of many keys.
//
// Bandwidth-bound: one read of K and V.  The query heads of a KV head, times the queries, share it.
// The keys of a sequence are split into chunks whose size depends on the sequence's length alone.
// Every chunk starts with a cleared state; kChunksPerGroup adjacent chunks are folded into a group
// in their order, then all groups are merged in theirs.  So the bits of a sequence depend neither
// on the batch nor on which block computes which chunk.
//
// A block computes one chunk, or one or several whole groups, which it folds in registers
// (attention/decode/mainloop.cuh).  Partial results go to memory; the last block of a group's
// chunks folds them, the last block of a sequence merges its groups
// (attention/decode/epilogue.cuh).  Counters tell which block is last; it sets them back to 0.
//
// Constants: Element, kTileM (rows of a block), kTileN (keys of a tile), kDim (D and Dv padded),
// kStages, kMaxChunks, kChunksPerGroup.
// Launch: grid (work tiles), block (kNumThreads), dynamic shared memory sizeof(DecodeStorage).
// Counters are 0 before a launch.
#include "attention/decode/mainloop.cuh"

KERNEL void decode_attention(const Element* q, const Element* k_cache, const Element* v_cache,
                             const int* seq_lens, const int* block_table, Element* out, float* lse,
                             void* partial_results, uint32_t* counters, const DecodeParams params) {
    wait_for_previous_grid();
    SHARED_STORAGE(DecodeStorage, storage);
    decode_block<PlainDecodeScore>(storage, params, {}, {k_cache, v_cache}, seq_lens, block_table,
                                   q, out, lse, partial_results, counters);
}
