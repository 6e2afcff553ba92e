// Rows one after the other: a block, or a cluster, stays for many.  Bulk copies bring its next rows
// into a ring of stages in shared memory while it works on one, and what is the same for all rows
// it reads once and keeps.  That saves what a block for each row pays: as much traffic from L2 for
// a row's weights as for the row, and the time in which nothing of a block's is under way.
//
// A block has the same kNumThreads * kVectorsPerThread neighbouring vectors of every row, its
// slice; of a cluster's blocks each has another one.  For rows of whole, aligned vectors at one
// stride (kPlain).
// Constants: Element, kVectorWidth, kVectorsPerThread.
#include "parts/row.cuh"

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kMaxStages = 16;
constexpr int kWarps = kNumThreads / kWarpSize;

// A block's part of a row in shared memory.
struct Slice { RowVector vectors[kVectorsPerThread][kNumThreads]; };

// Which vectors of a row are this block's: `count` from number `first` on.
struct SlicePlace {
    int first, count;

    DEVICE static SlicePlace here(int64_t num_cols) {
        constexpr int kMost = kNumThreads * kVectorsPerThread;
        SlicePlace place{0, 0};
        if constexpr (kClusterSize > 1) place.first = cluster_rank() * kMost;
        const int rest = int(num_cols / kVectorWidth) - place.first;
        place.count = rest < 0 ? 0 : rest < kMost ? rest : kMost;
        return place;
    }
    DEVICE bool holds(int i) const { return i * kNumThreads + int(threadIdx.x) < count; }
    // The first element of this thread's vector i, counted from the row's.
    DEVICE int position(int i) const {
        return (first + i * kNumThreads + int(threadIdx.x)) * kVectorWidth;
    }
    DEVICE int bytes() const { return count * int(sizeof(RowVector)); }
};

// What is the same in all turns of a loop stays as it is: not what the compiler makes of it, which
// takes twice the registers.
DEVICE void keep_packed(RowVector& vector) {
#pragma unroll
    for (auto& access : vector.bytes) {
#pragma unroll
        for (uint32_t& word : access.words) word = uint32_t(opaque(int(word)));
    }
}

// The stages of kArrays arrays' rows: x's slice, then another array's.
template <int kArrays>
struct RowRing {
    Slice* slices;
    Barrier* full;
    SlicePlace place;
    int stages, stage, parity;

    // By one thread: brings a row, of each array, to a stage.
    DEVICE void start(int to, const Element* const (&rows)[kArrays]) const {
        full[to].arrive_expect_tx(kArrays * place.bytes());
        if (place.count == 0) return;
#pragma unroll
        for (int i = 0; i < kArrays; ++i) {
            const Element* slice = rows[i] + int64_t(place.first) * kVectorWidth;
            bulk_load(&slices[to * kArrays + i], slice, place.bytes(), full[to]);
        }
    }
    DEVICE void wait() const { full[stage].wait(parity); }
    DEVICE void advance() {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

// This thread's vectors of the row that the ring is at: in registers from take() on where those
// leave room for the rest, else read from shared memory in every pass.
template <int kArrays>
struct RowOfRing {
    static constexpr bool kKept = kArrays * kVectorsPerThread <= 2;
    // Of loops over vectors that take no registers of their own.
    static constexpr int kUnrolled = kKept ? kVectorsPerThread : 1;
    RowRing<kArrays>& ring;
    Element outside;  // where the row has no elements
    RowVector kept[kArrays][kKept ? kVectorsPerThread : 1];

    DEVICE void take() {
        ring.wait();
        if constexpr (kKept) {
#pragma unroll
            for (int i = 0; i < kVectorsPerThread; ++i) {
#pragma unroll
                for (int array = 0; array < kArrays; ++array) kept[array][i] = read(i, array);
            }
        }
    }
    DEVICE RowVector read(int i, int array) const {
        RowVector vector;
        vector.fill(outside);
        if (ring.place.holds(i)) {
            vector = ring.slices[ring.stage * kArrays + array].vectors[i][threadIdx.x];
        }
        return vector;
    }
    DEVICE RowVector get(int i, int array) {
        if constexpr (kKept) {
            keep_packed(kept[array][i]);
            return kept[array][i];
        } else {
            return read(i, array);
        }
    }
    // By one thread, once all have met in turn number `turn`: no one needs the row in shared memory
    // any more, or else the one before it.  start(stage, i) brings the row i turns on.
    template <class Start>
    DEVICE void refill(int turn, Start start) const {
        if constexpr (kKept) {
            start(ring.stage, ring.stages);
        } else if (turn > 0) {
            start(ring.stage == 0 ? ring.stages - 1 : ring.stage - 1, ring.stages - 1);
        }
    }
};

// What the warps of a block tell each other, and the blocks of a cluster, in turn number `turn`.
// Memory is used again two turns later: then all have met once more.
// of_warp: every lane has it.  merge, kExchange: as of merge_across_warps (parts/row.cuh).
template <int kExchange, class Statistic, class Merge>
DEVICE Statistic merge_in_block(const Statistic& of_warp, int turn, Merge merge) {
    SHARED(Statistic, parts, [2][kWarps]);
    if (lane_id() == 0) parts[turn % 2][threadIdx.x / kWarpSize] = of_warp;
    sync_block();
    return merge.across_lanes(parts[turn % 2][lane_id() % kWarps], 1, kWarps);
}
// After merge_in_block, so that all of the block are done with the turn before.
template <class Statistic, class Merge>
DEVICE Statistic merge_in_cluster(const Statistic& mine, int turn, Merge merge,
                                  Barrier* exchanges) {
    if constexpr (kClusterSize == 1) {
        return mine;
    } else {
        SHARED(Statistic, parts, [2][kClusterSize]);
        Barrier& all_here = exchanges[turn % 2];
        if (threadIdx.x == 0) all_here.arrive_expect_tx(kClusterSize * int(sizeof(Statistic)));
        if (int(threadIdx.x) < kClusterSize) {
            store_async(&parts[turn % 2][cluster_rank()], mine, all_here, int(threadIdx.x));
        }
        all_here.wait(turn / 2 % 2);
        return merge.across_lanes(parts[turn % 2][lane_id() % kClusterSize], 1, kClusterSize);
    }
}

// The barriers of a ring and of a cluster's exchanges, ready: first in a kernel.
struct StreamBarriers {
    Barrier *full, *exchanges;

    DEVICE static StreamBarriers make(int stages) {
        SHARED(Barrier, full, [kMaxStages]);
        SHARED(Barrier, exchanges, [2]);
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; ++i) full[i].init(1);
            for (int i = 0; i < 2; ++i) exchanges[i].init(1);
            fence_barrier_init();
        }
        if constexpr (kClusterSize > 1) {
            // All have started before one writes into another's shared memory.
            cluster_arrive_relaxed();
            cluster_wait();
        } else {
            sync_block();
        }
        return {full, exchanges};
    }
};
