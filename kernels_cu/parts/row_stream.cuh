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

    DEVICE RingPlace next(int stages) const {
        return stage + 1 < stages ? RingPlace{stage + 1, parity} : RingPlace{0, parity ^ 1};
    }
    DEVICE RingPlace previous(int stages) const {
        return stage > 0 ? RingPlace{stage - 1, parity} : RingPlace{stages - 1, parity ^ 1};
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

// The stages of kArrays arrays' rows: x's slice, then another array's; and which row each has, -1
// after the last one.
template <int kArrays>
struct RowRing {
    Slice* slices;
    int* rows;
    const StreamBarriers& barriers;
    SlicePlace place;
    int stages;

    DEVICE static RowRing make(Slice* slices, const StreamBarriers& barriers,
                               const SlicePlace& place, int stages) {
        SHARED(int, rows, [kMaxStages]);
        return {slices, rows, barriers, place, stages};
    }

    // By one thread: no rows come any more.
    DEVICE void end(int to) const {
        rows[to] = -1;
        barriers.full[to].arrive();
    }
    // By one thread: brings row number `row`, of each array, to a stage.
    DEVICE void start(int to, int row, const Element* const (&from)[kArrays]) const {
        Barrier& full = barriers.full[to];
        rows[to] = row;
        full.arrive_expect_tx(kArrays * place.bytes());
        if (place.count == 0) return;
#pragma unroll
        for (int i = 0; i < kArrays; ++i) {
            const Element* slice = from[i] + int64_t(place.first) * kVectorWidth;
            bulk_load(&slices[to * kArrays + i], slice, place.bytes(), full);
        }
    }
    DEVICE void wait_full(const RingPlace& at) const { barriers.full[at.stage].wait(at.parity); }
    // The row that is there, after wait_full.
    DEVICE int row(const RingPlace& at) const { return rows[at.stage]; }
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

// Which rows a cluster (or block) takes: as many as it has stages at first, and then whichever is
// next when it asks, so that those whose memory is nearer do not wait for the others in the end.
struct RowOrder {
    uint32_t* counter;  // 0 before and after the launch
    const int64_t& num_rows;
    int given;  // rows that all clusters have at first

    DEVICE static RowOrder of(uint32_t* counter, const int64_t& num_rows, int stages) {
        return {counter, num_rows, stages * (int(gridDim.x) / kClusterSize)};
    }
    // Of a turn that has a stage from the beginning.
    DEVICE int first(int turn) const {
        return checked(int(blockIdx.x) / kClusterSize +
                       int64_t(turn) * (int(gridDim.x) / kClusterSize));
    }
    // Of the turn `stages` after this one.  For each row one number is taken: who takes the last one
    // sets the counter back.
    DEVICE uint32_t take() const { return atomic_add(counter, 1u); }
    DEVICE int next(uint32_t taken) const {
        if (taken + 1 == uint32_t(num_rows)) atomic_add(counter, 0u - uint32_t(num_rows));
        return checked(int64_t(given) + taken);
    }
    DEVICE int checked(int64_t row) const { return row < num_rows ? int(row) : -1; }
};

// What the warps of a block tell each other, and then, in a cluster, one warp of each block, another
// one for each row, all blocks; a row's parts are read a turn later.  The first block says besides
// which row comes `stages` turns on.  Memory is used again four rows on: who sends number n + 4 has
// received number n + 2, which others send once they have read number n.
template <class Statistic>
struct Exchange {
    // What a block tells the others.
    struct alignas(sizeof(Statistic) == 4 ? 8 : 16) Message { Statistic statistic; int next_row; };
    Statistic (*of_warps)[kWarps];
    Message (*of_blocks)[kClusterSize];
    int* next_rows;
    const StreamBarriers& barriers;
    RowOrder order;

    DEVICE static Exchange make(const StreamBarriers& barriers, const RowOrder& order) {
        SHARED(Statistic, of_warps, [kExchanges][kWarps]);
        SHARED(Message, of_blocks, [kExchanges][kClusterSize]);
        SHARED(int, next_rows, [kExchanges]);  // of a block that is alone
        return {of_warps, of_blocks, next_rows, barriers, order};
    }
    // In a cluster: the warp that sends the block's part, each in turn.  Of the first block it is
    // always the same one, which asks for rows: they come in the order of the turns.
    DEVICE static int sender(int turn) { return cluster_rank() == 0 ? kWarps - 1 : turn % kWarps; }
    // By all, before there is something to send, because an answer takes long: who sends a row's first
    // part asks for another row.
    DEVICE uint32_t ask() const {
        const int asks = kClusterSize > 1 ? kWarps - 1 : 0;
        if (int(threadIdx.x) != asks * kWarpSize) return 0;
        if constexpr (kClusterSize > 1) {
            if (cluster_rank() != 0) return 0;
        }
        return order.take();
    }
    // merge_warps(parts): of kWarps parts, in every lane.
    template <class Merge>
    DEVICE void send(int turn, uint32_t taken, const Statistic& of_warp, Merge merge_warps) const {
        const int slot = turn % kExchanges, warp = int(threadIdx.x) / kWarpSize;
        if (lane_id() == 0) {
            of_warps[slot][warp] = of_warp;
            if (kClusterSize == 1 && warp == 0) next_rows[slot] = order.next(taken);
            barriers.in_block[slot].arrive();
        }
        if constexpr (kClusterSize > 1) {
            if (warp != sender(turn)) return;
            barriers.in_block[slot].wait(turn / kExchanges % 2);
            Message of_block{merge_warps(of_warps[slot]), 0};
            Barrier& all_here = barriers.exchanges[slot];
            const int rank = cluster_rank();
            if (rank == 0) {
                if (lane_id() == 0) of_block.next_row = order.next(taken);
                of_block.next_row = shuffle(of_block.next_row, 0);
            }
            if (lane_id() == 0) all_here.arrive_expect_tx(kClusterSize * int(sizeof(Message)));
            if (lane_id() < kClusterSize) {
                store_async(&of_blocks[slot][rank], of_block, all_here, lane_id());
            }
        }
    }
    // Waits for the parts of what was sent in turn number `turn`; they are there for this turn.
    DEVICE void receive(int turn) const {
        const int slot = turn % kExchanges;
        Barrier& all_here = (kClusterSize > 1 ? barriers.exchanges : barriers.in_block)[slot];
        all_here.wait(turn / kExchanges % 2);
    }
    DEVICE Statistic part(int turn, int i) const {
        const int slot = turn % kExchanges;
        return kClusterSize > 1 ? of_blocks[slot][i].statistic : of_warps[slot][i];
    }
    // The row of the turn `stages` after this one.
    DEVICE int next_row(int turn) const {
        const int slot = turn % kExchanges;
        return kClusterSize > 1 ? of_blocks[slot][0].next_row : next_rows[slot];
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
