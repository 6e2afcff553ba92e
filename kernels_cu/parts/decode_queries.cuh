// How the queries of attention for decoding get into shared memory.
// Constants: Element, kRows, kDim (at least those of q and v).
#include "parts/decode_merge.cuh"
#include "parts/shared_tile.cuh"

constexpr int kVectors = kDim / 8;  // of 16 bytes, in a query or key
using QueryTile = SharedTile<kRows, kDim * 2>;
// Those of the next task are loaded before this one is done where there is room.
constexpr int kQuerySlots = kDim <= 128 ? 2 : 1;
struct QuerySlot {
    union {
        QueryTile q;
        MergeSums sums;  // after the task's tiles
    };
};

// Starts to load the rows' queries; rows that there are not are zero.  Not unrolled: code is to be
// fetched as well.
DEVICE void load_queries(QueryTile& tile, const DecodeParams& params, const Element* q,
                         const DecodeTask& task) {
    const int tid = int(threadIdx.x);
    q += task.batch * params.q[0];
    const auto row_of = [&](int i, bool& valid) {
        const int row = task.first_row + i;
        valid = row < params.num_rows;
        int head = row;
        const int query = params.queries.take_from(head);
        const int64_t first_head = int64_t(task.kv_head) * params.heads_per_kv_head;
        return q + (valid ? (first_head + head) * params.q[1] + query * params.q[2] : 0);
    };
    bool valid;
    if (params.query_vectors) {
#pragma unroll 1
        for (int i = tid; i < kRows * kVectors; i += kNumThreads) {
            const int vector = i % kVectors;
            const Element* row = row_of(i / kVectors, valid);
            copy_async<16>(tile(i / kVectors, vector), row + vector * 8,
                           valid && vector * 8 < params.dim);
        }
        return;
    }
#pragma unroll 1
    for (int i = tid; i < kRows * kDim; i += kNumThreads) {
        const int col = i % kDim;
        const Element* row = row_of(i / kDim, valid);
        static_cast<Element*>(tile(i / kDim, col / 8))[col % 8] =
            valid && col < params.dim ? row[col * params.q[3]] : from_float<Element>(0.0f);
    }
}
