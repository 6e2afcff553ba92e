// Contiguous rows of any length, in the registers of a block.
//
// A block's rows are one contiguous span of memory.  Whole vectors move the span to shared memory
// and back, except elements at its ends, independent of the alignment of its rows.  Threads load a
// row from there into registers and store its results to the same positions.  The launch chooses
// the threads of a row, so that one kernel serves all lengths.
//
// Threads load 32-bit words of shared memory.  With 16-bit elements, a row's first and last element
// can share a word with another row: one thread has the first besides its words, another thread the
// last.
// Constants: those of rows/tile.cuh; kThreadsPerRow is kNumThreads; a thread holds
// kVectorsPerThread * kVectorWidth elements and one 32-bit word.
#pragma once
#include "rows/tile.cuh"

namespace rows {

static_assert(kThreadsPerRow == kNumThreads && kVectorWidth > 1 && !kEven && !kLanesAcrossRows &&
                  !kChunked && kClusterSize == 1,
              "rows of one block");
constexpr int kPack = 4 / int(sizeof(Element));
using Packed = Vector<Element, kPack>;
constexpr int kPackedPerThread = kVectorsPerThread * kVectorWidth / kPack + 1;
static_assert(kPackedPerThread % 2 == 1,
              "lanes with an odd number of 32-bit words each differ in their banks");

// The block's rows, with 2^log2 threads each.
struct RowThreads {
    int log2, count;
    int row_in_block, lane;  // of this thread
    int64_t first_row;
    int num_rows;

    DEVICE static RowThreads of(int log2, int64_t num_rows) {
        RowThreads t;
        t.log2 = log2;
        t.count = 1 << log2;
        t.row_in_block = int(threadIdx.x) >> log2;
        t.lane = int(threadIdx.x) & (t.count - 1);
        const int most = kNumThreads >> log2;
        t.first_row = int64_t(blockIdx.x) * most;
        const int64_t rest = num_rows - t.first_row;
        t.num_rows = rest < most ? int(rest) : most;
        return t;
    }
    DEVICE bool live() const { return row_in_block < num_rows; }

    // Reduces over this warp's lanes of the row.
    template <class Combine>
    DEVICE float combine_in_warp(float value, Combine combine) const {
        const int lanes = count < kWarpSize ? count : kWarpSize;
        for (int bit = 1; bit < lanes; bit *= 2) value = combine(value, shuffle_xor(value, bit));
        return value;
    }
    // Reduces over the row's warps; merge.across_lanes as in common/max_sum.cuh.  kExchange counts
    // a kernel's calls from 0.
    template <int kExchange, class Statistic, class Merge>
    DEVICE Statistic merge_across_warps(const Statistic& mine, Merge merge) const {
        if (count <= kWarpSize) return mine;
        SHARED(Statistic, partials, [kNumThreads / kWarpSize]);
        if (lane_id() == 0) partials[threadIdx.x / kWarpSize] = mine;
        sync_block();
        const int warps = count / kWarpSize;
        return merge.across_lanes(partials[row_in_block * warps + lane_id() % warps], 1, warps);
    }
};

// A block's span; positions count from the start of the vector with its first element.
struct Span {
    using Vec = Vector<Element, kVectorWidth>;
    int begin, end;
    int64_t first;  // array index of position 0

    DEVICE static Span of(const Element* x, const RowThreads& t, int num_cols) {
        Span s;
        s.first = t.first_row * num_cols;
        s.begin = int(reinterpret_cast<uintptr_t>(x + s.first) / sizeof(Element) % kVectorWidth);
        s.end = s.begin + t.num_rows * num_cols;
        s.first -= s.begin;
        return s;
    }
    // Issues the copies; loaded() waits for them, and must precede the first use.
    DEVICE void load(Vec* tile, const Element* x, LoadPolicy policy) const {
        const Element* from = x + first;
        for (int i = first_vector() + int(threadIdx.x); i < end_of_vectors(); i += kNumThreads) {
            copy_async<16>(&tile[i], from + i * kVectorWidth, policy);
        }
        copy_async_commit();
        const int position = at_end();
        if (position >= 0) reinterpret_cast<Element*>(tile)[position] = from[position];
    }
    DEVICE static void loaded() {
        copy_async_wait<0>();
        sync_block();
    }
    // Called after a barrier: a thread stores results of other threads.
    DEVICE void store(const Vec* tile, Element* y, StorePolicy policy) const {
        Element* to = y + first;
        for (int i = first_vector() + int(threadIdx.x); i < end_of_vectors(); i += kNumThreads) {
            tile[i].store(to + i * kVectorWidth, policy);
        }
        const int position = at_end();
        if (position >= 0) to[position] = reinterpret_cast<const Element*>(tile)[position];
    }

  private:
    DEVICE int first_vector() const { return begin > 0; }
    DEVICE int end_of_vectors() const { return end / kVectorWidth; }
    // The position outside of whole vectors that this thread copies; negative: none.
    DEVICE int at_end() const {
        const int thread = int(threadIdx.x);
        if (thread < kVectorWidth) {
            return first_vector() && thread >= begin && thread < end ? thread : -1;
        }
        const int position = (end_of_vectors() - 1) * kVectorWidth + thread;
        const bool there = thread < 2 * kVectorWidth && end_of_vectors() >= first_vector();
        return there && position < end ? position : -1;
    }
};

// A block's rows in shared memory.
struct SpanStorage { Span::Vec vectors[kNumThreads * kVectorsPerThread + 1]; };

// A thread's elements of a row in FP32.
struct SpanValues { float packed[kPackedPerThread][kPack], single; };

// A thread's part of a row.
// kStep 1: a lane has adjacent 32-bit words, an odd number, for rows that share a warp.
// kStep kWarpSize: adjacent lanes have adjacent words.
template <int kStep>
struct SpanRow {
    Packed* mine;
    int num_packed, most;  // words of this thread; most of any thread
    int first_col;         // column of the first word
    Element* single;       // null: none
    int single_col;

    // begin: position of the row's first element.
    DEVICE SpanRow(SpanStorage& storage, int begin, const RowThreads& t, int num_cols) {
        Element* elements = reinterpret_cast<Element*>(&storage);
        const int end = begin + num_cols;
        const int first_packed = (begin + kPack - 1) / kPack,
                  packed_of_row = end / kPack - first_packed;
        most = ((num_cols + kPack - 1) / kPack + t.count - 1) >> t.log2;
        if constexpr (kStep == 1) most |= 1;
        const int skipped = t.lane / kStep * kStep * most + t.lane % kStep;
        const int rest = (packed_of_row - skipped + kStep - 1) / kStep;
        num_packed = !t.live() ? 0 : rest < most ? rest : most;
        mine = reinterpret_cast<Packed*>(elements) + first_packed + skipped;
        first_col = (first_packed + skipped) * kPack - begin;
        const bool has_single = kPack == 2 && t.live() &&
                                ((t.lane == 0 && begin % 2 != 0) || (t.lane == 1 && end % 2 != 0));
        single_col = t.lane == 0 ? 0 : num_cols - 1;
        single = has_single ? elements + begin + single_col : nullptr;
    }
    static constexpr int kGroup = kPackedPerThread / 4;  // words per branch
    // Calls body(i), i a compile-time constant, for a thread's 32-bit words and some past the last.
    template <class Body>
    DEVICE void for_packed(Body body) const {
#pragma unroll
        for (int i = 0; i < kPackedPerThread; ++i) {
            if (i % kGroup == 0 && i >= most) break;
            body(i);
        }
    }
    template <class Body>
    DEVICE void for_values(SpanValues& values, Body body) const {
        for_packed([&](int i) {
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(values.packed[i][j]);
        });
        if constexpr (kPack == 2) body(values.single);
    }
    template <class Body>
    DEVICE void for_values_predicated(SpanValues& values, Body body) const {
        for_packed([&](int i) {
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(values.packed[i][j], i < num_packed);
        });
        if constexpr (kPack == 2) body(values.single, single != nullptr);
    }
    DEVICE void add_to(SpanValues& values) const {
        for_packed([&](int i) {
            const Packed found = get(i, 0.0f);
#pragma unroll
            for (int j = 0; j < kPack; ++j) values.packed[i][j] += found[j];
        });
        if (single) values.single += to_float(*single);
    }
    // Calls body(value, element of `columns` in its column).
    template <class T, class Body>
    DEVICE void for_columns(SpanValues& values, const T* columns, Body body) const {
        // 32-bit offsets from a uniform address: few registers, few instructions.
        const char* bytes = reinterpret_cast<const char*>(columns);
        const T* first =
            reinterpret_cast<const T*>(bytes + uint32_t(first_col) * uint32_t(sizeof(T)));
        for_packed([&](int i) {
            T found[kPack] = {};
#pragma unroll
            for (int j = 0; j < kPack; ++j) {
                if (i < num_packed) found[j] = first[i * kStep * kPack + j];
            }
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(values.packed[i][j], to_float(found[j]));
        });
        if (single) body(values.single, to_float(columns[single_col]));
    }
    // This thread's i-th word; `outside` past the last one.
    DEVICE Packed get(int i, float outside) const {
        Packed packed;
        packed.fill(from_float<Element>(outside));
        if (i < num_packed) packed = mine[i * kStep];
        return packed;
    }
    DEVICE void load(SpanValues& values, float outside) const {
        for_packed([&](int i) {
            const Packed found = get(i, outside);
#pragma unroll
            for (int j = 0; j < kPack; ++j) values.packed[i][j] = found[j];
        });
        values.single = single ? to_float(*single) : outside;
    }
    DEVICE void store(const SpanValues& values) const {
        for_packed([&](int i) {
            Packed packed;
            packed.from_floats(values.packed[i]);
            if (i < num_packed) mine[i * kStep] = packed;
        });
        if (single) *single = from_float<Element>(values.single);
    }
};

}  // namespace rows
