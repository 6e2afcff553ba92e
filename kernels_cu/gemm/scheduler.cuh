// Tile schedulers: which output tiles a block computes, and which range of k.
//
// A block computes tiles `first`, `first` + `step`, ... below `end`.  Params: of the kernel.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// Persistent: as many clusters as fit the GPU iterate over the tiles, in the order params.order.
// With cluster split-K a cluster computes one tile.
template <class Mainloop> struct PersistentScheduler {
    static constexpr int kClusterSize = Mainloop::kClusterSize;
    static constexpr bool kSplitK = Mainloop::kSplitK, kSwapAB = Mainloop::kSwapAB;
    // Adjacent tiles that a cluster computes at once.
    static constexpr int kMulticastTiles = Mainloop::kMulticast ? kClusterSize : 1;
    static constexpr int kColumns = Mainloop::kTileN / Mainloop::Operands::B::kCount;
    static constexpr int kTileM = Mainloop::kTileM * (kSwapAB ? 1 : kMulticastTiles);
    static constexpr int kTileN = kColumns * (kSwapAB ? kMulticastTiles : 1);

    using Tile = GemmWorkTile;
    int end, first, step;           // in blocks: tile i is i * kClusterSize
    int first_k_tile, num_k_tiles;  // this block's range of k, at least one tile

    template <class Params>
    DEVICE PersistentScheduler(const Params& params)
        : end(params.order.num_tiles() * kClusterSize), first(blockIdx.x), step(gridDim.x) {
        const int rank = kSplitK ? cluster_rank() : 0;
        const int all = int(params.num_k_tiles);
        first_k_tile = kSplitK ? rank * all / kClusterSize : 0;
        num_k_tiles = (kSplitK ? (rank + 1) * all / kClusterSize : all) - first_k_tile;
    }
    template <class Params> DEVICE static Tile tile(const Params& params, int index) {
        Tile tile = GemmWorkTile::of_tile(index / kClusterSize, params.order, kTileM, kTileN);
        if constexpr (Mainloop::kMulticast)
            (kSwapAB ? tile.col : tile.row) += cluster_rank() * Mainloop::kRows;
        return tile;
    }
};

}  // namespace gemm
