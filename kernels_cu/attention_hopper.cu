// attention_hopper.cu: attention.cu's results on Hopper, where no mask is an array.
//
// As many blocks as the GPU runs at once walk through the tiles of queries.  In each, a producer
// brings queries, keys and values by TMA; kConsumers warpgroups of 64 queries each multiply them by
// wgmma.  While the tensor cores multiply the next keys and the probabilities before with their
// values, a warpgroup makes probabilities of its scores, in registers, which are wgmma's A; and the
// warpgroups take turns, so that one's softmax runs while the others' products do.
// Constants: Element; kHeadDim, to which TMA pads the head sizes with zeros; kTileN keys of a tile;
// kStages of keys, and of values; kMaskMode: 0 no mask, 2 blocks; kOutputsApart: outputs have
// shared memory of their own, so that the next tile's queries are loaded while a tile is finished.
// Launch: grid (any), block (kNumThreads = 128 * (kConsumers + 1)), dynamic shared memory
// sizeof(HopperAttention).  Tensor maps: (batch, head, row, dim) of q, k, v and out, boxes of 64
// dims and kTileM, kTileN, kTileN and 16 rows, swizzled by 128 bytes.
#include "parts/attention_task.cuh"
#include "parts/online_softmax.cuh"
#include "platform/wgmma.cuh"

constexpr bool kBlocks = kMaskMode == 2;
constexpr bool kTakeTurns = !kBlocks;  // all warpgroups have as many tiles
constexpr int kConsumers = kNumThreads / 128 - 1;
constexpr int kTileM = 64 * kConsumers;
constexpr int kLine = 128, kBoxDims = kLine / 2, kBoxes = kHeadDim / kBoxDims;  // a tile's boxes
constexpr int kStepK = 16, kSteps = kTileN / kStepK;
static_assert(kHeadDim % kBoxDims == 0 && kTileN % kStepK == 0 && kTileN <= 256,
              "whole boxes and steps");
static_assert(!kBlocks || 64 % kTileN == 0,
              "a warpgroup's part of a tile lies in one block of a mask");

// What a thread may have, of the 65536 of a multiprocessor.
constexpr int kProducerRegisters = kBlocks ? 40 : kConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kBlocks ? 232 : kConsumers == 2 ? 240 : 160;
static_assert(!kBlocks || kConsumers == 2, "registers for three warpgroups");

// Rows of kHeadDim elements, in boxes of kBoxDims of them.
template <int kTileRows>
struct AttentionTile {
    static constexpr int kBoxBytes = kTileRows * kLine;
    unsigned char bytes[kBoxes * kBoxBytes];

    DEVICE void load(const TensorMap& map, Barrier& full, int row, int head, int batch) {
        full.arrive_expect_tx(sizeof(bytes));
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) {
            tma_load(bytes + i * kBoxBytes, map, full, {i * kBoxDims, row, head, batch});
        }
    }
    // The operand whose k are dims, from (row, dim) on; and that whose k are rows.
    DEVICE uint64_t along_dims(int row, int dim) const {
        const unsigned char* p =
            bytes + dim / kBoxDims * kBoxBytes + row * kLine + dim % kBoxDims * 2;
        return matrix_descriptor<kLine>(p, 0, 8 * kLine);
    }
    DEVICE uint64_t along_rows(int row) const {
        return matrix_descriptor<kLine>(bytes + row * kLine, kBoxBytes, 8 * kLine);
    }
};

// full: its bytes are there; empty: its consumers are done; turn: a warpgroup may begin its
// products.
struct HopperAttention {
    AttentionTile<kTileM>
        queries[kOutputsApart ? 2 : 1];  // the last one also has the warps' outputs
    AttentionTile<kTileN> keys[kStages], values[kStages];
    Barrier queries_full, queries_empty;
    Barrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
    Barrier turn[kConsumers];
    int tile;  // of queries, that are there; -1: the last one was

    DEVICE void init() {
        queries_full.init(1);
        queries_empty.init(4 * kConsumers);
        for (int i = 0; i < kStages; ++i) {
            keys_full[i].init(1);
            values_full[i].init(1);
            keys_empty[i].init(kConsumers);
            values_empty[i].init(kConsumers);
        }
        for (int i = 0; i < kConsumers; ++i) turn[i].init(4);
        fence_barrier_init();
    }
};
// Where the number-th tile of keys and of values goes, of all that a block walks through.
struct StagePlace {
    int stage, parity;

    DEVICE explicit StagePlace(uint32_t number)
        : stage(int(number % kStages)), parity(int(number / kStages & 1)) {}
};

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

// One tile of queries of one head, and the tiles of keys that it needs.
struct QueryTile {
    AttentionHead head;
    HeadMask mask;
    int row, num_key_tiles;  // without blocks
    KeyTiles<kTileM, kTileN, kBlocks> keys;

    DEVICE static QueryTile of(const AttentionParams& params, const MaskArrays& arrays, int index) {
        const AttentionPlace place = AttentionPlace::of(params, index);
        const AttentionHead head = AttentionHead::of(params, nullptr, nullptr, place.head);
        const HeadMask mask = HeadMask::of(params.mask, arrays, head.batch, head.head);
        const int row = place.tile * kTileM;
        const int last = row + clamp_index(head.sq - row, 0, kTileM) - 1;
        const int end = head.limit(params, last);
        return {head, mask, row, end > 0 ? (end - 1) / kTileN + 1 : 0, {mask, row, head.sq, end}};
    }
};

DEVICE void produce(HopperAttention& storage, const TensorMap& q_map, const TensorMap& k_map,
                    const TensorMap& v_map, const AttentionParams& params, const MaskArrays& arrays,
                    const int32_t* schedule, int num_tiles) {
    uint32_t number = 0;
#pragma unroll 1
    for (int count = 0;; ++count) {
        int tile = int(blockIdx.x + count * gridDim.x);
        if (schedule) tile = schedule[tile];
        else if (tile >= num_tiles) tile = -1;
        if (tile < 0) {
            storage.queries_empty.wait(count & 1 ^ 1);
            storage.tile = tile;
            storage.queries_full.arrive();
            return;
        }
        QueryTile task = QueryTile::of(params, arrays, tile);
        const AttentionHead& head = task.head;
        const auto load_keys = [&](StagePlace to) {
            storage.keys_empty[to.stage].wait(to.parity ^ 1);
            storage.keys[to.stage].load(k_map, storage.keys_full[to.stage], task.keys.key,
                                        head.kv_head, head.batch);
        };
        bool more = task.keys.next();
        if (more) load_keys(StagePlace(number));
        storage.queries_empty.wait(count & 1 ^ 1);
        storage.tile = tile;
        storage.queries[0].load(q_map, storage.queries_full, task.row, head.head, head.batch);
        for (; more; ++number) {
            const int key = task.keys.key;
            more = task.keys.next();
            if (more) load_keys(StagePlace(number + 1));
            const StagePlace to(number);
            storage.values_empty[to.stage].wait(to.parity ^ 1);
            storage.values[to.stage].load(v_map, storage.values_full[to.stage], key, head.kv_head,
                                          head.batch);
        }
    }
}

DEVICE void begin_scores(const HopperAttention& storage, int stage, int row, Scores& scores) {
    wgmma_fence(scores);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kStepK) {
        wgmma<Element>(scores, storage.queries[0].along_dims(row, dim),
                       storage.keys[stage].along_dims(0, dim), dim > 0);
    }
    wgmma_commit();
}
DEVICE void begin_outputs(const HopperAttention& storage, int stage, Probabilities& p,
                          Outputs& outputs) {
    wgmma_fence(outputs);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        wgmma<Element, Element, kMajorK, kMajorMN>(
            outputs, p[i], storage.values[stage].along_rows(i * kStepK), true);
    }
    wgmma_commit();
}

// What is not kept becomes -inf.  row: the warp's first one, first_row: the warpgroup's.
DEVICE void mask_scores(Scores& scores, const AttentionParams& params, const QueryTile& task,
                        int first_row, int row, int first_key, int block_type) {
    const int lane = lane_id();
    int limit = task.head.limit(params, first_row);  // the first row has the lowest one
    if constexpr (kBlocks) {
        if (block_type == kPartialBlock) {
            const uint8_t* tile = task.mask.partial(row, first_key);
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i) {
                const int in_tile = (Layout::row(lane, i % 4) << params.mask.kv_shift) + i / 4 * 8;
                if (!tile[in_tile + Layout::col(lane, i % 4)]) scores[i] = -kInfinity;
            }
        }
        const int block_limit = task.mask.block_limit(first_row, block_type);
        limit = limit < block_limit ? limit : block_limit;
    }
    if (first_key + kTileN <= limit) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = row + Layout::row(lane, 2 * half);
        int end = task.head.limit(params, own);
        if constexpr (kBlocks) {
            const int block_limit = task.mask.block_limit(own, block_type);
            end = end < block_limit ? end : block_limit;
        }
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                if (first_key + 8 * n + Layout::col(lane, i) >= end) scores[4 * n + i] = -kInfinity;
            }
        }
    }
}
DEVICE void to_fragments(const Scores& scores, Probabilities& p) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            p[i][j] = pack<Element>(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]);
        }
    }
}

struct Statistics {
    float* lse;
    float* row_max;
    float* row_sum;
};

// The warp's 16 rows, by way of its part of shared memory.
DEVICE void finish(HopperAttention& storage, const TensorMap& out_map,
                   const AttentionParams& params, const QueryTile& task, const Softmax& softmax,
                   const float (&top)[2], Outputs& outputs, const Statistics& statistics) {
    const int lane = lane_id(), warp_row = int(threadIdx.x) / 32 * 16;
    const AttentionHead& head = task.head;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = softmax.total(r);
        inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
        const int row = task.row + warp_row + Layout::row(lane, 2 * r);
        if (lane % 4 == 0 && row < head.sq) {
            const RowStatistics found =
                RowStatistics::of(top[r], Softmax::shifted(softmax.origin[r]), total,
                                  params.exponent_scale, params.unit);
            const int64_t i = head.q_offset(params.stats) + row * params.stats.row;
            if (statistics.lse) statistics.lse[i] = found.log_sum_exp;
            if (statistics.row_max) statistics.row_max[i] = found.top;
            if (statistics.row_sum) statistics.row_sum[i] = found.sum;
        }
    }
    // Lane l addresses line l % 8 of the l / 8-th matrix: rows 0-7 and 8-15 of 8 dims, then of the
    // next 8.
    auto& staging = storage.queries[kOutputsApart];
    const int line = warp_row + lane % 16;
    if (kOutputsApart) {
        if (lane == 0) {
            storage.queries_empty.arrive();
            tma_store_wait_read<0>();  // of the tile before
        }
        sync_warp();
    }
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
        const int row = task.row + warp_row;
        if (row < head.sq) {
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                if (i * kBoxDims < int(params.head_dim_v)) {
                    tma_store(out_map, staging.bytes + i * staging.kBoxBytes + warp_row * kLine,
                              {i * kBoxDims, row, head.head, head.batch});
                }
            }
        }
        tma_store_commit();
        if (!kOutputsApart) {
            tma_store_wait_read<0>();
            storage.queries_empty.arrive();
        }
    }
}

DEVICE void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
}
// Of a tile that only other warpgroups keep.  Not before it is there: a phase of `empty` is to have
// one arrival of each warpgroup.  Warps that do not release do not wait: they may be late by more
// than a phase.
DEVICE void release_unused(HopperAttention& storage, StagePlace at) {
    if (threadIdx.x % 128 == 0) {
        storage.keys_full[at.stage].wait(at.parity);
        storage.keys_empty[at.stage].arrive();
        storage.values_full[at.stage].wait(at.parity);
        storage.values_empty[at.stage].arrive();
    }
    sync_warp();
}

DEVICE void consume(HopperAttention& storage, const TensorMap& out_map,
                    const AttentionParams& params, const MaskArrays& arrays,
                    const Statistics& statistics) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    int count = 0, turns = 0;
    uint32_t number = 0;
#pragma unroll 1
    for (;; ++count) {
        storage.queries_full.wait(count & 1);
        if (storage.tile < 0) return;
        QueryTile task = QueryTile::of(params, arrays, storage.tile);
        const int first_row = task.row + warpgroup * 64, warp_row = first_row + thread / 32 * 16;
        Softmax softmax;
        softmax.reset();
        float top[2] = {-kInfinity, -kInfinity};
        Scores scores;
        Outputs outputs{};
        Probabilities p;
        float factors[2];
        int block_type = kFullBlock;
        // Scores become numerators; whether the outputs so far are to be multiplied by `factors`.
        const auto exponentiate = [&](int key) {
            mask_scores(scores, params, task, first_row, warp_row, key, block_type);
            const auto at = [&](int n, int i) -> float& { return scores[4 * n + i]; };
            float largest[2];
            const bool grown =
                softmax.template look<kFragments>(at, params.exponent_scale, largest, factors);
#pragma unroll
            for (int r = 0; r < 2; ++r) top[r] = maximum(top[r], largest[r]);
            softmax.rescale(factors);
            softmax.template exponentiate<kFragments>(at, params.exponent_scale);
            return vote_any(grown);
        };
        const auto rescale = [&] {
#pragma unroll
            for (int j = 0; j < kHeadDim / 2; ++j) outputs[j] *= factors[j / 2 % 2];
        };
        const auto first = [&](StagePlace at, int key) {
            storage.keys_full[at.stage].wait(at.parity);
            begin_scores(storage, at.stage, warpgroup * 64, scores);
            wgmma_wait<0>(scores);
            release(storage.keys_empty[at.stage]);
            const bool grown = exponentiate(key);
            if (kBlocks && grown) rescale();
            to_fragments(scores, p);
        };
        // before: where the values of the last probabilities are.
        const auto follow = [&](StagePlace before, StagePlace at, int key) {
            storage.keys_full[at.stage].wait(at.parity);
            if (kTakeTurns) storage.turn[warpgroup].wait((turns & 1) ^ (warpgroup == 0));
            begin_scores(storage, at.stage, warpgroup * 64, scores);
            storage.values_full[before.stage].wait(before.parity);
            begin_outputs(storage, before.stage, p, outputs);
            // By every warp, so that none that is late misses its turn.
            if (kTakeTurns && thread % 32 == 0) storage.turn[(warpgroup + 1) % kConsumers].arrive();
            ++turns;
            wgmma_wait<1>(scores);
            release(storage.keys_empty[at.stage]);
            const bool grown = exponentiate(key);
            wgmma_wait<0>(outputs);
            release(storage.values_empty[before.stage]);
            if (grown) rescale();
            to_fragments(scores, p);
        };
        const auto last = [&](StagePlace before) {
            storage.values_full[before.stage].wait(before.parity);
            begin_outputs(storage, before.stage, p, outputs);
            wgmma_wait<0>(outputs);
            release(storage.values_empty[before.stage]);
        };
        if constexpr (kBlocks) {
            const auto keeps = [&] {
                block_type = first_row < task.head.sq
                                 ? task.mask.block_type(first_row, task.keys.key)
                                 : kMaskedBlock;
                return vote_any(block_type != kMaskedBlock);  // all lanes' is the same
            };
            // By runs of tiles that the warpgroup keeps: values that it has not multiplied yet must
            // not keep others from being loaded.
            bool more = task.keys.next();
#pragma unroll 1
            while (more) {
                if (!keeps()) {
                    release_unused(storage, StagePlace(number++));
                    more = task.keys.next();
                    continue;
                }
                first(StagePlace(number++), task.keys.key);
#pragma unroll 1
                for (; (more = task.keys.next()) && keeps(); ++number) {
                    follow(StagePlace(number - 1), StagePlace(number), task.keys.key);
                }
                last(StagePlace(number - 1));
            }
        } else if (task.num_key_tiles > 0) {
            first(StagePlace(number++), (task.num_key_tiles - 1) * kTileN);
#pragma unroll 1
            for (int i = task.num_key_tiles - 2; i >= 0; --i, ++number) {
                follow(StagePlace(number - 1), StagePlace(number), i * kTileN);
            }
            last(StagePlace(number - 1));
        }
        named_barrier(1 + warpgroup, 128);  // the warpgroup has read its queries
        finish(storage, out_map, params, task, softmax, top, outputs, statistics);
    }
}

KERNEL void attention_hopper(GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map,
                             GRID_CONSTANT TensorMap v_map, GRID_CONSTANT TensorMap out_map,
                             float* lse, float* row_max, float* row_sum,
                             const uint8_t* partial_tiles, const int32_t* kv_num_blocks,
                             const int32_t* kv_indices, const uint8_t* block_types,
                             const int32_t* partial_indices, const int32_t* schedule,
                             const AttentionParams params) {
    SHARED_STORAGE(HopperAttention, storage);
    if (threadIdx.x == 0) storage.init();
    sync_block();
    // The tiles of this block: every gridDim.x-th one, or those that the schedule has for it,
    // gridDim.x numbers apart, with a -1 after the last one.
    const int num_tiles = int(params.tiles * params.heads * params.batch);
    const MaskArrays arrays{partial_tiles, kv_num_blocks, kv_indices, block_types, partial_indices};
    if (threadIdx.x / 128 == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
            produce(storage, q_map, k_map, v_map, params, arrays, schedule, num_tiles);
        }
        sync_warp();
    } else {
        increase_registers<kConsumerRegisters>();
        consume(storage, out_map, params, arrays, {lse, row_max, row_sum});
        if (threadIdx.x % 32 == 0) tma_store_wait<0>();
        sync_warp();
    }
}
