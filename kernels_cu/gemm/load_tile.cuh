// Producer loads of one output tile: a tile of A and one of B per stage.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// Arguments: a_map, a_edge, b_map, b_edge, and a_batch, b_batch, m, n of the problem.
template <class Mainloop, class Arguments> struct TileLoader {
    using Storage = typename Mainloop::SharedStorage;
    using State = typename Mainloop::PipelineState;
    using StageRows = typename Mainloop::StageRows;
    using StageCols = typename Mainloop::StageCols;
    static constexpr bool kSwapAB = Mainloop::kSwapAB, kMulticast = Mainloop::kMulticast;
    static constexpr bool kPrefetches = true;
    static constexpr int kCols = Mainloop::kCols;
    const Arguments& arguments;

    // For 8-bit weights whose row stride equals their length, blocks in lockstep would hit the same
    // few DRAM banks.  Therefore tiles start at different k, which depends only on their columns.
    static constexpr bool kStaggersK =
        Mainloop::kSlicedK && Mainloop::kMixedInput && !Mainloop::kMnMajorRows && kCols < 64 &&
        !kMulticast && !Mainloop::kBlockScales && !kSame<typename Mainloop::RowElement, e2m1x2>;
    // A Fibonacci hash of the tile, scaled to [0, num_k_tiles).
    DEVICE static int first_k_tile_of(int tile, int num_k_tiles) {
        return kStaggersK
                   ? int(uint64_t(uint32_t(tile) * 0x9e3779b9u) * uint32_t(num_k_tiles) >> 32)
                   : 0;
    }

    using Source = typename Mainloop::Source;
    DEVICE static int first_row(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.col : tile.row);
    }
    DEVICE static int first_col(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.row : tile.col);
    }
    DEVICE Source a(const GemmWorkTile& tile) const {
        return {arguments.a_map, arguments.a_edge, int(tile.row), int(arguments.m() - tile.row),
                arguments.a_batch(tile)};
    }
    DEVICE Source b(const GemmWorkTile& tile) const {
        return {arguments.b_map, arguments.b_edge, int(tile.col), int(arguments.n() - tile.col),
                arguments.b_batch(tile)};
    }
    DEVICE Source rows(const GemmWorkTile& tile) const { return kSwapAB ? b(tile) : a(tile); }
    DEVICE Source cols(const GemmWorkTile& tile) const { return kSwapAB ? a(tile) : b(tile); }

    DEVICE static const TensorMap& row_map(const Source& rows) {
        return StageRows::map(rows.map, rows.edge, Mainloop::is_row_edge(rows));
    }
    DEVICE static const TensorMap& col_map(const Source& cols) {
        return StageCols::map(cols.map, cols.edge, Mainloop::is_col_edge(cols));
    }

    // Prefetches the tensor maps of the block's first tile.
    DEVICE void prefetch_maps(const GemmWorkTile& tile) const {
        const Source row = rows(tile), col = cols(tile);
        if (row.left > 0) prefetch_tensor_map(row_map(row));
        if (col.left > Mainloop::slice_begin()) prefetch_tensor_map(col_map(col));
    }
    // L2 prefetch of the first stage, while the cluster's blocks synchronise.
    DEVICE void prefetch(const GemmWorkTile& tile) const {
        const Source row = rows(tile), col = cols(tile);
        const int begin = Mainloop::slice_begin();
        if (row.left > 0) StageRows::prefetch(row_map(row), row.extent, row.batch);
        if (col.left > begin) StageCols::prefetch(col_map(col), col.extent + begin, col.batch);
    }
    // One loop for each of four kinds of tiles.  In a shared loop the maps' addresses would not be
    // constant, and a stage of a small tile would take longer (FP8 64 x 64: 15%).
    template <class Scheduler>
    DEVICE void load(const Scheduler& scheduler, Storage& storage, State& state,
                     const GemmWorkTile& tile) const {
        const Source row = rows(tile), col = cols(tile);  // once: the code of batches is long
        const int num_k_tiles = scheduler.num_k_tiles,
                  ahead = first_k_tile_of(int(tile.col) / Mainloop::kTileN, num_k_tiles);
        if (Mainloop::is_row_edge(row)) {
            load_rows<true>(storage, state, row, col, scheduler.first_k_tile, num_k_tiles, ahead);
        } else {
            load_rows<false>(storage, state, row, col, scheduler.first_k_tile, num_k_tiles, ahead);
        }
    }
    template <bool kRowEdge>
    DEVICE void load_rows(Storage& storage, State& state, const Source& row, const Source& col,
                          int first, int num_k_tiles, int ahead) const {
        if (Mainloop::is_col_edge(col)) {
            Mainloop::template load<kRowEdge, true>(storage, state, row, col, first, num_k_tiles,
                                                    ahead);
        } else {
            Mainloop::template load<kRowEdge, false>(storage, state, row, col, first, num_k_tiles,
                                                     ahead);
        }
    }
};

}  // namespace gemm
