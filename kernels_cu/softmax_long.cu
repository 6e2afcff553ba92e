// softmax_long.cu: softmax, or log_softmax, as in softmax.cu, of long rows of any length that lie at
// one stride, without options.
//
// A row is the work of a cluster.  How many blocks that has, and how many threads they have, the
// launch says, so that all lengths are done by the same code.  The row's whole vectors, wherever in
// memory they begin, come to shared memory by asynchronous copies, one column of vectors for each
// thread, which only ever touches its own.  The elements before and behind them, fewer than two
// vectors, lie in a register of as many threads.  What the warps have found meets once: each sends
// its own to all blocks.
// The other arguments are those of softmax.cu.
// Constants: Element and those of parts/row.cuh; kNumThreads and kClusterSize are the most.
// Launch: grid (rows * params.blocks), block (up to kNumThreads, whole warps), clusters of
// params.blocks, dynamic shared memory a vector for each vector of the block's threads.
#include "parts/math.cuh"
#include "parts/max_sum.cuh"
#include "parts/softmax_params.cuh"

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kVectorsOfLine = 128 / int(sizeof(RowVector));

// This thread's part of a row: the vectors first, first + step, ... of `num_vectors`, and perhaps a
// single element.
struct RowPart {
    RowVector* mine;
    int num_threads, first, step, num_vectors;
    int head;    // elements before the first whole vector
    int column;  // of the single element; negative: none

    DEVICE RowPart(RowVector& tile, const Element* x_row, int num_cols, int rank, int blocks) {
        mine = &tile + int(threadIdx.x);
        num_threads = int(blockDim.x);
        const int place = rank * num_threads + int(threadIdx.x);
        step = blocks * num_threads;
        const unsigned begin = unsigned(reinterpret_cast<uintptr_t>(x_row) / sizeof(Element));
        head = int(-begin % kVectorWidth);
        if (head > num_cols) head = num_cols;
        num_vectors = (num_cols - head) / kVectorWidth;
        // Warps begin where lines of memory do; all have as many turns as without that.
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
};

// The row's, of what each warp has.
DEVICE MaxSum merge_cluster(const MaxSum& of_warp, int rank, int blocks, const MergeMaxSum& merge) {
    SHARED(MaxSum, parts, [kClusterSize * kNumThreads / kWarpSize]);
    const int warps = int(blockDim.x) / kWarpSize, count = blocks * warps;
    const int place = rank * warps + int(threadIdx.x) / kWarpSize;
    if (blocks == 1) {  // no cluster, in which alone a GPU has asynchronous stores
        if (lane_id() == 0) parts[place] = of_warp;
        sync_block();
    } else {
        Barrier& full = exchange_barriers()[0];
        if (threadIdx.x == 0) full.arrive_expect_tx(count * int(sizeof(MaxSum)));
        cluster_wait();
        if (lane_id() < blocks) store_async(&parts[place], of_warp, full, lane_id());
        full.wait(0);
    }
    MaxSum total{-kLargestFloat, 0.0f};
#pragma unroll 1
    for (int i = lane_id(); i < count; i += kWarpSize) total = merge(total, parts[i]);
    return merge.across_lanes(total, 1, kWarpSize);
}

template <bool kLog>
DEVICE void write(Element* y_row, const RowPart& part, float single, const MaxSum& total,
                  StorePolicy policy) {
    const float log_sum = kLog ? log_accurate(total.sum) : 0.0f;
    const float factor = reciprocal_approx(total.sum);
    const auto result = [&](float value) {
        const float distance = value - total.max;
        return kLog ? distance - log_sum : exp2_approx(distance * kLog2E) * factor;
    };
    part.for_vectors([&](RowVector vector, int column) {
        float values[kVectorWidth];
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) values[j] = result(vector[j]);
        vector.from_floats(values);
        vector.store(y_row + column, policy);
    });
    if (part.column >= 0) y_row[part.column] = from_float<Element>(result(single));
}

KERNEL void softmax_long(const Element* x, const uint8_t*, void* y, MaxSum*,
                         const SoftmaxParams params, int64_t) {
    announce_to_cluster();
    SHARED_STORAGE(RowVector, tile);
    const int rank = cluster_rank(), blocks = params.blocks;
    const int64_t row = int(blockIdx.x) / blocks;
    const Element* x_row = x + row * params.layout.outer_strides[0][kX];
    const RowPart part(tile, x_row, int(params.layout.num_cols), rank, blocks);
    // Before the vectors: asked for behind them, it would come after all of them.
    float single = -kInfinity;
    if (part.column >= 0) single = to_float(x_row[part.column]);
    const LoadPolicy policy = load_policy(params.loads_last);
    part.for_vectors(
        [&](RowVector& vector, int column) { copy_async<16>(&vector, x_row + column, policy); });
    copy_async_commit();
    copy_async_wait<0>();

    RowVector larger;
    larger.fill(from_float<Element>(-kInfinity));
    part.for_vectors([&](RowVector vector, int) { larger.take_larger(vector, false); });
    float max = maximum(single, -kLargestFloat);
#pragma unroll
    for (int j = 0; j < kVectorWidth; ++j) max = maximum(max, larger[j]);
    max = reduce_in_warp(max, Max());
    float sum = exp2_approx((single - max) * kLog2E);
    part.for_vectors([&](RowVector vector, int) {
        float some = 0.0f;
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) some += exp2_approx((vector[j] - max) * kLog2E);
        sum += some;
    });
    const MergeMaxSum merge{kLog2E};
    const MaxSum of_warp{max, reduce_in_warp(sum, Sum())};
    const MaxSum total = merge_cluster(of_warp, rank, blocks, merge);

    Element* y_row = static_cast<Element*>(y) + row * params.layout.outer_strides[0][kY];
    const StorePolicy policy_of_stores = store_policy(row >= params.stores_last_from);
    if (params.log) {
        write<true>(y_row, part, single, total, policy_of_stores);
    } else {
        write<false>(y_row, part, single, total, policy_of_stores);
    }
}
