// Parameters of decode attention, the chunks of a sequence, and the work tile of a block.
//
// A row tile is kTileM rows of a KV head in one sequence; its rows are the query heads that share
// the KV head times the queries.  A work tile is a row tile against a run of chunks of keys.
// Constants: kTileM, kMaxChunks (of a sequence), kChunksPerGroup.
#pragma once
#include "common/fast_divmod.cuh"
#include "common/math.cuh"

constexpr int kMaxGroups = kMaxChunks / kChunksPerGroup;
static_assert(kMaxGroups * kChunksPerGroup == kMaxChunks, "groups are full");

struct DecodeParams {
    // Strides in elements: of the batch, head, query and element.
    int64_t q_strides[4], out_strides[4];
    // Strides of the batch (contiguous caches) or page, the head and the key.
    int64_t k_strides[3], v_strides[3];
    int64_t table_stride;
    int64_t num_partials;  // in the whole launch
    FastDivmod row_tiles;  // per KV head
    FastDivmod splits;     // blocks that share the keys of a row tile
    FastDivmod kv_heads, queries;
    FastDivmod min_chunk;  // in keys
    FastDivmod page_size;  // paged caches only, like num_pages
    int32_t num_pages;
    int32_t heads_per_kv_head;
    int32_t num_rows;  // per KV head: heads_per_kv_head * queries, queries fastest
    int32_t dim, dim_v;
    int32_t max_keys;          // per sequence
    int32_t max_doublings;     // of the chunk size, before a sequence can have several groups
    int32_t chunks_per_block;  // 1, 2, 4 or a multiple of kChunksPerGroup
    // Per row tile: partial results of chunks, all partial results, and counters (of the sequence,
    // then of each group).
    int32_t chunk_partials, partials, counters;
    int32_t causal;
    float scale_log2;  // the scale of the scores times log2(e)

    DEVICE int num_keys(const int* seq_lens, int64_t batch) const {
        if (!seq_lens) return max_keys;
        const int length = seq_lens[batch];
        return length < 0 ? 0 : length < max_keys ? length : max_keys;
    }
    // For a sequence of num_keys keys: no query sees a key before begin_key; no limit at the end
    // hides a key before common_end.
    DEVICE int begin_key(int) const { return 0; }
    DEVICE int common_end(int num_keys) const {
        return num_keys - (causal ? queries.divisor - 1 : 0);
    }
};

// Parameters with the options of attention/decode/score.cuh.
struct GeneralDecodeParams : DecodeParams {
    int64_t slope_batch, slope_head;  // strides of alibi_slopes
    int32_t left, right;              // keys from position - left to position + right; -1: any
    float score_scale;                // base e; for scores with ALiBi or a formula, but no cap
    float softcap, softcap_exponent;  // exponent: 2 log2(e) * scale / softcap; softcap 0: none
    int32_t padding;

    // Position of query 0; the queries are at the last of num_keys positions.
    DEVICE int position(int num_keys) const { return num_keys - queries.divisor; }
    DEVICE int begin_key(int num_keys) const {
        const int begin = position(num_keys) - left;
        return left >= 0 && begin > 0 ? begin : 0;
    }
    DEVICE int common_end(int num_keys) const {
        const int end = position(num_keys) + right + 1;
        return right >= 0 && end < num_keys ? end : num_keys;
    }
};

// The chunks of a sequence, a function of only its length (and the window).  The chunk size doubles
// from min_chunk so that a short sequence has at most one group of chunks and a long one at most
// kMaxChunks chunks.
struct Chunks {
    int size, count;  // keys per chunk; at least one chunk, which can have no keys

    DEVICE Chunks(const DecodeParams& params, int num_keys) {
        int last = num_keys > 0 ? num_keys - 1 : 0, doublings = 0;
        params.min_chunk.divide(last);
#pragma unroll 1
        while (last >> doublings >=
               (doublings < params.max_doublings ? kChunksPerGroup : kMaxChunks))
            ++doublings;
        size = params.min_chunk.divisor << doublings;
        count = (last >> doublings) + 1;
    }
};

// Online-softmax state of a row over some keys: the sum of the row's probabilities.  The sum and
// the row's output accumulators are in units of 2^exponent.  Without keys exponent is -inf.
struct alignas(8) SoftmaxState { float exponent, sum; };

// Offsets of a row of a batch element and KV head in the output and in the log-sum-exp.
struct OutputOffsets {
    int64_t out, lse;

    DEVICE OutputOffsets(const DecodeParams& params, int64_t batch, int64_t kv_head, int row) {
        int head_of_group = row;
        const int query = params.queries.divide(head_of_group);
        const int64_t head = kv_head * params.heads_per_kv_head + head_of_group;
        out = batch * params.out_strides[0] + head * params.out_strides[1] +
              query * params.out_strides[2];
        const int64_t num_heads = int64_t(params.kv_heads.divisor) * params.heads_per_kv_head;
        lse = (batch * num_heads + head) * params.queries.divisor + query;
    }
};

// Factor that normalises the output accumulators; zeros for a row without keys.
DEVICE float normalizer(float sum, float scale) { return sum == 0.0f ? 0.0f : 1.0f / sum * scale; }
DEVICE float log_sum_exp(const SoftmaxState& state) {
    constexpr float kLog2 = 0.693147180559945309f;
    if (state.sum == 0.0f) return -kInfinity;
    return state.exponent * kLog2 + log_accurate(state.sum);
}

// Rows [first_row, first_row + kTileM) of a KV head against keys [first_key, end_key).
struct WorkTile {
    int batch, kv_head;
    int row_tile;             // index of the row tile in the launch
    int first_row, num_rows;  // num_rows: from first_row to the last row of the KV head
    int num_keys, chunk_size, num_chunks, num_groups;  // of the sequence
    int first_chunk, first_key, end_key;
    bool exists;  // false beyond the last chunk of a shorter sequence

    // Trivial, because work tiles are in shared memory.
    WorkTile() = default;
    template <class Params>
    DEVICE WorkTile(const Params& params, const int* seq_lens, int index) {
        const int row_tile_of_head = params.row_tiles.divide(index);
        const int split = params.splits.divide(index);
        row_tile = index * params.row_tiles.divisor + row_tile_of_head;
        kv_head = params.kv_heads.divide(index);
        batch = index;
        first_row = row_tile_of_head * kTileM;
        num_rows = params.num_rows - first_row;
        num_keys = params.num_keys(seq_lens, batch);
        const int begin = params.begin_key(num_keys);
        const Chunks chunks(params, num_keys - begin);
        chunk_size = chunks.size, num_chunks = chunks.count;
        num_groups = (num_chunks - 1) / kChunksPerGroup + 1;
        first_chunk = split * params.chunks_per_block;
        exists = first_chunk < num_chunks;
        const int64_t last = int64_t(first_chunk + params.chunks_per_block) * chunk_size + begin;
        first_key = exists ? first_chunk * chunk_size + begin : 0;
        end_key = last < num_keys ? int(last) : num_keys;
    }
    // Whether blocks store chunks as partial results, instead of groups.
    DEVICE bool stores_chunks(const DecodeParams& params) const {
        const int run = params.chunks_per_block;
        return run < kChunksPerGroup && run < num_chunks;
    }
    // Indices of partial results.
    DEVICE int64_t chunk_partial(const DecodeParams& params, int chunk) const {
        return int64_t(row_tile) * params.partials + chunk;
    }
    DEVICE int64_t group_partial(const DecodeParams& params, int group) const {
        return int64_t(row_tile) * params.partials + params.chunk_partials + group;
    }
};
