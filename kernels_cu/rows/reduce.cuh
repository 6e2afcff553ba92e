// Reductions over the threads of a row.  Every thread of the block (and cluster) takes part and
// gets the result.  The order is fixed.
#pragma once
#include "rows/tile.cuh"

namespace rows {

// The lanes of a warp that share a row differ in the bits [kFirstLaneBit, kLastLaneBit).
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

// Number of the row's elements that this warp's lanes of the row have.
DEVICE float count_in_warp(const RowThread& thread, const RowChunk& c) {
    constexpr int kLanes = kLastLaneBit / kFirstLaneBit;
    // True for all rows of a warp or none: every lane must take part in the shuffles.
    if (kRowsPerBlock == 1 && c.low == 0 && c.high == kChunk) {
        return float(kLanes * kVectorsPerThread * kVectorWidth);
    }
    return reduce_in_warp(float(c.count(thread)), Sum());
}

// Warps per row, and rows per warp.
constexpr int kRowsPerWarp = kLanesAcrossRows
                                 ? (kRowsPerBlock < kWarpSize ? kRowsPerBlock : kWarpSize)
                                 : (kThreadsPerRow < kWarpSize ? kWarpSize / kThreadsPerRow : 1);
constexpr int kWarpsPerRow = kLanesAcrossRows ? kThreadsPerRow * kRowsPerWarp / kWarpSize
                             : kThreadsPerRow > kWarpSize ? kThreadsPerRow / kWarpSize
                                                          : 1;

// Merges partials[0 .. kCount) pairwise, in a tree of fixed shape: log2(kCount) merges per term.
template <int kCount, class Statistic, class Merge>
DEVICE Statistic merge_tree(const Statistic* partials, Merge merge) {
    if constexpr (kCount == 1) {
        return partials[0];
    } else {
        constexpr int kHalf = kCount / 2;
        return merge(merge_tree<kHalf>(partials, merge),
                     merge_tree<kCount - kHalf>(partials + kHalf, merge));
    }
}

// Merges kPartials statistics in shared memory, distributed over the lanes if a warp has one row
// and they are a power of two.
template <int kPartials, class Statistic, class Merge>
DEVICE Statistic merge_partials(const Statistic* partials, Merge merge) {
    if constexpr (kRowsPerWarp == 1 && (kPartials & (kPartials - 1)) == 0) {
        constexpr int kLanes = kPartials < kWarpSize ? kPartials : kWarpSize;
        const int lane = lane_id() % kLanes;
        Statistic s = partials[lane];
#pragma unroll
        for (int i = kLanes; i < kPartials; i += kLanes) s = merge(s, partials[i + lane]);
        return merge.across_lanes(s, 1, kLanes);
    } else {
        return merge_tree<kPartials>(partials, merge);
    }
}

// One barrier per exchange of a cluster; it completes when all warps' messages have arrived.
constexpr int kMaxExchanges = 3;
DEVICE Barrier* exchange_barriers() {
    SHARED(Barrier, barriers, [kMaxExchanges]);
    return barriers;
}

// All blocks of a cluster must have started before one writes into another's shared memory: call
// this first in a kernel that calls merge_across_warps.
DEVICE void init_exchange_barriers() {
    if constexpr (kClusterSize > 1) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kMaxExchanges; ++i) exchange_barriers()[i].init(1);
            fence_barrier_init();
        }
        cluster_arrive_relaxed();
    }
}

// Merges the statistics of a row's warps, in the block or cluster; every thread gets the result.
// merge(a, b) merges two statistics, merge.across_lanes(s, begin, end) those of the lanes that
// differ in the bits [begin, end).  kExchange counts a kernel's calls from 0, because an exchange's
// shared memory is not reused.
template <int kExchange, class Statistic, class Merge>
DEVICE Statistic merge_across_warps(const Statistic& mine, const RowThread& t, Merge merge) {
    const int warp = kLanesAcrossRows ? t.lane * kRowsPerWarp / kWarpSize : t.lane / kWarpSize;
    if constexpr (kClusterSize > 1) {
        // Each warp sends its statistic to every block: no block or cluster barrier.
        static_assert(kRowsPerBlock == 1 && kExchange < kMaxExchanges, "one row to a cluster");
        constexpr int kPartials = kClusterSize * kWarpsPerRow;
        SHARED(Statistic, partials, [kPartials]);
        Barrier& full = exchange_barriers()[kExchange];
        const int count = t.blocks * kWarpsPerRow;
        if (threadIdx.x == 0) full.arrive_expect_tx(count * int(sizeof(Statistic)));
        if constexpr (kExchange == 0) cluster_wait();  // all blocks have started
        if (lane_id() < t.blocks) {
            store_async(&partials[t.rank * kWarpsPerRow + warp], mine, full, lane_id());
        }
        full.wait(0);
        if (count < kPartials) {
            Statistic s = partials[lane_id() % kWarpsPerRow];
            for (int i = kWarpsPerRow; i < count; i += kWarpsPerRow) {
                s = merge(s, partials[i + lane_id() % kWarpsPerRow]);
            }
            return merge.across_lanes(s, 1, kWarpsPerRow);
        }
        return merge_partials<kPartials>(partials, merge);
    } else if constexpr (kWarpsPerRow > 1) {
        SHARED(Statistic, partials, [kRowsPerBlock][kWarpsPerRow]);
        if (lane_id() / kFirstLaneBit % (kLastLaneBit / kFirstLaneBit) == 0) {
            partials[t.row_in_block][warp] = mine;
        }
        sync_block();
        return merge_partials<kWarpsPerRow>(partials[t.row_in_block], merge);
    } else {
        return mine;
    }
}

// Merges `s`, this warp's statistic of the row's chunk, over the row.  Returns false if the launch
// ends at this point.  statistics: num_rows * num_chunks, then one per row.
template <class Statistic, class Merge>
DEVICE bool merge_row(const RowWork& work, const RowThread& t, bool live, int64_t num_rows,
                      Statistic* statistics, Merge merge, Statistic& s) {
    Statistic* chunks = statistics + work.row * work.num_chunks;
    Statistic* merged = statistics + num_rows * work.num_chunks + work.row;
    if (work.pass == kApply) {
        if (live) s = *merged;
        return true;
    }
    if (work.pass == kMerge) {
        for (int64_t i = t.lane; live && i < work.num_chunks; i += kThreadsPerRow) {
            // Starts from the first chunk: merged with an empty set, a two-part mean would become
            // one part.
            s = i < kThreadsPerRow ? chunks[i] : merge(s, chunks[i]);
        }
        s = merge.across_lanes(s, kFirstLaneBit, kLastLaneBit);
    }
    s = merge_across_warps<0>(s, t, merge);
    if (work.pass == kSinglePass) return true;
    if (live && t.lane == 0) (work.pass == kMerge ? *merged : chunks[work.chunk]) = s;
    return false;
}

}  // namespace rows
