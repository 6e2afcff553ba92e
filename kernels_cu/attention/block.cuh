// A block of the portable attention kernels: out = softmax(scale * q k^T + bias, masked) v of each
// head, on any target.
//
// A block computes kTileM queries of one head; each warp has its own rows.  It iterates over tiles
// of kTileN keys from the last to the first.  The copy of a tile's values overlaps S = Q K^T, the
// copy of the next tile's keys overlaps O += P V.  Scores stay in registers, where the online
// softmax turns them into probabilities of type Element (attention/online_softmax.cuh).  Only tiles
// at the end of a row's keys are masked, in a separate loop.  Tiles that are masked for all queries
// of the block are not loaded.
// Constants: Element; kHeadDim, to which shared memory pads the head sizes with zeros; kTileM,
// kTileN; kMasked: calls can have a mask, and scores scaled before the softmax; kHalfScores: FP16
// accumulators for q k^T; kGeneral: scores have the options of GeneralScore; needs kMasked.
// Launch: grid (query tiles * heads * batch), block (kNumThreads), dynamic shared memory
// sizeof(AttentionStorage).
#pragma once
#include "attention/kv.cuh"
#include "attention/score.cuh"

using Score = Choose<kGeneral, GeneralPolicy<Element>::Type, PlainScore>::Type;
using Params = Score::Params;

// Calls f(score, row, col) for each score of this lane, with its row and column in the head.
template <class F>
DEVICE void for_each_score(Scores& scores, int first_row, int first_key, F f) {
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                f(scores.at(m, n).values[i], first_row + 16 * m + Layout::row(lane, i),
                  first_key + 16 * n + Layout::col(lane, i));
            }
        }
    }
}
struct AllScores {
    Scores& scores;
    int first_position, first_key;

    // Calls f(score, distance); distance: the query's position minus the key.
    template <class F>
    DEVICE void operator()(const F& f) const {
        for_each_score(scores, first_position, first_key,
                       [&](float& x, int position, int key) { f(x, float(position - key)); });
    }
    // Calls f(score, position, key).
    template <class F>
    DEVICE void at_positions(const F& f) const {
        for_each_score(scores, first_position, first_key, f);
    }
};
// Sets masked scores to -inf.  Applies the scale and the bias that the exponents do not include.
DEVICE void mask_scores(Scores& scores, const Params& params, const AttentionHead& head,
                        const HeadMask& mask, int first_row, int first_key, int block_type) {
    int limit = head.limit(params, first_row);
    if constexpr (kMasked) {
        if (params.prescale) {
            for_each_score(scores, first_row, first_key,
                           [&](float& x, int, int) { x *= params.score_scale; });
        }
        const auto& arrays = static_cast<const Score::Arrays&>(mask.arrays);
        const AllScores all{scores, first_row + head.offset, first_key};
        Score::apply(params, arrays, head, all);
        if (params.mask.kind == kBoolMask || params.mask.kind == kBiasMask) {
            // Rows and columns past the end are clamped: they are unused or masked below.
            const int last_row = head.sq - 1, last_key = head.sk - 1;
            for_each_score(scores, first_row, first_key, [&](float& x, int row, int col) {
                x = mask.of_array(x, row < last_row ? row : last_row,
                                  col < last_key ? col : last_key);
            });
        }
        if constexpr (Score::kMask) {
            if (block_type == kPartialBlock) Score::mask(params, arrays, head, all);
        } else if (block_type == kPartialBlock) {
            const uint8_t* tile = mask.partial(first_row, first_key);
            for_each_score(scores, 0, 0, [&](float& x, int row, int col) {
                if (!tile[(row << params.mask.kv_shift) + col]) x = -kInfinity;
            });
        }
        const int block_limit = mask.block_limit(first_row, block_type);
        limit = limit < block_limit ? limit : block_limit;
    }
    // No row is masked if neither the first row, which has the lowest limit, nor the last row is.
    if (first_key + kTileN <= limit &&
        (!kGeneral || first_key >= head.first_key(params, first_row + kWarpRows - 1)))
        return;
    const int lane = lane_id(), first_col = first_key + Layout::col(lane, 0);
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
        for (int i = 0; i < Layout::kCount; ++i) {
            const int row = first_row + 16 * m + Layout::row(lane, i);
            int end = head.limit(params, row);
            if constexpr (kMasked) {
                const int block_limit = mask.block_limit(row, block_type);
                end = end < block_limit ? end : block_limit;
            }
            // A compile-time constant on most targets.
            const int left = end - first_col,
                      from_first = Layout::col(lane, i) - Layout::col(lane, 0);
            const int before = kGeneral ? head.first_key(params, row) - first_col : 0;
#pragma unroll
            for (int n = 0; n < kKeyFragments; ++n) {
                if (16 * n + from_first >= left || (kGeneral && 16 * n + from_first < before))
                    scores.at(m, n).values[i] = -kInfinity;
            }
        }
    }
}

struct WarpRows {
    Softmax softmax[kRowFragments];
    Outputs outputs;
};

// The warp's first row in the block's tile.  Rematerialised by each caller, so that it is not live
// across the mainloop.
DEVICE int first_row_of_warp() { return opaque(int(threadIdx.x)) / kWarpSize * kWarpRows; }

// Calls f(top, m, r) with the maximum (AttentionStorage::row_maxima) of row r of row fragment m, in
// the one lane that owns the row.
template <class F>
DEVICE void for_each_row_maximum(AttentionStorage& storage, F f) {
    const int lane = lane_id(), first = first_row_of_warp();
    if (!Rows::is_first(lane)) return;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
        for (int r = 0; r < Softmax::kRows; ++r) {
            f(storage.row_maxima[first + 16 * m + Rows::row(lane, r)], m, r);
        }
    }
}

// Online softmax step: `scores` become probabilities P, then O += P V.
template <class Copier>
DEVICE void attend(AttentionStorage& storage, const Params& params, const Loaders& loaders,
                   bool keeps_row_maxima, Copier& copier, Scores& scores, WarpRows& rows) {
    float largest[kRowFragments][Softmax::kRows];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
        const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
        const Softmax& softmax = rows.softmax[m];
        Softmax::template find_row_maxima<kKeyFragments>(at, largest[m]);
        moves |= softmax.any_far || softmax.exceeds(largest[m], params.exponent_scale);
    }
    if (vote_any(moves)) {
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
            const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
            float factors[Softmax::kRows];
            rows.softmax[m].rescale(largest[m], params.exponent_scale, factors);
#pragma unroll
            for (int d = 0; d < kDimFragments; ++d) {
#pragma unroll
                for (int i = 0; i < Layout::kCount; ++i) {
                    rows.outputs.at(m, d).values[i] *= factors[Rows::slot(i)];
                }
            }
            rows.softmax[m].template subtract_far<kKeyFragments>(at, params.exponent_scale);
        }
    }
    if (keeps_row_maxima) {
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
            for (int r = 0; r < Softmax::kRows; ++r)
                largest[m][r] = Rows::across_lanes(largest[m][r], Max());
        }
        for_each_row_maximum(storage,
                             [&](float& top, int m, int r) { top = maximum(top, largest[m][r]); });
    }
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
        const auto at = [&](int n, int i) -> float& { return scores.at(m, n).values[i]; };
        rows.softmax[m].template exponentiate<kKeyFragments>(at, params.exponent_scale);
    }
    copier.scale_probabilities(scores, [&](float factor) {
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m) {
#pragma unroll
            for (int d = 0; d < kDimFragments; ++d) {
#pragma unroll
                for (int i = 0; i < Layout::kCount; ++i) rows.outputs.at(m, d).values[i] *= factor;
            }
        }
    });
    multiply_values(scores, storage.values, loaders, rows.outputs);
}

using Tiles = Score::Tiles<KeyTiles<kTileM, kTileN, kMasked, true, kGeneral>, kTileM, kTileN>::Type;

// The mainloop over key tiles.  Copier: from a source of keys and values (attention/kv.cuh).
template <class Copier> struct BlockMainloop {
    AttentionStorage& storage;
    const Params& params;
    const AttentionHead& head;
    const HeadMask& mask;
    Copier& copier;
    Tiles& tiles;
    Loaders& loaders;
    WarpRows& rows;
    int first_row, end;
    bool keeps_row_maxima;
    bool more;       // a tile is left
    int block_type;  // of the warp's rows in the tile

    DEVICE void look() {
        block_type = kFullBlock;
        if constexpr (kMasked) {
            const int row = first_row + first_row_of_warp();
            if constexpr (Score::kMask) block_type = Score::type_of(tiles);
            const bool blocks = params.mask.kind == kBlockMask;
            if (blocks && more && row < head.sq) block_type = mask.block_type(row, tiles.key);
        }
    }
    // Processes one tile, whose keys are in flight.  kUnmasked: the tile is fully covered, and no
    // row masks any of its keys.
    template <bool kUnmasked>
    DEVICE void step() {
        const int key = tiles.key, type = block_type;
        copier.finish_keys(storage.keys);
        copy_async_wait<0>();
        sync_block();  // the keys have arrived, and all warps have read the previous values
        copier.template start_values<kUnmasked>(storage.values, key, end - key);
        copy_async_commit();
        if constexpr (kHeadDim < 256 ? !kMasked : kHalfScores) loaders.forget();
        bool seen = true;  // some row of the warp can keep a key of the tile
        if constexpr (!kUnmasked) {
            const int last = first_row + first_row_of_warp() + kWarpRows - 1;
            // The vote tells the compiler that `seen` is uniform.
            bool keeps = type != kMaskedBlock && key < head.limit(params, last);
            if constexpr (kGeneral) {
                const int first = first_row + first_row_of_warp();
                keeps = keeps && key + kTileN > head.first_key(params, first);
            }
            seen = vote_any(keeps);
        }
        Scores scores;
        if (seen) score(storage, loaders, scores);
        copier.finish_values(storage.values);
        copy_async_wait<0>();
        sync_block();  // the values have arrived, and all warps have read the keys
        more = tiles.next();
        if (more) copier.template start_keys<true>(storage.keys, tiles.key, kTileN);
        copy_async_commit();
        look();
        if (!seen) return;
        copier.scale_scores(scores);
        if constexpr (!kUnmasked) {
            mask_scores(scores, params, head, mask, first_row + first_row_of_warp(), key, type);
        }
        attend(storage, params, loaders, keeps_row_maxima, copier, scores, rows);
    }
};

struct Statistics {
    float* lse;
    float* row_max;
    float* row_sum;
};

// Normalises the warp's rows, multiplies them by `factor` and stores them through the shared memory
// of its queries, which no other warp reads.
DEVICE void finish(AttentionStorage& storage, const Params& params, const AttentionHead& head,
                   int warp_row, int first_row, float factor, WarpRows& rows_of_warp, Element* out,
                   const Statistics& statistics) {
    const int lane = lane_id();
    float totals[kRowFragments][Softmax::kRows];
    sync_warp();  // the queries have been read
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) {
        float inverse[Softmax::kRows];  // 1 / total
#pragma unroll
        for (int r = 0; r < Softmax::kRows; ++r) {
            const float total = rows_of_warp.softmax[m].total(r);
            inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
            totals[m][r] = total;
        }
#pragma unroll
        for (int d = 0; d < kDimFragments; ++d) {
#pragma unroll
            for (int i = 0; i < Layout::kCount; ++i) {
                const int row = warp_row + 16 * m + Layout::row(lane, i);
                const int col = 16 * d + Layout::col(lane, i);
                const float y = rows_of_warp.outputs.at(m, d).values[i] * inverse[Rows::slot(i)];
                static_cast<Element*>(storage.queries(row, col / 8))[col % 8] =
                    from_float<Element>(y * factor);
            }
        }
    }
    if (statistics.lse || statistics.row_max || statistics.row_sum) {
        for_each_row_maximum(storage, [&](float& top, int m, int r) {
            const int row = first_row + 16 * m + Rows::row(lane, r);
            if (row >= head.sq) return;
            const RowStatistics found = RowStatistics::of(
                top, rows_of_warp.softmax[m].exponent(r, top, params.exponent_scale), totals[m][r],
                params.unit);
            const int64_t i = head.q_offset(params.stats) + row * params.stats.row;
            if (statistics.lse) statistics.lse[i] = found.log_sum_exp;
            if (statistics.row_max) statistics.row_max[i] = found.top;
            if (statistics.row_sum) statistics.row_sum[i] = found.sum;
        });
    }
    sync_warp();
    constexpr int kChunks = kHeadDim / 8;
    const int rows = clamp_to(head.sq - first_row, kWarpRows), chunks = int(params.head_dim_v) / 8;
    Element* origin = out + head.q_offset(params.out) + first_row * params.out.row;
#pragma unroll 4
    for (int i = lane; i < kWarpRows * kChunks; i += kWarpSize) {
        const int row = i / kChunks, chunk = i % kChunks;
        if (row < rows && chunk < chunks) {
            const void* from = storage.queries(warp_row + row, chunk);
            store_vector<16>(origin + row * params.out.row + chunk * 8, load_vector<16>(from));
        }
    }
}

template <class KvSource>
DEVICE void attention_block(AttentionStorage& storage, const Params& params, const Element* q,
                            const KvSource& kv, Element* out, float* lse, float* row_max,
                            float* row_sum, const Score::Arrays& arrays) {
    const AttentionWorkTile index = AttentionWorkTile::of(params, blockIdx.x);
    const AttentionHead head = kv.head(params, index.head).of_warp();
    const int row = uniform(index.tile * kTileM);
    if (row >= head.sq) return;
    const HeadMask mask = HeadMask::of(params.mask, arrays, head.batch, head.head);
    const int rows = clamp_to(head.sq - row, kTileM);
    const int end = head.limit(params, row + rows - 1);  // keys that the last row keeps

    const Element* q_origin = q + head.q_offset(params.q) + row * params.q.row;
    typename KvSource::Copier copier = kv.copier(params, head);
    copy_tile(storage.queries, q_origin, params.q.row, rows, int(params.head_dim));
    const int begin = kGeneral ? head.first_key(params, row) / kTileN * kTileN : 0;
    Tiles tiles(mask, row, head.sq, begin, end);
    Score::begin(tiles, params, arrays, head, row);
    bool more = tiles.next();
    if (more) copier.template start_keys<false>(storage.keys, tiles.key, end - tiles.key);
    copy_async_commit();

    WarpRows rows_of_warp{};
#pragma unroll
    for (int m = 0; m < kRowFragments; ++m) rows_of_warp.softmax[m].reset();
    float first_top = -kInfinity;
    if constexpr (kGeneral) {
        first_top = Score::sink(params, arrays, head);
#pragma unroll
        for (int m = 0; m < kRowFragments; ++m)
            rows_of_warp.softmax[m].begin(first_top, params.exponent_scale,
                                          Rows::is_first(lane_id()));
    }
    Loaders loaders(first_row_of_warp());
    const bool keeps_row_maxima = lse || row_max || row_sum;
    if (keeps_row_maxima) {
        for_each_row_maximum(
            storage, [&](float& top, int, int) { top = kGeneral ? first_top : -kInfinity; });
    }
    BlockMainloop<typename KvSource::Copier> walk{
        storage, params,       head, mask, copier,           tiles,
        loaders, rows_of_warp, row,  end,  keeps_row_maxima, more};
    walk.look();
    // Keys below this are kept by all rows: with causality the first row keeps the fewest.
    const int whole_keys = kTwoLoops ? head.limit(params, row) : 0;
    while (walk.more && tiles.key + kTileN > whole_keys) walk.template step<false>();
    if constexpr (kTwoLoops) {
        while (walk.more) walk.template step<true>();
    }
    copy_async_wait<0>();
    if (end <= 0 || kMasked) sync_block();  // without a tile, nothing has waited for the queries
    // Recomputed, so that it is not live across the loop.
    const AttentionWorkTile here = AttentionWorkTile::of(params, opaque(int(blockIdx.x)));
    const AttentionHead same = kv.head(params, here.head);
    const int warp_row = first_row_of_warp();
    finish(storage, params, same, warp_row, here.tile * kTileM + warp_row, copier.factor(),
           rows_of_warp, out, {lse, row_max, row_sum});
}
