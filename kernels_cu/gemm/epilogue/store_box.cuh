// Moves a slice of accumulators to or from a box of shared memory, which TMA stores.
#pragma once
#include "gemm/epilogue/tile.cuh"

namespace gemm {

template <class Tile> struct StoreBox {
    using Staging = typename Tile::Staging;
    static constexpr int kSlice = Tile::kSlice, kValues = Tile::kValues;
    static constexpr int kSlicesOfChunk = Tile::kSlicesOfChunk, kBoxBytes = Tile::kBoxBytes;
    static constexpr bool kSwapAB = Tile::kSwapAB, kPairedRows = Tile::kPairedRows;
    static constexpr bool kWhole = Tile::kWhole;
    static constexpr int kSlices = Tile::kSlices;
    using Values = float[kValues];
    using Pairs = uint32_t[kValues / 2];

    // Pair `i` of a lane's values, adjacent in the output: index of the first value; kPairStride:
    // distance to the second.
    DEVICE static constexpr int first_of_pair(int i) {
        return kPairedRows ? i / 2 * 4 + i % 2 : 2 * i;
    }
    static constexpr int kPairStride = kPairedRows ? 2 : 1;

    DEVICE static void pack_pairs(const Values& values, int dtype, Pairs& packed) {
        if (dtype == kHalf) {  // branch once per slice
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i)
                packed[i] =
                    pack<half>(values[first_of_pair(i)], values[first_of_pair(i) + kPairStride]);
        } else {
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i)
                packed[i] =
                    pack<bf16>(values[first_of_pair(i)], values[first_of_pair(i) + kPairStride]);
        }
    }
    // Adds pairs in the order of pack_pairs to `values`.
    template <class T> DEVICE static void add_pairs(const Pairs& added, Values& values) {
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) {
            float low, high;
            unpack<T>(added[i], low, high);
            values[first_of_pair(i)] += low;
            values[first_of_pair(i) + kPairStride] += high;
        }
    }
    DEVICE static void add_pairs(const Pairs& added, int dtype, Values& values) {
        if (dtype == kHalf) add_pairs<half>(added, values);
        else add_pairs<bf16>(added, values);
    }

    // Moves a slice's pairs to (kLoads: from) column `begin` of `box`.
    template <bool kLoads, class Pairs>
    DEVICE static void move_slice(unsigned char* box, int begin, Pairs& packed) {
        const int lane = Tile::lane(), warp = threadIdx.x / 32;
        // Swizzled address of 16-byte column i of a row of the box.
        const auto address = [&](int box_row, int i) {
            return box + box_row * kSwizzleBytes + (i ^ box_row % 8) * 16;
        };
        if constexpr (kPairedRows) {  // two rows of a column share a 32-bit word
#pragma unroll
            for (int i = 0; i < kValues / 2; ++i) {
                const int box_row = begin + wgmma_col(lane, i / 2 * 4 + i % 2);
                unsigned char* words = address(box_row, warp % 4 * 2 + lane / 16);
                auto& word = *reinterpret_cast<uint32_t*>(words + lane / 4 % 4 * 4);
                if constexpr (kLoads) packed[i] = word;
                else word = packed[i];
            }
        } else {
#pragma unroll
            for (int j = 0; j < kSlice / 16; ++j) {
                const int box_row = begin + j * 16 + lane / 16 * 8 + lane % 8;
                unsigned char* row = kSwapAB ? address(box_row, warp % 4 * 2 + lane / 8 % 2)
                                             : address(lane % 16, begin / 8 + 2 * j + lane / 16);
                uint32_t four[4];
                if constexpr (kLoads) load_matrix<kSwapAB>(four, row);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (kLoads) packed[4 * j + i] = four[i];
                    else four[i] = packed[4 * j + i];
                }
                if constexpr (!kLoads) store_matrix<kSwapAB>(row, four);
            }
        }
    }

    // Stages slice `slice` of the warp's accumulators in box `box`, which TMA stores when full: 16
    // rows x 64 columns; with SwapAB 64 rows of the warpgroup, one column per row of the box.  A
    // whole tile fills all boxes, which are adjacent.
    // (row, col): the slice's first accumulator.
    DEVICE static void store_slice(Staging* warps, int& box, const TensorMap& map, int slice,
                                   int row, int col, int batch, int dtype, const Values& values) {
        const int warp = threadIdx.x / 32, warpgroup = warp / 4;
        const int begin = kWhole ? Tile::slice_col(slice) : slice % kSlicesOfChunk * kSlice;
        const int last = kWhole ? kSlices - 1 : kSlicesOfChunk - 1;
        const int slice_of_box = kWhole ? slice : slice % kSlicesOfChunk;
        unsigned char* to =
            warps[kSwapAB ? 4 * warpgroup : warp].boxes[0] + box * (kSwapAB ? 4 : 1) * kBoxBytes;
        const bool stores = threadIdx.x % (kSwapAB ? 128 : 32) == 0;
        const auto sync = [&] {
            if constexpr (kSwapAB) named_barrier(1 + warpgroup, 128);
            else sync_warp();
        };
        Pairs packed;
        pack_pairs(values, dtype, packed);
        if (slice_of_box == 0) {
            if (stores) tma_store_wait_read<kWhole ? 0 : 1>();
            sync();
        }
        // Columns that the last two slices share are written twice, by different lanes.
        if (kWhole && Tile::kOwnCols % kSlice != 0 && slice_of_box == last) sync_warp();
        move_slice<false>(to, begin, packed);
        if (slice_of_box < last) return;
        fence_async_proxy();
        sync();
        if (stores) {
            col -= begin;
#pragma unroll
            for (int i = 0; i < (kWhole ? Tile::kChunks : 1); ++i) {
                const int at = kWhole ? Tile::chunk_col(i) : 0;
                if constexpr (kSwapAB)
                    tma_store(map, to + at * kSwizzleBytes, {row, col + at, batch});
                else tma_store(map, to, {col, row, batch});
            }
            tma_store_commit();
        }
        if (!kWhole) box ^= 1;
    }
};

}  // namespace gemm
