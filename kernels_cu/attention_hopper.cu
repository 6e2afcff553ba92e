// attention_hopper.cu: attention.cu's results on Hopper, where no mask is an array or of blocks.
//
// As many blocks as the GPU runs at once walk through the tiles of queries.  In each, a producer brings
// queries, keys and values by TMA; kConsumers warpgroups of 64 queries each multiply them by wgmma.  While
// the tensor cores multiply the next keys and the probabilities before with their values, a warpgroup
// makes probabilities of its scores, in registers, which are wgmma's A; and the warpgroups take turns, so
// that one's softmax runs while the others' products do.
// Constants: Element; kHeadDim, to which TMA pads the head sizes with zeros; kTileN keys of a tile; kStages
// of keys, and of values.
// Launch: grid (any), block (kNumThreads = 128 * (kConsumers + 1)), dynamic shared memory
// sizeof(HopperAttention).  Tensor maps: (batch, head, row, dim) of q, k, v and out, boxes of 64 dims and
// kTileM, kTileN, kTileN and 16 rows, swizzled by 128 bytes.
#include "parts/attention_task.cuh"
#include "parts/online_softmax.cuh"
#include "platform/wgmma.cuh"

constexpr int kConsumers = kNumThreads / 128 - 1;
constexpr int kTileM = 64 * kConsumers;
constexpr int kLine = 128, kBoxDims = kLine / 2, kBoxes = kHeadDim / kBoxDims;  // a tile's boxes
constexpr int kStepK = 16, kSteps = kTileN / kStepK;
static_assert(kHeadDim % kBoxDims == 0 && kTileN % kStepK == 0 && kTileN <= 256, "whole boxes and steps");

// What a thread may have, of the 65536 of a multiprocessor.
constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

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
        const unsigned char* p = bytes + dim / kBoxDims * kBoxBytes + row * kLine + dim % kBoxDims * 2;
        return matrix_descriptor<kLine>(p, 0, 8 * kLine);
    }
    DEVICE uint64_t along_rows(int row) const {
        return matrix_descriptor<kLine>(bytes + row * kLine, kBoxBytes, 8 * kLine);
    }
};

// full: its bytes are there; empty: its consumers are done; turn: a warpgroup may begin its products.
struct HopperAttention {
    AttentionTile<kTileM> queries;  // at a tile's end, the warps' outputs
    AttentionTile<kTileN> keys[kStages], values[kStages];
    Barrier queries_full, queries_empty;
    Barrier keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
    Barrier turn[kConsumers];

    DEVICE void init() {
        queries_full.init(1);
        queries_empty.init(4 * kConsumers);
        for (int i = 0; i < kStages; ++i) {
            keys_full[i].init(1);
            values_full[i].init(1);
            keys_empty[i].init(kConsumers);
            values_empty[i].init(kConsumers);
        }
        for (int i = 0; i < kConsumers; ++i) turn[i].init(1);
        fence_barrier_init();
    }
};
struct StagePlace {
    int stage = 0, parity = 0;

    DEVICE void advance() {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
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

// One tile of queries of one head.
struct QueryTile {
    AttentionHead head;
    int row, num_key_tiles;

    DEVICE static QueryTile of(const AttentionParams& params, int index) {
        const AttentionPlace place = AttentionPlace::of(params, index);
        QueryTile t{AttentionHead::of(params, nullptr, nullptr, place.head), place.tile * kTileM, 0};
        const int last = t.row + clamp_index(t.head.sq - t.row, 0, kTileM) - 1;
        const int end = t.head.limit(params, last);
        t.num_key_tiles = end > 0 ? (end - 1) / kTileN + 1 : 0;
        return t;
    }
};

DEVICE void produce(HopperAttention& storage, const TensorMap& q_map, const TensorMap& k_map,
                    const TensorMap& v_map, const AttentionParams& params, int num_tiles) {
    StagePlace keys, values;
    int count = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, ++count) {
        const QueryTile task = QueryTile::of(params, tile);
        const auto load_keys = [&](int i) {
            storage.keys_empty[keys.stage].wait(keys.parity ^ 1);
            storage.keys[keys.stage].load(k_map, storage.keys_full[keys.stage], i * kTileN,
                                          task.head.kv_head, task.head.batch);
            keys.advance();
        };
        if (task.num_key_tiles > 0) load_keys(0);
        storage.queries_empty.wait(count & 1 ^ 1);
        storage.queries.load(q_map, storage.queries_full, task.row, task.head.head, task.head.batch);
#pragma unroll 1
        for (int i = 0; i < task.num_key_tiles; ++i) {
            if (i + 1 < task.num_key_tiles) load_keys(i + 1);
            storage.values_empty[values.stage].wait(values.parity ^ 1);
            storage.values[values.stage].load(v_map, storage.values_full[values.stage], i * kTileN,
                                              task.head.kv_head, task.head.batch);
            values.advance();
        }
    }
}

DEVICE void begin_scores(const HopperAttention& storage, int stage, int row, Scores& scores) {
    wgmma_fence(scores);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kStepK) {
        wgmma<Element>(scores, storage.queries.along_dims(row, dim),
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

// What is not kept becomes -inf.
DEVICE void mask_scores(Scores& scores, const AttentionParams& params, const AttentionHead& head, int row,
                        int first_key) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int end = head.limit(params, row + Layout::row(lane, 2 * half)) - first_key;
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                if (8 * n + Layout::col(lane, i) >= end) scores[4 * n + i] = -kInfinity;
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

// The warp's 16 rows, by way of its part of the queries' memory.
DEVICE void finish(HopperAttention& storage, const TensorMap& out_map, const AttentionParams& params,
                   const QueryTile& task, const Softmax& softmax, Outputs& outputs,
                   const Statistics& statistics) {
    const int lane = lane_id(), warp_row = int(threadIdx.x) / 32 * 16;
    const AttentionHead& head = task.head;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float total = softmax.total(r);
        inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
        const int row = task.row + warp_row + Layout::row(lane, 2 * r);
        if (lane % 4 == 0 && row < head.sq) {
            const RowStatistics found = RowStatistics::of(softmax.top[r], softmax.origin[r], total,
                                                          params.exponent_scale, params.unit);
            const int64_t i = head.q_offset(params.stats) + row * params.stats.row;
            if (statistics.lse) statistics.lse[i] = found.log_sum_exp;
            if (statistics.row_max) statistics.row_max[i] = found.top;
            if (statistics.row_sum) statistics.row_sum[i] = found.sum;
        }
    }
    // Lane l addresses line l % 8 of the l / 8-th matrix: rows 0-7 and 8-15 of 8 dims, then of the next 8.
    const int line = warp_row + lane % 16;
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += 16) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = outputs + dim / 2 + 2 * i;
            packed[i] = pack<Element>(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
        }
        const int chunk = dim % kBoxDims / 8 + lane / 16;
        store_matrix(storage.queries.bytes + dim / kBoxDims * storage.queries.kBoxBytes + line * kLine +
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
                    tma_store(out_map,
                              storage.queries.bytes + i * storage.queries.kBoxBytes + warp_row * kLine,
                              {i * kBoxDims, row, head.head, head.batch});
                }
            }
        }
        tma_store_commit();
        tma_store_wait_read<0>();
        storage.queries_empty.arrive();
    }
}

DEVICE void consume(HopperAttention& storage, const TensorMap& out_map, const AttentionParams& params,
                    int num_tiles, const Statistics& statistics) {
    const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    StagePlace keys, values;
    int count = 0, turns = 0;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, ++count) {
        const QueryTile task = QueryTile::of(params, tile);
        const int first_row = task.row + warpgroup * 64, warp_row = first_row + thread / 32 * 16;
        Softmax softmax;
        softmax.reset();
        Scores scores;
        Outputs outputs{};
        Probabilities p;
        // Scores become numerators; what the outputs so far are to be multiplied by comes back.
        float factors[2];
        const auto exponentiate = [&](int first_key) {
            if (first_key + kTileN > task.head.limit(params, first_row)) {
                mask_scores(scores, params, task.head, warp_row, first_key);
            }
            const auto at = [&](int n, int i) -> float& { return scores[4 * n + i]; };
            const bool grown = softmax.template look<kFragments>(at, params.exponent_scale, factors);
            if (grown) softmax.rescale(factors);
            softmax.template exponentiate<kFragments>(at, params.exponent_scale);
            return vote_any(grown);
        };
        storage.queries_full.wait(count & 1);
        if (task.num_key_tiles > 0) {
            storage.keys_full[keys.stage].wait(keys.parity);
            begin_scores(storage, keys.stage, warpgroup * 64, scores);
            wgmma_wait<0>(scores);
            if (thread == 0) storage.keys_empty[keys.stage].arrive();
            keys.advance();
            exponentiate(0);
            to_fragments(scores, p);
        }
#pragma unroll 1
        for (int i = 1; i < task.num_key_tiles; ++i) {
            storage.keys_full[keys.stage].wait(keys.parity);
            storage.turn[warpgroup].wait((turns & 1) ^ (warpgroup == 0));
            begin_scores(storage, keys.stage, warpgroup * 64, scores);
            storage.values_full[values.stage].wait(values.parity);
            begin_outputs(storage, values.stage, p, outputs);
            if (thread == 0) storage.turn[(warpgroup + 1) % kConsumers].arrive();
            ++turns;
            wgmma_wait<1>(scores);
            if (thread == 0) storage.keys_empty[keys.stage].arrive();
            keys.advance();
            const bool grown = exponentiate(i * kTileN);
            wgmma_wait<0>(outputs);
            if (thread == 0) storage.values_empty[values.stage].arrive();
            values.advance();
            if (grown) {
#pragma unroll
                for (int j = 0; j < kHeadDim / 2; ++j) outputs[j] *= factors[j / 2 % 2];
            }
            to_fragments(scores, p);
        }
        if (task.num_key_tiles > 0) {
            storage.values_full[values.stage].wait(values.parity);
            begin_outputs(storage, values.stage, p, outputs);
            wgmma_wait<0>(outputs);
            if (thread == 0) storage.values_empty[values.stage].arrive();
            values.advance();
        }
        named_barrier(1 + warpgroup, 128);  // the warpgroup has read its queries
        finish(storage, out_map, params, task, softmax, outputs, statistics);
    }
}

KERNEL void attention_hopper(GRID_CONSTANT TensorMap q_map, GRID_CONSTANT TensorMap k_map,
                             GRID_CONSTANT TensorMap v_map, GRID_CONSTANT TensorMap out_map, float* lse,
                             float* row_max, float* row_sum, const AttentionParams params) {
    SHARED_STORAGE(HopperAttention, storage);
    if (threadIdx.x == 0) storage.init();
    sync_block();
    const int num_tiles = int(params.tiles * params.heads * params.batch);
    if (threadIdx.x / 128 == kConsumers) {
        decrease_registers<kProducerRegisters>();
        if (threadIdx.x / 32 == 4 * kConsumers && elect_one()) {
            produce(storage, q_map, k_map, v_map, params, num_tiles);
        }
        sync_warp();
    } else {
        increase_registers<kConsumerRegisters>();
        consume(storage, out_map, params, num_tiles, {lse, row_max, row_sum});
        if (threadIdx.x % 32 == 0) tma_store_wait<0>();
        sync_warp();
    }
}
