// Long rows of any length and alignment at one stride, in the shared memory of a cluster each.
//
// How many blocks a cluster has, and how many threads they have, the launch says, so that all lengths
// run the same code.  The row's whole vectors, wherever in memory they begin, come to shared memory by
// asynchronous copies, one column of vectors for each thread, which only ever touches its own.  The
// elements before and behind them, fewer than two vectors, are in a register of as many threads.
// Constants: those of rows/tile.cuh; kNumThreads and kClusterSize are the most.
#include "rows/reduce.cuh"

namespace rows {

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kVectorsOfLine = 128 / int(sizeof(RowVector));

// This thread's part of a row: the vectors first, first + step, ... of `num_vectors`, and perhaps a
// single element.
struct ClusterRow {
    RowVector* mine;
    int num_threads, first, step, num_vectors;
    int head;    // elements before the first whole vector
    int column;  // of the single element; negative: none

    DEVICE ClusterRow(RowVector& tile, const Element* x_row, int num_cols, int rank, int blocks) {
        mine = &tile + int(threadIdx.x);
        num_threads = int(blockDim.x);
        const int place = rank * num_threads + int(threadIdx.x);
        step = blocks * num_threads;
        const unsigned begin = unsigned(reinterpret_cast<uintptr_t>(x_row) / sizeof(Element));
        head = int(-begin % kVectorWidth);
        if (head > num_cols) head = num_cols;
        num_vectors = (num_cols - head) / kVectorWidth;
        // Warps begin where lines of memory do; all have as many iterations as without that.
        first = place - int((begin + head) / kVectorWidth % kVectorsOfLine);
        if (first < 0) first += step;
        const int tail = head + num_vectors * kVectorWidth;
        column = -1;
        if (place < head) column = place;
        const int at = tail + place - kVectorWidth;
        if (at >= tail && at < num_cols) column = at;
    }
    // body(vector in shared memory, the row's element at which it begins).  Passes that read it take
    // a copy: of a reference NVRTC forgets the alignment, and loads FP32 byte by byte.
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
    // Waits for the copies.
    DEVICE void load(const Element* x_row, LoadPolicy policy) const {
        for_vectors(
            [&](RowVector& vector, int col) { copy_async<16>(&vector, x_row + col, policy); });
        copy_async_commit();
        copy_async_wait<0>();
    }
    // result(value) of each element.
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

// The row's statistic, of each warp's: every warp sends its own to all blocks.
template <class Statistic, class Merge>
DEVICE Statistic merge_cluster(const Statistic& of_warp, const Statistic& none, int rank,
                               int blocks, const Merge& merge) {
    SHARED(Statistic, partials, [kClusterSize * kNumThreads / kWarpSize]);
    const int warps = int(blockDim.x) / kWarpSize, count = blocks * warps;
    const int place = rank * warps + int(threadIdx.x) / kWarpSize;
    if (blocks == 1) {  // no cluster, in which alone a GPU has asynchronous stores
        if (lane_id() == 0) partials[place] = of_warp;
        sync_block();
    } else {
        Barrier& full = exchange_barriers()[0];
        if (threadIdx.x == 0) full.arrive_expect_tx(count * int(sizeof(Statistic)));
        cluster_wait();
        if (lane_id() < blocks) store_async(&partials[place], of_warp, full, lane_id());
        full.wait(0);
    }
    Statistic total = none;
#pragma unroll 1
    for (int i = lane_id(); i < count; i += kWarpSize) total = merge(total, partials[i]);
    return merge.across_lanes(total, 1, kWarpSize);
}

}  // namespace rows
