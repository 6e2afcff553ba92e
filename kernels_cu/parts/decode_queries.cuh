// How the queries of attention for decoding get into shared memory.
// Constants: Element, kRows, kDim (at least those of q and v).
#include "parts/decode_merge.cuh"
#include "parts/shared_tile.cuh"

constexpr int kVectors = kDim / 8;  // of 16 bytes, in a query or key
using QueryTile = SharedTile<kRows, kDim * 2>;
// Starts to load the rows' queries; rows that there are not are zero.  Not unrolled: code is to be
// fetched as well.
DEVICE void load_queries(QueryTile& tile, const DecodeParams& params, const Element* q,
                         const DecodeTask& task) {
    q += task.batch * params.q[0];
#pragma unroll 1
    for (int i = int(threadIdx.x); i < kRows * kVectors; i += kNumThreads) {
        const int vector = i % kVectors, row = task.first_row + i / kVectors;
        const bool valid = row < params.num_rows && vector * 8 < params.dim;
        int head = row;
        const int query = params.queries.take_from(head);
        const int64_t first_head = int64_t(task.kv_head) * params.heads_per_kv_head;
        const Element* from = q + (first_head + head) * params.q[1] + query * params.q[2];
        copy_async<16>(tile(i / kVectors, vector), valid ? from + vector * 8 : q, valid);
    }
}
