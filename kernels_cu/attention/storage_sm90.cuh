// Shared memory of Hopper attention: stages of queries, keys and values, their barriers, and the
// producer's messages to the consumers.
#pragma once
#include "attention/scheduler_sm90.cuh"
#include "pipeline/tma_pipeline.cuh"
#include "platform/wgmma.cuh"

namespace attention {

// Varlen tensor maps cover the rows of all sequences, but rows past the end of a sequence must be
// out of bounds.  Row coordinates start at kRagged - length, so that a sequence's last row is the
// map's last one, row kRagged - 1.  Two more dimensions undo the shift: a step in the first is one
// row forward, kRagged steps in the second are kRagged rows back, modulo 2^64.
constexpr int kRagged = 1 << 30;

// Rows from `row` on of a head, in a batch element or in the sequence that begins at `first` and
// has `length` rows.
struct RowRange { int row, head, batch, first, length; };

template <bool kVarlen> struct Coordinates {
    int at[kVarlen ? 5 : 4];

    DEVICE static Coordinates of(const RowRange& p, int dim) {
        Coordinates c;
        c.at[0] = dim;
        c.at[1] = kVarlen ? kRagged - p.length + p.row : p.row;
        c.at[2] = p.head;
        c.at[3] = kVarlen ? p.first + p.length : p.batch;
        if (kVarlen) c.at[kVarlen ? 4 : 0] = kRagged;
        return c;
    }
};

// kRows rows of kDims elements, in boxes of kBoxDims; the last box can be used in part.
template <class Traits, int kRows_, int kDims> struct SharedRows {
    static constexpr int kRows = kRows_;
    static constexpr int kRowBytes = Traits::kSwizzleBytes, kBoxDims = Traits::kBoxDims;
    static constexpr int kBoxes = (kDims + kBoxDims - 1) / kBoxDims;
    static constexpr int kBoxBytes = kRows * kRowBytes;
    unsigned char bytes[kBoxes * kBoxBytes];

    DEVICE void load(const TensorMap& map, Barrier& full, const RowRange& from) {
        full.arrive_expect_tx(sizeof(bytes));
        load_rows(0, map, full, from);
    }
    // Loads the rows of one box of the map to row `row` on, a multiple of 8 (the swizzle's period).
    DEVICE void load_rows(int row, const TensorMap& map, Barrier& full, const RowRange& from) {
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const auto to = Coordinates<Traits::kVarlen>::of(from, i * kBoxDims);
            tma_load(bytes + i * kBoxBytes + row * kRowBytes, map, full, to.at);
        }
    }
    // K-major operand (k: dims) from `row` on, and the byte offset of dim `dim`.
    DEVICE uint64_t k_major(int row) const {
        return matrix_descriptor<kRowBytes>(bytes + row * kRowBytes, 0, 8 * kRowBytes);
    }
    DEVICE static int to_dim(int dim) { return dim / kBoxDims * kBoxBytes + dim % kBoxDims * 2; }
    // MN-major operand (k: rows; N: as many of the dims as are used), and the byte offset of row
    // `row`.
    DEVICE uint64_t mn_major() const {
        return matrix_descriptor<kRowBytes>(bytes, kBoxBytes, 8 * kRowBytes);
    }
    DEVICE static int to_row(int row) { return row * kRowBytes; }
};

// num_key_tiles: of the query tile; a block mask can keep fewer.  They are processed in descending
// order.  kNoTile: the previous tile was the last one.
constexpr int kNoTile = -1;
struct QueryTile {
    AttentionHead head;
    int row, num_key_tiles;
    int end;  // the tile's last row keeps only keys below this
};
// With a block mask, a warpgroup's view of a key tile: first key, block type, partial tile, and
// whether it is the query tile's last one.
struct alignas(16) KeyTileInfo { int key, type, partial, last; };

template <class Traits> struct SharedStorage {
    // The producer writes query tile i + 1 while consumers can still read tile i - 1.
    static constexpr int kTiles = 4;
    static constexpr int kStages = Traits::kStages, kQueryStages = Traits::kQueryStages;
    static constexpr int kConsumers = Traits::kConsumers;
    // Outputs overwrite their own queries; with two stages, the other stage is loaded meanwhile.
    SharedRows<Traits, Traits::kTileM, Traits::kHeadDim> queries[kQueryStages];
    SharedRows<Traits, Traits::kTileN, Traits::kHeadDim> keys[kStages];
    SharedRows<Traits, Traits::kTileN, Traits::kHeadDimV> values[kStages];
    KeyTileInfo steps[Traits::Mask::kBlocks ? kStages : 1][kConsumers];  // of `keys`
    // A stage of queries is free when each warp's outputs have left it.
    pipeline::TmaPipeline<kQueryStages, 32, 4 * kConsumers> query_pipeline;
    pipeline::TmaPipeline<kStages, 128, kConsumers> key_pipeline, value_pipeline;
    QueryTile tiles[kTiles];  // of `queries`, and the next one
    SequenceOrder<Traits::kVarlen> sequences;

    DEVICE void init() {
        query_pipeline.init();
        key_pipeline.init();
        value_pipeline.init();
        fence_barrier_init();
    }
};

}  // namespace attention
