// How operands reach Hopper's tensor cores: a producer brings tiles of A and B by TMA through a
// ring of kStages stages to two warpgroups, which multiply them by wgmma.  The main loops do: each
// is a header parts/mainloop*_hopper.cuh with a function `multiply`, and the variant says which
// one.
//
//   ElementA, ElementB   of one size; or 16-bit and 8-bit (or e2m1x2: NVFP4), and the latter are
//                        converted to ElementA in registers: kTurned, because only wgmma's A can be
//                        there.
//   kTurned              B^T is the operand of the accumulators' rows, A^T of their columns, and
//                        they hold the transposed product: few rows of A do not leave those of
//                        wgmma's A empty.
//   kOuterMajorA, -B     false: neighbours along k are neighbours in memory, true: along m (of A)
//                        or n (of B).
//   kTileM, kTileN       the sums of a tile.
//   kLines               a stage has so many times 128 bytes of k of A.
//   kPingPong            the warpgroups take turns, so that one finishes its tile while the other
//                        multiplies.
//   kShareK              both compute all sums of a tile, each of every second stage.  With
//                        neither, they share the rows of every tile.
//   kClusterSize         blocks of a cluster compute tiles with the same columns and neighbouring
//                        rows (of the accumulators): each loads its rows, and a part of the columns
//                        for all of them.
//   kSplitK              they compute one tile instead, each the sums of a part of k, and each
//                        finishes a part of the columns; the grid has a cluster for every tile.
#include "parts/nvfp4.cuh"
#include "platform/wgmma.cuh"

constexpr bool kConverts = sizeof(ElementA) != sizeof(ElementB);
constexpr bool kPromotes = sizeof(ElementA) == 1 && !kSame<ElementA, int8_t>;
static_assert(kTurned || !kConverts, "what is converted has the accumulators' rows");
using RowElement = typename Choose<kTurned, ElementB, ElementA>::Type;
using ColElement = typename Choose<kTurned, ElementA, ElementB>::Type;
constexpr bool kOuterMajorRows = kTurned ? kOuterMajorB : kOuterMajorA;
constexpr bool kOuterMajorCols = kTurned ? kOuterMajorA : kOuterMajorB;
constexpr int kRows = kTurned ? kTileN : kTileM;  // of a tile's accumulators
constexpr int kCols = kTurned ? kTileM : kTileN;

constexpr int kLineBytes = 128;  // of shared memory, swizzled; shorter lines by their length
constexpr int kTileK = kLines * kLineBytes / int(sizeof(ElementA));
constexpr int kStepK = 32 / int(sizeof(ElementA));  // of one wgmma

constexpr int kConsumers = kNumThreads / 128 - 1;  // warpgroups; the producer is one more
constexpr bool kShareRows = !kPingPong && !kShareK;
constexpr int kConsumerRows = kShareRows ? kRows / kConsumers : kRows;
constexpr int kBlocks = kConsumerRows / 64;  // of rows, each an instruction's
static_assert(kBlocks * 64 == kConsumerRows && kBlocks * kCols <= (kPingPong ? 384 : 352),
              "sums fit into registers");
static_assert(!(kPingPong && kShareK), "the warpgroups have tiles of their own, or share one");
static_assert(!kShareK || kStages % kConsumers == 0, "a stage belongs to one warpgroup");
static_assert(kStages >= (kShareK ? 4 : 2), "a stage is released when the next one is multiplied");
static_assert(kNumThreads == 128 * (kConsumers + 1) && (kConsumers == 2 || kShareRows),
              "two warpgroups multiply, or three that share the rows, and one loads");
static_assert(!kSplitK || (kClusterSize > 1 && kShareRows), "a cluster's blocks split k");
// Of a consumer's thread, where the producer's have `of_producer`: a block of 384 threads begins
// with 3 * 168, one of 512 with 4 * 128.
DEVICE constexpr int consumer_registers(int of_producer) {
    return ((kConsumers == 2 ? 3 * 168 : 4 * 128) - of_producer) / kConsumers;
}
constexpr bool kMulticasts = kClusterSize > 1 && !kSplitK;

using SumType = typename Choose<kSame<ElementA, int8_t>, int, float>::Type;
using TileSums = SumType[kBlocks][kCols / 2];

// An operand's part of a stage: kOuter rows of A or columns of B.
template <class Element, bool kOuterMajor, int kOuter>
struct OperandStage {
    static constexpr Major kMajor = kOuterMajor ? kMajorMN : kMajorK;
    static constexpr int kSize = int(sizeof(Element));
    static constexpr int kNumbers = kSame<Element, e2m1x2> ? 2 : 1;  // of an element
    static constexpr int kBytes = kOuter * kTileK * kSize / kNumbers;
    static constexpr int kInnerBytes = (kOuterMajor ? kOuter : kTileK) * kSize / kNumbers;
    static_assert(kNumbers == 1 || !kOuterMajor, "the numbers of a byte are neighbours along k");
    // Boxes of whole lines, which the maps swizzle by.
    static constexpr int kLine = kInnerBytes < kLineBytes ? kInnerBytes : kLineBytes;
    static constexpr int kBoxBytes = (kOuterMajor ? kTileK : kOuter) * kLine;
    static_assert(kBytes % kBoxBytes == 0 && kBoxBytes % (8 * kLine) == 0, "whole boxes");

    // step: from a box to the next.
    DEVICE static void load(unsigned char* stage, const TensorMap& map, Barrier& full, int k,
                            int outer, int batch, int step = kBoxBytes) {
#pragma unroll
        for (int i = 0; i < kBytes / kBoxBytes; ++i) {
            const int inner = i * kLine / kSize;
            tma_load(stage + i * step, map, full,
                     {kOuterMajor ? outer + inner : k / kNumbers + inner, kOuterMajor ? k : outer,
                      batch});
        }
    }
    // The part of block `rank` for all blocks of the cluster: some of the boxes, or of each a part.
    DEVICE static void load_for_all(unsigned char* stage, const TensorMap& map, Barrier& full,
                                    int k, int outer, int batch, int rank) {
        constexpr int kBoxes = kBytes / kBoxBytes / (kOuterMajor ? kClusterSize : 1);
        constexpr int kPartBytes = kBoxBytes / (kOuterMajor ? 1 : kClusterSize);
        static_assert(kBoxes > 0 && kPartBytes % (8 * kLine) == 0, "a part for every block");
        const int first = kOuterMajor ? rank * kBoxes : 0;
        stage += first * kBoxBytes + (kOuterMajor ? 0 : rank * kPartBytes);
        outer += kOuterMajor ? first * kLine / kSize : rank * (kOuter / kClusterSize);
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const int inner = i * kLine / kSize;
            tma_load_multicast(stage + i * kBoxBytes, map, full,
                               {kOuterMajor ? outer + inner : k / kNumbers + inner,
                                kOuterMajor ? k : outer, batch},
                               (1 << kClusterSize) - 1);
        }
    }
    // The first box from k = 0 on is on its way to L2: a part's, if `outer` is where that begins.
    DEVICE static void prefetch(const TensorMap& map, int outer, int batch) {
        tma_prefetch(map, {kOuterMajor ? outer : 0, kOuterMajor ? 0 : outer, batch});
    }
    // Of the 16-bit numbers, or 8-bit ones along k, from (outer, k) on, for one wgmma.
    DEVICE static uint64_t tile(const unsigned char* stage, int outer, int k) {
        const int inner = (kOuterMajor ? outer : k) * kSize, line = kOuterMajor ? k : outer;
        const unsigned char* p = stage + inner / kLine * kBoxBytes + line * kLine + inner % kLine;
        return matrix_descriptor<kLine>(p, kOuterMajor ? kBoxBytes : 0, 8 * kLine);
    }
    // Where byte `byte` of line `line` of the first box lies; 8 lines further it is 8 * kLine more.
    DEVICE static int place(int line, int byte) {
        const int offset = line * kLine;
        return (offset | (offset >> 3 & (kLine - 16))) ^ byte;
    }
};
using RowStage = OperandStage<RowElement, kOuterMajorRows, kRows>;
using ColStage = OperandStage<ColElement, kOuterMajorCols, kCols>;

// What reads a stage tells the producer: one thread of a warpgroup, for wgmma; where threads read
// it themselves, one of each warp.
constexpr bool kThreadsRead = kConverts || kPromotes;
constexpr int kReleasing = kThreadsRead ? 32 : 128;
constexpr int kReleases =
    (kShareRows ? kConsumers : 1) * 128 / kReleasing * (kMulticasts ? kClusterSize : 1);

// full: a stage's bytes are there; empty: its consumers are done; turn: see the main loops.
struct Ring {
    unsigned char rows[kStages][RowStage::kBytes];
    unsigned char cols[kStages][ColStage::kBytes];
    Barrier full[kStages], empty[kStages], turn[kConsumers];

    DEVICE void init() {
        for (int i = 0; i < kStages; ++i) {
            full[i].init(1);
            empty[i].init(kReleases);
        }
        for (int i = 0; i < kConsumers; ++i) turn[i].init(128 / kReleasing);
        fence_barrier_init();
    }
    // By a consumer that has read the stage.
    DEVICE void release(int stage) {
        if (kThreadsRead) sync_warp();
        const int thread = threadIdx.x % kReleasing;
        if constexpr (kMulticasts) {
            if (thread < kClusterSize) empty[stage].release_remote(thread);
        } else if (thread == 0) {
            empty[stage].arrive();
        }
    }
};
DEVICE void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
// The same at the kernel's begin: of barriers alone, which Ring::init has fenced.
DEVICE void begin_cluster() {
    cluster_arrive_relaxed();
    cluster_wait();
}

struct RingPlace {
    int stage = 0, parity = 0;

    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    DEVICE void skip(int count) {
        const int next = stage + count;
        parity ^= next / kStages & 1;
        stage = next % kStages;
    }
};

// By the thread that has loaded all: until each stage is released by all blocks of the cluster, so that
// no other one arrives at this block's barriers any more.
DEVICE void drain(Ring& ring, RingPlace place) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
        ring.empty[place.stage].wait(place.parity ^ 1);
        place.advance();
    }
}

// By one thread: brings the tiles of the rows from `row` on and of the columns from `col` on,
// `num_k_tiles` of k from tile `first` on, the `ahead` first ones after the others.  stage_bytes: what
// a stage gets of both; other rows of A keep what they had.  has_rows: whether any of the tile's exist; TMA
// takes longer for others, and the cluster's other blocks would wait.
DEVICE void load_tiles(Ring& ring, RingPlace& place, const TensorMap& row_map,
                       const TensorMap& col_map, int stage_bytes, int first, int num_k_tiles,
                       int row, int col, int row_batch, int col_batch, int ahead = 0,
                       bool has_rows = true) {
#pragma unroll 1
    for (int i = 0; i < num_k_tiles; ++i) {
        const int at = i + ahead < num_k_tiles ? i + ahead : i + ahead - num_k_tiles;
        const int k = (first + at) * kTileK;
        Barrier& full = ring.full[place.stage];
        ring.empty[place.stage].wait(place.parity ^ 1);  // in all blocks of the cluster
        full.arrive_expect_tx(has_rows ? stage_bytes : int(ColStage::kBytes));
        if (has_rows) RowStage::load(ring.rows[place.stage], row_map, full, k, row, row_batch);
        if constexpr (kMulticasts) {
            ColStage::load_for_all(ring.cols[place.stage], col_map, full, k, col, col_batch,
                                   cluster_rank());
        } else {
            ColStage::load(ring.cols[place.stage], col_map, full, k, col, col_batch);
        }
        place.advance();
    }
}

// Scales of blocks: one number for every kBlockK of k of a row of A, and of that and kBlockK
// columns of B; null: 1.
constexpr int kBlockK = 128;
struct BlockScales {
    const float* a;
    const float* b;
    int64_t a_row, a_k, b_k, b_col;  // strides: of a row, of a block
    int last_row, last_block;        // of A, and of B's columns, that exist

    DEVICE bool there() const { return a || b; }
};

// The e4m3 scales of an NVFP4 operand's two rows that a thread has numbers of: words of four, each
// of them of 16 of k.
struct RowScales {
    const e4m3* rows[2];
    int64_t steps[2];  // from a word to the next
    int count;         // scales of a row
    bool aligned;      // words are
};

// Of the rows `first` and `second` of a matrix whose last one is `last`.
DEVICE RowScales scales_of_rows(const GroupScales& groups, int first, int second, int last,
                                int count) {
    const bool aligned = (uintptr_t(groups.scales) | uintptr_t(groups.block) |
                          uintptr_t(groups.quarter) | uintptr_t(groups.row)) %
                             kWord ==
                         0;
    return {
        {groups.at(first < last ? first : last, 0), groups.at(second < last ? second : last, 0)},
        {groups.word, groups.word},
        count,
        aligned};
}

constexpr int kFactorBytes = 16 * (kTurned ? kCols + 1 : 16 + (kCols + kBlockK - 1) / kBlockK);

// What a warpgroup computes of one tile.
struct TileWork {
    RingPlace place;           // of the tile's first stage
    int num_k_tiles;           // the tile's stages
    int first_k_tile;          // which ones these are
    int consumer, count;       // which warpgroup; how many tiles it has computed before
    int row;                   // the first one of the tile that is the warpgroup's
    int first_row, first_col;  // of the warp's sums in the matrix
    BlockScales scales;
    void* slots;  // the warp's, of kFactorBytes, for scales of blocks on their way
    RowScales row_scales;
};

// The stages of a tile that a warpgroup multiplies: every kStride-th from its first one on.
constexpr int kStride = kShareK ? kConsumers : 1;
struct OwnStages {
    RingPlace place;
    int index, end;

    DEVICE OwnStages(const TileWork& work) : place(work.place), index(0), end(work.num_k_tiles) {
        if (kShareK && work.consumer > 0) next(1);
    }
    DEVICE bool there() const { return index < end; }
    DEVICE bool last() const { return index + kStride >= end; }
    DEVICE void next(int count = kStride) {
        index += count;
#pragma unroll
        for (int i = 0; i < count; ++i) place.advance();
    }
};

constexpr bool kInRow =
    kPromotes && kShareRows && !kSplitK && !kTurned;  // multiply_all is for those

DEVICE void clear(TileSums& sums) {
#pragma unroll
    for (int i = 0; i < kBlocks * kCols / 2; ++i) sums[i / (kCols / 2)][i % (kCols / 2)] = 0;
}
