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
    Divisor page_size;  // paged caches only, as num_pages
    int32_t num_pages;
    int32_t heads_per_kv_head;
    int32_t num_rows;  // of one KV head: heads_per_kv_head * queries, query fastest
    int32_t dim, dim_v;
    int32_t max_keys;        // of a sequence
    int32_t least_chunk, chunk;  // keys
    int32_t chunks_per_block;
    // Of kRows rows of a sequence: nodes of chunks, nodes in all, counters (of the sequence, then
    // of groups).
    int32_t chunk_nodes, nodes, counters;
    int32_t causal;
    float exponent_scale;  // the scale times log2(e)
    int32_t num_tasks;     // that all blocks share

    DEVICE int num_keys(const int* seq_lens, int64_t batch) const {
        if (!seq_lens) return max_keys;
        const int length = seq_lens[batch];
        return length < 0 ? 0 : length < max_keys ? length : max_keys;
    }
    // The keys of a chunk: a function of the sequence's length alone.  Of short sequences there are
    // a group's at most, of long ones kMaxChunks.
    DEVICE int chunk_size(int num_keys) const {
        int64_t size = least_chunk;
        while (size * (size < chunk ? kGroup : kMaxChunks) < num_keys) size *= 2;
        return int(size);
    }
};

// At least one, of which there may be nothing.
DEVICE int count_chunks(int num_keys, int size) {
    return num_keys > 0 ? (num_keys - 1) / size + 1 : 1;
}

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

    // None.
    DEVICE DecodeTask() : first(0), end(0), exists(false) {}

    // Which may have no chunks.
    DEVICE DecodeTask(const DecodeParams& params, const int* seq_lens, int index) {
        const int row_block = params.row_blocks.take_from(index);
        const int run = params.runs.take_from(index);
        place = index * params.row_blocks.by + row_block;
        kv_head = params.kv_heads.take_from(index);
        batch = index;
        first_row = row_block * kRows;
        num_rows = params.num_rows - first_row;
        num_keys = params.num_keys(seq_lens, batch);
        chunk_size = params.chunk_size(num_keys);
        num_chunks = count_chunks(num_keys, chunk_size);
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

// The tasks of a block, one after another.
struct TaskQueue {
    int index;  // of the next one

    DEVICE TaskQueue() : index(int(blockIdx.x)) {}
    // None at the end.
    DEVICE DecodeTask next(const DecodeParams& params, const int* seq_lens) {
#pragma unroll 1
        while (index < params.num_tasks) {
            const DecodeTask found(params, seq_lens, index);
            index += int(gridDim.x);
            if (found.exists) return found;
        }
        return {};
    }
};
