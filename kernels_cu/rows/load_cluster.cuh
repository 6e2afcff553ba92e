// Long rows of any length and alignment at one stride, each in the shared memory of a cluster.
//
// The launch chooses the blocks of a cluster and their threads, so that one kernel serves all
// lengths.  cp.async copies a row's aligned vectors to shared memory; each thread owns a column of
// vectors.  The elements before and after them, fewer than two vectors, are in registers, at most
// one per thread.
// Constants: those of rows/tile.cuh; kNumThreads and kClusterSize are upper limits.
#pragma once
#include "rows/reduce.cuh"

namespace rows {

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kVectorsOfLine = 128 / int(sizeof(RowVector));

// A thread's part of a row: vectors first, first + step, ... of `num_vectors`, and at most one
// single element.
struct ClusterRow {
    RowVector* mine;
    int num_threads, first, step, num_vectors;
    int head;    // elements before the first aligned vector
    int column;  // column of the single element; negative: none

    DEVICE ClusterRow(RowVector& tile, const Element* x_row, int num_cols, int rank, int blocks) {
        mine = &tile + int(threadIdx.x);
        num_threads = int(blockDim.x);
        const int cluster_thread = rank * num_threads + int(threadIdx.x);
        step = blocks * num_threads;
        const unsigned begin = unsigned(reinterpret_cast<uintptr_t>(x_row) / sizeof(Element));
        head = int(-begin % kVectorWidth);
        if (head > num_cols) head = num_cols;
        num_vectors = (num_cols - head) / kVectorWidth;
        // Aligns warps to 128-byte lines; the iteration count stays the same.
        first = cluster_thread - int((begin + head) / kVectorWidth % kVectorsOfLine);
        if (first < 0) first += step;
        const int tail = head + num_vectors * kVectorWidth;
        column = -1;
        if (cluster_thread < head) column = cluster_thread;
        const int at = tail + cluster_thread - kVectorWidth;
        if (at >= tail && at < num_cols) column = at;
    }
    // Calls body(vector in shared memory, column of its first element).  Bodies that only read take
    // a copy: through a reference NVRTC loses the alignment and loads FP32 byte by byte.
    template <class Body>
    DEVICE void for_vectors(Body body) const {
        RowVector* at = mine;
        int i = first;
        for (; i + step < num_vectors; i += 2 * step) {
            body(*at, head + i * kVectorWidth);
            body(at[num_threads], head + (i + step) * kVectorWidth);
            at += 2 * num_threads;
        }
        if (i < num_vectors) body(*at, head + i * kVectorWidth);
    }
    // Copies this thread's vectors and waits for the copies.
    DEVICE void load(const Element* x_row, LoadPolicy policy) const {
        for_vectors(
            [&](RowVector& vector, int col) { copy_async<16>(&vector, x_row + col, policy); });
        copy_async_commit();
        copy_async_wait<0>();
    }
    // Stores result(value) of each element.
    template <class Result>
    DEVICE void store(Element* y_row, float single, StorePolicy policy, Result result) const {
        for_vectors([&](RowVector vector, int col) {
            float values[kVectorWidth];
#pragma unroll
            for (int j = 0; j < kVectorWidth; ++j) values[j] = result(vector[j]);
            vector.from_floats(values);
            vector.store(y_row + col, policy);
        });
        if (column >= 0) y_row[column] = from_float<Element>(result(single));
    }
};

// Merges the row's statistic over the cluster: every warp sends its own to all blocks.  none: the
// statistic of no elements.
template <class Statistic, class Merge>
DEVICE Statistic merge_cluster(const Statistic& of_warp, const Statistic& none, int rank,
                               int blocks, const Merge& merge) {
    SHARED(Statistic, partials, [kClusterSize * kNumThreads / kWarpSize]);
    const int warps = int(blockDim.x) / kWarpSize, count = blocks * warps;
    const int cluster_warp = rank * warps + int(threadIdx.x) / kWarpSize;
    if (blocks == 1) {  // st.async needs a cluster
        if (lane_id() == 0) partials[cluster_warp] = of_warp;
        sync_block();
    } else {
        Barrier& full = exchange_barriers()[0];
        if (threadIdx.x == 0) full.arrive_expect_tx(count * int(sizeof(Statistic)));
        cluster_wait();  // all blocks have started (init_exchange_barriers)
        if (lane_id() < blocks) store_async(&partials[cluster_warp], of_warp, full, lane_id());
        full.wait(0);
    }
    Statistic total = none;
#pragma unroll 1
    for (int i = lane_id(); i < count; i += kWarpSize) total = merge(total, partials[i]);
    return merge.across_lanes(total, 1, kWarpSize);
}

}  // namespace rows
