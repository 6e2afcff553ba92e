// Shared memory of Hopper attention: stages of queries, keys and values, their barriers, and what the
// producer tells the consumers of each.
#include "attention/scheduler_sm90.cuh"
#include "platform/wgmma.cuh"

namespace attention {

// Tensor maps of packed sequences have the rows of all sequences, but rows beyond the end of one must be
// out of bounds: a sequence's last row is made the map's last one, row kRagged - 1, by a start that is
// `length` rows further back.  Two more dimensions move it there: in one a step is a row, in the other
// kRagged steps are the way back by kRagged rows, modulo 2^64.
constexpr int kRagged = 1 << 30;

// Rows `row` and on of a head, in an element of the batch or a sequence that begins at `first` and has
// `length` rows.
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

// kRows rows of kHeadDim elements, in boxes of kBoxDims of them.
template <class Traits, int kRows> struct SharedRows {
    static constexpr int kLine = Traits::kSwizzleBytes, kBoxDims = Traits::kBoxDims;
    static constexpr int kBoxBytes = kRows * kLine;
    unsigned char bytes[Traits::kBoxes * kBoxBytes];

    DEVICE void load(const TensorMap& map, Barrier& full, const RowRange& from) {
        full.arrive_expect_tx(sizeof(bytes));
#pragma unroll
        for (int i = 0; i < Traits::kBoxes; ++i) {
            const auto to = Coordinates<Traits::kVarlen>::of(from, i * kBoxDims);
            tma_load(bytes + i * kBoxBytes, map, full, to.at);
        }
    }
    // The K-major operand (K: dims) from `row` on, and the offset in bytes of dim `dim`.
    DEVICE uint64_t k_major(int row) const {
        return matrix_descriptor<kLine>(bytes + row * kLine, 0, 8 * kLine);
    }
    DEVICE static int to_dim(int dim) { return dim / kBoxDims * kBoxBytes + dim % kBoxDims * 2; }
    // The MN-major operand (K: rows), and the offset in bytes of row `row`.
    DEVICE uint64_t mn_major() const {
        return matrix_descriptor<kLine>(bytes, kBoxBytes, 8 * kLine);
    }
    DEVICE static int to_row(int row) { return row * kLine; }
};

// num_steps: the key tiles of a query tile, in descending order, of which a block mask may keep fewer;
// kNoTile: the tile before was the last one.
constexpr int kNoTile = -1;
struct QueryTile {
    AttentionHead head;
    int row, num_steps;
    int end;  // keys from here on are not kept by its last row
};
// With a block mask, a warpgroup's part of a key tile: its first key, its block's type and partial tile, and
// whether it is the last one of the query tile.
struct alignas(16) KeyStep { int key, type, partial, last; };

// Stage and phase of the index-th tile, of kCount stages.
template <int kCount> struct PipelineState {
    int stage, phase;

    DEVICE explicit PipelineState(uint32_t index)
        : stage(int(index % kCount)), phase(int(index / kCount & 1)) {}
};

// full: the bytes are in shared memory; empty: the consumers have read them.
template <class Traits> struct SharedStorage {
    // The next query tile is known before the consumers have left the last but one.
    static constexpr int kTiles = 4;
    static constexpr int kStages = Traits::kStages, kQueryStages = Traits::kQueryStages;
    static constexpr int kConsumers = Traits::kConsumers;
    // Outputs overwrite their own queries before they are stored, with two stages while the other is loaded.
    SharedRows<Traits, Traits::kTileM> queries[kQueryStages];
    SharedRows<Traits, Traits::kTileN> keys[kStages], values[kStages];
    KeyStep steps[Traits::Mask::kBlocks ? kStages : 1][kConsumers];  // of `keys`
    Barrier queries_full[kQueryStages], queries_empty[kQueryStages];
    Barrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
    QueryTile tiles[kTiles];  // of `queries`, and the next one
    SequenceOrder<Traits::kVarlen> sequences;

    DEVICE void init() {
        for (int i = 0; i < kQueryStages; ++i) {
            queries_full[i].init(1);
            queries_empty[i].init(4 * kConsumers, 32);
        }
        for (int i = 0; i < kStages; ++i) {
            keys_full[i].init(1);
            values_full[i].init(1);
            keys_empty[i].init(kConsumers, 128);
            values_empty[i].init(kConsumers, 128);
        }
        fence_barrier_init();
    }
};

}  // namespace attention
