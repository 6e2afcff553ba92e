// Producer loads of one output tile: a tile of A and one of B per stage.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// Arguments: a_map, b_map, and a_batch, b_batch, stage_bytes, m of the problem.
template <class Mainloop, class Arguments> struct TileLoader {
    using Storage = typename Mainloop::SharedStorage;
    using State = typename Mainloop::PipelineState;
    using StageRows = typename Mainloop::StageRows;
    using StageCols = typename Mainloop::StageCols;
    static constexpr bool kSwapAB = Mainloop::kSwapAB, kMulticast = Mainloop::kMulticast;
    static constexpr bool kPrefetches = true;
    static constexpr int kCols = Mainloop::kCols;
    const Arguments& arguments;

    // 8-bit weights whose row stride equals their length: in lockstep, all blocks would hit the
    // same few DRAM banks.  Tiles therefore start at different k, a function of their columns
    // alone.
    static constexpr bool kSpreads = Mainloop::kSlicedK && Mainloop::kMixedInput &&
                                     !Mainloop::kMnMajorRows && kCols < 64 && !kMulticast &&
                                     !kSame<typename Mainloop::RowElement, e2m1x2>;
    DEVICE static int first_of_k(int tile, int num_k_tiles) {
        return kSpreads ? int(uint64_t(uint32_t(tile) * 0x9e3779b9u) * uint32_t(num_k_tiles) >> 32)
                        : 0;
    }

    DEVICE const TensorMap& row_map() const { return kSwapAB ? arguments.b_map : arguments.a_map; }
    DEVICE const TensorMap& col_map() const { return kSwapAB ? arguments.a_map : arguments.b_map; }
    DEVICE static int first_row(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.col : tile.row);
    }
    DEVICE static int first_col(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.row : tile.col);
    }
    DEVICE int row_batch(const GemmWorkTile& tile) const {
        return kSwapAB ? arguments.b_batch(tile) : arguments.a_batch(tile);
    }
    DEVICE int col_batch(const GemmWorkTile& tile) const {
        return kSwapAB ? arguments.a_batch(tile) : arguments.b_batch(tile);
    }

    // L2 prefetch of the first stage, while the cluster's blocks synchronise.
    DEVICE void prefetch(const GemmWorkTile& tile) const {
        StageRows::prefetch(row_map(), first_row(tile), row_batch(tile));
        StageCols::prefetch(col_map(),
                            first_col(tile) + cluster_rank() * (kCols / Mainloop::kClusterSize),
                            col_batch(tile));
    }
    template <class Scheduler>
    DEVICE void load(const Scheduler& scheduler, Storage& storage, State& state,
                     const GemmWorkTile& tile) const {
        const int first_k_tile = scheduler.first_k_tile, num_k_tiles = scheduler.num_k_tiles;
        const bool has_rows = !kMulticast || kSwapAB || tile.row < arguments.m();
        Mainloop::load(storage, state, row_map(), col_map(), arguments.stage_bytes(), first_k_tile,
                       num_k_tiles, first_row(tile), first_col(tile), row_batch(tile),
                       col_batch(tile), first_of_k(int(tile.col) / Mainloop::kTileN, num_k_tiles),
                       has_rows);
    }
};

}  // namespace gemm
