// Accumulators of which several warpgroups (sliced-K) or blocks (cluster split-K) have a part of k
// each.
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

// Sliced-K: the first warpgroup's accumulators plus the other one's, through `memory`, of
// sizeof(Slices).
template <class Mainloop> struct SlicedKReduction {
    using Accumulator = typename Mainloop::Accumulator;
    static constexpr int kSize = Mainloop::kMmasM * Mainloop::kCols / 2, kRow = Mainloop::kCols / 2;
    using Slices = typename Mainloop::ElementAccumulator[kSize][128];

    DEVICE static void add(void* memory, int warpgroup, Accumulator& accumulator) {
        Slices& slices = *static_cast<Slices*>(memory);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
            if (warpgroup == 1) slices[i][threadIdx.x % 128] = accumulator[i / kRow][i % kRow];
        }
        named_barrier(3, 128 * Mainloop::kConsumers);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
            if (warpgroup == 0) accumulator[i / kRow][i % kRow] += slices[i][threadIdx.x % 128];
        }
        named_barrier(3, 128 * Mainloop::kConsumers);  // read, before the next tile's
    }
};

// Cluster split-K: each block finishes a range of the columns of each of kProducts products.
// kOwnMemory: the blocks exchange accumulators through memory of their own, else through the
// pipeline's stages.
template <class Mainloop, bool kOwnMemory> struct SplitKReduction {
    using Accumulator = typename Mainloop::Accumulator;
    using ElementAccumulator = typename Mainloop::ElementAccumulator;
    static constexpr int kClusterSize = Mainloop::kClusterSize, kMmasM = Mainloop::kMmasM;
    static constexpr int kProducts = Mainloop::Operands::B::kCount;
    static constexpr int kThread = Mainloop::kCols / 2;  // accumulators of a thread in 64 rows
    static constexpr int kOwn = kThread / kClusterSize;  // that its block finishes
    static_assert(kOwn / kProducts % 4 == 0, "four at once");
    // By block, warpgroup, four accumulators and thread.
    using Exchange = Bytes<16>[kClusterSize - 1][Mainloop::kConsumers][kMmasM * kOwn / 4][128];

    // Of a thread's accumulators in 64 rows, number i of those that block `rank` finishes.
    DEVICE static constexpr int own_index(int rank, int i) {
        constexpr int kOfProduct = kOwn / kProducts;
        return i / kOfProduct * (kThread / kProducts) + rank * kOfProduct + i % kOfProduct;
    }
    // By all threads of the cluster, at the kernel's begin and before the exchange.
    DEVICE static void begin() {
        if constexpr (kOwnMemory) cluster_arrive();
    }
    DEVICE static void sync_before() {
        if constexpr (kOwnMemory) cluster_wait();  // until the other blocks are there
        else sync_cluster();                       // and no stage is read any more
    }
    // By threads without accumulators.
    DEVICE static void skip() {
        sync_before();
        sync_cluster();
    }
    // The columns that this block finishes become the sum over the cluster's blocks, in the order
    // of k; of two products they take the place of the first block's.
    DEVICE static void add(void* memory, int warpgroup, Accumulator& accumulator) {
        Exchange& received = *static_cast<Exchange*>(memory);
        const int rank = cluster_rank(), thread = threadIdx.x % 128;
        // Selected, not branched on: the compiler would copy all accumulators for either branch.
        const auto own = [&](int block, int i) {
            ElementAccumulator value = accumulator[i / kOwn][own_index(0, i % kOwn)];
#pragma unroll
            for (int known = 1; known < kClusterSize; ++known) {
                const ElementAccumulator other = accumulator[i / kOwn][own_index(known, i % kOwn)];
                value = block == known ? other : value;
            }
            return value;
        };
        sync_before();
#pragma unroll
        for (int next = 1; next < kClusterSize; ++next) {
            const int to = (rank + next) % kClusterSize;
            auto& slice = (*cluster_shared(&received, to))[rank < to ? rank : rank - 1][warpgroup];
#pragma unroll
            for (int i = 0; i < kMmasM * kOwn; i += 4) {
                slice[i / 4][thread] = {
                    bit_cast<uint32_t>(own(to, i)), bit_cast<uint32_t>(own(to, i + 1)),
                    bit_cast<uint32_t>(own(to, i + 2)), bit_cast<uint32_t>(own(to, i + 3))};
            }
        }
        sync_cluster();
#pragma unroll
        for (int i = 0; i < kMmasM * kOwn; i += 4) {
            ElementAccumulator total[4] = {};
#pragma unroll
            for (int from = 0; from < kClusterSize; ++from) {
                Bytes<16> four{};
                if (from != rank)
                    four = received[from < rank ? from : from - 1][warpgroup][i / 4][thread];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    total[j] += from == rank ? own(rank, i + j)
                                             : bit_cast<ElementAccumulator>(four.words[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int known = 0; known < kClusterSize; ++known) {
                    ElementAccumulator& value =
                        accumulator[i / kOwn][own_index(known, (i + j) % kOwn)];
                    if (kProducts > 1 ? known == 0 : known == rank) value = total[j];
                }
            }
        }
        if (kOwnMemory) named_barrier(3, 128 * Mainloop::kConsumers);  // read, before others use it
    }
};

}  // namespace gemm
