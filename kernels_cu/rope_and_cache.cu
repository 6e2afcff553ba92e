// rope_and_cache.cu: RMS norm of the heads of q and k, rotary embedding, and writes of k and v to
// the cache.
//   y = x / sqrt(mean(x^2) + eps) * weight;  (a, b) = (a cos t - b sin t, b cos t + a sin t) for
//   each pair of y, t = position * inv_freq[pair], or cos t and sin t read from row `position` of
//   a table.  Results are rounded once; 8-bit caches divide by their scale before.
// Each token has the heads of q, then k, then (with a cache) v, numbered in a row.  A group of
// 2^lanes_log2 threads has one head of kTokens tokens at a time.  So what depends on the head alone
// is computed once for all of them.  A block computes each angle of its tokens once.
// Types: Element.  Constants: kVectorWidth, kLoads (rope/head_vector.cuh), kTokens, kTableFloats.
// Launch: grid (p.blocks_per_token * ceil(p.num_tokens / kTokens)), block (kNumThreads).
#include "rope/head.cuh"
#include "rope/token.cuh"

using namespace rope;

KERNEL void rope_and_cache(const Element* q, const Element* k, const Element* v,
                           const int* positions, const float* rotation, const void* q_weight,
                           const void* k_weight, const int* block_table, Element* out, void* k_out,
                           void* v_out, float* k_scale, float* v_scale, const RopeParams p) {
    wait_for_previous_grid();
    SHARED(float, floats, [kTableFloats]);
    SHARED(Slot, slots, [kTokens]);
    const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
    const int run = blockIdx.x / p.blocks_per_token, part = blockIdx.x - run * p.blocks_per_token;
    const int first_token = run * kTokens;
    const int tokens_left = p.num_tokens - first_token;
    const int num_tokens = tokens_left < kTokens ? tokens_left : kTokens;
    Token tokens[kTokens];
    tokens[0] = Token(p, first_token);
#pragma unroll
    for (int i = 1; i < kTokens; ++i) tokens[i] = tokens[i - 1].next(p);
    const int group = int(threadIdx.x) >> p.lanes_log2, groups = kNumThreads >> p.lanes_log2;
    Head head(p, group + part * groups);

    HeadVector vectors[kTokens];
    const auto load = [&] {
        const auto stride = [&](int dim) {
            return head.of(p.q_strides[dim], p.k_strides[dim], p.v_strides[dim]);
        };
        const Element* const from = head.of(q, k, v) + head.index * stride(2);
        const int64_t of_sequence = stride(0), of_token = stride(1);
        const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const bool exists = head.number < p.num_heads && i < num_tokens;
            vectors[i].load(p,
                            from + tokens[i].sequence * of_sequence + tokens[i].number * of_token,
                            step, lane, exists);
        }
    };
    load();

    const bool has_weights = q_weight || k_weight;
    const Tables tables{floats, floats + (has_weights ? 4 * p.num_pairs() : 0)};
    if (has_weights) tables.fill_weights(p, q_weight, k_weight);
    fill_tokens(p, slots, tables, first_token, num_tokens, positions, rotation, block_table);
    sync_block();

#pragma unroll 1
    while (true) {
        const bool is_q = head.is_q, is_k = head.is_k;
        const auto stride = [&](int dim) {
            return head.of(p.out_strides[dim], p.k_out_strides[dim], p.v_out_strides[dim]);
        };
        const int64_t of_head = head.index * stride(2), of_outer = stride(0), of_inner = stride(1);
        const int64_t step = kVectorWidth > 1 ? 1 : stride(3);
        void* const to = is_q ? out : is_k ? k_out : v_out;
        const bool has_norm = is_q ? q_weight != nullptr : is_k && k_weight;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            HeadVector& x = vectors[i];
            x.unpack_pairs(p, lane);
            if (has_weights) x.normalize(p, tables, lane, is_k, has_norm);
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
            const auto scale_stride = [&](int dim) {
                return is_k ? p.k_scale_strides[dim] : p.v_scale_strides[dim];
            };
            const int64_t of_scale =
                outer * scale_stride(0) + inner * scale_stride(1) + head.index * scale_stride(2);
            float* const scales = is_k ? k_scale : v_scale;
            float factor;
            if (p.scales_per_token) {
                const rows::QuantizeScale scale(largest, rows::largest_finite(p.cache_dtype));
                if (lane == 0) scales[of_scale] = scale.decode;
                factor = scale.encode;
            } else {
                factor = 1.0f / (scales ? scales[of_scale] : is_k ? p.k_scale : p.v_scale);
            }
            if (p.cache_dtype == kE4m3)
                x.store(p, static_cast<e4m3*>(to) + offset, step, lane, factor);
            else x.store(p, static_cast<int8_t*>(to) + offset, step, lane, factor);
        }
        head = Head(p, head.number + groups * p.blocks_per_token);
        if (!vote_any(head.number < p.num_heads)) break;
        load();
    }
}
