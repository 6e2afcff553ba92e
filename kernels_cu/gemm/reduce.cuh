// Reductions of partial accumulators: over warpgroups (sliced-K) or a cluster's blocks (split-K).
#pragma once
#include "gemm/mainloop_sm90.cuh"

namespace gemm {

// Sliced-K: adds the second warpgroup's accumulators to the first's.  memory: a Slices.
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
        named_barrier(3, 128 * Mainloop::kConsumers);  // before the next tile overwrites the slices
    }
};

// Cluster split-K: each block reduces and stores a range of the columns of each of kProducts
// products.  kOwnMemory: accumulators are exchanged through separate memory, otherwise through the
// pipeline's stages.
template <class Mainloop, bool kOwnMemory> struct SplitKReduction {
    using Accumulator = typename Mainloop::Accumulator;
    using ElementAccumulator = typename Mainloop::ElementAccumulator;
    static constexpr int kClusterSize = Mainloop::kClusterSize, kMmasM = Mainloop::kMmasM;
    static constexpr int kProducts = Mainloop::Operands::B::kCount;
    static constexpr int kThread = Mainloop::kCols / 2;  // a thread's accumulators in 64 rows
    static constexpr int kOwn = kThread / kClusterSize;  // in its block's columns
    static_assert(kOwn / kProducts % 4 == 0, "four at once");
    // Indexed by block, warpgroup, four accumulators and thread.
    using Exchange = Bytes<16>[kClusterSize - 1][Mainloop::kConsumers][kMmasM * kOwn / 4][128];

    // Index of the i-th of a thread's accumulators, in 64 rows, in the columns of block `rank`.
    DEVICE static constexpr int own_index(int rank, int i) {
        constexpr int kOfProduct = kOwn / kProducts;
        return i / kOfProduct * (kThread / kProducts) + rank * kOfProduct + i % kOfProduct;
    }
    // Called by all threads of the cluster: at kernel start, and before the exchange.
    DEVICE static void begin() {
        if constexpr (kOwnMemory) cluster_arrive();
    }
    DEVICE static void sync_before() {
        if constexpr (kOwnMemory) cluster_wait();  // the other blocks have started
        else sync_cluster();                       // and all stages have been read
    }
    // This block's columns become the sum over the cluster's blocks, in the order of k.  With two
    // products the sums are placed in the first block's columns.  full: the warpgroup's barrier
    // (one arrival), which counts the bytes of the other blocks' accumulators.
    DEVICE static void add(void* memory, Barrier& full, int warpgroup, Accumulator& accumulator) {
        Exchange& received = *static_cast<Exchange*>(memory);
        const int rank = cluster_rank(), thread = threadIdx.x % 128;
        // Selects instead of branches: the compiler would copy all accumulators for each branch.
        const auto own = [&](int block, int i) {
            ElementAccumulator value = accumulator[i / kOwn][own_index(0, i % kOwn)];
#pragma unroll
            for (int known = 1; known < kClusterSize; ++known) {
                const ElementAccumulator other = accumulator[i / kOwn][own_index(known, i % kOwn)];
                value = block == known ? other : value;
            }
            return value;
        };
        if (thread == 0) full.arrive_expect_tx((kClusterSize - 1) * int(sizeof(received[0][0])));
        sync_before();
#pragma unroll
        for (int next = 1; next < kClusterSize; ++next) {
            const int to = (rank + next) % kClusterSize;
            auto& slice = received[rank < to ? rank : rank - 1][warpgroup];
#pragma unroll
            for (int i = 0; i < kMmasM * kOwn; i += 4) {
                const Bytes<16> four{
                    bit_cast<uint32_t>(own(to, i)), bit_cast<uint32_t>(own(to, i + 1)),
                    bit_cast<uint32_t>(own(to, i + 2)), bit_cast<uint32_t>(own(to, i + 3))};
                store_async(&slice[i / 4][thread], four, full, to);
            }
        }
        full.wait(0);
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
        if (kOwnMemory) named_barrier(3, 128 * Mainloop::kConsumers);  // before others overwrite it
    }
};

}  // namespace gemm
