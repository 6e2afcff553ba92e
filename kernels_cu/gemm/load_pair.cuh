// Producer loads of a dual GEMM: a tile of A and the same columns of both matrices B, adjacent in a
// stage, as if of one matrix.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// Arguments: a_map, a_edge, b1_map, b1_edge, b2_map, b2_edge, and a_batch, b1_batch, b2_batch, m, n
// of the problem.
template <class Mainloop, class Arguments> struct PairLoader {
    using Storage = typename Mainloop::SharedStorage;
    using State = typename Mainloop::PipelineState;
    using StageRows = typename Mainloop::StageRows;
    using StageCols = typename Mainloop::StageCols;
    using OperandB = typename Mainloop::Operands::B;
    static constexpr bool kSwapAB = Mainloop::kSwapAB, kMulticast = Mainloop::kMulticast;
    static constexpr bool kPrefetches = false;
    static constexpr int kTileK = Mainloop::kTileK;
    const Arguments& arguments;

    static constexpr int kColumns = Mainloop::kTileN / 2;  // of either matrix
    using StageA = StageOperand<typename Mainloop::Operands::A, Mainloop::kTileM, kTileK>;
    using StageB = StageOperand<OperandB, kColumns, kTileK>;
    // kStep: bytes from a matrix's box to its next one; kSecond: from the first matrix to the
    // second.  A K-major box has rows of both; MN-major, the first matrix's boxes come first.
    static constexpr int kBothBoxBytes = kSwapAB ? StageRows::kBoxBytes : StageCols::kBoxBytes;
    static constexpr int kStep = OperandB::kMnMajor ? StageB::kBoxBytes : kBothBoxBytes;
    static constexpr int kSecond = OperandB::kMnMajor ? StageB::kBytes : kBothBoxBytes / 2;
    static_assert(StageB::kRowBytes == (kSwapAB ? StageRows::kRowBytes : StageCols::kRowBytes),
                  "the same rows");
    static_assert(!kMulticast || StageB::kContiguousBytes == kSwizzleBytes,
                  "a cluster's blocks load slices of one row");

    DEVICE static int first_row(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.col : tile.row);
    }
    DEVICE static int first_col(const GemmWorkTile& tile) {
        return int(kSwapAB ? tile.row : tile.col);
    }

    // First column of the slice that this block multicasts; is_col_edge: whether the matrix ends
    // inside this slice.
    DEVICE static int slice_begin() {
        return kMulticast ? StageB::template slice_begin<Mainloop::kClusterSize>(cluster_rank())
                          : 0;
    }
    DEVICE static bool is_col_edge(int left) {
        return left - slice_begin() < kColumns / (kMulticast ? Mainloop::kClusterSize : 1);
    }
    DEVICE int rows_left(const GemmWorkTile& tile) const { return int(arguments.m() - tile.row); }
    DEVICE int cols_left(const GemmWorkTile& tile) const { return int(arguments.n() - tile.col); }

    // Prefetches the tensor maps of the block's first tile.
    DEVICE void prefetch_maps(const GemmWorkTile& tile) const {
        const int a_left = rows_left(tile), b_left = cols_left(tile);
        const bool col_edge = is_col_edge(b_left);
        if (kSwapAB && arguments.params.tma_stores) prefetch_tensor_map(arguments.out_map);
        if (a_left > 0) {
            prefetch_tensor_map(
                StageA::map(arguments.a_map, arguments.a_edge, a_left < Mainloop::kTileM));
        }
        if (b_left <= slice_begin()) return;
        prefetch_tensor_map(StageB::map(arguments.b1_map, arguments.b1_edge, col_edge));
        prefetch_tensor_map(StageB::map(arguments.b2_map, arguments.b2_edge, col_edge));
    }
    template <class Scheduler>
    DEVICE void load(const Scheduler& scheduler, Storage& storage, State& state,
                     const GemmWorkTile& tile) const {
        const bool row_edge = rows_left(tile) < Mainloop::kTileM,
                   col_edge = is_col_edge(cols_left(tile));
        const Batches in{arguments.a_batch(tile), arguments.b1_batch(tile),
                         arguments.b2_batch(tile)};  // once: the code of batches is long
        if (!row_edge && !col_edge) load_tile<false, false>(scheduler, storage, state, tile, in);
        else if (!row_edge) load_tile<false, true>(scheduler, storage, state, tile, in);
        else if (!col_edge) load_tile<true, false>(scheduler, storage, state, tile, in);
        else load_tile<true, true>(scheduler, storage, state, tile, in);
    }
    struct Batches { int a, b1, b2; };  // of a tile, in the tensor maps
    template <bool kRowEdge, bool kColEdge, class Scheduler>
    DEVICE void load_tile(const Scheduler& scheduler, Storage& storage, State& state,
                          const GemmWorkTile& tile, const Batches& in) const {
        const int row = int(tile.row), col = int(tile.col);
        const int a_left = rows_left(tile), b_left = cols_left(tile);
        const int bytes = StageA::bytes(a_left) + 2 * StageB::bytes(b_left);
        const int first_k_tile = scheduler.first_k_tile, num_k_tiles = scheduler.num_k_tiles;
#pragma unroll 1
        for (int i = first_k_tile; i < first_k_tile + num_k_tiles; ++i) {
            Barrier& full = storage.pipeline.full[state.stage];
            const int k = i * kTileK;
            const auto load_b = [&](unsigned char* to, const TensorMap& map, const TensorMap& edge,
                                    int batch) {
                if constexpr (kMulticast) {
                    StageB::template load_multicast<Mainloop::kClusterSize, kColEdge>(
                        to, map, edge, full, k, col, b_left, batch, cluster_rank());
                } else {
                    StageB::template load<kColEdge, false>(to, map, edge, full, k, col, b_left,
                                                           batch, kStep);
                }
            };
            storage.pipeline.producer_acquire(state);
            full.arrive_expect_tx(bytes);
            unsigned char *rows = storage.rows[state.stage], *cols = storage.cols[state.stage];
            unsigned char* b = kSwapAB ? rows : cols;
            StageA::template load<kRowEdge, kMulticast>(kSwapAB ? cols : rows, arguments.a_map,
                                                        arguments.a_edge, full, k, row, a_left,
                                                        in.a);
            load_b(b, arguments.b1_map, arguments.b1_edge, in.b1);
            load_b(b + kSecond, arguments.b2_map, arguments.b2_edge, in.b2);
            state.advance();
        }
    }
};

}  // namespace gemm
