// Parameters of rope_and_cache, and the pairs of numbers of a head.
//
// Pair i < half is rotated: numbers i and half + i of a head (halves), or 2 i and 2 i + 1
// (interleaved).  Pairs i >= half are numbers 2 i and 2 i + 1 and stay as they are.
#pragma once
#include "common/dtype.cuh"

namespace rope {

struct RopeParams {
    // Strides in elements: of the batch, token, head and number.
    int64_t q_strides[4], k_strides[4], v_strides[4], out_strides[4];
    // Of the cache: of the batch or page, slot, head and number.  Without one k_out is like out.
    int64_t k_out_strides[4], v_out_strides[4];
    int64_t k_scale_strides[3], v_scale_strides[3];  // of the batch or page, slot and head
    int64_t position_strides[2], table_strides[2];
    int64_t rotation_strides[2];  // of a table's rows; of the numbers of a row, or frequencies
    int64_t q_weight_stride, k_weight_stride;
    int32_t seq_len;                    // tokens of a sequence
    int32_t num_vectors;                // of all tokens: num_heads each
    int32_t num_q_heads, num_kv_heads;  // num_heads: of q, k and, with a cache, v
    int32_t num_heads, dim, half;       // half: rotated pairs
    int32_t lanes_log2;                 // threads of a head vector
    int32_t vectors_per_block;
    int32_t interleaved, has_cache;
    int32_t num_rows;                       // of a table of cosines and sines; 0: frequencies
    int32_t page_size, num_pages;           // page_size: 0 of a contiguous cache
    int32_t num_slots;                      // of a sequence
    int32_t cache_dtype, scales_per_token;  // cache_dtype: of k_out and v_out
    int32_t q_weight_dtype, k_weight_dtype;
    float eps, inv_dim, attention_factor;
    float k_scale, v_scale;  // where there are no arrays of them

    DEVICE bool splits(int pair) const { return !interleaved && pair < half; }
    DEVICE int num_pairs() const { return (dim + 1) / 2; }
};

// Where the numbers of `width` pairs from `pair` on begin: one vector after the other, or half a
// rotation apart.
struct Columns {
    int first, second;
    bool has_first, has_second;

    DEVICE Columns(const RopeParams& p, int pair, int width) {
        const bool splits = p.splits(pair);
        first = splits ? pair : 2 * pair;
        second = splits ? p.half + pair : 2 * pair + width;
        has_first = pair < p.num_pairs();
        has_second = has_first && second < p.dim;
    }
};

}  // namespace rope
