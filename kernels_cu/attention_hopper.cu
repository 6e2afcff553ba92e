// attention_hopper.cu: attention.cu's results on Hopper.
//
// As many blocks as the GPU runs at once walk through the tiles of queries.  In each, a producer
// brings queries, keys and values by TMA; kConsumers warpgroups of 64 queries each multiply them by
// wgmma.  While the tensor cores multiply the probabilities before with their values, a warpgroup
// makes probabilities of its scores, in registers, which are wgmma's A.
// Constants: Element; kHeadDim, to which TMA pads the head sizes with zeros; kTileN keys of a tile;
// kStages of keys, and of values; kQueryTiles of queries: with two of them, the next tile's first
// products are under way while a tile is finished; kMaskMode: 0 no mask, 1 an array or scores that
// are scaled before the softmax, 2 blocks; kOneList: these are of 128 queries and keys, so that all
// of a tile of queries needs the same keys; kPacked: sequences of different lengths; kCounts: blocks
// take tiles of queries by a counter.
// Launch: grid (any), block (kNumThreads = 128 * (kConsumers + 1)), dynamic shared memory
// sizeof(HopperAttention).  Tensor maps: (batch, head, row, dim) of q, k, v and out, boxes of 64
// dims and kTileM, kTileN, kTileN and 16 rows, swizzled by 128 bytes; of packed sequences as
// parts/attention_tiles_hopper.cuh says.
#include "parts/attention_rows_hopper.cuh"

// What a thread may have, of the 65536 of a multiprocessor.
constexpr int kProducerRegisters = kBlocks && !kOneList ? 56 : kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kBlocks && !kOneList ? 224 : kConsumers == 2 ? 232 : 160;

// The queries are there; but where a loop may be, the compiler does not move a wait for products to
// before the exponentials that it comes after, as it would: they read no register of these.
DEVICE void keep_order(HopperAttention& storage, QueryPlace place) {
    storage.queries_full[place.stage].wait(place.parity);
}

// The scores of the keys at `next` and what the probabilities make of the values at `at`, side by side;
// then the probabilities of these scores.
DEVICE void step(HopperAttention& storage, WarpgroupRows& rows, const QueryTile& tile,
                 QueryPlace place, const StagePlace& at, const StagePlace& next) {
    rows.begin_scores(storage, place.stage, next.stage);
    storage.values_full[at.stage].wait(at.parity);
    rows.begin_outputs(storage, at.stage);
    wgmma_wait<1>(rows.scores);
    release(storage.keys_empty[next.stage]);
    const bool grown = rows.exponentiate(tile);
    keep_order(storage, place);
    wgmma_wait<0>(rows.outputs);
    release(storage.values_empty[at.stage]);
    if (grown) rows.rescale();
    rows.to_fragments();
}

// All of a tile of queries needs the same tiles of keys.
DEVICE void consume_together(HopperAttention& storage, const TensorMap& out_map,
                             const AttentionParams& params, const MaskArrays& arrays,
                             const Statistics& statistics) {
    uint32_t number = 0, count = 0;  // of tiles of keys and of queries so far
    int stored = -1;                 // the queries' place that outputs are still read from
    WarpgroupRows rows(params, arrays);
#pragma unroll 1
    for (;;) {
        // A tile after none, or after one whose end nothing followed.
        QueryPlace place(count);
        storage.queries_full[place.stage].wait(place.parity);
        const QueryTile& tile = storage.tiles[count % kTiles];
        const int left = tile.num_steps;
        if (left == kNoTile) return;
        rows.begin(tile);
        if (left == 0) {
            rows.clear();
            rows.finish(storage, out_map, place.stage, tile, statistics);
            rows.release_queries(storage, place.stage);
            ++count;
            continue;
        }
        const StagePlace at(number);
        storage.keys_full[at.stage].wait(at.parity);
        rows.look_up(storage, at.stage, left);
        rows.begin_scores(storage, place.stage, at.stage);
        wgmma_wait<0>(rows.scores);
#pragma unroll 1
        for (;;) {
            // The scores are those of the tile's first keys.
            release(storage.keys_empty[StagePlace(number).stage]);
            rows.exponentiate(storage.tiles[count % kTiles]);
            rows.clear();
            rows.to_fragments();
            if (kQueryTiles == 2 && stored >= 0) rows.release_queries(storage, stored);
            stored = -1;
#pragma unroll 1
            while (rows.more()) {
                const StagePlace before(number), at(++number);
                storage.keys_full[at.stage].wait(at.parity);
                rows.look_up(storage, at.stage, rows.state);
                step(storage, rows, storage.tiles[count % kTiles], place, before, at);
            }
            const StagePlace before(number++);
            const QueryTile& tile = storage.tiles[count % kTiles];
            const QueryTile& next_tile = storage.tiles[++count % kTiles];
            const QueryPlace next(count);
            int next_left = 0;
            if (kQueryTiles == 2) {
                storage.queries_full[next.stage].wait(next.parity);
                next_left = next_tile.num_steps;
            }
            storage.values_full[before.stage].wait(before.parity);
            if (next_left <= 0) {
                rows.begin_outputs(storage, before.stage);
                wgmma_wait<0>(rows.outputs);
                release(storage.values_empty[before.stage]);
                rows.finish(storage, out_map, place.stage, tile, statistics);
                if (kQueryTiles == 1 || next_left == 0) rows.release_queries(storage, place.stage);
                break;
            }
            const StagePlace at(number);
            storage.keys_full[at.stage].wait(at.parity);
            rows.look_up(storage, at.stage, next_left);
            rows.begin_outputs(storage, before.stage);
            rows.begin_scores(storage, next.stage, at.stage);
            wgmma_wait<1>(rows.outputs);
            release(storage.values_empty[before.stage]);
            rows.finish(storage, out_map, place.stage, tile, statistics);
            rows.begin(next_tile);
            stored = place.stage;
            place = next;
            wgmma_wait<0>(rows.scores);
        }
    }
}

// A warpgroup goes by runs of tiles of keys that it keeps: values that it has not multiplied yet must
// not keep others from being loaded.
DEVICE void consume_apart(HopperAttention& storage, const TensorMap& out_map,
                          const AttentionParams& params, const MaskArrays& arrays,
                          const Statistics& statistics) {
    uint32_t number = 0;
    WarpgroupRows rows(params, arrays);
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
        const QueryPlace place(count);
        storage.queries_full[place.stage].wait(place.parity);
        const QueryTile& tile = storage.tiles[count % kTiles];
        if (tile.num_steps == kNoTile) return;
        rows.begin(tile);
        rows.clear();
        bool more = tile.num_steps > 0;
        bool pending = false;  // the scores are another tile's than those multiplied so far
#pragma unroll 1
        while (more) {
            StagePlace at(number);
            storage.keys_full[at.stage].wait(at.parity);
            rows.look_up(storage, at.stage);
            more = rows.more();
            if (!rows.keeps()) {
                named_barrier(1 + threadIdx.x / 128, 128);  // all warps have looked it up
                release(storage.keys_empty[at.stage]);
                release_unused(storage, at);
                ++number;
                continue;
            }
            rows.begin_scores(storage, place.stage, at.stage);
            wgmma_wait<0>(rows.scores);
            release(storage.keys_empty[at.stage]);
            if (rows.exponentiate(storage.tiles[count % kTiles])) rows.rescale();
            rows.to_fragments();
#pragma unroll 1
            while (more) {
                const StagePlace next(number + 1);
                storage.keys_full[next.stage].wait(next.parity);
                rows.look_up(storage, next.stage);
                more = rows.more();
                if (!rows.keeps()) {
                    pending = true;
                    break;
                }
                ++number;
                step(storage, rows, tile, place, at, next);
                at = next;
            }
            storage.values_full[at.stage].wait(at.parity);
            rows.begin_outputs(storage, at.stage);
            wgmma_wait<0>(rows.outputs);
            release(storage.values_empty[at.stage]);
            ++number;
            if (pending) {
                pending = false;
                const StagePlace skipped(number++);
                release(storage.keys_empty[skipped.stage]);
                release_unused(storage, skipped);
            }
        }
        rows.finish(storage, out_map, place.stage, tile, statistics);
        rows.release_queries(storage, place.stage);
    }
}

KERNEL void attention_hopper(GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map,
                             GRID_CONSTANT TensorMap v_map, GRID_CONSTANT TensorMap out_map,
                             float* lse, float* row_max, float* row_sum,
                             const uint8_t* partial_tiles, const int32_t* kv_num_blocks,
                             const int32_t* kv_indices, const uint8_t* block_types,
                             const int32_t* partial_indices, const int32_t* cu_seqlens_q,
                             const int32_t* cu_seqlens_k, const int32_t* schedule,
                             uint32_t* counter, const AttentionParams params) {
    SHARED_STORAGE(HopperAttention, storage);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(q_map);
        prefetch_tensor_map(k_map);
        prefetch_tensor_map(v_map);
        prefetch_tensor_map(out_map);
        storage.init();
    }
    if constexpr (kPacked) {
        // Where queries are to come.
        auto* scratch = reinterpret_cast<SequenceOrder::Length*>(storage.queries[0].bytes);
        storage.sequences.make(params, cu_seqlens_q, cu_seqlens_k, scratch);
        fence_async_proxy();
    }
    sync_block();
    const MaskArrays arrays{partial_tiles, kv_num_blocks, kv_indices, block_types, partial_indices};
    if (threadIdx.x / 128 == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
            Producer{storage, q_map, k_map, v_map, params, arrays}.run(TileOrder::of(
                params, storage.sequences, schedule, counter, cu_seqlens_q, cu_seqlens_k));
        }
        sync_warp();
    } else {
        increase_registers<kConsumerRegisters>();
        const Statistics statistics{lse, row_max, row_sum};
        if constexpr (kBlocks && !kOneList) {
            consume_apart(storage, out_map, params, arrays, statistics);
        } else {
            consume_together(storage, out_map, params, arrays, statistics);
        }
        if (threadIdx.x % 32 == 0) tma_store_wait<0>();
        sync_warp();
    }
}
