// The mainloop of a consumer warpgroup in Hopper attention: 64 queries of a tile.
//
// S = Q K^T and O += P V by wgmma; P stays in registers, as wgmma's A.  The softmax of one key tile
// overlaps O += P V of the previous one.
#pragma once
#include "attention/epilogue_sm90.cuh"
#include "pipeline/ordered_barrier.cuh"

namespace attention {

template <class Traits> struct MainloopSm90 {
    using Element = typename Traits::Element;
    using Mask = typename Traits::Mask;
    using Storage = SharedStorage<Traits>;
    using Epilogue = EpilogueSm90<Traits>;
    using Softmax = typename Epilogue::Softmax;
    using KvState = pipeline::PipelineState<Traits::kStages>;
    using QueryState = pipeline::PipelineState<Traits::kQueryStages>;
    static constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
    static constexpr int kTileN = Traits::kTileN;
    static constexpr int kSteps = Traits::kSteps, kStepK = Traits::kStepK;
    static constexpr int kFragments = kTileN / 8;
    using Scores = float[kTileN / 2];
    using Outputs = float[kHeadDimV / 2];
    using Probabilities = uint32_t[kSteps][4];
    // Named barriers from 8 on: those from 1 on are of single warpgroups (EpilogueSm90).
    using Order = pipeline::OrderedBarrier<Traits::kConsumers, 8>;

    Storage& storage;
    const typename Traits::Params& params;
    const typename Traits::Arrays& arrays;
    Epilogue epilogue;
    int warpgroup;  // uniform
    KeyRange<Traits> keys;
    float top[2], factors[2];
    Softmax softmax;
    Scores scores;
    Outputs outputs;
    Probabilities p;

    DEVICE MainloopSm90(Storage& storage, const TensorMap& out_map,
                        const typename Traits::Params& params,
                        const typename Traits::Arrays& arrays, const RowArrays& statistics)
        : storage(storage),
          params(params),
          arrays(arrays),
          epilogue{params, storage, out_map, statistics},
          warpgroup(uniform(int(threadIdx.x) / 128)) {}

    DEVICE void begin(const QueryTile& tile) {
        keys.begin(params, tile);
        top[0] = top[1] = -kInfinity;
        softmax.reset();
        if constexpr (Traits::kGeneral) {
            top[0] = top[1] = Traits::Score::sink(params, arrays, tile.head);
            softmax.begin(top[0], params.exponent_scale, lane_id() % 4 == 0);
        }
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < kHeadDimV / 2; ++i) outputs[i] = 0.0f;
    }
    // S = Q K^T
    DEVICE void begin_scores(int query_stage, int stage) {
        const auto& q = storage.queries[query_stage];
        const auto& k = storage.keys[stage];
        const uint64_t a = q.k_major(warpgroup * 64), b = k.k_major(0);
        // The first wgmma ignores them; cleared, so that old values hold no registers.
#pragma unroll
        for (int i = 0; i < kTileN / 2; ++i) scores[i] = 0.0f;
        wgmma_fence(scores);
#pragma unroll
        for (int dim = 0; dim < kHeadDim; dim += kStepK) {
            wgmma<Element>(scores, advance(a, q.to_dim(dim)), advance(b, k.to_dim(dim)), dim > 0);
        }
        wgmma_commit();
    }
    // O += P V
    DEVICE void begin_outputs(int stage) {
        const auto& values = storage.values[stage];
        const uint64_t b = values.mn_major();
        wgmma_fence(outputs);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            wgmma<Element, Element, kMajorK, kMajorMN>(outputs, p[i],
                                                       advance(b, values.to_row(i * kStepK)), true);
        }
        wgmma_commit();
    }
    // Turns scores into the numerators of P.  Returns whether the outputs must be rescaled by
    // `factors`.  kFirst: of the query tile's first keys.
    template <bool kFirst = false> DEVICE bool exponentiate(const QueryTile& tile) {
        const ScoreMask<Traits> mask{params, arrays, keys, scores};
        if constexpr (Traits::kGeneral) mask.apply_score(tile);
        if constexpr (Mask::kArray) mask.apply_array(tile);
        if constexpr (Mask::kFormula) mask.apply_formula(tile);
        mask.apply_limits(tile.row);
        const auto at = [&](int n, int i) -> float& { return scores[4 * n + i]; };
        float largest[2];
        bool rescales = false;
        if constexpr (kFirst) {
            softmax.template start<kFragments>(at, params.exponent_scale, largest);
        } else {
            rescales =
                softmax.template update<kFragments>(at, params.exponent_scale, largest, factors);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = maximum(top[r], largest[r]);
        softmax.template exponentiate<kFragments>(at, params.exponent_scale);
        return rescales;
    }
    DEVICE void rescale() {
#pragma unroll
        for (int j = 0; j < kHeadDimV / 2; ++j) outputs[j] *= factors[j / 2 % 2];
    }
    DEVICE void to_fragments() {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                p[i][j] = pack<Element>(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
            }
        }
    }
    DEVICE void finish(int query_stage, const QueryTile& tile) {
        epilogue.store(query_stage, tile, softmax, top, outputs);
    }
    // Releases the values of a key tile that only other warpgroups use, once they have arrived: a
    // phase of `empty` has one arrival per warpgroup.  Warps that do not release do not wait,
    // because they can be more than a phase late.
    DEVICE void release_unused(KvState at) {
        if (kEveryThreadArrives || threadIdx.x % 128 == 0) {
            storage.value_pipeline.consumer_wait(at);
            storage.value_pipeline.consumer_release(at.stage);
        }
        sync_warp();
    }
    // The queries have already arrived, so this never waits.  Its loop keeps the compiler from
    // moving the exponentials below the following wait for wgmma, which writes none of their
    // registers.
    DEVICE void keep_order(QueryState query) { storage.query_pipeline.consumer_wait(query); }

    // Computes S of the keys at `next` together with O += P V of the values at `at`, then the
    // softmax of S.  If warpgroups are ordered, the others' products overlap this softmax.
    DEVICE void step(const QueryTile& tile, QueryState query, const KvState& at,
                     const KvState& next) {
        const Order order{warpgroup};
        if constexpr (Traits::kOrdered) order.wait();
        begin_scores(query.stage, next.stage);
        storage.value_pipeline.consumer_wait(at);
        begin_outputs(at.stage);
        if constexpr (Traits::kOrdered) order.arrive();
        wgmma_wait<1>(scores);
        storage.key_pipeline.consumer_release(next.stage);
        const bool grown = exponentiate(tile);
        keep_order(query);
        wgmma_wait<0>(outputs);
        storage.value_pipeline.consumer_release(at.stage);
        if (grown) rescale();
        to_fragments();
    }

    // All warpgroups visit the same key tiles.  The first GEMM of the next query tile overlaps this
    // one's epilogue.
    DEVICE void run_uniform() {
        if constexpr (Traits::kOrdered) Order{warpgroup}.begin();
        uint32_t index = 0, count = 0;  // key tiles and query tiles so far
        int stored = -1;                // query stage that a TMA store still reads
#pragma unroll 1
        for (;;) {
            // The first tile, or one after a tile whose epilogue overlapped nothing.
            QueryState query(count);
            storage.query_pipeline.consumer_wait(query);
            const QueryTile& tile = storage.tiles[count % Storage::kTiles];
            const int left = tile.num_key_tiles;
            if (left == kNoTile) return;
            begin(tile);
            if (left == 0) {
                clear();
                finish(query.stage, tile);
                epilogue.release_queries(query.stage);
                ++count;
                continue;
            }
            const KvState at(index);
            storage.key_pipeline.consumer_wait(at);
            keys.look_up(storage, at.stage, left);
            begin_scores(query.stage, at.stage);
            wgmma_wait<0>(scores);
#pragma unroll 1
            for (;;) {
                // `scores` are from the query tile's first key tile.
                storage.key_pipeline.consumer_release(KvState(index).stage);
                exponentiate<true>(storage.tiles[count % Storage::kTiles]);
                clear();
                to_fragments();
                if (Traits::kQueryStages == 2 && stored >= 0) epilogue.release_queries(stored);
                stored = -1;
#pragma unroll 1
                while (keys.more()) {
                    const KvState before(index), at(++index);
                    storage.key_pipeline.consumer_wait(at);
                    keys.look_up(storage, at.stage, keys.state);
                    step(storage.tiles[count % Storage::kTiles], query, before, at);
                }
                const KvState before(index++);
                const QueryTile& tile = storage.tiles[count % Storage::kTiles];
                const QueryTile& next_tile = storage.tiles[++count % Storage::kTiles];
                const QueryState next(count);
                int next_left = 0;
                if (Traits::kQueryStages == 2) {
                    storage.query_pipeline.consumer_wait(next);
                    next_left = next_tile.num_key_tiles;
                }
                storage.value_pipeline.consumer_wait(before);
                if (next_left <= 0) {
                    begin_outputs(before.stage);
                    wgmma_wait<0>(outputs);
                    storage.value_pipeline.consumer_release(before.stage);
                    finish(query.stage, tile);
                    if (Traits::kQueryStages == 1 || next_left == 0)
                        epilogue.release_queries(query.stage);
                    break;
                }
                const KvState at(index);
                storage.key_pipeline.consumer_wait(at);
                keys.look_up(storage, at.stage, next_left);
                begin_outputs(before.stage);
                begin_scores(next.stage, at.stage);
                wgmma_wait<1>(outputs);
                storage.value_pipeline.consumer_release(before.stage);
                finish(query.stage, tile);
                begin(next_tile);
                stored = query.stage;
                query = next;
                wgmma_wait<0>(scores);
            }
        }
    }

    // Warpgroups skip the key tiles that are masked for all of their queries.  Only within a run of
    // tiles that it uses does a warpgroup put off O += P V: values that it has not multiplied yet
    // must not block the loads for others.
    DEVICE void run_divergent() {
        uint32_t index = 0;
#pragma unroll 1
        for (uint32_t count = 0;; ++count) {
            const QueryState query(count);
            storage.query_pipeline.consumer_wait(query);
            const QueryTile& tile = storage.tiles[count % Storage::kTiles];
            if (tile.num_key_tiles == kNoTile) return;
            begin(tile);
            clear();
            bool more = tile.num_key_tiles > 0;
            bool pending = false;  // the tile after the run is skipped
#pragma unroll 1
            while (more) {
                KvState at(index);
                storage.key_pipeline.consumer_wait(at);
                keys.look_up(storage, at.stage);
                more = keys.more();
                if (!keys.keeps()) {
                    named_barrier(1 + threadIdx.x / 128, 128);  // all warps have read the tile
                    storage.key_pipeline.consumer_release(at.stage);
                    release_unused(at);
                    ++index;
                    continue;
                }
                begin_scores(query.stage, at.stage);
                wgmma_wait<0>(scores);
                storage.key_pipeline.consumer_release(at.stage);
                if (exponentiate(storage.tiles[count % Storage::kTiles])) rescale();
                to_fragments();
#pragma unroll 1
                while (more) {
                    const KvState next(index + 1);
                    storage.key_pipeline.consumer_wait(next);
                    keys.look_up(storage, next.stage);
                    more = keys.more();
                    if (!keys.keeps()) {
                        pending = true;
                        break;
                    }
                    ++index;
                    step(tile, query, at, next);
                    at = next;
                }
                storage.value_pipeline.consumer_wait(at);
                begin_outputs(at.stage);
                wgmma_wait<0>(outputs);
                storage.value_pipeline.consumer_release(at.stage);
                ++index;
                if (pending) {
                    pending = false;
                    const KvState skipped(index++);
                    storage.key_pipeline.consumer_release(skipped.stage);
                    release_unused(skipped);
                }
            }
            finish(query.stage, tile);
            epilogue.release_queries(query.stage);
        }
    }
};

}  // namespace attention
