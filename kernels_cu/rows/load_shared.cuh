// Rows in shared memory: cp.async copies a row once; it stays for all passes.  Bytes in flight take
// no registers, so that many blocks are resident and the loads of some overlap the arithmetic and
// stores of others.  A thread only accesses its own vectors: the data needs no barrier.
#pragma once
#include "rows/reduce.cuh"

namespace rows {

// Offset of an element.  Rows with vectors are contiguous.
DEVICE int64_t step(int position, int64_t stride) {
    return kVectorWidth > 1 ? position : position * stride;
}

// Loads the vector at `position` of a row, `fill` outside of the row.  p: the element at position
// 0.
template <class T>
DEVICE Vector<T, kVectorWidth> load_row_vector(const T* p, int64_t stride, int position,
                                               const RowChunk& c, T fill) {
    Vector<T, kVectorWidth> vector;
    if (kVectorWidth > 1 && c.holds_all(position)) {
        vector.load(p + position);
    } else if (kEven) {
        vector.fill(fill);
    } else {
        T values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            values[j] = c.holds(position + j) ? p[step(position + j, stride)] : fill;
        }
        vector.from_elements(values);
    }
    return vector;
}

// A block's rows in shared memory, one column of vectors per thread.
template <class T>
struct SharedRowStorage {
    Vector<T, kVectorWidth> vectors[kVectorsPerThread][kNumThreads];
};

// One thread's part of a row in shared memory.
template <class T>
struct SharedRow {
    SharedRowStorage<T>& storage;
    const RowThread& thread;
    const RowChunk& chunk;

    DEVICE Vector<T, kVectorWidth>& operator[](int i) const {
        return storage.vectors[i][threadIdx.x];
    }

    // p: the element at position 0.  Positions outside of the row become `fill`.  finish() waits.
    DEVICE void start(const T* p, int64_t stride, T fill,
                      LoadPolicy policy = load_policy(false)) const {
        if constexpr (kVectorWidth > 1) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) {
                const int position = thread.position(i);
                if (chunk.holds_all(position)) {
                    copy_async<kVectorWidth * sizeof(T)>(&(*this)[i], p + position, policy);
                } else {
                    (*this)[i] = load_row_vector(p, stride, position, chunk, fill);
                }
            }
            copy_async_commit();
        } else {
            // Batches have several loads in flight before the first store waits.
            constexpr int kBatch = kVectorsPerThread < 8 ? kVectorsPerThread : 8;
#pragma unroll 1
            for (int i = 0; i < kVectorsPerThread; i += kBatch) {
                T values[kBatch];
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    const int position = thread.position(i + j);
                    values[j] = chunk.holds(position) ? p[step(position, stride)] : fill;
                }
#pragma unroll
                for (int j = 0; j < kBatch; ++j) {
                    if (kVectorsPerThread % kBatch != 0 && i + j >= kVectorsPerThread) break;
                    (*this)[i + j].from_elements({values[j]});
                }
            }
        }
    }
    DEVICE void finish() const {
        if constexpr (kVectorWidth > 1) copy_async_wait<0>();
    }
};

// Stores the vector at `position` of a row, rounded to T.  p: the element at position 0.
template <class T, class... Policy>
DEVICE void store_row_vector(T* p, int64_t stride, int position, const RowChunk& c,
                             const float (&values)[kVectorWidth], Policy... policy) {
    if (kVectorWidth > 1 && c.holds_all(position)) {
        Vector<T, kVectorWidth> vector;
        vector.from_floats(values);
        vector.store(p + position, policy...);
    } else if (!kEven) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            if (c.holds(position + j)) p[step(position + j, stride)] = from_float<T>(values[j]);
        }
    }
}

}  // namespace rows
