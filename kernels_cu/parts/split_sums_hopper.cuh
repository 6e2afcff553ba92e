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

// What a block gets of the other ones' sums, by block, warpgroup, four numbers and thread.
constexpr int kOwnSums = kCols / 2 / (kSplitK ? kClusterSize : 1);  // of a thread, one block's
using SplitSums =
    Bytes<16>[kClusterSize > 1 ? kClusterSize - 1 : 1][kConsumers][kBlocks * kOwnSums / 4][128];
static_assert(!kSplitK || sizeof(SplitSums) <= kStages * (RowStage::kBytes + ColStage::kBytes),
              "the ring");

// By all threads of the cluster, before and after its products, before sums are written to other
// blocks.  kFree: nothing else is where they go, else stages were.
template <bool kFree>
DEVICE void begin_split_sums() {
    if constexpr (kFree) cluster_arrive();
}
template <bool kFree>
DEVICE void sync_before_split_sums() {
    if constexpr (kFree) cluster_wait();  // until the other blocks are there
    else sync_cluster();                  // and no stage is read any more
}
// By threads without sums.
template <bool kFree>
DEVICE void skip_split_sums() {
    sync_before_split_sums<kFree>();
    sync_cluster();
}

// The columns that this block finishes, plus their sums in the cluster's other blocks, in the order
// of k; those of two products in the place of the first block's.
template <int kProducts, bool kFree>
DEVICE void add_split_sums(void* place, int warpgroup, TileSums& sums) {
    static_assert(!kSplitK || kOwnSums / kProducts % 4 == 0, "four numbers at once");
    SplitSums& theirs = *static_cast<SplitSums*>(place);
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
    sync_before_split_sums<kFree>();
#pragma unroll
    for (int next = 1; next < kClusterSize; ++next) {
        const int to = (rank + next) % kClusterSize;
        auto& slice = (*cluster_shared(&theirs, to))[rank < to ? rank : rank - 1][warpgroup];
#pragma unroll
        for (int i = 0; i < kBlocks * kOwnSums; i += 4) {
            slice[i / 4][thread] = {
                bit_cast<uint32_t>(sum_of(to, i)), bit_cast<uint32_t>(sum_of(to, i + 1)),
                bit_cast<uint32_t>(sum_of(to, i + 2)), bit_cast<uint32_t>(sum_of(to, i + 3))};
        }
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kOwnSums; i += 4) {
        SumType total[4] = {};
#pragma unroll
        for (int from = 0; from < kClusterSize; ++from) {
            Bytes<16> part{};
            if (from != rank)
                part = theirs[from < rank ? from : from - 1][warpgroup][i / 4][thread];
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
    if (kFree) named_barrier(3, 128 * kConsumers);  // read, before others use the place
}
