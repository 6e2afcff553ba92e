// How sums that blocks have left in memory become those of groups and of whole sequences.
//
// The last block to leave some of them adds them up.  Its threads share the rows' values by four
// neighbouring columns, whoever had them before, and copy those of many chunks or groups to shared
// memory at once: nothing else hides how long that takes.  Loops are not unrolled much: few blocks
// run this, and wait for its code as well.
#include "parts/decode_task.cuh"

constexpr int kThreadsPerRow = kNumThreads / kRows;
static_assert(kThreadsPerRow * kRows == kNumThreads, "threads share rows");

// The row whose exponent and sum this thread has.
struct OwnRow {
    int row, part;

    DEVICE OwnRow()
        : row(int(threadIdx.x) / kThreadsPerRow), part(int(threadIdx.x) % kThreadsPerRow) {}
};

// What sums so far, and those that come to them, are multiplied by.
struct FoldFactors { float before, added; };

// The exponent and sum of a row that gets those of its next chunk.
DEVICE FoldFactors fold_sum(PartialSum& total, const PartialSum& added) {
    const float exponent = maximum(total.exponent, added.exponent);
    const float finite = exponent == -kInfinity ? 0.0f : exponent;
    const FoldFactors factors = {exp2_approx(total.exponent - finite),
                                 exp2_approx(added.exponent - finite)};
    total = {exponent, multiply_add(total.sum, factors.before, added.sum * factors.added)};
    return factors;
}
DEVICE float fold_value(float value, float added, const FoldFactors& factors) {
    const float product = added * factors.added;
    return multiply_add(value, factors.before, product);
}

// The sums of nodes, chunks or groups, then what replaces them: FoldFactors of chunks, weights of
// groups.
constexpr int kMostNodes = kMaxGroups;
union MergeSum {
    PartialSum sum;
    FoldFactors factors;
    float weight;
};
using MergeSums = MergeSum[kMostNodes][kRows];
// Values of nodes, four of each thread, where all stages were.
constexpr int kRoomForValues = kStages * 4 * kTileK * kDim / 16 / kNumThreads;
constexpr int kValuesAtOnce = kRoomForValues < kMostNodes ? kRoomForValues : kMostNodes;
static_assert(kValuesAtOnce > 0, "the stages have room for the values of a node");
using MergeValues = Bytes<16>[kValuesAtOnce][kNumThreads];
// Chunks that are added up at once where a sequence has no more: at most a group of each thread of
// a row.
constexpr int kGroupsAtOnce =
    kThreadsPerRow * kGroup < kMostNodes ? kThreadsPerRow : kMostNodes / kGroup;
constexpr int kChunksAtOnce = kGroupsAtOnce * kGroup;
static_assert(kGroupsAtOnce > 0, "there is room for the chunks of a group");
using GroupWeights = float[kGroupsAtOnce][kRows];

// Where partial results lie: of every node, a chunk or group, the rows' values and their sums.
struct Nodes {
    float* values;
    PartialSum* sums;

    DEVICE Nodes(const DecodeParams& params, void* memory)
        : values(static_cast<float*>(memory)),
          sums(reinterpret_cast<PartialSum*>(values + params.num_nodes * (kRows * kDim))) {}
    DEVICE float* value(int64_t node, int row, int col) const {
        return values + (node * kRows + row) * kDim + col;
    }
    DEVICE PartialSum* sum_place(int64_t node, int row) const { return sums + node * kRows + row; }
    DEVICE void set_sum(int64_t node, int row, const PartialSum& total) const {
        store_vector<8>(sum_place(node, row), bit_cast<Bytes<8>>(total));
    }
};

// Whether this is the last of `count` blocks; then what all of them have stored is there to be
// read.
DEVICE bool is_last(int& told, uint32_t* counter, int count) {
    sync_block();  // what this block's threads have stored is there
    if (threadIdx.x == 0) {
        const bool last = atomic_add_acq_rel(counter, 1) == uint32_t(count - 1);
        if (last) *counter = 0;
        told = last;
    }
    sync_block();
    return told;
}

// `count` nodes from `first` on: chunks, the first of which is the first of a group, or groups.
struct Merge {
    static constexpr int kQuadsOfRow = kDim / 4;
    static constexpr int kStep = kValuesAtOnce < 4 ? kValuesAtOnce : 4;  // nodes
    static constexpr int kAhead = kValuesAtOnce / kStep;                 // steps
    const Nodes& nodes;
    int64_t first;
    int count, num_rows;
    MergeSums& sums;
    MergeValues& values;

    // sums = those of the nodes.  All threads; then the thread's copies, and a barrier.
    DEVICE void start_sums() const {
#pragma unroll 1
        for (int i = int(threadIdx.x); i < count * kRows; i += kNumThreads) {
            const int node = i / kRows, row = i % kRows;
            copy_async<8>(&sums[node][row], nodes.sum_place(first + node, row), row < num_rows);
        }
        copy_async_commit();
    }
    // This thread's of the next nodes from `node` on.
    DEVICE void start_values(int quad, int node) const {
        const float* from = nodes.value(first + node, 0, quad * 4);
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
            if (node + i < count)
                copy_async<16>(&values[node % (kAhead * kStep) + i][threadIdx.x],
                               from + i * (kRows * kDim));
        }
        copy_async_commit();
    }
    DEVICE void start_values(int quad) const {
#pragma unroll 1
        for (int node = 0; node < kAhead * kStep; node += kStep) start_values(quad, node);
    }
    // Of chunks: factors for sums, the weights of their groups.  Returns the row's sum; of a single
    // group the first of the row's threads has it.
    DEVICE PartialSum fold_sums(GroupWeights& weights) const {
        const OwnRow own;
        const int begin = own.part * kGroup, end = begin + kGroup < count ? begin + kGroup : count;
        PartialSum group = {-kInfinity, 0.0f};
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
            MergeSum& chunk = sums[i][own.row];
            chunk.factors = fold_sum(group, chunk.sum);
        }
        if (count <= kGroup) return group;
        const float largest = across_row<Max>(group.exponent);
        const float weight = weight_of(group.exponent, largest);
        if (begin < count) weights[own.part][own.row] = weight;
        return {largest, across_row<Sum>(multiply_add(group.sum, weight, 0.0f))};
    }
    // Of groups: weights for sums.  Returns the row's sum.
    DEVICE static PartialSum add_sums(MergeSums& sums, int count) {
        const OwnRow own;
        float largest = -kInfinity, sum = 0.0f;
#pragma unroll 1
        for (int i = own.part; i < count; i += kThreadsPerRow)
            largest = maximum(largest, sums[i][own.row].sum.exponent);
        largest = across_row<Max>(largest);
#pragma unroll 1
        for (int i = own.part; i < count; i += kThreadsPerRow) {
            MergeSum& group = sums[i][own.row];
            const float weight = weight_of(group.sum.exponent, largest);
            sum = multiply_add(group.sum.sum, weight, sum);
            group.weight = weight;
        }
        return {largest, across_row<Sum>(sum)};
    }
    template <class Combine>
    DEVICE static float across_row(float value) {
        return MergeFloats<Combine>().across_lanes(value, 1, kThreadsPerRow);
    }
    DEVICE static float weight_of(float exponent, float largest) {
        return exp2_approx(exponent - (largest == -kInfinity ? 0.0f : largest));
    }

    // All threads.  make_factors() makes what values are multiplied by of the sums; give(row, col,
    // four values).  weights: of chunks' groups.
    template <bool kOfChunks, class MakeFactors, class Give>
    DEVICE void run(const GroupWeights& weights, const MakeFactors& make_factors,
                    const Give& give) const {
        start_sums();
        const int end = num_rows * kQuadsOfRow;
        int quad = int(threadIdx.x);
        start_values(quad < end ? quad : 0);  // all threads, as all wait for the sums before
        copy_async_wait<kAhead>();
        sync_block();
        make_factors();
        sync_block();
#pragma unroll 1
        for (; quad < end; quad += kNumThreads) {
            const int row = quad / kQuadsOfRow;
            if (quad >= kNumThreads) start_values(quad);
            float group[4] = {}, total[4] = {};
#pragma unroll 1
            for (int first_node = 0; first_node < count; first_node += kStep) {
                copy_async_wait<kAhead - 1>();
#pragma unroll
                for (int i = 0; i < kStep; ++i) {
                    const int node = first_node + i;
                    if (node >= count) break;
                    float added[4];
                    memcpy(added, &values[node % (kAhead * kStep)][threadIdx.x], 16);
                    add(node, row, added, group, total, weights, kOfChunks);
                }
                start_values(quad, first_node + kAhead * kStep);
            }
            give(row, quad % kQuadsOfRow * 4, total);
        }
    }
    // A node's values to those of its group, or a whole group's to the sequence's.
    DEVICE void add(int node, int row, const float (&added)[4], float (&group)[4],
                    float (&total)[4], const GroupWeights& weights, bool of_chunks) const {
        const MergeSum& what = sums[node][row];
        if (!of_chunks) {
#pragma unroll
            for (int j = 0; j < 4; ++j) total[j] = multiply_add(added[j], what.weight, total[j]);
            return;
        }
        const FoldFactors factors = what.factors;
#pragma unroll
        for (int j = 0; j < 4; ++j) group[j] = fold_value(group[j], added[j], factors);
        if (node % kGroup < kGroup - 1 && node < count - 1) return;
        const float weight = count > kGroup ? weights[node / kGroup][row] : 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            total[j] = count > kGroup ? multiply_add(group[j], weight, total[j]) : group[j];
            group[j] = 0.0f;
        }
    }
};
