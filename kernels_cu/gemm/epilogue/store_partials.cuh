// Stores partial accumulators for split-K with a workspace: from registers, without staging and
// the code of an epilogue.  Four lanes, or with SwapAB eight, store a sector of 32 bytes; of 8-bit
// MN-major weights every second word of two.
#pragma once
#include "gemm/epilogue/tile.cuh"
#include "common/vector.cuh"

namespace gemm {

template <class Tile> struct StorePartials {
    using Accumulator = typename Tile::Accumulator;
    static constexpr int kMmasM = Tile::kMmasM, kCols = Tile::kCols;
    static_assert(!Tile::kSplitK, "of a cluster's blocks none has all columns");

    // out: a row-major (m, n) matrix, n even.  (row, col): the warp's first accumulator.
    DEVICE static void store(float* out, int m, int n, int row, int col,
                             const Accumulator& accumulator) {
        const int lane = Tile::lane(), rows = Tile::kSwapAB ? n : m, cols = Tile::kSwapAB ? m : n;
#pragma unroll
        for (int i = 0; i < 2 * kMmasM; ++i) {
            const int at_row = row + 64 * (i / 2) + Tile::row_of_half(lane, i % 2);
            if (at_row >= rows) continue;
#pragma unroll
            for (int j = 0; j < kCols / 8; ++j) {
                const int at_col = col + wgmma_col(lane, 4 * j);
                const float* pair = &accumulator[i / 2][4 * j + 2 * (i % 2)];
                if constexpr (Tile::kSwapAB) {
                    float* to = out + int64_t(at_col) * n + at_row;
                    if (at_col < cols) to[0] = pair[0];
                    if (at_col + 1 < cols) to[n] = pair[1];
                } else if (at_col < cols) {
                    store_vector<8>(out + int64_t(at_row) * n + at_col,
                                    {bit_cast<uint32_t>(pair[0]), bit_cast<uint32_t>(pair[1])});
                }
            }
        }
    }
};

}  // namespace gemm
