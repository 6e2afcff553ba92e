// A row of any strided array, read once into the registers of the threads that share it.
//
// kThreadsPerRow threads (of each of kClusterSize blocks) hold one row, kVectorsPerThread vectors of
// kVectorWidth elements each; a block holds kNumThreads / kThreadsPerRow rows.
//   kVectorWidth > 1: neighbouring elements are neighbours in memory.  Rows need no alignment: `head`
//     elements are missing from a row's first vector, so that all others are aligned, and the vectors
//     at the row's ends move element by element.
//   kLanesAcrossRows: neighbouring threads hold neighbouring rows (softmax over axis 0 of a C array);
//     otherwise neighbouring threads hold neighbouring vectors of one row.
// A row longer than a block or cluster holds is cut into chunks of kChunk elements.
#include "parts/vector.cuh"

constexpr int kRowsPerBlock = kNumThreads / kThreadsPerRow;
constexpr int kChunk = kClusterSize * kThreadsPerRow * kVectorsPerThread * kVectorWidth;
constexpr int kMaxOuterDims = 6;

// Where the rows of kOperands arrays lie, in elements; the outer dims are innermost first.
template <int kOperands>
struct RowLayout {
    int64_t num_rows, num_cols, num_outer_dims;
    int64_t outer_sizes[kMaxOuterDims];
    int64_t outer_strides[kOperands][kMaxOuterDims];
    int64_t col_strides[kOperands];
};

// This thread's place: which row, and which of the row's vectors.
struct RowThread {
    int row_in_block, lane, rank;

    DEVICE static RowThread here() {
        RowThread t;
        const int tid = int(threadIdx.x);
        t.row_in_block = kLanesAcrossRows ? tid % kRowsPerBlock : tid / kThreadsPerRow;
        t.lane = kLanesAcrossRows ? tid / kRowsPerBlock : tid % kThreadsPerRow;
        t.rank = 0;
        if constexpr (kClusterSize > 1) t.rank = cluster_rank();
        return t;
    }
    // The first element of vector i, counted from the chunk's start.
    DEVICE int position(int i) const {
        return ((i * kClusterSize + rank) * kThreadsPerRow + lane) * kVectorWidth;
    }
};

// The part of one row that a chunk covers.  Positions count from the chunk's first vector; those of
// the row's elements are [low, high).
struct RowChunk {
    int64_t row;
    int64_t first_col;  // the column at position 0: negative by `head` in the first chunk
    int low, high;
    bool live;  // false: there is no such row

    DEVICE bool holds(int position) const { return position >= low && position < high; }
    DEVICE bool holds_all(int position) const {
        return position >= low && position + kVectorWidth <= high;
    }
    DEVICE bool holds_any(int position) const {
        return position + kVectorWidth > low && position < high;
    }
};

// Element offset of row `row` in operand `operand`.
template <int kOperands>
DEVICE int64_t row_offset(const RowLayout<kOperands>& layout, int operand, int64_t row) {
    if (layout.num_outer_dims <= 1) return row * layout.outer_strides[operand][0];
    int64_t offset = 0;
    uint64_t rest = uint64_t(row);
    for (int d = 0; d + 1 < int(layout.num_outer_dims); ++d) {
        const uint64_t size = uint64_t(layout.outer_sizes[d]);
        // A 64-bit division costs some hundred instructions, a 32-bit one twenty.
        const uint64_t next = (rest | size) >> 32 ? rest / size : uint32_t(rest) / uint32_t(size);
        offset += int64_t(rest - next * size) * layout.outer_strides[operand][d];
        rest = next;
    }
    return offset + int64_t(rest) * layout.outer_strides[operand][layout.num_outer_dims - 1];
}

// Chunk `chunk` of row `row`; x_row points at the row's first element.
template <class T>
DEVICE RowChunk row_chunk(const T* x_row, int64_t row, int64_t num_rows, int64_t num_cols,
                          int64_t chunk) {
    int head = 0;
    if constexpr (kVectorWidth > 1) {
        head = int(reinterpret_cast<uintptr_t>(x_row) / sizeof(T) % kVectorWidth);
    }
    RowChunk c;
    c.row = row;
    c.first_col = chunk * kChunk - head;
    c.live = row < num_rows;
    const int64_t high = num_cols - c.first_col;
    c.low = chunk == 0 ? head : 0;
    c.high = !c.live ? 0 : high < kChunk ? int(high) : kChunk;
    return c;
}

// One thread's part of a row, as it lies in memory.
template <class T>
struct RowVectors {
    Vector<T, kVectorWidth> vectors[kVectorsPerThread];

    // p: the element at position 0.  Places outside the row become `fill`.
    DEVICE void load(const T* p, int64_t stride, const RowThread& t, const RowChunk& c, T fill) {
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            const int position = t.position(i);
            if (kVectorWidth > 1 && c.holds_all(position)) {
                vectors[i].load(p + position);
            } else {
                T values[kVectorWidth];
#pragma unroll
                for (int j = 0; j < kVectorWidth; ++j) {
                    values[j] = c.holds(position + j) ? p[(position + j) * stride] : fill;
                }
                vectors[i].from_elements(values);
            }
        }
    }
};

// Store vector `position` of a row, rounded to T; p is the element at position 0.
template <class T>
DEVICE void store_row_vector(T* p, int64_t stride, int position, const RowChunk& c,
                             const float (&values)[kVectorWidth]) {
    if (kVectorWidth > 1 && c.holds_all(position)) {
        Vector<T, kVectorWidth> vector;
        vector.from_floats(values);
        vector.store(p + position);
    } else {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            if (c.holds(position + j)) p[(position + j) * stride] = from_float<T>(values[j]);
        }
    }
}

// --- reductions over the threads of a row ----------------------------------------------------
// Every thread of the block (and cluster) takes part and gets the result.  The order is fixed.

// Lanes of one warp that hold the same row differ in the bits [kFirstLaneBit, kLastLaneBit).
constexpr int kFirstLaneBit = kLanesAcrossRows ? kRowsPerBlock : 1;
constexpr int kLastLaneBit =
    kLanesAcrossRows ? kWarpSize : (kThreadsPerRow < kWarpSize ? kThreadsPerRow : kWarpSize);

template <class Combine>
DEVICE float reduce_in_warp(float value, Combine combine) {
#pragma unroll
    for (int bit = kFirstLaneBit; bit < kLastLaneBit; bit *= 2) {
        value = combine(value, shuffle_xor(value, bit));
    }
    return value;
}

// Combines what the warps of a row hold, first in the block, then across the cluster.  A statistic is
// a struct of floats with merge(a, b) and its identity none(); one barrier, of the widest scope needed.
constexpr int kRowsPerWarp =
    kLanesAcrossRows ? (kRowsPerBlock < kWarpSize ? kRowsPerBlock : kWarpSize)
                     : (kThreadsPerRow < kWarpSize ? kWarpSize / kThreadsPerRow : 1);
constexpr int kWarpsPerRow = kLanesAcrossRows ? kThreadsPerRow * kRowsPerWarp / kWarpSize
                             : kThreadsPerRow > kWarpSize ? kThreadsPerRow / kWarpSize
                                                          : 1;

template <class Statistic>
DEVICE Statistic shuffle_statistic(const Statistic& s, int mask) {
    constexpr int kWords = sizeof(Statistic) / 4;
    uint32_t words[kWords];
    memcpy(words, &s, sizeof(s));
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = shuffle_xor(words[i], mask);
    Statistic other;
    memcpy(&other, words, sizeof(s));
    return other;
}

template <class Statistic, class Merge>
DEVICE Statistic reduce_statistic_in_warp(Statistic s, Merge merge) {
#pragma unroll
    for (int bit = kFirstLaneBit; bit < kLastLaneBit; bit *= 2) {
        s = merge(s, shuffle_statistic(s, bit));
    }
    return s;
}

// A cluster's blocks must all have started before one writes into another's shared memory: call this
// first in a kernel that calls merge_across_warps.
DEVICE void announce_to_cluster() {
    if constexpr (kClusterSize > 1) cluster_arrive();
}

// Call once per kernel: the shared array is not fenced against a second use.
template <class Statistic, class Merge>
DEVICE Statistic merge_across_warps(const Statistic& mine, const RowThread& t, Merge merge) {
    constexpr int kParts = kWarpsPerRow * kClusterSize;
    if constexpr (kParts == 1) return mine;
    SHARED(Statistic, parts, [kRowsPerBlock][kParts]);
    const int warp = kLanesAcrossRows ? t.lane * kRowsPerWarp / kWarpSize : t.lane / kWarpSize;
    const int lane = lane_id() / kFirstLaneBit;  // among this warp's lanes of the row
    if constexpr (kClusterSize == 1) {
        if (lane == 0) parts[t.row_in_block][warp] = mine;
        sync_block();
    } else {
        static_assert(kWarpSize / kRowsPerWarp >= kClusterSize, "a lane for every block");
        cluster_wait();
        Statistic* slot = &parts[t.row_in_block][t.rank * kWarpsPerRow + warp];
        if (lane < kClusterSize) *cluster_shared(slot, lane) = mine;
        cluster_arrive();
        cluster_wait();
    }
    if constexpr (kLanesAcrossRows) {
        Statistic total = parts[t.row_in_block][0];
        for (int i = 1; i < kParts; ++i) total = merge(total, parts[t.row_in_block][i]);
        return total;
    } else {
        Statistic total = parts[t.row_in_block][lane % kParts];
#pragma unroll
        for (int i = kWarpSize; i < kParts; i += kWarpSize) {
            total = merge(total, parts[t.row_in_block][lane + i]);
        }
#pragma unroll
        for (int bit = 1; bit < kParts && bit < kWarpSize; bit *= 2) {
            total = merge(total, shuffle_statistic(total, bit));
        }
        return total;
    }
}
