// How the threads of a block or cluster share rows of strided arrays.
//
// kThreadsPerRow threads (of each of kClusterSize blocks) share a row; a block has kNumThreads /
// kThreadsPerRow rows, a thread kVectorsPerThread vectors of kVectorWidth elements.
//   kVectorWidth > 1: rows are contiguous.  They may be misaligned: `head` elements are missing
//   from a row's first vector, so that all others are aligned, and the vectors at the row's ends
//   are copied by scalar loads and stores.
//   kLanesAcrossRows: adjacent threads have adjacent rows (softmax over axis 0 of a C array);
//   otherwise adjacent threads have adjacent vectors of one row.
//   kEven: rows are at one stride, all vectors are whole and aligned, and the call has none of the
//   kernel's options.  The code is several times shorter than with all options, which is up to 25%
//   slower because of instruction cache misses.
//   kChunked (common/presence.cuh): rows longer than a block or cluster holds are cut into chunks
//   of kChunk elements.
// Constants: kThreadsPerRow, kVectorWidth, kVectorsPerThread, kLanesAcrossRows, kChunked, kEven.
#pragma once
#include "common/dtype.cuh"
#include "common/math.cuh"
#include "common/presence.cuh"
#include "common/vector.cuh"

namespace rows {

constexpr int kRowsPerBlock = kNumThreads / kThreadsPerRow;
constexpr int kChunk = kClusterSize * kThreadsPerRow * kVectorsPerThread * kVectorWidth;
constexpr int kMaxOuterDims = 6;

// Chunked rows take three launches: kStatistics computes each chunk's statistic, kMerge merges
// those of a row, kApply reads the row a second time.  All others take one, kSinglePass.
enum Pass { kSinglePass, kStatistics, kMerge, kApply };

// Sizes and strides, in elements, of the rows of kOperands arrays; outer dims innermost first.  The
// fields that even rows use are adjacent, because the constant bank is fetched line by line.
template <int kOperands>
struct RowLayout {
    int64_t num_rows, num_cols;
    int64_t outer_strides[kMaxOuterDims][kOperands];
    int64_t col_strides[kOperands];
    int64_t num_outer_dims, outer_sizes[kMaxOuterDims];
};

// A thread's row, and its vectors in it.
struct RowThread {
    int row_in_block, lane, rank;
    int blocks;  // of the cluster; a kernel launched with fewer than kClusterSize sets it

    DEVICE static RowThread here() {
        RowThread t;
        const unsigned tid = threadIdx.x;  // unsigned: quotients take one instruction
        t.row_in_block = int(kLanesAcrossRows ? tid % kRowsPerBlock : tid / kThreadsPerRow);
        t.lane = int(kLanesAcrossRows ? tid / kRowsPerBlock : tid % kThreadsPerRow);
        t.rank = 0;
        t.blocks = kClusterSize;
        if constexpr (kClusterSize > 1) t.rank = cluster_rank();
        return t;
    }
    // The first element of this thread's vector i, counted from the chunk's start.
    DEVICE int position(int i) const {
        return ((i * blocks + rank) * kThreadsPerRow + lane) * kVectorWidth;
    }
};

// The pass of this launch, and this thread's row and chunk.
struct RowWork {
    Pass pass;
    int64_t row, chunk, num_chunks;

    DEVICE static RowWork here(int64_t pass, int64_t num_chunks, const RowThread& t) {
        RowWork work{kSinglePass, 0, 0, 1};
        int64_t group = blockIdx.x / kClusterSize;
        if (kChunked == kAlways || (kChunked == kEither && pass != kSinglePass)) {
            work.pass = Pass(pass);
            work.num_chunks = num_chunks;
            // Reverse order: the last rows read are still in L2.
            if (pass == kApply) group = int64_t(gridDim.x) - 1 - group;
        }
        int64_t row_group = group;
        if constexpr (kChunked) {
            if (work.pass == kStatistics || work.pass == kApply) {
                row_group = group / num_chunks;
                work.chunk = group % num_chunks;
            }
        }
        work.row = row_group * kRowsPerBlock + t.row_in_block;
        return work;
    }
};

// The part of a row in a chunk.  Positions count from the chunk's first vector; the row's elements
// are [low, high).
struct RowChunk {
    int64_t first_col;  // the column at position 0: negative by `head` in the first chunk
    int low, high;
    bool live;  // false: past the last row

    DEVICE bool holds(int position) const { return (kEven || position >= low) && position < high; }
    DEVICE bool holds_all(int position) const {
        return kEven ? position < high : position >= low && position + kVectorWidth <= high;
    }
    DEVICE bool holds_any(int position) const {
        return (kEven || position + kVectorWidth > low) && position < high;
    }
    // Number of the row's elements in a thread's vectors.
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

// Accesses of whole vectors with a cache policy, which is for 16 bytes only.
template <class RowVector, class... Policy>
DEVICE void load_vector_of_row(RowVector& vector, const Element* p, Policy... policy) {
    if constexpr (sizeof(RowVector) < 16) {
        vector.load(p);
    } else {
        vector.load(p, policy...);
    }
}
template <class RowVector, class... Policy>
DEVICE void store_vector_of_row(const RowVector& vector, Element* p, Policy... policy) {
    if constexpr (sizeof(RowVector) < 16) {
        vector.store(p);
    } else {
        vector.store(p, policy...);
    }
}

// a / b.  A 64-bit division costs about a hundred instructions, a 32-bit one twenty.
DEVICE uint64_t quotient(uint64_t a, uint64_t b) {
    return (a | b) >> 32 ? a / b : uint32_t(a) / uint32_t(b);
}

// Element offset of row `row` in operand `operand`.
template <int kOperands>
DEVICE int64_t row_offset(const RowLayout<kOperands>& layout, int operand, int64_t row) {
    if (kEven || layout.num_outer_dims <= 1) return row * layout.outer_strides[0][operand];
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
    if constexpr (kVectorWidth > 1 && !kEven) {
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

}  // namespace rows
