// Merges the partial results that blocks store in memory: chunks into groups, groups into rows.
//
// A thread adds four adjacent columns of a row, over all partial results in their order.  The lanes
// of a row compute its factors together and exchange them by shuffles, without barriers.  Few
// blocks run this code, and instruction fetch is part of its latency, so loops are unrolled little.
// Constants: kTileM, kDim, kMaxChunks, kChunksPerGroup, kNumThreads.
#pragma once
#include "attention/decode/work_tile.cuh"

// A quad is four adjacent columns of a row.  In a pass the threads cover kRowsPerPass rows.
constexpr int kQuadsPerRow = kDim / 4;
constexpr int kRowsPerPass = kNumThreads / kQuadsPerRow;
static_assert(kRowsPerPass * kQuadsPerRow == kNumThreads, "rows are covered by whole threads");
struct ThreadQuad {
    int row, col;  // row: in the first pass

    DEVICE ThreadQuad()
        : row(int(threadIdx.x) / kQuadsPerRow), col(int(threadIdx.x) % kQuadsPerRow * 4) {}
};

// Factors of a fold: for the values accumulated before, and for the added values.
struct FoldFactors { float before, added; };

// Folds the next chunk's state of a row into `state`.
DEVICE FoldFactors fold_state(SoftmaxState& state, const SoftmaxState& added) {
    const float exponent = maximum(state.exponent, added.exponent);
    const float finite = exponent == -kInfinity ? 0.0f : exponent;
    const FoldFactors factors = {exp2_approx(state.exponent - finite),
                                 exp2_approx(added.exponent - finite)};
    state = {exponent, multiply_add(state.sum, factors.before, added.sum * factors.added)};
    return factors;
}
DEVICE float fold_value(float value, float added, const FoldFactors& factors) {
    const float product = added * factors.added;
    return multiply_add(value, factors.before, product);
}

// Partial results in memory: values and states of a row tile, per chunk or group.
struct Partials {
    float* values;
    SoftmaxState* states;

    DEVICE Partials(const DecodeParams& params, void* memory)
        : values(static_cast<float*>(memory)),
          states(reinterpret_cast<SoftmaxState*>(values + params.num_partials * (kTileM * kDim))) {}
    DEVICE float* value(int64_t partial, int row, int col) const {
        return values + (partial * kTileM + row) * kDim + col;
    }
    DEVICE SoftmaxState* state(int64_t partial, int row) const {
        return states + partial * kTileM + row;
    }
    DEVICE void set_state(int64_t partial, int row, const SoftmaxState& x) const {
        store_vector<8>(state(partial, row), bit_cast<Bytes<8>>(x));
    }
};

// Returns whether this is the last of `count` blocks to arrive at the counter.  The last block sees
// the stores of all of them, and resets the counter to 0.  flag: in shared memory.
DEVICE bool is_last_block(int& flag, uint32_t* counter, int count) {
    sync_block();  // all threads of this block have stored
    if (threadIdx.x == 0) {
        const bool last = atomic_add_acq_rel(counter, 1) == uint32_t(count - 1);
        if (last) *counter = 0;
        flag = last;
    }
    sync_block();
    return flag;
}

// A quad of kBatch partial results per thread, in shared memory.
template <int kBatch>
using MergeValues = Bytes<16>[kBatch][kNumThreads];

// The lanes of a row share its groups.  MergeStates: states of a lane's groups, in shared memory.
constexpr int kLanesPerRow = kQuadsPerRow < kWarpSize ? kQuadsPerRow : kWarpSize;
constexpr int kGroupsPerLane = (kMaxGroups + kLanesPerRow - 1) / kLanesPerRow;
using MergeStates = Bytes<8>[kGroupsPerLane * kChunksPerGroup][kNumThreads];

// The merged state of a row, and this thread's quad.
struct MergedRow {
    SoftmaxState state;
    float values[4];
};

// Merges a row of `count` partial results from `first` on.  Called by whole warps; threads without
// a row (has_row) only participate in shuffles.
struct RowMerge {
    static constexpr int kLanes = kLanesPerRow, kGroups = kGroupsPerLane;
    static_assert(kGroups <= 2, "the lanes of a row share all groups");
    const Partials& partials;
    int64_t first;
    int count, row, col;
    bool has_row;
    MergeStates& states;

    // Async copies read everything: a compiler would order the copies of values after plain loads
    // of states, at twice the latency.
    DEVICE void copy_state(int i, int partial) const {
        const bool valid = has_row && partial < count;
        copy_async<8>(&states[i][threadIdx.x], partials.state(first + (valid ? partial : 0), row),
                      valid);
    }
    DEVICE SoftmaxState state(int i, int partial) const {
        if (!has_row || partial >= count) return {-kInfinity, 0.0f};
        return bit_cast<SoftmaxState>(states[i][threadIdx.x]);
    }
    // Copies this thread's quads of the partial results from `begin` on.
    template <int kBatch>
    DEVICE void copy_values(MergeValues<kBatch>& memory, int begin) const {
        const int end = count - begin < kBatch ? count - begin : kBatch;
        const float* from = partials.value(first + begin, row, col);
        Bytes<16>* to = &memory[0][threadIdx.x];
#pragma unroll 1
        for (int i = 0; i < end; i += 4, from += 4 * kTileM * kDim, to += 4 * kNumThreads) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i + j < end)
                    copy_async<16>(to + j * kNumThreads, from + j * (kTileM * kDim), has_row);
            }
        }
        copy_async_commit();
    }
    template <class Combine>
    DEVICE static float reduce_row(float value) {
        return MergeFloats<Combine>().across_lanes(value, 1, kLanes);
    }
    // The lane of this row that has the group.
    DEVICE static int lane_of(int group) {
        return lane_id() / kLanes * kLanes + (kGroups == 1 ? group : group % kLanes);
    }
    template <class T>
    DEVICE static float broadcast(const T (&mine)[kGroups], int group) {
        const float x = kGroups > 1 && group >= kLanes ? mine[kGroups - 1] : mine[0];
        return shuffle(x, lane_of(group));
    }
    // Computes the factors of this lane's groups.  Returns the merged state of all groups of the
    // row.
    DEVICE SoftmaxState merge_states(const SoftmaxState (&groups)[kGroups],
                                     float (&factors)[kGroups]) const {
        float largest = -kInfinity, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) largest = maximum(largest, groups[i].exponent);
        largest = reduce_row<Max>(largest);
        const float finite = largest == -kInfinity ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            factors[i] = exp2_approx(groups[i].exponent - finite);
            sum = multiply_add(groups[i].sum, factors[i], sum);
        }
        return {largest, reduce_row<Sum>(sum)};
    }

    // Merges partial results that are groups.
    template <int kBatch>
    DEVICE MergedRow merge_groups(MergeValues<kBatch>& memory) const {
        const int lane = lane_id() % kLanes;
#pragma unroll
        for (int i = 0; i < kGroups; ++i) copy_state(i, lane + i * kLanes);
        copy_async_commit();
        copy_values<kBatch>(memory, 0);
        copy_async_wait<1>();
        SoftmaxState groups[kGroups];
#pragma unroll
        for (int i = 0; i < kGroups; ++i) groups[i] = state(i, lane + i * kLanes);
        float factors[kGroups];
        MergedRow result = {merge_states(groups, factors), {}};
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kBatch) {
            if (begin > 0) copy_values<kBatch>(memory, begin);
            copy_async_wait<0>();
            const int end = begin + kBatch < count ? begin + kBatch : count;
#pragma unroll 4
            for (int group = begin; group < end; ++group) {
                const float factor = broadcast(factors, group);
                float added[4];
                memcpy(added, &memory[group - begin][threadIdx.x], 16);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    result.values[j] = multiply_add(added[j], factor, result.values[j]);
            }
        }
        return result;
    }

    // Merges partial results that are chunks; the first one is the first chunk of a group.
    template <int kBatch>
    DEVICE MergedRow merge_chunks(MergeValues<kBatch>& memory) const {
        static_assert(kBatch % kChunksPerGroup == 0, "a batch holds whole groups");
        const int lane_chunk = lane_id() % kLanes * kChunksPerGroup;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
            for (int i = 0; i < kChunksPerGroup; ++i) {
                copy_state(g * kChunksPerGroup + i, lane_chunk + g * kLanes * kChunksPerGroup + i);
            }
        }
        copy_async_commit();
        copy_values<kBatch>(memory, 0);
        copy_async_wait<1>();
        SoftmaxState groups[kGroups];
        float before[kChunksPerGroup][kGroups], added[kChunksPerGroup][kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            groups[g] = {-kInfinity, 0.0f};
#pragma unroll
            for (int i = 0; i < kChunksPerGroup; ++i) {
                const int chunk = lane_chunk + g * kLanes * kChunksPerGroup + i;
                const FoldFactors factors =
                    fold_state(groups[g], state(g * kChunksPerGroup + i, chunk));
                before[i][g] = factors.before, added[i][g] = factors.added;
            }
        }
        const bool is_group = count <= kChunksPerGroup;
        float group_factors[kGroups];
        MergedRow result = {merge_states(groups, group_factors), {}};
        if (is_group) {
            const float exponent = shuffle(groups[0].exponent, lane_of(0));
            result.state = {exponent, shuffle(groups[0].sum, lane_of(0))};
        }
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kBatch) {
            if (begin > 0) copy_values<kBatch>(memory, begin);
            copy_async_wait<0>();
            const int end = begin + kBatch < count ? begin + kBatch : count;
#pragma unroll 1
            for (int first_chunk = begin; first_chunk < end; first_chunk += kChunksPerGroup) {
                const int group = first_chunk / kChunksPerGroup;
                float values[4] = {};
#pragma unroll
                for (int i = 0; i < kChunksPerGroup; ++i) {
                    const FoldFactors factors = {broadcast(before[i], group),
                                                 broadcast(added[i], group)};
                    if (first_chunk + i >= end) continue;
                    float quad[4];
                    memcpy(quad, &memory[first_chunk + i - begin][threadIdx.x], 16);
#pragma unroll
                    for (int j = 0; j < 4; ++j) values[j] = fold_value(values[j], quad[j], factors);
                }
                const float factor = broadcast(group_factors, group);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    result.values[j] =
                        is_group ? values[j] : multiply_add(values[j], factor, result.values[j]);
                }
            }
        }
        return result;
    }
};

// Normalises and writes rows of a work tile.
struct RowWriter {
    const DecodeParams& params;
    const WorkTile& work;
    Element* out;
    float* lse;
    float scale;  // value scale of an 8-bit cache

    // Writes a quad from column `col` on, if valid.
    DEVICE void write(bool valid, int row, int col, const SoftmaxState& state,
                      const float (&values)[4]) const {
        const OutputOffsets offsets(params, work.batch, work.kv_head, work.first_row + row);
        if (lse && col == 0 && valid) lse[offsets.lse] = log_sum_exp(state);
        if (col >= params.dim_v) return;  // Dv is a multiple of 8
        const float factor = normalizer(state.sum, scale);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Element value = from_float<Element>(values[j] * factor);
            if (valid) out[offsets.out + (col + j) * params.out_strides[3]] = value;
        }
    }
};
