// Even rows of one block in registers: read once, transformed by a functor, written once.
//
// A functor's reduce(vectors, values, thread, params) unpacks a thread's vectors to values, may
// change them, and returns an epilogue that maps each value to its result.  fill() is the element
// outside of the row.
#pragma once
#include "rows/reduce.cuh"

namespace rows {

static_assert(kEven && !kChunked && !kLanesAcrossRows && kClusterSize == 1, "rows of one block");

using RowVector = Vector<Element, kVectorWidth>;
using RowVectors = RowVector[kVectorsPerThread];
using RowValues = float[kVectorsPerThread][kVectorWidth];
constexpr int kStep = kThreadsPerRow * kVectorWidth;  // stride of a thread's vectors

// kUnpredicated: every thread has all of its vectors in every row.
template <class Functor, bool kUnpredicated, class Params>
DEVICE void transform_register_rows(const Element* x, Element* y, const Params& params) {
    const auto& layout = params.layout;
    const RowThread t = RowThread::here();
    const int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + t.row_in_block;
    const int num_cols = !kUnpredicated && row >= layout.num_rows ? 0 : int(layout.num_cols);

    const int rest = num_cols - t.position(0);  // vector i is in the row if i * kStep < rest

    RowVectors vectors;
    const LoadPolicy policy = load_policy(params.loads_last);
    const Element* from = x + row_offset(layout, Params::kX, row) + t.position(0);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if constexpr (!kUnpredicated) vectors[i].fill(Functor::fill());
        if (kUnpredicated || i * kStep < rest)
            load_vector_of_row(vectors[i], from + i * kStep, policy);
    }
    RowValues values;
    const auto epilogue = Functor::reduce(vectors, values, t, params);
    Element* to = y + row_offset(layout, Params::kY, row) + t.position(0);
    // The policy of the block's first row: uniform, so that it takes no registers.
    const int64_t first_row = int64_t(blockIdx.x) * kRowsPerBlock;
    const StorePolicy policy_of_stores = store_policy(first_row >= params.stores_last_from);
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
        if (!kUnpredicated && i * kStep >= rest) continue;
#pragma unroll
        for (float& value : values[i]) value = epilogue(value);
        vectors[i].from_floats(values[i]);
        store_vector_of_row(vectors[i], to + i * kStep, policy_of_stores);
    }
}

}  // namespace rows
