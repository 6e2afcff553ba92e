// Rows one after the other: a block, or a cluster, stays for many.  That saves what a block for each
// row pays: as much traffic from L2 for a row's weights as for the row, and the time in which nothing
// of a block's is under way.
//
// A block's warps have roles, so that no step of a row waits for one of another row:
//   loader    brings pieces of rows into a ring of stages in shared memory by bulk copies, each as soon
//             as its stage is empty; the first block's tells all blocks which rows come
//   readers   kThreadsPerRow / 2 threads, take a row's statistics as its pieces come; one of their
//             warps sends the block's to all blocks of the cluster
//   finisher  merges what all blocks have sent to what writers need
//   writers   kThreadsPerRow threads, with what is the same for all rows in their registers
// Other threads have nothing to do.
//
// A block has the same kThreadsPerRow * kVectorsPerThread neighbouring vectors of every row, its
// slice; of a cluster's blocks each has another one.  A piece of a slice is a vector of each writer.
// For rows of whole, aligned vectors at one stride (kPlain).
// Constants: Element, kVectorWidth, kVectorsPerThread, kThreadsPerRow, of which kNumThreads are one
// and a half times as many and kOtherThreads.
#include "parts/row.cuh"

using RowVector = Vector<Element, kVectorWidth>;
constexpr int kMaxStages = 32;
constexpr int kWriters = kThreadsPerRow, kReaders = kThreadsPerRow / 2, kOtherThreads = 128;
constexpr int kReaderWarps = kReaders / kWarpSize;
static_assert(kNumThreads == kWriters + kReaders + kOtherThreads, "threads for all roles");
static_assert(kReaders % kWarpSize == 0, "whole warps");

enum Role { kWriter, kReader, kLoader, kFinisher, kIdle };
DEVICE Role role_of_warp() {
    const int thread = int(threadIdx.x);
    if (thread < kWriters) return kWriter;
    if (thread < kWriters + kReaders) return kReader;
    const int warp = (thread - (kWriters + kReaders)) / kWarpSize;
    return warp == 0 ? kLoader : warp == 1 ? kFinisher : kIdle;
}

// A block's piece of a row in shared memory.
struct Piece { RowVector vectors[kWriters]; };

// Which vectors of a row are this block's: `count` from number `first` on.
struct SlicePlace {
    int first, count;

    DEVICE static SlicePlace of_rank(int64_t num_cols, int rank) {
        constexpr int kMost = kWriters * kVectorsPerThread;
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
    // Whether piece i has a vector number `vector`.
    DEVICE bool holds(int i, int vector) const { return i * kWriters + vector < count; }
    // Its first element, counted from the row's.
    DEVICE int position(int i, int vector) const {
        return (first + i * kWriters + vector) * kVectorWidth;
    }
    // The vectors of piece i.
    DEVICE int vectors(int i) const {
        const int rest = count - i * kWriters;
        return rest < 0 ? 0 : rest < kWriters ? rest : kWriters;
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

// What is kept of a turn, a row's, is kept in the slot of its number.  Memory is used again kSlots
// turns on, when nobody needs it: a ring holds up to kMaxRows rows, so that no block can be as many
// turns before another one, and no role before another one.
constexpr int kSlots = 16, kMaxRows = 6;
static_assert(kSlots > 2 * kMaxRows + 3, "blocks may be kMaxRows rows apart, and a block's roles");
DEVICE int slot_of(int turn) { return turn % kSlots; }
DEVICE int parity_of(int turn) { return turn / kSlots % 2; }

// All barriers, ready: first in a kernel.
//   full, empty   of stages
//   named         slots: which row it is, is known
//   in_block      what the readers' warps have found is there
//   exchanged     what all blocks have found
//   finished      what writers need
struct StreamBarriers {
    Barrier *full, *empty, *named, *in_block, *exchanged, *finished;

    DEVICE static StreamBarriers make(int stages) {
        SHARED(Barrier, full, [kMaxStages]);
        SHARED(Barrier, empty, [kMaxStages]);
        SHARED(Barrier, named, [kSlots]);
        SHARED(Barrier, in_block, [kSlots]);
        SHARED(Barrier, exchanged, [kSlots]);
        SHARED(Barrier, finished, [kSlots]);
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; ++i) {
                full[i].init(1);
                empty[i].init(kWriters / kWarpSize);
            }
            for (int i = 0; i < kSlots; ++i) {
                named[i].init(1);
                in_block[i].init(kReaderWarps);
                exchanged[i].init(1);
                finished[i].init(1);
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
        return {full, empty, named, in_block, exchanged, finished};
    }
};

// The stages of kArrays arrays' rows: a piece of x's, then another array's.
template <int kArrays>
struct RowRing {
    Piece* pieces;
    int* rows;  // of slots; -1 after the last one
    const StreamBarriers& barriers;
    SlicePlace place;
    int stages;

    DEVICE static RowRing make(Piece* pieces, const StreamBarriers& barriers,
                               const SlicePlace& place, int stages) {
        SHARED(int, rows, [kSlots]);
        return {pieces, rows, barriers, place, stages};
    }
    // By the first block's loader: the row of turn number `turn` is `row`.
    DEVICE void name(int turn, int row) const {
        const int slot = slot_of(turn);
        if constexpr (kClusterSize > 1) {
            for (int rank = 0; rank < kClusterSize; ++rank) {
                store_async(&rows[slot], row, barriers.named[slot], rank);
            }
        } else {
            rows[slot] = row;
            barriers.named[slot].arrive();
        }
    }
    // By the loader: so many bytes are awaited.
    DEVICE void await_name(int turn) const {
        if constexpr (kClusterSize > 1) {
            barriers.named[slot_of(turn)].arrive_expect_tx(int(sizeof(int)));
        }
    }
    // Waits for the name.
    DEVICE int row(int turn) const {
        barriers.named[slot_of(turn)].wait(parity_of(turn));
        return rows[slot_of(turn)];
    }
    // By the loader: brings the next row.
    DEVICE void load(RingPlace& at, const Element* const (&from)[kArrays],
                     LoadPolicy policy) const {
#pragma unroll 1
        for (int i = 0; i < kVectorsPerThread; ++i, at.advance(stages)) {
            barriers.empty[at.stage].wait(at.parity ^ 1);
            Barrier& full = barriers.full[at.stage];
            const int bytes = place.vectors(i) * int(sizeof(RowVector));
            full.arrive_expect_tx(kArrays * bytes);
            if (bytes == 0) continue;
#pragma unroll
            for (int j = 0; j < kArrays; ++j) {
                Piece* to = &pieces[at.stage * kArrays + j];
                bulk_load(to, from[j] + place.position(i, 0), bytes, full, policy);
            }
        }
    }
    DEVICE void wait_full(const RingPlace& at) const { barriers.full[at.stage].wait(at.parity); }
    // By each of the writers' warps, once it is done with a piece.
    DEVICE void release(const RingPlace& at) const {
        sync_warp();
        if (lane_id() == 0) barriers.empty[at.stage].arrive();
    }
    // A vector of a piece that is there.
    DEVICE const RowVector& get(const RingPlace& at, int array, int vector) const {
        return pieces[at.stage * kArrays + array].vectors[vector];
    }
};

// Which rows a cluster (or block) takes: two at first, and then whichever is next when it asks, so
// that those whose memory is nearer do not wait for the others in the end.  By the first block's loader,
// which waits for the answers while its ring is full.
template <class Ring>
struct RowOrder {
    static constexpr int kAhead = 2;  // turns for which rows are known
    const Ring& ring;
    uint32_t* counter;  // 0 before and after the launch
    const int64_t& num_rows;
    bool ended;

    DEVICE static int64_t groups() { return int64_t(gridDim.x) / kClusterSize; }
    DEVICE void name(int turn, int64_t row) {
        ended = row >= num_rows;
        ring.name(turn, ended ? -1 : int(row));
    }
    DEVICE void start() {
        for (int turn = 0; turn < kAhead && !ended; ++turn) {
            name(turn, int64_t(blockIdx.x) / kClusterSize + turn * groups());
        }
    }
    // The row of turn number `turn` has been asked for.
    DEVICE void advance(int turn) {
        if (ended) return;
        // Who has got rows for the first turns asks until there are none.
        const int64_t asked = num_rows - (kAhead - 1) * groups();
        const uint32_t taken = atomic_add(counter, 1u);
        if (taken + 1 == uint32_t(asked)) atomic_add(counter, 0u - uint32_t(asked));
        name(turn + kAhead, kAhead * groups() + taken);
    }
};

// What the readers' warps tell one of them, each in turn, it tells all blocks, and those their
// finishers.
template <class Statistic>
struct Exchange {
    Statistic (*of_warps)[kReaderWarps];
    Statistic (*of_blocks)[kClusterSize];
    const StreamBarriers& barriers;

    DEVICE static Exchange make(const StreamBarriers& barriers) {
        SHARED(Statistic, of_warps, [kSlots][kReaderWarps]);
        SHARED(Statistic, of_blocks, [kSlots][kClusterSize]);
        return {of_warps, of_blocks, barriers};
    }
    DEVICE static int reader_warp() { return (int(threadIdx.x) - kWriters) / kWarpSize; }
    // By all readers.  merge_warps(parts): of kReaderWarps parts, in every lane.
    template <class Merge>
    DEVICE void send(int turn, const Statistic& of_warp, Merge merge_warps) const {
        const int slot = slot_of(turn);
        sync_warp();  // all of them have read their pieces, which may then be overwritten
        if (lane_id() == 0) {
            of_warps[slot][reader_warp()] = of_warp;
            barriers.in_block[slot].arrive();
        }
        if (reader_warp() != turn % kReaderWarps) return;
        barriers.in_block[slot].wait(parity_of(turn));
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
    // Waits for what all blocks have found in turn number `turn`.
    DEVICE const Statistic* receive(int turn) const {
        barriers.exchanged[slot_of(turn)].wait(parity_of(turn));
        return of_blocks[slot_of(turn)];
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
