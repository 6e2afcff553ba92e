// Rows that lie side by side, of any length that the threads of a block hold.
//
// A block's rows are one stretch of memory.  It comes to shared memory and leaves it by whole
// vectors but for the elements at its two ends, wherever rows begin in it; threads take a row from
// there into registers, and put what comes of it in its place.  How many threads share a row the
// launch says: all lengths are done by the same code.
//
// Threads move words of shared memory.  Of 16 bits, a row's first and last element may share
// theirs with other rows: one thread has the first of them besides its words, another one the last.
// Constants: those of parts/row.cuh, kThreadsPerRow the block's; a thread holds
// kVectorsPerThread * kVectorWidth elements and one word.
#include "parts/row.cuh"

static_assert(kThreadsPerRow == kNumThreads && kVectorWidth > 1 && !kPlain && !kLanesAcrossRows &&
                  !kSplitRows && kClusterSize == 1,
              "rows of one block");
constexpr int kPack = 4 / int(sizeof(Element));
using Word = Vector<Element, kPack>;
constexpr int kWords = kVectorsPerThread * kVectorWidth / kPack + 1;
static_assert(kWords % 2 == 1, "lanes with so many neighbouring words differ in their banks");

// The block's rows, and the threads of one of them: 2^log2.
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

    // Of this warp's lanes on the row.
    template <class Combine>
    DEVICE float combine_in_warp(float value, Combine combine) const {
        const int lanes = count < kWarpSize ? count : kWarpSize;
        for (int bit = 1; bit < lanes; bit *= 2) value = combine(value, shuffle_xor(value, bit));
        return value;
    }
    // Of the row's warps; merge.across_lanes as in parts/max_sum.cuh.  kExchange counts a kernel's
    // calls from 0.
    template <int kExchange, class Statistic, class Merge>
    DEVICE Statistic merge_across_warps(const Statistic& mine, Merge merge) const {
        if (count <= kWarpSize) return mine;
        SHARED(Statistic, parts, [kNumThreads / kWarpSize]);
        if (lane_id() == 0) parts[threadIdx.x / kWarpSize] = mine;
        sync_block();
        const int warps = count / kWarpSize;
        return merge.across_lanes(parts[row_in_block * warps + lane_id() % warps], 1, warps);
    }
};

// The elements of a block's rows; positions count from the first one's vector.
struct Stretch {
    using Place = Vector<Element, kVectorWidth>;
    int begin, end;
    int64_t first;  // of position 0, from the array's beginning

    DEVICE static Stretch of(const Element* x, const RowThreads& t, int num_cols) {
        Stretch s;
        s.first = t.first_row * num_cols;
        s.begin = int(reinterpret_cast<uintptr_t>(x + s.first) / sizeof(Element) % kVectorWidth);
        s.end = s.begin + t.num_rows * num_cols;
        s.first -= s.begin;
        return s;
    }
    // loaded() comes before the first use.
    DEVICE void load(Place* tile, const Element* x, LoadPolicy policy) const {
        const Element* from = x + first;
        for (int i = first_whole() + int(threadIdx.x); i < end_of_whole(); i += kNumThreads) {
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
    // A barrier comes before.
    DEVICE void store(const Place* tile, Element* y, StorePolicy policy) const {
        Element* to = y + first;
        for (int i = first_whole() + int(threadIdx.x); i < end_of_whole(); i += kNumThreads) {
            tile[i].store(to + i * kVectorWidth, policy);
        }
        const int position = at_end();
        if (position >= 0) to[position] = reinterpret_cast<const Element*>(tile)[position];
    }

  private:
    DEVICE int first_whole() const { return begin > 0; }
    DEVICE int end_of_whole() const { return end / kVectorWidth; }
    // The position outside of whole vectors that this thread moves; negative: none.
    DEVICE int at_end() const {
        const int thread = int(threadIdx.x);
        if (thread < kVectorWidth) {
            return first_whole() && thread >= begin && thread < end ? thread : -1;
        }
        const int position = (end_of_whole() - 1) * kVectorWidth + thread;
        const bool there = thread < 2 * kVectorWidth && end_of_whole() >= first_whole();
        return there && position < end ? position : -1;
    }
};

// A block's rows in shared memory.
struct StretchStorage { Stretch::Place places[kNumThreads * kVectorsPerThread + 1]; };

// What a thread has of a row, as numbers.
struct RowNumbers { float words[kWords][kPack], single; };

// This thread's part of a row.
// kStep 1: lanes have neighbouring words each, an odd number of them: for rows that share a warp.
// kWarpSize: neighbouring lanes have neighbouring words.
template <int kStep>
struct RowPart {
    Word* words;
    int num_words, most;  // of this thread, of any
    int first_col;        // of the first word
    Element* single;      // null: none
    int single_col;

    // The row begins at `begin`.
    DEVICE RowPart(StretchStorage& storage, int begin, const RowThreads& t, int num_cols) {
        Element* elements = reinterpret_cast<Element*>(&storage);
        const int end = begin + num_cols;
        const int first_word = (begin + kPack - 1) / kPack, words_of_row = end / kPack - first_word;
        most = ((num_cols + kPack - 1) / kPack + t.count - 1) >> t.log2;
        if constexpr (kStep == 1) most |= 1;
        const int skipped = t.lane / kStep * kStep * most + t.lane % kStep;
        const int rest = (words_of_row - skipped + kStep - 1) / kStep;
        num_words = !t.live() ? 0 : rest < most ? rest : most;
        words = reinterpret_cast<Word*>(elements) + first_word + skipped;
        first_col = (first_word + skipped) * kPack - begin;
        const bool has_single = kPack == 2 && t.live() &&
                                ((t.lane == 0 && begin % 2 != 0) || (t.lane == 1 && end % 2 != 0));
        single_col = t.lane == 0 ? 0 : num_cols - 1;
        single = has_single ? elements + begin + single_col : nullptr;
    }
    static constexpr int kGroup = kWords / 4;  // asked for together whether a thread has them
    // body(i), i a constant, for all of a thread's words, and some that it does not have.
    template <class Body>
    DEVICE void for_words(Body body) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if (i % kGroup == 0 && i >= most) break;
            body(i);
        }
    }
    template <class Body>
    DEVICE void for_numbers(RowNumbers& numbers, Body body) const {
        for_words([&](int i) {
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(numbers.words[i][j]);
        });
        if constexpr (kPack == 2) body(numbers.single);
    }
    template <class Body>
    DEVICE void for_numbers_there(RowNumbers& numbers, Body body) const {
        for_words([&](int i) {
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(numbers.words[i][j], i < num_words);
        });
        if constexpr (kPack == 2) body(numbers.single, single != nullptr);
    }
    DEVICE void add_to(RowNumbers& numbers) const {
        for_words([&](int i) {
            const Word found = word(i, 0.0f);
#pragma unroll
            for (int j = 0; j < kPack; ++j) numbers.words[i][j] += found[j];
        });
        if (single) numbers.single += to_float(*single);
    }
    // body(number, what `columns` has for its column).
    template <class T, class Body>
    DEVICE void for_columns(RowNumbers& numbers, const T* columns, Body body) const {
        // 32 bits beside an address that all threads share: few registers, few instructions.
        const char* bytes = reinterpret_cast<const char*>(columns);
        const T* first =
            reinterpret_cast<const T*>(bytes + uint32_t(first_col) * uint32_t(sizeof(T)));
        for_words([&](int i) {
            T found[kPack] = {};
#pragma unroll
            for (int j = 0; j < kPack; ++j) {
                if (i < num_words) found[j] = first[i * kStep * kPack + j];
            }
#pragma unroll
            for (int j = 0; j < kPack; ++j) body(numbers.words[i][j], to_float(found[j]));
        });
        if (single) body(numbers.single, to_float(columns[single_col]));
    }
    // The word that is this thread's number i; of `outside` if there is none.
    DEVICE Word word(int i, float outside) const {
        Word word;
        word.fill(from_float<Element>(outside));
        if (i < num_words) word = words[i * kStep];
        return word;
    }
    DEVICE void load(RowNumbers& numbers, float outside) const {
        for_words([&](int i) {
            const Word found = word(i, outside);
#pragma unroll
            for (int j = 0; j < kPack; ++j) numbers.words[i][j] = found[j];
        });
        numbers.single = single ? to_float(*single) : outside;
    }
    DEVICE void store(const RowNumbers& numbers) const {
        for_words([&](int i) {
            Word word;
            word.from_floats(numbers.words[i]);
            if (i < num_words) words[i * kStep] = word;
        });
        if (single) *single = from_float<Element>(numbers.single);
    }
};
