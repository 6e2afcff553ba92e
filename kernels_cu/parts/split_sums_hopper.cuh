// With kSplitK: how the blocks of a cluster add up a tile's sums, of which each has those of a part
// of k.
#include "parts/ring_hopper.cuh"

// Of a thread's numbers in a row of blocks, number i of those that block `rank` finishes: a part
// of the columns of each product.
template <int kProducts>
DEVICE constexpr int own_sum(int rank, int i) {
    constexpr int kOwn = kCols / 2 / kClusterSize / kProducts;
    return i / kOwn * (kCols / 2 / kProducts) + rank * kOwn + i % kOwn;
}

// What a warpgroup gets of the other blocks' sums, by block, four numbers and thread.
constexpr int kOwnSums = kCols / 2 / (kSplitK ? kClusterSize : 1);  // of a thread, one block's
using SplitSums = Bytes<16>[kClusterSize > 1 ? kClusterSize - 1 : 1][kBlocks * kOwnSums / 4][128];
static_assert(!kSplitK ||
                  kConsumers * sizeof(SplitSums) <= kStages * (RowStage::kBytes + ColStage::kBytes),
              "the ring");

// They are counted, so that a warpgroup waits for nothing else.
struct SplitBarriers {
    Barrier full[kSplitK ? kConsumers : 1];

    DEVICE void init() {
        for (Barrier& barrier : full) barrier.init(1);
    }
};

// By all threads of the cluster, after its blocks' barriers are made and before sums are written to
// other blocks.  kFree: nothing else is where they go, else stages were.
template <bool kFree>
DEVICE void begin_split_sums() {
    if constexpr (kFree) cluster_arrive_relaxed();
}
template <bool kFree>
DEVICE void sync_before_split_sums() {
    if constexpr (!kFree) cluster_arrive();  // no stage is read any more
    cluster_wait();
}

// `place` is the warpgroup's.  The columns that this block finishes, plus their sums in the cluster's other blocks, in the order
// of k; those of two products in the place of the first block's.
template <int kProducts, bool kFree>
DEVICE void add_split_sums(void* place, SplitBarriers& barriers, int warpgroup, TileSums& sums) {
    static_assert(!kSplitK || kOwnSums / kProducts % 4 == 0, "four numbers at once");
    SplitSums& theirs = *static_cast<SplitSums*>(place);
    Barrier& full = barriers.full[warpgroup];
    const int rank = cluster_rank(), thread = threadIdx.x % 128;
    // Chosen and not branched on: the compiler would copy all sums for either way.
    const auto sum_of = [&](int block, int i) {
        SumType sum = sums[i / kOwnSums][own_sum<kProducts>(0, i % kOwnSums)];
#pragma unroll
        for (int known = 1; known < kClusterSize; ++known) {
            const SumType other = sums[i / kOwnSums][own_sum<kProducts>(known, i % kOwnSums)];
            sum = block == known ? other : sum;
        }
        return sum;
    };
    if (thread == 0) full.arrive_expect_tx(sizeof(SplitSums));
    sync_before_split_sums<kFree>();
#pragma unroll
    for (int next = 1; next < kClusterSize; ++next) {
        const int to = (rank + next) % kClusterSize;
        auto& slice = theirs[rank < to ? rank : rank - 1];
#pragma unroll
        for (int i = 0; i < kBlocks * kOwnSums; i += 4) {
            const Bytes<16> four = {
                bit_cast<uint32_t>(sum_of(to, i)), bit_cast<uint32_t>(sum_of(to, i + 1)),
                bit_cast<uint32_t>(sum_of(to, i + 2)), bit_cast<uint32_t>(sum_of(to, i + 3))};
            store_async(&slice[i / 4][thread], four, full, to);
        }
    }
    full.wait(0);
#pragma unroll
    for (int i = 0; i < kBlocks * kOwnSums; i += 4) {
        SumType total[4] = {};
#pragma unroll
        for (int from = 0; from < kClusterSize; ++from) {
            Bytes<16> part{};
            if (from != rank) part = theirs[from < rank ? from : from - 1][i / 4][thread];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[j] += from == rank ? sum_of(rank, i + j) : bit_cast<SumType>(part.words[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int known = 0; known < kClusterSize; ++known) {
                SumType& sum = sums[i / kOwnSums][own_sum<kProducts>(known, (i + j) % kOwnSums)];
                if (kProducts > 1 ? known == 0 : known == rank) sum = total[j];
            }
        }
    }
    if (kFree) named_barrier(1 + warpgroup, 128);  // read, before others use the place
}
