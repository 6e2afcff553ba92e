// decode_attention.cu: out = softmax(scale * q k^T) v for few queries and caches of many keys.
//
// Bandwidth-bound: K and V are read once, for all queries of all query heads of a KV head.
// The keys of a sequence are split into chunks whose size depends only on the sequence's length.
// Every chunk starts with a cleared state.  kChunksPerGroup adjacent chunks are folded into a group
// in order, then all groups are merged in order.  Therefore a sequence's results are bitwise
// independent of the batch and of the assignment of chunks to blocks.
//
// A block computes params.chunks_per_block adjacent chunks: 1, 2 or 4, each a partial result, or
// whole groups, which it folds in registers (attention/decode/mainloop.cuh).  Partial results go to
// global memory.  The last block of a group folds its chunks; the last block of a sequence merges
// its groups (attention/decode/epilogue.cuh).  Counters identify the last block, which resets them
// to 0.
//
// Constants: Element, kTileM (rows per block), kTileN (keys per tile), kDim (D and Dv padded),
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
