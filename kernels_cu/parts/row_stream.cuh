// Rows one after the other: a block, or a cluster, stays for many.  Bulk copies bring its next rows
// into a ring of stages in shared memory while it works on one, and what is the same for all rows
// it reads once and keeps.  That saves what a block for each row pays: as much traffic from L2 for
// a row's weights as for the row, and the time in which nothing of a block's is under way.
//
// The statistics of a row are taken one turn before it is written: what warps and blocks tell each
// other is there when it is needed, and no warp waits for another one within a turn.
//
// A block has the same kNumThreads * kVectorsPerThread neighbouring vectors of every row, its
// slice; of a cluster's blocks each has another one.  For rows of whole, aligned vectors at one
// stride (kPlain).
// Constants: Element, kVectorWidth, kVectorsPerThread.
#include "parts/row.cuh"

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kMaxStages = 16;
constexpr int kWarps = kNumThreads / kWarpSize;
constexpr int kParts = kClusterSize > 1 ? kClusterSize : kWarps;  // of a row: blocks', or warps'

// A block's part of a row in shared memory.
struct Slice { RowVector vectors[kVectorsPerThread][kNumThreads]; };

// Which vectors of a row are this block's: `count` from number `first` on.
struct SlicePlace {
    int first, count;

    DEVICE static SlicePlace of_rank(int64_t num_cols, int rank) {
        constexpr int kMost = kNumThreads * kVectorsPerThread;
        SlicePlace place{rank * kMost, 0};
        const int rest = int(num_cols / kVectorWidth) - place.first;
        place.count = rest < 0 ? 0 : rest < kMost ? rest : kMost;
        return place;
    }
    DEVICE static SlicePlace here(int64_t num_cols) {
        int rank = 0;
        if constexpr (kClusterSize > 1) rank = cluster_rank();
        return of_rank(num_cols, rank);
    }
    DEVICE bool holds(int i) const { return i * kNumThreads + int(threadIdx.x) < count; }
    // The first element of this thread's vector i, counted from the row's.
    DEVICE int position(int i) const {
        return (first + i * kNumThreads + int(threadIdx.x)) * kVectorWidth;
    }
    DEVICE int bytes() const { return count * int(sizeof(RowVector)); }
    // The elements of the slice that warp `warp` has.
    DEVICE int count_of_warp(int warp) const {
        int vectors = 0;
#pragma unroll
        for (int i = 0; i < kVectorsPerThread; ++i) {
            const int rest = count - i * kNumThreads - warp * kWarpSize;
            vectors += rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
        }
        return vectors * kVectorWidth;
    }
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

// A stage of the ring, and the parity of its use.
struct RingPlace {
    int stage, parity;

    DEVICE void advance(int stages) {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

// The barriers of a ring and of the exchanges, ready: first in a kernel.
constexpr int kExchanges = 4;
struct StreamBarriers {
    Barrier *full, *empty, *in_block, *exchanges;

    DEVICE static StreamBarriers make(int stages) {
        SHARED(Barrier, full, [kMaxStages]);
        SHARED(Barrier, empty, [kMaxStages]);
        SHARED(Barrier, in_block, [kExchanges]);
        SHARED(Barrier, exchanges, [kExchanges]);
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; ++i) {
                full[i].init(1);
                empty[i].init(kWarps);
            }
            for (int i = 0; i < kExchanges; ++i) {
                in_block[i].init(kWarps);
                exchanges[i].init(1);
            }
            fence_barrier_init();
        }
        if constexpr (kClusterSize > 1) {
            // All have started before one writes into another's shared memory.
            cluster_arrive_relaxed();
            cluster_wait();
        } else {
            sync_block();
        }
        return {full, empty, in_block, exchanges};
    }
};

// The stages of kArrays arrays' rows: x's slice, then another array's.
template <int kArrays>
struct RowRing {
    Slice* slices;
    const StreamBarriers& barriers;
    SlicePlace place;
    int stages;

    // By one thread: brings a row, of each array, to a stage.
    DEVICE void start(int to, const Element* const (&rows)[kArrays]) const {
        Barrier& full = barriers.full[to];
        full.arrive_expect_tx(kArrays * place.bytes());
        if (place.count == 0) return;
#pragma unroll
        for (int i = 0; i < kArrays; ++i) {
            const Element* slice = rows[i] + int64_t(place.first) * kVectorWidth;
            bulk_load(&slices[to * kArrays + i], slice, place.bytes(), full);
        }
    }
    DEVICE void wait_full(const RingPlace& at) const { barriers.full[at.stage].wait(at.parity); }
    // By one thread: until all warps are done with the row.
    DEVICE void wait_empty(const RingPlace& at) const { barriers.empty[at.stage].wait(at.parity); }
    // By each warp, once it is done with the row.
    DEVICE void release(const RingPlace& at) const {
        sync_warp();
        if (lane_id() == 0) barriers.empty[at.stage].arrive();
    }
    // This thread's vector i of array `array`; `outside` where the row has none, unless kWhole: it
    // has all of them.
    template <bool kWhole>
    DEVICE RowVector get(const RingPlace& at, int i, int array, Element outside) const {
        RowVector vector;
        if constexpr (!kWhole) vector.fill(outside);
        if (kWhole || place.holds(i))
            vector = slices[at.stage * kArrays + array].vectors[i][threadIdx.x];
        return vector;
    }
};

// What the warps of a block tell each other, and then, in a cluster, one warp of each block, another
// one for each row, all blocks; a row's parts are read a turn later.  Memory is used again four rows
// on: who sends number n + 4 has received number n + 2, which others send once they have read
// number n.
template <class Statistic>
struct Exchange {
    Statistic (*of_warps)[kWarps];
    Statistic (*of_blocks)[kClusterSize];
    const StreamBarriers& barriers;

    DEVICE static Exchange make(const StreamBarriers& barriers) {
        SHARED(Statistic, of_warps, [kExchanges][kWarps]);
        SHARED(Statistic, of_blocks, [kExchanges][kClusterSize]);
        return {of_warps, of_blocks, barriers};
    }
    // merge_warps(parts): of kWarps parts, in every lane.
    template <class Merge>
    DEVICE void send(int turn, const Statistic& of_warp, Merge merge_warps) const {
        const int slot = turn % kExchanges, warp = int(threadIdx.x) / kWarpSize;
        if (lane_id() == 0) {
            of_warps[slot][warp] = of_warp;
            barriers.in_block[slot].arrive();
        }
        if constexpr (kClusterSize > 1) {
            if (warp != turn % kWarps) return;
            barriers.in_block[slot].wait(turn / kExchanges % 2);
            const Statistic of_block = merge_warps(of_warps[slot]);
            Barrier& all_here = barriers.exchanges[slot];
            if (lane_id() == 0) all_here.arrive_expect_tx(kClusterSize * int(sizeof(Statistic)));
            if (lane_id() < kClusterSize) {
                store_async(&of_blocks[slot][cluster_rank()], of_block, all_here, lane_id());
            }
        }
    }
    // The kParts parts of what was sent in turn number `turn`.
    DEVICE const Statistic* receive(int turn) const {
        const int slot = turn % kExchanges;
        Barrier& all_here = (kClusterSize > 1 ? barriers.exchanges : barriers.in_block)[slot];
        all_here.wait(turn / kExchanges % 2);
        return kClusterSize > 1 ? of_blocks[slot] : of_warps[slot];
    }
};

// A sum of use(i) over the parts that a warp has in its lanes; every lane gets it.
template <int kCount, class Use>
DEVICE float sum_over(Use use) {
    constexpr int kLanes = kCount < kWarpSize ? kCount : kWarpSize;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; i += kLanes) sum += use(i + lane_id() % kLanes);
    return MergeFloats<Sum>().across_lanes(sum, 1, kLanes);
}
