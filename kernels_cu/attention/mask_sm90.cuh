// Masks of a warpgroup's score accumulators on Hopper: arrays, block masks, causality, windows, and
// the end of the keys.  Tiles that need no mask are skipped.
#pragma once
#include "attention/storage_sm90.cuh"
#include "common/dtype.cuh"

namespace attention {

// Four accumulators of a thread: two rows, 8 apart, with two adjacent columns each.
struct FragmentLayout {
    static constexpr int kCount = 4;
    DEVICE static constexpr int row(int lane, int i) { return lane / 4 + i / 2 * 8; }
    DEVICE static constexpr int col(int lane, int i) { return lane % 4 * 2 + i % 2; }
};

constexpr int kUnlimited = 0x7fff0000;  // above all keys; adding a row does not overflow
constexpr uint32_t kMore = 4;           // bit of KeyRange::state above the block type

// First rows in a query tile.  Rematerialised by each caller, so that they are not live across the
// mainloop.
DEVICE int warpgroup_row() { return opaque(int(threadIdx.x)) / 128 * 64; }
DEVICE int warp_row() { return opaque(int(threadIdx.x)) / 32 * 16; }

// The keys of the next scores, and the limits of the warpgroup's first row.
template <class Traits> struct KeyRange {
    using Mask = typename Traits::Mask;
    int seen;       // the first row keeps only keys below this, if causal; general: its position
    int own_sk;     // number of the sequence's keys, if varlen
    int block_key;  // with a block mask: the first key of the block's tile
    // Number of remaining key tiles.  With a block mask: block type (2 bits), whether tiles remain
    // (1 bit), index of the partial tile (29 bits).
    uint32_t state;

    DEVICE void begin(const typename Traits::Params& params, const QueryTile& tile) {
        if constexpr (Traits::kVarlen) own_sk = tile.head.sk;
        if constexpr (Traits::kGeneral) {
            seen = tile.row + warpgroup_row() + tile.head.offset;
            return;
        }
        seen = params.causal ? tile.row + warpgroup_row() + tile.head.offset + 1 : kUnlimited;
    }
    // remaining: key tiles including this one.  Called before the GEMM: once a warpgroup's GEMM is
    // complete, all of its warps have begun it, and `steps` can change.
    DEVICE void look_up(const SharedStorage<Traits>& storage, int stage, int remaining = 0) {
        if constexpr (Mask::kBlocks) {
            const KeyTileInfo step = storage.steps[stage][threadIdx.x / 128];
            block_key = step.key;
            state = uint32_t(step.partial) << 3 | (step.last ? 0 : kMore) | uint32_t(step.type);
        } else {
            state = remaining - 1;
        }
    }
    DEVICE int sk(const AttentionParams& params) const {
        return Traits::kVarlen ? own_sk : int(params.sk);
    }
    DEVICE int first_key(const typename Traits::Params& params) const {
        if constexpr (Mask::kBlocks) return block_key;
        int tile = int(state);
        if constexpr (Traits::kGeneral) {  // `state` counts from the query tile's first key tile
            const int begin = begin_of_first(params) - warpgroup_row();
            tile += begin > 0 ? begin / Traits::kTileN : 0;
        }
        return tile * Traits::kTileN;
    }
    // The first row keeps keys below `end_of_first`, and none below `begin_of_first`.
    DEVICE int end_of_first(const typename Traits::Params& params) const {
        if constexpr (!Traits::kGeneral) return seen;
        else return params.options.right >= 0 ? seen + params.options.right + 1 : kUnlimited;
    }
    DEVICE int begin_of_first(const GeneralParams& params) const {
        return params.options.left >= 0 ? seen - params.options.left : -kUnlimited;
    }
    // Whether key tiles remain; uniform over the warpgroup.
    DEVICE bool more() const { return Mask::kBlocks ? state & kMore : state > 0; }
    DEVICE int type() const { return int(state % kMore); }  // the block's type
    DEVICE bool keeps() const { return vote_any(type() != kMaskedBlock); }
};

// Calls f(score, distance) for each score of this thread; distance: the query's position minus the
// key.
template <class Traits> struct AllScores {
    float (&scores)[Traits::kTileN / 2];
    int position, key;  // of the first score

    template <class F> DEVICE void operator()(const F& f) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float distance = float(position - key + 8 * half);
#pragma unroll
            for (int n = 0; n < Traits::kTileN / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    f(scores[4 * n + 2 * half + i], distance - float(8 * n + i));
            }
        }
    }
    // Calls f(score, position, key), for both rows of a key in succession.
    template <class F> DEVICE void at_positions(const F& f) const {
#pragma unroll
        for (int n = 0; n < Traits::kTileN / 8; ++n) {
            if (n % 4 == 0) sync_warp();  // limits the loads in flight, which need registers
#pragma unroll
            for (int i = 0; i < 4; ++i)
                f(scores[4 * n + i % 2 * 2 + i / 2], position + i % 2 * 8, key + 8 * n + i / 2);
        }
    }
};

template <class Traits> struct ScoreMask {
    using Mask = typename Traits::Mask;
    using Scores = float[Traits::kTileN / 2];
    using Layout = FragmentLayout;
    static constexpr int kTileN = Traits::kTileN, kFragments = kTileN / 8;
    const typename Traits::Params& params;
    const typename Traits::Arrays& arrays;
    const KeyRange<Traits>& keys;
    Scores& scores;

    // Replaces each score by change(score, index of its element in the mask array).
    template <class Change> DEVICE void for_each(const QueryTile& tile,
                                                 const Change& change) const {
        const int lane = opaque(lane_id()), key = keys.first_key(params) + Layout::col(lane, 0);
        const int64_t step = params.mask.strides[3];
        const int there = keys.sk(params) - key;  // keys from the lane's first one on
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = tile.row + warp_row() + Layout::row(lane, 2 * half);
            const int row = own < tile.head.sq ? own : tile.head.sq - 1;
            const HeadMask mask =
                HeadMask::of(params.mask, arrays, tile.head.batch, tile.head.head);
            int64_t at = mask.offset + row * params.mask.strides[2] + key * step;
#pragma unroll
            for (int n = 0; n < kFragments; ++n) {
                if (n % 4 == 0) sync_warp();  // limits the loads in flight, which need registers
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[4 * n + 2 * half + i];
                    if (8 * n + i < there) score = change(score, at + i * step);
                }
                at += 8 * step;
            }
        }
    }
    template <class T> DEVICE void add_bias(const QueryTile& tile) const {
        const T* biases = static_cast<const T*>(arrays.mask);
        for_each(tile, [&](float x, int64_t i) {
            const float bias = to_float(biases[i]);
            return bias == -kInfinity ? bias : x + bias;
        });
    }
    DEVICE void scale() const {
        if (!params.prescale) return;
#pragma unroll
        for (int i = 0; i < kTileN / 2; ++i) scores[i] *= params.score_scale;
    }
    // Applies the score options of a general variant.
    DEVICE void apply_score(const QueryTile& tile) const {
        scale();
        Traits::Score::apply(params, arrays, tile.head, all_scores(tile));
    }
    // Applies the mask formula to a partial tile.
    DEVICE void apply_formula(const QueryTile& tile) const {
        if (keys.type() == kPartialBlock)
            Traits::Score::mask(params, arrays, tile.head, all_scores(tile));
    }
    DEVICE AllScores<Traits> all_scores(const QueryTile& tile) const {
        const int lane = opaque(lane_id()), row = tile.row + warp_row() + Layout::row(lane, 0);
        const int key = keys.first_key(params) + Layout::col(lane, 0);
        return {scores, row + tile.head.offset, key};
    }
    DEVICE void apply_array(const QueryTile& tile) const {
        if constexpr (!Traits::kGeneral) scale();
        if (params.mask.kind == kBoolMask) {
            const auto* keeps = static_cast<const uint8_t*>(arrays.mask);
            for_each(tile, [&](float x, int64_t i) { return keeps[i] ? x : -kInfinity; });
        } else if (params.mask.kind == kBiasMask) {
            if (params.mask.dtype == kFloat) add_bias<float>(tile);
            if (params.mask.dtype == kHalf) add_bias<half>(tile);
            if (params.mask.dtype == kBf16) add_bias<bf16>(tile);
        }
    }
    // Sets scores to -inf that causality, windows, block masks or the end of the keys mask.
    // query_row: the tile's first row.
    DEVICE void apply_limits(const int& query_row) const {
        const int sk = keys.sk(params), key = keys.first_key(params);
        const int end =
            keys.end_of_first(params) < sk ? keys.end_of_first(params) : sk;  // of the first row
        // Whether the keys are also in the window of the last row.
        bool begun = true;
        if constexpr (Traits::kGeneral) begun = key >= keys.begin_of_first(params) + 63;
        const bool is_full = !Mask::kBlocks || Mask::kFormula || keys.type() == kFullBlock;
        if (is_full && key + kTileN <= end && begun) return;
        const int lane = opaque(lane_id()), row = warp_row() - warpgroup_row();
        int block_end = kUnlimited;
        if constexpr (Mask::kBlocks && !Mask::kFormula) {
            const int first_row = query_row + warpgroup_row();
            if (keys.type() == kPartialBlock) {
                const HeadMask mask{params.mask, arrays, 0, 0};
                const uint8_t* tile =
                    mask.partial(keys.state >> 3, first_row + row + Layout::row(lane, 0),
                                 key + Layout::col(lane, 0));
                const int next_row = 8 << params.mask.kv_shift;
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) {
                    if (i % 16 == 0) sync_warp();  // limits the loads in flight
                    if (!tile[i % 4 / 2 * next_row + i / 4 * 8 + i % 2]) scores[i] = -kInfinity;
                }
            }
            if (keys.type() == kCausalBlock) block_end = first_row + params.mask.causal_offset + 1;
        }
        const int limit =
            keys.end_of_first(params) < block_end ? keys.end_of_first(params) : block_end;
        if (key + kTileN <= limit && key + kTileN <= sk && begun) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = limit + row + Layout::row(lane, 2 * half);
            const int left = (own < sk ? own : sk) - key - Layout::col(lane, 0);
            int before = 0;  // the window's first key
            if constexpr (Traits::kGeneral)
                before = keys.begin_of_first(params) + row + Layout::row(lane, 2 * half) - key -
                         Layout::col(lane, 0);
#pragma unroll
            for (int n = 0; n < kFragments; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (8 * n + i >= left || (Traits::kGeneral && 8 * n + i < before))
                        scores[4 * n + 2 * half + i] = -kInfinity;
                }
            }
        }
    }
};

}  // namespace attention
