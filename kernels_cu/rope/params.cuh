// Parameters of rope_and_cache, and a head's pairs of elements.
//
// Pair i < half is rotated: elements i and half + i of a head (halves), or 2 i and 2 i + 1
// (interleaved).  Pair i >= half is elements 2 i and 2 i + 1, which are not rotated.
#pragma once
#include "common/dtype.cuh"
#include "common/fast_divmod.cuh"

namespace rope {

struct RopeParams {
    // Strides in elements: of the batch, token, head and element.
    int64_t q_strides[4], k_strides[4], v_strides[4], out_strides[4];
    // Cache strides: of the batch or page, slot, head and element.  Without a cache k_out is like
    // out.
    int64_t k_out_strides[4], v_out_strides[4];
    int64_t k_scale_strides[3], v_scale_strides[3];  // of the batch or page, slot and head
    int64_t position_strides[2], table_strides[2];
    int64_t rotation_strides[2];  // of a table's rows; of a row's elements, or frequencies
    int64_t q_weight_stride, k_weight_stride;
    FastDivmod seq_len;                  // tokens per sequence
    FastDivmod blocks_per_token;         // blocks that share the heads of their tokens
    FastDivmod half;                     // rotated pairs
    FastDivmod page_size;                // 0 for a contiguous cache
    int32_t num_tokens;                  // of all sequences
    int32_t num_q_heads, num_kv_heads;   // num_heads: of q, k and, with a cache, v
    int32_t num_heads, dim, lanes_log2;  // threads per head vector: 2^lanes_log2
    int32_t interleaved, has_cache;
    int32_t num_rows;                       // of the table of cosines and sines; 0: frequencies
    int32_t num_pages, num_slots;           // num_slots: per sequence
    int32_t cache_dtype, scales_per_token;  // cache_dtype: of k_out and v_out
    int32_t q_weight_dtype, k_weight_dtype;
    float eps, inv_dim, attention_factor;
    float k_scale, v_scale;  // used if there are no arrays of scales

    DEVICE bool has_halves(int pair) const { return !interleaved && pair < half.divisor; }
    DEVICE int num_pairs() const { return (dim + 1) / 2; }
};

// First columns of the two vectors that hold `width` pairs from `pair` on: adjacent, or `half`
// columns apart.
struct Columns {
    int first, second;
    bool has_first, has_second;

    DEVICE Columns(const RopeParams& p, int pair, int width) {
        const bool splits = p.has_halves(pair);
        first = splits ? pair : 2 * pair;
        second = splits ? p.half.divisor + pair : 2 * pair + width;
        has_first = pair < p.num_pairs();
        has_second = has_first && second < p.dim;
    }
};

}  // namespace rope
