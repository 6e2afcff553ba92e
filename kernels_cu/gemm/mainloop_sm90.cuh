// Common parts of the Hopper mainloops: a producer loads tiles of A and B by TMA through a pipeline
// of stages; consumer warpgroups multiply them by wgmma.
//
// Each mainloop is a class template Mainloop<Operands, Tile, Stages, Schedule, Cluster> (types of
// gemm/policies.cuh) with a function `mma` that accumulates one tile:
//   MainloopSm90SS      both operands from shared memory: 16-bit elements, or int8
//   MainloopSm90SSFp8   the same for FP8, with partial accumulators promoted to FP32
//   MainloopSm90SSParts the same for 16-bit parts of FP32
//   MainloopSm90RS      mixed input: 8-bit or NVFP4 weights, dequantised in registers; with block
//                       scales a partial accumulator is promoted to FP32
// Rows and columns refer to the accumulators; with SwapAB they are the output's columns and rows.
#pragma once
#include "gemm/policies.cuh"
#include "gemm/stage_operand.cuh"
#include "gemm/nvfp4.cuh"
#include "gemm/work_tile.cuh"
#include "pipeline/tma_pipeline.cuh"
#include "platform/wgmma.cuh"

namespace gemm {

constexpr int kWarpRows = 16;  // a warp's accumulator rows of a warpgroup's 64

// Scaling of partial accumulators.
struct NoScales {};
struct BlockScaled {};

// Block scales of a tile, from its first row and block on: A has one per row and kScaleBlock of k,
// each B one per kScaleBlock x kScaleBlock block.  Null: 1.
struct BlockScales {
    const float* a;
    const float* b[2];
    int64_t a_row, a_k, b_k[2];  // strides of rows and blocks
    int last_row;                // index of A's last valid row

    // k: index of a block.  Rows past the matrix have the last row's scale.
    DEVICE const float* a_at(int row, int k) const {
        return a ? a + (row < last_row ? row : last_row) * a_row + k * a_k : nullptr;
    }
    DEVICE const float* b_at(int product, int k) const {
        return b[product] ? b[product] + k * b_k[product] : nullptr;
    }
    // The tile at the warpgroup's columns of B, from `first` on, clamped to the matrix.
    DEVICE static GemmWorkTile of_columns(GemmWorkTile tile, int first, int64_t n) {
        tile.col = tile.col + first < n ? tile.col + first : n - 1;
        return tile;
    }
};

// The e4m3 scales of a thread's two rows of an NVFP4 operand, in words of four; each scales 16
// elements along k.
struct RowScales {
    const e4m3* rows[2];
    int64_t steps[2];  // from a word to the next, in elements
    int count;         // scales per row
    bool aligned;      // words are aligned
};

// Scales of rows `first` and `second`, clamped to the matrix's last row `last`.
DEVICE RowScales scales_of_rows(const GroupScales& groups, int first, int second, int last,
                                int count) {
    const bool aligned = (uintptr_t(groups.scales) | uintptr_t(groups.block) |
                          uintptr_t(groups.quarter) | uintptr_t(groups.row)) %
                             kWord ==
                         0;
    return {
        {groups.at(first < last ? first : last, 0), groups.at(second < last ? second : last, 0)},
        {groups.word, groups.word},
        count,
        aligned};
}

DEVICE void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
// Cluster barrier after the mbarriers' init, whose fence orders them; nothing else needs ordering,
// so the arrival is relaxed.
DEVICE void sync_cluster_barriers() {
    cluster_arrive_relaxed();
    cluster_wait();
}

template <class Operands_, class Tile_, class Stages_, class Schedule_, class Cluster_>
struct MainloopSm90 {
    using Operands = Operands_;
    using ElementA = typename Operands::A::Element;
    using ElementB = typename Operands::B::Element;
    using RowElement = typename Operands::Rows::Element;
    using ColElement = typename Operands::Cols::Element;
    static constexpr bool kSwapAB = Operands::kSwapAB;
    static constexpr bool kMnMajorRows = Operands::Rows::kMnMajor;
    static constexpr bool kMixedInput = sizeof(ElementA) != sizeof(ElementB);
    static constexpr bool kFp8 = sizeof(ElementA) == 1 && !kSame<ElementA, int8_t>;
    static_assert(kSwapAB || !kMixedInput,
                  "only wgmma's A, the accumulators' rows, is in registers");

    static constexpr int kStages = Stages_::kCount, kStagesPerKTile = 1;
    static constexpr bool kScaledParts = false;  // MainloopSm90SSParts
    // Whether the mainloop applies block scales; whether the producer warpgroup loads them.
    static constexpr bool kBlockScales = false, kLoadsScales = false;
    static constexpr int kTileM = Tile_::kM, kTileN = Tile_::kN, kTileK = Tile_::kK;
    static constexpr int kRows = kSwapAB ? kTileN : kTileM, kCols = kSwapAB ? kTileM : kTileN;
    static constexpr int kMmaK = 32 / int(sizeof(ElementA));
    static_assert(kTileK % (kSwizzleBytes / int(sizeof(ElementA))) == 0, "whole boxes of A");

    static constexpr int kConsumers = Schedule_::kConsumers;
    static constexpr bool kPingPong = Schedule_::kPingPong, kSlicedK = Schedule_::kSlicedK;
    static constexpr bool kCooperative = !kPingPong && !kSlicedK;
    static constexpr int kConsumerRows = kCooperative ? kRows / kConsumers : kRows;
    static constexpr int kMmasM = kConsumerRows / 64;  // wgmma instructions along the rows
    static_assert(kMmasM * 64 == kConsumerRows && kMmasM * kCols <= (kPingPong ? 384 : 352),
                  "the accumulators fit into registers");
    static_assert(!kSlicedK || kStages % kConsumers == 0, "a stage belongs to one warpgroup");
    static_assert(kStages >= (kSlicedK ? 4 : 2),
                  "a stage is released after the next one's products");

    static constexpr int kClusterSize = Cluster_::kSize;
    static constexpr bool kSplitK = Cluster_::kSplitK, kMulticast = Cluster_::kMulticast;
    static_assert(!kSplitK || kCooperative, "cluster split-K is of cooperative warpgroups");
    // Cluster split-K: bytes of accumulators that a block receives from the others.
    static constexpr int kExchangeBytes =
        4 * (kClusterSize - 1) * kConsumers * kConsumerRows * kCols / kClusterSize;

    using ElementAccumulator = typename Choose<kSame<ElementA, int8_t>, int, float>::Type;
    using Accumulator = ElementAccumulator[kMmasM][kCols / 2];

    using StageRows = StageOperand<typename Operands::Rows, kRows, kTileK>;
    using StageCols = StageOperand<typename Operands::Cols, kCols, kTileK>;

    static_assert(!kSplitK || kExchangeBytes <= kStages * (StageRows::kBytes + StageCols::kBytes),
                  "the pipeline's stages hold what blocks exchange");

    // One thread per warpgroup releases a stage; with mixed input, whose stages threads read, and
    // with FP8 one thread per warp does.
    static constexpr int kThreadsPerArrival = kMixedInput || kFp8 ? 32 : 128;
    static constexpr int kArrivals = (kCooperative ? kConsumers : 1) * 128 / kThreadsPerArrival *
                                     (kMulticast ? kClusterSize : 1);
    using Pipeline = pipeline::TmaPipeline<kStages, kThreadsPerArrival, kArrivals,
                                           kMulticast ? kClusterSize : 1>;
    using PipelineState = typename Pipeline::State;

    // warpgroups: ordered barriers between the warpgroups (see the mainloops); with cluster split-K
    // each counts the accumulators that a warpgroup receives (SplitKReduction).
    struct SharedStorage {
        unsigned char rows[kStages][StageRows::kBytes];
        unsigned char cols[kStages][StageCols::kBytes];
        Pipeline pipeline;
        Barrier warpgroups[kConsumers];

        DEVICE void init() {
            pipeline.init();
            for (Barrier& of_warpgroup : warpgroups)
                of_warpgroup.init(kSplitK ? 1 : 128 / kThreadsPerArrival);
            fence_barrier_init();
        }
    };

    // A consumer warpgroup's work tile.
    struct WorkTile {
        PipelineState state;       // the tile's first stage
        int num_k_tiles;           // number of stages
        int first_k_tile;          // index of the first
        int consumer, count;       // warpgroup; tiles computed before
        int row;                   // the warpgroup's first row in the tile
        int first_row, first_col;  // the warp's first accumulator in the matrix
        RowScales row_scales;
    };

    // Iterates over a warpgroup's stages of a tile: every kStride-th.
    static constexpr int kStride = kSlicedK ? kConsumers : 1;
    struct ConsumerStages {
        PipelineState state;
        int index, end;

        DEVICE ConsumerStages(const WorkTile& work)
            : state(work.state), index(0), end(work.num_k_tiles) {
            if (kSlicedK && work.consumer > 0) next(1);
        }
        DEVICE bool valid() const { return index < end; }
        DEVICE bool last() const { return index + kStride >= end; }
        DEVICE void next(int count = kStride) {
            index += count;
#pragma unroll
            for (int i = 0; i < count; ++i) state.advance();
        }
    };

    DEVICE static void clear(Accumulator& accumulator) {
#pragma unroll
        for (int i = 0; i < kMmasM * kCols / 2; ++i)
            accumulator[i / (kCols / 2)][i % (kCols / 2)] = 0;
    }

    // TMA source of an operand's tile: rows of A or columns of B from `extent` on, of which `left`
    // are valid.  edge: the map for the last rows (StageOperand::map).
    struct Source {
        const TensorMap &map, &edge;
        int extent, left, batch;
    };
    // The first column of the slice that this block multicasts.
    DEVICE static int slice_begin() {
        return kMulticast ? StageCols::template slice_begin<kClusterSize>(cluster_rank()) : 0;
    }
    // Whether the matrix ends before the tile's rows, or before this block's slice of its columns.
    DEVICE static bool is_row_edge(const Source& rows) { return rows.left < kRows; }
    DEVICE static bool is_col_edge(const Source& cols) {
        return cols.left - slice_begin() < kCols / (kMulticast ? kClusterSize : 1);
    }
    template <bool kEdge>
    DEVICE static void load_rows(unsigned char* stage, Barrier& full, int k, const Source& rows,
                                 int part = 0) {
        // The last blocks of a cluster can have no valid row.
        StageRows::template load<kEdge, kMulticast>(stage, rows.map, rows.edge, full, k,
                                                    rows.extent, rows.left, rows.batch + part);
    }
    template <bool kEdge>
    DEVICE static void load_cols(unsigned char* stage, Barrier& full, int k, const Source& cols,
                                 int part = 0) {
        if constexpr (kMulticast) {
            StageCols::template load_multicast<kClusterSize, kEdge>(
                stage, cols.map, cols.edge, full, k, cols.extent, cols.left, cols.batch + part,
                cluster_rank());
        } else {
            StageCols::template load<kEdge, false>(stage, cols.map, cols.edge, full, k, cols.extent,
                                                   cols.left, cols.batch + part);
        }
    }

    // Called by the producer thread.  Loads `num_k_tiles` k tiles from `first` on, the first
    // `ahead` of them last (TileLoader::kStaggersK).
    template <bool kRowEdge, bool kColEdge>
    DEVICE static void load(SharedStorage& storage, PipelineState& state, const Source& rows,
                            const Source& cols, int first, int num_k_tiles, int ahead = 0) {
        const int bytes = StageRows::bytes(rows.left) + StageCols::bytes(cols.left);
#pragma unroll 1
        for (int i = 0; i < num_k_tiles; ++i) {
            const int at = i + ahead < num_k_tiles ? i + ahead : i + ahead - num_k_tiles;
            const int k = (first + at) * kTileK;
            Barrier& full = storage.pipeline.full[state.stage];
            storage.pipeline.producer_acquire(state);
            full.arrive_expect_tx(bytes);
            load_rows<kRowEdge>(storage.rows[state.stage], full, k, rows);
            load_cols<kColEdge>(storage.cols[state.stage], full, k, cols);
            state.advance();
        }
    }
};

}  // namespace gemm
