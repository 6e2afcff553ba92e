// Loads the queries of a row tile into shared memory.
// Types: Element, Operand (attention/decode/scales.cuh).
// Constants: kTileM, kDim (D and Dv padded).
#pragma once
#include "attention/decode/merge.cuh"
#include "attention/decode/scales.cuh"
#include "common/shared_tile.cuh"
#include "common/vector.cuh"

constexpr int kQueryVectors = kDim / 8;  // vectors of 16 bytes per query
using QueryTile = SharedTile<kTileM, kDim * 2>;

// Called by all threads.  Issues async copies; rows that do not exist become zero.  Not unrolled,
// because unrolled code takes longer to fetch.
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

// Converts BF16 queries to Operand, which is FP16.  FP16's range is smaller, so each row is in
// units of a power of two, in which its largest magnitude is in [2^14, 2^15).  Elements below 2^-31
// of that are rounded.
struct QueryUnits {
    float rows[kTileM];

    // The unit of rows whose largest magnitude is `largest`.  Clamped, so that the unit and its
    // inverse are normal numbers.
    DEVICE static float unit_of(float largest) {
        constexpr int kLargest = 14;
        const int exponent = bit_cast<int>(largest) >> 23;
        return bit_cast<float>((exponent < 2 * kLargest ? kLargest : exponent - kLargest) << 23);
    }
    // In place; called by all threads, between barriers.
    DEVICE void convert(QueryTile& tile) {
        constexpr int kMost = kNumThreads / kTileM;  // threads of a row
        constexpr int kRowThreads = kMost < kQueryVectors ? kMost : kQueryVectors;
        constexpr int kPasses = kQueryVectors / kRowThreads;
        static_assert(kRowThreads <= kWarpSize && kTileM * kRowThreads % kWarpSize == 0 &&
                          kPasses * kRowThreads == kQueryVectors,
                      "threads share a row's vectors evenly");
        const int row = int(threadIdx.x) / kRowThreads, first = int(threadIdx.x) % kRowThreads;
        if (row >= kTileM) return;
        Vector<Element, 8> vectors[kPasses];
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            vectors[i].load(static_cast<const Element*>(tile(row, i * kRowThreads + first)));
#pragma unroll
            for (int j = 0; j < 8; ++j) largest = maximum(largest, magnitude(vectors[i][j]));
        }
        const float unit = unit_of(MergeFloats<Max>().across_lanes(largest, 1, kRowThreads));
        const float inverse = bit_cast<float>((254 << 23) - bit_cast<int>(unit));
        if (first == 0) rows[row] = unit;
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
            float elements[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) elements[j] = vectors[i][j] * inverse;
            Vector<Operand, 8> converted;
            converted.from_floats(elements);
            converted.store(static_cast<Operand*>(tile(row, i * kRowThreads + first)));
        }
    }
};
