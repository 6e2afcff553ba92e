// Attention on Hopper: the rows of a warpgroup, 64 queries of a tile.
#include "parts/attention_tiles_hopper.cuh"
#include "parts/online_softmax.cuh"

using Scores = float[kTileN / 2];
using Outputs = float[kHeadDim / 2];
using Probabilities = uint32_t[kSteps][4];
// Four values of a thread: of two rows, two neighbours each, in 8 columns.
struct Layout {
    static constexpr int kCount = 4;
    DEVICE static constexpr int row(int lane, int i) { return lane / 4 + i / 2 * 8; }
    DEVICE static constexpr int col(int lane, int i) { return lane % 4 * 2 + i % 2; }
};
using Softmax = OnlineSoftmax<Element, Layout>;
constexpr int kFragments = kTileN / 8;
constexpr uint32_t kMore = 4;           // more than the types of blocks
constexpr int kUnlimited = 0x7fff0000;  // more than any key, also some rows further on

struct Statistics {
    float* lse;
    float* row_max;
    float* row_sum;

    DEVICE bool wanted() const { return lse || row_max || row_sum; }
};

DEVICE void release(Barrier& empty) { empty.arrive_for<128>(); }
// The values of a tile that only other warpgroups keep.  Not before they are there: a phase of
// `empty` is to have one arrival of each warpgroup.  Warps that do not release do not wait: they may
// be late by more than a phase.
DEVICE void release_unused(HopperAttention& storage, StagePlace at) {
    if (kEveryThreadArrives || threadIdx.x % 128 == 0) {
        storage.values_full[at.stage].wait(at.parity);
        release(storage.values_empty[at.stage]);
    }
    sync_warp();
}

struct WarpgroupRows {
    const AttentionParams& params;
    const MaskArrays& arrays;
    int warpgroup;  // in uniform registers
    int seen;       // keys from here on are not kept by the first row, if causal
    int own_sk;     // of the sequence
    int block_key;  // where the block begins that the scores are of
    // Tiles of keys after that; with a mask of blocks the block's type, whether there are any, and
    // the number of its partial tile, in 2, 1 and 29 bits.
    uint32_t state;
    float top[2], factors[2];
    Softmax softmax;
    Scores scores;
    Outputs outputs;
    Probabilities p;

    DEVICE WarpgroupRows(const AttentionParams& params, const MaskArrays& arrays)
        : params(params), arrays(arrays), warpgroup(uniform(int(threadIdx.x) / 128)) {}

    DEVICE int sk() const { return kPacked ? own_sk : int(params.sk); }  // of the head
    DEVICE int first_key() const {
        return kBlocks ? block_key : int(state) * kTileN;
    }  // of the scores

    // In the tile.  Worked out anew by each caller, so that none keeps them in registers.
    DEVICE static int warpgroup_row() { return opaque(int(threadIdx.x)) / 128 * 64; }
    DEVICE static int warp_row() { return opaque(int(threadIdx.x)) / 32 * 16; }

    DEVICE void begin(const QueryTile& tile) {
        if constexpr (kPacked) own_sk = tile.head.sk;
        seen = params.causal ? tile.row + warpgroup_row() + tile.head.offset + 1 : kUnlimited;
        top[0] = top[1] = -kInfinity;
        softmax.reset();
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) outputs[i] = 0.0f;
    }
    // The keys that the next scores are of.  remaining: with these.  Before they are multiplied: when
    // products of a warpgroup are there, all of its warps have begun them, and `steps` may change.
    DEVICE void look_up(const HopperAttention& storage, int stage, int remaining = 0) {
        if constexpr (kBlocks) {
            const KeyStep step = storage.steps[stage][threadIdx.x / 128];
            block_key = step.key;
            state = uint32_t(step.partial) << 3 | (step.last ? 0 : kMore) | uint32_t(step.type);
        } else {
            state = remaining - 1;
        }
    }
    // All lanes' is the same.
    DEVICE bool more() const { return kBlocks ? state & kMore : state > 0; }
    DEVICE int type() const { return int(state % kMore); }  // of the block
    DEVICE bool keeps() const { return vote_any(type() != kMaskedBlock); }

    DEVICE void begin_scores(const HopperAttention& storage, int query_stage, int stage) {
        const auto& queries = storage.queries[query_stage];
        const auto& keys = storage.keys[stage];
        const uint64_t a = queries.along_dims(warpgroup * 64), b = keys.along_dims(0);
        // What they held is not looked at: no register is kept, or copied, for it.
#pragma unroll
        for (int i = 0; i < kTileN / 2; ++i) scores[i] = 0.0f;
        wgmma_fence(scores);
#pragma unroll
        for (int dim = 0; dim < kHeadDim; dim += kStepK) {
            wgmma<Element>(scores, advance(a, queries.to_dim(dim)), advance(b, keys.to_dim(dim)),
                           dim > 0);
        }
        wgmma_commit();
    }
    DEVICE void begin_outputs(const HopperAttention& storage, int stage) {
        const auto& values = storage.values[stage];
        const uint64_t b = values.along_rows();
        wgmma_fence(outputs);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            wgmma<Element, Element, kMajorK, kMajorMN>(outputs, p[i],
                                                       advance(b, values.to_row(i * kStepK)), true);
        }
        wgmma_commit();
    }
    // Scores as `change` makes them of (score, element of the mask).
    template <class Change>
    DEVICE void by_array(const QueryTile& tile, const Change& change) {
        const int lane = opaque(lane_id()), key = first_key() + Layout::col(lane, 0);
        const int64_t step = params.mask.strides[3];
        const int there = sk() - key;  // keys, from the lane's first one on
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = tile.row + warp_row() + Layout::row(lane, 2 * half);
            const int row = own < tile.head.sq ? own : tile.head.sq - 1;
            const HeadMask mask =
                HeadMask::of(params.mask, arrays, tile.head.batch, tile.head.head);
            int64_t at = mask.offset + row * params.mask.strides[2] + key * step;
#pragma unroll
            for (int n = 0; n < kFragments; ++n) {
                if (n % 4 == 0) sync_warp();  // loads of all at once have no registers
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[4 * n + 2 * half + i];
                    if (8 * n + i < there) score = change(score, at + i * step);
                }
                at += 8 * step;
            }
        }
    }
    template <class T>
    DEVICE void add_bias(const QueryTile& tile) {
        const T* biases = static_cast<const T*>(arrays.mask);
        by_array(tile, [&](float x, int64_t i) {
            const float bias = to_float(biases[i]);
            return bias == -kInfinity ? bias : x + bias;
        });
    }
    DEVICE void by_array(const QueryTile& tile) {
        if (params.prescale) {
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i) scores[i] *= params.score_scale;
        }
        if (params.mask.kind == kBoolMask) {
            const auto* keeps = static_cast<const uint8_t*>(arrays.mask);
            by_array(tile, [&](float x, int64_t i) { return keeps[i] ? x : -kInfinity; });
        } else if (params.mask.kind == kBiasMask) {
            if (params.mask.dtype == kFloat) add_bias<float>(tile);
            if (params.mask.dtype == kHalf) add_bias<half>(tile);
            if (params.mask.dtype == kBf16) add_bias<bf16>(tile);
        }
    }
    // What is not kept becomes -inf.  query_row: the tile's first one.
    DEVICE void mask_scores(const int& query_row) {
        const int key = first_key(), end = seen < sk() ? seen : sk();  // of the first row
        if ((!kBlocks || type() == kFullBlock) && key + kTileN <= end) return;
        const int lane = opaque(lane_id()), row = warp_row() - warpgroup_row();
        int block_end = kUnlimited;
        if constexpr (kBlocks) {
            const int first_row = query_row + warpgroup_row();
            if (type() == kPartialBlock) {
                const HeadMask mask{params.mask, arrays, 0, 0};
                const uint8_t* tile = mask.partial(
                    state >> 3, first_row + row + Layout::row(lane, 0), key + Layout::col(lane, 0));
                const int next_row = 8 << params.mask.kv_shift;
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) {
                    if (i % 16 == 0) sync_warp();  // loads of all at once have no registers
                    if (!tile[i % 4 / 2 * next_row + i / 4 * 8 + i % 2]) scores[i] = -kInfinity;
                }
            }
            if (type() == kCausalBlock) block_end = first_row + params.mask.causal_offset + 1;
        }
        const int limit = seen < block_end ? seen : block_end;
        if (key + kTileN <= limit && key + kTileN <= sk()) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = limit + row + Layout::row(lane, 2 * half);
            const int left = (own < sk() ? own : sk()) - key - Layout::col(lane, 0);
#pragma unroll
            for (int n = 0; n < kFragments; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (8 * n + i >= left) scores[4 * n + 2 * half + i] = -kInfinity;
                }
            }
        }
    }
    // Scores become numerators; whether the outputs so far are to be multiplied by `factors`.
    DEVICE bool exponentiate(const QueryTile& tile) {
        if constexpr (kArray) by_array(tile);
        mask_scores(tile.row);
        const auto at = [&](int n, int i) -> float& { return scores[4 * n + i]; };
        float largest[2];
        const bool grown =
            softmax.template look<kFragments>(at, params.exponent_scale, largest, factors);
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = maximum(top[r], largest[r]);
        softmax.rescale(factors);
        softmax.template exponentiate<kFragments>(at, params.exponent_scale);
        return vote_any(grown);
    }
    DEVICE void rescale() {
#pragma unroll
        for (int j = 0; j < kHeadDim / 2; ++j) outputs[j] *= factors[j / 2 % 2];
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
    // The warp's 16 rows, by way of its queries' part of shared memory.
    DEVICE void finish(HopperAttention& storage, const TensorMap& out_map, int query_stage,
                       const QueryTile& tile, const Statistics& statistics) {
        const int lane = opaque(lane_id());
        const AttentionHead& head = tile.head;
        const int row = tile.row + warp_row(), sq = head.sq;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float total = softmax.total(r);
            inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
            const int own = row + Layout::row(lane, 2 * r);
            if (statistics.wanted() && lane % 4 == 0 && own < sq) {
                const RowStatistics found =
                    RowStatistics::of(top[r], Softmax::shifted(softmax.origin[r]), total,
                                      params.exponent_scale, params.unit);
                const int64_t i = head.q_offset(params.stats) + own * params.stats.row;
                if (statistics.lse) statistics.lse[i] = found.log_sum_exp;
                if (statistics.row_max) statistics.row_max[i] = found.top;
                if (statistics.row_sum) statistics.row_sum[i] = found.sum;
            }
        }
        named_barrier(1 + threadIdx.x / 128, 128);  // the warpgroup has read its queries
        // Lane l addresses line l % 8 of the l / 8-th matrix: rows 0-7 and 8-15 of 8 dims, then of
        // the next 8.
        auto& staging = storage.queries[query_stage];
        const int line = warp_row() + lane % 16;
#pragma unroll
        for (int dim = 0; dim < kHeadDim; dim += 16) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = outputs + dim / 2 + 2 * i;
                packed[i] = pack<Element>(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
            }
            const int chunk = dim % kBoxDims / 8 + lane / 16;
            store_matrix(staging.bytes + dim / kBoxDims * staging.kBoxBytes + line * kLine +
                             (chunk ^ line % 8) * 16,
                         packed);
        }
        fence_async_proxy();
        sync_warp();
        if (lane == 0) {
            if (row < sq) {
                const RowsPlace to{row, head.head, head.batch, int(head.q_first), sq};
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    if (i * kBoxDims < int(params.head_dim_v)) {
                        const Coordinates place = Coordinates::of(to, i * kBoxDims);
                        tma_store(out_map,
                                  staging.bytes + i * staging.kBoxBytes + warp_row() * kLine,
                                  place.at);
                    }
                }
            }
            tma_store_commit();
        }
    }
    // When what `finish` has stored is read.
    DEVICE static void release_queries(HopperAttention& storage, int query_stage) {
        if (threadIdx.x % 32 == 0) {
            tma_store_wait_read<0>();
            if (!kEveryThreadArrives) storage.queries_empty[query_stage].arrive();
        }
        sync_warp();
        if (kEveryThreadArrives) storage.queries_empty[query_stage].arrive();
    }
};
