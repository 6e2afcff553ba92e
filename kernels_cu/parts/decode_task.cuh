// What a call of attention for decoding is about: its arguments, a sequence's chunks, a block's
// part of them, and where results lie.
// Constants: kRows (of a block), kMaxChunks, kGroup (chunks that are folded into one).
#include "parts/math.cuh"

constexpr int kMaxGroups = kMaxChunks / kGroup;
static_assert(kMaxGroups * kGroup == kMaxChunks, "whole groups");

// A number that others, from 0 to 2^31 - 1, are divided by.  reciprocal: (2^32 - 1) / by, rounded
// down.
struct Divisor {
    int32_t by;
    uint32_t reciprocal;

    // x becomes the quotient; returns the rest.
    DEVICE int take_from(int& x) const {
        // At most 1 too small: 2^32 times the exact reciprocal is less than 1 + 1 / by above.
        int quotient = int(uint64_t(uint32_t(x)) * reciprocal >> 32);
        int rest = x - quotient * by;
        if (rest >= by) ++quotient, rest -= by;
        x = quotient;
        return rest;
    }
};

struct DecodeParams {
    // Strides in elements.  q, out: of the batch, head, query and element; k, v: of the batch or
    // page, the head and the key.
    int64_t q[4], out[4], k[3], v[3];
    int64_t table_stride;
    int64_t num_nodes;  // of partial results, in all
    Divisor row_blocks, runs, kv_heads, queries;
    Divisor least_chunk;  // keys
    Divisor page_size;    // paged caches only, as num_pages
    int32_t num_pages;
    int32_t heads_per_kv_head;
    int32_t num_rows;  // of one KV head: heads_per_kv_head * queries, query fastest
    int32_t dim, dim_v;
    int32_t max_keys;   // of a sequence
    int32_t doublings;  // from the least chunk to that of sequences of up to kMaxChunks
    int32_t chunks_per_block;
    // Of kRows rows of a sequence: nodes of chunks, nodes in all, counters (of the sequence, then
    // of groups).
    int32_t chunk_nodes, nodes, counters;
    int32_t causal;
    float exponent_scale;  // the scale times log2(e)

    DEVICE int num_keys(const int* seq_lens, int64_t batch) const {
        if (!seq_lens) return max_keys;
        const int length = seq_lens[batch];
        return length < 0 ? 0 : length < max_keys ? length : max_keys;
    }
};

// A sequence's chunks: a function of its length alone.  Of short sequences there are a group's at
// most, of long ones kMaxChunks.
struct Chunks {
    int size, count;  // keys of one; at least one chunk, of which there may be nothing

    DEVICE Chunks(const DecodeParams& params, int num_keys) {
        int last = num_keys > 0 ? num_keys - 1 : 0, doublings = 0;
        params.least_chunk.take_from(last);
#pragma unroll 1
        while (last >> doublings >= (doublings < params.doublings ? kGroup : kMaxChunks))
            ++doublings;
        size = params.least_chunk.by << doublings;
        count = (last >> doublings) + 1;
    }
};

// What keys give one row, beside its values: all are numbers x * 2^exponent.  exponent is -inf of
// no key.
struct alignas(8) PartialSum { float exponent, sum; };

// Where a row of batch and KV head lies in `out` and in the log-sum-exp.
struct OutputRow {
    int64_t out, lse;

    DEVICE OutputRow(const DecodeParams& params, int64_t batch, int64_t kv_head, int row) {
        int within = row;
        const int query = params.queries.take_from(within);
        const int64_t head = kv_head * params.heads_per_kv_head + within;
        out = batch * params.out[0] + head * params.out[1] + query * params.out[2];
        const int64_t num_heads = int64_t(params.kv_heads.by) * params.heads_per_kv_head;
        lse = (batch * num_heads + head) * params.queries.by + query;
    }
};

// What the sums of values are multiplied by; a row without keys has zeros.
DEVICE float normalizer(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
DEVICE float log_sum_exp(const PartialSum& total) {
    constexpr float kLog2 = 0.693147180559945309f;
    if (total.sum == 0.0f) return -kInfinity;
    return total.exponent * kLog2 + log_accurate(total.sum);
}

// A task: rows [first_row, first_row + kRows) of a KV head against keys [first, end), a run of
// chunks.
struct DecodeTask {
    int batch, kv_head;
    int place;                // of the rows among all
    int first_row, num_rows;  // num_rows: that there are from first_row on
    int num_keys, chunk_size, num_chunks, num_groups, first_chunk, first, end;
    bool exists;

    // Trivial, as shared memory has one.
    DecodeTask() = default;
    // exists: which may have no chunks.
    DEVICE DecodeTask(const DecodeParams& params, const int* seq_lens, int index) {
        const int row_block = params.row_blocks.take_from(index);
        const int run = params.runs.take_from(index);
        place = index * params.row_blocks.by + row_block;
        kv_head = params.kv_heads.take_from(index);
        batch = index;
        first_row = row_block * kRows;
        num_rows = params.num_rows - first_row;
        num_keys = params.num_keys(seq_lens, batch);
        const Chunks chunks(params, num_keys);
        chunk_size = chunks.size, num_chunks = chunks.count;
        num_groups = (num_chunks - 1) / kGroup + 1;
        first_chunk = run * params.chunks_per_block;
        exists = first_chunk < num_chunks;
        const int64_t last = int64_t(first_chunk + params.chunks_per_block) * chunk_size;
        first = exists ? first_chunk * chunk_size : 0;
        end = last < num_keys ? int(last) : num_keys;
    }
    DEVICE int64_t chunk_node(const DecodeParams& params, int chunk) const {
        return int64_t(place) * params.nodes + chunk;
    }
    DEVICE int64_t group_node(const DecodeParams& params, int group) const {
        return int64_t(place) * params.nodes + params.chunk_nodes + group;
    }
};
