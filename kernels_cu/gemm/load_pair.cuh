// Producer loads of a dual GEMM: a tile of A and the same columns of both matrices B, adjacent in a
// stage, as if of one matrix.
#pragma once
#include "gemm/mainloop_sm90.cuh"
#include "gemm/work_tile.cuh"

namespace gemm {

// Arguments: a_map, b1_map, b2_map, and a_batch, b1_batch, b2_batch of the problem.
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

    template <class Scheduler>
    DEVICE void load(const Scheduler& scheduler, Storage& storage, State& state,
                     const GemmWorkTile& tile) const {
        const int row = int(tile.row), col = int(tile.col);
        const int first_k_tile = scheduler.first_k_tile, num_k_tiles = scheduler.num_k_tiles;
        const int a_batch = arguments.a_batch(tile), b1_batch = arguments.b1_batch(tile),
                  b2_batch = arguments.b2_batch(tile);
#pragma unroll 1
        for (int i = first_k_tile; i < first_k_tile + num_k_tiles; ++i) {
            Barrier& full = storage.pipeline.full[state.stage];
            const int k = i * kTileK;
            const auto load_b = [&](unsigned char* to, const TensorMap& map, int batch) {
                if constexpr (kMulticast) {
                    StageB::template load_multicast<Mainloop::kClusterSize>(to, map, full, k, col,
                                                                            batch, cluster_rank());
                } else {
                    StageB::load(to, map, full, k, col, batch, kStep);
                }
            };
            storage.pipeline.producer_acquire(state);
            full.arrive_expect_tx(StageRows::kBytes + StageCols::kBytes);
            unsigned char *rows = storage.rows[state.stage], *cols = storage.cols[state.stage];
            unsigned char* b = kSwapAB ? rows : cols;
            StageA::load(kSwapAB ? cols : rows, arguments.a_map, full, k, row, a_batch);
            load_b(b, arguments.b1_map, b1_batch);
            load_b(b + kSecond, arguments.b2_map, b2_batch);
            state.advance();
        }
    }
};

}  // namespace gemm
