// Attention on Hopper: what lies in shared memory, and the producer that brings it there.
//
// The producer goes through tiles of queries (parts/attention_order_hopper.cuh: which ones) and,
// for each, through the tiles of keys and values that it needs; it alone reads the lists of a mask
// of blocks.  What the consumers must know of a tile of queries or of keys it puts beside it.
#include "parts/attention_order_hopper.cuh"
#include "platform/wgmma.cuh"

constexpr int kLine = 128, kBoxDims = kLine / 2, kBoxes = kHeadDim / kBoxDims;  // a tile's boxes
constexpr int kStepK = 16, kSteps = kTileN / kStepK;
static_assert(kHeadDim % kBoxDims == 0 && kTileN % kStepK == 0 && kTileN <= 256,
              "whole boxes and steps");
static_assert(!kBlocks || (kOneList ? 128 : 64) % kTileN == 0,
              "a warpgroup's part of a tile lies in one block of a mask");

// Maps of packed sequences have rows of all sequences, but what lies beyond the end of one is
// outside: a sequence's last row is made the last one that the map has, row kRagged - 1, by a start
// that is `length` rows further back.  Two more dimensions move it there: in one a step is a row,
// in the other kRagged steps are the way back by kRagged rows, modulo 2^64.
constexpr int kRagged = 1 << 30;

// The rows from `row` on of a head, in an element of the batch or a sequence that begins at `first`
// and has `length` of them.
struct RowsPlace { int row, head, batch, first, length; };
struct Coordinates {
    int at[kPacked ? 5 : 4];

    DEVICE static Coordinates of(const RowsPlace& p, int dim) {
        Coordinates c;
        c.at[0] = dim;
        c.at[1] = kPacked ? kRagged - p.length + p.row : p.row;
        c.at[2] = p.head;
        c.at[3] = kPacked ? p.first + p.length : p.batch;
        if (kPacked) c.at[kPacked ? 4 : 0] = kRagged;
        return c;
    }
};

// Rows of kHeadDim elements, in boxes of kBoxDims of them.
template <int kTileRows>
struct AttentionTile {
    static constexpr int kBoxBytes = kTileRows * kLine;
    unsigned char bytes[kBoxes * kBoxBytes];

    DEVICE void load(const TensorMap& map, Barrier& full, const RowsPlace& from) {
        full.arrive_expect_tx(sizeof(bytes));
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            const Coordinates place = Coordinates::of(from, i * kBoxDims);
            tma_load(bytes + i * kBoxBytes, map, full, place.at);
        }
    }
    // The operand whose k are dims, from `row` on, and how many bytes further on it has dim `dim`;
    // and that whose k are rows.
    DEVICE uint64_t along_dims(int row) const {
        return matrix_descriptor<kLine>(bytes + row * kLine, 0, 8 * kLine);
    }
    DEVICE static int to_dim(int dim) { return dim / kBoxDims * kBoxBytes + dim % kBoxDims * 2; }
    DEVICE uint64_t along_rows() const {
        return matrix_descriptor<kLine>(bytes, kBoxBytes, 8 * kLine);
    }
    DEVICE static int to_row(int row) { return row * kLine; }
};

// A tile of queries.  num_steps: its tiles of keys, descending, of which a mask of blocks may keep
// fewer; kNoTile: the tile before was the last one.
constexpr int kNoTile = -1;
struct QueryTile {
    AttentionHead head;
    int row, num_steps;
    int end;  // keys from here on are not kept by its last row
};
// Of a mask of blocks, a warpgroup's part of a tile of keys: where it begins, its block's type and
// number of partial tile, and whether it is the last one of the tile of queries.
struct alignas(16) KeyStep { int key, type, partial, last; };

// The next tile is known before the consumers have left the last one but one.
constexpr int kTiles = 4;

// full: its bytes are there; empty: its consumers are done.
struct HopperAttention {
    // With one of them, outputs overwrite their own queries before they are stored, and so they do
    // with two, while the other one is loaded.
    AttentionTile<kTileM> queries[kQueryTiles];
    AttentionTile<kTileN> keys[kStages], values[kStages];
    KeyStep steps[kBlocks ? kStages : 1][kConsumers];  // of `keys`
    Barrier queries_full[kQueryTiles], queries_empty[kQueryTiles];
    Barrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
    QueryTile tiles[kTiles];  // of `queries`, and the next one
    SequenceOrder sequences;

    DEVICE void init() {
        for (int i = 0; i < kQueryTiles; ++i) {
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
// Where the number-th tile goes, of kCount places.
template <int kCount>
struct RingPlace {
    int stage, parity;

    DEVICE explicit RingPlace(uint32_t number)
        : stage(int(number % kCount)), parity(int(number / kCount & 1)) {}
};
using StagePlace = RingPlace<kStages>;
using QueryPlace = RingPlace<kQueryTiles>;

// The tile's rows of blocks have a list each.
using KeyLists = KeyTiles<kOneList ? 64 : kTileM, kTileN, kBlocks>;

// By one thread.
struct Producer {
    HopperAttention& storage;
    const TensorMap &q_map, &k_map, &v_map;
    const AttentionParams& params;
    const MaskArrays& arrays;

    DEVICE static RowsPlace keys_at(const AttentionHead& head, int key) {
        return {key, head.kv_head, head.batch, int(head.k_first), head.sk};
    }
    // The keys that `keys` is at, and what consumers must know of them.
    DEVICE void load_keys(const AttentionHead& head, const HeadMask& mask, int row,
                          const KeyLists& keys, uint32_t number) {
        const StagePlace to(number);
        KeyStep found[kConsumers];
        if constexpr (kBlocks) {
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) {
                const int own = row + i * 64;  // of the warpgroup
                if (i > 0 && kOneList) {
                    found[i] = found[0];
                    continue;
                }
                int type = kMaskedBlock, partial = 0;
                if (own < head.sq) {
                    type = mask.block_type(own, keys.key);
                    if (type == kPartialBlock) partial = mask.partial_index(own, keys.key);
                }
                found[i] = {keys.key, type, partial, !keys.more()};
            }
        }
        storage.keys_empty[to.stage].wait(to.parity ^ 1);
        if constexpr (kBlocks) {
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) storage.steps[to.stage][i] = found[i];
        }
        storage.keys[to.stage].load(k_map, storage.keys_full[to.stage], keys_at(head, keys.key));
    }
    DEVICE void find_tile(TileOrder& order, uint32_t count) {
        QueryTile tile;
        tile.num_steps = kNoTile;
        if (order.next(params, storage.sequences, tile.head, tile.row)) {
            const int last = tile.row + clamp_index(tile.head.sq - tile.row, 0, kTileM) - 1;
            tile.end = tile.head.limit(params, last);
            tile.num_steps = tile.end > 0 ? (tile.end - 1) / kTileN + 1 : 0;
        }
        storage.tiles[count % kTiles] = tile;
    }
    DEVICE void run(TileOrder order) {
        uint32_t number = 0;
        find_tile(order, 0);
#pragma unroll 1
        for (uint32_t count = 0;; ++count) {
            const QueryPlace place(count);
            QueryTile& tile = storage.tiles[count % kTiles];
            storage.queries_empty[place.stage].wait(place.parity ^ 1);
            if (tile.num_steps == kNoTile) {
                storage.queries_full[place.stage].arrive();
                return;
            }
            const AttentionHead head = tile.head;
            const int row = tile.row;
            const HeadMask mask = HeadMask::of(params.mask, arrays, head.batch, head.head);
            KeyLists keys(mask, row, head.sq, tile.end);
            bool more = keys.next();
            if (kBlocks && !more) tile.num_steps = 0;
            storage.queries[place.stage].load(
                q_map, storage.queries_full[place.stage],
                {row, head.head, head.batch, int(head.q_first), head.sq});
            if (more) load_keys(head, mask, row, keys, number);
            // Meanwhile, before anybody waits for it.
            find_tile(order, count + 1);
            for (; more; ++number) {
                const int key = keys.key;
                more = keys.next();
                if (more) load_keys(head, mask, row, keys, number + 1);
                const StagePlace to(number);
                storage.values_empty[to.stage].wait(to.parity ^ 1);
                storage.values[to.stage].load(v_map, storage.values_full[to.stage],
                                              keys_at(head, key));
            }
        }
    }
};
