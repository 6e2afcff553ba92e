// The residual (C), of the output's dtype, loaded by TMA.
#pragma once
#include "gemm/epilogue/tile.cuh"

namespace gemm {

// A warp's residual boxes, or with SwapAB a warpgroup's.  A box is loaded to the staging from which
// its results are stored.  A tile's first two boxes are loaded during the mainloop, the others once
// TMA has read the previous results in the staging.
template <class Tile> struct Residual {
    using OwnChunks = typename Tile::OwnChunks;
    using Staging = typename Tile::Staging;
    static constexpr bool kSwapAB = Tile::kSwapAB;
    static constexpr int kBoxBytes = Tile::kBoxBytes;
    static constexpr int kTileBoxes = Tile::kMmasM * OwnChunks::kCount;
    const TensorMap& map;
    Barrier (&full)[2];
    Staging* staging;

    // Whether this thread loads the boxes; it also stores them.
    DEVICE static bool loads() { return threadIdx.x % (kSwapAB ? 128 : 32) == 0; }
    // Index of the tile's box with chunk `chunk` of rows 64 * m on.
    DEVICE static int box_of(int m, int chunk) {
        return m * OwnChunks::kCount + chunk - OwnChunks().first;
    }
    // Staging of box `i` of tile `count`.
    DEVICE unsigned char* box(int count, int i) const {
        return staging->boxes[0] + (count * kTileBoxes + i) % 2 * (kSwapAB ? 4 : 1) * kBoxBytes;
    }
    DEVICE void wait(int count, int i) const {
        const int index = count * kTileBoxes + i;
        full[index % 2].wait(index / 2 & 1);
    }
    // (row, col): the tile's first accumulator.
    DEVICE void load(int count, int i, int row, int col, int batch) const {
        Barrier& barrier = full[(count * kTileBoxes + i) % 2];
        barrier.arrive_expect_tx(kSwapAB ? Tile::kChunk * kSwizzleBytes : kBoxBytes);
        const auto at = coordinates(i, row, col, batch);
        tma_load(box(count, i), map, barrier, at.of);
    }
    // Before tile `count` is stored, and once TMA has read the previous tile's results: loads as
    // many boxes as there is staging for, and prefetches the others to L2.
    DEVICE void begin(int count, int row, int col, int batch) const {
        if (loads()) {
            tma_store_wait_read<0>();
#pragma unroll
            for (int i = 0; i < kTileBoxes; ++i) {
                if (i < 2) load(count, i, row, col, batch);
                else tma_prefetch(map, coordinates(i, row, col, batch).of);
            }
        }
        sync_warp();
    }
    // While box `i` is being stored: loads the next box into its staging.
    DEVICE void follow(int count, int i, int row, int col, int batch) const {
        if (i + 2 >= kTileBoxes) return;
        tma_store_wait_read<0>();
        load(count, i + 2, row, col, batch);
    }
    struct Coordinates { int of[3]; };
    DEVICE static Coordinates coordinates(int i, int row, int col, int batch) {
        row += i / OwnChunks::kCount * 64;
        col += Tile::chunk_col(OwnChunks().first + i % OwnChunks::kCount);
        return {{kSwapAB ? row : col, kSwapAB ? col : row, batch}};
    }
};

}  // namespace gemm
