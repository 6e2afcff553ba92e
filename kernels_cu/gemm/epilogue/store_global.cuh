// The epilogue for outputs that TMA cannot store: accumulators pass through shared memory, so that
// each lane stores runs of contiguous columns (gemm/epilogue/linear_combination.cuh).
#pragma once
#include "gemm/epilogue/tile.cuh"
#include "gemm/epilogue/linear_combination.cuh"

namespace gemm {

template <class Tile> struct StoreGlobal {
    using Accumulator = typename Tile::Accumulator;
    using ElementAccumulator = typename Tile::Mainloop::ElementAccumulator;
    using Staging = typename Tile::Staging;
    static constexpr bool kSwapAB = Tile::kSwapAB;
    static constexpr int kMmasM = Tile::kMmasM, kChunk = Tile::kChunk, kChunks = Tile::kChunks;

    // (row, col): the warp's first accumulator.
    DEVICE static void store(Staging& staging, const MatrixEpilogue& epilogue, int row, int col,
                             const Accumulator& accumulator) {
        constexpr int kRun = 8;
        // A staged row is a row of accumulators, or with SwapAB a column, in runs of kRun elements.
        constexpr int kRuns = (kSwapAB ? kWarpRows : kChunk) / kRun,
                      kStagedRows = kWarpRows * kChunk / kRun / kRuns;
        const int lane = Tile::lane();
        // Swizzled against bank conflicts.
        const auto address = [&](int staged, int run) {
            const int bits = kSwapAB ? staged / 2 % 2 : staged % 8;
            return &staging.chunk[staged * kRuns * kRun + (run ^ bits) * kRun];
        };
        const typename Tile::OwnChunks own;
#pragma unroll 1
        for (int chunk = 0; chunk < kMmasM * kChunks; ++chunk) {
            if (!own.has(chunk % kChunks)) continue;
            sync_warp();  // the staging has been read
#pragma unroll
            for (int c = 0; c < kMmasM * kChunks; ++c) {
                if (c != chunk) continue;
#pragma unroll
                for (int i = 0; i < kChunk / 2; i += 2) {
                    const ElementAccumulator* pair =
                        &accumulator[c / kChunks][Tile::chunk_col(c % kChunks) / 2 + i];
                    const Bytes<8> bits = {bit_cast<uint32_t>(pair[0]),
                                           bit_cast<uint32_t>(pair[1])};
                    const int r = Tile::row_of_half(lane, i / 2 % 2), at = wgmma_col(lane, i);
                    if constexpr (kSwapAB) {
                        address(at, r / kRun)[r % kRun] = bits.words[0];
                        address(at + 1, r / kRun)[r % kRun] = bits.words[1];
                    } else {
                        *reinterpret_cast<Bytes<8>*>(&address(r, at / kRun)[at % kRun]) = bits;
                    }
                }
            }
            sync_warp();
            const int first_row = row + chunk / kChunks * 64,
                      first_col = col + Tile::chunk_col(chunk % kChunks);
#pragma unroll 1
            for (int staged = lane / kRuns; staged < kStagedRows; staged += 32 / kRuns) {
                const int at = lane % kRuns * kRun;
                const uint32_t* from = address(staged, lane % kRuns);
                ElementAccumulator run[kRun];
#pragma unroll
                for (int i = 0; i < kRun; i += 4) {
                    const Bytes<16> four = *reinterpret_cast<const Bytes<16>*>(from + i);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        run[i + j] = bit_cast<ElementAccumulator>(four.words[j]);
                }
                if constexpr (kSwapAB) epilogue.store(first_col + staged, first_row + at, run);
                else epilogue.store(first_row + staged, first_col + at, run);
            }
        }
    }
};

}  // namespace gemm
