// Loads and stores of a block of rope_and_cache: one head of each of its tokens, by a group of
// 2^lanes_log2 threads.
//
// Constants: see rope/token.cuh and rope/head_vector.cuh.
#pragma once
#include "rope/head.cuh"
#include "rope/token.cuh"

namespace rope {

struct Inputs { const Element *q, *k, *v; };
struct Outputs {
    Element* q;
    void *k, *v;
    float *k_scale, *v_scale;
};

DEVICE void load_heads(const RopeParams& p, const Head& head, const Inputs& x,
                       const Token (&tokens)[kTokens], int num_tokens, int lane,
                       HeadVector (&vectors)[kTokens]) {
    const auto stride = [&](int dim) {
        return head.of(p.q_strides[dim], p.k_strides[dim], p.v_strides[dim]);
    };
    const Element* const from = head.of(x.q, x.k, x.v) + head.index * stride(2);
    const int64_t of_sequence = stride(0), of_token = stride(1);
    const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        const bool exists = head.number < p.num_heads && i < num_tokens;
        const Token& token = tokens[i];
        vectors[i].load(p, from + token.sequence * of_sequence + token.number * of_token, step,
                        lane, exists);
    }
}

// The factor that encodes a vector for an 8-bit cache: 1 / scale.  With a scale per token, computes
// the scale from `largest` and stores it.
DEVICE float cache_factor(const RopeParams& p, const Head& head, const Outputs& out, int outer,
                          int inner, int lane, float largest) {
    const auto stride = [&](int dim) {
        return head.is_k ? p.k_scale_strides[dim] : p.v_scale_strides[dim];
    };
    const int64_t of_scale = outer * stride(0) + inner * stride(1) + head.index * stride(2);
    float* const scales = head.is_k ? out.k_scale : out.v_scale;
    if (p.scales_per_token) {
        const rows::QuantizeScale scale(largest, rows::largest_finite(p.cache_dtype));
        if (lane == 0) scales[of_scale] = scale.decode;
        return scale.encode;
    }
    const float of_k = p.k_scale, of_v = p.v_scale;  // a select, not a branch
    return 1.0f / (scales ? scales[of_scale] : head.is_k ? of_k : of_v);
}

// Normalises, rotates and stores the loaded vectors.  Called by all lanes of a warp.
DEVICE void store_heads(const RopeParams& p, const Head& head, const Outputs& out,
                        const Token (&tokens)[kTokens], int num_tokens,
                        const Slot (&slots)[kTokens], const Tables& tables, bool has_q_norm,
                        bool has_k_norm, int lane, HeadVector (&vectors)[kTokens]) {
    const bool is_q = head.is_q, is_k = head.is_k;
    const auto stride = [&](int dim) {
        return head.of(p.out_strides[dim], p.k_out_strides[dim], p.v_out_strides[dim]);
    };
    const int64_t of_head = head.index * stride(2), of_outer = stride(0), of_inner = stride(1);
    const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
    void* const to = is_q ? out.q : is_k ? out.k : out.v;
    const bool has_norm = is_q ? has_q_norm : is_k && has_k_norm;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        HeadVector& x = vectors[i];
        x.unpack_pairs(p, lane);
        if (has_q_norm || has_k_norm) x.normalize(p, tables, lane, is_k, has_norm);
        if (is_q || is_k) x.rotate(p, tables, i, lane);
        const float largest = p.scales_per_token ? x.largest(p) : 0.0f;
        const Slot& slot = slots[i];
        if (head.number >= p.num_heads || i >= num_tokens || !(is_q || slot.exists)) continue;
        const int outer = is_q ? tokens[i].sequence : slot.page;
        const int inner = is_q ? tokens[i].number : slot.number;
        const int64_t offset = of_head + outer * of_outer + inner * of_inner;
        if (is_q || p.cache_dtype == dtype_of<Element>()) {
            Element* const row = static_cast<Element*>(to) + offset;
            if (is_q || is_k) x.store(p, row, step, lane, 1.0f);
            else x.store_loaded(p, row, step, lane);
            continue;
        }
        const float factor = cache_factor(p, head, out, outer, inner, lane, largest);
        if (p.cache_dtype == kE4m3) x.store(p, static_cast<e4m3*>(to) + offset, step, lane, factor);
        else x.store(p, static_cast<int8_t*>(to) + offset, step, lane, factor);
    }
}

}  // namespace rope
