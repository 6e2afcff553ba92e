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

// The columns that this block finishes, plus their sums in the cluster's other blocks, in the order
// of k; those of two products in the place of the first block's.  Threads without sums take part in
// both barriers.
template <int kProducts>
DEVICE void add_split_sums(Ring& ring, int warpgroup, TileSums& sums) {
    constexpr int kOwn = kCols / 2 / kClusterSize;  // of a thread's numbers, one block's
    static_assert(!kSplitK || kOwn / kProducts % 4 == 0, "four numbers at once");
    using Slices = Bytes<16>[kClusterSize][kConsumers][kBlocks * kOwn / 4][128];
    static_assert(!kSplitK || sizeof(Slices) <= kStages * (RowStage::kBytes + ColStage::kBytes),
                  "the ring");
    // Where stages were: of block, warpgroup, four numbers and thread.
    Slices& slices = *reinterpret_cast<Slices*>(&ring);
    const int rank = cluster_rank(), thread = threadIdx.x % 128;
    // Chosen and not branched on: the compiler would copy all sums for either way.
    const auto sum_of = [&](int block, int i) {
        SumType sum = sums[i / kOwn][own_sum<kProducts>(0, i % kOwn)];
#pragma unroll
        for (int known = 1; known < kClusterSize; ++known) {
            const SumType other = sums[i / kOwn][own_sum<kProducts>(known, i % kOwn)];
            sum = block == known ? other : sum;
        }
        return sum;
    };
    sync_cluster();  // no stage is read any more
#pragma unroll
    for (int next = 1; next < kClusterSize; ++next) {
        const int to = (rank + next) % kClusterSize;
        auto& slice = (*cluster_shared(&slices, to))[rank][warpgroup];
#pragma unroll
        for (int i = 0; i < kBlocks * kOwn; i += 4) {
            slice[i / 4][thread] = {
                bit_cast<uint32_t>(sum_of(to, i)), bit_cast<uint32_t>(sum_of(to, i + 1)),
                bit_cast<uint32_t>(sum_of(to, i + 2)), bit_cast<uint32_t>(sum_of(to, i + 3))};
        }
    }
    sync_cluster();
#pragma unroll
    for (int i = 0; i < kBlocks * kOwn; i += 4) {
        SumType total[4] = {};
#pragma unroll
        for (int from = 0; from < kClusterSize; ++from) {
            Bytes<16> part{};
            if (from != rank) part = slices[from][warpgroup][i / 4][thread];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                total[j] += from == rank ? sum_of(rank, i + j) : bit_cast<SumType>(part.words[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int known = 0; known < kClusterSize; ++known) {
                SumType& sum = sums[i / kOwn][own_sum<kProducts>(known, (i + j) % kOwn)];
                if (kProducts > 1 ? known == 0 : known == rank) sum = total[j];
            }
        }
    }
}
