// A row of any strided array, read once: asynchronous copies bring it into shared memory, where it
// stays for all passes over it.  The bytes under way need no registers, so that many blocks run at
// once and the loads of some overlap the arithmetic and the stores of others.
//
// kThreadsPerRow threads (of each of kClusterSize blocks) share one row; a block holds kNumThreads
// / kThreadsPerRow rows.  A thread has kVectorsPerThread vectors of kVectorWidth elements and only
// ever touches its own, so that the data itself needs no barrier.
//   kVectorWidth > 1: neighbouring elements are neighbours in memory.  Rows need no alignment:
//     `head` elements are missing from a row's first vector, so that all others are aligned, and
//     the vectors at the row's ends move element by element.
//   kLanesAcrossRows: neighbouring threads hold neighbouring rows (softmax over axis 0 of a C
//     array); otherwise neighbouring threads hold neighbouring vectors of one row.
//   kPlain: rows lie at one stride, all vectors are whole and aligned, and the call has none of the
//     options that its kernel names.  That keeps the code small: with everything in it a kernel is
//     several times as long, and up to a quarter slower for the instruction cache's misses.
//   kSplitRows (parts/presence.cuh): rows, longer than a block or cluster holds, are cut into chunks
//     of kChunk elements.
#include "parts/dtype.cuh"
#include "parts/math.cuh"
#include "parts/presence.cuh"
#include "parts/vector.cuh"

constexpr int kRowsPerBlock = kNumThreads / kThreadsPerRow;
constexpr int kChunk = kClusterSize * kThreadsPerRow * kVectorsPerThread * kVectorWidth;
constexpr int kMaxOuterDims = 6;

// A split row takes three launches: kStatistics makes each chunk's statistic, kMerge makes one of a
// row's, and kApply reads the row a second time.  All others take one, kWholeRow.
enum Pass { kWholeRow, kStatistics, kMerge, kApply };

// Where the rows of kOperands arrays lie, in elements; the outer dims are innermost first.  What
// plain rows need lies together: a kernel's parameters come from memory too, line by line.
template <int kOperands>
struct RowLayout {
    int64_t num_rows, num_cols;
    int64_t outer_strides[kMaxOuterDims][kOperands];
    int64_t col_strides[kOperands];
    int64_t num_outer_dims, outer_sizes[kMaxOuterDims];
};

// This thread's place: which row, and which of the row's vectors.
struct RowThread {
    int row_in_block, lane, rank;

    DEVICE static RowThread here() {
        RowThread t;
        const unsigned tid = threadIdx.x;  // of which quotients take one instruction
        t.row_in_block = int(kLanesAcrossRows ? tid % kRowsPerBlock : tid / kThreadsPerRow);
        t.lane = int(kLanesAcrossRows ? tid / kRowsPerBlock : tid % kThreadsPerRow);
        t.rank = 0;
        if constexpr (kClusterSize > 1) t.rank = cluster_rank();
        return t;
    }
    // The first element of this thread's vector i, counted from the chunk's start.
    DEVICE int position(int i) const {
        return ((i * kClusterSize + rank) * kThreadsPerRow + lane) * kVectorWidth;
    }
};

// What this block does, and which row and chunk of it this thread works on.
struct RowTask {
    Pass pass;
    int64_t row, chunk, num_chunks;

    DEVICE static RowTask here(int64_t pass, int64_t num_chunks, const RowThread& t) {
        RowTask task{kWholeRow, 0, 0, 1};
        int64_t group = blockIdx.x / kClusterSize;
        if (kSplitRows == kAlways || (kSplitRows == kEither && pass != kWholeRow)) {
            task.pass = Pass(pass);
            task.num_chunks = num_chunks;
            // What was read last comes first: it is still in L2.
            if (pass == kApply) group = int64_t(gridDim.x) - 1 - group;
        }
        int64_t row_group = group;
        if constexpr (kSplitRows) {
            if (task.pass == kStatistics || task.pass == kApply) {
                row_group = group / num_chunks;
                task.chunk = group % num_chunks;
            }
        }
        task.row = row_group * kRowsPerBlock + t.row_in_block;
        return task;
    }
};

// The part of one row that a chunk covers.  Positions count from the chunk's first vector; those of
// the row's elements are [low, high).
struct RowChunk {
    int64_t first_col;  // the column at position 0: negative by `head` in the first chunk
    int low, high;
    bool live;  // false: there is no such row

    DEVICE bool holds(int position) const { return (kPlain || position >= low) && position < high; }
    DEVICE bool holds_all(int position) const {
        return kPlain ? position < high : position >= low && position + kVectorWidth <= high;
    }
    DEVICE bool holds_any(int position) const {
        return (kPlain || position + kVectorWidth > low) && position < high;
    }
    // The row's elements in a thread's vectors.
    DEVICE int count(const RowThread& thread) const {
        int sum = 0;
        for (int i = 0; i < kVectorsPerThread; ++i) {
            const int begin = thread.position(i), end = begin + kVectorWidth;
            const int first = begin > low ? begin : low, last = end < high ? end : high;
            if (last > first) sum += last - first;
        }
        return sum;
    }
};

// A 64-bit division costs some hundred instructions, a 32-bit one twenty.
DEVICE uint64_t quotient(uint64_t a, uint64_t b) {
    return (a | b) >> 32 ? a / b : uint32_t(a) / uint32_t(b);
}

// Element offset of row `row` in operand `operand`.
template <int kOperands>
DEVICE int64_t row_offset(const RowLayout<kOperands>& layout, int operand, int64_t row) {
    if (kPlain || layout.num_outer_dims <= 1) return row * layout.outer_strides[0][operand];
    int64_t offset = 0;
    uint64_t rest = uint64_t(row);
    for (int d = 0; d + 1 < int(layout.num_outer_dims); ++d) {
        const uint64_t size = uint64_t(layout.outer_sizes[d]);
        const uint64_t next = quotient(rest, size);
        offset += int64_t(rest - next * size) * layout.outer_strides[d][operand];
        rest = next;
    }
    return offset + int64_t(rest) * layout.outer_strides[layout.num_outer_dims - 1][operand];
}

// Chunk `chunk` of row `row`; x_row points at the row's first element.
template <class T>
DEVICE RowChunk row_chunk(const T* x_row, int64_t row, int64_t num_rows, int64_t num_cols,
                          int64_t chunk) {
    int head = 0;
    if constexpr (kVectorWidth > 1 && !kPlain) {
        head = int(reinterpret_cast<uintptr_t>(x_row) / sizeof(T) % kVectorWidth);
    }
    RowChunk c;
    c.live = row < num_rows;
    c.first_col = chunk * kChunk - head;
    const int64_t high = num_cols - c.first_col;
    c.low = chunk == 0 ? head : 0;
    c.high = !c.live ? 0 : high < kChunk ? int(high) : kChunk;
    return c;
}

// Vectors exist only where neighbours along the row are neighbours in memory.
DEVICE int64_t step(int position, int64_t stride) {
    return kVectorWidth > 1 ? position : position * stride;
}

// The vector at `position` of a row, `fill` where that has no elements; p is the element at
// position 0.
template <class T>
DEVICE Vector<T, kVectorWidth> load_row_vector(const T* p, int64_t stride, int position,
                                               const RowChunk& c, T fill) {
    Vector<T, kVectorWidth> vector;
    if (kVectorWidth > 1 && c.holds_all(position)) {
        vector.load(p + position);
    } else if (kPlain) {
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

// A block's rows in shared memory, one column of vectors for each thread.
template <class T>
struct RowStorage {
    Vector<T, kVectorWidth> vectors[kVectorsPerThread][kNumThreads];
};

// One thread's part of a row in shared memory.
template <class T>
struct RowVectors {
    RowStorage<T>& storage;
    const RowThread& thread;
    const RowChunk& chunk;

    DEVICE Vector<T, kVectorWidth>& operator[](int i) const {
        return storage.vectors[i][threadIdx.x];
    }

    // p: the element at position 0.  Places outside the row become `fill`.  finish() waits.
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
            // Several loads under way before the first store to shared memory waits for one.
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
                for (int j = 0; j < kBatch; ++j) (*this)[i + j].from_elements({values[j]});
            }
        }
    }
    DEVICE void finish() const {
        if constexpr (kVectorWidth > 1) copy_async_wait<0>();
    }
};

// Store the vector at `position` of a row, rounded to T; p is the element at position 0.
template <class T, class... Policy>
DEVICE void store_row_vector(T* p, int64_t stride, int position, const RowChunk& c,
                             const float (&values)[kVectorWidth], Policy... policy) {
    if (kVectorWidth > 1 && c.holds_all(position)) {
        Vector<T, kVectorWidth> vector;
        vector.from_floats(values);
        vector.store(p + position, policy...);
    } else if (!kPlain) {
#pragma unroll
        for (int j = 0; j < kVectorWidth; ++j) {
            if (c.holds(position + j)) p[step(position + j, stride)] = from_float<T>(values[j]);
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

// The elements of a row that the lanes of a warp hold.
DEVICE float count_in_warp(const RowThread& thread, const RowChunk& c) {
    constexpr int kLanes = kLastLaneBit / kFirstLaneBit;
    // For all rows of a warp or for none: no lane must miss the shuffles.
    if (kRowsPerBlock == 1 && c.low == 0 && c.high == kChunk) {
        return float(kLanes * kVectorsPerThread * kVectorWidth);
    }
    return reduce_in_warp(float(c.count(thread)), Sum());
}

// Warps that share a row, and rows that share a warp.
constexpr int kRowsPerWarp = kLanesAcrossRows
                                 ? (kRowsPerBlock < kWarpSize ? kRowsPerBlock : kWarpSize)
                                 : (kThreadsPerRow < kWarpSize ? kWarpSize / kThreadsPerRow : 1);
constexpr int kWarpsPerRow = kLanesAcrossRows ? kThreadsPerRow * kRowsPerWarp / kWarpSize
                             : kThreadsPerRow > kWarpSize ? kThreadsPerRow / kWarpSize
                                                          : 1;

// parts[0..kCount) merged pairwise, a tree of fixed shape: a term passes log2(kCount) merges.
template <int kCount, class Statistic, class Merge>
DEVICE Statistic merge_tree(const Statistic* parts, Merge merge) {
    if constexpr (kCount == 1) {
        return parts[0];
    } else {
        constexpr int kHalf = kCount / 2;
        return merge(merge_tree<kHalf>(parts, merge),
                     merge_tree<kCount - kHalf>(parts + kHalf, merge));
    }
}

// kParts statistics in shared memory: dealt to the lanes where the whole warp is on one row.
template <int kParts, class Statistic, class Merge>
DEVICE Statistic merge_parts(const Statistic* parts, Merge merge) {
    if constexpr (kRowsPerWarp == 1) {
        constexpr int kLanes = kParts < kWarpSize ? kParts : kWarpSize;
        const int lane = lane_id() % kLanes;
        Statistic s = parts[lane];
#pragma unroll
        for (int i = kLanes; i < kParts; i += kLanes) s = merge(s, parts[i + lane]);
        return merge.across_lanes(s, 1, kLanes);
    } else {
        return merge_tree<kParts>(parts, merge);
    }
}

// A barrier for each exchange of a cluster: complete when what all warps have sent is in.
constexpr int kMaxExchanges = 3;
DEVICE Barrier* exchange_barriers() {
    SHARED(Barrier, barriers, [kMaxExchanges]);
    return barriers;
}

// A cluster's blocks must all have started before one writes into another's shared memory: call
// this first in a kernel that calls merge_across_warps.
DEVICE void announce_to_cluster() {
    if constexpr (kClusterSize > 1) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kMaxExchanges; ++i) exchange_barriers()[i].init(1);
            fence_barrier_init();
        }
        cluster_arrive_relaxed();
    }
}

// Merges what the warps of a row hold, in the block or cluster; every thread gets it.
// merge(a, b) is of two statistics, merge.across_lanes(s, begin, end) of the lanes that differ in
// the bits [begin, end).  kExchange counts a kernel's calls from 0, because the shared memory of
// one is not used again.
template <int kExchange, class Statistic, class Merge>
DEVICE Statistic merge_across_warps(const Statistic& mine, const RowThread& t, Merge merge) {
    const int warp = kLanesAcrossRows ? t.lane * kRowsPerWarp / kWarpSize : t.lane / kWarpSize;
    if constexpr (kClusterSize > 1) {
        // Each warp sends its own to every block: no barrier of the block or the cluster on the
        // way.
        static_assert(kRowsPerBlock == 1 && kExchange < kMaxExchanges, "one row to a cluster");
        constexpr int kParts = kClusterSize * kWarpsPerRow;
        SHARED(Statistic, parts, [kParts]);
        Barrier& full = exchange_barriers()[kExchange];
        if (threadIdx.x == 0) full.arrive_expect_tx(kParts * int(sizeof(Statistic)));
        if constexpr (kExchange == 0) cluster_wait();
        if (lane_id() < kClusterSize) {
            store_async(&parts[t.rank * kWarpsPerRow + warp], mine, full, lane_id());
        }
        full.wait(0);
        return merge_parts<kParts>(parts, merge);
    } else if constexpr (kWarpsPerRow > 1) {
        SHARED(Statistic, parts, [kRowsPerBlock][kWarpsPerRow]);
        if (lane_id() / kFirstLaneBit % (kLastLaneBit / kFirstLaneBit) == 0) {
            parts[t.row_in_block][warp] = mine;
        }
        sync_block();
        return merge_parts<kWarpsPerRow>(parts[t.row_in_block], merge);
    } else {
        return mine;
    }
}

// `s`, this warp's statistic of the row's chunk, becomes the row's.  False: the launch ends here.
// statistics: num_rows * num_chunks, then one for each row.
template <class Statistic, class Merge>
DEVICE bool merge_row(const RowTask& task, const RowThread& t, bool live, int64_t num_rows,
                      Statistic* statistics, Merge merge, Statistic& s) {
    Statistic* chunks = statistics + task.row * task.num_chunks;
    Statistic* merged = statistics + num_rows * task.num_chunks + task.row;
    if (task.pass == kApply) {
        if (live) s = *merged;
        return true;
    }
    if (task.pass == kMerge) {
        for (int64_t i = t.lane; live && i < task.num_chunks; i += kThreadsPerRow) {
            // The first one as it is: merged with nothing, a mean in two parts would become one.
            s = i < kThreadsPerRow ? chunks[i] : merge(s, chunks[i]);
        }
        s = merge.across_lanes(s, kFirstLaneBit, kLastLaneBit);
    }
    s = merge_across_warps<0>(s, t, merge);
    if (task.pass == kWholeRow) return true;
    if (live && t.lane == 0) (task.pass == kMerge ? *merged : chunks[task.chunk]) = s;
    return false;
}
