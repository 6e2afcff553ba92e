// The producer of Hopper attention: one thread issues the TMA loads of queries, keys and values.
//
// It iterates over the query tiles of its scheduler and the key tiles that each needs.  Only the
// producer reads the lists of a block mask; it passes KeySteps to the consumers through shared
// memory.
#pragma once
#include "attention/kv_sm90.cuh"

namespace attention {

template <class Traits> struct ProducerSm90 {
    using Mask = typename Traits::Mask;
    using Storage = SharedStorage<Traits>;
    using Score = typename Traits::Score;
    // One list of key blocks per block row of the tile; uniform masks have one block row.
    using AllTiles = KeyTiles<Mask::kUniform ? 64 : Traits::kTileM, Traits::kTileN,
                              Mask::kBlocks && !Mask::kFormula, false, Traits::kGeneral>;
    using KeyTileIterator =
        typename Score::template Tiles<AllTiles, Traits::kTileM, Traits::kTileN>::Type;
    using KvState = pipeline::PipelineState<Traits::kStages>;
    using QueryState = pipeline::PipelineState<Traits::kQueryStages>;
    static constexpr int kConsumers = Traits::kConsumers;
    Storage& storage;
    const TensorMap &q_map, &k_map, &v_map;
    const typename Traits::Params& params;
    const typename Traits::Arrays& arrays;
    const typename Traits::Kv& kv;

    // Loads the current key tile of `keys`, and stores its KeySteps.
    DEVICE void load_keys(const AttentionHead& head, const HeadMask& mask, int row,
                          const KeyTileIterator& keys, uint32_t index) {
        const KvState to(index);
        KeyTileInfo found[kConsumers];
        if constexpr (Mask::kFormula) {
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) {
                found[i] = {keys.key, Score::type_of(keys), 0, !keys.more()};
            }
        } else if constexpr (Mask::kBlocks) {
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) {
                const int own = row + i * 64;  // the warpgroup's first row
                if (i > 0 && Mask::kUniform) {
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
        storage.key_pipeline.producer_acquire(to);
        if constexpr (Mask::kBlocks) {
#pragma unroll
            for (int i = 0; i < kConsumers; ++i) storage.steps[to.stage][i] = found[i];
        }
        kv.load_keys(storage.keys[to.stage], k_map, storage.key_pipeline.full[to.stage], head,
                     keys.key);
    }
    // Index of a query tile's first key tile.
    DEVICE int first_tile(const AttentionHead& head, int row) const {
        return Traits::kGeneral ? head.first_key(params, row) / Traits::kTileN : 0;
    }
    DEVICE void find_tile(TileScheduler<Traits>& scheduler, uint32_t count) {
        QueryTile tile;
        tile.num_key_tiles = kNoTile;
        if (scheduler.next(params, storage.sequences, tile.head, tile.row)) {
            const int last = tile.row + clamp_index(tile.head.sq - tile.row, 0, Traits::kTileM) - 1;
            tile.end = tile.head.limit(params, last);
            tile.num_key_tiles = tile.end > 0 ? (tile.end - 1) / Traits::kTileN + 1 : 0;
            if constexpr (Traits::kGeneral) {
                const int left = tile.num_key_tiles - first_tile(tile.head, tile.row);
                tile.num_key_tiles = left > 0 ? left : 0;
            }
        }
        storage.tiles[count % Storage::kTiles] = tile;
    }
    DEVICE void run(TileScheduler<Traits> scheduler) {
        uint32_t index = 0;
        find_tile(scheduler, 0);
#pragma unroll 1
        for (uint32_t count = 0;; ++count) {
            const QueryState query(count);
            QueryTile& tile = storage.tiles[count % Storage::kTiles];
            storage.query_pipeline.producer_acquire(query);
            if (tile.num_key_tiles == kNoTile) {
                storage.query_pipeline.full[query.stage].arrive();
                return;
            }
            const AttentionHead head = tile.head;
            const int row = tile.row;
            const HeadMask mask = HeadMask::of(params.mask, arrays, head.batch, head.head);
            const int first_key = first_tile(head, row) * Traits::kTileN;
            KeyTileIterator keys(mask, row, head.sq, first_key, tile.end);
            Score::begin(keys, params, arrays, head, row);
            bool more = keys.next();
            if (Mask::kBlocks && !more) tile.num_key_tiles = 0;
            storage.queries[query.stage].load(
                q_map, storage.query_pipeline.full[query.stage],
                {row, head.head, head.batch, int(head.q_first), head.sq});
            if (more) load_keys(head, mask, row, keys, index);
            // Finding the next tile overlaps these loads.
            find_tile(scheduler, count + 1);
            for (; more; ++index) {
                const int key = keys.key;
                more = keys.next();
                if (more) load_keys(head, mask, row, keys, index + 1);
                const KvState to(index);
                storage.value_pipeline.producer_acquire(to);
                kv.load_values(storage.values[to.stage], v_map,
                               storage.value_pipeline.full[to.stage], head, key);
            }
        }
    }
};

}  // namespace attention
