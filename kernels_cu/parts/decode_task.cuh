// What decode_attention.cu and decode_merge.cu share: the arguments, a sequence's chunks, and where
// partial results lie.
#include "parts/math.cuh"

struct DecodeParams {
    // Strides in elements.  q, out: of the batch, head, query and element; k, v: of the batch or page,
    // the head and the key.
    int64_t q[4], out[4], k[3], v[3];
    int64_t table_stride, num_partials;
    int32_t num_kv_heads, heads_per_kv_head, num_queries, dim, dim_v;
    int32_t max_keys;             // of a sequence
    int32_t page_size, num_pages;  // paged caches only
    int32_t smallest_chunk;       // keys
    int32_t max_chunks;           // that any sequence of this call may have
    int32_t chunks_per_block, row_blocks;
    int32_t causal, query_vectors;
    float exponent_scale;  // the scale times log2(e)
    int32_t padding;

    // The rows of one KV head: heads_per_kv_head * num_queries, query fastest.
    DEVICE int num_rows() const { return heads_per_kv_head * num_queries; }
    DEVICE int num_keys(const int* seq_lens, int64_t batch) const {
        if (!seq_lens) return max_keys;
        const int length = seq_lens[batch];
        return length < 0 ? 0 : length < max_keys ? length : max_keys;
    }
    // The keys of a chunk: a function of the sequence's length alone.  At most kMaxChunks of them.
    DEVICE int chunk_size(int num_keys) const {
        int64_t size = smallest_chunk;
        while (size * kMaxChunks < num_keys) size *= 2;
        return int(size);
    }
};

// At least one, of which there may be nothing.
DEVICE int count_chunks(int num_keys, int size) {
    return num_keys > 0 ? (num_keys - 1) / size + 1 : 1;
}

// What one chunk gives one row, beside its values: all are numbers x * 2^exponent.  exponent is -inf of
// no key.
struct PartialSum {
    float exponent, sum;
};

// The partial results of all chunks: first their values, kDim of each row, then their sums.
struct Partials {
    float* values;
    PartialSum* sums;
    int num_rows, max_chunks;

    DEVICE Partials(const DecodeParams& params, float* memory)
        : values(memory),
          sums(reinterpret_cast<PartialSum*>(memory + params.num_partials * kDim)),
          num_rows(params.num_rows()), max_chunks(params.max_chunks) {}
    // The place of a chunk's first row.
    DEVICE int64_t first(int64_t batch_and_head, int chunk) const {
        return (batch_and_head * max_chunks + chunk) * num_rows;
    }
};

// Where a row of batch and KV head lies in `out` and in the log-sum-exp.
struct OutputRow {
    int64_t out, lse;

    DEVICE OutputRow(const DecodeParams& params, int64_t batch, int64_t kv_head, int row) {
        const int64_t head = kv_head * params.heads_per_kv_head + row / params.num_queries;
        const int query = row % params.num_queries;
        out = batch * params.out[0] + head * params.out[1] + query * params.out[2];
        const int64_t num_heads = int64_t(params.num_kv_heads) * params.heads_per_kv_head;
        lse = (batch * num_heads + head) * params.num_queries + query;
    }
};

// What the sums of values are multiplied by; a row without keys has zeros.
DEVICE float normalizer(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
DEVICE float log_sum_exp(const PartialSum& total) {
    constexpr float kLog2 = 0.693147180559945309f;
    if (total.sum == 0.0f) return -kInfinity;
    return total.exponent * kLog2 + log_accurate(total.sum);
}
