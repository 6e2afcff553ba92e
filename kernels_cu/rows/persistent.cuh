// Persistent, warp-specialised rows: a block or cluster processes rows one after another.  With a
// block per row, the weights would be read from L2 for every row, and nothing would be in flight
// while a block starts and ends.
//
// Warps have roles, so that no step of a row waits for another row:
//   producer   loads tiles of rows into the stages of a pipeline by bulk copies; the first block's
//              producer publishes the rows to all blocks
//   reducers   kThreadsPerRow / 2 threads, compute a row's statistics as its tiles arrive; one of
//              their warps sends the block's statistic to all blocks of the cluster
//   merger     merges the statistics of all blocks for the consumers
//   consumers  kThreadsPerRow threads, write results, with weights and biases in registers
// The other threads are idle.
//
// A block owns the same kThreadsPerRow * kVectorsPerThread adjacent vectors of every row, its
// slice; the blocks of a cluster own different slices.  A stage holds one vector per consumer.
// Constants: Element and those of rows/tile.cuh, with kEven; kNumThreads = 1.5 * kThreadsPerRow +
// kOtherThreads.
#pragma once
#include "pipeline/tma_pipeline.cuh"
#include "rows/reduce.cuh"

namespace rows {

static_assert(kEven, "rows without options");

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kMaxStages = 32;
constexpr int kConsumers = kThreadsPerRow, kReducers = kThreadsPerRow / 2, kOtherThreads = 128;
constexpr int kReducerWarps = kReducers / kWarpSize;
static_assert(kNumThreads == kConsumers + kReducers + kOtherThreads, "threads for all roles");
static_assert(kReducers % kWarpSize == 0, "whole warps");

enum Role { kConsumer, kReducer, kProducer, kMerger, kIdle };
DEVICE Role role_of_warp() {
    const int thread = int(threadIdx.x);
    if (thread < kConsumers) return kConsumer;
    if (thread < kConsumers + kReducers) return kReducer;
    const int warp = (thread - (kConsumers + kReducers)) / kWarpSize;
    return warp == 0 ? kProducer : warp == 1 ? kMerger : kIdle;
}

// One stage: a vector per consumer.
struct StageTile { RowVector vectors[kConsumers]; };

// This block's vectors of a row: `count` from vector `first` on.
struct Slice {
    int first, count;

    DEVICE static Slice of_rank(int64_t num_cols, int rank) {
        constexpr int kMost = kConsumers * kVectorsPerThread;
        Slice slice{rank * kMost, 0};
        const int rest = int(num_cols / kVectorWidth) - slice.first;
        slice.count = rest < 0 ? 0 : rest < kMost ? rest : kMost;
        return slice;
    }
    DEVICE static Slice here(int64_t num_cols) {
        int rank = 0;
        if constexpr (kClusterSize > 1) rank = cluster_rank();
        return of_rank(num_cols, rank);
    }
    // Whether tile i has vector `vector`.
    DEVICE bool holds(int i, int vector) const { return i * kConsumers + vector < count; }
    // Column of the first element of vector `vector` in tile i.
    DEVICE int position(int i, int vector) const {
        return (first + i * kConsumers + vector) * kVectorWidth;
    }
    // Number of vectors in tile i.
    DEVICE int vectors(int i) const {
        const int rest = count - i * kConsumers;
        return rest < 0 ? 0 : rest < kConsumers ? rest : kConsumers;
    }
};

// Keeps a loop-invariant vector packed: unpacked it takes twice the registers.
DEVICE void keep_packed(RowVector& vector) {
#pragma unroll
    for (auto& access : vector.bytes) {
#pragma unroll
        for (uint32_t& word : access.words) word = uint32_t(opaque(int(word)));
    }
}

// As many stages as fit shared memory beside the other blocks of the SM.
using StageCount = pipeline::LaunchStageCount<kMaxStages>;
using TilePipeline = pipeline::TmaPipelineOf<StageCount, kWarpSize, kConsumers / kWarpSize>;
using PipelineState = TilePipeline::State;

// Messages about a row are in the slot of its iteration.  A slot is reused kSlots iterations later:
// a pipeline holds up to kMaxRows rows, which bounds the distance between blocks, and between
// roles.
constexpr int kSlots = 16, kMaxRows = 6;
static_assert(kSlots > 2 * kMaxRows + 3, "blocks may be kMaxRows rows apart, and a block's roles");
DEVICE int slot_of(int iteration) { return iteration % kSlots; }
DEVICE int phase_of(int iteration) { return iteration / kSlots % 2; }

// All barriers, initialised at kernel start.  `tiles` has one per stage, the others one per slot.
//   tiles         stages are full and empty
//   scheduled     the row is known
//   in_block      the reducer warps' statistics have been written
//   exchanged     the blocks' statistics have arrived
//   finished      the merger's message has been written
struct PersistentBarriers {
    TilePipeline* tiles;
    Barrier *scheduled, *in_block, *exchanged, *finished;

    DEVICE static PersistentBarriers make(const StageCount& count) {
        SHARED(TilePipeline, tiles, [1]);
        SHARED(Barrier, scheduled, [kSlots]);
        SHARED(Barrier, in_block, [kSlots]);
        SHARED(Barrier, exchanged, [kSlots]);
        SHARED(Barrier, finished, [kSlots]);
        if (threadIdx.x == 0) {
            tiles->init(count);
            for (int i = 0; i < kSlots; ++i) {
                scheduled[i].init(1);
                in_block[i].init(kReducerWarps);
                exchanged[i].init(1);
                finished[i].init(1);
            }
            fence_barrier_init();
        }
        if constexpr (kClusterSize > 1) {
            // All blocks must have started before one writes into another's shared memory.
            cluster_arrive_relaxed();
            cluster_wait();
        } else {
            sync_block();
        }
        return {tiles, scheduled, in_block, exchanged, finished};
    }
};

// Pipeline of the rows of kArrays arrays.  A stage has a tile of x, then one of the other array.
template <int kArrays>
struct RowPipeline {
    StageTile* tiles;
    int* rows;  // per slot; -1 after the last row
    const PersistentBarriers& barriers;
    Slice slice;
    StageCount count;

    DEVICE static RowPipeline make(StageTile* tiles, const PersistentBarriers& barriers,
                                   const Slice& slice, const StageCount& count) {
        SHARED(int, rows, [kSlots]);
        return {tiles, rows, barriers, slice, count};
    }
    DEVICE PipelineState begin() const { return PipelineState(count); }
    // Called by the first block's producer: publishes the row of `iteration`.
    DEVICE void publish(int iteration, int row) const {
        const int slot = slot_of(iteration);
        if constexpr (kClusterSize > 1) {
            for (int rank = 0; rank < kClusterSize; ++rank) {
                store_async(&rows[slot], row, barriers.scheduled[slot], rank);
            }
        } else {
            rows[slot] = row;
            barriers.scheduled[slot].arrive();
        }
    }
    // Called by the producer: expects the bytes of the published row's index.
    DEVICE void expect_row(int iteration) const {
        if constexpr (kClusterSize > 1) {
            barriers.scheduled[slot_of(iteration)].arrive_expect_tx(int(sizeof(int)));
        }
    }
    // Waits until the row of `iteration` is published, and returns it.
    DEVICE int row(int iteration) const {
        barriers.scheduled[slot_of(iteration)].wait(phase_of(iteration));
        return rows[slot_of(iteration)];
    }
    // Called by the producer: loads the next row.
    DEVICE void load(PipelineState& at, const Element* const (&from)[kArrays],
                     LoadPolicy policy) const {
#pragma unroll 1
        for (int i = 0; i < kVectorsPerThread; ++i, at.advance()) {
            barriers.tiles->producer_acquire(at);
            Barrier& full = barriers.tiles->full[at.stage];
            const int bytes = slice.vectors(i) * int(sizeof(RowVector));
            full.arrive_expect_tx(kArrays * bytes);
            if (bytes == 0) continue;
#pragma unroll
            for (int j = 0; j < kArrays; ++j) {
                StageTile* to = &tiles[at.stage * kArrays + j];
                bulk_load(to, from[j] + slice.position(i, 0), bytes, full, policy);
            }
        }
    }
    DEVICE void wait(const PipelineState& at) const { barriers.tiles->consumer_wait(at); }
    // Called by each consumer warp after its last read of a stage.
    DEVICE void release(const PipelineState& at) const {
        barriers.tiles->consumer_release(at.stage);
    }
    // A vector of a full stage.
    DEVICE const RowVector& get(const PipelineState& at, int array, int vector) const {
        return tiles[at.stage * kArrays + array].vectors[vector];
    }
};

// Dynamic scheduler: a cluster (or block) takes two rows at first, then one at a time from an
// atomic counter, for load balance.  Used by the first block's producer, which waits for the
// counter while its pipeline is full.
template <class Pipeline>
struct DynamicScheduler {
    static constexpr int kPrefetchedRows = 2;  // iterations published in advance
    const Pipeline& pipeline;
    uint32_t* counter;  // 0 before and after the launch
    const int64_t& num_rows;
    bool ended;

    DEVICE static int64_t groups() { return int64_t(gridDim.x) / kClusterSize; }
    DEVICE void publish(int iteration, int64_t row) {
        ended = row >= num_rows;
        pipeline.publish(iteration, ended ? -1 : int(row));
    }
    DEVICE void start() {
        for (int iteration = 0; iteration < kPrefetchedRows && !ended; ++iteration) {
            publish(iteration, int64_t(blockIdx.x) / kClusterSize + iteration * groups());
        }
    }
    // Called when the row of `iteration` has been loaded.
    DEVICE void advance(int iteration) {
        if (ended) return;
        // A cluster that started with two rows increments until no row is left: `asked` increments
        // in all, of which the last one resets the counter.
        const int64_t asked = num_rows - (kPrefetchedRows - 1) * groups();
        const uint32_t taken = atomic_add(counter, 1u);
        if (taken + 1 == uint32_t(asked)) atomic_add(counter, 0u - uint32_t(asked));
        publish(iteration + kPrefetchedRows, kPrefetchedRows * groups() + taken);
    }
};

// One reducer warp, in rotation, merges the reducer warps' statistics and sends the block's
// statistic to the mergers of all blocks.
template <class Statistic>
struct Exchange {
    Statistic (*of_warps)[kReducerWarps];
    Statistic (*of_blocks)[kClusterSize];
    const PersistentBarriers& barriers;

    DEVICE static Exchange make(const PersistentBarriers& barriers) {
        SHARED(Statistic, of_warps, [kSlots][kReducerWarps]);
        SHARED(Statistic, of_blocks, [kSlots][kClusterSize]);
        return {of_warps, of_blocks, barriers};
    }
    DEVICE static int reducer_warp() { return (int(threadIdx.x) - kConsumers) / kWarpSize; }
    // Called by all reducers.  merge_warps(partials) merges kReducerWarps partials, in every lane.
    template <class Merge>
    DEVICE void send(int iteration, const Statistic& of_warp, Merge merge_warps) const {
        const int slot = slot_of(iteration);
        sync_warp();  // all lanes have read their tiles, which may then be overwritten
        if (lane_id() == 0) {
            of_warps[slot][reducer_warp()] = of_warp;
            barriers.in_block[slot].arrive();
        }
        if (reducer_warp() != iteration % kReducerWarps) return;
        barriers.in_block[slot].wait(phase_of(iteration));
        const Statistic of_block = merge_warps(of_warps[slot]);
        Barrier& all_here = barriers.exchanged[slot];
        if constexpr (kClusterSize > 1) {
            if (lane_id() == 0) all_here.arrive_expect_tx(kClusterSize * int(sizeof(Statistic)));
            if (lane_id() < kClusterSize) {
                store_async(&of_blocks[slot][cluster_rank()], of_block, all_here, lane_id());
            }
        } else if (lane_id() == 0) {
            of_blocks[slot][0] = of_block;
            all_here.arrive();
        }
    }
    // Waits for the statistics of all blocks of `iteration`, and returns them.
    DEVICE const Statistic* receive(int iteration) const {
        barriers.exchanged[slot_of(iteration)].wait(phase_of(iteration));
        return of_blocks[slot_of(iteration)];
    }
};

// Sum of use(i) for i < kCount, distributed over the warp's lanes; every lane gets the sum.
template <int kCount, class Use>
DEVICE float sum_over(Use use) {
    constexpr int kLanes = kCount < kWarpSize ? kCount : kWarpSize;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += kLanes) sum += use(i + lane_id() % kLanes);
    return MergeFloats<Sum>().across_lanes(sum, 1, kLanes);
}

}  // namespace rows
