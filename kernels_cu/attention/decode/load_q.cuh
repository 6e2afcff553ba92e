// Loads the queries of a row tile into shared memory.
// Constants: Element, kTileM, kDim (D and Dv padded).
#pragma once
#include "attention/decode/merge.cuh"
#include "common/shared_tile.cuh"

constexpr int kQueryVectors = kDim / 8;  // of 16 bytes
using QueryTile = SharedTile<kTileM, kDim * 2>;

// Issues the async copies of all threads; rows that do not exist become zero.  Not unrolled: the
// instructions must be fetched, too.
DEVICE void load_queries(QueryTile& tile, const DecodeParams& params, const Element* q,
                         const WorkTile& work) {
    q += work.batch * params.q_strides[0];
#pragma unroll 1
    for (int i = int(threadIdx.x); i < kTileM * kQueryVectors; i += kNumThreads) {
        const int vector = i % kQueryVectors, row = work.first_row + i / kQueryVectors;
        const bool valid = row < params.num_rows && vector * 8 < params.dim;
        int head = row;
        const int query = params.queries.divide(head);
        const int64_t first_head = int64_t(work.kv_head) * params.heads_per_kv_head;
        const Element* from =
            q + (first_head + head) * params.q_strides[1] + query * params.q_strides[2];
        copy_async<16>(tile(i / kQueryVectors, vector), valid ? from + vector * 8 : q, valid);
    }
}
