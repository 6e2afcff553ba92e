// How sums that blocks have left in memory become those of groups and of whole sequences.
//
// A thread adds up four neighbouring columns of a row, of all nodes in their order.  What each node
// is multiplied by the row's lanes find together and tell each other: no barriers.  Few blocks run
// this, and wait for its code as well as for the numbers: loops are not unrolled much.
// Constants: kRows (of a node), kDim, kMaxChunks, kGroup, kNumThreads.
#include "parts/decode_task.cuh"

// The threads of a block share the quads of so many rows.
constexpr int kQuadsOfRow = kDim / 4;
constexpr int kRowsAtOnce = kNumThreads / kQuadsOfRow;
static_assert(kRowsAtOnce * kQuadsOfRow == kNumThreads, "threads share rows");
struct OwnQuad {
    int row, col;  // row: the first one

    DEVICE OwnQuad()
        : row(int(threadIdx.x) / kQuadsOfRow), col(int(threadIdx.x) % kQuadsOfRow * 4) {}
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

// A row's values in a node, four of each thread, on their way to it.
template <int kValuesAtOnce>
using MergeValues = Bytes<16>[kValuesAtOnce][kNumThreads];

// Sums of nodes that a thread looks after, on their way to it.
constexpr int kRowLanes = kQuadsOfRow < kWarpSize ? kQuadsOfRow : kWarpSize;
constexpr int kGroupsOfLane = (kMaxGroups + kRowLanes - 1) / kRowLanes;
using MergeSums = Bytes<8>[kGroupsOfLane * kGroup][kNumThreads];

// What a row of nodes adds up to: `total` and this thread's four values.
struct MergedRow {
    PartialSum total;
    float values[4];
};

// A row of `count` nodes from `first` on.  Whole warps; threads without a row get nothing.
struct Merge {
    // Of a warp, that have the same row, and the groups that each of them looks after.
    static constexpr int kLanes = kRowLanes, kGroups = kGroupsOfLane;
    static_assert(kGroups <= 2, "the lanes of a row look after all groups");
    const Nodes& nodes;
    int64_t first;
    int count, row, col;
    bool has_row;
    MergeSums& sums;

    // All that a thread asks for it copies by itself: a compiler would let the copies wait for
    // loads, and twice as long for both.
    DEVICE void start_sum(int i, int node) const {
        const bool valid = has_row && node < count;
        copy_async<8>(&sums[i][threadIdx.x], nodes.sum_place(first + (valid ? node : 0), row),
                      valid);
    }
    DEVICE PartialSum sum(int i, int node) const {
        if (!has_row || node >= count) return {-kInfinity, 0.0f};
        return bit_cast<PartialSum>(sums[i][threadIdx.x]);
    }
    // values: of the node from that memory[0] has.
    template <int kValuesAtOnce>
    DEVICE void start_values(MergeValues<kValuesAtOnce>& memory, int begin) const {
        const int end = count - begin < kValuesAtOnce ? count - begin : kValuesAtOnce;
        const float* from = nodes.value(first + begin, row, col);
        Bytes<16>* to = &memory[0][threadIdx.x];
#pragma unroll 1
        for (int i = 0; i < end; i += 4, from += 4 * kRows * kDim, to += 4 * kNumThreads) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i + j < end)
                    copy_async<16>(to + j * kNumThreads, from + j * (kRows * kDim), has_row);
            }
        }
        copy_async_commit();
    }
    template <class Combine>
    DEVICE static float across_row(float value) {
        return MergeFloats<Combine>().across_lanes(value, 1, kLanes);
    }
    // The group that a lane of this row looks after has that number.
    DEVICE static int lane_of(int group) {
        return lane_id() / kLanes * kLanes + (kGroups == 1 ? group : group % kLanes);
    }
    template <class T>
    DEVICE static float of_group(const T (&mine)[kGroups], int group) {
        const float x = kGroups > 1 && group >= kLanes ? mine[kGroups - 1] : mine[0];
        return shuffle(x, lane_of(group));
    }
    // Their weights; returns what they add up to.
    DEVICE PartialSum weigh(const PartialSum (&groups)[kGroups], float (&weights)[kGroups]) const {
        float largest = -kInfinity, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) largest = maximum(largest, groups[i].exponent);
        largest = across_row<Max>(largest);
        const float finite = largest == -kInfinity ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            weights[i] = exp2_approx(groups[i].exponent - finite);
            sum = multiply_add(groups[i].sum, weights[i], sum);
        }
        return {largest, across_row<Sum>(sum)};
    }

    // The nodes are groups.
    template <int kValuesAtOnce>
    DEVICE MergedRow add_groups(MergeValues<kValuesAtOnce>& memory) const {
        const int lane = lane_id() % kLanes;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) start_sum(i, lane + i * kLanes);
        copy_async_commit();
        start_values<kValuesAtOnce>(memory, 0);
        copy_async_wait<1>();
        PartialSum groups[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) groups[i] = sum(i, lane + i * kLanes);
        float weights[kGroups];
        MergedRow result = {weigh(groups, weights), {}};
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kValuesAtOnce) {
            if (begin > 0) start_values<kValuesAtOnce>(memory, begin);
            copy_async_wait<0>();
            const int end = begin + kValuesAtOnce < count ? begin + kValuesAtOnce : count;
#pragma unroll 4
            for (int group = begin; group < end; ++group) {
                const float weight = of_group(weights, group);
                float added[4];
                memcpy(added, &memory[group - begin][threadIdx.x], 16);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    result.values[j] = multiply_add(added[j], weight, result.values[j]);
            }
        }
        return result;
    }

    // The nodes are chunks, the first of which is the first of a group.
    template <int kValuesAtOnce>
    DEVICE MergedRow add_chunks(MergeValues<kValuesAtOnce>& memory) const {
        static_assert(kValuesAtOnce % kGroup == 0, "whole groups at once");
        const int first_chunk_of_lane = lane_id() % kLanes * kGroup;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
            for (int i = 0; i < kGroup; ++i)
                start_sum(g * kGroup + i, first_chunk_of_lane + g * kLanes * kGroup + i);
        }
        copy_async_commit();
        start_values<kValuesAtOnce>(memory, 0);
        copy_async_wait<1>();
        PartialSum groups[kGroups];
        float before[kGroup][kGroups], added[kGroup][kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            groups[g] = {-kInfinity, 0.0f};
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
                const int chunk = first_chunk_of_lane + g * kLanes * kGroup + i;
                const FoldFactors factors = fold_sum(groups[g], sum(g * kGroup + i, chunk));
                before[i][g] = factors.before, added[i][g] = factors.added;
            }
        }
        const bool is_group = count <= kGroup;
        float weights[kGroups];
        MergedRow result = {weigh(groups, weights), {}};
        if (is_group) {
            const float exponent = shuffle(groups[0].exponent, lane_of(0));
            result.total = {exponent, shuffle(groups[0].sum, lane_of(0))};
        }
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kValuesAtOnce) {
            if (begin > 0) start_values<kValuesAtOnce>(memory, begin);
            copy_async_wait<0>();
            const int end = begin + kValuesAtOnce < count ? begin + kValuesAtOnce : count;
#pragma unroll 1
            for (int first_chunk = begin; first_chunk < end; first_chunk += kGroup) {
                const int group = first_chunk / kGroup;
                float sums[4] = {};
#pragma unroll
                for (int i = 0; i < kGroup; ++i) {
                    const FoldFactors factors = {of_group(before[i], group),
                                                 of_group(added[i], group)};
                    if (first_chunk + i >= end) continue;
                    float four[4];
                    memcpy(four, &memory[first_chunk + i - begin][threadIdx.x], 16);
#pragma unroll
                    for (int j = 0; j < 4; ++j) sums[j] = fold_value(sums[j], four[j], factors);
                }
                const float weight = of_group(weights, group);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    result.values[j] =
                        is_group ? sums[j] : multiply_add(sums[j], weight, result.values[j]);
                }
            }
        }
        return result;
    }
};

// The last that happens to a row.
struct RowOutput {
    const DecodeParams& params;
    const DecodeTask& task;
    Element* out;
    float* lse;

    // Four of a row's values from column `col` on, where valid.
    DEVICE void write(bool valid, int row, int col, const PartialSum& total,
                      const float (&sums)[4]) const {
        const OutputRow place(params, task.batch, task.kv_head, task.first_row + row);
        if (lse && col == 0 && valid) lse[place.lse] = log_sum_exp(total);
        if (col >= params.dim_v) return;  // a multiple of 8
        const float factor = normalizer(total.sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Element value = from_float<Element>(sums[j] * factor);
            if (valid) out[place.out + (col + j) * params.out[3]] = value;
        }
    }
};
